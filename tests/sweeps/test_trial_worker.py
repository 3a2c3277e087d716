"""A cell in its worker: a locked cell is waited for and its result reported; a stopped one is recorded as such."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbo.dashboards.load import load_run
from dbo.platform.engine.local import LocalEngine
from dbo.platform.errors import FolderLockedError
from dbo.platform.runs import provenance
from dbo.platform.runs.run_folder import RunFolder, find_summary, read_events
from dbo.platform.runs.runner import run
from dbo.platform.runs.schema import Target
from dbo.platform.tracking.reader import read_run_ending
from dbo.sweeps import plan, summaries, trial_worker
from dbo.sweeps.grid import Grid, SweepCell
from dbo.sweeps.tune_runner import record_stopped_cells

SweepFile = Callable[..., Path]
Reports = list[dict[str, Any]]


@pytest.fixture
def cell(sweep_file: SweepFile) -> SweepCell:
    return Grid(plan.read_sweep(sweep_file())).cells[0]


def run_cell(cell: SweepCell, out: Path) -> Reports:
    """Run a cell as its worker does and return the reports."""
    reports: Reports = []
    spec = trial_worker.TrialSpec(
        out=str(out), working_dir=".", experiments={}, base={}, axes={}, metric="upper_loss", worst_score=1e30,
        report_all=False,
    )
    trial_worker.run_cell(cell.experiment.to_dict(), spec, reports.append)
    return reports


def interrupt_cell(cell: SweepCell, out: Path, at_round: int) -> None:
    """Run a cell up to a round, as if its worker were killed there."""
    original = LocalEngine.run_round

    def advance(engine: LocalEngine, number: int) -> None:
        if number == at_round:
            raise KeyboardInterrupt
        original(engine, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalEngine, "run_round", advance)
        with pytest.raises(KeyboardInterrupt):
            run(cell.experiment, cell.folder(out))


class CellThread(threading.Thread):
    """A worker in a thread: locks between two threads are the same as between two processes."""

    def __init__(self, cell: SweepCell, out: Path) -> None:
        super().__init__()
        self.cell, self.out = cell, out
        self.reports: Reports = []
        self.start()

    def run(self) -> None:
        self.reports = run_cell(self.cell, self.out)


def count_starts(folder: Path) -> int:
    return sum(event.kind == "started" for event in read_events(folder / "events.jsonl"))


class SteppedClock:
    """A clock for waiting workers: each round of the running one takes a hundred seconds, nothing else takes any."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.begun = 0.0, threading.Event()
        self._turn, self._done, self._given = threading.Semaphore(0), threading.Semaphore(0), False
        append, advance = RunFolder.append, LocalEngine.run_round

        def advance_in_turn(engine: LocalEngine, number: int) -> None:
            self.begun.set()
            assert self._turn.acquire(timeout=60)
            advance(engine, number)

        def append_and_count(folder: RunFolder, record: Any, *more: Any) -> None:
            append(folder, record, *more)
            if record["round"]:
                self._done.release()

        monkeypatch.setattr(LocalEngine, "run_round", advance_in_turn)
        monkeypatch.setattr(RunFolder, "append", append_and_count)
        monkeypatch.setattr(trial_worker, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if not self._given:
            self._turn.release()
        self._given = not self._done.acquire(timeout=0.1)
        if not self._given:
            self.now += 100


def test_a_cell_that_is_sampled_twice_runs_once(
    cell: SweepCell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first worker makes progress, so the second waits longer than the timeout, and reports the same result."""
    clock = SteppedClock(monkeypatch)
    first = CellThread(cell, tmp_path)
    assert clock.begun.wait(60)
    second = CellThread(cell, tmp_path)
    for thread in (first, second):
        thread.join(60)
    assert clock.now > trial_worker._LOCK_TIMEOUT
    one, other = first.reports[-1], second.reports[-1]
    assert (one["status"], other["status"]) == ("finished", "finished")
    assert one["upper_loss"] == other["upper_loss"]
    assert count_starts(cell.folder(tmp_path)) == 1


def test_two_workers_that_start_at_once_both_report_the_result(
    cell: SweepCell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find the folder unlocked; the slower one is refused the lock, and then waits."""
    both, refused, local = threading.Barrier(2), threading.Event(), threading.local()
    original, acquire, advance = trial_worker.is_locked, RunFolder.acquire, LocalEngine.run_round

    def is_locked(folder: Path) -> bool:
        locked = original(folder)
        if not getattr(local, "once", False):
            local.once = True
            both.wait(60)
        return locked

    def acquire_or_signal(folder: RunFolder) -> None:
        try:
            acquire(folder)
        except FolderLockedError:
            refused.set()
            raise

    def advance_after_refusal(engine: LocalEngine, number: int) -> None:
        assert refused.wait(60)
        advance(engine, number)

    monkeypatch.setattr(trial_worker, "is_locked", is_locked)
    monkeypatch.setattr(RunFolder, "acquire", acquire_or_signal)
    monkeypatch.setattr(LocalEngine, "run_round", advance_after_refusal)
    threads = [CellThread(cell, tmp_path) for _ in range(2)]
    for thread in threads:
        thread.join(60)
    assert [thread.reports[-1]["status"] for thread in threads] == ["finished", "finished"]


def test_waiting_for_a_lock_without_progress_ends(
    cell: SweepCell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the owner of the lock does nothing, the cell fails after a bounded time."""
    monkeypatch.setattr(trial_worker, "_LOCK_TIMEOUT", 0.2)
    owner = RunFolder(cell.folder(tmp_path))
    owner.acquire()
    thread = CellThread(cell, tmp_path)
    thread.join(60)
    owner.release()
    assert thread.reports[-1]["status"] == "failed"
    assert "in use" in thread.reports[-1]["error"]


def test_a_released_lock_is_waited_for(cell: SweepCell, tmp_path: Path) -> None:
    """A worker that outlives its driver still locks its cell: the next one waits, and runs the cell."""
    owner = RunFolder(cell.folder(tmp_path))
    owner.acquire()
    timer = threading.Timer(1.0, owner.release)
    timer.start()
    assert run_cell(cell, tmp_path)[-1]["status"] == "finished"


def test_a_stopped_cell_is_recorded_as_stopped(cell: SweepCell, sweep_file: SweepFile, tmp_path: Path) -> None:
    """Tune ends the worker without notice, so the driver writes the summary. The cell does not run again, and is
    stopped, not failed or finished, in the tables, the report and MLflow. A cell that has finished stays finished."""
    finished = Grid(plan.read_sweep(sweep_file())).cells[1]
    run(finished.experiment, finished.folder(tmp_path))
    interrupt_cell(cell, tmp_path, at_round=4)
    record_stopped_cells([cell, finished], tmp_path)

    found = [one.read_summary(tmp_path) for one in (cell, finished)]
    assert [summary and summary.status for summary in found] == ["stopped", "finished"]
    last = run_cell(cell, tmp_path)[-1]
    assert (last["status"], last["round"]) == ("stopped", 3)
    assert last["upper_loss"] == load_run(cell.folder(tmp_path)).records[-1]["upper_loss"]
    table = summaries.build_cell_table([cell, finished], tmp_path, Target("upper_loss", 0.0), {})
    assert list(table["status"]) == ["stopped", "finished"]
    assert "stopped by the scheduler after round 3" in table["error"].iloc[0]
    (row,) = summaries.build_seed_table(table, ["algorithm.inner_steps", "seed"]).to_dict("records")
    assert (row["cells"], row["finished"], row["stopped"], row["failed"]) == (2, 1, 1, 0)
    assert load_run(cell.folder(tmp_path)).status == "stopped"
    ending = read_run_ending(cell.folder(tmp_path))
    assert ending is not None
    assert ending.tags["dbo.status"] == "stopped"


@pytest.mark.parametrize(("processor", "starts"), [(None, [0, 2]), ("another processor", [0])])
def test_an_interrupted_cell_restarts_in_another_environment(
    processor: str | None, starts: list[int], cell: SweepCell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same environment it resumes from its checkpoint."""
    interrupt_cell(cell, tmp_path, at_round=4)
    if processor is not None:
        monkeypatch.setattr(provenance, "_find_processor", lambda: processor)
    assert run_cell(cell, tmp_path)[-1]["status"] == "finished"
    events = read_events(cell.folder(tmp_path) / "events.jsonl")
    assert [event.after_round for event in events if event.kind == "started"] == starts
    alone = run(cell.experiment, tmp_path / "alone")
    assert (alone.folder / "state.safetensors").read_bytes() == (
        cell.folder(tmp_path) / "state.safetensors").read_bytes()


def test_other_library_versions_do_not_empty_the_cache(
    cell: SweepCell, sweep_file: SweepFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A complete cell is found by its run key alone: after an upgrade, or on another machine, it does not run again.
    Another run key does: the control."""
    assert run_cell(cell, tmp_path)[-1]["status"] == "finished"
    monkeypatch.setattr(provenance, "version", lambda library: "999.0")
    monkeypatch.setattr(provenance, "_find_processor", lambda: "another processor")
    assert provenance.collect_environment()["numpy"] == "999.0"
    again = Grid(plan.read_sweep(sweep_file())).cells[0]
    assert again.experiment.run_key == cell.experiment.run_key
    assert again.read_summary(tmp_path) == find_summary(cell.folder(tmp_path)) is not None
    assert run_cell(again, tmp_path)[-1]["status"] == "finished"
    assert count_starts(cell.folder(tmp_path)) == 1

    other = Grid(plan.read_sweep(sweep_file(), ["rounds=5"])).cells[0]
    cell.folder(tmp_path).rename(other.folder(tmp_path))
    assert other.read_summary(tmp_path) is None
