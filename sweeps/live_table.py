"""How a sweep stands: who runs, who has ended and how, which is best, how long it will take; as one live table."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dbo.platform.config.redact import masked
from dbo.sweeps.grid import Cell
from dbo.sweeps.plan import Sweep

_ROWS = 12              # of the live table
_STYLES = {"running": "cyan", "finished": "green", "diverged": "yellow", "stopped": "dim", "failed": "red"}


@dataclass(slots=True)
class Standing:
    """One cell, as far as the driver knows."""

    label: str
    rounds: int
    status: str = "waiting"
    told: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    began: float = 0.0
    took: float = 0.0


class Board:
    """All cells that are to be run. A context: shows itself live in a terminal, and by lines elsewhere."""

    def __init__(
        self, sweep: Sweep, total: int, done: int, seconds: Callable[[], float | None], console: Console | None
    ) -> None:
        self.sweep, self.total, self.done = sweep, total, done
        self.cells: dict[str, Standing] = {}
        self.slots = 1
        self._seconds, self._console = seconds, console
        self._live: AbstractContextManager[Any] | None = None
        self._best: tuple[float, str] | None = None
        self._missing = ""

    def __enter__(self) -> "Board":
        if self._console is not None and self._console.is_terminal:
            self._live = Live(get_renderable=self.render, console=self._console, refresh_per_second=4, transient=True)
            self._live.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*exc)

    # ---- what happens ------------------------------------------------------------------------------------------------

    def started(self, name: str, cell: Cell) -> None:
        standing = self.cells.setdefault(name, Standing(cell.label, cell.experiment.rounds))
        standing.status, standing.began = "running", standing.began or time.monotonic()

    def told(self, name: str, result: Mapping[str, Any]) -> None:
        standing = self.cells[name]
        standing.told = result
        if not result.get("final"):
            return
        self.ended(name, str(result["status"]), str(result.get("error", "")))

    def ended(self, name: str, status: str, error: str = "") -> None:
        standing = self.cells[name]
        standing.status, standing.error = status, masked(error.partition("\n")[0])
        standing.took = time.monotonic() - standing.began
        self.seen(standing.label, standing.told.get(self.sweep.metric) if status in {"finished", "stopped"} else None)
        if self._console is not None and self._live is None:
            self._console.print(self._line(standing), highlight=False, markup=False, soft_wrap=True)

    def waits(self, missing: str) -> None:
        """Nobody is at work for want of this; "": somebody is. Where lines are shown, each reason is told once."""
        if missing and missing != self._missing and self._console is not None and self._live is None:
            self._console.print(f"waiting for room on the cluster: {missing}", highlight=False, markup=False,
                                soft_wrap=True)
        self._missing = missing

    def seen(self, label: str, value: Any) -> None:
        """A cell has ended with this value of the metric."""
        sign = 1 if self.sweep.best == "max" else -1
        if isinstance(value, float) and abs(value) < 1e29 and (
            self._best is None or sign * value > sign * self._best[0]
        ):
            self._best = value, label

    # ---- what is shown -----------------------------------------------------------------------------------------------

    def count(self, *statuses: str) -> int:
        return sum(standing.status in statuses for standing in self.cells.values())

    @property
    def left(self) -> float | None:
        """Seconds, from the cells that have ended here, else from the estimate."""
        took = [s.took for s in self.cells.values() if s.status in {"finished", "diverged"}]
        open_ = self.total - self.done - self.count("finished", "diverged", "stopped", "failed")
        if open_ <= 0:
            return 0.0
        each = sum(took) / len(took) if took else self._seconds()
        if each is None:
            return None
        gone = sum(
            min(each, time.monotonic() - s.began) for s in self.cells.values() if s.status == "running"
        )
        return max(0.0, (each * open_ - gone) / max(1, self.slots))

    def headline(self) -> str:
        ended = self.done + self.count("finished", "diverged", "stopped")
        parts = [f"{ended}/{self.total} done", f"{self.count('running')} running"]
        for status in ("diverged", "stopped", "failed"):
            if self.count(status):
                parts.append(f"{self.count(status)} {status}")
        if self._best is not None:
            parts.append(f"best {self.sweep.metric} {self._best[0]:.4g} ({self._best[1]})")
        if self._missing:
            return " · ".join([*parts, f"waiting for room on the cluster: {self._missing}"])
        if self.left is not None:
            parts.append(f"{duration(self.left)} left")
        return " · ".join(parts)

    def _line(self, standing: Standing) -> str:
        tail = f" ({standing.error})" if standing.error else ""
        return f"{standing.label}: {standing.status}{self._score(standing)}{tail}  [{self.headline()}]"

    def _score(self, standing: Standing) -> str:
        if standing.status in {"failed", "diverged"}:
            return ""
        value = standing.told.get(self.sweep.metric)
        return f"  {self.sweep.metric} {value:.4g}  {standing.told['comm_mb']:.1f} MB" if value is not None else ""

    def render(self) -> Group:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading in ("cell", "", "round", self.sweep.metric, "MB", "s"):
            table.add_column(heading, justify="left" if heading in {"cell", ""} else "right", no_wrap=True)
        for standing in self._shown():
            told = standing.told
            value = told.get(self.sweep.metric) if standing.status not in {"failed", "diverged"} else None
            table.add_row(
                standing.label, Text(standing.status, style=_STYLES.get(standing.status, "")),
                f"{told.get('round', 0)}/{standing.rounds}", "" if value is None else f"{value:.4f}",
                f"{told.get('comm_mb', 0.0):.1f}", f"{told.get('seconds', 0.0):.1f}",
            )
        failed = [s for s in self.cells.values() if s.status == "failed"][:3]
        errors = (Text(f"{s.label}: {s.error}", style="red", overflow="ellipsis", no_wrap=True) for s in failed)
        return Group(Text(self.headline(), style="bold"), table, *errors)

    def _shown(self) -> Sequence[Standing]:
        """Those that run, after the last ones that have ended."""
        running = [s for s in self.cells.values() if s.status == "running"]
        ended = [s for s in self.cells.values() if s.status not in {"running", "waiting"}]
        room = max(3, _ROWS - len(running))
        return [*sorted(ended, key=lambda s: s.began + s.took)[-room:], *running]


def duration(seconds: float) -> str:
    """2 h 5 min"""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
