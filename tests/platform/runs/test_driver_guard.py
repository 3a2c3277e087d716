"""A driver that Ray ends leaves an event, a failed summary and one line; a driver that was killed stays unfinished."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dbo.platform.runs import driver_guard
from dbo.platform.runs.run_folder import read_events, read_metrics, read_summary

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def victims() -> "list[subprocess.Popen[bytes]]":
    """Two processes to kill: a driver and a raylet."""
    return [subprocess.Popen(SLEEP), subprocess.Popen(SLEEP)]


@pytest.mark.parametrize(("kill_raylet", "goodbye", "expected"), [
    (True, b"", ["the raylet"]), (False, b"", []), (True, b"ended", None), (False, b"ended", None),
])
def test_the_guard_sees_what_died_first(
    victims: "list[subprocess.Popen[bytes]]", kill_raylet: bool, goodbye: bytes, expected: list[str] | None
) -> None:
    """A raylet that dies before a driver without a goodbye is the reason for its end."""
    driver, raylet = victims
    reading, writing = os.pipe()
    try:
        if kill_raylet:
            raylet.kill()            # not waited for: it stays in the process table, and its handle can be opened
            time.sleep(0.1)
        if goodbye:
            os.write(writing, goodbye)
        watching = subprocess.Popen(
            [sys.executable, "-c", "import sys; from dbo.platform.runs.driver_guard import watch; "
             "print(watch(0, int(sys.argv[1]), {'raylet': int(sys.argv[2])}))", str(driver.pid), str(raylet.pid)],
            stdin=reading, stdout=subprocess.PIPE, text=True)
        time.sleep(1.0)
        os.close(writing)
        assert watching.communicate(timeout=30)[0].strip() == str(expected)
    finally:
        os.close(reading)
        for process in victims:
            process.kill()
            process.wait()


def test_the_raylet_of_an_exiting_driver_is_not_the_reason(victims: "list[subprocess.Popen[bytes]]") -> None:
    """The own cluster of a driver that was killed dies with it. Control: a driver that lives is not exiting."""
    driver, raylet = victims
    assert not driver_guard._is_exiting(driver.pid)
    driver.kill()
    time.sleep(0.2)
    assert driver_guard._is_exiting(driver.pid)
    driver.wait()
    assert driver_guard._is_exiting(driver.pid)
    raylet.kill()
    raylet.wait()


def test_rays_log_of_the_driver_has_the_reason(tmp_path: Path) -> None:
    """On a busy machine the guard may wake up after both are gone."""
    log = tmp_path / "python-core-driver-0100ff_42.log"
    log.write_text("connection.cc:216: The connection to the plasma store is failed. Terminate the process.\n")
    assert driver_guard._read_reason(str(tmp_path), 42) == ["the raylet"]
    assert driver_guard._read_reason(str(tmp_path), 43) == []
    log.write_text("actor_manager.cc:236: received notification on actor\n")
    assert driver_guard._read_reason(str(tmp_path), 42) == []


def find_children(pid: int) -> dict[str, int]:
    """Return name → process id of the children of a process."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found[Path(f"/proc/{child}/comm").read_text().strip()] = int(child)
    return found


@pytest.mark.ray
@pytest.mark.parametrize("victim", ["raylet", "driver"])
def test_a_dead_raylet_is_reported_and_recorded(tmp_path: Path, victim: str) -> None:
    """Exit 1, one line, an event and a failed summary. Control: a driver that is killed itself stays unfinished."""
    folder = tmp_path / "r"
    command = [
        sys.executable, "-m", "dbo.platform.cli", "run", "nodes=4", "rounds=100000", "checkpoint_every=50",
        "task.name=quadratic", "engine.nodes_per_actor=2", "tracking.uri=off", "--quiet", "--out", str(folder),
    ]
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment) as driver:
        while driver.poll() is None and len(read_metrics(folder / "metrics.jsonl")) < 60:
            time.sleep(0.1)
        os.kill(driver.pid if victim == "driver" else find_children(driver.pid)["raylet"], signal.SIGKILL)
        _, errors = driver.communicate(timeout=90)          # until the guard has ended too
    summary, last = read_summary(folder), read_events(folder / "events.jsonl")[-1]
    if victim == "driver":
        assert (summary, last.kind) == (None, "started")
        return
    assert driver.returncode == 1
    assert errors.strip().splitlines()[-1].startswith("dbo: ")
    assert summary is not None
    assert (summary.status, last.kind, last.status, last.error) == ("failed", "ended", "failed", summary.error)
    assert summary.rounds >= 59
