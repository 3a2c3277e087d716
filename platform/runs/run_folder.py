"""Read and write the folder of one run: lock, durable lines, rollback, summary.

Everything that looks at runs later (tables, figures, reports, MLflow) reads these files and nothing else:

    experiment.yaml, network.json       what is run, and on which graph
    metrics.jsonl, nodes.jsonl          a line per evaluation: of the whole network, and of each node
    events.jsonl                        starts, recoveries, the end; never rolled back
    state.safetensors, summary.json     the final state, and how the run ended
    manifest.json                       sizes and checksums of all of these (`seal.py`)
    checkpoints/                        states to resume from (`checkpoints.py`)

The folder of a comparison or a sweep has a group.json, which names the run folders below it. `schema.py` defines the
content of the files.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from dbo.platform.config.redact import redact_all
from dbo.platform.errors import FolderLockedError, InputError, RunError
from dbo.platform.regular_files import open_regular
from dbo.platform.runs import schema
from dbo.platform.runs.atomic_io import (
    describe_errors,
    drop_partial_line,
    open_without_links,
    read_bounded,
    read_chunks,
    remove_leftovers,
    truncate,
    write_atomically,
)
from dbo.platform.runs.node_lines import pack_line
from dbo.platform.runs.remote import RemoteFolder
from dbo.platform.runs.safetensors_io import serialize
from dbo.platform.runs.schema import COLUMNS, Event, FileDigest, Group, Manifest, Record, RecordedNetwork, Summary

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")

GROUP_FILE = "group.json"
_LOCK = ".lock"
_MAX_FILE = 64 << 20       # bytes of a JSON file, and of one line: a foreign folder must not fill the memory
_LOCK_ATTEMPTS, _LOCK_PAUSE = 10, 0.02       # seconds between two attempts to take the lock


@dataclass(frozen=True, slots=True)
class Position:
    """How far evaluations are recorded: the size in bytes of metrics.jsonl and nodes.jsonl, and their digests."""

    sizes: tuple[int, int]
    digest: str

    def to_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        return {"records": self.digest, "sizes": list(self.sizes)}

    @classmethod
    def parse(cls, stored: Mapping[str, Any]) -> "Position | None":
        """Read it from what a checkpoint stores; None if an older version wrote the checkpoint."""
        sizes, digest = stored.get("sizes"), stored.get("records")
        if not isinstance(digest, str) or not isinstance(sizes, list) or len(sizes) != 2 or \
                any(type(size) is not int or size < 0 for size in sizes):
            return None
        return cls((sizes[0], sizes[1]), digest)


class RunFolder:
    """The files of one run; one process at a time holds the folder."""

    def __init__(self, path: Path, remote: RemoteFolder | None = None) -> None:
        self.path, self._remote = path, remote
        self.experiment, self.metrics = path / "experiment.yaml", path / "metrics.jsonl"
        self.nodes, self.events, self.network = path / "nodes.jsonl", path / "events.jsonl", path / "network.json"
        self.state, self.summary = path / "state.safetensors", path / "summary.json"
        self.manifest = path / "manifest.json"
        self.checkpoints = path / "checkpoints"
        self._lock: IO[bytes] | None = None
        self._place: os.stat_result                     # of the folder, when it was locked
        self._created = False
        self._open: dict[Path, IO[str]] = {}
        self._counted = self._new_counts()
        self._written: dict[str, FileDigest] = {}       # whole files that this process wrote

    def __str__(self) -> str:
        """Return its place as the user named it."""
        return self._remote.url if self._remote else str(self.path)

    def has_run(self) -> bool:
        return self.experiment.exists() or self.metrics.exists() or self.summary.exists()

    def run_key(self) -> str | None:
        """Return the key that the run recorded, of the code and plugins that it ran with; None if it recorded none.

        The key is never computed from the experiment: that would execute the plugins of a foreign folder.
        """
        if (summary := find_summary(self.path)) is not None:
            return summary.run_key or None
        if (manifest := find_manifest(self.path)) is not None:      # the summary is damaged or missing
            return manifest.run_key or None
        return next((event.run_key for event in reversed(read_events(self.events)) if event.run_key), None)

    # ---- one process at a time ---------------------------------------------------------------------------------------

    def acquire(self) -> None:
        """Create the folder and lock it; the system releases the lock when the process ends, however it ends."""
        try:
            self._created = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            if self.checkpoints.is_symlink():        # clearing the folder would remove checkpoints of another run
                raise OSError(errno.ELOOP, f"{self.checkpoints.name} is a symbolic link; remove it")
            while self._lock is None:
                self._lock = _open_locked(self.path / _LOCK)
            self._place = os.stat(self.path)
            remove_leftovers(self.path, *(file.name for file in self._list_files()))     # no other process writes them
        except BlockingIOError:
            raise FolderLockedError(f"--out: {self.path} is in use by another run") from None
        except OSError as error:
            is_link = error.errno == errno.ELOOP and (self.path / _LOCK).is_symlink()
            reason = f"{_LOCK} is a symbolic link; remove it" if is_link else error.strerror
            raise InputError(f"--out: {self.path} cannot be used as an output folder: {reason}") from None

    def release(self) -> None:
        self._close_files()
        if self._lock is not None:
            with suppress(RunError):
                self._require_same_place()              # else this would be the lock of another run
                (self.path / _LOCK).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None
            if self._created:
                with suppress(OSError):
                    self.path.rmdir()      # only if nothing was written

    def _require_same_place(self) -> None:
        """Raise RunError if the folder was renamed, removed or taken by another run since it was locked.

        Open files would follow a renamed folder, and new ones would go to its old place: results in two halves.
        """
        if self._lock is None:
            return
        with suppress(FileNotFoundError):
            lock = os.stat(self.path / _LOCK, follow_symlinks=False)
            if not os.path.samestat(lock, os.fstat(self._lock.fileno())):
                raise RunError(f"{self}: another run has taken this folder; it was renamed or removed meanwhile")
        try:
            is_same = os.path.samestat(os.stat(self.path), self._place)
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise RunError(f"{self}: the folder was renamed or removed; nothing more is written, --resume continues")

    def clear(self) -> None:
        """Remove the files of a previous run, and only those; whatever is left after a crash can still be resumed."""
        for place in (*self.checkpoints.glob("round-*"), *self.checkpoints.glob(".round-*.new")):
            if place.is_symlink():
                place.unlink()
            shutil.rmtree(place, ignore_errors=True)
        with suppress(OSError):
            self.checkpoints.rmdir()       # keeps files of others in it
        for file in self._list_files():
            file.unlink(missing_ok=True)
        self._counted, self._written = self._new_counts(), {}

    def _list_files(self) -> tuple[Path, ...]:
        # In the order of removal: the summary claims that the run has ended, and can be restored from the manifest.
        return (
            self.summary, self.manifest, self.state, self.nodes, self.metrics, self.events, self.experiment,
            self.network,
        )

    # ---- lines -------------------------------------------------------------------------------------------------------

    def append(self, record: Record, nodes: Record | None = None) -> None:
        """Append an evaluation and its line of the nodes. Both survive the death of this process."""
        if nodes is not None:              # first: a line of metrics.jsonl marks the evaluation as complete
            self._append_line(self.nodes, pack_line(nodes))
        self._append_line(self.metrics, record)

    def log_event(self, kind: str, **facts: Any) -> None:
        """Append an event with the current time."""
        self._append_line(self.events, {"timestamp": time.time(), "kind": kind, **redact_all(facts)})

    def _append_line(self, path: Path, record: Record) -> None:
        line = schema.serialize_line(record)
        with describe_errors(path, "an event" if path == self.events else "an evaluation"):
            if path not in self._open:
                drop_partial_line(path)
                self._open[path] = open(path, "a", encoding="utf-8", opener=open_without_links)    # noqa: SIM115
            try:
                self._open[path].write(line)
                self._open[path].flush()
            except OSError:
                with suppress(OSError):        # it tries to write the rest of the line
                    self._open.pop(path).close()
                raise
        if path in self._counted:
            self._counted[path].update(line.encode())

    def copy_records(self, source: "RunFolder") -> None:
        """Replace the evaluations by those of another run; they survive a power cut on return."""
        for mine, theirs in ((self.nodes, source.nodes), (self.metrics, source.metrics)):     # in the order of `append`
            if theirs.exists():
                write_atomically(mine, read_chunks(theirs, theirs.stat().st_size), f"a copy of {theirs}")

    def position(self) -> Position:
        """Return how far evaluations are recorded. A checkpoint stores it: resuming needs the same lines."""
        return _find_position(self._counted)

    def has_position(self, position: Position) -> bool:
        """Decide whether the files begin with the evaluations up to a position."""
        return _find_position(self._count_up_to(position)) == position

    def digest_up_to(self, round_: int) -> str:
        """Return the digest of the recorded lines up to a round: checkpoints of older versions store no position."""
        counted = self._new_counts()
        for path, count in counted.items():
            for _ in _keep_lines(path, round_, count):
                pass
        return _find_position(counted).digest

    def _new_counts(self) -> "dict[Path, _Count]":
        return {path: _Count() for path in (self.metrics, self.nodes)}

    def _count_up_to(self, position: Position) -> "dict[Path, _Count]":
        counted = self._new_counts()
        for (path, count), size in zip(counted.items(), position.sizes, strict=True):
            for chunk in read_chunks(path, size):
                count.update(chunk)
        return counted

    def sync(self) -> None:
        """Flush to the disk: lines written so far survive a power cut too. Raise RunError if the folder is gone."""
        self._require_same_place()
        for path, file in self._open.items():
            with describe_errors(path, "evaluations and events"):
                os.fsync(file.fileno())

    def rollback(self, round_: int, position: Position | None = None) -> None:
        """Drop lines after `round_`, and a last line that was cut off.

        `position` is that of the evaluations up to the round. With it, files are truncated instead of parsed; other
        lines than those recorded raise RunError.
        """
        self._close_files()       # the files may be replaced: lines written to open ones would be lost
        if round_ < 0:
            position = _find_position(self._new_counts())
        if position is None:
            self._counted = self._new_counts()
            for path in (self.nodes, self.metrics):
                write_atomically(path, _keep_lines(path, round_, self._counted[path]), "evaluations")
        else:
            counted = self._count_up_to(position)
            if _find_position(counted) != position:
                raise RunError(f"{self.metrics} or {self.nodes.name} has changed since the checkpoint was saved")
            self._counted = counted
            for path in (self.nodes, self.metrics):
                if counted[path].size:
                    truncate(path, counted[path].size)
                elif path == self.metrics:
                    write_atomically(path, b"", "evaluations")
        if not self._counted[self.nodes].size:
            self.nodes.unlink(missing_ok=True)

    def _close_files(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    # ---- whole files -------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Upload the folder to its URL, if it has one."""
        if self._remote is not None:
            self._remote.push()

    def write_experiment(self, experiment: Mapping[str, Any]) -> None:
        self._write(self.experiment, schema.serialize_experiment(experiment), "the experiment")

    def write_network(self, network: Mapping[str, Any]) -> None:
        self._write(self.network, schema.serialize_network(network), "the graph")

    def write_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        self._write(self.state, serialize(state), "the final state")

    def write_summary(self, summary: Summary) -> None:
        self._write(self.summary, schema.serialize_summary(summary), "the summary")

    def _write(self, path: Path, data: str | Iterable[bytes | memoryview], what: str) -> None:
        count = _Count()
        write_atomically(path, count.pass_on([data.encode()] if isinstance(data, str) else data), what)
        self._written[path.name] = count.to_digest()

    def list_written(self) -> dict[str, FileDigest]:
        """Return what this process has written: whole files, and all evaluations. Nothing is read back."""
        lines = {path.name: count.to_digest() for path, count in self._counted.items() if path.exists()}
        return self._written | lines


