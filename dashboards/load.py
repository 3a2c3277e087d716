"""What lies in folders of runs, comparisons and sweeps, read and checked once; finished or not.

A folder that holds no run, or a file in it that cannot be what it should be, is an input error that names it.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from dbo.platform.errors import InputError
from dbo.platform.runs.run_folder import (
    CLOSED_FORMS,
    COLUMNS,
    Record,
    RunFolder,
    Target,
    in_use,
    read_events,
    read_metrics,
)

Series = NDArray[np.float64]

DEFAULT_TARGET = Target("node_accuracy_mean", 0.9)
_DEPTH = 3
_STATUSES = ("finished", "diverged", "failed", "stopped")
_NUMBERS = (*(column for column in COLUMNS if column != "round"), *CLOSED_FORMS)


@dataclass(frozen=True, slots=True)
class Group:
    """A comparison or a sweep, as its group.json tells it."""

    folder: Path
    kind: str
    name: str
    command: str
    status: str
    target: Target | None
    axes: dict[str, list[Any]]
    claim: str                   # what it is to show
    members: tuple[Path, ...]
    waiting: int                 # members that have not begun


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that happened on the way, and after which round."""

    round: int
    kind: str       # lost | recovered | diverged | failed
    text: str


@dataclass(frozen=True, slots=True)
class NodeHistory:
    """What each node did: a row per evaluation, a column per node."""

    rounds: NDArray[np.int64]
    accuracy: Series | None
    apart_x: Series
    bytes: Series
    channels: dict[str, float]       # bytes of all nodes, at the last evaluation


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder."""

    folder: Path
    experiment: dict[str, Any]
    status: str                      # finished | diverged | failed | running | interrupted
    error: str | None
    records: list[Record]
    columns: dict[str, Series]       # NaN where there is no value
    nodes: NodeHistory | None
    network: dict[str, Any] | None
    incidents: tuple[Incident, ...]
    target: Target
    key: str | None = None           # equal keys, equal results; None: it has not told it
    group: Group | None = field(default=None, compare=False)

    @property
    def algorithm(self) -> str:
        return str(_section(self.experiment, "algorithm").get("name", "?"))

    @property
    def name(self) -> str:
        return str(self.experiment.get("name", self.folder.name))

    @property
    def seed(self) -> Any:
        return self.experiment.get("seed", 0)

    @property
    def well(self) -> bool:
        """Whether its last evaluation is where it was meant to end, or where it has come so far."""
        return self.status not in ("diverged", "failed")

    def last(self, column: str) -> float | None:
        """The newest value of a column."""
        values = self.columns[column]
        return float(values[-1]) if values.size and math.isfinite(values[-1]) else None


@dataclass(frozen=True, slots=True)
class Gathered:
    """All that a report is about."""

    places: tuple[Path, ...]
    runs: tuple[Run, ...]
    groups: tuple[Group, ...]


def gather(places: Sequence[Path], target: Target | None = None) -> Gathered:
    """The runs in these folders; `target` takes the place of their own."""
    runs: dict[Path, Run] = {}
    groups: dict[Path, Group] = {}
    for place in places:
        if not place.is_dir():
            raise InputError(f"{place}: no such folder")
        found = list(_below(place, _DEPTH))
        if not any(group for _, group in found) and not found:
            raise InputError(f"{place}: no run, comparison or sweep in it, down to {_DEPTH} folders below")
        for folder, group in found:
            if group is not None:
                groups[group.folder.resolve()] = group
            if folder.resolve() not in runs:
                runs[folder.resolve()] = read(folder, group, target)
    if not runs:
        raise InputError(f"{', '.join(map(str, places))}: no run has begun yet")
    targets = {group.target for group in groups.values()} - {None}
    if target is None and len(targets) == 1:       # runs beside a comparison are judged by what it asks for
        (common,) = targets
        assert common is not None
        runs = {path: run if run.group else replace(run, target=common) for path, run in runs.items()}
    return Gathered(tuple(places), tuple(runs.values()), tuple(groups.values()))


def _below(place: Path, depth: int) -> Iterator[tuple[Path, Group | None]]:
    """Run folders, each with the group that names it; a group answers for all that is below it."""
    if RunFolder(place).holds_run():
        yield place, None
    elif (place / "group.json").is_file():
        group = read_group(place)
        yield from ((member, group) for member in group.members)
    elif depth > 0:
        try:
            inner = sorted(folder for folder in place.iterdir() if folder.is_dir() and folder.name[0] != ".")
        except OSError as error:
            raise InputError(f"{place}: cannot be read: {error.strerror}") from None
        for folder in inner:
            yield from _below(folder, depth - 1)


def read_group(folder: Path) -> Group:
    """A group.json, checked."""
    path = folder / "group.json"
    data = _json(path)
    members, axes = data.get("members"), data.get("axes") or {}
    if not isinstance(members, list) or not all(isinstance(member, str) for member in members):
        raise InputError(f"{path}: members: {str(members)[:60]!r} is not allowed; must be a list of folders")
    if not isinstance(axes, dict) or not all(isinstance(values, list) for values in axes.values()):
        raise InputError(f"{path}: axes: {str(axes)[:60]!r} is not allowed; must map keys to lists of values")
    home = folder.resolve()
    inside = [folder / member for member in members]
    for member in inside:
        if not member.resolve().is_relative_to(home):
            raise InputError(f"{path}: members: {str(member)!r} is not allowed; must lie in the folder itself")
    begun = tuple(member for member in inside if RunFolder(member).holds_run())
    target = data.get("target")
    return Group(
        folder, str(data.get("kind", "")), str(data.get("name", folder.name)), str(data.get("command") or ""),
        str(data.get("status", "")), Target.parse(str(target)) if target else None,
        {str(key): values for key, values in axes.items()},
        str(data.get("claim") or ""), begun, len(inside) - len(begun),
    )


def read(folder: Path, group: Group | None = None, target: Target | None = None) -> Run:
    """A run's folder, however far it has come."""
    files = RunFolder(folder)
    experiment = _experiment(files.experiment)
    summary = _json(files.summary) if files.summary.exists() else None
    if summary is not None and summary.get("status") not in _STATUSES:
        status = str(summary.get("status"))[:60]
        raise InputError(f"{files.summary}: status: {status!r} is not allowed; allowed: {', '.join(_STATUSES)}")
    records = read_metrics(files.metrics)
    columns = _columns(files.metrics, records)
    status = str(summary["status"]) if summary is not None else "running" if in_use(folder) else "interrupted"
    error = str(summary["error"]) if summary and summary.get("error") else None
    network = _network(files.network) if files.network.exists() else None
    return Run(
        folder, experiment, status, error, records, columns, _nodes(files.nodes, len(records)), network,
        tuple(_incidents(files.events, status, error, records)),
        target or (group.target if group else None) or DEFAULT_TARGET, files.run_key(), group,
    )


