"""`dbo check`, and the commands that refuse a damaged run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbo.platform.runs.runner import run

Command = Callable[..., Any]


@pytest.fixture
def two_runs(dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path) -> Path:
    """A comparison of two runs."""
    names = [override for override in tiny_overrides if not override.startswith("algorithm")]
    done = dbo("compare", *names, "--algorithms", "f2ba,bome", "--out", tmp_path / "c", "--quiet")
    assert done.code == 0, done.err
    return tmp_path / "c"


def test_intact_runs_exit_0(dbo: Command, two_runs: Path) -> None:
    """A line per run of a comparison, found through its group.json, or by searching."""
    for place in (two_runs, two_runs.parent):
        done = dbo("check", place)
        assert (done.code, done.err) == (0, "")
        assert done.out.count(": intact\n") == 2
    assert dbo("check", two_runs, "--quiet").out == ""


def test_a_damaged_run_exits_1_and_is_repaired(dbo: Command, two_runs: Path) -> None:
    """The line names the run and the file; after --repair the check is clean."""
    (two_runs / "bome" / "state.safetensors").unlink()
    done = dbo("check", two_runs)
    assert done.code == 1
    assert f"{two_runs / 'bome'}: damaged: state.safetensors is missing\n" in done.out
    assert done.err == "dbo: 1 of 2 runs are damaged; repair with dbo check --repair\n"
    assert dbo("check", two_runs, "--repair").code == 0
    assert dbo("check", two_runs).code == 0


def test_what_cannot_be_repaired_exits_1(dbo: Command, two_runs: Path) -> None:
    """With the reason."""
    (two_runs / "bome" / "metrics.jsonl").write_text("")
    done = dbo("check", "--repair", two_runs)
    assert done.code == 1
    assert "no checkpoint from before the damage is left" in done.out


def test_a_folder_without_runs_is_refused(dbo: Command, tmp_path: Path) -> None:
    """Wrong input, not an intact run."""
    assert dbo("check", tmp_path).code == 2
    assert dbo("check", tmp_path / "nowhere").err == f"dbo: {tmp_path / 'nowhere'}: no such folder\n"


@pytest.mark.parametrize("command", ["report", "sync"])
def test_readers_refuse_a_damaged_run(dbo: Command, tiny: Any, tmp_path: Path, command: str) -> None:
    """One line that names the file. Control: the intact run is accepted."""
    options = ["--out", str(tmp_path / "page.html")] if command == "report" else ["--uri", f"sqlite:///{tmp_path}/m.db"]
    folder = run(tiny(), tmp_path / "r").folder
    if command == "report":                 # MLflow takes seconds
        assert dbo(command, folder, *options).code == 0
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text.replace('"packets": ', '"packets": 1', 1))
    done = dbo(command, folder, *options)
    assert done.code == 2
    assert done.err.startswith(f"dbo: {folder}/metrics.jsonl has ")
    assert done.err.count("\n") == 1


def test_an_empty_summary_is_not_reported_as_other_code(
    dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """A summary of 0 bytes is restored on --resume; without a manifest, the run resumes from its checkpoint."""
    arguments = ("run", *tiny_overrides, "--out", tmp_path / "r", "--quiet")
    assert dbo(*arguments).code == 0
    (tmp_path / "r" / "summary.json").write_text("")
    assert dbo(*arguments, "--resume").code == 0
    assert dbo("check", tmp_path / "r").code == 0
    (tmp_path / "r" / "summary.json").write_text("")
    (tmp_path / "r" / "manifest.json").unlink()
    assert dbo(*arguments, "--resume").code == 0
    assert dbo("check", tmp_path / "r").code == 0
