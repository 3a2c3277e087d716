"""Define what a run returns and reports: its result, its callbacks and its summary."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError, RunError
from dbo.platform.runs.atomic_io import write_atomically
from dbo.platform.runs.preparation import Prepared
from dbo.platform.runs.progress import Evaluated, RunProgress
from dbo.platform.runs.run_folder import build_history, read_metrics
from dbo.platform.runs.safetensors_io import serialize
from dbo.platform.runs.schema import Record, Summary
from dbo.version import find_version

if TYPE_CHECKING:
    import pandas as pd

Status = Literal["finished", "diverged", "failed"]

_BLOWN_UP = 1e6      # times the first upper loss: no run that learns gets there


@dataclass(frozen=True, repr=False)
class Result:
    """A run that has ended."""

    experiment: Experiment
    status: Status
    folder: Path
    metrics: Path                        # absolute: the working folder may change before `history` is read
    state: dict[str, NDArray[Any]]       # x, y (and z): (nodes, dim); a single machine and a server have one row
    summary: dict[str, Any]              # the content of summary.json
    is_new: bool = True                  # False: it had already finished, and nothing was run

    @cached_property
    def history(self) -> "pd.DataFrame":
        """The evaluations, a row each: read from metrics.jsonl once, at the latest when they are used."""
        return build_history(read_metrics(self.metrics))

    def __repr__(self) -> str:
        """Return one line: how the run ended, and where it is. Arrays and the summary are attributes."""
        last = self.summary.get("final", {})
        score = "test_accuracy" if last.get("test_accuracy") is not None else "upper_loss"
        shown = [f"{key}={last[key]:.6g}" for key in ("round", score, "comm_mb") if last.get(key) is not None]
        return f"<Result {self.experiment.title} {' '.join([self.status, *shown])} folder={str(self.folder)!r}>"

    def _repr_html_(self) -> str:
        """Return the result as a notebook shows it: how it ended, the last evaluation, the folder."""
        shown = {key: value for key, value in self.summary.get("final", {}).items()
                 if isinstance(value, int | float) and key not in ("timestamp", "bytes_links", "bytes_broadcast")}
        rows = "".join(
            f"<tr><td>{escape(key)}</td><td>{f'{value:.6g}' if isinstance(value, float) else value}</td></tr>"
            for key, value in shown.items())
        error = self.summary.get("error")
        return (
            f"<b>{escape(self.experiment.algorithm['name'])} {escape(self.status)}</b>"
            f"{f' <small>{escape(str(error))}</small>' if error else ''}"
            f"<table>{rows}</table><small>{escape(str(self.folder))}</small>")

    @cached_property
    def model(self) -> "Model":
        """The mean over the nodes of the final x and y, as the user's own trees or modules."""
        return self.node_model(None)

    def node_model(self, node: int | None) -> "Model":
        """Return the final model of one node; None: the mean over the nodes."""
        if not self.state:
            raise RunError(f"{self.folder}: the run has {self.status}; only a finished one has a model")
        x, y = (
            rows.mean(axis=0, dtype=np.float64).astype(rows.dtype) if node is None else rows[node]
            for rows in (self.state["x"], self.state["y"])
        )
        return Model(*self.experiment.parts.task.build_model(self.experiment.seed, x, y), x, y)


@dataclass(frozen=True, slots=True)
class Model:
    """A pair (x, y) in the structure of its task, and as rows."""

    x: Any
    y: Any
    x_row: NDArray[Any] = field(repr=False)
    y_row: NDArray[Any] = field(repr=False)

    def state_dict(self) -> dict[str, Any]:
        """Return every tensor by its path, `x.…` and `y.…`, as `torch.nn.Module.state_dict` does."""
        return {**_name_parts(self.x, "x"), **_name_parts(self.y, "y")}

    def save(self, file: str | Path) -> None:
        """Write a file that an experiment can name as its `start`."""
        write_atomically(Path(file), serialize({"x": self.x_row, "y": self.y_row}), "the model")


def save_start(start: Any, folder: Path = Path("runs", "starts")) -> str:
    """Write a model of Python as a file that an experiment can name as its `start`, and return the file.

    The model is that of a result, a `state_dict` with the names x.… and y.…, or a pair (x, y) of trees or modules. The
    name of the file is the hash of its content, so that a run with the same start has the same key.
    """
    if isinstance(start, Result):
        start = start.model
    if isinstance(start, Model):
        found: dict[str, Any] = {"x": start.x_row, "y": start.y_row}
    elif isinstance(start, Mapping):
        found = {str(name): value for name, value in start.items()}
    elif isinstance(start, tuple | list) and len(start) == 2:
        found = {**_name_parts(start[0], "x"), **_name_parts(start[1], "y")}
    else:
        raise InputError(
            f"start: a {type(start).__name__} is not allowed; must be a file, a result's model, a state_dict with x.… "
            f"and y.…, or a pair (x, y)")
    pieces = list(serialize({name: _to_array(value, name) for name, value in found.items()}))
    digest = hashlib.sha256(b"".join(pieces)).hexdigest()[:16]
    file = folder / f"{digest}.safetensors"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, pieces, "the start")
    return str(file)


def _to_array(value: Any, name: str) -> NDArray[Any]:
    """Return a tensor or an array as an array of numbers; floating tensors in float64, which has all other floats."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.double() if value.is_floating_point() else value).numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise InputError(f"start: {name} is a {type(value).__name__}; must be a tensor or an array of numbers")
    return array


def _name_parts(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, dict):
        items = ((str(key), inner) for key, inner in value.items())
    elif isinstance(value, list | tuple):
        items = ((str(number), inner) for number, inner in enumerate(value))
    elif hasattr(value, "state_dict"):
        items = iter(value.state_dict().items())
    else:
        return {path: value}
    return {key: part for name, inner in items for key, part in _name_parts(inner, f"{path}.{name}").items()}


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
    changes: Sequence[str] = (), ended_by: str = "",
) -> Summary:
    """Summarize a run that has ended."""
    evaluated = progress.evaluated
    return Summary(
        status=status, error=error, name=experiment.name, run_key=experiment.run_key,
        algorithm=experiment.algorithm["name"], rounds=evaluated.last.get("round", 0),
        ended_by=ended_by or None,
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
