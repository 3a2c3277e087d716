"""Read presets: tuned step sizes per algorithm, task and data set.

Shipped ones are in `algorithms/presets/<algorithm>.yaml`. `dbo tune` writes a file of one's own, which an experiment
names under `presets`:

    c2dfb:
      my_task/mnist:
        values: {eta_in: 0.1, eta_out: 0.05}
        horizon: ...      # how the values were found; ignored here

A preset fills in only parameters that an experiment leaves out; its values are part of the resolved experiment.
"""

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from shlex import quote
from typing import Any

from dbo.algorithms import registry
from dbo.parameters import declaration
from dbo.platform.config import yaml_io
from dbo.platform.config.paths import expand_user
from dbo.platform.errors import InputError
from dbo.platform.regular_files import open_regular
from dbo.tasks.registry import TASKS


def find_values(file: str | None, given: Mapping[str, Any], task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tuned values for what an algorithm's section leaves out: from the file, else from the shipped ones.

    The file is not read if the section has every parameter: a recorded experiment does not need it.
    """
    name, dataset = given["name"], task.get("dataset")
    shipped = find_preset(name, task["name"], dataset)
    if file is None or all(field.name in given for field in fields(registry.algorithms()[name].config)):
        return shipped
    return shipped | find_own(file, name, task["name"], dataset)


def find_preset(algorithm: str, task: str, dataset: str | None) -> dict[str, Any]:
    """Return the shipped values of an algorithm for a task and data set; {} if there are none."""
    return dict(_read(algorithm).get(format_place(task, dataset), {}))


def find_own(file: str, algorithm: str, task: str, dataset: str | None) -> dict[str, Any]:
    """Return the values in a file of one's own; {} if it has none."""
    entry = read_file(file).get(algorithm, {}).get(format_place(task, dataset), {})
    return dict(entry.get("values", {}))


def read_file(file: str | Path, key: str = "presets") -> dict[str, dict[str, dict[str, Any]]]:
    """Return the content of a preset file: algorithm → task or task/data set → values, and how they were found."""
    try:
        data = yaml_io.read(expand_user(file), opener=open_regular)     # a foreign experiment may name a pipe
    except InputError as error:
        raise InputError(f"{key}: {error}") from None
    for algorithm, places in data.items():
        if not isinstance(places, dict):
            raise InputError(f"{key}: {file}: {algorithm} must be a mapping of tasks; dbo tune writes such files")
        for place, entry in places.items():
            if not isinstance(entry, dict) or not isinstance(entry.get("values"), dict):
                raise InputError(f"{key}: {file}: {algorithm}.{place} must have values: {{parameter: number}}")
    return data


def format_place(task: str, dataset: str | None) -> str:
    """Return the key of a task in a preset file."""
    return f"{task}/{dataset}" if dataset else task


def list_presets(algorithm: str) -> dict[str, Any]:
    """Return task, or task/data set → the shipped values of an algorithm."""
    return dict(_read(algorithm))


def describe_steps(
    file: str | None, given: Mapping[str, Any], task: Mapping[str, Any], plugins: tuple[str, ...] = ()
) -> str | None:
    """Return a notice if step sizes come from a file of one's own, or are untuned defaults; None: nothing to report."""
    name, place = given["name"], format_place(task["name"], task.get("dataset"))
    missing = [step for step in list_steps(name) if step not in given]
    if not missing:
        return None
    own = find_own(file, name, task["name"], task.get("dataset")) if file is not None else {}
    if used := [f"{step} = {own[step]}" for step in missing if step in own]:
        return f"step sizes of {name} on {place} from {file}: {', '.join(used)}"
    if find_preset(name, task["name"], task.get("dataset")):
        return None
    return (
        f"no step sizes are tuned for {name} on {place}; the defaults may diverge: "
        f"{_suggest_command(name, task, plugins)}"
    )


def list_steps(algorithm: str) -> list[str]:
    """Return the parameters of an algorithm that are declared as step sizes; null by default: those of another one."""
    config = registry.algorithms()[algorithm].config
    return [field.name for field in fields(config) if declaration(field).schedule and field.default is not None]


def _suggest_command(algorithm: str, task: Mapping[str, Any], plugins: tuple[str, ...]) -> str:
    parts = [f"task={task['name']}"]
    if task.get("dataset") not in (None, *TASKS[task["name"]].datasets[:1]):
        parts.append(f"task.dataset={task['dataset']}")
    if plugins:
        parts.append(quote(f"plugins={plugins[0]}" if len(plugins) == 1 else f"plugins=[{','.join(plugins)}]"))
    return f"dbo tune {' '.join(parts)} --algorithms {algorithm}"


@cache
def _read(algorithm: str) -> dict[str, Any]:
    source = Path(registry.__file__).with_name("presets") / f"{algorithm}.yaml"
    entries = yaml_io.read(source) if source.is_file() else {}
    return {place: entry.get("values", entry) for place, entry in entries.items()}      # older entries are bare values
