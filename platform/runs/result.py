"""Define what a run returns and reports: its result, its callbacks and its summary."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from numpy.typing import NDArray

from dbo.platform.config.experiment import Experiment
from dbo.platform.runs.preparation import Prepared
from dbo.platform.runs.progress import Evaluated, RunProgress
from dbo.platform.runs.run_folder import build_history, read_metrics
from dbo.platform.runs.schema import Record, Summary
from dbo.version import find_version

if TYPE_CHECKING:
    import pandas as pd

Status = Literal["finished", "diverged", "failed"]

_BLOWN_UP = 1e6      # times the first upper loss: no run that learns gets there


@dataclass(frozen=True)
class Result:
    """A run that has ended."""

    experiment: Experiment
    status: Status
    folder: Path
    metrics: Path = field(repr=False)    # absolute: the working folder may change before `history` is read
    state: dict[str, NDArray[Any]]       # x, y (and z): (nodes, dim)
    summary: dict[str, Any]              # the content of summary.json
    is_new: bool = True                  # False: it had already finished, and nothing was run

    @cached_property
    def history(self) -> "pd.DataFrame":
        """The evaluations, a row each: read from metrics.jsonl once, at the latest when they are used."""
        return build_history(read_metrics(self.metrics))


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
    experiment: Experiment, prepared: Prepared, progress: RunProgress, status: Status, error: str | None,
    changes: Sequence[str] = (),
) -> Summary:
    """Summarize a run that has ended."""
    evaluated = progress.evaluated
    return Summary(
        status=status, error=error, name=experiment.name, run_key=experiment.run_key,
        algorithm=experiment.algorithm["name"], rounds=evaluated.last.get("round", 0),
        final=evaluated.last, targets=evaluated.targets,
        recoveries=[recovery.to_dict() for recovery in progress.recoveries],
        seconds={"training": progress.training, "evaluation": progress.evaluating},
        problem=prepared.problem.describe(),
        network={key: value for key, value in prepared.network.describe().items() if key != "edges"},
        started=progress.started, ended=datetime.now(UTC).isoformat(timespec="seconds"), version=find_version(),
        changes=list(changes), sealed=status != "failed",
    )


def describe_growth(evaluated: Evaluated) -> str | None:
    """Return a warning if the upper loss is finite but so large that the run has blown up."""
    first, last = evaluated.first_loss, evaluated.last_loss
    if first is None or last is None or not last > _BLOWN_UP * max(1.0, first):
        return None
    return f"upper_loss went from {first:.3g} to {last:.3g}: the run has blown up; try smaller steps"
