"""Send a run folder to MLflow: once (`dbo sync`), or repeatedly while the folder grows."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dbo.platform.config import tracking_uri
from dbo.platform.config.redact import redact_server
from dbo.platform.errors import InputError, RunError
from dbo.platform.runs.run_folder import (
    RunFolder,
    has_group,
    has_started_since,
    is_locked,
    read_experiment,
    read_group,
    read_metrics,
)
from dbo.platform.runs.schema import section
from dbo.platform.runs.seal import require_intact
from dbo.platform.tracking import reader
from dbo.platform.tracking.client import CLOCK, Store, mlflow_environment
from dbo.platform.tracking.reader import Ending, Facts

_FILES = "dbo.artifacts"          # a tag with the digests of the files that were uploaded


def sync_folder(folder: Path, uri: str | None, experiment: str | None, log: Callable[[str], None] = print) -> None:
    """Send the runs of one folder to MLflow, and log how many points were new."""
    root = find_root(folder)
    store = resolve_destination(root, uri)
    require_intact([root / member for member in read_group(root).members] if has_group(root) else [root])
    writer = Writer(root, Store(store, experiment or str(read_tracking(root).get("experiment") or "dbo")))
    os.environ.update(mlflow_environment(store))
    try:
        writer.write(is_last=True)
    except (InputError, RunError):
        raise
    except Exception as error:
        writer.count_points()
        raise RunError(
            f"{folder}: {writer.unsent} of {writer.points} points are not in MLflow: {describe_error(error, store)}"
        ) from error
    for path, sent, points in writer.runs:
        log(f"{path}: sent {sent} new points of {points}" if sent else f"{path}: up to date, {points} points")


def find_root(folder: Path) -> Path:
    """Return the folder, or that of the group to which it belongs: runs of a group are tracked below one parent."""
    if not has_group(folder) and reader.read_run_facts(folder) is None:
        raise InputError(f"{folder}: not the folder of a run, a comparison or a sweep")
    place = folder.resolve()
    for above in list(place.parents)[:2]:
        if has_group(above):
            members = read_group(above).members
            if any((above / member).resolve() == place for member in members):
                return above
    return folder


def resolve_destination(root: Path, uri: str | None) -> str:
    """Return the store for a folder: `uri`, or the one that the folder names, if that is safe to contact."""
    if uri is None:
        uri = read_tracking(root).get("uri")
        tracking_uri.validate_recorded_uri(f"{root}: tracking.uri", uri)
    return tracking_uri.resolve_uri(uri if uri != tracking_uri.OFF else None, root)


def read_tracking(folder: Path) -> dict[str, Any]:
    """Return the recorded tracking section of a run or group; {} if there is none."""
    if has_group(folder):
        return read_group(folder).tracking
    return section(read_experiment(folder), "tracking") if RunFolder(folder).experiment.exists() else {}


def describe_error(error: Exception, store: str) -> str:
    """Return the first line of an error, shortened, without the path of the server: it may be a secret."""
    text = redact_server(str(error).strip().partition("\n")[0], store)
    return (text if isinstance(error, RunError) else f"{type(error).__name__}: {text}")[:300]


class Writer:
    """Sends a folder, of a run or a group, to a store."""

    def __init__(
        self, root: Path, store: Store, since: float = 0.0, on_progress: Callable[[], None] = lambda: None
    ) -> None:
        """Runs that started before `since` are sent only by the last call: the command may still refuse them."""
        self.root, self._store, self._since, self._on_progress = root, store, since, on_progress
        self._parent: _TrackedRun | None = None
        self._runs: dict[Path, _TrackedRun] = {}

    def write(self, is_last: bool) -> None:
        """Send what is new. `is_last`: the command has ended, so a run without an end was killed."""
        if not has_group(self.root):
            run = self._run(self.root)
            if is_last or has_started_since(self.root, self._since):
                self._store.open()
                run.write(is_last, None)
            return
        group = read_group(self.root)
        if not is_last and group.status != "running":
            return
        self._store.open()
        self._parent = self._parent or _TrackedRun(self.root, self._store, self._on_progress, is_group=True)
        parent = self._parent.find_or_create()
        axes = reader.list_axis_keys(group)
        for member in group.members:
            run = self._run(self.root / member, axes)
            run.root = self.root
            run.write(is_last, parent)
        self._parent.write(is_last, None)

    def _run(self, folder: Path, axes: tuple[str, ...] = ()) -> "_TrackedRun":
        if folder not in self._runs:
            self._runs[folder] = _TrackedRun(folder, self._store, self._on_progress)
        self._runs[folder].axes = axes or self._runs[folder].axes
        return self._runs[folder]

    def count_points(self) -> None:
        """Update `points` and `unsent` without contacting the store."""
        folders = [self.root]
        if has_group(self.root):
            folders = [self.root / member for member in read_group(self.root).members]
        for folder in folders:
            self._run(folder).points.read()

    @property
    def points(self) -> int:
        return sum(len(run.points.records) for run in self._runs.values())

    @property
    def unsent(self) -> int:
        return sum(len(run.unsent()) for run in self._runs.values())

    @property
    def has_running(self) -> bool:
        """Whether a run has no end yet while a process, perhaps of a killed command, still locks its folder."""
        return any(run.status == "RUNNING" for run in self._runs.values())

    @property
    def runs(self) -> Iterator[tuple[Path, int, int]]:
        """Folder, points sent by this writer, points in all."""
        for folder, run in self._runs.items():
            if run.points.records or run.run_id:
                yield folder, run.sent_count, len(run.points.records)


class _TrackedRun:
    """A run in MLflow and the folder that is its source."""

    def __init__(self, folder: Path, store: Store, on_progress: Callable[[], None], is_group: bool = False) -> None:
        self.folder, self._store, self._on_progress, self._is_group = folder, store, on_progress, is_group
        self.points = reader.Points(RunFolder(folder).metrics)
        self.axes: tuple[str, ...] = ()
        self.root: Path | None = None                        # of the group
        self.run_id = ""
        self.sent_count = 0
        self._sent: dict[int, float] = {}                    # round → clock, of the points in MLflow
        self._sent_is_known = False                          # False: the store must be queried first
        self.status = ""
        self._tags: dict[str, str] = {}
        self._synced: tuple[bool, list[tuple[str, int, int]]] | None = None      # the folder when all of it was sent

    def unsent(self) -> list[int]:
        return [round_ for round_ in self.points.records if round_ not in self._sent]

    def write(self, is_last: bool, parent: str | None) -> None:
        """Send what is new in the folder."""
        current = (is_last, self._list_files())
        if self._synced == current or not self.find_or_create(parent):
            return
        if not self._is_group:
            self._send_points()
        ending = self._read_ending(is_last)
        if ending.status == "RUNNING":
            if self.status != "RUNNING":
                self._store.set_running(self.run_id)
                self.status = "RUNNING"
                self._on_progress()
            return
        self._finish(ending)
        self._synced = current

    def _list_files(self) -> list[tuple[str, int, int]]:
        stats = ((entry.name, entry.stat()) for entry in self.folder.glob("[!.]*") if entry.is_file())
        return sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats if name != "mlflow.db")

    def find_or_create(self, parent: str | None = None) -> str:
        """Return the id of the run in MLflow, created if necessary; "" while the folder does not describe it yet."""
        if not self.run_id and (facts := self._read_facts()):
            run = self._store.find_or_create(facts, parent)
            self._store.log_params(run, facts)
            self.status, self._tags = run.info.status, dict(run.data.tags)
            self.run_id = run.info.run_id
            self._on_progress()
        return self.run_id

    def _read_facts(self) -> Facts | None:
        if self._is_group:
            return reader.build_group_facts(self.folder, read_group(self.folder))
        return reader.read_run_facts(self.folder, self.axes, self.root)

    def _send_points(self) -> None:
        """Send each new point once, even with several writers: under the lock, ask the store what it has."""
        if self.points.read():
            self._sent_is_known = False
        if self._sent_is_known and not self.unsent():
            return
        with self._store.lock():
            if not self._sent_is_known or self._has_other_writer():
                self._sent = self._store.read_clocks(self.run_id)
            self._sent_is_known = False                     # a request that fails may have arrived or not
            unsent = [self.points.records[round_] for round_ in sorted(self.unsent())]
            for batch in self._store.send(self.run_id, unsent):
                self._sent |= {record["round"]: record.get(CLOCK) for record in batch}
                self.sent_count += len(batch)
                self._on_progress()
            self._sent_is_known = True

    def _has_other_writer(self) -> bool:
        """Decide whether another process has sent points of this run since."""
        newest = self._sent[max(self._sent)] if self._sent else None
        return bool(self._store.get(self.run_id).data.metrics.get(CLOCK) != newest)

    def _read_ending(self, is_last: bool) -> Ending:
        if self._is_group:
            ending = reader.build_group_ending(read_group(self.folder))
        else:
            ending = reader.read_run_ending(self.folder)
        if ending is not None:
            return ending
        if not is_last or (not self._is_group and is_locked(self.folder)):
            return Ending("RUNNING")
        return Ending("KILLED", {"dbo.status": "killed"})

    def _finish(self, ending: Ending) -> None:
        """Upload files that changed, then data set, tags and status."""
        before = json.loads(self._tags.get(_FILES, "{}"))
        files = reader.list_artifacts(self.folder, self._is_group)
        for name, (path, digest) in files.items():
            if before.get(name) != digest:
                folder, _, file = name.rpartition("/")
                with _convert(file, path) as ready:
                    self._store.upload(self.run_id, ready, folder or None)
                self._on_progress()
        if ending.data and self._tags.get("dbo.data_digest") != ending.tags.get("dbo.data_digest"):
            self._store.log_data(self.run_id, ending.data)
        if self._is_group:
            self._send_group_metrics(ending)
        tags = {**ending.tags, _FILES: json.dumps({name: digest for name, (_, digest) in files.items()})}
        changed = {key: value for key, value in tags.items() if value and self._tags.get(key) != value}
        if changed:
            self._store.set_tags(self.run_id, changed)
            self._tags |= changed
        if self.status != ending.status:
            self._store.end(self.run_id, ending)
            self.status = ending.status
            self._on_progress()


    def _send_group_metrics(self, ending: Ending) -> None:
        """Send the comparison to the parent. Each value has the time of the last evaluation: sent twice, it is one."""
        group = read_group(self.folder)
        metrics = reader.read_group_metrics(self.folder, group)
        ended = [record["timestamp"] for member in group.members
                 for record in read_metrics(RunFolder(self.folder / member).metrics)[-1:]]
        if metrics and ended:
            self._store.set_metrics(self.run_id, metrics, int(1000 * max(ended)))


@contextmanager
def _convert(name: str, path: Path) -> Iterator[Path]:
    """Yield the file to upload under `name`: the file itself, or a table made from it."""
    if name == path.name:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="dbo-nodes-") as folder:
        reader.write_nodes_table(path, Path(folder) / name)
        yield Path(folder) / name
