"""A sweep from its file to its tables: plan, tell what is to come, run what is not there yet, sum up."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from dbo.platform.config.engines import LocalSettings
from dbo.platform.config.redact import masked_in
from dbo.platform.engine import ray_session
from dbo.platform.errors import InputError
from dbo.platform.runs.atomic_io import write_atomically
from dbo.platform.runs.run_folder import RunFolder
from dbo.sweeps import summaries
from dbo.sweeps.estimate import Estimate, estimate, recorded, volume
from dbo.sweeps.grid import Cell, Cells
from dbo.sweeps.live_table import Board, duration
from dbo.sweeps.plan import Sweep
from dbo.sweeps.tune_runner import Driver, SearchLog

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A sweep that has been run."""

    out: Path
    cells: pd.DataFrame
    summary: pd.DataFrame
    failed: list[tuple[str, str]]   # label and first error


@dataclass(slots=True)
class Folder:
    """Where a sweep's cells lie, with `group.json` for all who look at them later."""

    path: Path
    cells: Cells
    command: str
    _lock: RunFolder = field(init=False)

    def __post_init__(self) -> None:
        self._lock = RunFolder(self.path)

    def __enter__(self) -> "Folder":
        earlier = self.earlier()
        self._lock.acquire()
        self._write("running", earlier)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._lock.release()

    def earlier(self) -> dict[str, Any]:
        """What an earlier start of this sweep has left."""
        try:
            found = dict(json.loads((self.path / "group.json").read_bytes()))
        except FileNotFoundError:
            if RunFolder(self.path).holds_run():
                raise InputError(f"--out: {self.path} holds a run; choose another folder") from None
            return {}
        except (OSError, ValueError, TypeError):
            raise InputError(f"--out: {self.path}/group.json cannot be read; choose another folder") from None
        if found.get("key") != self.cells.key:
            raise InputError(f"--out: {self.path} holds another sweep; choose another folder")
        return found

    def end(self, status: str) -> None:
        self._write(status, self.earlier())

    def grown(self) -> None:
        """A search has drawn a further cell."""
        self._write("running", self.earlier())

    def _write(self, status: str, earlier: dict[str, Any]) -> None:
        sweep, base = self.cells.sweep, self.cells.base
        members = [*earlier.get("members", []), *(f"cells/{cell.name}" for cell in self.known())]
        axes = {
            key: axis if isinstance(axis, list) else sorted({cell.values[key] for cell in self.known()})
            for key, axis in sweep.ranges.items()
        }
        write_atomically(self.path / "group.json", json.dumps(masked_in({
            "kind": "sweep", "name": sweep.name, "key": self.cells.key, "command": self.command,
            "started": earlier.get("started") or datetime.now(UTC).isoformat(timespec="seconds"),
            "status": status, "target": str(sweep.level), "members": list(dict.fromkeys(members)), "axes": axes,
            "mode": sweep.mode, "metric": sweep.metric, "goal": sweep.best, "claim": sweep.claim,
        }) | {"tracking": base.tracking.model_dump()}, indent=2) + "\n")

    def known(self) -> list[Cell]:
        """All cells there are so far; a search's are those that it has drawn."""
        if self.cells.sweep.mode != "tpe":
            return self.cells.fixed
        return SearchLog(self.path / "search.jsonl", self.cells).cells


def connect(cells: Cells) -> None:
    """To the cluster that the sweep is to use, or to one of its own."""
    ray_session.connect(cells.base.engine.get("address"))


def slots(cells: Cells) -> int | None:
    """How many cells run at a time on this machine, where there is no cluster."""
    if cells.base.engine.get("address") or os.environ.get("RAY_ADDRESS"):
        return None
    engine = cells.base.parts.engine
    return max(1, (os.cpu_count() or 1) // engine.threads) if isinstance(engine, LocalSettings) else 1


def default_folder(cells: Cells) -> Path:
    return Path("runs") / f"sweep-{cells.sweep.name}-{cells.key[:8]}"


class Forecast:
    """What is done, and what the rest will take."""

    def __init__(self, folder: Folder, console: Console | None) -> None:
        cells, out = folder.cells, folder.path
        self.cells = folder.known()
        self.total = cells.sweep.trials or 0 if cells.sweep.mode == "tpe" else len(self.cells)
        self.done = [cell for cell in self.cells if cell.ended(out) is not None]
        self.todo = [cell for cell in self.cells if cell.ended(out) is None]
        wanted = self.todo or ([cells.base_cell] if len(self.done) < self.total else [])
        self._each: dict[str, Estimate] = {}
        if console is not None:
            with console.status("trying a round of some cells"):
                self._each = estimate(wanted)
        took = [recorded(summary) for cell in self.done if (summary := summaries.summary_of(cell.folder(out)))]
        self.measured = sum(took) / len(took) if took else None

    @property
    def left(self) -> int:
        return self.total - len(self.done)

    def seconds(self) -> float | None:
        """Of one cell: as those that are done, else as tried."""
        tried = [each.seconds for each in self._each.values()]
        return self.measured or (sum(tried) / len(tried) if tried else None)

    def text(self, slots: int | None) -> str:
        """For so many cells at a time; None: nobody knows how many, as on a cluster that is not asked yet."""
        done = f", {len(self.done)} of them done already" if self.done else ""
        head = f"{self.total} cells{done}"
        if not self.left or not self._each:
            return head
        seconds = (self.seconds() or 0.0) * self.left
        bytes_ = sum(each.bytes_links for each in self._each.values()) / len(self._each) * self.left
        where = "of one core" if slots is None else f"with {slots} at a time"
        return f"{head}; about {duration(seconds / min(slots or 1, self.left))} {where}, {volume(bytes_)} between nodes"


def run(folder: Folder, forecast: Forecast, console: Console | None) -> Outcome:
    """Runs what is not there yet and writes the tables; the folder is held, and says how it ended before this returns:
    those who follow it are told to stop right after."""
    try:
        outcome = _run(folder, forecast, console)
    except Exception:                   # an interrupted sweep has no end: it is gone on with
        folder.end("failed")
        raise
    folder.end("failed" if outcome.failed else "finished")
    return outcome


def _run(folder: Folder, forecast: Forecast, console: Console | None) -> Outcome:
    cells, out = folder.cells, folder.path
    errors: dict[str, str] = {}
    if forecast.left > 0:
        board = Board(cells.sweep, forecast.total, len(forecast.done), forecast.seconds, console)
        for cell in forecast.done:
            board.seen(cell.label, (summaries.summary_of(cell.folder(out)).get("final") or {}).get(cells.sweep.metric))
        driver = Driver(cells, out, board, folder.grown)
        with board:
            driver.run(forecast.todo)
        errors = {name: s.error for name, s in board.cells.items() if s.status == "failed"}
    everything = folder.known()
    table = summaries.cell_table(everything, out, cells.sweep.level, errors)
    seeds = summaries.seed_table(table, list(cells.sweep.axes))
    summaries.write(table, seeds, out)
    failed = [(cell.label, errors[cell.name]) for cell in everything if cell.name in errors]
    return Outcome(out, table, seeds, failed)


def plan(sweep: Sweep) -> Cells:
    """Checks every cell."""
    cells = Cells(sweep)
    _ = cells.fixed
    return cells
