"""A run's folder: the resolved experiment, a durable line per evaluation, the final state, the summary.

Everything that looks at runs later (tables, figures, reports, MLflow) reads these files and nothing else:

    experiment.yaml, network.json       what is run, and on which graph
    metrics.jsonl, nodes.jsonl          a line per evaluation: of the whole network, and of each node
    events.jsonl                        what happened on the way: starts, recoveries, the end; never rewound
    state.safetensors, summary.json     how it ended
"""

import fcntl
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import pandas as pd
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from dbo.platform.errors import InputError, InUse
from dbo.platform.runs.atomic_io import write_atomically
from dbo.platform.config.redact import masked_in
from dbo.platform.runs.remote import Storage
from dbo.platform.runs.safetensors_io import pieces

Record = dict[str, Any]

COLUMNS = (
    "round", "seconds", "test_accuracy", "test_loss", "upper_loss", "lower_loss", "node_accuracy_mean",
    "node_accuracy_min", "bytes_broadcast", "bytes_links", "packets", "comm_mb", "paper_megabytes", "consensus_x",
    "consensus_y", "hypergradient_norm", "gradient_calls", "hvp_calls", "jvp_calls", "timestamp",
)
CLOSED_FORMS = ("solution_error", "penalty_error", "hypergradient_error")      # of tasks whose solution is known
CLOCKS = ("seconds", "timestamp")       # all other columns are the same in every repetition of a run
_LOCK = ".lock"
_TRIES, _PAUSE = 10, 0.02               # how often, and how many seconds apart, a folder's lock is asked for


