"""The code in the run key: an edit that can change results changes the key, every other edit does not."""

import ast
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dbo.algorithms.registry import algorithms
from dbo.platform.config import code_identity, plugins
from dbo.platform.config.code_identity import NUMERICS, hash_modules, parse_source, read_source
from dbo.platform.config.experiment import Experiment

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("algorithms", "dashboards", "platform", "sweeps", "tasks")
Tiny = Callable[..., Experiment]
DIGITS: dict[str, Any] = {"task": {"name": "coefficient_tuning", "dataset": "digits"}, "algorithm": {"name": "c2dfb"}}


def use_roots(monkeypatch: pytest.MonkeyPatch, *roots: Path) -> None:
    monkeypatch.setattr(code_identity, "_ROOTS", roots)
    code_identity._find.cache_clear()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a copy of the source tree that run keys are computed from; what runs is the original."""
    def skip(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if name == "__pycache__" or (Path(name).suffix not in ("", ".py"))]

    for name in (*PACKAGES, "dbo"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=skip)
    use_roots(monkeypatch, tmp_path / "dbo", tmp_path)
    for module in (code_identity, plugins):      # each key is that of a new process, which has read nothing yet
        monkeypatch.setattr(module, "read_source", read_source.__wrapped__)
    yield tmp_path
    code_identity._find.cache_clear()


def plant_code(file: Path) -> None:
    file.write_text(file.read_text(encoding="utf-8") + "\nPLANTED = 1\n", encoding="utf-8")


def plant_comment(file: Path) -> None:
    """Add comments, a line break and another docstring: nothing that runs."""
    lines = file.read_text(encoding="utf-8").splitlines()
    tree = ast.parse("\n".join(lines))
    assert ast.get_docstring(tree) is not None
    rest = lines[tree.body[0].end_lineno or 0 :]
    edited = ['"""Another docstring."""', "# a comment", "", *rest, "", "# the end", ""]
    file.write_text("\n".join(edited), encoding="utf-8")


def edit_equation(file: Path, function: str) -> None:
    """Multiply the first product or quotient in a function by one: other code, whatever it computes."""
    source = file.read_text(encoding="utf-8")
    (body,) = [
        node for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == function
    ]
    product = next(
        node for node in ast.walk(body) if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div))
    )
    text = ast.get_source_segment(source, product)
    assert text is not None
    file.write_text(source.replace(text, f"1.0 * ({text})", 1), encoding="utf-8")


def digits_key() -> str:
    return Experiment(**DIGITS).run_key


# ---- edits that change the key ---------------------------------------------------------------------------------------


def first_method_function() -> str:
    """Return a function of c2dfb.py with a product in it."""
    tree = ast.parse((ROOT / "algorithms" / "methods" / "c2dfb.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return next(
        function.name for function in functions
        if any(isinstance(n, ast.BinOp) and isinstance(n.op, (ast.Mult, ast.Div)) for n in ast.walk(function))
    )


@pytest.mark.parametrize(
    ("file", "function"),
    [
        ("algorithms/methods/c2dfb.py", first_method_function()),
        ("platform/network/topology.py", "metropolis_weights"),
    ],
)
def test_an_edited_equation_changes_the_key(checkout: Path, file: str, function: str) -> None:
    """The method and the mixing weights are part of the key."""
    before = digits_key()
    edit_equation(checkout / file, function)
    assert digits_key() != before


@pytest.mark.parametrize("module", NUMERICS)
def test_numerics_of_the_platform_change_the_key(checkout: Path, module: str) -> None:
    """Mixing, evaluation, the wire format and the ledger decide results of every experiment."""
    before = digits_key()
    plant_code(checkout.joinpath(*module.split(".")[1:]).with_suffix(".py"))
    assert digits_key() != before


@pytest.mark.parametrize(
    "file",
    [
        "tasks/problems/coefficient_tuning.py", "tasks/datasets/digits.py", "tasks/partitions.py",   # its components
        "algorithms/parts/penalty.py", "tasks/datasets/splits.py", "algorithms/rng.py",     # what these import
        "algorithms/kernels/selection.py", "algorithms/kernels/compiled.py",                # inside of functions alone
        "algorithms/kernels/__init__.py", "dbo/parameters.py",
    ],
)
def test_imports_of_a_component_change_the_key(checkout: Path, file: str) -> None:
    """Everything that the method, task, data set and partition import counts, at any depth."""
    before = digits_key()
    plant_code(checkout / file)
    assert digits_key() != before


def test_an_edited_method_changes_its_own_key(checkout: Path, tiny: Tiny) -> None:
    """Control: the key of a method depends on its file, whichever method it is."""
    for name in algorithms():
        before = tiny(algorithm={"name": name}).run_key
        plant_code(checkout / "algorithms" / "methods" / f"{name}.py")
        assert tiny(algorithm={"name": name}).run_key != before, name


# ---- edits that do not -----------------------------------------------------------------------------------------------


def test_the_same_code_elsewhere_has_the_same_key(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout, a copy of it and a wheel, which has all packages inside of dbo/."""
    copied = digits_key()
    for name in PACKAGES:
        (checkout / name).rename(checkout / "dbo" / name)
    use_roots(monkeypatch, checkout / "dbo", checkout / "dbo")
    assert digits_key() == copied
    monkeypatch.undo()
    code_identity._find.cache_clear()
    assert digits_key() == copied


