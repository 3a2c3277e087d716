"""Read what MLflow gets to know about a folder: identity, parameters, tags, points, files, status.

Nothing here imports MLflow.
"""

import hashlib
import json
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from dbo.dashboards.palette import get_style
from dbo.platform.errors import InputError
from dbo.platform.regular_files import open_regular
from dbo.platform.runs.node_lines import read_sent
from dbo.platform.runs.run_folder import (
    GROUP_FILE,
    RunFolder,
    iterate_metrics,
    read_events,
    read_experiment,
    read_metrics,
    read_summary,
)
from dbo.platform.runs.schema import (
    BLOCK_LISTS,
    COLUMNS,
    Event,
    Group,
    Record,
    Target,
    name_algorithm,
    parse_record,
    section,
)

_MAX_COSTS = 12             # algorithms whose costs a parent shows
MAX_KEYS = 25               # metrics per run: MLflow's page draws a chart for each
MAX_PARAM, MAX_TAG = 6000, 8000
_MAX_STEP, _MAX_TIME = 2**62, 1e11      # of MLflow's columns; seconds
_DEFAULT_NAME = "dbo"       # of an experiment without a name
_NOT_PARAMS = {"label", "tracking", "data_dir", "presets", "keep_checkpoints"}     # two starts of one run may differ


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a run as soon as it has started; `key` is the value of the tag by which it is found again."""

    key_tag: str
    key: str
    name: str
    started: int                            # milliseconds
    params: dict[str, str]
    tags: dict[str, str]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended: MLflow's status, and our own tags."""

    status: str                             # FINISHED | FAILED | KILLED | RUNNING
    tags: dict[str, str] = field(default_factory=dict)
    ended: int | None = None                # milliseconds
    data: dict[str, Any] | None = None      # the data set: name, digest, source, context, partition


class Points:
    """The complete lines of metrics.jsonl, read while it grows. A run that recovers or restarts takes lines back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reset()

    def _reset(self) -> None:
        self._offset, self._last = 0, b""
        self.records: dict[int, Record] = {}

    def read(self) -> bool:
        """Read what is new; return whether lines were taken back, so that points already sent must be queried again."""
        try:
            with open(self._path, "rb", opener=open_regular) as file:
                file.seek(self._offset - len(self._last))
                raw = file.read()
                # A line that is written again has another timestamp: the last line shows whether the rest is valid.
                was_replaced = not raw.startswith(self._last)
                if was_replaced:
                    self._reset()
                    file.seek(0)
                    raw = file.read()
        except FileNotFoundError:
            had_records = bool(self.records)
            self._reset()
            return had_records
        lines = raw[len(self._last): raw.rfind(b"\n") + 1].splitlines(keepends=True)
        for line in lines:
            record = self._parse(line)
            self.records[record["round"]] = record
        self._offset += sum(map(len, lines))
        self._last = lines[-1] if lines else self._last
        return was_replaced


    def _parse(self, line: bytes) -> Record:
        """Parse a line that MLflow can store."""
        try:
            record = parse_record(line)
            is_valid = 0 <= record["round"] < _MAX_STEP and 0 <= float(record["timestamp"]) < _MAX_TIME
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise InputError(f"{self._path}: a line is damaged: {error}") from None
        if not is_valid:
            raise InputError(f"{self._path}: a line is damaged: its round or its timestamp is out of range")
        return record


def select_metrics(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield at most MAX_KEYS metrics of an evaluation, finite ones only: MLflow stores infinity as a large number."""
    common = [key for key in COLUMNS if key not in ("round", "timestamp")]
    extra = [key for key in record if key not in (*COLUMNS, *BLOCK_LISTS)]
    for key in (*common, *extra)[:MAX_KEYS]:
        value = record.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            yield key, float(value)


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return {"algorithm.compressor.ratio": "0.2", …}."""
    flat: dict[str, str] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            flat[f"{prefix}{key}"] = text[:MAX_PARAM]
    return flat


def read_run_facts(folder: Path, axes: Iterable[str] = (), root: Path | None = None) -> Facts | None:
    """Read the facts of a run; None if the folder has none yet.

    `axes` is what the runs of its group differ in, `root` the folder of the group.
    """
    files = RunFolder(folder)
    started = [event for event in read_events(files.events) if event.kind == "started"]
    summary = read_summary(folder)
    key = (summary.run_key if summary else "") or (started[-1].run_key if started else "")
    if not files.experiment.exists() or not key:
        return None
    data = read_experiment(folder)
    first = started[0] if started else Event("started")
    place = folder.resolve()
    command = f"dbo run {shlex.quote(str(place / files.experiment.name))}"
    tags = {
        "dbo.run_key": key,
        "dbo.version": (summary.version if summary else None) or first.version,
        "dbo.folder": str(place),
        "mlflow.source.name": f"dbo run {data.get('name', '')}".strip(),
        "mlflow.source.type": "JOB" if first.submission else "LOCAL",
        "mlflow.source.git.commit": first.commit,
        "dbo.commit": first.dbo_commit,
        "dbo.hosts": str(first.hosts or ""),
        "mlflow.user": first.user,
        "mlflow.runColor": get_style(name_algorithm(data)).light,
        "ray.submission_id": first.submission,
        "mlflow.note.content":
            f"Repeat it: `{command}`\n\n"
            f"Resume it: `{command} --out {shlex.quote(str(place))} --resume`\n\nFolder: `{place}`",
    }
    params = flatten({name: value for name, value in data.items() if name not in _NOT_PARAMS})
    when = first.timestamp or _parse_time(summary.started if summary else None)
    name = format_run_name(data, axes, (root or place).resolve().name)
    return Facts("dbo.run_key", key, name, int(1000 * when), params, _drop_empty(tags))


def format_run_name(data: Mapping[str, Any], axes: Iterable[str] = (), folder: str = "") -> str:
    """Return what runs differ in, first what the runs of a group differ in: columns of the UI are narrow.

    That is algorithm and seed, the values of further axes, name and folder, topology and partition. Two runs of a
    store differ in one of them, or are the same experiment.
    """
    given = str(data.get("name", ""))
    places = dict.fromkeys((given if given != _DEFAULT_NAME else "", folder))
    further = [axis for axis in axes if axis not in ("algorithm", "algorithm.name", "label", "seed")]
    return " · ".join(part for part in (
        f"{name_algorithm(data)} seed {data.get('seed', 0)}", *(_format_value(data, axis) for axis in further),
        *places, *(_format_value(data, key, further) for key in ("topology", "partition") if key not in further),
    ) if part)


def list_axis_keys(group: Group) -> tuple[str, ...]:
    """Return the dotted keys that the runs of a group differ in: for values that are sections, the keys in them."""
    values = [(axis, value) for axis, values in group.axes.items() for value in values]
    return tuple(dict.fromkeys(
        key for axis, value in values
        for key in (flatten({axis: value}) if isinstance(value, Mapping) and value else (axis,))))


def _format_value(data: Mapping[str, Any], axis: str, shown: Sequence[str] = ()) -> str:
    """Return a key's value as `ratio 0.2`, of a section name and values: `erdos_renyi p 0.4`, without shown keys."""
    found = [
        (key.rpartition(".")[2], value) for key, value in flatten(data).items()
        if (key == axis or key.startswith(f"{axis}.")) and key not in shown
    ]
    return " ".join(value if last == "name" else f"{last} {value}" for last, value in found)


