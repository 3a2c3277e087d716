"""Run a sweep: build its cells, estimate them, run those that are not complete, and write the tables."""

import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from dbo.platform.config.engine_choice import RAY_START_SECONDS
from dbo.platform.config.engines import LocalSettings
from dbo.platform.engine import ray_session
from dbo.platform.engine.factory import check_request
from dbo.platform.errors import InputError
from dbo.platform.runs.disk_size import LARGE, format_bytes
from dbo.platform.runs.resume import check_environments
from dbo.platform.runs.run_folder import GROUP_FILE, RunFolder, has_group, read_group, write_group
from dbo.platform.runs.schema import Group
from dbo.sweeps import summaries
from dbo.sweeps.estimate import CellEstimate, estimate_cells, read_seconds
from dbo.sweeps.grid import Grid, SweepCell
from dbo.sweeps.live_table import LiveTable, format_duration
from dbo.sweeps.pairs import build_pair_table
from dbo.sweeps.plan import Sweep
from dbo.sweeps.search_log import SearchLog
from dbo.sweeps.tune_runner import TuneRunner


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The tables of a sweep that has ended."""

    out: Path
    cells: pd.DataFrame
    summary: pd.DataFrame
    pairs: pd.DataFrame             # empty: there are no two seeds
    failed: list[tuple[str, str]]   # label and error of each failed cell


@dataclass(slots=True)
class SweepFolder:
    """The folder of a sweep: its cells, and `group.json` for readers. Use as a context: locked by one process."""

    path: Path
    grid: Grid
    command: str
    changes: tuple[str, ...] = ()           # environment_changed: complete cells of another one are kept
    _lock: RunFolder = field(init=False)

    def __post_init__(self) -> None:
        self._lock = RunFolder(self.path)

    def __enter__(self) -> "SweepFolder":
        existing = self.read_group()
        self._lock.acquire()
        self._write_group("running", existing)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._lock.release()

    def read_group(self) -> Group | None:
        """Return what a previous start of this sweep has written, if any; refuse the folder of anything else."""
        if not has_group(self.path):
            if RunFolder(self.path).has_run():
                raise InputError(f"--out: {self.path} holds a run; choose another folder")
            return None
        try:
            group = read_group(self.path)
        except InputError:
            raise InputError(f"--out: {self.path / GROUP_FILE} cannot be read; choose another folder") from None
        if group.kind != "sweep":
            raise InputError(f"--out: {self.path} holds a comparison; choose another folder")
        if group.key != self.grid.key:
            raise InputError(f"--out: {self.path} holds another sweep; choose another folder")
        return group

    def write_status(self, status: str) -> None:
        """Write `group.json` with this status and all cells that are known by now."""
        self._write_group(status, self.read_group())

    def _write_group(self, status: str, existing: Group | None) -> None:
        sweep, cells = self.grid.sweep, self.list_cells()
        members = [*(existing.members if existing else ()), *(f"cells/{cell.name}" for cell in cells)]
        started = existing.started if existing else ""
        axes = {
            key: axis if isinstance(axis, list) else sorted({cell.values[key] for cell in cells})
            for key, axis in sweep.parsed_axes.items()
        }
        write_group(self.path, Group(
            kind="sweep", name=sweep.name, key=self.grid.key, command=self.command, status=status,
            started=started or datetime.now(UTC).isoformat(timespec="seconds"), target=str(sweep.parsed_target),
            members=tuple(dict.fromkeys(members)), axes=axes, mode=sweep.mode, metric=sweep.metric,
            goal=sweep.direction, claim=sweep.claim, tracking=self.grid.base.tracking.model_dump(),
            changes=tuple(dict.fromkeys([*(existing.changes if existing else ()), *self.changes])),
        ))

    def list_cells(self) -> list[SweepCell]:
        """Return all cells that are known by now: of a TPE search, those that it has sampled."""
        if self.grid.sweep.mode != "tpe":
            return self.grid.cells
        return SearchLog(self.path / "search.jsonl", self.grid).cells


def build_grid(sweep: Sweep) -> Grid:
    """Build and validate every cell."""
    grid = Grid(sweep)
    for cell in grid.cells:
        check_request(cell.experiment.parts.engine, cell.experiment.nodes)
    return grid


def connect_cluster(grid: Grid) -> None:
    """Connect to the cluster of the base experiment, or start one on this machine."""
    ray_session.connect(grid.base.engine.get("address"))


def count_local_slots(grid: Grid) -> int | None:
    """Return how many cells run at a time on this machine; None: the sweep runs on a cluster."""
    if grid.base.engine.get("address") or os.environ.get("RAY_ADDRESS"):
        return None
    engine = grid.base.parts.engine
    return max(1, (os.cpu_count() or 1) // engine.threads) if isinstance(engine, LocalSettings) else 1


def default_sweep_folder(grid: Grid) -> Path:
    return Path("runs") / f"sweep-{grid.sweep.name}-{grid.key[:8]}"


def check_cells(folder: SweepFolder, progress: "SweepProgress", allow_changed_code: bool) -> None:
    """Refuse complete cells of another environment while others are left to run, or record that they are kept."""
    ended = (RunFolder(cell.folder(folder.path)) for cell in progress.done)
    folder.changes = check_environments(ended, allow_changed_code)


class SweepProgress:
    """Which cells of a sweep are complete, and an estimate of the others (none without a console)."""

    def __init__(self, folder: SweepFolder, console: Console | None) -> None:
        grid, out = folder.grid, folder.path
        self.cells = folder.list_cells()
        self.total = grid.sweep.trials or 0 if grid.sweep.mode == "tpe" else len(self.cells)
        self.summaries = {cell.name: found for cell in self.cells if (found := cell.read_summary(out)) is not None}
        self.done = [cell for cell in self.cells if cell.name in self.summaries]
        self.todo = [cell for cell in self.cells if cell.name not in self.summaries]
        unknown = self.todo or ([grid.base_cell] if len(self.done) < self.total else [])
        self._estimates: dict[str, CellEstimate] = {}
        if console is not None:
            with console.status("measuring a round of some cells"):
                self._estimates = estimate_cells(unknown)
        recorded = [read_seconds(summary) for summary in self.summaries.values()]
        self._recorded = sum(recorded) / len(recorded) if recorded else None

    @property
    def left(self) -> int:
        return self.total - len(self.done)

    def cell_seconds(self) -> float | None:
        """Return the mean time of a cell: of those that are complete, else of the estimates."""
        estimated = [each.seconds for each in self._estimates.values()]
        return self._recorded or (sum(estimated) / len(estimated) if estimated else None)

    def format(self, slots: int | None) -> str:
        """Describe the work in one line, for so many cells at a time; None: not known, as on a cluster."""
        done = f", {len(self.done)} already done" if self.done else ""
        head = f"{self.total} cells{done}"
        if not self.left or not self._estimates:
            return head
        seconds = (self.cell_seconds() or 0.0) * self.left
        share = self.left / len(self._estimates)
        links = share * sum(each.bytes_links for each in self._estimates.values())
        disk = share * sum(each.bytes_disk for each in self._estimates.values())
        where = "on one core" if slots is None else f"with {slots} at a time"
        start = 0.0 if slots is None else RAY_START_SECONDS       # a cluster has started already
        duration = format_duration(start + seconds / min(slots or 1, self.left))
        on_disk = f", {format_bytes(disk)} on the disk" if disk >= LARGE else ""
        return f"{head}; about {duration} {where}, {format_bytes(links)} between nodes{on_disk}"


def run_sweep(folder: SweepFolder, progress: SweepProgress, console: Console | None) -> SweepResult:
    """Run the cells that are not complete and write the tables. The folder must be locked.

    The status is written before this returns: readers of the folder (MLflow) are stopped right after.
    """
    try:
        result = _run_cells(folder, progress, console)
    except Exception:                   # an interrupted sweep keeps the status "running": it can be resumed
        folder.write_status("failed")
        raise
    folder.write_status("failed" if result.failed else "finished")
    return result


def _run_cells(folder: SweepFolder, progress: SweepProgress, console: Console | None) -> SweepResult:
    grid, out = folder.grid, folder.path
    errors: dict[str, str] = {}
    if progress.left > 0:
        table = LiveTable(grid.sweep, progress.total, len(progress.done), progress.cell_seconds, console)
        for cell in progress.done:
            table.update_best(cell.label, progress.summaries[cell.name].final.get(grid.sweep.metric))
        runner = TuneRunner(grid, out, table, lambda: folder.write_status("running"))
        with table:
            runner.run(progress.todo)
        errors = {name: cell.error for name, cell in table.cells.items() if cell.status == "failed"}
    cells = folder.list_cells()
    cell_table = summaries.build_cell_table(cells, out, grid.sweep.parsed_target, errors)
    axes = list(grid.sweep.axes)
    seed_table = summaries.build_seed_table(cell_table, axes)
    pair_table = build_pair_table(cell_table, axes, grid.sweep.metric, grid.sweep.direction)
    summaries.write_tables(cell_table, seed_table, pair_table, out)
    failed = [(cell.label, errors[cell.name]) for cell in cells if cell.name in errors]
    return SweepResult(out, cell_table, seed_table, pair_table, failed)
