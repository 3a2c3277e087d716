"""What the commands print: names and values cannot control the terminal."""

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

from dbo.dashboards.watch import server
from dbo.platform.cli import console as printing
from dbo.platform.cli.watch import watch_run
from dbo.platform.errors import NodeFailure
from dbo.platform.runs.runner import run

Command = Callable[..., Any]
RED = "\x1b[31mred\x07"
ESCAPED = r"\x1b[31mred\x07"


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return what the shared console prints: one of the same class takes its place."""
    file = io.StringIO()
    monkeypatch.setattr(printing, "console", type(printing.console)(file=file))
    return file


@pytest.mark.parametrize(("text", "shown"), [
    (RED, ESCAPED), ("a\nb\tc", "a\nb\tc"), ("a\rb", r"a\rb"), ("\x9b31m", r"\x9b31m"), ("\x7f\x00", r"\x7f\x00"),
    ("a\u202eb", r"a\u202eb"), ("a\u2028b", r"a\u2028b"), ("\ud800", r"\ud800"), ("é – 漢 🎉", "é – 漢 🎉"),
])
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    """As `repr` shows them; line breaks, tabs and everything printable stay."""
    assert printing.escape_control(text) == shown
    assert printing.escape_control(shown) == shown


@pytest.mark.parametrize("show", [printing.print_line, printing.warn])
def test_lines_and_warnings_are_escaped(screen: io.StringIO, show: Callable[[str], None]) -> None:
    """A folder or a name with an escape sequence in it."""
    show(f"folder: {RED}")
    assert screen.getvalue() == f"folder: {ESCAPED}\n"


def test_a_password_with_a_control_character_is_redacted(screen: io.StringIO) -> None:
    """A separator inside a password does not end the URL."""
    printing.print_line("http://me:hun\x1cter2@host/x")
    assert screen.getvalue() == "http://***@host/x\n"


def test_tables_are_escaped(screen: io.StringIO) -> None:
    """The shared console escapes whatever a command prints with it."""
    table = Table("a wide column")
    table.add_row(Text(RED))
    printing.console.print(table)
    assert r"\x1b[31mred" in screen.getvalue()
    assert "\x1b" not in screen.getvalue()


@pytest.mark.parametrize("arguments", [
    ("run", f"{RED}.yaml"), ("run", f"{RED}=1"), ("run", f"topology={{name: edges, file: '{RED}'}}"), (RED,),
    ("run", f"plugins=[{RED}.py]"), ("run", "--out", f"nosuch://{RED}"), ("list", RED), ("report", RED),
])
def test_errors_are_escaped(dbo: Command, arguments: tuple[str, ...]) -> None:
    """Names of files, keys, commands and plugins in a one-line error."""
    done = dbo(*arguments)
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert not set(done.err) & {"\x1b", "\x07"}


def test_a_file_name_is_shown_escaped(dbo: Command, tmp_path: Path) -> None:
    """The reader sees which file it is."""
    (tmp_path / RED).write_text("- 1\n")
    assert ESCAPED in dbo("run", RED).err


def test_tracebacks_are_escaped(dbo: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor's traceback and that of a bug may quote anything."""

    def fail(error: Exception) -> Callable[..., None]:
        def raise_(*arguments: Any) -> None:
            raise error
        return raise_

    for error in (NodeFailure([0], 1, "round", RED, RED), ZeroDivisionError(RED)):
        monkeypatch.setattr("dbo.platform.config.overrides.parse", fail(error))
        done = dbo("run", "rounds=1")
        assert done.code == 1
        assert ESCAPED in done.err
        assert not set(done.err) & {"\x1b", "\x07"}


def test_the_report_command_prints_no_escapes(
    dbo: Command, tiny: Callable[..., Any], screen: io.StringIO, tmp_path: Path
) -> None:
    """The name of the page is a user's, or that of a folder of somebody else."""
    folder = run(tiny(rounds=1), tmp_path / "r").folder
    assert dbo("report", folder, "--out", tmp_path / f"{RED}.html").code == 0
    assert ESCAPED in screen.getvalue()
    assert "\x1b" not in screen.getvalue()


def test_the_live_page_prints_no_escapes(
    tiny: Callable[..., Any], screen: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does `dbo watch`."""
    monkeypatch.setattr(server.LivePageServer, "run", lambda self, sockets: None)
    monkeypatch.setattr(server.signal, "signal", lambda *_: None)
    run(tiny(rounds=1), tmp_path / RED)
    watch_run(tmp_path / RED, port=0)
    assert ESCAPED in screen.getvalue()
    assert "\x1b" not in screen.getvalue()


@pytest.mark.parametrize("module", ["dbo.sweeps.tuning", "dbo.dashboards.figures"])
def test_programs_beside_dbo_print_no_escapes(module: str, tmp_path: Path) -> None:
    """Their errors quote what was given."""
    arguments = [RED, "--out", "x.png"] if module.endswith("figures") else ["--tasks", RED]
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, cwd=tmp_path, timeout=120,
        check=False)
    assert done.returncode == 2
    assert ESCAPED in done.stderr
    assert "\x1b" not in done.stderr


def test_too_little_memory_is_one_line(dbo: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with an index of 2·10⁹ asks for a matrix of that width."""
    def fail(*arguments: object) -> None:
        raise MemoryError("Unable to allocate 29.8 GiB")

    monkeypatch.setattr("dbo.platform.runs.preparation.build_graph", fail)
    done = dbo("run", "engine.name=local", "task.name=quadratic", "rounds=1", "tracking.uri=off", "--quiet")
    assert (done.code, done.err) == (1, "dbo: not enough memory: Unable to allocate 29.8 GiB\n")
