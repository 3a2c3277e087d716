"""The writer: brings what lies in a folder into MLflow, again and again while the folder grows, or once."""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dbo.platform.errors import RunError
from dbo.platform.runs.run_folder import in_use, started_since
from dbo.platform.tracking import reader as source
from dbo.platform.tracking.client import CLOCK, Store
from dbo.platform.tracking.reader import Ending, Facts

_FILES = "dbo.artifacts"          # a tag with the digests of the files that were uploaded


class Writer:
    """A folder, a run's or a group's, and the store that it goes to."""

    def __init__(
        self, root: Path, store: Store, since: float = 0.0, progress: Callable[[], None] = lambda: None
    ) -> None:
        """`since`: a run that started earlier is left alone until the last call; the command may yet refuse it."""
        self.root, self._store, self._since, self._progress = root, store, since, progress
        self._parent: _Tracked | None = None
        self._runs: dict[Path, _Tracked] = {}

    def write(self, last: bool) -> None:
        """Brings over what is new. `last`: the command has ended, what has no end by now was killed."""
        if not source.is_group(self.root):
            run = self._run(self.root)
            if last or started_since(self.root, self._since):
                self._store.open()
                run.write(last, None)
            return
        group = source.read_group(self.root)
        if not last and group.get("status") != "running":
            return
        self._store.open()
        self._parent = self._parent or _Tracked(self.root, self._store, self._progress, group=True)
        parent = self._parent.enter()
        axes = tuple(group.get("axes") or ())
        for member in group["members"]:
            self._run(self.root / member, axes).write(last, parent)
        self._parent.write(last, None)

    def _run(self, folder: Path, axes: tuple[str, ...] = ()) -> "_Tracked":
        if folder not in self._runs:
            self._runs[folder] = _Tracked(folder, self._store, self._progress)
        self._runs[folder].axes = axes or self._runs[folder].axes
        return self._runs[folder]

    def count(self) -> None:
        """Makes the figures below right without a store."""
        folders = [self.root]
        if source.is_group(self.root):
            folders = [self.root / member for member in source.read_group(self.root)["members"]]
        for folder in folders:
            self._run(folder).points.read()

    @property
    def points(self) -> int:
        return sum(len(run.points.records) for run in self._runs.values())

    @property
    def left(self) -> int:
        return sum(len(run.unsent()) for run in self._runs.values())

    @property
    def lingering(self) -> bool:
        """Whether a run has no end yet and a process still holds its folder, perhaps one of a killed command."""
        return any(run.status == "RUNNING" for run in self._runs.values())

    @property
    def new(self) -> int:
        """How many points this writer has brought over."""
        return sum(run.new for run in self._runs.values())

    @property
    def runs(self) -> Iterator[tuple[Path, int, int]]:
        """Folder, points brought over, points in all."""
        for folder, run in self._runs.items():
            if run.points.records or run.run_id:
                yield folder, run.new, len(run.points.records)


