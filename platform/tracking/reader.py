"""What MLflow is told about a folder: identity, parameters, tags, points, files, state. Knows nothing of MLflow."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from dbo.platform.config import yaml_io
from dbo.platform.errors import InputError
from dbo.platform.runs.run_folder import COLUMNS, Record, RunFolder, read_events

MAX_KEYS = 25               # of metrics per run: MLflow's page draws a chart for each
MAX_PARAM, MAX_TAG = 6000, 8000
GROUP = "group.json"
_ASIDE = {"tracking", "data_dir"}           # not part of what is run; may differ between two starts of the same run


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
    """How a run ended, in MLflow's words and ours."""

    status: str                             # FINISHED | FAILED | KILLED | RUNNING
    tags: dict[str, str] = field(default_factory=dict)
    ended: int | None = None                # milliseconds
    data: dict[str, Any] | None = None      # the data set: name, digest, source, context, partition


def is_group(folder: Path) -> bool:
    return (folder / GROUP).exists()


def read_group(folder: Path) -> dict[str, Any]:
    """group.json, whose members are run folders below it."""
    try:
        group = json.loads((folder / GROUP).read_bytes())
        if not isinstance(group["members"], list) or not isinstance(group["key"], str):
            raise ValueError("members and key are required")
        for member in group["members"]:
            if not (folder / str(member)).resolve().is_relative_to(folder.resolve()):
                raise ValueError(f"{member!r} lies outside")
        return dict(group)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder / GROUP}: cannot be read: {error}") from None


class Points:
    """The complete lines of metrics.jsonl, read as they come. A run that recovers or starts over takes lines back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self._offset, self._last = 0, b""
        self.records: dict[int, Record] = {}

    def read(self) -> bool:
        """Takes in what is new; whether lines were taken back, so that what is known of sent points is old."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset - len(self._last))
                raw = file.read()
                # A line that is written again has another timestamp: the last one tells whether the rest still stands.
                renewed = not raw.startswith(self._last)
                if renewed:
                    self._forget()
                    file.seek(0)
                    raw = file.read()
        except FileNotFoundError:
            known = bool(self.records)
            self._forget()
            return known
        lines = raw[len(self._last): raw.rfind(b"\n") + 1].splitlines(keepends=True)
        for line in lines:
            record = json.loads(line)
            self.records[int(record["round"])] = record
        self._offset += sum(map(len, lines))
        self._last = lines[-1] if lines else self._last
        return renewed


