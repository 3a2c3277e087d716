"""Resolve paths in an experiment: relative to the file they stand in, else to the working directory.

A run records absolute paths, so that it can be repeated and resumed from anywhere.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def resolve_from_file(file: str | Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the experiment in a file with its paths relative to the working directory."""
    folder = Path(file).parent
    return _map_paths(data, lambda path: path if _is_fixed(path) or folder == Path() else str(folder / path))


def make_absolute(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return an experiment with absolute paths."""
    return _map_paths(data, lambda path: path if _is_fixed(path) else os.path.abspath(path))


def expand_user(path: str | Path) -> Path:
    """Return a path with ~ replaced by the home folder; the ~ of an unknown user stays."""
    return Path(os.path.expanduser(path))


def _is_fixed(path: str) -> bool:
    return not path or path.startswith("~") or "://" in path or os.path.isabs(path)


def is_file_key(key: str) -> bool:
    """Decide whether a parameter of a task or a data set names a file: `file`, `test_file`, …"""
    return key == "file" or key.endswith("_file")


def _map_files(section: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    return {
        key: change(value) if is_file_key(key) and isinstance(value, str) else value for key, value in section.items()
    }


def _map_paths(data: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return the experiment with every path changed; values of a wrong type stay, validation reports them."""
    result = dict(data)
    if isinstance(plugins := result.get("plugins"), str | list | tuple):
        plugins = [plugins] if isinstance(plugins, str) else plugins
        result["plugins"] = [change(p) if isinstance(p, str) and p.endswith(".py") else p for p in plugins]
    if isinstance(topology := result.get("topology"), Mapping) and isinstance(topology.get("file"), str):
        result["topology"] = {**topology, "file": change(topology["file"])}
    if isinstance(task := result.get("task"), Mapping):
        result["task"] = _map_files(task, change)
        if isinstance(dataset := task.get("dataset"), Mapping):
            result["task"]["dataset"] = _map_files(dataset, change)
    for key in ("data_dir", "start", "presets"):
        if isinstance(path := result.get(key), str):
            result[key] = change(path)
    return result