class _Tracked:
    """A run in MLflow and the folder that it is fed from."""

    def __init__(self, folder: Path, store: Store, progress: Callable[[], None], group: bool = False) -> None:
        self.folder, self._store, self._progress, self._group = folder, store, progress, group
        self.points = source.Points(folder / "metrics.jsonl")
        self.axes: tuple[str, ...] = ()
        self.run_id = ""
        self.new = 0
        self._sent: dict[int, float] = {}                    # round and clock of what is in MLflow
        self._sure = False                                   # whether this is so, or has to be asked for
        self.status = ""
        self._tags: dict[str, str] = {}
        self._seen: Any = None                               # the folder as it was when all of it was in MLflow

    def unsent(self) -> list[int]:
        return [round_ for round_ in self.points.records if round_ not in self._sent]

    def write(self, last: bool, parent: str | None) -> None:
        if self._seen is not None and self._seen == (last, self._stamp()):
            return
        seen = (last, self._stamp())
        if not self.enter(parent):
            return
        if not self._group:
            self._send()
        ending = self._ending(last)
        if ending.status == "RUNNING":
            if self.status != "RUNNING":
                self._store.running(self.run_id)
                self.status = "RUNNING"
                self._progress()
            return
        self._finish(ending)
        self._seen = seen

    def _stamp(self) -> list[tuple[str, int, int]]:
        stats = ((entry.name, entry.stat()) for entry in self.folder.glob("[!.]*") if entry.is_file())
        return sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats if name != "mlflow.db")

    def enter(self, parent: str | None = None) -> str:
        """The run's id in MLflow; made if it is not there, empty if there is nothing to make it of yet."""
        if not self.run_id and (facts := self._facts()):
            run = self._store.find_or_make(facts, parent)
            self._store.describe(run, facts)
            self.status, self._tags = run.info.status, dict(run.data.tags)
            self.run_id = run.info.run_id
            self._progress()
        return self.run_id

    def _facts(self) -> Facts | None:
        if self._group:
            return source.group_facts(self.folder, source.read_group(self.folder))
        return source.run_facts(self.folder, self.axes)

    def _send(self) -> None:
        """What is new, each point once, whoever else sends: under the lock the store is asked what it has."""
        if self.points.read():
            self._sure = False
        if self._sure and not self.unsent():
            return
        with self._store.lock():
            if not self._sure or self._elsewhere():
                self._sent = self._store.clocks(self.run_id)
            self._sure = False                              # should a request fail, it may have arrived or not
            unsent = [self.points.records[round_] for round_ in sorted(self.unsent())]
            for batch in self._store.send(self.run_id, unsent):
                self._sent |= {record["round"]: record[CLOCK] for record in batch}
                self.new += len(batch)
                self._progress()
            self._sure = True

    def _elsewhere(self) -> bool:
        """Whether somebody else has sent points of this run meanwhile."""
        newest = self._sent[max(self._sent)] if self._sent else None
        return bool(self._store.get(self.run_id).data.metrics.get(CLOCK) != newest)

    def _ending(self, last: bool) -> Ending:
        folder = self.folder
        ending = source.group_ending(source.read_group(folder)) if self._group else source.run_ending(folder)
        if ending is not None:
            return ending
        if not last or (not self._group and in_use(self.folder)):
            return Ending("RUNNING")
        return Ending("KILLED", {"dbo.status": "killed"})

    def _finish(self, ending: Ending) -> None:
        before = json.loads(self._tags.get(_FILES, "{}"))
        files = source.artifacts(self.folder, self._group)
        for name, (path, digest) in files.items():
            if before.get(name) != digest:
                folder, _, file = name.rpartition("/")
                with _as_uploaded(file, path) as ready:
                    self._store.upload(self.run_id, ready, folder or None)
                self._progress()
        if ending.data and self._tags.get("dbo.data_digest") != ending.tags.get("dbo.data_digest"):
            self._store.log_data(self.run_id, ending.data)
        tags = {**ending.tags, _FILES: json.dumps({name: digest for name, (_, digest) in files.items()})}
        changed = {key: value for key, value in tags.items() if value and self._tags.get(key) != value}
        if changed:
            self._store.tag(self.run_id, changed)
            self._tags |= changed
        if self.status != ending.status:
            self._store.end(self.run_id, ending)
            self.status = ending.status
            self._progress()


@contextmanager
def _as_uploaded(name: str, path: Path) -> Iterator[Path]:
    """The file itself, or the table that is made of it."""
    if name == path.name:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="dbo-nodes-") as folder:
        source.nodes_table(path, Path(folder) / name)
        yield Path(folder) / name


def told(error: Exception) -> str:
    """The first line of what went wrong, short."""
    text = str(error).strip().partition("\n")[0]
    return (text if isinstance(error, RunError) else f"{type(error).__name__}: {text}")[:300]
