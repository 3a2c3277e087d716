"""Show the progress of runs in a terminal: a live bar on a screen, a line every few seconds elsewhere."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
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
from dbo.platform.config.redact import redact
from dbo.platform.config.terminal import escape_control
from dbo.platform.runs.runner import Result
from dbo.platform.runs.schema import Record

_LINE_EVERY = 5.0      # seconds between lines where there is no screen
_BARS = "▁▂▃▄▅▆▇█"
_CURVE_SIZE = 256      # values of a curve that are kept


class _Field(ProgressColumn):
    """A column that shows one of the task's fields; empty until the field has a value."""

    def __init__(self, name: str, style: str, min_width: int) -> None:
        super().__init__()
        self._name, self._style, self.min_width = name, style, min_width

    def render(self, task: Task) -> Text:
        return Text(str(task.fields.get(self._name, "")), style=self._style, no_wrap=True)


class _FittingProgress(Progress):
    """A progress bar that drops columns where the terminal is too narrow for all of them."""

    def __init__(
        self, console: Console, columns: Sequence[ProgressColumn], optional: Sequence[ProgressColumn], disable: bool
    ) -> None:
        # Not `self.console`: the base class makes a table before it has one.
        self._console, self._all_columns, self._optional = console, tuple(columns), tuple(optional)
        super().__init__(*columns, console=console, disable=disable)

    def make_tasks_table(self, tasks: Iterable[Task]) -> Table:
        visible = [task for task in tasks if task.visible]
        widths = {column: self._width(column, visible) for column in self._all_columns}
        columns = list(self._all_columns)
        for column in self._optional:
            if sum(widths[kept] for kept in columns) + len(columns) - 1 <= self._console.width:
                break
            columns.remove(column)
        self.columns = tuple(columns)
        return super().make_tasks_table(visible)

    def _width(self, column: ProgressColumn, tasks: Iterable[Task]) -> int:
        """Return the width of a column. A field has its full width from the start, so that no column vanishes later."""
        widths = [Measurement.get(self._console, self._console.options, column(task)).maximum for task in tasks]
        return max([column.min_width if isinstance(column, _Field) else 0, *widths])


