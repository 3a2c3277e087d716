"""Paths in an experiment: in a file they are relative to that file, anywhere else to the working directory.

What is recorded of a run has them in full, so that it can be repeated and gone on with from anywhere.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def seen_from(file: str | Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """An experiment as it stands in a file, its paths as the working directory sees them."""
    folder = Path(file).parent
    return _changed(data, lambda path: path if _fixed(path) or folder == Path() else str(folder / path))


def in_full(data: Mapping[str, Any]) -> dict[str, Any]:
    """An experiment with absolute paths."""
    return _changed(data, lambda path: path if _fixed(path) else os.path.abspath(path))


def opened(path: str | Path) -> Path:
    """Where a path leads; a ~ of somebody who is not known here stays as it is, and is not found."""
    return Path(os.path.expanduser(path))


def _fixed(path: str) -> bool:
    return not path or path.startswith("~") or "://" in path or os.path.isabs(path)


def _changed(data: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """With another word for each path; what is not as it should be stays, and is told of by whoever checks it."""
    result = dict(data)
    if isinstance(plugins := result.get("plugins"), list | tuple):
        files = (isinstance(plugin, str) and plugin.endswith(".py") for plugin in plugins)
        result["plugins"] = [change(p) if file else p for p, file in zip(plugins, files, strict=True)]
    if isinstance(topology := result.get("topology"), Mapping) and isinstance(topology.get("file"), str):
        result["topology"] = {**topology, "file": change(topology["file"])}
    if isinstance(folder := result.get("data_dir"), str):
        result["data_dir"] = change(folder)
    return result