def _experiment(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path.parent}: not a run's folder (no experiment.yaml)") from None
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict) or not isinstance(data.get("algorithm"), dict):
        raise InputError(f"{path}: not a resolved experiment (no algorithm)")
    return data


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: must hold an object, not a {type(data).__name__}")
    return data


def _columns(path: Path, records: Sequence[Record]) -> dict[str, Series]:
    rounds = np.array([record["round"] for record in records], dtype=np.float64)
    if np.any(np.diff(rounds) <= 0):
        raise InputError(f"{path}: damaged: rounds do not rise")
    columns = {"round": rounds}
    for column in _NUMBERS:
        columns[column] = _numbers([record.get(column) for record in records], path, column)
    return columns


def _numbers(values: Any, path: Path, what: str) -> Series:
    """As floats; None and what is not finite become NaN, text is damage."""
    try:
        array = np.array(values, dtype=np.float64)      # None becomes NaN
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{path}: damaged: {what} must be numbers") from None
    array[~np.isfinite(array)] = np.nan
    return array


def _nodes(path: Path, evaluations: int) -> NodeHistory | None:
    """nodes.jsonl up to the evaluations that are complete; None where a run has none."""
    lines = read_metrics(path)[:evaluations]
    if not lines:
        return None
    rounds = np.array([line["round"] for line in lines], dtype=np.int64)
    table = {
        key: _numbers([line.get(key) for line in lines], path, key) if lines[0].get(key) is not None else None
        for key in ("accuracy", "apart_x", "bytes")
    }
    accuracy, apart, sent = table["accuracy"], table["apart_x"], table["bytes"]
    if apart is None or sent is None or apart.ndim != 2 or sent.shape != apart.shape:
        raise InputError(f"{path}: damaged: apart_x and bytes must have a number per node")
    if accuracy is not None and accuracy.shape != apart.shape:
        raise InputError(f"{path}: damaged: accuracy must have a number per node")
    channels = lines[-1].get("channels") or {}
    if not isinstance(channels, dict):
        raise InputError(f"{path}: damaged: channels must map names to bytes")
    totals = _numbers(list(channels.values()), path, "channels")
    return NodeHistory(rounds, accuracy, apart, sent, dict(zip(map(str, channels), totals.tolist(), strict=True)))


def _network(path: Path) -> dict[str, Any]:
    data = _json(path)
    nodes, edges = data.get("nodes"), data.get("edges")
    if not isinstance(nodes, int) or nodes < 1:
        raise InputError(f"{path}: damaged: nodes: {str(nodes)[:60]!r} is not a number of nodes")
    pairs = edges if isinstance(edges, list) else []
    for edge in pairs:
        fine = isinstance(edge, list) and len(edge) == 2 and all(isinstance(i, int) and 0 <= i < nodes for i in edge)
        if not fine:
            raise InputError(f"{path}: damaged: edges: {str(edge)[:60]!r} is not a pair of nodes")
    gap = data.get("spectral_gap")
    return {
        "nodes": nodes, "edges": edges if isinstance(edges, list) else None, "links": data.get("links"),
        "spectral_gap": float(gap) if isinstance(gap, int | float) and 0 < gap <= 1 else None,
    }


def _incidents(path: Path, status: str, error: str | None, records: Sequence[Record]) -> Iterator[Incident]:
    last = int(records[-1]["round"]) if records else 0
    for event in read_events(path):
        at = event.get("after_round")
        at = at if isinstance(at, int) else last
        blocks = f"blocks {event['blocks']}" if event.get("blocks") else "processes"
        if event["kind"] == "lost":
            yield Incident(at, "lost", f"{blocks} lost after round {at}: {event.get('reason', '')}")
        elif event["kind"] == "recovered":
            back, took = event.get("resumed_after", "?"), event.get("seconds")
            spent = f" in {took:.1f} s" if isinstance(took, int | float) else ""
            yield Incident(at, "recovered", f"{blocks} replaced{spent}, rounds replayed after round {back}")
    if status in ("diverged", "failed"):
        yield Incident(last, status, error or status)


def _section(experiment: Mapping[str, Any], key: str) -> dict[str, Any]:
    section = experiment.get(key)
    return section if isinstance(section, dict) else {}
