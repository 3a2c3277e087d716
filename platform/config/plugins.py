"""A stranger's algorithms and tasks: Python files or modules that an experiment names under `plugins`.

A plugin is code and runs with the rights of whoever runs the experiment: name only files that you would run yourself.
"""

import hashlib
import importlib
import inspect
import sys
import traceback
from functools import cache
from pathlib import Path
from types import ModuleType

from dbo.algorithms import registry
from dbo.algorithms.registry import Algorithm, algorithms
from dbo.platform.config.paths import opened
from dbo.platform.config.validation import check_defaults
from dbo.platform.errors import InputError
from dbo.tasks import api

_loaded: dict[str, str] = {}      # module → digest of its source: a file that was edited meanwhile is run again


def load(plugins: tuple[str, ...]) -> None:
    """Imports each plugin once; what it registers can then be named in experiments."""
    algorithms()       # built-ins first: a plugin that takes one of their names is the one to blame
    for number, plugin in enumerate(plugins):
        where = f"plugins.{number}"
        try:
            if plugin.endswith(".py"):
                _load_file(Path(plugin))
            else:
                importlib.import_module(plugin)
                if not any(_top(found.round.__module__) == _top(plugin) for found in algorithms().values()):
                    raise InputError(f"{plugin} registers no algorithm")
                _check(plugin)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        except ImportError as error:
            raise InputError(f"{where}: {plugin} cannot be imported: {_missing(Path(plugin), error)}") from error
        except (Exception, SystemExit) as error:
            raise InputError(f"{where}: {plugin} cannot be imported: {type(error).__name__}: {error}") from error


def _missing(plugin: Path, error: ImportError) -> str:
    """Why an import failed. Files beside a plugin are no part of it: no run key and no job would have them."""
    told, wanted = f"{type(error).__name__}: {error}", (error.name or "").partition(".")[0]
    if plugin.suffix != ".py":
        return told
    beside = [opened(plugin).with_name(name) for name in (f"{wanted}.py", wanted)] if wanted else []
    if "relative import" not in str(error) and not any(path.exists() for path in beside):
        return told
    return f"{told}; a plugin is one file, and one of several files is named as a module: plugins=[package.module]"


def _load_file(path: Path) -> None:
    name = _module(path)
    try:
        source = opened(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    digest = hashlib.sha256(source).hexdigest()
    if _loaded.get(name) == digest:
        return
    module = ModuleType(name)
    module.__file__ = str(opened(path).resolve())
    sys.modules[name] = module
    registry.forget(name)              # what the file registered before it was edited
    try:
        exec(compile(source, module.__file__, "exec"), module.__dict__)
        if not any(found.round.__module__ == name for found in algorithms().values()):
            way = "write @algorithm(…) above its round; one in another file is named as plugins=[package.module]"
            raise InputError(f"{path} registers no algorithm: {way}")
        _check(name)
    except BaseException:
        del sys.modules[name]
        registry.forget(name)          # an algorithm that is not sound cannot be named
        _loaded.pop(name, None)
        raise
    _loaded[name] = digest


def files() -> set[str]:
    """The files of loaded plugins, as tracebacks name them."""
    return {str(sys.modules[name].__file__) for name in _loaded if name in sys.modules}


def position(error: BaseException) -> str:
    """Where in a plugin an error was made; empty if it was not made in one."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files()]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def _check(module: str) -> None:
    """What a plugin's algorithms can be told must be sound before anybody tells them anything."""
    for found in algorithms().values():
        if f"{found.round.__module__}.".startswith(f"{module}."):
            _check_algorithm(found)


def _check_algorithm(found: Algorithm) -> None:
    check_defaults(f"algorithm {found.name!r}: {found.config.__name__}", found.config)
    if found.claim is not None:
        try:
            found.config(**found.claim.steps)
            _ = [found.claim.steps[name] for name in found.claim.floor]
        except (TypeError, ValueError, KeyError) as error:
            raise InputError(f"algorithm {found.name!r}: its claim's steps or floor: {error}") from None


def _top(module: str) -> str:
    """The package that a module belongs to."""
    return module.partition(".")[0]


def _module(path: Path) -> str:
    return "dbo_plugin_" + hashlib.sha256(str(opened(path).resolve()).encode()).hexdigest()[:12]


def digests(plugins: tuple[str, ...]) -> list[str]:
    """What the loaded plugins' code is, for the run key: a changed plugin is another experiment."""
    try:
        return [_loaded[_module(Path(plugin))] if plugin.endswith(".py") else _digest(plugin) for plugin in plugins]
    except KeyError:
        told = f"plugins: {', '.join(plugins)} changed and cannot be loaded; make the experiment again"
        raise InputError(told) from None


@cache
def built_in() -> str:
    """What the code of the shipped algorithms and tasks is: one that was edited gives other results."""
    folders = (Path(inspect.getfile(registry)).parent, Path(inspect.getfile(api)).parent)
    files = [file for folder in folders for file in sorted(folder.glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _digest(module: str) -> str:
    """Of a module's file; of one in a package, of all files of that package, which it may import."""
    package = sys.modules.get(_top(module))
    folders = [Path(folder) for folder in getattr(package, "__path__", ())]
    files = [file for folder in folders for file in sorted(folder.rglob("*.py")) if file.is_file()]
    origin = getattr(sys.modules.get(module), "__file__", None)
    if not files and origin is None:
        raise InputError(f"plugins: the source of {module} cannot be found")
    return hashlib.sha256(b"".join(file.read_bytes() for file in files or [Path(str(origin))])).hexdigest()
