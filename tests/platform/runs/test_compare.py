"""Comparisons: what is kept of an earlier start of the same command."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.runs.compare import compare
from dbo.platform.runs.run_folder import read_group
from dbo.platform.runs.schema import CLOSED_FORM_TARGET

Tiny = Callable[..., Experiment]


def pretend_other_library(folder: Path) -> None:
    """Record that the run was started with another NumPy, and remove its seal."""
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "started":
            line["environment"]["numpy"] = "1.0"
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "manifest.json").unlink()
    summary = json.loads((folder / "summary.json").read_text())
    del summary["sealed"]
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def pair(tiny: Tiny) -> list[Experiment]:
    return [tiny(algorithm={"name": name}) for name in ("f2ba", "bome")]


def test_a_finished_run_of_another_environment_is_not_mixed_with_new_ones(
    pair: list[Experiment], tmp_path: Path
) -> None:
    """Refused in one line; kept on request, which is recorded."""
    compare(pair[:1], CLOSED_FORM_TARGET, tmp_path)
    pretend_other_library(tmp_path / "f2ba")
    with pytest.raises(InputError, match=r"f2ba ended with another one: numpy 1\.0 → .*--allow-changed-code"):
        compare(pair, CLOSED_FORM_TARGET, tmp_path)
    assert not (tmp_path / "bome").exists()
    assert len(compare(pair, CLOSED_FORM_TARGET, tmp_path, allow_changed_code=True)) == 2
    assert read_group(tmp_path).changes == ("environment_changed",)


def test_a_complete_comparison_is_shown_in_any_environment(pair: list[Experiment], tmp_path: Path) -> None:
    """Nothing is left to run, so nothing is mixed. Control: in the same environment nothing is recorded."""
    compare(pair, CLOSED_FORM_TARGET, tmp_path)
    for name in ("f2ba", "bome"):
        pretend_other_library(tmp_path / name)
    assert not any(result.is_new for result in compare(pair, CLOSED_FORM_TARGET, tmp_path))
    assert read_group(tmp_path).changes == ()
