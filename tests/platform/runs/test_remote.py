"""Run folders at URLs: what lies there is true, nothing here is touched that is not the mirror."""

import threading
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from dbo.platform.cli import main
from dbo.platform.engine.local import LocalEngine
from dbo.platform.errors import InputError, RunError
from dbo.platform.runs.remote import Storage
from dbo.platform.runs.run_folder import read_run
from dbo.platform.runs.runner import run


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the URL leads; the working directory is another folder."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path / "bucket" / "run"


def test_a_run_lands_at_its_url(there: Path, tiny: Any, same: Any, tmp_path: Path) -> None:
    """The folder at the URL is the folder that a run with a path would have made."""
    run(tiny(), f"file://{there}")
    run(tiny(), tmp_path / "plain")
    assert same(there, tmp_path / "plain")
    names = {p.relative_to(there).as_posix() for p in there.rglob("*") if p.is_file()}
    assert {"experiment.yaml", "metrics.jsonl", "state.safetensors", "summary.json"} < names
    assert not [name for name in names if name.startswith(".")]


def test_an_interrupted_repetition_loses_no_line(
    there: Path, tiny: Any, same: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished, repeated, interrupted, resumed: what the first run left behind is not taken for the second's."""
    experiment = tiny(rounds=12, checkpoint_every=3)
    run(experiment, f"file://{there}")
    original = LocalEngine.advance

    def advance(engine: LocalEngine, number: int) -> None:
        if number == 5:
            raise KeyboardInterrupt
        original(engine, number)

    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "advance", advance)
        with pytest.raises(KeyboardInterrupt):
            run(experiment, f"file://{there}")
    run(experiment, f"file://{there}", resume=True)
    run(experiment, tmp_path / "plain")
    assert same(there, tmp_path / "plain")
    assert len(read_run(there).history) == 13


def test_a_second_run_on_one_machine_is_refused(there: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a run holds the mirror nobody else empties it."""
    inside, go_on = threading.Event(), threading.Event()
    original = LocalEngine.advance

    def advance(engine: LocalEngine, number: int) -> None:
        inside.set()
        go_on.wait(20)
        original(engine, number)

    monkeypatch.setattr(LocalEngine, "advance", advance)
    first = threading.Thread(target=run, args=(tiny(), f"file://{there}"))
    first.start()
    assert inside.wait(20)
    with pytest.raises(InputError, match="in use by another run"):
        run(tiny(), f"file://{there}")
    go_on.set()
    first.join()
    assert read_run(there).summary["status"] == "finished"


def test_fetching_removes_nothing(there: Path, tmp_path: Path) -> None:
    """A folder that somebody fetches into keeps what it holds, whether or not there is anything to fetch."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    assert not Storage(f"file://{there}").fetch(mine)
    there.mkdir(parents=True)
    (there / "metrics.jsonl").write_text("")
    assert Storage(f"file://{there}").fetch(mine)
    assert (mine / "thesis.txt").read_text() == "years of work"
    assert (mine / "metrics.jsonl").exists()


def test_names_that_point_outside_are_refused(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key such as run/../../escaped is not written outside of the mirror."""
    storage = Storage(f"file://{there}")
    there.mkdir(parents=True)
    monkeypatch.setattr(storage._files, "find", lambda root: [f"{root}/../../../escaped.txt"])
    with pytest.raises(RunError, match="points outside"):
        storage.pull()
    assert not list(Path.cwd().rglob("escaped.txt"))


def test_an_unknown_protocol_is_told(there: Path, tiny: Any) -> None:
    """One line, before anything is run."""
    with pytest.raises(InputError, match="--out: nosuch://x cannot be used"):
        run(tiny(), "nosuch://x")


def test_what_is_not_a_runs_stays_at_the_url(tiny: Any, there: Path) -> None:
    """Hidden files and folders of somebody else are neither taken over nor removed."""
    (there / ".git").mkdir(parents=True)
    (there / ".git" / "config").write_text("mine")
    run(tiny(), f"file://{there}")
    assert (there / ".git" / "config").read_text() == "mine"


def test_what_is_made_of_a_run_is_at_its_url_too(
    dbo: Any, tiny_overrides: tuple[str, ...], there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report that follows a run: brought there, also after a second start that finds the run finished; nothing else
    is sent again, nothing is removed."""
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


def test_a_report_that_cannot_be_brought_is_told(
    dbo: Any, tiny_overrides: tuple[str, ...], there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is safe: a line, and exit 0."""

    def after(kind: str, folder: Path, quiet: bool) -> None:
        monkeypatch.setattr(Storage, "push", away)

    def away(self: Storage) -> None:
        raise RunError("the bucket is away")

    monkeypatch.setattr(main, "write_outputs", after)
    done = dbo("run", *tiny_overrides, "--out", f"file://{there}", "--quiet")
    assert done.code == 0, done.err
    assert "not with them: the bucket is away" in done.out
