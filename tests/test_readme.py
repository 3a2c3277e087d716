"""The README is true: its commands run, its Python runs, its links lead somewhere, its example is the file."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
README = (REPO / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent
COMMANDS = [
    line.partition("#")[0].strip()
    for line in README.splitlines()
    if line.startswith(("    .venv/bin/", "    make "))
]
SERVERS = {"watch", "ui"}
BLOCKS = re.findall(r"```(python|yaml)\n(.*?)```", README, flags=re.DOTALL)


def shortened(command: str) -> list[str]:
    """The command as it stands, with this interpreter's programs and fewer rounds."""
    words = [str(BIN / word.removeprefix(".venv/bin/")) if word.startswith(".venv/bin/") else word
             for word in shlex.split(command)]
    rounds = "rounds=3" if "--from" in words else "rounds=2"           # more than the run that it goes on from
    from_a_file = [rounds] if any(word.endswith(".yaml") for word in words) else []
    return [*(re.sub(r"^rounds=\d+$", rounds, word) for word in words), *from_a_file]


def run(words: list[str], cwd: Path) -> None:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=300, env={**os.environ, "CI": "1"})
    assert done.returncode == 0, f"{words}: {done.stdout[-1500:]}{done.stderr[-1500:]}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(words: list[str], cwd: Path) -> None:
    """A command that serves a page: it says where, and ends when it is told to."""
    server = subprocess.Popen(
        [*words, "--port", str(free_port())], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said = ""
        while "http://127.0.0.1" not in said:
            assert server.stdout is not None
            line = server.stdout.readline()
            assert line, f"{words}: ended without an address: {said}"
            said += line
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0
    finally:
        server.kill()
        server.wait()


def test_both_commands_are_named() -> None:
    """`make run` and `make test` stand in the README and in the Makefile."""
    assert {"make run", "make test"} <= set(COMMANDS)
    makefile = (REPO / "Makefile").read_text()
    assert re.search(r"^run:", makefile, re.MULTILINE)
    assert re.search(r"^test:", makefile, re.MULTILINE)


@pytest.mark.ray
def test_every_command_runs(tmp_path: Path) -> None:
    """All `.venv/bin` commands, in the order in which a reader meets them, in a folder with the repository's docs/."""
    (tmp_path / "docs").symlink_to(REPO / "docs")
    commands = [command for command in COMMANDS if command.startswith(".venv/bin/") and "verify" not in command]
    assert len(commands) >= 6
    for command in commands:
        words = shortened(command)
        if "dashboards.figures" in command:
            words[-1] = str(tmp_path / "compare.png")      # the committed figure is made from the full run
        if words[1] in SERVERS:
            serve(words, tmp_path)
        else:
            run(words, tmp_path)
    assert (tmp_path / "compare.png").stat().st_size > 10_000


@pytest.mark.ray
def test_what_make_run_does(tmp_path: Path) -> None:
    """The Makefile's comparison, with fewer rounds: four algorithms, a table, a folder each."""
    given = re.search(r"^COMPARE\s*\?=\s*(.*)$", (REPO / "Makefile").read_text(), re.MULTILINE)
    assert given is not None
    words = [re.sub(r"^rounds=\d+$", "rounds=2", word) for word in shlex.split(given[1])]
    run([str(BIN / "dbo"), "compare", *words, "tracking.uri=off", "--out", "out"], tmp_path)
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert made >= {"c2dfb", "c2dfb_nc", "madsbo", "mdbo", "compare.csv", "group.json"}


def test_python_blocks_run(tmp_path: Path) -> None:
    """The notebook snippet runs as printed (in process, fewer rounds)."""
    snippet = next(code for kind, code in BLOCKS if kind == "python" and "result.history" in code)
    code = snippet.replace("rounds=20", 'rounds=2, engine={"name": "local"}')
    assert code != snippet
    run([sys.executable, "-c", code], tmp_path)


def test_the_experiment_file_is_valid(tmp_path: Path) -> None:
    """The YAML block is an experiment, and runs."""
    text = next(code for kind, code in BLOCKS if kind == "yaml")
    (tmp_path / "e.yaml").write_text(text)
    run([str(BIN / "dbo"), "run", "e.yaml", "rounds=2", "engine.name=local", "tracking.uri=off", "--quiet"], tmp_path)


def test_the_example_is_the_file() -> None:
    """The algorithm in the README is docs/examples/gossip_penalty.py, to the letter."""
    example = (REPO / "docs" / "examples" / "gossip_penalty.py").read_text(encoding="utf-8").strip()
    assert example in README


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(
    str(path.relative_to(REPO)) for path in sorted((REPO / "docs").rglob("*.md")))])
def test_links_lead_somewhere(page: str) -> None:
    """Every relative link of the documentation names a file that is there."""
    text = (REPO / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", text):
        assert ((REPO / page).parent / target).exists(), f"{page}: {target}"
