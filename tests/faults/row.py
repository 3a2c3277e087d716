"""A line of the table that `python -m tests.faults` prints, and what its tests share."""

import hashlib
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dbo.platform.runs.run_folder import CLOCKS, read_metrics

TINY: dict[str, Any] = {
    "nodes": 4, "rounds": 12, "checkpoint_every": 4, "dtype": "float64", "engine": {"name": "local"},
    "task": {"name": "quadratic", "dim_x": 4, "dim_y": 8}, "tracking": {"uri": "off"},
    "algorithm": {"name": "c2dfb", "inner_steps": 2, "eta_in": 0.3, "eta_out": 0.1, "gamma_in": 0.3},
}


@dataclass(slots=True)
class Row:
    """What one test found. `wrong` says why it is not at its target."""

    test: str
    target: str
    tried: int = 0
    survived: int = 0
    lost: int = 0
    doubled: int = 0
    seconds: list[float] = field(default_factory=list)      # of each recovery, or of each answer
    notes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    took: float = 0.0

    @property
    def ok(self) -> bool:
        return self.tried > 0 and self.survived == self.tried and not self.lost + self.doubled and not self.wrong

    def count(self, good: bool, what: str = "") -> None:
        """One more try."""
        self.tried += 1
        self.survived += good
        if not good and len(self.wrong) < 20:
            self.wrong.append(what)

    def cells(self) -> list[str]:
        def quantile(share: float) -> str:
            if not self.seconds:
                return "–"
            ordered = sorted(self.seconds)
            return f"{ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]:.2f}"

        return [
            self.test, str(self.tried), str(self.survived), str(self.lost), str(self.doubled), quantile(0.5),
            quantile(0.95), self.target, "yes" if self.ok else "NO",
        ]


HEADINGS = ["test", "tried", "survived", "lost", "doubled", "s p50", "s p95", "target", "ok"]


def digest(folder: Path) -> str:
    """Of all numbers of a run, clocks aside: metrics, nodes and the final state."""
    state = hashlib.sha256()
    for record in read_metrics(folder / "metrics.jsonl"):
        state.update(json.dumps({key: value for key, value in record.items() if key not in CLOCKS}).encode())
    for name in ("nodes.jsonl", "state.safetensors"):
        state.update((folder / name).read_bytes())
    return state.hexdigest()


def lines(row: Row, folder: Path, due: int) -> None:
    """Counts evaluations that are missing from a record or stand in it twice."""
    rounds = [json.loads(line)["round"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    row.lost += max(0, due - len(set(rounds)))
    row.doubled += len(rounds) - len(set(rounds))


@contextmanager
def timed(row: Row) -> Iterator[None]:
    start = time.perf_counter()
    yield
    row.seconds.append(time.perf_counter() - start)


def middle(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0
