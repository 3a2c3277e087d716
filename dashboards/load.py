"""Load the folders of runs, comparisons and sweeps, finished or not.

A folder without a run, or a damaged file in it, is an input error that names it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbo.platform.errors import InputError
from dbo.platform.runs.node_lines import read_sent
from dbo.platform.runs.run_folder import (
    RunFolder,
    has_group,
    is_locked,
    iterate_metrics,
    read_events,
    read_experiment,
    read_group,
    read_metrics,
    read_network,
    read_summary,
)
from dbo.platform.runs.schema import (
    COLUMNS,
    DEFAULT_TARGET,
    OPTIONAL,
    STATUSES,
    Event,
    Record,
    RecordedNetwork,
    Summary,
    Target,
    name_algorithm,
    section,
)
from dbo.platform.runs.seal import require_intact

Series = NDArray[np.float64]

_DEPTH = 3              # folders below the given one in which runs are searched
_NUMERIC = (*(column for column in COLUMNS if column != "round"), *OPTIONAL)


@dataclass(frozen=True, slots=True)
class GroupData:
    """A comparison or a sweep: its group.json, and which of its runs exist."""

    folder: Path
    kind: str
    name: str
    command: str
    status: str
    target: Target | None
    axes: dict[str, list[Any]]
    claim: str                   # what it is to show
    members: tuple[Path, ...]
    pending: int                 # members that have not started


@dataclass(frozen=True, slots=True)
class Incident:
    """A loss, a recovery or a bad end, and the round after which it happened."""

    round: int
    kind: str       # lost | recovered | diverged | failed
    text: str


@dataclass(frozen=True, slots=True)
class NodeHistory:
    """nodes.jsonl: a row per evaluation, a column per node; of large networks, columns of a sample of nodes."""

    rounds: NDArray[np.int64]
    accuracy: Series | None
    distance_x: Series               # to the mean; apart_x in the file
    bytes: Series
    channels: dict[str, float]       # bytes of all nodes at the last evaluation
    ids: NDArray[np.int64]           # the numbers of the nodes


@dataclass(frozen=True, slots=True)
class RunData:
    """One run, as far as it has come."""

    folder: Path
    experiment: dict[str, Any]
    status: str                      # finished | diverged | failed | stopped | running | interrupted
    error: str | None
    records: list[Record]
    columns: dict[str, Series]       # NaN where there is no value; a task's own metrics where the run has them
    nodes: NodeHistory | None
    network: RecordedNetwork | None
    incidents: tuple[Incident, ...]
    target: Target
    key: str | None = None           # equal keys, equal results; None: not recorded
    group: GroupData | None = field(default=None, compare=False)

    @property
    def algorithm(self) -> str:
        """The label of a variant, or the algorithm's name."""
        return name_algorithm(self.experiment) or "?"

    @property
    def name(self) -> str:
        return str(self.experiment.get("name", self.folder.name))

    @property
    def seed(self) -> Any:
        return self.experiment.get("seed", 0)

    @property
    def has_failed(self) -> bool:
        """Whether it diverged or failed, so that its last evaluation is no result."""
        return self.status in ("diverged", "failed")

    def last_value(self, column: str) -> float | None:
        """Return the newest value of a column."""
        values = self.find_column(column)
        return float(values[-1]) if values.size and math.isfinite(values[-1]) else None

    def find_column(self, column: str) -> Series:
        """Return a column; NaN everywhere if the run does not have it."""
        return self.columns.get(column, np.full(len(self.records), np.nan))


@dataclass(frozen=True, slots=True)
class RunCollection:
    """Everything that a report is about."""

    folders: tuple[Path, ...]
    runs: tuple[RunData, ...]
    groups: tuple[GroupData, ...]


def load_runs(folders: Sequence[Path], target: Target | None = None) -> RunCollection:
    """Load all runs in these folders; `target` replaces their own."""
    runs: dict[Path, RunData] = {}
    groups: dict[Path, GroupData] = {}
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder")
        found = list(_find_runs(folder, _DEPTH))
        if not found:
            what = "no run of the group has started" if has_group(folder) else \
                f"no run, comparison or sweep in it, down to {_DEPTH} folders below"
            raise InputError(f"{folder}: {what}")
        for path, group in found:
            if group is not None:
                groups[group.folder.resolve()] = group
            if path.resolve() not in runs:
                require_intact([path])
                runs[path.resolve()] = load_run(path, group, target)
    targets = {group.target for group in groups.values() if group.target is not None}
    if target is None and len(targets) == 1:       # the target of a comparison is also that of runs beside it
        (common,) = targets
        runs = {path: run if run.group else replace(run, target=common) for path, run in runs.items()}
    return RunCollection(tuple(folders), tuple(runs.values()), tuple(groups.values()))


def _find_runs(folder: Path, depth: int) -> Iterator[tuple[Path, GroupData | None]]:
    """Yield run folders, each with the group that names it; below a group only its members count."""
    if RunFolder(folder).has_run():
        yield folder, None
    elif has_group(folder):
        group = load_group(folder)
        yield from ((member, group) for member in group.members)
    elif depth > 0:
        try:
            inner = sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
        except OSError as error:
            raise InputError(f"{folder}: cannot be read: {error.strerror}") from None
        for path in inner:
            yield from _find_runs(path, depth - 1)


