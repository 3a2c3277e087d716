"""Fixtures of all tests: the command line, and `require` for resources that a machine may not have.

A test that needs a browser or the shared data requests it:

    def test_report_opens(require: Require) -> None:
        require("browser", shutil.which("chromium") is not None)

Where it is missing the test is skipped, unless DBO_REQUIRE names it (comma-separated): then the test fails. Continuous
integration sets DBO_REQUIRE, so a machine without a browser cannot pass by skipping.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import hypothesis
import pytest

from dbo import components
from dbo.platform.cli import main
from dbo.platform.config import plugins

Resource = Literal["browser", "data", "namespaces", "postgresql"]
RESOURCES: dict[str, str] = {
    "browser": "a browser", "data": "the shared data", "namespaces": "network namespaces (root and iproute2)",
    "postgresql": "PostgreSQL, as root",
}


class Require(Protocol):
    def __call__(self, resource: Resource, available: bool) -> None: ...


def pytest_configure() -> None:
    """Refuse an unknown name in DBO_REQUIRE, which would otherwise have no effect."""
    unknown = read_required() - RESOURCES.keys()
    if unknown:
        raise pytest.UsageError(f"DBO_REQUIRE: unknown {sorted(unknown)}, allowed are {sorted(RESOURCES)}")


# `make test` is deterministic: property tests try the same examples every time. `make test-slow` explores at random.
hypothesis.settings.register_profile("repeat", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", max_examples=500, deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Group the tests on Ray for pytest-xdist, and mark property tests.

    Tests that use the session's cluster stay in one process. Those that start clusters of their own go file by file to
    whichever process is free. This must happen per item: when all items are collected, pytest-xdist may read the
    groups first.
    """
    if item.get_closest_marker("ray"):
        shared = "ray" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("ray" if shared else f"ray {item.path.stem}"))
    if hypothesis.is_hypothesis_test(getattr(item, "obj", None)):
        item.add_marker(pytest.mark.property)


@pytest.fixture(scope="session")
def ray() -> Iterator[Any]:
    """The Ray cluster of the test session; its actors are reused between runs."""
    from dbo.platform.engine.placement import reuse_actors
    from dbo.platform.engine.ray_session import connect

    module = connect(None)
    with reuse_actors():
        yield module
    module.shutdown()


@pytest.fixture(scope="session")
def require() -> Require:
    """Skip the test if a resource is not available; fail it if DBO_REQUIRE names that resource."""
    return require_resource


def require_resource(resource: Resource, available: bool) -> None:
    if resource not in RESOURCES:
        raise ValueError(f"unknown resource {resource!r}, allowed are {sorted(RESOURCES)}")
    if available:
        return
    message = f"needs {RESOURCES[resource]}, which is not here"
    if resource in read_required():
        pytest.fail(f"{message} although DBO_REQUIRE names it", pytrace=False)
    pytest.skip(message)


def read_required() -> set[str]:
    return {name.strip() for name in os.environ.get("DBO_REQUIRE", "").split(",")} - {""}


@dataclass(frozen=True)
class Completed:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


Command = Callable[..., Completed]


@pytest.fixture(autouse=True)
def _restore_registries() -> Iterator[None]:
    """Remove what a test's plugins have registered."""
    tables = [registry._found for registry in components.all_registries()] + [plugins._loaded]
    before = [dict(table) for table in tables]
    yield
    for table, old in zip(tables, before, strict=True):
        for name in table.keys() - old.keys():
            if name not in old and not _is_built_in(name):
                del table[name]
        table.update(old)
    plugins._shipped.clear()


def _is_built_in(name: str) -> bool:
    return any(registry.is_built_in(name) for registry in components.all_registries())


@pytest.fixture
def dbo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `dbo ...` in this process, which is quick."""

    def run(*arguments: object) -> Completed:
        monkeypatch.setattr(sys, "argv", ["dbo", *map(str, arguments)])
        capsys.readouterr()
        code: Any = 0
        try:
            main.main()
        except SystemExit as end:
            code = end.code
        captured = capsys.readouterr()
        return Completed(int(code or 0), captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def dbo_process() -> Command:
    """Run `dbo ...` in its own process, as a user does."""

    def run(*arguments: str, cwd: Path, **options: Any) -> Completed:
        done = subprocess.run(
            [sys.executable, "-c", "from dbo.platform.cli.main import main; main()", *arguments],
            cwd=cwd, capture_output=True, text=True, timeout=120, check=False, **options,
        )
        return Completed(done.returncode, done.stdout, done.stderr)

    return run
