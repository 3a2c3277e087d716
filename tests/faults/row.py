"""One row of the table that `python -m tests.faults` prints, and helpers that the fault tests share."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dbo.platform.runs.atomic_io import write_atomically
from dbo.platform.runs.run_folder import read_metrics
from dbo.platform.runs.schema import CLOCKS

TINY: dict[str, Any] = {
    "nodes": 4, "rounds": 12, "checkpoint_every": 4, "dtype": "float64", "engine": {"name": "local"},
    "task": {"name": "quadratic", "dim_x": 4, "dim_y": 8}, "tracking": {"uri": "off"},
    "algorithm": {"name": "c2dfb", "inner_steps": 2, "eta_in": 0.3, "eta_out": 0.1, "gamma_in": 0.3},
}
HEADINGS = ["test", "tried", "survived", "lost", "doubled", "s p50", "s p95", "target", "ok"]


@dataclass(slots=True)
class Row:
    """The result of one fault test."""

    test: str
    target: str
    tried: int = 0
    survived: int = 0
    lost: int = 0                                           # evaluations or points that are missing at the end
    doubled: int = 0                                        # those that are there twice
    seconds: list[float] = field(default_factory=list)      # of each recovery, or of each response
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)       # why the target is missed; the first 20
    total_seconds: float = 0.0
    loads: list[float] = field(default_factory=list)        # of the machine, while the row ran
    is_complete: bool = True                                # False: `Pieces` has stopped before its last case

    @property
    def ok(self) -> bool:
        return self.tried > 0 and self.survived == self.tried and not self.lost + self.doubled and not self.problems

    def count(self, survived: bool, problem: str = "") -> None:
        """Count one more try."""
        self.tried += 1
        self.survived += survived
        if not survived and len(self.problems) < 20:
            self.problems.append(problem)

    def format(self) -> list[str]:
        """Return the row as text, a cell per heading."""
        def quantile(share: float) -> str:
            if not self.seconds:
                return "–"
            ordered = sorted(self.seconds)
            return f"{ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]:.2f}"

        return [
            self.test, str(self.tried), str(self.survived), str(self.lost), str(self.doubled), quantile(0.5),
            quantile(0.95), self.target, "yes" if self.ok else "NO",
        ]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Run the cases of a long row in several calls: what has ended is kept in a file until all have."""

    path: Path | None = None
    limit: int | None = None        # cases per call

    def run(self, row: Row, cases: Mapping[str, Callable[[Row], None]]) -> Row:
        """Return the row with the cases that were run before and those of this call."""
        done: list[str] = []
        if self.path is not None and self.path.exists():
            stored = json.loads(self.path.read_text())
            row, done = Row(**stored["row"]), stored["done"]
        start, spent = time.perf_counter(), row.total_seconds
        for name in [name for name in cases if name not in done][:self.limit]:
            cases[name](row)
            done.append(name)
            row.total_seconds = spent + time.perf_counter() - start
            row.loads.append(os.getloadavg()[0])
            if self.path is not None:
                write_atomically(self.path, json.dumps({"row": asdict(row), "done": done}))
        row.total_seconds = spent               # the caller adds the time of this call
        row.is_complete = len(done) == len(cases)
        if self.path is not None and row.is_complete:
            self.path.unlink(missing_ok=True)
        return row


def hash_run(folder: Path) -> str:
    """Hash all numbers of a run except clocks: metrics, nodes and the final state."""
    state = hashlib.sha256()
    for record in read_metrics(folder / "metrics.jsonl"):
        state.update(json.dumps({key: value for key, value in record.items() if key not in CLOCKS}).encode())
    for name in ("nodes.jsonl", "state.safetensors"):
        state.update((folder / name).read_bytes())
    return state.hexdigest()


def count_evaluations(row: Row, folder: Path, expected: int) -> None:
    """Count evaluations that are missing from metrics.jsonl or are there twice."""
    rounds = [json.loads(line)["round"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    row.lost += max(0, expected - len(set(rounds)))
    row.doubled += len(rounds) - len(set(rounds))


@contextmanager
def measure_time(row: Row) -> Iterator[None]:
    """Add the seconds of the block to the row."""
    start = time.perf_counter()
    yield
    row.seconds.append(time.perf_counter() - start)
