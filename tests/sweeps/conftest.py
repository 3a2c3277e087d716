"""Fixtures of the sweep tests: a small sweep, the command line, and a Ray cluster."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbo.platform.cli import sweep
from dbo.platform.config import yaml_io

QUICK: dict[str, Any] = {
    "name": "quick",
    "experiment": {
        "nodes": 4, "rounds": 6, "checkpoint_every": 2, "dtype": "float64",
        "task": {"name": "quadratic", "dim_x": 4, "dim_y": 8},
        "algorithm": {"name": "c2dfb", "inner_steps": 2, "eta_in": 0.3, "eta_out": 0.1, "gamma_in": 0.3},
        "tracking": {"uri": "off"},
    },
    "axes": {"algorithm.inner_steps": [1, 2], "seed": [0, 1]},
    "metric": "upper_loss",
    "target": "direction_norm=0.5",
}
SweepFile = Callable[..., Path]


@pytest.fixture
def sweep_file(tmp_path: Path) -> SweepFile:
    """Write the small sweep with these changes and return its path."""

    def write(**changes: Any) -> Path:
        path = tmp_path / "quick.yaml"
        path.write_text(yaml_io.dump({**QUICK, **changes}), encoding="utf-8")
        return path

    return write


@pytest.fixture
def dbo(dbo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Run a command in a folder of its own, without its report, which other tests cover."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "write_outputs", lambda kind, folder, quiet: print(f"after {kind} {folder}"))
    return dbo
