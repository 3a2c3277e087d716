"""Load a user's components: Python files or modules that an experiment names under `plugins`.

A plugin registers tasks, data sets, partitions, topologies, compressors and algorithms. It is code and runs with the
rights of whoever runs the experiment: name only files that you would run yourself.
"""

import hashlib
import importlib
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from dbo import components
from dbo.algorithms.registry import Algorithm
from dbo.platform.config.code_identity import Source, combine, parse_source, read_source
from dbo.platform.config.paths import expand_user
from dbo.platform.config.validation import validate_defaults
from dbo.platform.errors import InputError
from dbo.platform.regular_files import open_regular

_KINDS = "task, dataset, partition, topology, compressor or algorithm"
_loaded: dict[str, bytes] = {}      # module → the source that runs: a file that was edited meanwhile is run again
_shipped: set[str] = set()          # modules whose source came from another process: their file may not exist here


@dataclass(frozen=True, slots=True)
class ShippedPlugin:
    """A plugin's file on its way to another process."""

    module: str
    file: str
    source: bytes


def load(plugins: tuple[str, ...]) -> None:
    """Import each plugin once; experiments can then name what it registers."""
    for number, plugin in enumerate(plugins):
        where = f"plugins.{number}"
        try:
            if plugin.endswith(".py"):
                _load_file(Path(plugin))
            else:
                importlib.import_module(plugin)
                if not components.find_owned(_top(plugin)):
                    raise InputError(f"{plugin} registers no {_KINDS}")
                _validate_components(plugin)
        except InputError as error:
            named = str(error) if plugin in str(error) else f"{plugin}: {error}"
            raise InputError(f"{where}: {named}") from None
        except ImportError as error:
            raise InputError(f"{where}: {plugin} cannot be imported: {_explain(Path(plugin), error)}") from error
        except (Exception, SystemExit) as error:
            at = _find_line(error, Path(plugin))
            raise InputError(f"{where}: {plugin} cannot be imported{at}: {type(error).__name__}: {error}") from error


def _find_line(error: BaseException, plugin: Path) -> str:
    """Return the line of a plugin's file where its import failed; empty if that is unknown."""
    if isinstance(error, SyntaxError):
        return ""          # its message has the line
    file = str(expand_user(plugin).resolve())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f", line {lines[-1]}" if lines else ""


def _explain(plugin: Path, error: ImportError) -> str:
    """Return why an import failed; files beside a plugin are no part of it, no run key and no job includes them."""
    reason, wanted = f"{type(error).__name__}: {error}", (error.name or "").partition(".")[0]
    if plugin.suffix != ".py":
        return reason
    beside = [expand_user(plugin).with_name(name) for name in (f"{wanted}.py", wanted)] if wanted else []
    if "relative import" not in str(error) and not any(path.exists() for path in beside):
        return reason
    return f"{reason}; a plugin is one file; if it needs several, name a module: plugins=[package.module]"


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


def ship(plugins: Iterable[str]) -> tuple[ShippedPlugin, ...]:
    """Return the loaded files among the plugins: another process runs them before it unpickles objects of theirs."""
    modules = [_module_name(Path(plugin)) for plugin in plugins if plugin.endswith(".py")]
    return tuple(ShippedPlugin(name, str(sys.modules[name].__file__), _loaded[name]) for name in modules)


def receive(plugins: Iterable[ShippedPlugin]) -> None:
    """Run plugins that another process has shipped; their files need not exist on this machine."""
    for plugin in plugins:
        _execute(plugin.module, plugin.file, plugin.source, plugin.file)
        _shipped.add(plugin.module)


def plugin_files() -> set[str]:
    """Return the files of loaded plugins, as tracebacks name them."""
    return {str(sys.modules[name].__file__) for name in _loaded if name in sys.modules}


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


def _top(module: str) -> str:
    """Return the package that a module belongs to."""
    return module.partition(".")[0]


def _module_name(path: Path) -> str:
    return "dbo_plugin_" + hashlib.sha256(str(expand_user(path).resolve()).encode()).hexdigest()[:12]


def read_sources(plugins: tuple[str, ...]) -> list[Source]:
    """Return the code of loaded plugins, for the run key: a changed plugin is another experiment."""
    names = [_module_name(Path(plugin)) if plugin.endswith(".py") else plugin for plugin in plugins]
    if any(name != plugin and name not in _loaded for name, plugin in zip(names, plugins, strict=True)):
        raise InputError(f"plugins: {', '.join(plugins)} changed and cannot be loaded; create the experiment again")
    return [parse_source(_loaded[name], name) if name in _loaded else _read_package(name) for name in names]


def _read_package(module: str) -> Source:
    """Return the code of a module's file; of one in a package, of all files of that package, which it may import."""
    top = _top(module)
    folders = [Path(folder) for folder in getattr(sys.modules.get(top), "__path__", ())]
    files = [(file, folder) for folder in folders for file in sorted(folder.rglob("*.py")) if file.is_file()]
    if files:
        return combine((file.relative_to(folder).as_posix(), read_source(file, top)) for file, folder in files)
    if (source := getattr(sys.modules.get(module), "__file__", None)) is None:
        raise InputError(f"plugins: the source of {module} cannot be found")
    return read_source(Path(source), module)
