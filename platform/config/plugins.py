"""Load a user's components: Python files or modules that an experiment names under `plugins`.

A plugin registers tasks, data sets, partitions, topologies, compressors and algorithms. It is code and runs with the
rights of whoever runs the experiment: name only files that you would run yourself.
"""

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

from dbo import components
from dbo.algorithms.registry import Algorithm
from dbo.platform.config import plugin_modules
from dbo.platform.config.code_identity import Source, parse_source, read_source
from dbo.platform.config.paths import expand_user
from dbo.platform.config.plugin_modules import ModuleSource, top_level
from dbo.platform.config.validation import validate_defaults
from dbo.platform.errors import InputError
from dbo.platform.regular_files import open_regular

_KINDS = "task, dataset, partition, topology, compressor or algorithm"
_loaded: dict[str, bytes] = {}      # module → the source that runs: a file that was edited meanwhile is run again
_shipped: set[str] = set()          # modules whose source came from another process: their file may not exist here
# Top-level module → that module and its source when it was loaded: an edit in the middle of a process does not run.
_modules: dict[str, tuple[ModuleType, ModuleSource]] = {}


@dataclass(frozen=True, slots=True)
class ShippedPlugin:
    """A plugin's file on its way to another process."""

    module: str
    file: str
    source: bytes


Shipped: TypeAlias = ShippedPlugin | ModuleSource      # a plugin that is a file, or one that is a module


def load(plugins: tuple[str, ...]) -> None:
    """Import each plugin once; experiments can then name what it registers."""
    for number, plugin in enumerate(plugins):
        where = f"plugins.{number}"
        try:
            if plugin.endswith(".py"):
                _load_file(Path(plugin))
            else:
                _load_module(plugin)
        except InputError as error:
            named = str(error) if plugin in str(error) else f"{plugin}: {error}"
            raise InputError(f"{where}: {named}") from None
        except ImportError as error:
            raise InputError(f"{where}: {plugin} cannot be imported: {_explain(Path(plugin), error)}") from error
        except (Exception, SystemExit) as error:
            at = _find_line(error, plugin)
            raise InputError(f"{where}: {plugin} cannot be imported{at}: {type(error).__name__}: {error}") from error


def _find_line(error: BaseException, plugin: str) -> str:
    """Return the line of a plugin where its import failed, of a module with its file; empty if that is unknown."""
    if isinstance(error, SyntaxError):
        return ""          # its message has the line
    frames = traceback.extract_tb(error.__traceback__)
    if plugin.endswith(".py"):
        file = str(expand_user(Path(plugin)).resolve())
        lines = [frame.lineno for frame in frames if frame.filename == file]
        return f", line {lines[-1]}" if lines else ""
    places: list[str] = []
    with suppress(Exception):
        spec = importlib.util.find_spec(top_level(plugin))
        places = [*(spec.submodule_search_locations or ()), getattr(spec.loader, "path", "")] if spec else []
    own = [frame for frame in frames if any(place and Path(frame.filename).is_relative_to(place) for place in places)]
    return f", {own[-1].filename}, line {own[-1].lineno}" if own else ""


def _explain(plugin: Path, error: ImportError) -> str:
    """Return why an import failed; files beside a plugin are no part of it, no run key and no job includes them."""
    reason, wanted = f"{type(error).__name__}: {error}", (error.name or "").partition(".")[0]
    if plugin.suffix != ".py":
        return reason
    beside = [expand_user(plugin).with_name(name) for name in (f"{wanted}.py", wanted)] if wanted else []
    if "relative import" not in str(error) and not any(path.exists() for path in beside):
        return reason
    return f"{reason}; a plugin is one file; if it needs several, name a module: plugins=[package.module]"


def _load_module(plugin: str) -> None:
    importlib.import_module(plugin)
    if not components.find_owned(top_level(plugin)):
        raise InputError(f"{plugin} registers no {_KINDS}")
    _validate_components(plugin)
    if _is_foreign(plugin):
        read_module(plugin)


def _is_foreign(module: str) -> bool:
    """Decide whether a module is not one of dbo, which every process of a run has."""
    return top_level(module) != "dbo"


def read_module(plugin: str) -> ModuleSource:
    """Return the source that this process has loaded for a plugin that is a module."""
    if (received := plugin_modules.find_received(plugin)) is not None:
        return received
    top = top_level(plugin)
    if (imported := sys.modules.get(top)) is None:
        raise InputError(f"{plugin} is not loaded; create the experiment again")
    if top not in _modules or _modules[top][0] is not imported:
        _modules[top] = imported, plugin_modules.read_module(plugin)
    return _modules[top][1]


