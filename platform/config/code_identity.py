"""Identify the code that determines a run's results: its part of the run key.

That code is the modules of the experiment's components, everything that these import inside `dbo.algorithms`,
`dbo.tasks` and `dbo.parameters`, and the platform modules in NUMERICS. A module enters by its syntax tree: comments,
docstrings, layout and the types in a function's signature do not matter. Imports are read from the source, also those
inside functions; nothing is imported. An edit elsewhere (command line, tracking, sweeps, dashboards, another method)
changes no key.
"""

import ast
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dbo import parameters
from dbo.algorithms import registry

# The platform modules whose arithmetic decides results, whatever the experiment.
NUMERICS = (
    "dbo.platform.network.topology",        # graphs and mixing weights
    "dbo.platform.network.packet",          # what a neighbour receives
    "dbo.platform.network.row_format",      # the same: forms of a row, and their lengths in the metrics
    "dbo.platform.network.codecs",          # the same: rows of the host
    "dbo.platform.network.positions",       # the same: lengths of coded positions
    "dbo.platform.network.golomb",          # the same
    "dbo.platform.network.enumeration",     # the same
    "dbo.platform.network.measuring",       # the same: lengths of many short rows at once
    "dbo.platform.network.decoding",        # the same: received rows
    "dbo.platform.network.torch_codecs",    # the same: rows of a device
    "dbo.platform.network.ledger",          # bytes and values in the metrics
    "dbo.platform.config.schedules",        # step sizes of a round
    "dbo.platform.engine.base",             # rows of all nodes in node order, maxima of counters
    "dbo.platform.engine.block",            # weighted sums of the neighbours' rows, in node order
    "dbo.platform.engine.routes",           # who sends to whom, and the weights of a star
    "dbo.platform.engine.arrangement",      # the server's row, pooled data of single-machine methods
    "dbo.platform.engine.device",           # array types and threads of the arithmetic
    "dbo.platform.engine.shard_wrappers",   # pooled data of single-machine methods, oracle calls in the metrics
    "dbo.platform.engine.state_tree",       # when a state counts as diverged, how a checkpoint becomes a state
    "dbo.platform.engine.evaluation",       # metrics
    "dbo.platform.engine.psi",              # the same: ψ and its gradient
    "dbo.platform.engine.common_point",     # the same: oracles in float64
    "dbo.platform.engine.error_terms",      # the same: errors of an algorithm's analysis
    "dbo.platform.runs.preparation",        # seeds of data and graph
)
_FOLLOWED = ("dbo.algorithms", "dbo.tasks", "dbo.parameters", "dbo.threads")
# Lists of components, and what `dbo verify` needs, which no round may use: another line in them invalidates no run.
_WITHOUT_NUMERICS = (
    "dbo.algorithms.registry", "dbo.algorithms.claims", "dbo.algorithms.references", "dbo.tasks.registry",
)
# Re-exports: whoever imports a name from here depends on the module that defines it, not on all the others.
_FACADES = frozenset({"dbo.algorithms.api", "dbo.tasks.api"})
# A checkout has `dbo.parameters` in dbo/ and the packages beside it, a wheel has all of them in dbo/.
_ROOTS = (Path(parameters.__file__).parent, Path(registry.__file__).parents[1])


@dataclass(frozen=True, slots=True)
class Source:
    """The digest of a module's syntax tree, and what the module imports."""

    digest: str
    imports: frozenset[tuple[str, str]]      # (module, name in it); `import module` has an empty name


def hash_modules(components: Iterable[str], plugins: Iterable[Source] = ()) -> dict[str, str]:
    """Return module → digest of all code of ours that the components' modules and the plugins depend on."""
    pending = [*NUMERICS, *(name for component in components for name in _follow(component, ""))]
    pending += [name for plugin in plugins for name in _dependencies(plugin)]
    digests: dict[str, str] = {}
    while pending:
        name = pending.pop()
        if name in digests or _is_below(name, _WITHOUT_NUMERICS) or (file := _find(name)) is None:
            continue
        source = read_source(file, name)
        digests[name] = source.digest
        pending += _dependencies(source)
    return digests


@cache
def read_source(file: Path, module: str) -> Source:
    """Return the source in a file. A process reads it once, because it also imports a module only once.

    So an edit in the middle of a process, which does not run there, does not change the keys of its runs.
    """
    return parse_source(file.read_bytes(), module, is_package=file.name == "__init__.py")


def parse_source(code: bytes, module: str, is_package: bool = False) -> Source:
    """Return the identity of a module's code; code that does not parse enters by its bytes."""
    reader = _TreeReader(module if is_package else module.rpartition(".")[0])
    try:
        reader.read(ast.parse(code))
    except (SyntaxError, ValueError, RecursionError):
        return Source(hashlib.sha256(code).hexdigest(), frozenset())
    return Source(hashlib.sha256("\n".join(reader.text).encode()).hexdigest(), frozenset(reader.imports))