def load_group(folder: Path) -> GroupData:
    """Load a group.json, and find out which of its runs exist."""
    group = read_group(folder)
    started = tuple(folder / member for member in group.members if RunFolder(folder / member).has_run())
    return GroupData(
        folder, group.kind, group.name or folder.name, group.command, group.status,
        Target.parse(group.target) if group.target else None, group.axes, group.claim or "", started,
        len(group.members) - len(started),
    )


def load_run(folder: Path, group: GroupData | None = None, target: Target | None = None) -> RunData:
    """Load a run folder, however far the run has come."""
    files = RunFolder(folder)
    experiment = read_experiment(folder)
    if not section(experiment, "algorithm"):
        raise InputError(f"{files.experiment}: not a resolved experiment (no algorithm)")
    summary = read_summary(folder)
    if summary is not None and summary.status not in STATUSES:
        raise InputError(
            f"{files.summary}: status: {summary.status[:60]!r} is not allowed; allowed: {', '.join(STATUSES)}")
    status = summary.status if summary else "running" if is_locked(folder) else "interrupted"
    records = read_metrics(files.metrics)
    return RunData(
        folder, experiment, status, summary.error if summary else None, records, _build_columns(files.metrics, records),
        _load_nodes(files.nodes, len(records)), read_network(folder),
        tuple(_find_incidents(read_events(files.events), summary, records)),
        target or (group.target if group else None) or DEFAULT_TARGET, files.run_key(), group,
    )


def _build_columns(path: Path, records: Sequence[Record]) -> dict[str, Series]:
    columns = {"round": np.array([record["round"] for record in records], dtype=np.float64)}
    own = dict.fromkeys(key for record in records for key, value in record.items()
                        if key not in columns and key not in _NUMERIC and isinstance(value, int | float))
    for column in (*_NUMERIC, *own):
        columns[column] = _to_floats([record.get(column) for record in records], path, column)
    return columns


def _to_floats(values: Any, path: Path, what: str) -> Series:
    """Convert to floats; None and what is not finite become NaN, text is damage."""
    try:
        array = np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{path}: damaged: {what} must be numbers") from None
    array[~np.isfinite(array)] = np.nan
    return array


def _load_nodes(path: Path, evaluations: int) -> NodeHistory | None:
    """Load nodes.jsonl up to the last complete evaluation; None where a run has none."""
    lines = [_select_recorded(line, path) for line in islice(iterate_metrics(path), evaluations)]
    if not lines:
        return None
    table = {
        key: _to_floats([line.get(key) for line in lines], path, key) if lines[0].get(key) is not None else None
        for key in ("accuracy", "apart_x", "bytes")
    }
    accuracy, distance, sent = table["accuracy"], table["apart_x"], table["bytes"]
    ids = _find_sample(lines, path)
    if distance is None or sent is None or distance.ndim != 2 or sent.shape != distance.shape:
        raise InputError(f"{path}: damaged: apart_x and bytes must have a number per node")
    if accuracy is not None and accuracy.shape != distance.shape:
        raise InputError(f"{path}: damaged: accuracy must have a number per node")
    channels = lines[-1].get("channels") or {}
    if not isinstance(channels, dict):
        raise InputError(f"{path}: damaged: channels must map names to bytes")
    totals = _to_floats(list(channels.values()), path, "channels")
    try:
        rounds = np.array([line["round"] for line in lines], dtype=np.int64)
    except OverflowError:
        raise InputError(f"{path}: damaged: a round has too many digits") from None
    return NodeHistory(
        rounds, accuracy, distance, sent,
        dict(zip(map(str, channels), totals.tolist(), strict=True)),
        np.arange(distance.shape[1]) if ids is None else ids,
    )


def _select_recorded(line: Record, path: Path) -> Record:
    """Return a line with the bytes of the recorded nodes alone: those of all nodes would fill the memory."""
    try:
        sent, ids = read_sent(line), line.get("nodes")
        if sent is not None and isinstance(ids, list) and len(sent) > len(ids):
            sent = sent[ids]
    except (ValueError, IndexError, TypeError):
        raise InputError(f"{path}: damaged: apart_x and bytes must have a number per node") from None
    return {**line, "bytes": sent}


def _find_sample(lines: Sequence[Record], path: Path) -> NDArray[np.int64] | None:
    """Return the nodes whose accuracies and distances are recorded, the same in all lines; None: all nodes."""
    sample = lines[0].get("nodes")
    if sample is None:
        return None
    if not isinstance(sample, list) or not all(type(node) is int and node >= 0 for node in sample) or \
            any(line.get("nodes") != sample for line in lines):
        raise InputError(f"{path}: damaged: nodes must be the same numbers in every line")
    return np.array(sample, dtype=np.int64)


def _find_incidents(
    events: Sequence[Event], summary: Summary | None, records: Sequence[Record]
) -> Iterator[Incident]:
    last = int(records[-1]["round"]) if records else 0
    for event in events:
        after = event.after_round if event.after_round is not None else last
        blocks = f"blocks {list(event.blocks)}" if event.blocks else "workers"
        if event.kind == "lost":
            yield Incident(after, "lost", f"{blocks} lost after round {after}: {event.reason}")
        elif event.kind == "recovered":
            duration = f" in {event.seconds:.1f} s" if event.seconds is not None else ""
            start = "?" if event.resumed_after is None else event.resumed_after
            yield Incident(after, "recovered", f"{blocks} replaced{duration}, rounds replayed after round {start}")
    if summary is not None and summary.status in ("diverged", "failed"):
        yield Incident(last, summary.status, summary.error or summary.status)