def read_shippable(plugin: str, where: str) -> ModuleSource | None:
    """Return the source of a module for other processes; None if they have it; an InputError if it cannot be sent."""
    if not _is_foreign(plugin):
        return None
    source = read_module(plugin)
    source.check_shippable(where)
    return source


def _load_file(path: Path) -> None:
    name, file = _module_name(path), expand_user(path)
    if name in _shipped:
        return
    try:
        with open(file, "rb", opener=open_regular) as stream:        # a pipe or a device may never end
            source = stream.read()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    _execute(name, str(file.resolve()), source, str(path))


def _execute(name: str, file: str, source: bytes, shown: str) -> None:
    """Run a plugin's source as a module of its own, unless this very source runs already."""
    if _loaded.get(name) == source:
        return
    module = ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module
    components.forget(name)            # what the file registered before it was edited
    try:
        exec(compile(source, file, "exec"), module.__dict__)
        if not components.find_owned(name):
            how = "write @dbo.task(…), @dbo.algorithm(…), … above it"
            raise InputError(
                f"{shown} registers no {_KINDS}: {how}; name one in another file as plugins=[package.module]")
        _validate_components(name)
    except BaseException:
        del sys.modules[name]
        components.forget(name)        # no experiment can name an invalid component
        _loaded.pop(name, None)
        raise
    _loaded[name] = source


def ship(plugins: Iterable[str]) -> tuple[Shipped, ...]:
    """Return the source of loaded plugins: another process needs it before it unpickles objects of theirs."""
    shipped: dict[str, Shipped] = {}
    for number, plugin in enumerate(plugins):
        if plugin.endswith(".py"):
            name = _module_name(Path(plugin))
            shipped[name] = ShippedPlugin(name, str(sys.modules[name].__file__), _loaded[name])
        elif (source := read_shippable(plugin, f"plugins.{number}: {plugin}")) is not None:
            shipped[source.top] = source
    return tuple(shipped.values())


def receive(plugins: Iterable[Shipped]) -> None:
    """Load plugins that another process has shipped; their files need not exist on this machine."""
    for plugin in plugins:
        if isinstance(plugin, ModuleSource):
            _, own = _modules.get(plugin.top, (None, None))
            if own is None or plugin.top not in sys.modules or not own.has_content_of(plugin):
                plugin_modules.install(plugin)
        else:
            _execute(plugin.module, plugin.file, plugin.source, plugin.file)
            _shipped.add(plugin.module)


def plugin_files() -> set[str]:
    """Return the files of loaded plugins, as tracebacks name them."""
    files = {str(sys.modules[name].__file__) for name in _loaded if name in sys.modules}
    sources = [*(source for _, source in _modules.values()), *plugin_modules.all_received()]
    return files | {file.path for source in sources for file in source.files}


def locate_error(error: BaseException) -> str:
    """Return the file and line of a plugin where an error, or its cause, was raised; empty if it was elsewhere."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in plugin_files()]
    if not frames and error.__cause__ is not None:
        return locate_error(error.__cause__)
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def _validate_components(module: str) -> None:
    """Refuse a component whose own defaults or claim are wrong before an experiment uses it."""
    for registry, name in components.find_owned(module):
        found = registry[name]
        if isinstance(found, Algorithm):
            _validate_algorithm(found)
        else:
            validate_defaults(f"{registry.kind} {name!r}", found)


def _validate_algorithm(found: Algorithm) -> None:
    validate_defaults(f"algorithm {found.name!r}: {found.config.__name__}", found.config)
    if found.claim is not None:
        try:
            found.config(**found.claim.steps)
            _ = [found.claim.steps[name] for name in found.claim.floor]
        except (TypeError, ValueError, KeyError) as error:
            raise InputError(f"algorithm {found.name!r}: its claim's steps or floor: {error}") from None


def _module_name(path: Path) -> str:
    return "dbo_plugin_" + hashlib.sha256(str(expand_user(path).resolve()).encode()).hexdigest()[:12]


def read_sources(plugins: tuple[str, ...]) -> list[Source]:
    """Return the code of loaded plugins, for the run key: a changed plugin is another experiment."""
    names = [_module_name(Path(plugin)) if plugin.endswith(".py") else plugin for plugin in plugins]
    if any(name != plugin and name not in _loaded for name, plugin in zip(names, plugins, strict=True)):
        raise InputError(f"plugins: {', '.join(plugins)} changed and cannot be loaded; create the experiment again")
    return [parse_source(_loaded[name], name) if name in _loaded else _identify_module(name) for name in names]


def _identify_module(module: str) -> Source:
    if _is_foreign(module):
        return plugin_modules.identify(read_module(module), module)
    return read_source(Path(str(sys.modules[module].__file__)), module)      # it names what it imports
