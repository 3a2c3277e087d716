"""Describe the settings of runs for the live page: labels, facts, network; and find the runs in a folder."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from os import walk
from pathlib import Path
from typing import Any

from dbo.dashboards.watch.tail import number, numbers, text
from dbo.platform.errors import InputError
from dbo.platform.runs.run_folder import RunFolder
from dbo.platform.runs.schema import RecordedNetwork, parse_experiment

_MAX_SETTINGS = 2**16        # characters of experiment.yaml; longer and nested YAML takes long to parse
_DEPTH = 4                   # folders below the watched one in which runs are searched
_MAX_FOLDERS = 20_000        # that are searched
_NOT_RUNS = ("checkpoints", "mlartifacts", "mlruns")       # copies on a tracking server are not further runs


def find_runs(folder: Path) -> Iterator[str]:
    """Yield the folders of runs in and below a folder, relative to it."""
    files_of_runs = {RunFolder(folder).experiment.name, RunFolder(folder).metrics.name}
    for place, folders, files in islice(walk(folder), _MAX_FOLDERS):
        below = Path(place).relative_to(folder)
        folders[:] = sorted(f for f in folders if f not in _NOT_RUNS and not f.startswith("."))
        if len(below.parts) >= _DEPTH:
            folders.clear()
        if files_of_runs.intersection(files):
            folders.clear()
            yield below.as_posix()


def flatten_settings(source: str) -> dict[str, str]:
    """Return the settings in experiment.yaml by dotted key; empty if it cannot be parsed."""
    try:
        data = parse_experiment(source, "experiment.yaml") if len(source) <= _MAX_SETTINGS else {}
    except InputError:
        return {}
    settings: dict[str, str] = {}
    sections = [("", data)]
    for prefix, section in sections:
        for key, value in section.items():
            if isinstance(value, dict) and prefix.count(".") < 2:
                sections.append((f"{prefix}{text(key)}.", value))
            elif isinstance(value, str | int | float):
                settings[f"{prefix}{text(key)}"] = text(value)
    return settings


def describe_settings(experiment: dict[str, str]) -> list[str]:
    """Return name, task, nodes, topology, partition and seed, as far as they are known."""
    facts = [
        experiment.get("name", ""), " ".join(experiment.get(key, "") for key in ("task.name", "task.dataset")),
        f"{experiment['nodes']} nodes" if "nodes" in experiment else "", experiment.get("topology.name", ""),
        " ".join([experiment.get("partition.name", ""), *(
            f"{key} {experiment[f'partition.{key}']}" for key in ("h", "alpha") if f"partition.{key}" in experiment)]),
        f"seed {experiment['seed']}" if "seed" in experiment else "",
    ]
    return [fact.strip() for fact in facts if fact.strip()]


def list_parameters(experiment: dict[str, str]) -> list[tuple[str, str]]:
    """Return the hyperparameters of a run: those of the algorithm, then how it samples."""
    own = [(key.removeprefix("algorithm."), value) for key, value in experiment.items()
           if key.startswith("algorithm.") and key != "algorithm.name"]
    batches = [(key, experiment[key]) for key in ("batch_size.lower", "batch_size.upper", "batch_per", "batch_order")
               if key in experiment and "batch_size.lower" in experiment]
    return [(name.replace("compressor.name", "compressor"), value) for name, value in (*own, *batches)]


def label_runs(experiments: dict[str, dict[str, str]]) -> dict[str, str]:
    """Label each run with its algorithm and the settings in which it differs from others of that algorithm."""
    labels = {}
    for path, own in experiments.items():
        algorithm = _name_algorithm(own)
        if not algorithm:
            labels[path] = text(path)
            continue
        same = [other for other in experiments.values() if _name_algorithm(other) == algorithm]
        differing = [key for key in sorted(own) if len({other.get(key) for other in same}) > 1 and key != "name"]
        labels[path] = " ".join([algorithm, *(f"{key.rpartition('.')[2]}={own[key]}" for key in differing)])
    repeated = {label for label, count in Counter(labels.values()).items() if count > 1}
    return {path: f"{label} ({text(path)})" if label in repeated else label for path, label in labels.items()}


def _name_algorithm(experiment: dict[str, str]) -> str:
    """Return the label of a variant, or the algorithm's name."""
    return experiment.get("label") or experiment.get("algorithm.name", "")


def describe_network(network: RecordedNetwork | None) -> dict[str, Any]:
    """Return the network with a position for each node; without links if there are too many to be drawn."""
    if network is None:
        return {}
    from dbo.dashboards.topology import MAX_NODES, compute_layout

    can_draw = network.nodes <= MAX_NODES and (bool(network.edges) or network.nodes == 1)
    positions = compute_layout(network).tolist() if can_draw else None
    return {
        "nodes": number(network.nodes), "links": network.links, "spectral_gap": network.spectral_gap,
        "edges": network.edges or [] if can_draw else None,
        "positions": [numbers(position) for position in positions] if positions else None,
    }
