"""How cells share the CPUs of a cluster, and what happens if the cluster is lost."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dbo.platform.errors import RunError
from dbo.sweeps import tune_runner
from dbo.sweeps.tune_runner import TrialEvents, TuneRunner, compute_fair_share


def test_fair_share_is_the_largest_that_fits() -> None:
    """Whole CPUs first, and never a share across machines."""
    assert compute_fair_share([8.0], 4) == 1.0
    assert compute_fair_share([2.0], 2) == 1.0
    assert compute_fair_share([2.0], 4) == 0.5
    assert compute_fair_share([1.0, 1.0], 3) == 0.5
    assert compute_fair_share([4.0, 4.0], 10) == 0.8
    assert compute_fair_share([2.0], 1000) == 0.01


class Cell:
    """A cell that has ended, or not."""

    def __init__(self, name: str, has_ended: bool) -> None:
        self.name, self.has_ended = name, has_ended

    def read_summary(self, out: Path) -> Any:
        return "summary" if self.has_ended else None


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TuneRunner:
    """Return a runner whose cluster is lost, without a cluster."""
    monkeypatch.setattr(tune_runner, "_LOST_SECONDS", 0.0)
    monkeypatch.setattr(tune_runner, "find_lost_process", lambda: "Ray's gcs_server is stopped; --resume continues")
    monkeypatch.setattr("dbo.platform.engine.deadlines._LOOK_SECONDS", 0.01)
    found = TuneRunner.__new__(TuneRunner)
    found.out, found.is_over = tmp_path, False
    found.table = SimpleNamespace(cells={"stopped": SimpleNamespace(status="stopped")})     # type: ignore[assignment]
    found.sweep = SimpleNamespace(trials=3)                                                 # type: ignore[assignment]
    return found


def wait_for_ever() -> None:
    threading.Event().wait(60)


def test_a_lost_cluster_ends_a_sweep(runner: TuneRunner) -> None:
    """Tune would wait for ever; its loop must not start further cells in the background."""
    with pytest.raises(RunError, match=r"^Ray's gcs_server is stopped; start the sweep again to continue it$"):
        runner._watch(wait_for_ever, [Cell("a", True), Cell("b", False)], None)      # type: ignore[list-item]
    with pytest.raises(RunError, match="has ended"):
        TrialEvents(runner, None).on_step_begin(1, [])


def test_a_cluster_lost_after_the_last_cell_changes_nothing(runner: TuneRunner) -> None:
    """All cells have ended, or were stopped by the scheduler: so has the sweep."""
    runner._watch(wait_for_ever, [Cell("a", True), Cell("stopped", False)], None)    # type: ignore[list-item]


@pytest.mark.parametrize(("sampled", "is_complete"), [(2, False), (3, True)])
def test_a_search_is_complete_with_all_its_cells(runner: TuneRunner, sampled: int, is_complete: bool) -> None:
    """Cells that the search has not sampled yet are missing."""
    log: Any = SimpleNamespace(cells=[Cell(str(number), True) for number in range(sampled)])
    if is_complete:
        runner._watch(wait_for_ever, [], log)
    else:
        with pytest.raises(RunError):
            runner._watch(wait_for_ever, [], log)


def test_errors_of_tune_are_raised(runner: TuneRunner) -> None:
    """Control: what `fit` raises ends the sweep as before."""
    def fail() -> None:
        raise ValueError("of Tune")

    with pytest.raises(ValueError, match="of Tune"):
        runner._watch(fail, [], None)
