"""What the tests of this room share: tiny experiments, and the command line in this process and in another."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dbo.algorithms import registry
from dbo.platform import cli, plugins
from dbo.platform.experiment import Experiment
from dbo.platform.records import CLOCKS, read_metrics

TINY: dict[str, Any] = {
    "nodes": 4, "rounds": 6, "checkpoint_every": 2, "dtype": "float64", "engine": {"name": "local"},
    "task": {"name": "quadratic", "dim_x": 4, "dim_y": 8},
    "algorithm": {"name": "c2dfb", "inner_steps": 2, "eta_in": 0.3, "eta_out": 0.1, "gamma_in": 0.3},
    "tracking": {"uri": "off"},
}
TINY_OVERRIDES = (
    "nodes=4", "rounds=6", "checkpoint_every=2", "dtype=float64", "engine.name=local",
    "task={name: quadratic, dim_x: 4, dim_y: 8}",
    "algorithm={name: c2dfb, inner_steps: 2, eta_in: 0.3, eta_out: 0.1, gamma_in: 0.3}", "tracking.uri=off",
)


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture(autouse=True)
def _plugins_are_forgotten() -> Iterator[None]:
    """What a test's plugin registers is gone when the test ends."""
    registered, loaded = dict(registry.algorithms()), dict(plugins._loaded)
    yield
    for now, before in ((registry._registry, registered), (plugins._loaded, loaded)):
        now.clear()
        now.update(before)


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Experiment]:
    """A quadratic on a ring of four for six rounds, with these changes."""
    return lambda **changes: Experiment(**{**TINY, **changes})


@pytest.fixture(scope="session")
def tiny_overrides() -> tuple[str, ...]:
    """The same experiment on the command line."""
    return TINY_OVERRIDES


@pytest.fixture
def dbo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`dbo(...)` in this process, which is quick."""

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["dbo", *arguments])
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
def dbo_process() -> Command:
    """`dbo(...)` in a process of its own, as a user has it."""

    def run(*arguments: str, cwd: Path, **more: Any) -> Done:
        done = subprocess.run(
            [sys.executable, "-c", "from dbo.platform.cli import main; main()", *arguments],
            cwd=cwd, capture_output=True, text=True, timeout=120, check=False, **more,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def ray() -> Iterator[Any]:
    """The one Ray cluster of the test session; its actors wait between runs."""
    from dbo.platform.ray_session import connect
    from dbo.platform.seats import waiting_room

    module = connect(None)
    with waiting_room():
        yield module
    module.shutdown()


@pytest.fixture
def same() -> Callable[[Path, Path], bool]:
    """Whether two runs are equal to the last bit, clocks aside."""

    def values(folder: Path) -> list[dict[str, Any]]:
        return [{k: v for k, v in r.items() if k not in CLOCKS} for r in read_metrics(folder / "metrics.jsonl")]

    def compare(one: Path, other: Path) -> bool:
        alike = all((one / f).read_bytes() == (other / f).read_bytes() for f in ("state.safetensors", "nodes.jsonl"))
        return alike and values(one) == values(other)

    return compare