def test_comments_and_docstrings_do_not_change_the_key(checkout: Path) -> None:
    """In every file of the code that runs, and in those that do not."""
    before = digits_key()
    for name in PACKAGES:
        for file in sorted((checkout / name).rglob("*.py")):
            plant_comment(file)
    assert digits_key() == before


@pytest.mark.parametrize(
    "folder",
    [
        "platform/cli", "platform/config", "platform/runs", "platform/tracking", "platform/verify", "sweeps",
        "dashboards",
    ],
)
def test_code_without_numerics_does_not_change_the_key(checkout: Path, folder: str) -> None:
    """An edit in what surrounds a run invalidates no run."""
    before = digits_key()
    for file in sorted((checkout / folder).rglob("*.py")):
        if file.name not in ("preparation.py", "schedules.py"):       # the ones of runs and config in NUMERICS
            plant_code(file)
    assert digits_key() == before


@pytest.mark.parametrize(
    "file",
    [
        "algorithms/methods/bome.py", "algorithms/methods/madsbo.py", "algorithms/parts/soba.py",
        "tasks/problems/quadratic.py", "tasks/datasets/mnist.py",
        "algorithms/registry.py", "tasks/registry.py", "algorithms/claims.py", "algorithms/api.py",
    ],
)
def test_another_component_does_not_change_the_key(checkout: Path, file: str) -> None:
    """Registries and re-exports know every method, but a new line there invalidates no run."""
    before = digits_key()
    plant_code(checkout / file)
    assert digits_key() == before


def test_a_new_method_does_not_change_the_key(checkout: Path) -> None:
    """A file that nobody imports is no part of a run."""
    before = digits_key()
    shutil.copy(checkout / "algorithms" / "methods" / "bome.py", checkout / "algorithms" / "methods" / "new.py")
    assert digits_key() == before


