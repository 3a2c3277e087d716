"""What the tests of this room share: a small sweep, the command line in this process, and a Ray cluster."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dbo.algorithms import registry
from dbo.platform import cli, plugins, rooms, yaml_text

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


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str


Command = Callable[..., Done]
Sheet = Callable[..., Path]


@pytest.fixture(autouse=True)
def _plugins_are_forgotten() -> Iterator[None]:
    """What a test's plugin registers is gone when the test ends."""
    registered, loaded = dict(registry.algorithms()), dict(plugins._loaded)
    yield
    for now, before in ((registry._registry, registered), (plugins._loaded, loaded)):
        now.clear()
        now.update(before)


@pytest.fixture
def sheet(tmp_path: Path) -> Sheet:
    """A file with the small sweep, with these changes."""

    def write(**changes: Any) -> Path:
        path = tmp_path / "quick.yaml"
        path.write_text(yaml_text.dump({**QUICK, **changes}), encoding="utf-8")
        return path

    return write


@pytest.fixture
def dbo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """`dbo(...)` in this process, in a folder of its own; reports are other tests' business."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rooms, "after", lambda kind, folder, quiet: print(f"after {kind} {folder}"))

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["dbo", *map(str, arguments)])
        capsys.readouterr()
        code: Any = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return Done(int(code or 0), said.out, said.err)

    return run


@pytest.fixture(scope="session")
def ray() -> Iterator[Any]:
    """The one Ray cluster of the test session, which other rooms' tests may have started already."""
    from dbo.platform.ray_session import connect

    module = connect(None)
    yield module
    module.shutdown()
