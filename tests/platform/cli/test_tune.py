"""`dbo tune` searches, resumes and refuses wrong input in one line."""

from pathlib import Path
from typing import Any

import pytest

from dbo.platform.cli import tune
from dbo.platform.config import presets
from dbo.platform.config.experiment import Experiment

QUICK = ("task=quadratic", "nodes=3", "--trials", "5", "--budget", "150")


def test_presets_are_written_and_used(dbo: Any, tmp_path: Path) -> None:
    """What is searched and what was found, two lines per algorithm, a preset for each, and the command to use them."""
    out = tmp_path / "new" / "steps.yaml"
    done = dbo("tune", *QUICK, "--algorithms", "sldbo,dsgda_gt", "--out", out)
    assert done.code == 0, done.err
    lines = [line for line in done.out.splitlines() if " on quadratic: " in line and "trial " not in line]
    assert [line.split(" on ")[0] for line in lines] == ["sldbo", "sldbo", "dsgda_gt", "dsgda_gt"]
    assert all("5 trials of at most 150 oracle calls" in line for line in lines[::2])
    assert f"presets={out}" in done.out
    content = presets.read_file(out)
    for name in ("sldbo", "dsgda_gt"):
        values = content[name]["quadratic"]["values"]
        used = Experiment(task={"name": "quadratic"}, algorithm={"name": name}, presets=str(out))
        assert values.items() <= used.algorithm.items()


def test_a_long_search_reports_its_progress(dbo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a screen a line per trial, at most one in some seconds; --quiet prints the results alone."""
    monkeypatch.setattr(tune, "_LINE_EVERY", 0.0)
    done = dbo("tune", *QUICK, "algorithm=sldbo", "--out", tmp_path / "a.yaml")
    assert [f"sldbo on quadratic: trial {number} of 5" in done.out for number in (1, 5)] == [True, True]
    assert "sldbo on quadratic: confirming the best, trial 1" in done.out
    quiet = dbo("tune", *QUICK, "algorithm=sldbo", "--out", tmp_path / "b.yaml", "--quiet")
    assert len(quiet.out.splitlines()) == 3
    assert "trial 1 of" not in quiet.out


def test_interrupted_search_is_resumed(dbo: Any, tmp_path: Path) -> None:
    """Logged trials do not run again, the result is the same; without --resume the log is not touched."""
    out, log = tmp_path / "steps.yaml", tmp_path / "steps.jsonl"
    assert dbo("tune", *QUICK, "algorithm=sldbo", "--out", out).code == 0
    values, lines = presets.read_file(out)["sldbo"]["quadratic"]["values"], log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:2]))
    refused = dbo("tune", *QUICK, "algorithm=sldbo", "--out", out)
    assert refused.code == 2
    assert "--resume" in refused.err
    assert log.read_text() == "".join(lines[:2])
    done = dbo("tune", *QUICK, "algorithm=sldbo", "--out", out, "--resume")
    assert f"{len(lines) - 2} trials run" in done.out
    assert presets.read_file(out)["sldbo"]["quadratic"]["values"] == values


def test_search_without_a_stable_trial_fails(dbo: Any, tmp_path: Path) -> None:
    """Exit 1 and the algorithm's name; the preset of the other algorithm is written all the same."""
    done = dbo("tune", *QUICK, "algorithm=sldbo", "algorithm.eta_y=50", "--algorithms", "sldbo,dsgda_gt",
               "--out", tmp_path / "steps.yaml")
    assert done.code == 1
    assert "sldbo on quadratic: no trial is stable" in done.err
    assert list(presets.read_file(tmp_path / "steps.yaml")) == ["dsgda_gt"]


@pytest.mark.parametrize(("arguments", "message"), [
    (("--algorithms", "c2dbf"), "did you mean 'c2dfb'"), (("--algorithms", "mdbo,mdbo"), "--algorithms"),
    (("--trials", "3"), "--trials"), (("--budget", "0"), "--budget"), (("--range", "uper=1:2"), "did you mean 'upper'"),
    (("--out", "steps.json"), "--out"), (("--budget", "1"), "--budget"), (("task=cubic",), "task.name"),
    (("presets=nowhere.yaml",), "presets"),
])
def test_wrong_input_is_refused_in_one_line(
    dbo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    """Exit 2; nothing is written."""
    monkeypatch.chdir(tmp_path)
    done = dbo("tune", "task=quadratic", "nodes=3", *arguments)
    assert done.code == 2, done.err
    assert message in done.err
    assert done.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_foreign_file_is_not_overwritten(dbo: Any, tmp_path: Path) -> None:
    """--out names an experiment by mistake: refused before the first trial."""
    (tmp_path / "experiment.yaml").write_text("nodes: 3\n")
    done = dbo("tune", *QUICK, "--out", tmp_path / "experiment.yaml")
    assert done.code == 2
    assert (tmp_path / "experiment.yaml").read_text() == "nodes: 3\n"
