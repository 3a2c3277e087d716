"""Copy the files that an experiment names into one folder, so that it can run on another machine.

A file is copied only if it is what its key asks for. A key that names a token or a private key by mistake must not send
it to a cluster, and the error does not quote it.
"""

import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from dbo.platform.config.models import parse_start
from dbo.platform.config.paths import expand_user, is_file_key
from dbo.platform.config.plugin_modules import ModuleSource
from dbo.platform.config.plugins import read_shippable
from dbo.platform.config.presets import read_file
from dbo.platform.config.validation import build
from dbo.platform.errors import InputError
from dbo.platform.network.topology import parse_edges
from dbo.tasks.registry import DATASETS

_EDGE_LIST = "topology.file"
_PRESETS = "presets"
_START = "start"
_LARGEST = 100_000_000      # bytes of one file: Ray uploads a job's folder with every submission


def copy_experiment_files(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Copy plugins, presets, start, edge list and data files into `folder`; return the experiment with their names."""
    result = dict(data)
    if "plugins" in data:
        plugins = [data["plugins"]] if isinstance(data["plugins"], str) else data["plugins"]
        result["plugins"] = _copy_plugins(plugins, folder)
    topology = data.get("topology")
    if isinstance(topology, Mapping) and "file" in topology:
        result["topology"] = {**topology, "file": copy_file(topology["file"], folder)}
    for key in (_PRESETS, _START):
        if data.get(key) is not None:
            result[key] = copy_file(data[key], folder, key)
    if isinstance(task := data.get("task"), Mapping):
        result["task"] = _copy_data_files(task, folder)
    return result


def _copy_plugins(plugins: Sequence[str], folder: Path) -> list[str]:
    """Copy files, and the Python files of modules, which Python finds in a job's folder; return their names there."""
    names, packed = [], set()
    for number, plugin in enumerate(plugins):
        key = f"plugins.{number}"
        if plugin.endswith(".py"):
            names.append(copy_file(plugin, folder, key))
            continue
        source = read_shippable(plugin, f"{key}: {plugin}")
        if source is not None and source.top not in packed:
            _write_module(source, folder, key)
            packed.add(source.top)
        names.append(plugin)
    return names


def _write_module(source: ModuleSource, folder: Path, key: str) -> None:
    """Write the files that this process has loaded, which the run key covers, if all of them are Python."""
    for file in source.files:
        _check_python(file.source, f"{key}: {file.path}")
    entry = folder / source.files[0].name.partition("/")[0]
    if entry.exists():
        raise InputError(f"{key}: {source.top}: two files of an experiment are called {entry.name}")
    for file in source.files:
        target = folder / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.source)


def _copy_data_files(task: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Copy the files of the task's data set, if the data set can read them; return the section with their names.

    A file of a task that is not one of its data set cannot be checked here: its path is kept.
    """
    chosen = task.get("dataset")
    given = {**task, **chosen} if isinstance(chosen, Mapping) else dict(task)
    name = chosen.get("name") if isinstance(chosen, Mapping) else chosen
    kind = DATASETS[name] if isinstance(name, str) and name in DATASETS else None
    known: set[str] = {field.name for field in fields(kind)} if is_dataclass(kind) else set()
    files = {key: value for key, value in given.items() if is_file_key(key) and value and key in known}
    if kind is None or not files:
        return dict(task)
    names = {key: _copy(file, folder, f"task.{key}") for key, file in files.items()}
    copies = {key: str(folder / copied) for key, copied in names.items()}
    try:      # the copies, not the files themselves, which may change in between
        build("task", kind, {**given, **copies}).load(0, None)
    except Exception:
        for copied in copies.values():
            Path(copied).unlink(missing_ok=True)
        shown = ", ".join(files.values())
        raise InputError(f"task.file: {shown} cannot be read as {name}; `dbo run` shows why") from None
    if isinstance(chosen, Mapping):
        own = {key: value for key, value in names.items() if key in chosen}
        return {**task, **{key: value for key, value in names.items() if key in task}, "dataset": {**chosen, **own}}
    return {**task, **names}


def copy_file(file: str, folder: Path, key: str = _EDGE_LIST) -> str:
    """Copy the file that `key` names into `folder` and return its name there, if the content is what the key asks for.

    The copy is checked, not the file itself, which may change in between.
    """
    copy, where = folder / _copy(file, folder, key), f"{key}: {file}"
    try:
        if key == _EDGE_LIST:
            _check_edge_list(copy.read_bytes(), where)
        elif key == _PRESETS:
            _check_presets(copy, where)
        elif key == _START:
            _check_start(copy.read_bytes(), where)
        else:
            _check_python(copy.read_bytes(), where)
    except InputError:
        copy.unlink()
        raise
    return copy.name


def _copy(file: str, folder: Path, key: str) -> str:
    source, where = expand_user(file), f"{key}: {file}"
    if (folder / source.name).exists():
        raise InputError(f"{where}: two files of an experiment are called {source.name}")
    try:
        if (size := source.stat().st_size) > _LARGEST:
            raise InputError(f"{where} has {size / 1e6:.0f} MB; a job's files may have {_LARGEST / 1e6:.0f} MB each")
        if not source.is_file() and not source.is_dir():        # a device may never end
            raise InputError(f"{where} is not a regular file")
        shutil.copyfile(source, folder / source.name)
    except (OSError, ValueError) as error:      # ValueError: a file name with a null character
        raise InputError(f"{where} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return source.name


def _check_edge_list(content: bytes, where: str) -> None:
    try:
        edges = parse_edges(content.decode("utf-8"), where)
    except UnicodeDecodeError:
        raise InputError(f"{where} is not an edge list; must be a text with a line 'i j' per edge") from None
    except ValueError as error:
        raise InputError(str(error)) from None
    if not edges:
        raise InputError(f"{where} is not an edge list: it has no edge; must have a line 'i j' per edge")


def _check_presets(file: Path, where: str) -> None:
    try:
        read_file(file)
    except InputError:
        raise InputError(f"{where} is not a preset file; dbo tune writes such files") from None


def _check_start(content: bytes, where: str) -> None:
    try:
        parse_start(content, where)
    except InputError:          # whose text may quote the header
        raise InputError(f"{where} is not a model; must be a safetensors file with the arrays x and y") from None


def _check_python(content: bytes, where: str) -> None:
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(content, where, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise InputError(f"{where}{line}: is not a plugin; must be Python that compiles") from None
