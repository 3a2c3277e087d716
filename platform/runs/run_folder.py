"""Read and write the folder of one run: lock, durable lines, rollback, summary.

Everything that looks at runs later (tables, figures, reports, MLflow) reads these files and nothing else:

    experiment.yaml, network.json       what is run, and on which graph
    metrics.jsonl, nodes.jsonl          a line per evaluation: of the whole network, and of each node
    events.jsonl                        starts, recoveries, the end; never rolled back
    state.safetensors, summary.json     the final state, and how the run ended
    checkpoints/                        states to resume from (`checkpoints.py`)

The folder of a comparison or a sweep has a group.json, which names the run folders below it. `schema.py` defines the
content of the files.
"""

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeVar

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from dbo.platform.config.redact import redact_all
from dbo.platform.errors import FolderLockedError, InputError
from dbo.platform.runs import schema
from dbo.platform.runs.atomic_io import write_atomically
from dbo.platform.runs.remote import RemoteFolder
from dbo.platform.runs.safetensors_io import serialize
from dbo.platform.runs.schema import COLUMNS, Event, Group, Record, RecordedNetwork, Summary

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")

GROUP_FILE = "group.json"
_LOCK = ".lock"
_LOCK_ATTEMPTS, _LOCK_PAUSE = 10, 0.02       # seconds between two attempts to take the lock


class RunFolder:
    """The files of one run; one process at a time holds the folder."""

    def __init__(self, path: Path, remote: RemoteFolder | None = None) -> None:
        self.path, self._remote = path, remote
        self.experiment, self.metrics = path / "experiment.yaml", path / "metrics.jsonl"
        self.nodes, self.events, self.network = path / "nodes.jsonl", path / "events.jsonl", path / "network.json"
        self.state, self.summary = path / "state.safetensors", path / "summary.json"
        self.checkpoints = path / "checkpoints"
        self._lock: IO[bytes] | None = None
        self._created = False
        self._open: dict[Path, IO[str]] = {}
        self._digests = self._new_digests()

    def __str__(self) -> str:
        """Return its place as the user named it."""
        return self._remote.url if self._remote else str(self.path)

    def has_run(self) -> bool:
        return self.experiment.exists() or self.metrics.exists() or self.summary.exists()

    def run_key(self) -> str | None:
        """Return the key that the run recorded, of the code and plugins that it ran with; None if it recorded none.

        The key is never computed from the experiment: that would execute the plugins of a foreign folder.
        """
        if self.summary.exists():
            summary = find_summary(self.path)
            return summary.run_key or None if summary else None
        return next((event.run_key for event in reversed(read_events(self.events)) if event.run_key), None)

    # ---- one process at a time ---------------------------------------------------------------------------------------

    def acquire(self) -> None:
        """Create the folder and lock it; the system releases the lock when the process ends, however it ends."""
        try:
            self._created = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            while self._lock is None:
                self._lock = _open_locked(self.path / _LOCK)
        except BlockingIOError:
            raise FolderLockedError(f"--out: {self.path} is in use by another run") from None
        except OSError as error:
            raise InputError(f"--out: {self.path} cannot be used as an output folder: {error.strerror}") from None

    def release(self) -> None:
        self._close_files()
        if self._lock is not None:
            (self.path / _LOCK).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None
            if self._created:
                with suppress(OSError):
                    self.path.rmdir()      # only if nothing was written

    def clear(self) -> None:
        """Remove the files of a previous run, and only those; whatever is left after a crash can still be resumed."""
        for place in (*self.checkpoints.glob("round-*"), *self.checkpoints.glob(".round-*.new")):
            shutil.rmtree(place, ignore_errors=True)
        with suppress(OSError):
            self.checkpoints.rmdir()       # keeps files of others in it
        for file in (self.summary, self.state, self.nodes, self.metrics, self.events, self.experiment, self.network):
            file.unlink(missing_ok=True)
        self._digests = self._new_digests()

    # ---- lines -------------------------------------------------------------------------------------------------------

    def append(self, record: Record, nodes: Record | None = None) -> None:
        """Append an evaluation and its line of the nodes. Both survive the death of this process."""
        if nodes is not None:              # first: a line of metrics.jsonl marks the evaluation as complete
            self._append_line(self.nodes, nodes)
        self._append_line(self.metrics, record)

    def log_event(self, kind: str, **facts: Any) -> None:
        """Append an event with the current time."""
        self._append_line(self.events, {"timestamp": time.time(), "kind": kind, **redact_all(facts)})

    def _append_line(self, path: Path, record: Record) -> None:
        line = schema.serialize_line(record)
        if path not in self._open:
            _drop_partial_line(path)
            self._open[path] = open(path, "a", encoding="utf-8")    # noqa: SIM115
        self._open[path].write(line)
        self._open[path].flush()
        if path in self._digests:
            self._digests[path].update(line.encode())

    def copy_records(self, source: "RunFolder") -> None:
        """Replace the evaluations by those of another run."""
        for mine, theirs in ((self.nodes, source.nodes), (self.metrics, source.metrics)):     # in the order of `append`
            if theirs.exists():
                shutil.copyfile(theirs, mine)

    def digest(self) -> str:
        """Return the digest of all evaluations so far. A checkpoint stores it: resuming needs the same lines."""
        return "".join(digest.hexdigest() for digest in self._digests.values())

    def digest_up_to(self, round_: int) -> str:
        """Return the digest of the recorded lines up to a round."""
        digests = self._new_digests()
        for path, digest in digests.items():
            for record in read_metrics(path):
                if record["round"] <= round_:
                    digest.update(schema.serialize_line(record, allow_nan=True).encode())
        return "".join(digest.hexdigest() for digest in digests.values())

    def _new_digests(self) -> "dict[Path, _Digest]":
        return {path: hashlib.sha256() for path in (self.metrics, self.nodes)}

    def sync(self) -> None:
        """Flush to the disk: lines written so far survive a power cut too."""
        for file in self._open.values():
            os.fsync(file.fileno())

    def rollback(self, round_: int) -> None:
        """Drop lines after `round_`, and a last line that was cut off."""
        self._close_files()       # the files are replaced: lines written to open ones would be lost
        self._digests = self._new_digests()
        for path in (self.nodes, self.metrics):
            records = [record for record in read_metrics(path) if record["round"] <= round_]
            kept = [schema.serialize_line(record, allow_nan=True) for record in records]
            self._digests[path].update("".join(kept).encode())
            if kept or path is self.metrics:
                write_atomically(path, "".join(kept))
            else:
                path.unlink(missing_ok=True)

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
        write_atomically(self.experiment, schema.serialize_experiment(experiment))

    def write_network(self, network: Mapping[str, Any]) -> None:
        write_atomically(self.network, schema.serialize_network(network))

    def write_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        write_atomically(self.state, serialize(state))

    def write_summary(self, summary: Summary) -> None:
        write_atomically(self.summary, schema.serialize_summary(summary))


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


