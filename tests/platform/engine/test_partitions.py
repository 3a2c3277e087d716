"""A machine that is cut off the cluster: detected in time, and the results stay the same, bit for bit."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.machines import Machines, find_obstacle, start_machines
from tests.faults.partitions import DETECTION_SECONDS, find_detection, read_end, run_undisturbed, start_driver
from tests.faults.row import hash_run

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def machines(require: Any) -> Iterator[Machines]:
    """Three machines with Ray, each in a network namespace of its own."""
    require("namespaces", find_obstacle() is None)
    with start_machines(3) as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run without a fault."""
    return hash_run(run_undisturbed(tmp_path_factory.mktemp("undisturbed")))


def test_machine_that_is_cut_off_for_20_seconds(machines: Machines, undisturbed: str, tmp_path: Path) -> None:
    """It stays in the cluster; the run continues with the same bits, whether or not it had to recover."""
    driver, cut = start_driver(machines, tmp_path / "run"), time.time()
    machines.cut(2)
    time.sleep(20)
    machines.heal(2)
    assert driver.wait(timeout=300) == 0, (tmp_path / "run.log").read_text()[-3000:]
    assert hash_run(tmp_path / "run") == undisturbed
    detection = find_detection(tmp_path / "run", cut)
    assert detection is None or detection < DETECTION_SECONDS
    assert machines.count_alive() == 3


def test_machine_that_is_cut_off_for_good(machines: Machines, undisturbed: str, tmp_path: Path) -> None:
    """The run continues on the others. Healed, the machine ends its processes; `ray start` brings it back."""
    driver, cut = start_driver(machines, tmp_path / "run"), time.time()
    machines.cut(2)
    assert driver.wait(timeout=300) == 0, (tmp_path / "run.log").read_text()[-3000:]
    detection = find_detection(tmp_path / "run", cut)
    assert detection is not None
    assert detection < DETECTION_SECONDS
    assert hash_run(tmp_path / "run") == undisturbed
    assert "waiting for" in (tmp_path / "run.log").read_text()
    assert machines.count_alive() == 2
    machines.heal(2)
    machines.wait_until_empty(2)
    assert machines.count_alive() == 2             # it does not rejoin by itself
    machines.start_ray(2)
    machines.wait_for(3)
    assert start_driver(machines, tmp_path / "next").wait(timeout=200) == 0
    assert read_end(tmp_path / "next")["machines"] == 3