def build_group_facts(folder: Path, group: Group) -> Facts:
    """Build the facts of the parent run of a comparison or a sweep."""
    if not group.key:
        raise InputError(f"{folder / GROUP_FILE}: cannot be read: key is missing")
    place = folder.resolve()
    tags = {
        "dbo.group_key": group.key,
        "dbo.kind": group.kind,
        "dbo.folder": str(place),
        "mlflow.source.name": f"dbo {group.kind}",
        "mlflow.source.type": "LOCAL",
        "mlflow.note.content": f"Repeat it: `{group.command}`\n\nFolder: `{place}`",
        "dbo.axes": _format_axes(group),
    }
    params = {"target": group.target} if group.target else {}
    name = f"{group.kind or 'group'}: {group.name or place.name}"
    return Facts(
        "dbo.group_key", group.key, name, int(1000 * _parse_time(group.started)), params, _drop_empty(tags))


def read_group_metrics(folder: Path, group: Group) -> dict[str, float]:
    """Return what a parent shows of its members: the best value of the target's metric, and what it cost.

    Costs are means over the runs of an algorithm, and are there only if all of them reached the target. Runs that
    diverged or failed count as runs that did not reach it.
    """
    if not group.target:
        return {}
    target = Target.parse(group.target)
    costs: dict[str, list[Record | None]] = {}
    best: dict[str, float] = {}
    choose = max if target.is_maximized else min
    for member in group.members:
        if not RunFolder(folder / member).has_run():
            continue
        records = read_metrics(RunFolder(folder / member).metrics)
        name = name_algorithm(read_experiment(folder / member))
        costs.setdefault(name, []).append(target.find_cost(records))
        values = [value for record in records if isinstance(value := record.get(target.metric), int | float)]
        if values:
            best[name] = choose([*values, *([best[name]] if name in best else [])])
    found = {f"best_{target.metric}": float(choose(best.values()))} if best else {}
    for name, reached in costs.items() if len(costs) <= _MAX_COSTS else ():
        found |= {f"best_{target.metric}.{name}": float(best[name])} if name in best and len(costs) > 1 else {}
        if all(reached):
            for key, column in (("rounds", "round"), ("mb", "comm_mb")):
                mean = fmean(float(record[column]) for record in reached if record)
                found[f"{key}_to_target.{name}" if len(costs) > 1 else f"{key}_to_target"] = mean
    return found