class _Count:
    """The running size and digest of a file."""

    def __init__(self) -> None:
        self.size, self._digest = 0, hashlib.sha256()

    def update(self, data: bytes | memoryview) -> None:
        self.size += len(data)
        self._digest.update(data)

    def pass_on(self, pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for piece in pieces:
            self.update(piece)
            yield piece

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def to_digest(self) -> FileDigest:
        return FileDigest(self.size, self.hexdigest())


def _find_position(counted: "Mapping[Path, _Count]") -> Position:
    metrics, nodes = counted.values()
    return Position((metrics.size, nodes.size), metrics.hexdigest() + nodes.hexdigest())


def _keep_lines(path: Path, round_: int, count: _Count) -> Iterator[bytes]:
    """Yield and count the lines up to a round."""
    for record in iterate_metrics(path):
        if record["round"] <= round_:
            line = schema.serialize_line(record, allow_nan=True).encode()
            count.update(line)
            yield line


def _open_locked(path: Path) -> IO[bytes] | None:
    """Open and lock the lock file; None if its previous owner has removed it: nobody would see the lock then."""
    file = open(path, "ab", opener=open_without_links)    # noqa: SIM115 - held as long as the run
    try:
        _lock_exclusively(file)
    except OSError:
        file.close()
        raise
    if os.fstat(file.fileno()).st_nlink:
        return file
    file.close()
    return None


def _lock_exclusively(file: IO[bytes]) -> None:
    """Lock with several attempts: `is_locked` may hold the lock for a moment."""
    for _ in range(_LOCK_ATTEMPTS - 1):
        with suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(_LOCK_PAUSE)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(folder: Path) -> bool:
    """Decide whether a process holds a run folder. A lock file alone may be left over from a crash."""
    try:
        with open(folder / _LOCK, "rb", opener=open_without_links) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_metrics(path: Path) -> list[Record]:
    """Read the complete lines of metrics.jsonl or nodes.jsonl, ordered by round."""
    return list(iterate_metrics(path))


def iterate_metrics(path: Path) -> Iterator[Record]:
    """Yield what `read_metrics` returns, one line in memory at a time."""
    before: int | None = None
    for number, record in enumerate(_iterate_lines(path, schema.parse_record), 1):
        if before is not None and record["round"] <= before:
            raise InputError(
                f"{path}: line {number} is damaged: round {record['round']} after round {before}; rounds must increase")
        before = record["round"]
        yield record


def read_events(path: Path) -> list[Event]:
    """Read the complete lines of events.jsonl."""
    return list(_iterate_lines(path, schema.parse_event))


def _iterate_lines(path: Path, parse: Callable[[str], T]) -> Iterator[T]:
    for number, line in enumerate(_iterate_text(path), 1):
        try:
            parsed = parse(line)
        except ValueError as error:
            if not line.endswith("\n"):
                return       # the process died while it wrote this line, which is the last one
            raise InputError(f"{path}: line {number} is damaged: {error}") from None
        yield parsed


def _iterate_text(path: Path) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8", opener=open_regular) as file:
            for number, line in enumerate(iter(partial(file.readline, _MAX_FILE), ""), 1):
                if len(line) >= _MAX_FILE:
                    raise InputError(f"{path}: line {number} is damaged: longer than {_MAX_FILE >> 20} MB")
                yield line
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def has_started_since(folder: Path, when: float) -> bool:
    """Decide whether the run in a folder was started or resumed at this time or later."""
    events = read_events(RunFolder(folder).events)
    return any(event.kind == "started" and event.timestamp >= when for event in events)


def read_experiment(folder: Path) -> dict[str, Any]:
    """Read experiment.yaml as plain data; an InputError names what is wrong with it."""
    path = RunFolder(folder).experiment
    try:
        return schema.parse_experiment(read_bounded(path, _MAX_FILE).decode("utf-8"), str(path))
    except FileNotFoundError:
        raise InputError(f"{folder}: not the folder of a run (no experiment.yaml)") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def read_summary(folder: Path) -> Summary | None:
    """Read summary.json; None if the run has not ended."""
    return _read_file(RunFolder(folder).summary, schema.parse_summary)


def find_summary(folder: Path) -> Summary | None:
    """Read summary.json; None also if it is damaged."""
    try:
        return read_summary(folder)
    except InputError:
        return None


def read_manifest(folder: Path) -> Manifest | None:
    """Read manifest.json; None if the run is not sealed."""
    return _read_file(RunFolder(folder).manifest, schema.parse_manifest)


def find_manifest(folder: Path) -> Manifest | None:
    """Read manifest.json; None also if it is damaged."""
    try:
        return read_manifest(folder)
    except InputError:
        return None


def read_network(folder: Path) -> RecordedNetwork | None:
    """Read network.json; None if the run has not written it."""
    return _read_file(RunFolder(folder).network, schema.parse_network)


def has_group(folder: Path) -> bool:
    """Decide whether a folder is that of a comparison or a sweep."""
    return (folder / GROUP_FILE).is_file()


def read_group(folder: Path) -> Group:
    """Read group.json, whose members must be folders below it."""
    path = folder / GROUP_FILE
    group = _read_file(path, schema.parse_group)
    if group is None:
        raise InputError(f"{path}: no such file")
    for member in group.members:
        if not is_member(folder, member):
            raise InputError(f"{path}: members: {member!r} is not allowed; must be inside the folder")
    return group


def find_group(folder: Path) -> Group | None:
    """Read group.json; None if there is none, or it is damaged."""
    try:
        return read_group(folder)
    except InputError:
        return None


def is_member(folder: Path, member: str) -> bool:
    """Decide whether a member of a group is a folder inside the group's folder."""
    try:
        return (folder / member).resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError):       # no file name can hold a NUL, say
        return False