def combine(sources: Iterable[tuple[str, Source]]) -> Source:
    """Return the identity of several named sources together, such as the files of a package."""
    named = list(sources)
    text = "\n".join(f"{name} {source.digest}" for name, source in named)
    imports = frozenset(pair for _, source in named for pair in source.imports)
    return Source(hashlib.sha256(text.encode()).hexdigest(), imports)


def _dependencies(source: Source) -> Iterator[str]:
    for module, name in source.imports:
        yield from _follow(module, name)


def _follow(module: str, name: str) -> Iterator[str]:
    """Yield the modules that `from module import name` runs, with the packages around them (their `__init__.py`)."""
    for target in _resolve(module, name):
        parts = target.split(".")
        yield from (".".join(parts[:end]) for end in range(2, len(parts) + 1))


def _resolve(module: str, name: str) -> list[str]:
    """Return the modules that an imported name is defined in, as far as they are to be followed."""
    full = f"{module}.{name}"
    if not _is_followed(full):
        # `import dbo` offers whatever authors import.
        return ["dbo.algorithms.api", "dbo.tasks.api"] if module == "dbo" else []
    if name and _find(full) is not None:
        return [full]
    if module in _FACADES and (file := _find(module)) is not None:
        exported = [pair for pair in read_source(file, module).imports if pair[1] == name]
        if exported:
            return [target for pair in exported for target in _resolve(*pair)]
    return [module] if _is_followed(module) else []


def _is_followed(module: str) -> bool:
    return _is_below(module, _FOLLOWED)


def _is_below(module: str, roots: tuple[str, ...]) -> bool:
    return f"{module}.".startswith(tuple(f"{root}." for root in roots))


@cache
def _find(module: str) -> Path | None:
    """Return the file of a module of ours; None if there is none."""
    place = Path(*module.split(".")[1:])
    files = (file for root in _ROOTS for file in (root / place.with_suffix(".py"), root / place / "__init__.py"))
    return next((file for file in files if file.is_file()), None)


# Parts of a tree that are no code: load or store, comments, prefixes of texts, types in signatures.
_IGNORED = frozenset({"ctx", "type_comment", "type_ignores", "kind", "returns"})
_FIELDS: dict[type[ast.AST], tuple[str, ...]] = {
    kind: tuple(name for name in kind._fields if name not in _IGNORED and (kind, name) != (ast.arg, "annotation"))
    for kind in vars(ast).values() if isinstance(kind, type) and issubclass(kind, ast.AST)
}


_IMPORTING = frozenset({ast.Import, ast.ImportFrom, ast.Call})


def _is_param(node: ast.AST) -> bool:
    """Decide whether a call declares a parameter, whose help text is no code."""
    match node:
        case ast.Call(func=ast.Name(id="param") | ast.Attribute(attr="param")):
            return True
    return False


def _is_type_checking(test: ast.expr) -> bool:
    match test:
        case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
            return True
    return False


class _TreeReader:
    """Serialize a syntax tree and collect its imports, in one pass.

    Empty fields are left out and the others named, so that the text does not depend on the version of Python.
    """

    def __init__(self, package: str) -> None:
        self.package = package      # that relative imports start from
        self.text: list[str] = []
        self.imports: set[tuple[str, str]] = set()

    def read(self, node: ast.AST) -> None:
        kind = type(node)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):      # a docstring, or an ellipsis
            return
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            for statement in node.orelse:
                self.read(statement)
            return
        if kind in _IMPORTING:
            self._collect(node)
        self.text.append(kind.__name__)
        for name in _FIELDS[kind]:
            value = getattr(node, name)
            if isinstance(value, ast.AST):
                self.text.append(name)
                self.read(value)
            elif type(value) is list:
                if name == "keywords" and _is_param(node):
                    value = [keyword for keyword in value if keyword.arg != "help"]
                if value:
                    self.text.append(name)
                    for item in value:
                        if isinstance(item, ast.AST):
                            self.read(item)
                        else:      # a name after `global`, or the missing key of {**mapping}
                            self.text.append(repr(item))
                    self.text.append("end")
            elif value is not None or kind is ast.Constant:
                self.text.append(name)
                self.text.append(repr(value))
        self.text.append("")      # the end of the node: f()(x) is not f(x)()

    def _collect(self, node: ast.AST) -> None:
        match node:
            case ast.Import(names=names):
                self.imports.update((alias.name, "") for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                above = self.package.split(".")[: self.package.count(".") + 2 - level] if level else []
                full = ".".join([*above, *([module] if module else [])])
                self.imports.update((full, "" if alias.name == "*" else alias.name) for alias in names)
            case ast.Call(
                func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                self.imports.add((name, ""))
