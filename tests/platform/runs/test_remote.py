"""Run folders at URLs: the URL is authoritative, and only the local mirror is changed."""

import threading
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from dbo.platform.cli import run as run_command
from dbo.platform.engine.local import LocalEngine
from dbo.platform.errors import InputError, RunError
from dbo.platform.runs.remote import RemoteFolder
from dbo.platform.runs.run_folder import read_run
from dbo.platform.runs.runner import run


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder behind the URL; the working directory is another one."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path / "bucket" / "run"


def test_run_is_stored_at_its_url(there: Path, tiny: Any, same: Any, tmp_path: Path) -> None:
    """The folder at the URL equals that of a run with a path."""
    run(tiny(), f"file://{there}")
    run(tiny(), tmp_path / "plain")
    assert same(there, tmp_path / "plain")
    names = {p.relative_to(there).as_posix() for p in there.rglob("*") if p.is_file()}
    assert {"experiment.yaml", "metrics.jsonl", "state.safetensors", "summary.json"} < names
    assert [name for name in names if name.startswith(".")] == [".lease/00000001.json"]


def test_interrupted_repetition_loses_no_line(
    there: Path, tiny: Any, same: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished, repeated, interrupted, resumed: files of the first run are not taken for those of the second."""
    experiment = tiny(rounds=12, checkpoint_every=3)
    run(experiment, f"file://{there}")
    original = LocalEngine.run_round

    def advance(engine: LocalEngine, number: int) -> None:
        if number == 5:
            raise KeyboardInterrupt
        original(engine, number)

    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "run_round", advance)
        with pytest.raises(KeyboardInterrupt):
            run(experiment, f"file://{there}")
    run(experiment, f"file://{there}", resume=True)
    run(experiment, tmp_path / "plain")
    assert same(there, tmp_path / "plain")
    assert len(read_run(there).history) == 13


def test_a_second_run_on_one_machine_is_refused(there: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a run locks the mirror no other process empties it."""
    inside, proceed = threading.Event(), threading.Event()
    original = LocalEngine.run_round

    def advance(engine: LocalEngine, number: int) -> None:
        inside.set()
        proceed.wait(20)
        original(engine, number)

    monkeypatch.setattr(LocalEngine, "run_round", advance)
    first = threading.Thread(target=run, args=(tiny(), f"file://{there}"))
    first.start()
    assert inside.wait(20)
    with pytest.raises(InputError, match="in use by another run"):
        run(tiny(), f"file://{there}")
    proceed.set()
    first.join()
    assert read_run(there).summary["status"] == "finished"


def test_fetching_removes_nothing(there: Path, tmp_path: Path) -> None:
    """The target folder keeps its files, whether or not there is anything to fetch."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    assert not RemoteFolder(f"file://{there}").fetch(mine)
    there.mkdir(parents=True)
    (there / "metrics.jsonl").write_text("")
    assert RemoteFolder(f"file://{there}").fetch(mine)
    assert (mine / "thesis.txt").read_text() == "years of work"
    assert (mine / "metrics.jsonl").exists()


def test_names_that_point_outside_are_refused(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key such as run/../../escaped is not written outside of the mirror."""
    remote = RemoteFolder(f"file://{there}")
    there.mkdir(parents=True)
    monkeypatch.setattr(remote._files, "find", lambda root: [f"{root}/../../../escaped.txt"])
    with pytest.raises(RunError, match="points outside"):
        remote.pull()
    assert not list(Path.cwd().rglob("escaped.txt"))


def test_unknown_protocol_is_refused(there: Path, tiny: Any) -> None:
    """One line, before anything runs."""
    with pytest.raises(InputError, match="--out: nosuch://x cannot be used"):
        run(tiny(), "nosuch://x")


def test_foreign_files_stay_at_the_url(tiny: Any, there: Path) -> None:
    """Hidden files and folders are neither downloaded nor removed."""
    (there / ".git").mkdir(parents=True)
    (there / ".git" / "config").write_text("mine")
    run(tiny(), f"file://{there}")
    assert (there / ".git" / "config").read_text() == "mine"


def test_report_is_uploaded_to_the_url(
    dbo: Any, tiny_overrides: tuple[str, ...], there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a second start that finds the run finished; nothing else is uploaded again or removed."""
    sent: list[str] = []
    put = LocalFileSystem.put_file

    def seen(self: Any, local: str, remote: str, **more: Any) -> Any:
        sent.append(Path(local).name)
        return put(self, local, remote, **more)

    monkeypatch.setattr(LocalFileSystem, "put_file", seen)
    for start in ((), ("--resume",)):
        sent.clear()
        done = dbo("run", *tiny_overrides, "--out", f"file://{there}", "--quiet", *start)
        assert done.code == 0, done.err
        assert "</html>" in (there / "report.html").read_text()
        assert sent.count("report.html") == 1
        assert sent.count("state.safetensors") == (0 if start else 1)
        assert read_run(there).summary["status"] == "finished"
        (there / "report.html").unlink()


def test_failed_upload_of_the_report_is_a_warning(
    dbo: Any, tiny_overrides: tuple[str, ...], there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run itself is complete: one line, and exit 0."""

    def after(kind: str, folder: Path, quiet: bool) -> None:
        monkeypatch.setattr(RemoteFolder, "push", away)

    def away(self: RemoteFolder) -> None:
        raise RunError("the bucket is away")

    monkeypatch.setattr(run_command, "write_outputs", after)
    done = dbo("run", *tiny_overrides, "--out", f"file://{there}", "--quiet")
    assert done.code == 0, done.err
    assert ": the bucket is away" in done.out
