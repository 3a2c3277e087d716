"""Processes of Ray that are stopped or killed while a run starts, trains or sweeps: nothing hangs, nothing is lost.

Faults that hit before the first round are slow tests. Those in the middle of training need several whole runs, or a
minute until Ray itself notices: they are outages.
"""

import signal
from pathlib import Path
from typing import Any

import pytest
from tests.faults import clusters
from tests.faults.row import Row

pytestmark = pytest.mark.ray


@pytest.fixture
def row() -> Row:
    return Row("test", "ok")


@pytest.mark.outage
@pytest.mark.parametrize(("name", "number"), [
    ("gcs_server", signal.SIGSTOP), ("gcs_server", signal.SIGKILL), ("raylet", signal.SIGSTOP),
])
def test_a_run_survives_or_is_resumed(row: Row, tmp_path: Path, name: str, number: signal.Signals) -> None:
    """It goes on, or ends with one line and a failed summary; in the end it has the bits of an undisturbed run."""
    clusters.hit_run(row, tmp_path, name, number)
    assert row.ok, (row.problems, row.notes)


@pytest.mark.outage
def test_the_death_of_the_gcs_ends_a_long_run(row: Row, tmp_path: Path) -> None:
    """Ray ends the driver after a minute; one line, an event and a failed summary are left."""
    clusters.kill_gcs_of_a_long_run(row, tmp_path)
    assert row.ok, row.problems


@pytest.mark.outage
def test_a_sweep_whose_gcs_is_stopped_ends(row: Row, tmp_path: Path) -> None:
    """Exit 1 with one line, although Tune waits for ever; started again, the sweep has all cells."""
    clusters.stop_gcs_of_a_sweep(row, tmp_path)
    assert row.ok, row.problems


@pytest.mark.slow
def test_a_cluster_whose_gcs_is_stopped_is_refused(row: Row, tmp_path: Path) -> None:
    """`ray.init` would wait for ever: exit 2 and one line within 30 s."""
    clusters.connect_to_a_stopped_gcs(row, tmp_path)
    assert row.ok, row.problems


@pytest.mark.slow
@pytest.mark.parametrize("sabotage", [False, True], ids=["observed", "control"])
def test_a_worker_stopped_before_its_first_answer_is_found(row: Row, ray: Any, sabotage: bool) -> None:
    """Within 30 s. Control: if nobody looks, it takes placement_timeout."""
    clusters.stop_workers_at_start(row, sabotage)
    assert row.ok != sabotage, row.problems
