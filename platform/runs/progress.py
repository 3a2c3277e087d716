"""Keep what a run knows about itself between rounds: clocks, evaluations, recoveries. Checkpoints store it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from dbo.platform.runs.provenance import collect_environment
from dbo.platform.runs.run_folder import Position
from dbo.platform.runs.schema import Record, Recovery, Target

# summary.json has the cost of these; that of other targets can be read off metrics.jsonl at any time.
_TARGETS = tuple(
    Target(metric, level)
    for metric in ("test_accuracy", "node_accuracy_mean")
    for level in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(slots=True)
class Evaluated:
    """What the end of a run needs of all its evaluations. The evaluations themselves are in metrics.jsonl only."""

    last: Record = field(default_factory=dict)
    first_loss: float | None = None
    last_loss: float | None = None
    targets: dict[str, Record | None] = field(default_factory=lambda: {str(target): None for target in _TARGETS})

    def add(self, record: Record) -> None:
        """Take in the next evaluation."""
        self.last = record
        if (loss := record.get("upper_loss")) is not None:
            self.first_loss = loss if self.first_loss is None else self.first_loss
            self.last_loss = loss
        for target in _TARGETS:
            if self.targets[str(target)] is None:
                self.targets[str(target)] = target.find_cost([record])

    @classmethod
    def restore(cls, stored: Mapping[str, Any], records: Iterable[Record]) -> "Evaluated":
        """Return what a checkpoint stored; one of an older version stored nothing, so the records are read."""
        found = stored.get("evaluated")
        if isinstance(found, dict) and set(found) == set(cls.__slots__):
            return cls(**found)
        evaluated = cls()
        for record in records:
            evaluated.add(record)
        return evaluated


@dataclass(slots=True)
class RunProgress:
    """The clocks in seconds, a summary of the evaluations so far, and the recoveries."""

    data: str | None                    # digest of the data
    training: float = 0.0
    evaluating: float = 0.0
    computing: list[float] = field(default_factory=list)    # of each block, up to the last restore
    started: str = field(default_factory=_now)
    evaluated: Evaluated = field(default_factory=Evaluated)
    recoveries: list[Recovery] = field(default_factory=list)

    def sum_computing(self, since_restore: Sequence[float]) -> list[float]:
        """Return the computing time of each block since the start of the run, in seconds."""
        stored = self.computing if len(self.computing) == len(since_restore) else [0.0] * len(since_restore)
        return [round(before + after, 6) for before, after in zip(stored, since_restore, strict=True)]

    def to_checkpoint(
        self, blocks: Sequence[Sequence[int]], position: Position, computing: Sequence[float]
    ) -> dict[str, Any]:
        """Return what a checkpoint stores; `position` is that of the evaluations up to it."""
        return {
            "training": self.training, "evaluating": self.evaluating, "started": self.started,
            "computing": self.sum_computing(computing),
            "recoveries": [recovery.to_dict() for recovery in self.recoveries],
            "blocks": [list(ids) for ids in blocks], **position.to_dict(), "evaluated": asdict(self.evaluated),
            "data": self.data, "environment": collect_environment(),
        }

    def restore(self, stored: Mapping[str, Any], records: Iterable[Record]) -> None:
        """Return to what a checkpoint stored (empty: to the start). Recoveries since then are kept.

        `records` are the evaluations up to it, read only if the checkpoint does not summarize them.
        """
        self.training, self.evaluating = stored.get("training", 0.0), stored.get("evaluating", 0.0)
        self.computing = list(stored.get("computing", ()))
        self.started = stored.get("started", self.started)
        self.recoveries = self.recoveries or [Recovery(**recovery) for recovery in stored.get("recoveries", [])]
        self.evaluated = Evaluated.restore(stored, records)