def values(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """At most MAX_KEYS metrics of an evaluation, finite ones only: MLflow stores infinity as a large number."""
    usual = [key for key in COLUMNS if key not in ("round", "timestamp")]
    extra = [key for key in record if key not in COLUMNS]
    for key in (*usual, *extra)[:MAX_KEYS]:
        value = record.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            yield key, float(value)


def flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """{"algorithm.compressor.ratio": "0.2", …}."""
    found: dict[str, str] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = _text(value)[:MAX_PARAM]
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def run_facts(folder: Path, axes: Iterable[str] = ()) -> Facts | None:
    """Of a run's folder; None: there is no run in it yet. `axes`: what the runs of its group differ in."""
    files = RunFolder(folder)
    started = [event for event in read_events(files.events) if event["kind"] == "started"]
    summary = read_summary(folder) or {}
    key = summary.get("run_key") or (started[-1].get("run_key") if started else None)
    if not files.experiment.exists() or not key:
        return None
    data = yaml_io.read(files.experiment)
    origin = started[0] if started else {}
    place = folder.resolve()
    tags = {
        "dbo.run_key": str(key),
        "dbo.version": str(summary.get("version") or origin.get("version") or ""),
        "dbo.folder": str(place),
        "mlflow.source.name": f"dbo run {data.get('name', '')}".strip(),
        "mlflow.source.type": "JOB" if origin.get("submission") else "LOCAL",
        "mlflow.source.git.commit": str(origin.get("commit", "")),
        "mlflow.user": str(origin.get("user", "")),
        "ray.submission_id": str(origin.get("submission", "")),
        "mlflow.note.content": (
            f"Repeat it: `dbo run {place / 'experiment.yaml'}`\n\nGo on with it: `dbo run {place / 'experiment.yaml'} "
            f"--out {place} --resume`\n\nFolder: `{place}`"
        ),
    }
    params = flat({name: value for name, value in data.items() if name not in _ASIDE})
    when = started[0]["timestamp"] if started else _time(summary.get("started"))
    return Facts("dbo.run_key", str(key), run_name(data, axes), int(1000 * (when or 0)), params, _filled(tags))


def run_name(data: Mapping[str, Any], axes: Iterable[str] = ()) -> str:
    """algorithm · topology · h · seed, and what else the runs of a group differ in."""
    given = flat(data)
    named = {"algorithm.name", "topology.name", "seed"} | {key for key in given if key.startswith("partition.")}
    further = [axis for axis in axes if axis in given and axis not in named]
    partition = dict(data.get("partition", {}))
    kind = partition.pop("name", "")
    how = " ".join(f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
                   for key, value in partition.items())
    return " · ".join(part for part in (
        str(data.get("algorithm", {}).get("name", "")), str(data.get("topology", {}).get("name", "")),
        how or str(kind), f"seed {data.get('seed', 0)}",
        *(f"{axis.rpartition('.')[2]} {given[axis]}" for axis in further),
    ) if part)


def group_facts(folder: Path, group: Mapping[str, Any]) -> Facts:
    """Of the parent run of a comparison or a sweep."""
    place = folder.resolve()
    tags = {
        "dbo.group_key": group["key"],
        "dbo.kind": str(group.get("kind", "")),
        "dbo.folder": str(place),
        "mlflow.source.name": f"dbo {group.get('kind', '')}",
        "mlflow.source.type": "LOCAL",
        "mlflow.note.content": f"Repeat it: `{group.get('command', '')}`\n\nFolder: `{place}`",
        "dbo.axes": _axes(group),
    }
    params = {"target": str(group["target"])} if group.get("target") else {}
    name = f"{group.get('kind', 'group')}: {group.get('name', place.name)}"
    when = _time(group.get("started")) or 0
    return Facts("dbo.group_key", group["key"], name, int(1000 * when), params, _filled(tags))


def run_ending(folder: Path) -> Ending | None:
    """How the run in a folder ended; None: it has not."""
    summary = read_summary(folder)
    if summary is None:
        return None
    status = str(summary.get("status", "failed"))
    tags = {"dbo.status": status, "dbo.error": str(summary.get("error", ""))[:MAX_TAG]}
    digest = str((summary.get("problem") or {}).get("data_sha256", ""))
    ended = [event["timestamp"] for event in read_events(folder / "events.jsonl") if event["kind"] == "ended"]
    return Ending(
        "FINISHED" if status == "finished" else "FAILED", {**tags, "dbo.data_digest": digest},
        int(1000 * ended[-1]) if ended else None, _data_set(folder, digest),
    )


def group_ending(group: Mapping[str, Any]) -> Ending | None:
    status = str(group.get("status", "running"))
    if status == "running":
        return None
    return Ending("FINISHED" if status == "finished" else "FAILED", {"dbo.status": status, "dbo.axes": _axes(group)})


def _axes(group: Mapping[str, Any]) -> str:
    """What the members differ in. A tag: a sweep that is extended has others, and parameters cannot change."""
    return json.dumps(group.get("axes") or {}, ensure_ascii=False)[:MAX_TAG]


def read_summary(folder: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads((folder / "summary.json").read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{folder / 'summary.json'}: cannot be read: {error}") from None


def _data_set(folder: Path, digest: str) -> dict[str, Any] | None:
    if not digest:
        return None
    data = yaml_io.read(folder / "experiment.yaml")
    task, partition = data.get("task", {}), data.get("partition", {})
    return {
        "name": str(task.get("dataset") or task.get("name", "data")),
        "digest": digest[:36],
        "source": json.dumps({"task": task, "seed": data.get("seed", 0)}),
        "profile": json.dumps({"nodes": data.get("nodes"), "sha256": digest}),
        "partition": " ".join(f"{key}={value}" for key, value in partition.items()),
    }


def artifacts(folder: Path, group: bool) -> dict[str, tuple[Path, str]]:
    """The files that go to MLflow: name there, path here and a digest of what decides its content."""
    if group:
        kinds = ("*.csv", "*.parquet", "*.yaml", "*.html", GROUP, "topology.png", "figures/*.png", "figures/*.pdf")
        chosen = {path.relative_to(folder).as_posix(): path for kind in kinds
                  for path in folder.glob(kind) if not path.name.startswith(".")}
    else:
        names = ("experiment.yaml", "summary.json", "network.json", "state.safetensors", "topology.png", "report.html")
        chosen = {name: folder / name for name in names}
        chosen["nodes.parquet"] = folder / "nodes.jsonl"
    return {name: (path, _digest(path)) for name, path in sorted(chosen.items()) if path.is_file()}


def nodes_table(source: Path, target: Path) -> None:
    """nodes.jsonl as a table: a row per evaluation and node."""
    import pandas as pd

    from dbo.platform.runs.run_folder import read_metrics

    rows: dict[str, list[Any]] = {key: [] for key in ("round", "node", "accuracy", "apart_x", "apart_y", "bytes")}
    for record in read_metrics(source):
        count = len(record["apart_x"])
        rows["round"] += [record["round"]] * count
        rows["node"] += range(count)
        for key in ("accuracy", "apart_x", "apart_y", "bytes"):
            rows[key] += record.get(key) or [None] * count
    pd.DataFrame(rows).to_parquet(target, index=False)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _filled(tags: Mapping[str, str]) -> dict[str, str]:
    return {key: value[:MAX_TAG] for key, value in tags.items() if value}


def _time(text: Any) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None
