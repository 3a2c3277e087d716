"""Define what a run returns and reports: its result, its callbacks and its summary."""

from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from numpy.typing import NDArray

from dbo.platform.config.experiment import Experiment
from dbo.platform.runs.preparation import Prepared
from dbo.platform.runs.progress import RunProgress
from dbo.platform.runs.schema import Record, Summary, Target

if TYPE_CHECKING:
    import pandas as pd

Status = Literal["finished", "diverged", "failed"]

_BLOWN_UP = 1e6      # times the first upper loss: no run that learns gets there
# summary.json has the cost of these; that of other targets can be read off metrics.jsonl at any time.
_TARGETS = tuple(
    Target(metric, level)
    for metric in ("test_accuracy", "node_accuracy_mean")
    for level in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
)


@dataclass(frozen=True, slots=True)
class Result:
    """A run that has ended."""

    experiment: Experiment
    status: Status
    folder: Path
    history: "pd.DataFrame"              # a row per evaluation
    state: dict[str, NDArray[Any]]       # x, y (and z): (nodes, dim)
    summary: dict[str, Any]              # the content of summary.json


class RunCallback(Protocol):
    """Observe a run; a progress bar is one."""

    def on_start(self, experiment: Experiment, done: int) -> None: ...
    def on_evaluation(self, record: Record) -> None: ...
    def on_notice(self, text: str) -> None: ...
    def on_end(self, result: Result) -> None: ...


class NoCallback:
    """Observe nothing."""

    def on_start(self, experiment: Experiment, done: int) -> None: ...
    def on_evaluation(self, record: Record) -> None: ...
    def on_notice(self, text: str) -> None: ...
    def on_end(self, result: Result) -> None: ...


def build_summary(
    experiment: Experiment, prepared: Prepared, progress: RunProgress, status: Status, error: str | None
) -> Summary:
    """Summarize a run that has ended."""
    records = progress.records
    return Summary(
        status=status, error=error, name=experiment.name, run_key=experiment.run_key,
        algorithm=experiment.algorithm["name"], rounds=records[-1]["round"] if records else 0,
        final=records[-1] if records else {},
        targets={str(target): target.find_cost(records) for target in _TARGETS},
        recoveries=[recovery.to_dict() for recovery in progress.recoveries],
        seconds={"training": progress.training, "evaluation": progress.evaluating},
        problem=prepared.problem.describe(),
        network={key: value for key, value in prepared.network.describe().items() if key != "edges"},
        started=progress.started, ended=datetime.now(UTC).isoformat(timespec="seconds"), version=version("dbo"),
    )


def describe_growth(records: list[Record]) -> str | None:
    """Return a warning if the upper loss is finite but so large that the run has blown up."""
    losses = [record["upper_loss"] for record in records if record.get("upper_loss") is not None]
    if not losses or not losses[-1] > _BLOWN_UP * max(1.0, losses[0]):
        return None
    return f"upper_loss went from {losses[0]:.3g} to {losses[-1]:.3g}: the run has blown up; try smaller steps"
