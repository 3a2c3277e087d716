"""A cell in its process: who finds it taken waits, and takes over its result; who falls behind is stopped."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbo.dashboards.load import read
from dbo.platform.engine.local import LocalEngine
from dbo.platform.errors import InUse
from dbo.platform.runs.run_folder import RunFolder, Target, read_events
from dbo.platform.runs.runner import run
from dbo.platform.tracking.reader import run_ending
from dbo.sweeps import plan, summaries, trial_worker
from dbo.sweeps.grid import Cell, Cells
from dbo.sweeps.live_table import Board
from dbo.sweeps.tune_runner import Driver

Sheet = Callable[..., Path]
Told = list[dict[str, Any]]


@pytest.fixture
def cell(sheet: Sheet) -> Cell:
    return Cells(plan.read(sheet())).fixed[0]


def orders(out: Path) -> trial_worker.Orders:
    return trial_worker.Orders(out=str(out), start=".", settings={}, base={}, axes={}, metric="upper_loss", worst=1e30,
                         chatty=False)


def conduct(cell: Cell, out: Path) -> tuple[threading.Thread, Told]:
    """In a thread: locks are the same between two of them as between two processes."""
    told: Told = []
    thread = threading.Thread(target=trial_worker.conduct, args=(cell.experiment.resolved(), orders(out), told.append))
    thread.start()
    return thread, told


class Pace:
    """A clock for those who wait: a hundred seconds pass with every round of the one that they wait for, else none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.begun = 0.0, threading.Event()
        self._turn, self._done, self._given = threading.Semaphore(0), threading.Semaphore(0), False
        append, advance = RunFolder.append, LocalEngine.advance

        def paced(engine: LocalEngine, number: int) -> None:
            self.begun.set()
            assert self._turn.acquire(timeout=60)
            advance(engine, number)

        def recorded(folder: RunFolder, record: Any, *more: Any) -> None:
            append(folder, record, *more)
            if record["round"]:
                self._done.release()

        monkeypatch.setattr(LocalEngine, "advance", paced)
        monkeypatch.setattr(RunFolder, "append", recorded)
        monkeypatch.setattr(trial_worker, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if not self._given:
            self._turn.release()
        self._given = not self._done.acquire(timeout=0.1)
        if not self._given:
            self.now += 100


def test_a_cell_that_is_drawn_twice_is_run_once(
    cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second waits longer than anybody may be silent, while the first gets on, and then tells the same result."""
    pace = Pace(monkeypatch)
    first, one = conduct(cell, tmp_path)
    assert pace.begun.wait(60)
    second, other = conduct(cell, tmp_path)
    for thread in (first, second):
        thread.join(60)
    assert pace.now > trial_worker._HELD
    assert (one[-1]["status"], other[-1]["status"]) == ("finished", "finished")
    assert one[-1]["upper_loss"] == other[-1]["upper_loss"]
    events = read_events(cell.folder(tmp_path) / "events.jsonl")
    assert sum(event["kind"] == "started" for event in events) == 1


def test_two_that_start_at_once(cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find the folder free, one is quicker: the other is refused, and waits for it after all."""
    both, refused, seen = threading.Barrier(2), threading.Event(), threading.local()
    look, acquire, advance = trial_worker.in_use, RunFolder.acquire, LocalEngine.advance

    def in_use(folder: Path) -> bool:
        held = look(folder)
        if not getattr(seen, "once", False):
            seen.once = True
            both.wait(60)
        return held

    def taken(folder: RunFolder) -> None:
        try:
            acquire(folder)
        except InUse:
            refused.set()
            raise

    def waits(engine: LocalEngine, number: int) -> None:
        assert refused.wait(60)
        advance(engine, number)

    monkeypatch.setattr(trial_worker, "in_use", in_use)
    monkeypatch.setattr(RunFolder, "acquire", taken)
    monkeypatch.setattr(LocalEngine, "advance", waits)
    pair = [conduct(cell, tmp_path) for _ in range(2)]
    for thread, _ in pair:
        thread.join(60)
    assert [told[-1]["status"] for _, told in pair] == ["finished", "finished"]


def test_a_silent_holder_is_not_waited_for_for_ever(
    cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever holds the folder and does nothing: told, after a bounded time."""
    monkeypatch.setattr(trial_worker, "_HELD", 0.2)
    held = RunFolder(cell.folder(tmp_path))
    held.acquire()
    thread, told = conduct(cell, tmp_path)
    thread.join(60)
    held.release()
    assert told[-1]["status"] == "failed"
    assert "in use" in told[-1]["error"]


def test_a_cell_that_tune_has_stopped_says_so(
    cell: Cell, sheet: Sheet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is ended without a word: the driver writes how far it came. It is not run again, and is stopped, not
    failed or finished, to the tables, the report and MLflow. One that had ended by itself is left as it is."""
    ended = Cells(plan.read(sheet())).fixed[1]
    run(ended.experiment, ended.folder(tmp_path))
    original = LocalEngine.advance

    def advance(engine: LocalEngine, number: int) -> None:
        if number == 4:
            raise KeyboardInterrupt
        original(engine, number)

    monkeypatch.setattr(LocalEngine, "advance", advance)
    with pytest.raises(KeyboardInterrupt):
        run(cell.experiment, cell.folder(tmp_path))
    board = Board(plan.read(sheet()), 2, 0, lambda: None, None)
    for one in (cell, ended):
        board.started(one.name, one)
        board.ended(one.name, "stopped")
    driver = Driver.__new__(Driver)             # what it needs of itself: no cluster
    driver.out, driver.board, driver._named, driver._seen = tmp_path, board, {c.name: c for c in (cell, ended)}, {}
    driver._settle()

    assert (cell.ended(tmp_path), ended.ended(tmp_path)) == ("stopped", "finished")
    told: Told = []
    trial_worker.conduct(cell.experiment.resolved(), orders(tmp_path), told.append)
    assert (told[-1]["status"], told[-1]["round"]) == ("stopped", 3)
    assert told[-1]["upper_loss"] == read(cell.folder(tmp_path)).records[-1]["upper_loss"]
    table = summaries.cell_table([cell, ended], tmp_path, Target("upper_loss", 0.0), {})
    assert list(table["status"]) == ["stopped", "finished"]
    assert "behind the others after round 3" in table["error"].iloc[0]
    (row,) = summaries.seed_table(table, ["algorithm.inner_steps", "seed"]).to_dict("records")
    assert (row["cells"], row["finished"], row["stopped"], row["failed"]) == (2, 1, 1, 0)
    assert read(cell.folder(tmp_path)).status == "stopped"
    ending = run_ending(cell.folder(tmp_path))
    assert ending is not None
    assert ending.tags["dbo.status"] == "stopped"