def write_group(folder: Path, group: Group) -> None:
    """Write group.json, and the folder if there is none yet."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out: {folder} cannot be used as an output folder: {error.strerror}") from None
    write_atomically(folder / GROUP_FILE, schema.serialize_group(group), "the list of runs")


def _read_file(path: Path, parse: Callable[[bytes], T]) -> T | None:
    try:
        return parse(read_bounded(path, _MAX_FILE))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


# ---- finished runs ---------------------------------------------------------------------------------------------------


def build_history(records: Sequence[Record]) -> "pd.DataFrame":
    """Return the evaluations as a table: the columns that every run has, then the task's own, then the timestamp."""
    import pandas as pd

    found = dict.fromkeys(key for record in records for key in record)
    extra = [key for key in found if key not in (*COLUMNS, *schema.BLOCK_LISTS)]
    return pd.DataFrame(list(records), columns=[*COLUMNS[:-1], *extra, COLUMNS[-1]])


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A finished run, read from its folder."""

    folder: Path
    summary: dict[str, Any]
    history: "pd.DataFrame"
    state: dict[str, NDArray[Any]]


def read_run(folder: Path) -> RecordedRun:
    """Read the folder of a run that has ended."""
    summary, state = read_end(folder)
    return RecordedRun(folder, summary, build_history(read_metrics(RunFolder(folder).metrics)), state)


def read_end(folder: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Read the content of summary.json and the final state of a run that has ended, without its history."""
    files = RunFolder(folder)
    summary = _read_file(files.summary, schema.parse_object)
    if summary is None:
        raise InputError(f"{folder}: not the folder of a finished run (no summary.json)")
    try:
        return summary, load_file(files.state) if files.state.is_file() else {}      # no pipe
    except (OSError, SafetensorError) as error:
        raise InputError(f"{files.state}: cannot be read: {error}") from None