def _drop_partial_line(path: Path) -> None:
    """Drop a last line without its end: text appended to it would damage the file for good."""
    if path.exists() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        write_atomically(path, data[: data.rfind(b"\n") + 1])


def _open_locked(path: Path) -> IO[bytes] | None:
    """Open and lock the lock file; None if its previous owner has removed it: nobody would see the lock then."""
    file = open(path, "wb")    # noqa: SIM115 - held as long as the run
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
        with open(folder / _LOCK, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_metrics(path: Path) -> list[Record]:
    """Read the complete lines of metrics.jsonl or nodes.jsonl, ordered by round."""
    records = _read_lines(path, schema.parse_record)
    for number, (before, record) in enumerate(pairwise(records), 2):
        if record["round"] <= before["round"]:
            raise InputError(
                f"{path}: line {number} is damaged: round {record['round']} after round {before['round']}; "
                f"rounds must increase"
            )
    return records


def read_events(path: Path) -> list[Event]:
    """Read the complete lines of events.jsonl."""
    return _read_lines(path, schema.parse_event)


def _read_lines(path: Path, parse: Callable[[str], T]) -> list[T]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    parsed = []
    for number, line in enumerate(lines, 1):
        try:
            parsed.append(parse(line))
        except ValueError as error:
            if number == len(lines) and not line.endswith("\n"):
                break       # the process died while it wrote this line
            raise InputError(f"{path}: line {number} is damaged: {error}") from None
    return parsed


def has_started_since(folder: Path, when: float) -> bool:
    """Decide whether the run in a folder was started or resumed at this time or later."""
    events = read_events(RunFolder(folder).events)
    return any(event.kind == "started" and event.timestamp >= when for event in events)


def read_experiment(folder: Path) -> dict[str, Any]:
    """Read experiment.yaml as plain data; an InputError names what is wrong with it."""
    path = RunFolder(folder).experiment
    try:
        return schema.parse_experiment(path.read_text(encoding="utf-8"), str(path))
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
    write_atomically(folder / GROUP_FILE, schema.serialize_group(group))


def _read_file(path: Path, parse: Callable[[bytes], T]) -> T | None:
    try:
        return parse(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


# ---- finished runs ---------------------------------------------------------------------------------------------------


def build_history(records: Sequence[Record]) -> "pd.DataFrame":
    """Return the evaluations as a table: the columns that every run has, then the task's own, then the timestamp."""
    import pandas as pd

    extra = [key for key in (records[0] if records else {}) if key not in COLUMNS]
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
    files = RunFolder(folder)
    summary = _read_file(files.summary, schema.parse_object)
    if summary is None:
        raise InputError(f"{folder}: not the folder of a finished run (no summary.json)")
    try:
        state = load_file(files.state) if files.state.exists() else {}
    except (OSError, SafetensorError) as error:
        raise InputError(f"{files.state}: cannot be read: {error}") from None
    return RecordedRun(folder, summary, build_history(read_metrics(files.metrics)), state)