def read_run_ending(folder: Path) -> Ending | None:
    """Read how the run in a folder ended; None if it has not."""
    summary = read_summary(folder)
    if summary is None:
        return None
    status, digest = summary.status or "failed", summary.data_digest or ""
    tags = {"dbo.status": status, "dbo.error": (summary.error or "")[:MAX_TAG], "dbo.data_digest": digest}
    if summary.changes:
        tags["dbo.changes"] = ", ".join(summary.changes)
    ended = [event.timestamp for event in read_events(RunFolder(folder).events) if event.kind == "ended"]
    return Ending(
        "FINISHED" if status == "finished" else "FAILED", tags, int(1000 * ended[-1]) if ended else None,
        _describe_data(folder, digest) if digest else None,
    )


def build_group_ending(group: Group) -> Ending | None:
    """Return how a comparison or a sweep ended; None if it has not."""
    if group.status in ("running", ""):
        return None
    tags = {"dbo.status": group.status, "dbo.axes": _format_axes(group)}
    if group.changes:
        tags["dbo.changes"] = ", ".join(group.changes)
    return Ending("FINISHED" if group.status == "finished" else "FAILED", tags)


def _format_axes(group: Group) -> str:
    """Return what the members differ in. A tag: a sweep that is extended has others, and parameters cannot change."""
    return json.dumps(group.axes, ensure_ascii=False)[:MAX_TAG]


def _describe_data(folder: Path, digest: str) -> dict[str, Any]:
    data = read_experiment(folder)
    task, partition = section(data, "task"), section(data, "partition")
    return {
        "name": str(task.get("dataset") or task.get("name", "data")),
        "digest": digest[:36],
        "source": json.dumps({"task": task, "seed": data.get("seed", 0)}),
        "profile": json.dumps({"nodes": data.get("nodes"), "sha256": digest}),
        "partition": " ".join(f"{key}={value}" for key, value in partition.items()),
    }


def list_artifacts(folder: Path, is_group: bool) -> dict[str, tuple[Path, str]]:
    """Return the files for MLflow: the name there, the path here and a digest of what decides the content.

    A symbolic link is left out: in a foreign folder it may lead to any file of yours, and MLflow shows it to others.
    """
    if is_group:
        kinds = ("*.csv", "*.parquet", "*.yaml", "*.html", GROUP_FILE, "topology.png", "figures/*.png", "figures/*.pdf")
        chosen = {path.relative_to(folder).as_posix(): path for kind in kinds
                  for path in folder.glob(kind) if not path.name.startswith(".")}
    else:
        files = RunFolder(folder)
        paths = (files.experiment, files.summary, files.network, files.state)
        chosen = {path.name: path for path in (*paths, folder / "topology.png", folder / "report.html")}
        chosen["nodes.parquet"] = files.nodes
    return {
        name: (path, _digest(path)) for name, path in sorted(chosen.items())
        if path.is_file() and not path.is_symlink() and (path.parent == folder or not path.parent.is_symlink())
    }


def write_nodes_table(source: Path, target: Path) -> None:
    """Write nodes.jsonl as a table with a row per evaluation and node; of large networks, of a sample of nodes."""
    import pandas as pd

    rows: dict[str, list[Any]] = {key: [] for key in ("round", "node", "accuracy", "apart_x", "apart_y", "bytes")}
    try:
        for record in iterate_metrics(source):
            count = len(record["apart_x"])
            ids, sent = record.get("nodes") or range(count), read_sent(record)
            rows["round"] += [record["round"]] * count
            rows["node"] += ids
            known = [None] * count if sent is None else sent.astype(np.int64).tolist()
            rows["bytes"] += known if len(known) == count else [known[node] for node in ids]
            for key in ("accuracy", "apart_x", "apart_y"):
                rows[key] += record.get(key) or [None] * count
        pd.DataFrame(rows).to_parquet(target, index=False)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"{source}: a line is damaged: {type(error).__name__}: {reason}") from None


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _drop_empty(tags: Mapping[str, str]) -> dict[str, str]:
    return {key: value[:MAX_TAG] for key, value in tags.items() if value}


def _parse_time(text: str | None) -> float:
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except ValueError:
        return 0.0
