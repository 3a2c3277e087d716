"""What the tests of this room share: a small sweep, and a Ray cluster."""

from collections.abc import Callable, Iterator
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
    "target": "hypergradient_norm=0.5",
}
Sheet = Callable[..., Path]


@pytest.fixture
def sheet(tmp_path: Path) -> Sheet:
    """A file with the small sweep, with these changes."""

    def write(**changes: Any) -> Path:
        path = tmp_path / "quick.yaml"
        path.write_text(yaml_io.dump({**QUICK, **changes}), encoding="utf-8")
        return path

    return write


@pytest.fixture
def dbo(dbo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """In a folder of its own; reports are other tests' business."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "write_outputs", lambda kind, folder, quiet: print(f"after {kind} {folder}"))
    return dbo


@pytest.fixture(scope="session")
def ray() -> Iterator[Any]:
    """The one Ray cluster of the test session, which other packages' tests may have started already."""
    from dbo.platform.engine.ray_session import connect

    module = connect(None)
    yield module
    module.shutdown()
