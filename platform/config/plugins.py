"""Load a user's algorithms: Python files or modules that an experiment names under `plugins`.

A plugin is code and runs with the rights of whoever runs the experiment: name only files that you would run yourself.
"""

import hashlib
import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType

from dbo.algorithms import registry
from dbo.algorithms.registry import Algorithm, algorithms
from dbo.platform.config.code_identity import Source, combine, parse_source, read_source
from dbo.platform.config.paths import expand_user
from dbo.platform.config.validation import validate_defaults
from dbo.platform.errors import InputError

_loaded: dict[str, bytes] = {}      # module → the source that runs: a file that was edited meanwhile is run again


def load(plugins: tuple[str, ...]) -> None:
    """Import each plugin once; experiments can then name what it registers."""
    algorithms()       # built-ins first: a plugin that uses one of their names is the one to refuse
    for number, plugin in enumerate(plugins):
        where = f"plugins.{number}"
        try:
            if plugin.endswith(".py"):
                _load_file(Path(plugin))
            else:
                importlib.import_module(plugin)
                if not any(_top(found.round.__module__) == _top(plugin) for found in algorithms().values()):
                    raise InputError(f"{plugin} registers no algorithm")
                _validate_algorithms(plugin)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        except ImportError as error:
            raise InputError(f"{where}: {plugin} cannot be imported: {_explain(Path(plugin), error)}") from error
        except (Exception, SystemExit) as error:
            raise InputError(f"{where}: {plugin} cannot be imported: {type(error).__name__}: {error}") from error


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
    try:
        source = file.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    if _loaded.get(name) == source:
        return
    module = ModuleType(name)
    module.__file__ = str(file.resolve())
    sys.modules[name] = module
    registry.forget(name)              # what the file registered before it was edited
    try:
        exec(compile(source, module.__file__, "exec"), module.__dict__)
        if not any(found.round.__module__ == name for found in algorithms().values()):
            how = "write @algorithm(…) above its round; name one in another file as plugins=[package.module]"
            raise InputError(f"{path} registers no algorithm: {how}")
        _validate_algorithms(name)
    except BaseException:
        del sys.modules[name]
        registry.forget(name)          # no experiment can name an invalid algorithm
        _loaded.pop(name, None)
        raise
    _loaded[name] = source


def plugin_files() -> set[str]:
    """Return the files of loaded plugins, as tracebacks name them."""
    return {str(sys.modules[name].__file__) for name in _loaded if name in sys.modules}


def locate_error(error: BaseException) -> str:
    """Return the file and line of a plugin where an error was raised; empty if it was raised elsewhere."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in plugin_files()]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def _validate_algorithms(module: str) -> None:
    """Refuse an algorithm whose own defaults or claim are wrong before an experiment uses it."""
    for found in algorithms().values():
        if f"{found.round.__module__}.".startswith(f"{module}."):
            _validate_algorithm(found)


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
