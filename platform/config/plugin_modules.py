"""Read the source of plugins that are named as modules, and import it in a process that does not have their files.

A module is its file; a module of a package is all Python files of that package, which it may import. Both enter run
keys and reach other processes by content. There a finder imports them from memory, before anything on the path of that
process: all processes of a run execute the same source. Errors name the files on the machine that the source is from.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.abc import ExecutionLoader, MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import decode_source, spec_from_file_location
from pathlib import Path
from typing import Any

from dbo import components
from dbo.platform.config.code_identity import Source, combine, parse_source
from dbo.platform.errors import InputError
from dbo.platform.regular_files import open_regular

LARGEST = 10_000_000        # bytes of a package's Python files: every actor and every job gets them
_ADVICE = "put what it registers into a .py file or a package of its own, and install the rest on every machine"
_PLACE = "<shipped plugin>"     # begins the entries of a shipped package's __path__, where no folder is searched


@dataclass(frozen=True, slots=True)
class ModuleFile:
    """A Python file of a module."""

    name: str           # path below the folder that Python searches: package/inner/core.py
    path: str           # on the machine that it comes from, as tracebacks name it
    source: bytes


@dataclass(frozen=True, slots=True)
class ModuleSource:
    """The Python files of a top-level module or package."""

    top: str
    files: tuple[ModuleFile, ...]
    is_package: bool
    reason: str = ""        # why it cannot be sent to other processes; empty: it can

    def has_content_of(self, other: "ModuleSource") -> bool:
        """Decide whether two sources are the same, wherever their files are."""
        return [(file.name, file.source) for file in self.files] == [(file.name, file.source) for file in other.files]

    def check_shippable(self, where: str) -> None:
        """Raise InputError if the source cannot be sent to other processes."""
        if self.reason:
            raise InputError(f"{where} cannot be sent to other processes: {self.reason}; {_ADVICE}")


def top_level(module: str) -> str:
    """Return the package that a module belongs to."""
    return module.partition(".")[0]


def read_module(module: str) -> ModuleSource:
    """Read the source of an imported module: its file, or the files of its package."""
    top = top_level(module)
    imported = sys.modules[top]
    folders = [str(folder) for folder in getattr(imported, "__path__", ())]
    if folders:
        return _read_package(top, folders)
    path = getattr(imported, "__file__", None)
    if path is None or not os.path.isfile(path):
        raise InputError(f"the source of {module} cannot be found")
    is_python = path.endswith(".py")
    file = ModuleFile(f"{top}.py" if is_python else os.path.basename(path), path, _read(path))
    return ModuleSource(top, (file,), is_package=False, reason="" if is_python else f"{file.name} is compiled")


def _read_package(top: str, folders: list[str]) -> ModuleSource:
    found: dict[Path, str] = {}                             # file below the package → where it is
    compiled: list[str] = []
    for relative, path in (entry for folder in folders for entry in _walk(folder)):
        if path.endswith(".py"):
            found.setdefault(relative, path)                # the first folder wins, as in an import
        elif path.endswith(tuple(EXTENSION_SUFFIXES)):
            compiled.append(f"{top}/{relative.as_posix()}")
    if not found:
        raise InputError(f"the source of {top} cannot be found")
    files = tuple(ModuleFile(f"{top}/{key.as_posix()}", found[key], _read(found[key])) for key in sorted(found))
    size, reason = sum(len(file.source) for file in files), ""
    if compiled:
        reason = f"{min(compiled)} is compiled"
    elif size > LARGEST:
        reason = f"{top} has {size / 1e6:.1f} MB of Python files, of which at most {LARGEST / 1e6:g} MB are sent"
    return ModuleSource(top, files, is_package=True, reason=reason)


def _walk(folder: str) -> Iterator[tuple[Path, str]]:
    """Yield the files that `import` can find: no folder and no file with a dot in its name, such as .venv."""
    for place, inner, names in os.walk(folder):
        inner[:] = sorted(name for name in inner if "." not in name and name != "__pycache__")
        for name in sorted(names):
            if "." not in name.removesuffix(".py") or name.endswith(tuple(EXTENSION_SUFFIXES)):
                path = os.path.join(place, name)
                yield Path(os.path.relpath(path, folder)), path


def _read(path: str) -> bytes:
    try:
        with open(path, "rb", opener=open_regular) as stream:        # a pipe or a device may never end
            return stream.read()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


@cache
def identify(source: ModuleSource, module: str) -> Source:
    """Return the part of a run key: the syntax trees of the files, and what they import."""
    if not source.is_package:
        return parse_source(source.files[0].source, module)
    return combine(
        (file.name.partition("/")[2],
         parse_source(file.source, source.top, is_package=file.name.endswith("/__init__.py")))
        for file in source.files
    )


# ---- in another process ----------------------------------------------------------------------------------------------


_received: dict[str, ModuleSource] = {}


def find_received(module: str) -> ModuleSource | None:
    """Return the source that another process has sent for a module, or None."""
    return _received.get(top_level(module))


def all_received() -> tuple[ModuleSource, ...]:
    """Return the sources that other processes have sent."""
    return tuple(_received.values())


def install(source: ModuleSource) -> None:
    """Import a module from this source from now on; modules that have another one are dropped."""
    top = source.top
    if (known := _received.get(top)) is not None and known.has_content_of(source):
        return
    for name in [name for name in sys.modules if name == top or name.startswith(f"{top}.")]:
        components.forget(name)
        del sys.modules[name]
    _received[top] = source
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        sys.path_hooks.insert(0, _Listing)


def uninstall(top: str) -> None:
    """Import a module from this process's own path again."""
    _received.pop(top, None)