class RunFolder:
    """The files of one run; held by one process at a time."""

    def __init__(self, path: Path, storage: Storage | None = None) -> None:
        self.path, self._storage = path, storage
        self.experiment, self.metrics = path / "experiment.yaml", path / "metrics.jsonl"
        self.nodes, self.events, self.network = path / "nodes.jsonl", path / "events.jsonl", path / "network.json"
        self.state, self.summary = path / "state.safetensors", path / "summary.json"
        self.checkpoints = path / "checkpoints"
        self._lock: IO[bytes] | None = None
        self._made = False
        self._open: dict[Path, IO[str]] = {}
        self._sums = _sums(self.metrics, self.nodes)

    def __str__(self) -> str:
        """Its place as the user has named it."""
        return self._storage.url if self._storage else str(self.path)

    def holds_run(self) -> bool:
        return self.experiment.exists() or self.metrics.exists() or self.summary.exists()

    def run_key(self) -> str | None:
        """The key of the run that lies here, as it has told it itself: of the code and plugins that it was made with.

        Never worked out anew from the experiment: that would run plugins of a folder that only lies here.
        """
        try:
            if self.summary.exists():
                return str(dict(json.loads(self.summary.read_bytes()))["run_key"])
        except (OSError, ValueError, TypeError, KeyError):
            return None
        told = [event["run_key"] for event in read_events(self.events) if "run_key" in event]
        return str(told[-1]) if told else None

    def acquire(self) -> None:
        """Makes the folder and takes it for this process; the system lets go of it when the process ends in any way."""
        try:
            self._made = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            while self._lock is None:
                self._lock = _locked(self.path / _LOCK)
        except BlockingIOError:
            raise InUse(f"--out: {self.path} is in use by another run") from None
        except OSError as error:
            raise InputError(f"--out: {self.path} cannot be used as an output folder: {error.strerror}") from None

    def release(self) -> None:
        self._shut()
        if self._lock is not None:
            (self.path / _LOCK).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None
            if self._made:
                with suppress(OSError):
                    self.path.rmdir()      # nothing was written: as if it had never been made

    def clear(self) -> None:
        """Removes an earlier run's files, and only those; in an order in which every rest can still be resumed."""
        for place in (*self.checkpoints.glob("round-*"), *self.checkpoints.glob(".round-*.new")):
            shutil.rmtree(place, ignore_errors=True)
        with suppress(OSError):
            self.checkpoints.rmdir()       # somebody else's files in it stay
        for file in (self.summary, self.state, self.nodes, self.metrics, self.events, self.experiment, self.network):
            file.unlink(missing_ok=True)
        self._sums = _sums(self.metrics, self.nodes)

    def copy_records(self, other: "RunFolder") -> None:
        """The evaluations of another run, in the place of its own."""
        for file in ("nodes", "metrics"):          # in the order in which they are appended to
            if getattr(other, file).exists():
                shutil.copyfile(getattr(other, file), getattr(self, file))

    def append(self, record: Record, nodes: Record | None = None) -> None:
        """One line, and one of the nodes, handed to the system at once: they survive the death of this process."""
        if nodes is not None:              # first: a line of metrics.jsonl says that the evaluation is complete
            self._write(self.nodes, nodes)
        self._write(self.metrics, record)

    def tell(self, kind: str, **facts: Any) -> None:
        """An event, with the time at which it was told."""
        self._write(self.events, {"timestamp": time.time(), "kind": kind, **masked_in(facts)})

    def _write(self, path: Path, line: Record) -> None:
        text = json.dumps(line, allow_nan=False) + "\n"
        if path not in self._open:
            _mend(path)
            self._open[path] = open(path, "a", encoding="utf-8")    # noqa: SIM115
        self._open[path].write(text)
        self._open[path].flush()
        if path in self._sums:
            self._sums[path].update(text.encode())

    def digest(self) -> str:
        """Of all evaluations so far: a checkpoint remembers it, so that a run never goes on from other lines."""
        return "".join(sum_.hexdigest() for sum_ in self._sums.values())

    def digest_up_to(self, round_: int) -> str:
        """The same of the lines that lie there, up to a round."""
        sums = _sums(self.metrics, self.nodes)
        for path, sum_ in sums.items():
            for record in read_metrics(path):
                if record["round"] <= round_:
                    sum_.update((json.dumps(record) + "\n").encode())
        return "".join(sum_.hexdigest() for sum_ in sums.values())

    def sync(self) -> None:
        """Lines written so far survive a power cut too."""
        for file in self._open.values():
            os.fsync(file.fileno())

    def rewind(self, round_: int) -> None:
        """Drops lines after `round_`, and a last line that was cut off in the middle."""
        self._shut()       # the files are replaced: lines written to the open ones would be lost
        self._sums = _sums(self.metrics, self.nodes)
        for path in (self.nodes, self.metrics):
            kept = [record for record in read_metrics(path) if record["round"] <= round_]
            for record in kept:
                self._sums[path].update((json.dumps(record) + "\n").encode())
            if kept or path is self.metrics:
                write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))
            else:
                path.unlink(missing_ok=True)

    def _shut(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def publish(self) -> None:
        """Brings the folder to its URL, if it has one."""
        if self._storage is not None:
            self._storage.push()

    def write_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        write_atomically(self.state, pieces(state))

    def write_network(self, network: Mapping[str, Any]) -> None:
        write_atomically(self.network, json.dumps(network) + "\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_atomically(self.summary, json.dumps(masked_in(summary), indent=2, allow_nan=False) + "\n")


def _sums(*paths: Path) -> dict[Path, Any]:
    return {path: hashlib.sha256() for path in paths}


def _mend(path: Path) -> None:
    """Drops a last line that was cut off in the middle: one that is appended to would damage the file for good."""
    if path.exists() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        write_atomically(path, data[: data.rfind(b"\n") + 1])


def _locked(path: Path) -> IO[bytes] | None:
    """The lock file, locked; None if its last holder removed it meanwhile, so that the lock would be on nothing."""
    file = open(path, "wb")    # noqa: SIM115 - held as long as the run
    try:
        _take(file)
    except OSError:
        file.close()
        raise
    if os.fstat(file.fileno()).st_nlink:
        return file
    file.close()
    return None


def _take(file: IO[bytes]) -> None:
    """More than one try: it may be only `in_use` that looks at the lock at this moment."""
    for _ in range(_TRIES - 1):
        with suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(_PAUSE)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def in_use(folder: Path) -> bool:
    """Whether a process holds a run's folder: a lock file that lies there may be that of one that crashed."""
    try:
        with open(folder / _LOCK, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def read_metrics(path: Path) -> list[Record]:
    """The complete lines of a file with a line per evaluation, in the order of their rounds."""
    records = _read_lines(path, "round", int)
    for number, (before, record) in enumerate(pairwise(records), 2):
        if record["round"] <= before["round"]:
            raise InputError(
                f"{path}: line {number} is damaged: round {record['round']} after round {before['round']}; "
                f"rounds must rise"
            )
    return records


def read_events(path: Path) -> list[Record]:
    """The complete lines of events.jsonl."""
    return _read_lines(path, "kind", str)


def started_since(folder: Path, when: float) -> bool:
    """Whether the run in a folder was begun, or gone on with, at this time or later."""
    events = read_events(folder / "events.jsonl")
    return any(event["kind"] == "started" and event["timestamp"] >= when for event in events)


def _read_lines(path: Path, key: str, kind: type) -> list[Record]:
    """The objects in the complete lines of a file; each has a `key` of this kind."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or not isinstance(record.get(key), kind):
                raise ValueError(f"a line without a {key}")
        except ValueError as error:
            if number == len(lines) and not line.endswith("\n"):
                break       # the process died while it wrote this line
            raise InputError(f"{path}: line {number} is damaged: {error}") from None
        records.append(record)
    return records


def history(records: Sequence[Record]) -> pd.DataFrame:
    """Records as a table: the columns that every run has, then the task's own."""
    extra = [key for key in (records[0] if records else {}) if key not in COLUMNS]
    return pd.DataFrame(list(records), columns=[*COLUMNS[:-1], *extra, COLUMNS[-1]])


@dataclass(frozen=True, slots=True)
class Target:
    """A metric and the level that is to be reached, e.g. test_accuracy=0.7."""

    metric: str
    level: float

    @classmethod
    def parse(cls, text: str) -> "Target":
        metric, sign, level = text.partition("=")
        allowed = [c for c in COLUMNS if c.endswith(("accuracy", "loss", "_mean", "_min", "_norm", "_x", "_y"))]
        allowed += CLOSED_FORMS
        try:
            if not sign or metric not in allowed or not math.isfinite(float(level)):
                raise ValueError
            return cls(metric, float(level))
        except ValueError:
            raise InputError(f"--target: {text!r} is not metric=level; metrics: {', '.join(allowed)}") from None

    @property
    def rising(self) -> bool:
        """Accuracies are to be exceeded, everything else is to fall below the level."""
        return "accuracy" in self.metric

    def reached(self, records: Sequence[Record]) -> Record | None:
        """The first evaluation at or beyond the level."""
        for record in records:
            if record["round"] == 0 and not self.rising:
                continue       # nodes agree before they have begun, and have no direction yet
            value = record.get(self.metric)
            if value is not None and (value >= self.level if self.rising else value <= self.level):
                return record
        return None

    def __str__(self) -> str:
        return f"{self.metric}={self.level:g}"


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run as it lies on the disk."""

    folder: Path
    summary: dict[str, Any]
    history: pd.DataFrame
    state: dict[str, NDArray[Any]]


def read_run(folder: Path) -> RecordedRun:
    """A finished run's folder."""
    files = RunFolder(folder)
    try:
        summary = dict(json.loads(files.summary.read_bytes()))
        state = load_file(files.state) if files.state.exists() else {}
    except FileNotFoundError:
        raise InputError(f"{folder}: not the folder of a finished run (no summary.json)") from None
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise InputError(f"{folder}: summary.json or state.safetensors cannot be read: {error}") from None
    return RecordedRun(folder, summary, history(read_metrics(files.metrics)), state)
