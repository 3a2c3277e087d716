"""What all tests share: the command line, and the one way to skip a test for want of something a machine may not have.

A test that needs a browser or the shared data asks for it:

    def test_report_opens(require: Require) -> None:
        require("browser", shutil.which("chromium") is not None)

Where it is missing the test is skipped, unless DBO_REQUIRE names it (comma-separated): then the test fails. Continuous
integration sets DBO_REQUIRE, so a machine that lost its browser cannot pass by skipping.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest

from dbo.algorithms import registry
from dbo.platform.cli import main
from dbo.platform.config import plugins

Need = Literal["browser", "data"]
NEEDS: dict[str, str] = {"browser": "a browser", "data": "the shared data"}


class Require(Protocol):
    def __call__(self, need: Need, available: bool) -> None: ...


def pytest_configure() -> None:
    """A misspelt name would require nothing, in silence."""
    unknown = required() - NEEDS.keys()
    if unknown:
        raise pytest.UsageError(f"DBO_REQUIRE: unknown {sorted(unknown)}, allowed are {sorted(NEEDS)}")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests on Ray share one cluster, so they stay in one process; the others go to whichever is free.

    Not when all are collected: pytest-xdist, which reads the groups then, may come first.
    """
    if item.get_closest_marker("ray"):
        item.add_marker(pytest.mark.xdist_group("ray"))


@pytest.fixture
def require() -> Require:
    """Skips the test if what it needs is not available; fails it if DBO_REQUIRE promised that it would be."""
    return check_need


def check_need(need: Need, available: bool) -> None:
    if need not in NEEDS:
        raise ValueError(f"unknown need {need!r}, allowed are {sorted(NEEDS)}")
    if available:
        return
    message = f"needs {NEEDS[need]}, which is not here"
    if need in required():
        pytest.fail(f"{message} although DBO_REQUIRE names it", pytrace=False)
    pytest.skip(message)


def required() -> set[str]:
    return {name.strip() for name in os.environ.get("DBO_REQUIRE", "").split(",")} - {""}


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


@pytest.fixture
def dbo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`dbo(...)` in this process, which is quick."""

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["dbo", *map(str, arguments)])
        capsys.readouterr()
        code: Any = 0
        try:
            main.main()
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
            [sys.executable, "-c", "from dbo.platform.cli.main import main; main()", *arguments],
            cwd=cwd, capture_output=True, text=True, timeout=120, check=False, **more,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run