def _find_file(name: str) -> tuple[ModuleFile | None, bool] | None:
    """Return the file of a received module and whether it is a package; a package may have no file. None: not found."""
    if (source := _received.get(top_level(name))) is None:
        return None
    base = name.replace(".", "/")
    by_name = {file.name: file for file in source.files}
    if (file := by_name.get(f"{base}/__init__.py")) is not None:
        return file, True
    if (file := by_name.get(f"{base}.py")) is not None:
        return file, False
    return (None, True) if any(file.startswith(f"{base}/") for file in by_name) else None


class _Finder(MetaPathFinder):
    """Find received modules, before anything on the path of this process."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if (found := _find_file(fullname)) is None:
            return None
        file, is_package = found
        folders, loader = [f"{_PLACE}/{fullname}"] if is_package else None, _Loader(file)
        if file is not None:
            return spec_from_file_location(fullname, file.path, loader=loader, submodule_search_locations=folders)
        spec = ModuleSpec(fullname, loader, is_package=True)
        spec.submodule_search_locations = folders
        return spec


class _Loader(ExecutionLoader):
    """Execute a file from memory. Tracebacks and `inspect` show its lines, which may not exist on this machine."""

    def __init__(self, file: ModuleFile | None) -> None:
        self._file = file

    def is_package(self, fullname: str) -> bool:
        found = _find_file(fullname)
        return found is not None and found[1]

    def get_filename(self, fullname: str) -> str:
        if self._file is None:
            raise ImportError(f"{fullname} has no file")
        return self._file.path

    def get_source(self, fullname: str) -> str:
        return decode_source(self._file.source) if self._file else ""

    def get_code(self, fullname: str) -> Any:
        path = self._file.path if self._file else _PLACE
        return self.source_to_code(self._file.source if self._file else b"", path)


class _Listing:
    """List the modules of a received package for `pkgutil.iter_modules`."""

    def __init__(self, path: str) -> None:
        if not path.startswith(f"{_PLACE}/"):
            raise ImportError(path)
        self._package = path.removeprefix(f"{_PLACE}/")

    def find_spec(self, fullname: str, target: Any = None) -> None:
        """Find nothing: what is not in the package does not exist."""

    def iter_modules(self, prefix: str = "") -> Iterator[tuple[str, bool]]:
        base = f"{self._package.replace('.', '/')}/"
        source = _received.get(top_level(self._package))
        below = [file.name.removeprefix(base) for file in source.files if file.name.startswith(base)] if source else []
        names = {name.partition("/")[0].removesuffix(".py"): "/" in name for name in below if name != "__init__.py"}
        yield from ((f"{prefix}{name}", is_package) for name, is_package in sorted(names.items()))
