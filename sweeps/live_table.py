"""Show the progress of a sweep, as a live table or as lines: running and ended cells, the best one, the time left."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dbo.platform.config.redact import redact
from dbo.sweeps.grid import SweepCell
from dbo.sweeps.plan import Sweep

_MAX_ROWS = 12          # of the live table
_STYLES = {"running": "cyan", "finished": "green", "diverged": "yellow", "stopped": "dim", "failed": "red"}


@dataclass(slots=True)
class CellStatus:
    """What the driver knows of one cell."""

    label: str
    rounds: int
    status: str = "waiting"
    latest: Mapping[str, Any] = field(default_factory=dict)      # the last report of its worker
    error: str = ""
    started: float = 0.0
    seconds: float = 0.0


class LiveTable:
    """Progress of all cells that are to run. Use as a context: a live table in a terminal, lines elsewhere."""

    def __init__(
        self, sweep: Sweep, total: int, done: int, cell_seconds: Callable[[], float | None], console: Console | None
    ) -> None:
        self.sweep, self.total, self.done = sweep, total, done
        self.cells: dict[str, CellStatus] = {}
        self.slots = 1          # cells that run at the same time
        self._cell_seconds, self._console = cell_seconds, console
        self._live: Live | None = None
        self._best: tuple[float, str] | None = None
        self._missing = ""

    def __enter__(self) -> "LiveTable":
        if self._console is not None and self._console.is_terminal:
            self._live = Live(get_renderable=self.render, console=self._console, refresh_per_second=4, transient=True)
            self._live.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*exc)

    # ---- events ------------------------------------------------------------------------------------------------------

    def mark_running(self, name: str, cell: SweepCell) -> None:
        status = self.cells.setdefault(name, CellStatus(cell.label, cell.experiment.rounds))
        status.status, status.started = "running", status.started or time.monotonic()

    def update(self, name: str, report: Mapping[str, Any]) -> None:
        """Take the report of a worker; the final one ends the cell."""
        self.cells[name].latest = report
        if report.get("final"):
            self.mark_ended(name, str(report["status"]), str(report.get("error", "")))

    def mark_ended(self, name: str, status: str, error: str = "") -> None:
        cell = self.cells[name]
        cell.status, cell.error = status, redact(error.partition("\n")[0])
        cell.seconds = time.monotonic() - cell.started
        self.update_best(cell.label, cell.latest.get(self.sweep.metric) if status in {"finished", "stopped"} else None)
        self._print(self._format_line(cell))

    def set_missing_resources(self, missing: str) -> None:
        """Set what keeps all cells from running; "": a cell is running. As a line, each reason appears once."""
        if missing and missing != self._missing:
            self._print(f"no cell is running yet: workers are starting, or others use the cluster; {missing}")
        self._missing = missing

    def update_best(self, label: str, value: Any) -> None:
        """Compare the metric of an ended cell with the best one so far."""
        sign = 1 if self.sweep.direction == "max" else -1
        if isinstance(value, float) and abs(value) < 1e29 and (
            self._best is None or sign * value > sign * self._best[0]
        ):
            self._best = value, label

    def _print(self, text: str) -> None:
        if self._console is not None and self._live is None:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    # ---- output ------------------------------------------------------------------------------------------------------

    def count(self, *statuses: str) -> int:
        return sum(cell.status in statuses for cell in self.cells.values())

    @property
    def seconds_left(self) -> float | None:
        """Time to the end, from the cells that have ended, or before that from the estimate."""
        ended = [cell.seconds for cell in self.cells.values() if cell.status in {"finished", "diverged"}]
        open_ = self.total - self.done - self.count("finished", "diverged", "stopped", "failed")
        if open_ <= 0:
            return 0.0
        each = sum(ended) / len(ended) if ended else self._cell_seconds()
        if each is None:
            return None
        elapsed = sum(
            min(each, time.monotonic() - cell.started) for cell in self.cells.values() if cell.status == "running"
        )
        return max(0.0, (each * open_ - elapsed) / max(1, self.slots))

    def headline(self) -> str:
        ended = self.done + self.count("finished", "diverged", "stopped")
        parts = [f"{ended}/{self.total} done", f"{self.count('running')} running"]
        for status in ("diverged", "stopped", "failed"):
            if self.count(status):
                parts.append(f"{self.count(status)} {status}")
        if self._best is not None:
            parts.append(f"best {self.sweep.metric} {self._best[0]:.4g} ({self._best[1]})")
        if self._missing:
            return " · ".join([*parts, f"waiting for workers or for the cluster; {self._missing}"])
        if self.seconds_left is not None:
            parts.append(f"{format_duration(self.seconds_left)} left")
        return " · ".join(parts)

    def _format_line(self, cell: CellStatus) -> str:
        error = f" ({cell.error})" if cell.error else ""
        value = cell.latest.get(self.sweep.metric) if cell.status not in {"failed", "diverged"} else None
        score = f"  {self.sweep.metric} {value:.4g}  {cell.latest['comm_mb']:.1f} MB" if value is not None else ""
        return f"{cell.label}: {cell.status}{score}{error}  [{self.headline()}]"

    def render(self) -> Group:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading in ("cell", "", "round", self.sweep.metric, "MB", "s"):
            table.add_column(heading, justify="left" if heading in {"cell", ""} else "right", no_wrap=True)
        for cell in self._visible_cells():
            latest = cell.latest
            value = latest.get(self.sweep.metric) if cell.status not in {"failed", "diverged"} else None
            table.add_row(
                cell.label, Text(cell.status, style=_STYLES.get(cell.status, "")),
                f"{latest.get('round', 0)}/{cell.rounds}", "" if value is None else f"{value:.4f}",
                f"{latest.get('comm_mb', 0.0):.1f}", f"{latest.get('seconds', 0.0):.1f}",
            )
        failed = [cell for cell in self.cells.values() if cell.status == "failed"][:3]
        errors = (
            Text(f"{cell.label}: {cell.error}", style="red", overflow="ellipsis", no_wrap=True) for cell in failed
        )
        return Group(Text(self.headline(), style="bold"), table, *errors)

    def _visible_cells(self) -> Sequence[CellStatus]:
        """Return the running cells, after as many of those that ended last as fit."""
        running = [cell for cell in self.cells.values() if cell.status == "running"]
        ended = [cell for cell in self.cells.values() if cell.status not in {"running", "waiting"}]
        rows = max(3, _MAX_ROWS - len(running))
        return [*sorted(ended, key=lambda cell: cell.started + cell.seconds)[-rows:], *running]


def format_duration(seconds: float) -> str:
    """Return a text such as `2 h 5 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
