"""Which package may import what. The table below is the rule; `violations` reads a file's syntax tree and applies it.

Every import counts: at the top, inside a function, under `if TYPE_CHECKING`, relative, and `import_module("...")`.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Rule:
    dbo: tuple[str, ...]                          # what it may import of our own code, with everything below
    libraries: frozenset[str] | None = None       # the third-party packages it may import; None: any
    never: frozenset[str] = frozenset()           # not even if the rest allows it


ARRAYS = frozenset({"array_api_compat", "numba", "threadpoolctl", "numpy", "scipy", "sklearn", "torch", "torchvision"})
LEAVES = ("dbo.components", "dbo.parameters", "dbo.version", "dbo.platform.errors", "dbo.platform.regular_files")
COMMON = ("dbo.components", "dbo.parameters", "dbo.threads")      # of tasks and algorithms
NETWORK = (*LEAVES, "dbo.platform.network", "dbo.algorithms.api")
CONFIG = (
    *LEAVES, "dbo.platform.config", "dbo.platform.network.topology", "dbo.algorithms.api", "dbo.algorithms.registry",
    "dbo.algorithms.compression", "dbo.tasks.api", "dbo.tasks.registry", "dbo.tasks.partitions",
)
ENGINE = (*CONFIG, *NETWORK, "dbo.platform.engine", "dbo.algorithms.kernels", "dbo.tasks.kernels")
RUNS = (*ENGINE, "dbo.platform.runs")
# A recorded run is its files: their schema, the folder, its seal, and the statistics over several of them. `atomic_io`
# writes a file beside them, such as report.html; it imports only the standard library.
RECORDED = (
    *LEAVES, "dbo.platform.runs.schema", "dbo.platform.runs.run_folder", "dbo.platform.runs.statistics",
    "dbo.platform.runs.atomic_io", "dbo.platform.runs.seal", "dbo.platform.runs.node_lines",
    "dbo.platform.config.redact", "dbo.platform.config.terminal", "dbo.platform.config.tracking_uri",
)
RULES = {
    "dbo/parameters.py": Rule(dbo=(), libraries=frozenset()),
    "dbo/components.py": Rule(dbo=(), libraries=frozenset()),
    "dbo/threads.py": Rule(dbo=(), libraries=frozenset()),
    "dbo/version.py": Rule(dbo=(), libraries=frozenset()),
    "tasks": Rule(dbo=("dbo.tasks", *COMMON), libraries=ARRAYS),
    # asyncio: readers expect an event loop where they see `await`; there is none, the engine drives by hand.
    "algorithms": Rule(dbo=("dbo.algorithms", *COMMON), libraries=ARRAYS, never=frozenset({"asyncio"})),
    "platform/errors.py": Rule(dbo=(), libraries=frozenset()),
    "platform/regular_files.py": Rule(dbo=(), libraries=frozenset()),
    "platform/network": Rule(dbo=NETWORK),
    "platform/config": Rule(dbo=CONFIG, never=frozenset({"ray", "mlflow"})),
    "platform/engine": Rule(dbo=ENGINE, never=frozenset({"mlflow"})),
    "platform/runs": Rule(dbo=RUNS, never=frozenset({"mlflow"})),
    "platform/verify": Rule(dbo=(*RUNS, "dbo.platform.verify")),
    "platform/tracking": Rule(
        dbo=(*RECORDED, "dbo.platform.tracking", "dbo.dashboards.palette"), never=frozenset({"ray"})),
    "platform/cli": Rule(dbo=("dbo",)),
    "platform/experiment.py": Rule(dbo=("dbo.platform.config.experiment",), libraries=frozenset()),
    "platform/run.py": Rule(dbo=("dbo.platform.runs.runner",), libraries=frozenset()),
    "sweeps": Rule(dbo=(*RUNS, "dbo.sweeps")),
    # A dashboard reads files, so it needs neither a cluster nor a tracking server.
    "dashboards": Rule(
        dbo=(*RECORDED, "dbo.platform.runs.replay", "dbo.platform.network.timing", "dbo.dashboards"),
        never=frozenset({"ray", "mlflow"})),
    "dbo": Rule(dbo=("dbo",)),
}
# From the repo root a package folder can also be found as a top-level name, which would load its modules twice.
BARE_PACKAGES = frozenset({"algorithms", "dashboards", "sweeps", "tasks"})


def imported(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of everything that a module of `package` imports."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                base = ".".join([*above, *([module] if module else [])])
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)) | ast.JoinedStr(values=[ast.Constant(value=str(name)), *_]), *_],
            ):
                yield node.lineno, name


def allowed(name: str, rule: Rule) -> bool:
    top = name.partition(".")[0]
    if top in rule.never or top in BARE_PACKAGES:
        return False
    if top == "dbo":
        return any(name == own or name.startswith(own + ".") for own in rule.dbo)
    return top in sys.stdlib_module_names or rule.libraries is None or top in rule.libraries


def rule_for(file: Path) -> str:
    """The most specific entry of the table for a file."""
    name = file.as_posix()
    return max((key for key in RULES if name == key or name.startswith(f"{key}/")), key=len)


def violations(source: str, file: Path) -> list[str]:
    """What `source`, read as the module at `file` (relative to the root), imports against the rule."""
    key = rule_for(file)
    package = ".".join(file.parent.parts if file.parts[0] == "dbo" else ("dbo", *file.parent.parts))
    return [
        f"{file}:{line} {key} may not import {name}"
        for line, name in imported(ast.parse(source, str(file)), package)
        if not allowed(name, RULES[key])
    ]


FILES = sorted(
    file.relative_to(ROOT)
    for folder in ("algorithms", "dashboards", "dbo", "platform", "sweeps", "tasks")
    for file in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("key", RULES)
def test_package_imports_only_what_it_may(key: str) -> None:
    """Every module keeps to the table."""
    files = [file for file in FILES if rule_for(file) == key]
    assert files
    assert [found for file in files for found in violations((ROOT / file).read_text(encoding="utf-8"), file)] == []


def test_platform_holds_only_sub_packages_leaves_and_compatibility_imports() -> None:
    """What is not in the table would be bound by no rule."""
    found = {file.name for file in (ROOT / "platform").glob("*.py")}
    assert found == {"errors.py", "regular_files.py", "experiment.py", "run.py"}


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("tasks/problems", "import ray"),
        ("tasks", "import networkx"),
        ("tasks", "from dbo.algorithms.protocol import Shard"),
        ("algorithms/methods", "import asyncio"),
        ("algorithms", "from asyncio import gather"),
        ("algorithms", "import yaml"),
        ("algorithms", "import dbo.tasks.problems.quadratic"),
        ("algorithms", "from ..tasks import quadratic"),
        ("algorithms", "from algorithms.protocol import Array"),
        ("platform/config", "from dbo.platform.engine.ray_engine import RayEngine"),
        ("platform/config", "from dbo.platform.runs import runner"),
        ("platform/config", "from dbo.platform.network import packet"),
        ("platform/config", "from dbo.algorithms.methods.c2dfb import c2dfb"),
        ("platform/config", "import_module('dbo.algorithms.methods.c2dfb')"),
        ("platform/config", "importlib.import_module(f'dbo.tasks.problems.{name}')"),
        ("platform/network", "from dbo.platform.config import paths"),
        ("platform/network", "from dbo.algorithms.kernels import fused"),
        ("platform/engine", "from dbo.platform.runs.run_folder import RunFolder"),
        ("platform/engine", "from dbo.algorithms import *"),
        ("platform/engine", "import dbo.algorithms"),
        ("platform/runs", "from dbo.platform.cli import console"),
        ("platform/runs", "from dbo import algorithms"),
        ("platform/runs", "from dbo.sweeps import grid"),
        ("platform/runs", "import tasks.registry"),
        ("platform/tracking", "from dbo.platform.runs.runner import run"),
        ("platform/tracking", "from dbo.platform.config import experiment"),
        ("platform/verify", "from dbo.platform.tracking import client"),
        ("sweeps", "from dbo.platform.cli.submit import submit"),
        ("sweeps", "import dbo.dashboards"),
        ("dashboards", "import mlflow.tracking"),
        ("dashboards/charts", "from ray import tune"),
        ("dashboards", "from dbo.platform.runs.runner import run"),
        ("dashboards", "from dbo.platform.runs import compare"),
    ],
)
def test_planted_import_is_found(folder: str, line: str) -> None:
    """The check can fail: each forbidden import is reported, wherever in the file it stands."""
    for where in ("{}", "if TYPE_CHECKING:\n    {}", "def late():\n    if condition:\n        {}"):
        assert len(violations(where.format(line) + "\n", Path(folder, "planted.py"))) == 1, where


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("tasks", "import scipy.sparse, torch"),
        ("tasks", "from . import partitions"),
        ("tasks", "from dbo.parameters import param"),
        ("algorithms", "import_module(f'dbo.algorithms.methods.{name}')"),
        ("algorithms", "from zlib import crc32"),
        ("platform/config", "from dbo.algorithms import registry"),
        ("platform/config", "from dbo.platform.network.topology import TOPOLOGIES"),
        ("platform/config", "import dbo.tasks.registry, platform, networkx"),
        ("platform/config", "import_module(plugin)"),
        ("platform/engine", "from dbo.platform.config.experiment import Experiment"),
        ("platform/cli", "from dbo.dashboards import report"),
        ("sweeps", "from dbo.platform.runs.runner import run"),
        ("dashboards", "from dbo.platform.runs.run_folder import read_run"),
        ("platform/tracking", "from dbo.platform.runs.schema import Summary"),
    ],
)
def test_allowed_import_is_not_found(folder: str, line: str) -> None:
    """The check does not forbid what the table allows."""
    assert violations(line + "\n", Path(folder, "planted.py")) == []
