"""Which room may import what. The table below is the rule; `violations` reads a file's syntax tree and applies it.

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
    dbo: tuple[str, ...]                          # what it may import of our own code, with all that is below
    libraries: frozenset[str] | None = None       # the third-party packages it may import; None: any
    never: frozenset[str] = frozenset()           # not even if the rest allows it


ARRAYS = frozenset({"annotated_types", "array_api_compat", "numba", "numpy", "torch", "typing_extensions"})
RULES = {
    "tasks": Rule(dbo=("dbo.tasks",), libraries=ARRAYS | {"scipy", "sklearn", "torchvision"}),
    # asyncio: readers expect an event loop where they see `await`; there is none, the engine drives by hand.
    "algorithms": Rule(dbo=("dbo.algorithms",), libraries=ARRAYS, never=frozenset({"asyncio"})),
    # The protocols and registries; never an algorithm or a task by name.
    "platform": Rule(dbo=(
        "dbo.platform",
        "dbo.algorithms.claims", "dbo.algorithms.compressors", "dbo.algorithms.draws", "dbo.algorithms.exchange",
        "dbo.algorithms.presets", "dbo.algorithms.protocol", "dbo.algorithms.registry", "dbo.algorithms.wide",
        "dbo.tasks.catalog", "dbo.tasks.datasets", "dbo.tasks.partitions", "dbo.tasks.problem", "dbo.tasks.threads",
    )),
    "sweeps": Rule(dbo=("dbo.sweeps", "dbo.platform")),
    # Recorded runs only: a dashboard reads files, so it needs neither a cluster nor a tracking server.
    "dashboards": Rule(
        dbo=("dbo.dashboards", "dbo.platform.records", "dbo.platform.errors"), never=frozenset({"ray", "mlflow"})
    ),
}
# From the repo root a room can also be found as a top-level name, which would load its modules a second time.
BARE_ROOMS = RULES.keys() - {"platform"}


def imported(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of everything that a module of `package` imports."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                origin = ".".join([*above, *([module] if module else [])])
                yield from ((node.lineno, f"{origin}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)) | ast.JoinedStr(values=[ast.Constant(value=str(name)), *_]), *_],
            ):
                yield node.lineno, name


def allowed(name: str, rule: Rule) -> bool:
    top = name.partition(".")[0]
    if top in rule.never or top in BARE_ROOMS:
        return False
    if top == "dbo":
        return any(name == own or name.startswith(own + ".") for own in rule.dbo)
    return top in sys.stdlib_module_names or rule.libraries is None or top in rule.libraries


def violations(file: Path, room: str, package: str) -> list[str]:
    """What `file`, a module of `package` in `room`, imports against the rule."""
    tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    return [
        f"{file.name}:{line} {room} may not import {name}"
        for line, name in imported(tree, package)
        if not allowed(name, RULES[room])
    ]


@pytest.mark.parametrize("room", RULES)
def test_room_imports_only_what_it_may(room: str) -> None:
    """Every module of the room keeps to the table."""
    found = []
    for file in sorted((ROOT / room).rglob("*.py")):
        package = ".".join(["dbo", *file.parent.relative_to(ROOT).parts])
        found += violations(file, room, package)
    assert found == []


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("tasks", "import ray"),
        ("tasks", "import networkx"),
        ("tasks", "from dbo.algorithms.protocol import Shard"),
        ("algorithms", "import asyncio"),
        ("algorithms", "from asyncio import gather"),
        ("algorithms", "import yaml"),
        ("algorithms", "import dbo.tasks.quadratic"),
        ("algorithms", "from ..tasks import quadratic"),
        ("algorithms", "from algorithms.protocol import Array"),
        ("platform", "from dbo.algorithms.c2dfb import c2dfb"),
        ("platform", "from dbo.algorithms import c2dfb"),
        ("platform", "from dbo.algorithms import *"),
        ("platform", "import dbo.algorithms"),
        ("platform", "from dbo import algorithms"),
        ("platform", "import_module('dbo.algorithms.c2dfb')"),
        ("platform", "importlib.import_module(f'dbo.tasks.{name}')"),
        ("platform", "from dbo.tasks.problem_zoo import anything"),
        ("platform", "from dbo.sweeps import grids"),
        ("platform", "import tasks.catalog"),
        ("sweeps", "from dbo.algorithms.registry import algorithms"),
        ("sweeps", "import dbo.dashboards"),
        ("dashboards", "import mlflow.tracking"),
        ("dashboards", "from ray import tune"),
        ("dashboards", "from dbo.platform.run import run"),
    ],
)
def test_planted_import_is_found(tmp_path: Path, room: str, line: str) -> None:
    """The check can fail: each forbidden import is reported, wherever in the file it stands."""
    file = tmp_path / "planted.py"
    for where in ("{}", "if TYPE_CHECKING:\n    {}", "def late():\n    if condition:\n        {}"):
        file.write_text(where.format(line) + "\n")
        assert len(violations(file, room, f"dbo.{room}")) == 1, where


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("tasks", "import scipy.sparse, torch"),
        ("tasks", "from . import partitions"),
        ("algorithms", "import_module(f'dbo.algorithms.{name}')"),
        ("algorithms", "from zlib import crc32"),
        ("platform", "from dbo.algorithms import registry"),
        ("platform", "from dbo.algorithms.registry import algorithms"),
        ("platform", "import dbo.tasks.catalog, platform, networkx"),
        ("platform", "import_module(plugin)"),
        ("sweeps", "from dbo.platform.run import run"),
        ("dashboards", "from dbo.platform.records import read"),
    ],
)
def test_allowed_import_is_not_found(tmp_path: Path, room: str, line: str) -> None:
    """The check does not forbid what the table allows."""
    file = tmp_path / "planted.py"
    file.write_text(line + "\n")
    assert violations(file, room, f"dbo.{room}") == []
