"""Keep what a run knows about itself between rounds: clocks, evaluations, recoveries. Checkpoints store it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from dbo.platform.runs.provenance import collect_environment
from dbo.platform.runs.schema import Record, Recovery


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(slots=True)
class RunProgress:
    """The clocks in seconds, the evaluations so far, and the recoveries."""

    data: str | None                    # digest of the data
    training: float = 0.0
    evaluating: float = 0.0
    started: str = field(default_factory=_now)
    records: list[Record] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)

    def to_checkpoint(self, blocks: Sequence[Sequence[int]], digest: str) -> dict[str, Any]:
        """Return what a checkpoint stores; `digest` is that of the evaluations up to it."""
        return {
            "training": self.training, "evaluating": self.evaluating, "started": self.started,
            "recoveries": [recovery.to_dict() for recovery in self.recoveries],
            "blocks": [list(ids) for ids in blocks], "records": digest, "data": self.data,
            "environment": collect_environment(),
        }

    def restore(self, stored: Mapping[str, Any], records: list[Record]) -> None:
        """Return to what a checkpoint stored (empty: to the start). Recoveries since then are kept."""
        self.training, self.evaluating = stored.get("training", 0.0), stored.get("evaluating", 0.0)
        self.started = stored.get("started", self.started)
        self.recoveries = self.recoveries or [Recovery(**recovery) for recovery in stored.get("recoveries", [])]
        self.records = records
