"""What the live page says of a run's settings: its name among others, its facts, its network; and where runs lie."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from os import walk
from pathlib import Path
from typing import Any

import yaml

from dbo.dashboards.watch.tail import number, numbers, text

_SETTINGS = 2**16            # characters of experiment.yaml; YAML of more, and nested, takes long to read
_DEPTH = 4                   # folders below the one that is watched in which runs are looked for
_FOLDERS = 20_000            # of which no more than these
_NOT_RUNS = ("checkpoints", "mlartifacts", "mlruns")       # a tracking server's copies are not further runs


def members(folder: Path, group: dict[str, Any]) -> Iterator[str]:
    """The members of a group that lie in its folder."""
    inside = folder.resolve()
    for member in dict.fromkeys(m for m in group["members"] if isinstance(m, str)):
        try:
            if (inside / member).resolve().is_relative_to(inside):
                yield member
        except (OSError, ValueError):
            continue


def found(folder: Path) -> Iterator[str]:
    """Folders of runs in and below a folder."""
    for place, folders, files in islice(walk(folder), _FOLDERS):
        below = Path(place).relative_to(folder)
        folders[:] = sorted(f for f in folders if f not in _NOT_RUNS and not f.startswith("."))
        if len(below.parts) >= _DEPTH:
            folders.clear()
        if "experiment.yaml" in files or "metrics.jsonl" in files:
            folders.clear()
            yield below.as_posix()


def flat(source: str) -> dict[str, str]:
    """An experiment's settings by dotted key; empty if it cannot be read."""
    try:
        data = yaml.safe_load(source) if len(source) <= _SETTINGS else None
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    settings: dict[str, str] = {}
    sections = [("", data)]
    for above, section in sections:
        for key, value in section.items() if isinstance(section, dict) else ():
            if isinstance(value, dict) and above.count(".") < 2:
                sections.append((f"{above}{text(key)}.", value))
            elif isinstance(value, str | int | float):
                settings[f"{above}{text(key)}"] = text(value)
    return settings


def facts(experiment: dict[str, str]) -> list[str]:
    """What is run, in a few words."""
    words = [
        experiment.get("name", ""), " ".join(experiment.get(key, "") for key in ("task.name", "task.dataset")),
        f"{experiment['nodes']} nodes" if "nodes" in experiment else "", experiment.get("topology.name", ""),
        " ".join([experiment.get("partition.name", ""), *(
            f"{key} {experiment[f'partition.{key}']}" for key in ("h", "alpha") if f"partition.{key}" in experiment)]),
        f"seed {experiment['seed']}" if "seed" in experiment else "",
    ]
    return [word.strip() for word in words if word.strip()]


def named(experiments: dict[str, dict[str, str]]) -> dict[str, str]:
    """A short name for each run: its algorithm, and the settings in which it differs from others of that algorithm."""
    labels = {}
    for path, mine in experiments.items():
        algorithm = mine.get("algorithm.name", "")
        if not algorithm:
            labels[path] = text(path)
            continue
        alike = [other for other in experiments.values() if other.get("algorithm.name") == algorithm]
        differs = [key for key in sorted(mine) if len({other.get(key) for other in alike}) > 1 and key != "name"]
        labels[path] = " ".join([algorithm, *(f"{key.rpartition('.')[2]}={mine[key]}" for key in differs)])
    doubled = {label for label, count in Counter(labels.values()).items() if count > 1}
    return {path: f"{label} ({text(path)})" if label in doubled else label for path, label in labels.items()}


def laid_out(network: dict[str, Any]) -> dict[str, Any]:
    """The network with a place for each node; without links where these are too many to be drawn."""
    nodes, edges = number(network.get("nodes")), network.get("edges")
    if not isinstance(nodes, int) or nodes < 1:
        return {}
    good = [
        edge for edge in (edges if isinstance(edges, list) else ())
        if isinstance(edge, list) and len(edge) == 2 and all(type(end) is int and 0 <= end < nodes for end in edge)
    ]
    from dbo.dashboards.topology import DRAWN, places

    drawn = nodes <= DRAWN and (bool(good) or nodes == 1)
    return {
        "nodes": nodes, "links": number(network.get("links")), "spectral_gap": number(network.get("spectral_gap")),
        "edges": good if drawn else None,
        "places": [numbers(place) for place in places({"nodes": nodes, "edges": good}).tolist()] if drawn else None,
    }
