"""Fixtures of the platform's tests: tiny experiments, and a Ray cluster."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbo.platform.config.experiment import Experiment
from dbo.platform.runs.run_folder import read_metrics
from dbo.platform.runs.schema import CLOCKS

# Two checkpoints are what an interrupted run has: many tests make one by removing the summary of a finished run.
TINY: dict[str, Any] = {
    "nodes": 4, "rounds": 6, "checkpoint_every": 2, "keep_checkpoints": 2, "dtype": "float64",
    "engine": {"name": "local"},
    "task": {"name": "quadratic", "dim_x": 4, "dim_y": 8},
    "algorithm": {"name": "c2dfb", "inner_steps": 2, "eta_in": 0.3, "eta_out": 0.1, "gamma_in": 0.3},
    "tracking": {"uri": "off"},
}
TINY_OVERRIDES = (
    "nodes=4", "rounds=6", "checkpoint_every=2", "keep_checkpoints=2", "dtype=float64", "engine.name=local",
    "task={name: quadratic, dim_x: 4, dim_y: 8}",
    "algorithm={name: c2dfb, inner_steps: 2, eta_in: 0.3, eta_out: 0.1, gamma_in: 0.3}", "tracking.uri=off",
)


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Experiment]:
    """Return a function: a quadratic on a ring of four for six rounds, with these changes."""
    return lambda **changes: Experiment(**{**TINY, **changes})


@pytest.fixture(scope="session")
def tiny_overrides() -> tuple[str, ...]:
    """The same experiment on the command line."""
    return TINY_OVERRIDES


@pytest.fixture
def same() -> Callable[[Path, Path], bool]:
    """Whether two runs are equal to the last bit, clocks aside."""

    def values(folder: Path) -> list[dict[str, Any]]:
        return [{k: v for k, v in r.items() if k not in CLOCKS} for r in read_metrics(folder / "metrics.jsonl")]

    def compare(one: Path, other: Path) -> bool:
        alike = all((one / f).read_bytes() == (other / f).read_bytes() for f in ("state.safetensors", "nodes.jsonl"))
        return alike and values(one) == values(other)

    return compare
