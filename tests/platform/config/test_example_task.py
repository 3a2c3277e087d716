"""The documented example of a user's task: short, the tutorial's own file, and runnable as written."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tasks.datasets.test_mnist import write_files

from dbo.platform.config.experiment import Experiment
from dbo.platform.runs.runner import run

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "docs" / "examples" / "cnn_task.py"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the documented experiment on generated images, with few nodes and rounds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_files(tmp_path / "data")
    return {
        "nodes": 3, "rounds": 2, "batch_size": 8, "engine": {"name": "local"}, "plugins": [str(EXAMPLE)],
        "task": {"name": "cnn_representation"}, "data_dir": str(tmp_path / "data"), "tracking": {"uri": "off"},
        "partition": {"name": "iid"}, "algorithm": {"name": "c2dfb", "inner_steps": 2, "eta_in": 0.1, "eta_out": 0.01},
    }


def test_example_is_short() -> None:
    """A task fits in forty lines, imports and documentation included."""
    assert len(EXAMPLE.read_text().splitlines()) <= 40


def test_the_tutorial_contains_the_file() -> None:
    """The chapter includes exactly this file, and nothing else as code."""
    page = ROOT / "docs" / "tutorial" / "own-task.md"
    included = re.findall(r"```\{literalinclude\} (\S+)\n:language: python\n```", page.read_text(encoding="utf-8"))
    assert [(page.parent / name).resolve() for name in included] == [EXAMPLE]


def test_the_command_in_the_file_is_valid() -> None:
    """The experiment of its docstring can be built from the repository's root."""
    (command,) = [line.split() for line in EXAMPLE.read_text().splitlines() if line.strip().startswith("dbo run")]
    overrides = [word.replace("docs/", f"{ROOT}/docs/") for word in command[2:]]
    experiment = Experiment.read(None, overrides)
    assert (experiment.task["name"], experiment.task["dataset"]) == ("cnn_representation", "mnist")


def test_example_runs_and_returns_its_modules(example: dict[str, Any], tmp_path: Path) -> None:
    """Mini-batches of generated images move x; the metrics are the task's."""
    result = run(Experiment(**example), tmp_path / "run")
    assert result.status == "finished"
    assert np.isfinite(result.history["test_loss"]).all()
    start, end = (result.history["lower_loss"].iloc[at] for at in (0, -1))
    assert end != start
    assert result.model.x[1].weight.shape == (8, 1, 5, 5)
    assert result.model.y["head"].shape == (32, 10)


def test_a_resumed_run_has_the_same_bits(example: dict[str, Any], tmp_path: Path) -> None:
    """One round, extended to two from its checkpoint, equals two rounds without a stop."""
    whole = run(Experiment(**example), tmp_path / "whole")
    run(Experiment(**{**example, "rounds": 1}), tmp_path / "half")
    extended = run(Experiment(**example), tmp_path / "rest", start_from=tmp_path / "half")
    for name in ("x", "y"):
        np.testing.assert_array_equal(extended.state[name], whole.state[name])
