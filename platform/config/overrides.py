"""Parse and apply `key=value` overrides: dotted paths into the experiment, values read as YAML."""

from collections.abc import Iterable, Mapping
from typing import Any

from dbo.platform.config import yaml_io
from dbo.platform.errors import InputError

SECTIONS = ("task", "algorithm", "topology", "partition", "engine")
_COMPONENTS = (*SECTIONS, "algorithm.compressor", "algorithm.compressor_x")        # each may be given by its name alone


def parse(arguments: Iterable[str]) -> dict[str, Any]:
    """Return {"algorithm.lam": 100.0, …} in the order given; a path given twice keeps its last value."""
    overrides: dict[str, Any] = {}
    for argument in arguments:
        path, sign, text = argument.partition("=")
        if not sign or not all(part.strip() for part in path.split(".")):
            raise InputError(f"{argument!r} is not of the form key=value, e.g. algorithm.lam=100")
        overrides[path] = yaml_io.parse(text, path)
    return overrides


def apply(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `data` with the overrides applied.

    A component may be given by its name alone: `algorithm=mdbo` is `algorithm.name=mdbo`. Another component's name
    over that of a file drops the parameters of the old component.
    """
    result = expand_names(data)
    overrides = {
        f"{path}.name" if path in _COMPONENTS and isinstance(value, str) else path: value
        for path, value in overrides.items()
    }
    for path, value in overrides.items():
        if path.endswith(".name"):
            section = _section(result, path)
            if section.get("name", value) != value:
                section.clear()
                section["name"] = value
    for path, value in overrides.items():
        section = _section(result, path)
        section[path.rpartition(".")[2]] = _copy(value)
    return result


def expand_names(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `data` in which a component that is given by its name alone is a section: {"name": …}."""
    result: dict[str, Any] = _copy(data)
    for path in _COMPONENTS:
        parent, _, key = path.rpartition(".")
        section = result.get(parent) if parent else result
        if isinstance(section, dict) and isinstance(section.get(key), str):
            section[key] = {"name": section[key]}
    return result


def flatten(data: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the values of an experiment under dotted keys; lists and schedules stay whole."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and value and "schedule" not in value:
            flat |= flatten(value, f"{above}{key}.")
        else:
            flat[f"{above}{key}"] = value
    return flat


def _section(data: dict[str, Any], path: str) -> dict[str, Any]:
    section = data
    for part in path.split(".")[:-1]:
        inner = section.get(part)
        if inner is None:
            inner = section[part] = {}
        elif not isinstance(inner, dict):
            raise InputError(f"{path}: {part} is {inner!r}, which has no keys of its own")
        section = inner
    return section


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, list) else value
