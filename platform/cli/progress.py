"""How a run looks in a terminal: a live bar where there is a screen, a line now and then where there is none."""

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from dbo.platform.config.experiment import Experiment
from dbo.platform.config.redact import masked
from dbo.platform.runs.run_folder import Record
from dbo.platform.runs.runner import Result

_LINE_EVERY = 5.0      # seconds between lines where there is no screen
_BARS = "▁▂▃▄▅▆▇█"
_KEPT = 256            # values of a curve that are remembered


class _Field(ProgressColumn):
    """A column that shows one of the task's fields, empty until it has a value."""

    def __init__(self, name: str, style: str, reserved: int) -> None:
        super().__init__()
        self._name, self._style, self.reserved = name, style, reserved

    def render(self, task: Task) -> Text:
        return Text(str(task.fields.get(self._name, "")), style=self._style, no_wrap=True)


class _Fitting(Progress):
    """A bar that leaves out columns where the terminal is too narrow for all of them."""

    def __init__(
        self, console: Console, columns: Sequence[ProgressColumn], dispensable: Sequence[ProgressColumn], **more: Any
    ) -> None:
        self._screen, self._every, self._dispensable = console, tuple(columns), tuple(dispensable)
        super().__init__(*columns, console=console, **more)

    def make_tasks_table(self, tasks: Iterable[Task]) -> Table:
        shown = [task for task in tasks if task.visible]
        widths = {column: self._width(column, shown) for column in self._every}
        left = list(self._every)
        for column in self._dispensable:
            if sum(widths[c] for c in left) + len(left) - 1 <= self._screen.width:
                break
            left.remove(column)
        self.columns = tuple(left)
        return super().make_tasks_table(shown)

    def _width(self, column: ProgressColumn, tasks: Iterable[Task]) -> int:
        """What a column takes; a field its room from the start, so that columns do not go while one looks at them."""
        shown = [Measurement.get(self._screen, self._screen.options, column(task)).maximum for task in tasks]
        return max([column.reserved if isinstance(column, _Field) else 0, *shown])


class Bars:
    """One bar per run: rounds, accuracy and disagreement of the nodes as curves, megabytes on all links, time left."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = console.is_terminal
        name, count = TextColumn("{task.description}", style="bold"), MofNCompleteColumn()
        bar, unit = BarColumn(bar_width=16), TextColumn("rounds", style="dim")
        score, curve = _Field("score", "green", 14), _Field("curve", "green", 10)
        apart, traffic = _Field("apart", "magenta", 22), _Field("traffic", "cyan", 8)
        left = TimeRemainingColumn(compact=True)
        self._progress = _Fitting(
            console, [name, bar, count, unit, score, curve, apart, traffic, left],
            dispensable=[unit, bar, traffic, apart, curve, left, count],      # the first goes first
            disable=not self._live,
        )
        self._task: TaskID = TaskID(0)
        self._label, self._rounds, self._said = "", 0, 0.0
        self._scores, self._distances = Curve(), Curve()

    def __enter__(self) -> "Bars":
        self._progress.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._progress.stop()

    def started(self, experiment: Experiment, done: int) -> None:
        self._label, self._rounds = experiment.algorithm["name"], experiment.rounds
        self._said = time.monotonic()
        self._scores, self._distances = Curve(), Curve()
        self._task = self._progress.add_task(self._label, total=experiment.rounds, completed=done)
        if not self._live:
            self.console.print(f"{self._label}: {experiment.rounds} rounds, {experiment.nodes} nodes", highlight=False)

    def evaluated(self, record: Record) -> None:
        accuracy = record.get("test_accuracy")
        self._scores.add(record["round"], record["upper_loss"] if accuracy is None else accuracy)
        self._distances.add(record["round"], record["consensus_x"])
        self._progress.update(
            self._task, completed=record["round"], score=score(record, short=True),
            curve=sparkline(self._scores.values), traffic=f"{record['comm_mb']:.1f} MB",
            apart=f"apart {record['consensus_x']:.0e} {sparkline(self._distances.values, log=True)}",
        )
        last = record["round"] == self._rounds
        if not self._live and (last or time.monotonic() - self._said > _LINE_EVERY):
            self._said = time.monotonic()
            self.console.print(
                f"{self._label}: round {record['round']}/{self._rounds}  {score(record)}  {record['comm_mb']:.1f} MB"
                f"  {record['seconds']:.1f} s", highlight=False,
            )

    def noted(self, text: str) -> None:
        self.console.print(masked(text), style="yellow", highlight=False, markup=False)

    def ended(self, result: Result) -> None:
        if result.status != "finished":
            reason = result.summary.get("error", "")
            self.console.print(f"{self._label}: {result.status} ({reason})", style="red", highlight=False, markup=False)


class Curve:
    """A metric over a run in bounded memory: when it is full, every second value goes."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept, self._stride, self._seen = kept, 1, 0
        self._points: list[tuple[int, float]] = []
        self._newest: tuple[int, float] | None = None

    def add(self, round_: int, value: float) -> None:
        """A further evaluation; after a roll-back, an earlier one again."""
        while self._points and self._points[-1][0] >= round_:
            self._points.pop()
        self._newest = (round_, value)
        if self._seen % self._stride == 0:
            self._points.append(self._newest)
            if len(self._points) > self._kept:
                self._points, self._stride = self._points[::2], self._stride * 2
        self._seen += 1

    @property
    def values(self) -> list[float]:
        """In the order of rounds, the newest always among them."""
        values = [value for _, value in self._points]
        if self._newest is not None and self._newest not in self._points[-1:]:
            values.append(self._newest[1])
        return values


def sparkline(values: Sequence[float], width: int = 10, *, log: bool = False) -> str:
    """A curve in one line of text, lowest to highest value; logarithmic, zeros and less are left out."""
    kept = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    if not kept:
        return ""
    heights = [math.log10(v) for v in kept] if log else [float(v) for v in kept]
    if len(heights) > width:       # each character is the last value of its part of the run
        heights = [heights[(i + 1) * len(heights) // width - 1] for i in range(width)]
    low, high = min(heights), max(heights)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((h - low) * scale)] for h in heights)


def score(record: Record, *, short: bool = False) -> str:
    """The one figure worth showing: accuracy of the mean model and of the nodes, else the upper loss."""
    if record.get("test_accuracy") is None:
        return f"upper loss {record['upper_loss']:.4g}"
    if short:
        return f"accuracy {record['test_accuracy']:.3f}"
    return f"accuracy {record['test_accuracy']:.3f} (nodes {record['node_accuracy_mean']:.3f})"
