"""Copy the files that an experiment names into one folder, so that it can run on another machine."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dbo.platform.errors import InputError


def copy_experiment_files(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Copy plugins and the edge list of an experiment's data into `folder`; return the data with the copies' names."""
    result = dict(data)
    if "plugins" in data:
        result["plugins"] = [
            copy_file(plugin, folder) if plugin.endswith(".py") else plugin for plugin in data["plugins"]
        ]
    topology = data.get("topology")
    if isinstance(topology, Mapping) and "file" in topology:
        result["topology"] = {**topology, "file": copy_file(topology["file"], folder)}
    return result


def copy_file(file: str, folder: Path) -> str:
    """Copy a file into `folder` and return its name there."""
    source = Path(file).expanduser()
    if (folder / source.name).exists():
        raise InputError(f"{file}: two files of an experiment are called {source.name}")
    shutil.copyfile(source, folder / source.name)
    return source.name