class ProgressDisplay:
    """Callback that shows a bar per run: rounds, accuracy and consensus error as curves, MB sent, time left."""

    def __init__(
        self, console: Console, shows_end: bool = True, names: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`names` has a name for each of several runs, by run key; the others have the title of their experiment."""
        self.console, self._shows_end, self._names = console, shows_end, names
        self._live = console.is_terminal
        name, count = TextColumn("{task.description}", style="bold", markup=False), MofNCompleteColumn()
        bar, unit = BarColumn(bar_width=16), TextColumn("rounds", style="dim")
        score, curve = _Field("score", "green", 14), _Field("curve", "green", 10)
        consensus, traffic = _Field("consensus", "magenta", 26), _Field("traffic", "cyan", 8)
        remaining = TimeRemainingColumn(compact=True)
        self.progress = _FittingProgress(
            console, [name, bar, count, unit, score, curve, consensus, traffic, remaining],
            optional=[unit, bar, traffic, consensus, curve, remaining, count],      # in the order of dropping
            disable=not self._live,
        )
        self._task = TaskID(0)
        self._label, self._rounds, self._printed_at = "", 0, 0.0
        self._scores, self._consensus = Curve(), Curve()

    def __enter__(self) -> "ProgressDisplay":
        self.progress.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.progress.stop()

    def on_start(self, experiment: Experiment, done: int) -> None:
        name = self._names.get(experiment.run_key, experiment.title) if self._names else experiment.title
        self._label, self._rounds = escape_control(name), experiment.rounds
        self._printed_at = time.monotonic()
        self._scores, self._consensus = Curve(), Curve()
        self._task = self.progress.add_task(self._label, total=experiment.rounds, completed=done)
        if not self._live:
            text = f"{self._label}: {experiment.rounds} rounds, {experiment.nodes} nodes"
            self.console.print(text, highlight=False, markup=False)

    def on_evaluation(self, record: Record) -> None:
        accuracy = record.get("test_accuracy")
        self._scores.add(record["round"], record["upper_loss"] if accuracy is None else accuracy)
        self._consensus.add(record["round"], record["consensus_x"])
        self.progress.update(
            self._task, completed=record["round"], score=format_score(record, short=True),
            curve=sparkline(self._scores.values), traffic=f"{record['comm_mb']:.1f} MB",
            consensus=f"consensus {record['consensus_x']:.0e} {sparkline(self._consensus.values, log=True)}",
        )
        is_last = record["round"] == self._rounds
        if not self._live and (is_last or time.monotonic() - self._printed_at > _LINE_EVERY):
            self._printed_at = time.monotonic()
            self.console.print(
                f"{self._label}: round {record['round']}/{self._rounds}  {format_score(record)}"
                f"  {record['comm_mb']:.1f} MB  {record['seconds']:.1f} s", highlight=False, markup=False,
            )

    def on_notice(self, text: str) -> None:
        self.console.print(redact(escape_control(text)), style="yellow", highlight=False, markup=False)

    def on_end(self, result: Result) -> None:
        """Show why one of several runs diverged. A run that failed raises an error, which the command prints."""
        if result.status == "diverged" and self._shows_end:
            reason = escape_control(str(result.summary.get("error", "")))
            self.console.print(f"{self._label}: diverged ({reason})", style="red", highlight=False, markup=False)


class Curve:
    """A metric over a run in bounded memory: when it is full, every second value is dropped."""

    def __init__(self, size: int = _CURVE_SIZE) -> None:
        self._size, self._stride, self._count = size, 1, 0
        self._points: list[tuple[int, float]] = []
        self._newest: tuple[int, float] | None = None

    def add(self, round_: int, value: float) -> None:
        """Add an evaluation. After a rollback, the evaluation of an earlier round replaces what follows it."""
        while self._points and self._points[-1][0] >= round_:
            self._points.pop()
        self._newest = (round_, value)
        if self._count % self._stride == 0:
            self._points.append(self._newest)
            if len(self._points) > self._size:
                self._points, self._stride = self._points[::2], self._stride * 2
        self._count += 1

    @property
    def values(self) -> list[float]:
        """The values in the order of rounds, the newest always among them."""
        values = [value for _, value in self._points]
        if self._newest is not None and self._newest not in self._points[-1:]:
            values.append(self._newest[1])
        return values


def sparkline(values: Sequence[float], width: int = 10, *, log: bool = False) -> str:
    """Draw a curve in one line of text, scaled from the lowest to the highest value; `log` skips values ≤ 0."""
    kept = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    if not kept:
        return ""
    heights = [math.log10(v) for v in kept] if log else [float(v) for v in kept]
    if len(heights) > width:       # each character is the last value of its part of the run
        heights = [heights[(i + 1) * len(heights) // width - 1] for i in range(width)]
    low, high = min(heights), max(heights)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((h - low) * scale)] for h in heights)


def format_score(record: Record, *, short: bool = False) -> str:
    """Format the accuracy of the mean model and the mean over nodes; without an accuracy, the upper loss."""
    if record.get("test_accuracy") is None:
        return f"upper loss {record['upper_loss']:.4g}"
    if short:
        return f"accuracy {record['test_accuracy']:.3f}"
    return f"accuracy {record['test_accuracy']:.3f} (nodes {record['node_accuracy_mean']:.3f})"


def describe_end(result: Result) -> str:
    """Return one line about a run that has ended: rounds, score, traffic and time."""
    name, last = result.experiment.title, result.summary.get("final", {})
    if not last:
        return f"{name} {result.status}"
    return (f"{name} {result.status} after {last['round']} rounds: {format_score(last)}, {last['comm_mb']:.1f} MB, "
            f"{last['seconds']:.1f} s")