def test_the_version_does_not_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that changes no numerics invalidates no run."""
    before = digits_key()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99.0")
    assert digits_key() == before


# ---- plugins ---------------------------------------------------------------------------------------------------------

PLUGIN = '''
from dataclasses import dataclass
from typing import Any
from dbo.algorithms.api import algorithm, mix
{more}

@dataclass(frozen=True)
class State:
    x: Any
    y: Any
    direction: Any

@dataclass(frozen=True)
class Config:
    step: float = 0.1

def init(shard, cfg):
    return State(shard.x0, shard.y0, shard.x0)

@algorithm("planted", config=Config, state=State, init=init)
async def planted(st, shard, cfg):
    """Stays where it is."""
    return State(await mix(st.x), st.y, st.direction)
'''


def plugin_key(tiny: Tiny, folder: Path, text: str, more: str = "") -> str:
    file = folder / "plugin.py"
    file.write_text(text.format(more=more), encoding="utf-8")
    return tiny(plugins=[str(file)], algorithm={"name": "planted"}).run_key


def test_a_plugin_enters_by_its_syntax_tree(tiny: Tiny, tmp_path: Path) -> None:
    """A comment or another docstring is the same run, another value is another run."""
    before = plugin_key(tiny, tmp_path, PLUGIN)
    assert plugin_key(tiny, tmp_path, "# a comment\n" + PLUGIN.replace("Stays where it is", "Stays")) == before
    assert plugin_key(tiny, tmp_path, PLUGIN.replace("0.1", "0.2")) != before


def test_a_plugin_s_imports_change_its_key(tiny: Tiny, checkout: Path) -> None:
    """A plugin that uses a part of ours depends on it, also through the public API; one that does not, does not."""
    more = "from dbo.algorithms.parts.neumann import truncated_inverse"
    alone, using = plugin_key(tiny, checkout, PLUGIN), plugin_key(tiny, checkout, PLUGIN, more)
    plant_code(checkout / "algorithms" / "parts" / "neumann.py")
    assert plugin_key(tiny, checkout, PLUGIN) == alone
    assert plugin_key(tiny, checkout, PLUGIN, more) != using


@pytest.mark.parametrize("line", ["import dbo", "from dbo import mix", "from dbo.algorithms import api"])
def test_the_public_api_stands_for_all_that_it_offers(line: str) -> None:
    """`dbo.TopK` is an attribute that no import names, so all compressors count."""
    assert {"dbo.algorithms.api", "dbo.algorithms.compression.compressors"} <= set(
        hash_modules([], [parse_source(line.encode(), "plugin")]))


# ---- syntax trees ----------------------------------------------------------------------------------------------------

SAME = [
    ("a = 1", "a = 1  # one"), ("a = (1 +\n     2)", "a = 1 + 2"), ("a = 'b'", 'a = "b"'),
    ("def f():\n    '''Docs.'''\n    return 1", "def f():\n    return 1"),
    ("def f(a: int) -> int:\n    return a", "def f(a):\n    return a"),
    ("if TYPE_CHECKING:\n    import numpy\na = 1", "a = 1"),
    ("if typing.TYPE_CHECKING:\n    import numpy\nelse:\n    a = 1", "a = 1"),
]
OTHER = [
    ("a = 1", "a = 1.0"), ("a = 1", "a = True"), ("a = b + c", "a = c + b"), ("a = b * c", "a = b / c"),
    ("a = 1", "b = 1"), ("a = None", "a = 'None'"), ("f(a, *b)", "f(a, b)"), ("f(a)", "f(a=a)"),
    ("a, b = c", "a = b = c"), ("import a", "import b"), ("from a import b", "from c import b"), ("{**a}", "{None: a}"),
    ("def f(a):\n    return 1", "def f(a=1):\n    return 1"), ("class A:\n    a: int", "class A:\n    a: float"),
    ("async def f():\n    return 1", "def f():\n    return 1"), ("if a:\n    b()\nc()", "if a:\n    b()\n    c()"),
    ("def f():\n    a = 1\n    global b", "def f():\n    a = 1\n    global c"), ("a = f'{b}'", "a = f'{b!r}'"),
    ("if not TYPE_CHECKING:\n    a = 1", "if not TYPE_CHECKING:\n    a = 2"), ("a[1:]", "a[:1]"),
    ("not valid(", "not valid["),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_equal_code_has_an_equal_digest(one: str, other: str) -> None:
    """Comments, layout, docstrings and types of a signature do not count."""
    assert parse_source(one.encode(), "m").digest == parse_source(other.encode(), "m").digest


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_other_code_has_another_digest(one: str, other: str) -> None:
    """Everything that runs counts; code that does not parse counts by its bytes."""
    assert parse_source(one.encode(), "m").digest != parse_source(other.encode(), "m").digest


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import a.b as c, d", {("a.b", ""), ("d", "")}),
        ("from a import b, c as d", {("a", "b"), ("a", "c")}),
        ("from a import *", {("a", "")}),
        ("from . import b", {("top.package", "b")}),
        ("from .b import c", {("top.package.b", "c")}),
        ("from ..b import c", {("top.b", "c")}),
        ("def f():\n    if a:\n        from b import c", {("b", "c")}),
        ("import_module('a.b')", {("a.b", "")}),
        ("importlib.import_module('a.b')", {("a.b", "")}),
        ("import_module(f'a.{b}')", set()),
        ("if TYPE_CHECKING:\n    import a", set()),
    ],
)
def test_imports_are_read_from_the_source(code: str, found: set[tuple[str, str]]) -> None:
    """Absolute, relative, inside of functions and by name; a computed name is not followed."""
    assert parse_source(code.encode(), "top.package.module").imports == found


def test_a_package_s_relative_imports_start_at_the_package() -> None:
    """In an `__init__.py` one dot is the package itself."""
    assert parse_source(b"from . import b", "top.package", is_package=True).imports == {("top.package", "b")}


# ---- cost ------------------------------------------------------------------------------------------------------------


def test_the_code_is_read_and_parsed_once() -> None:
    """The first key of a process reads each module of its code once, and no other module; the second key reads none."""
    modules = [algorithms()["c2dfb"].round.__module__, "dbo.tasks.problems.coefficient_tuning"]
    code_identity.read_source.cache_clear()
    code_identity._find.cache_clear()
    found = hash_modules(modules)
    first = code_identity.read_source.cache_info()
    assert 25 < len(found) <= first.misses < 2 * len(found)
    assert hash_modules(modules) == found
    assert code_identity.read_source.cache_info().misses == first.misses


def test_a_file_is_read_once_per_process(tmp_path: Path) -> None:
    """An edit in the middle of a process does not run there, so it does not change the key either."""
    file = tmp_path / "a.py"
    file.write_text("a = 1\n")
    first = read_source(file, "a")
    file.write_text("a = 10\n")
    assert read_source(file, "a") is first


@pytest.mark.parametrize(("one", "other"), [
    ("f()(x)", "f(x)()"), ("p(f, x)(k=1)", "p(f, x, k=1)()"), ("[[a], b]", "[[a, b]]"), ("-(a - b)", "-a - b"),
])
def test_different_trees_have_different_digests(one: str, other: str) -> None:
    """The text of a tree says where a node ends."""
    assert parse_source(one.encode(), "a").digest != parse_source(other.encode(), "a").digest


def test_help_texts_are_no_code() -> None:
    """Another wording of a parameter's help changes no key, another default or range does."""
    texts = ('x = param(1, gt=0, help="a")', 'x = param(1, gt=0, help="b")', "x = param(2, gt=0)", "x = param(1, gt=1)")
    digests = [parse_source(text.encode(), "a").digest for text in texts]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


# ---- the list --------------------------------------------------------------------------------------------------------

# Modules of the engines and the network that move data and decide when, but compute no result.
WITHOUT_NUMERICS = {
    "automatic", "convexity", "deadlines", "factory", "heartbeat", "local", "peer_sockets", "placement",
    "prometheus", "ray_actor", "ray_engine", "ray_session", "timing", "wait_notices",
}


def test_every_module_of_engine_and_network_is_classified() -> None:
    """Whoever adds a module decides whether it is part of the run key."""
    found = {file.stem for name in ("engine", "network") for file in (ROOT / "platform" / name).glob("[!_]*.py")}
    outside = ("dbo.platform.runs.", "dbo.platform.config.")
    numerics = {module.rpartition(".")[2] for module in NUMERICS if not module.startswith(outside)}
    assert found == numerics | WITHOUT_NUMERICS
    assert not numerics & WITHOUT_NUMERICS
