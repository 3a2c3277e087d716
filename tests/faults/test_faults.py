"""The short version of every row of `python -m tests.faults`, and for each a sabotage that must turn it red.

Rows that need a cluster or an MLflow server have their short version where those are at hand already:

    actors    tests/platform/runs/test_recovery.py and test_messages.py; its control is in test_cluster.py
    driver    tests/platform/tracking/test_process.py and test_recovery.py
    sweep     tests/sweeps/test_runner.py
    mlflow    tests/platform/tracking/test_process.py
    exposure  real servers: tests/platform/cli/test_submit.py (401) and test_doctor.py (403)
    soak      on Ray: tests/platform/engine/test_ray_engine.py
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import __main__ as faults

ROOT = Path(__file__).resolve().parents[2]
HERE = ("messages", "disk", "flips", "nan", "pickles", "exposure")
ELSEWHERE = {
    "actors": ("platform/runs/test_recovery.py::test_killed_actors_leave_no_trace",
               "platform/engine/test_messages.py::test_an_actor_that_hangs_is_replaced",
               "platform/engine/test_ray_engine.py::test_recovery_without_rollback_is_caught"),
    "driver": ("platform/tracking/test_process.py::test_a_killed_command_and_its_resumption",
               "platform/runs/test_recovery.py::test_killed_drivers_leave_no_trace"),
    "sweep": ("sweeps/test_runner.py::test_a_killed_driver_loses_nothing",),
    "mlflow": ("platform/tracking/test_process.py::test_a_server_that_is_away_for_a_while",
               "platform/tracking/test_process.py::test_a_server_that_never_answers"),
    "input": ("platform/cli/test_bad_input.py::test_malformed_input_is_refused",
              "platform/cli/test_bad_input.py::test_the_judge_can_say_no"),
    "exposure": ("platform/cli/test_submit.py::test_without_the_token_nobody_gets_in",
                 "platform/cli/test_doctor.py::test_a_real_mlflow_server_refuses_strangers"),
    "soak": ("platform/engine/test_ray_engine.py::test_payloads_do_not_pile_up",),
}


@pytest.mark.parametrize("name", HERE)
def test_nothing_is_lost(name: str) -> None:
    """The row is at its target."""
    row = faults.test_named(name)(short=True)
    assert row.ok, (row.cells(), row.wrong)


@pytest.mark.parametrize("name", HERE)
def test_a_sabotaged_row_is_red(name: str) -> None:
    """Control: with what it watches over broken, the row says so."""
    row = faults.test_named(name)(short=True, sabotage=True)
    assert row.tried
    assert not row.ok


def test_rounds_do_not_pile_up() -> None:
    """Two thousand rounds in process: memory and open files stay; with 20 kB kept per round they are seen to grow."""
    code = (
        "import tests.faults.soak as f; rows = f.soak(True, on_ray=False), f.soak(True, sabotage=True); "
        "print([(r.ok, r.notes, r.wrong) for r in rows]); raise SystemExit([r.ok for r in rows] != [True, False])"
    )
    done = subprocess.run(      # a process of its own: what else this one does is not measured
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_short_versions_are_where_they_are_said_to_be(name: str) -> None:
    """A renamed test would leave its row without one."""
    for place in ELSEWHERE[name]:
        file, _, function = place.partition("::")
        assert f"def {function}(" in (ROOT / "tests" / file).read_text(), place


def test_every_row_has_a_short_version() -> None:
    assert set(HERE) | set(ELSEWHERE) == set(faults.TESTS)


def test_a_folder_that_becomes_read_only_is_told(tmp_path: Path) -> None:
    """Before a run: one line, exit 2. Later: a resumed run is refused the same way, and what is there stays."""
    place = tmp_path / "mounted"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(place)], capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not allowed here")
    words = [
        sys.executable, "-c", "from dbo.platform.cli.main import main; main()", "run", "rounds=3", "engine.name=local",
        "task.name=quadratic", "tracking.uri=off", "--quiet", "--out", str(place / "r"),
    ]
    try:
        subprocess.run(words, check=True, timeout=120, cwd=tmp_path)
        before = (place / "r" / "metrics.jsonl").read_bytes()
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        for more in (["rounds=3"], ["--resume"], ["--out", str(place / "new")]):
            done = subprocess.run(
                [*words, *more], capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
            )
            assert done.returncode == 2, done.stderr
            assert "Read-only file system" in done.stderr
            assert "Traceback" not in done.stderr
        assert (place / "r" / "metrics.jsonl").read_bytes() == before
    finally:
        subprocess.run(["umount", str(place)], check=False)


def test_the_program_prints_its_table() -> None:
    """One row as a program: exit 0 and a table; an unknown name is refused with the known ones."""
    command = [sys.executable, "-m", "tests.faults"]
    done = subprocess.run(
        [*command, "flips", "--short"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit flips" in done.stdout
    wrong = subprocess.run([*command, "nonsense"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert wrong.returncode == 2
    assert "allowed: " in wrong.stderr
