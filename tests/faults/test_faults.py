"""Short versions of the rows of `python -m tests.faults`, each with a control: sabotage must turn the row red.

`ELSEWHERE` names the short versions of rows that need a cluster or an MLflow server.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import __main__ as faults
from tests.faults import results
from tests.faults.row import Pieces, Row

ROOT = Path(__file__).resolve().parents[2]
SHORT = (
    "messages", "disk", "flips", "nan", "pickles", "exposure", "sealed", "mixed", "secrets", "errors", "supervise",
    "fencing", "code", "history", "search", "renamed", "yaml", "links", "packing", "sizes",
)
ELSEWHERE = {
    "actors": ("platform/runs/test_recovery.py::test_killed_actors_do_not_change_results",
               "platform/engine/test_messages.py::test_actor_that_hangs_is_replaced",
               "platform/engine/test_ray_engine.py::test_recovery_without_rollback_is_caught"),
    "driver": ("platform/tracking/test_process.py::test_a_killed_command_is_tracked_and_resumed",
               "platform/runs/test_recovery.py::test_killed_drivers_do_not_change_results"),
    "sweep": ("sweeps/test_runner.py::test_a_killed_driver_loses_nothing",),
    "mlflow": ("platform/tracking/test_process.py::test_a_server_that_is_down_for_a_while",
               "platform/tracking/test_process.py::test_a_server_that_never_answers"),
    "input": ("platform/cli/test_bad_input.py::test_malformed_input_is_refused",
              "platform/cli/test_bad_input.py::test_the_check_finds_faults"),
    "exposure": ("platform/cli/test_submit.py::test_a_wrong_token_is_refused",
                 "platform/cli/test_doctor.py::test_a_real_mlflow_server_checks_the_host"),
    "raylet": ("platform/runs/test_driver_guard.py::test_a_dead_raylet_is_reported_and_recorded",),
    "shutdown": ("platform/engine/test_ray_session.py::test_finished_run_exits_with_0",
                 "platform/engine/test_ray_session.py::test_without_a_deadline_the_command_hangs"),
    "silent": ("platform/engine/test_heartbeat.py::test_stopped_actor_is_found_within_30_seconds",
               "platform/engine/test_heartbeat.py::test_long_native_call_is_no_silence"),
    "partition": ("platform/engine/test_partitions.py::test_machine_that_is_cut_off_for_good",
                  "platform/engine/test_partitions.py::test_machine_that_is_cut_off_for_20_seconds"),
    "cluster": ("platform/engine/test_clusters.py::test_a_run_survives_or_is_resumed",
                "platform/engine/test_clusters.py::test_a_worker_stopped_before_its_first_answer_is_found"),
    "soak": ("platform/engine/test_ray_engine.py::test_payloads_do_not_pile_up",),
}


@pytest.mark.parametrize("name", SHORT)
def test_row_meets_its_target(name: str) -> None:
    """No run is lost, no evaluation missing or there twice."""
    row = faults.load_fault(name)(short=True)
    assert row.ok, (row.format(), row.problems)


@pytest.mark.parametrize("name", SHORT)
def test_sabotaged_row_misses_its_target(name: str) -> None:
    """Control: with the protection broken, the row shows NO."""
    row = faults.load_fault(name)(short=True, sabotage=True)
    assert row.tried
    assert not row.ok


def test_memory_does_not_grow_with_rounds() -> None:
    """In 2,000 rounds in process memory and open files stay constant. Control: a leak of 20 kB per round is found."""
    code = (
        "import tests.faults.soak as f; rows = f.soak(True, on_ray=False), f.soak(True, sabotage=True); "
        "print([(r.ok, r.notes, r.problems) for r in rows]); raise SystemExit([r.ok for r in rows] != [True, False])"
    )
    done = subprocess.run(      # in a process of its own, whose memory the other tests do not change
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ELSEWHERE)
def test_listed_short_versions_exist(name: str) -> None:
    """A renamed test would leave its row without a short version."""
    for place in ELSEWHERE[name]:
        file, _, function = place.partition("::")
        assert f"def {function}(" in (ROOT / "tests" / file).read_text(), place


def test_every_row_has_a_short_version() -> None:
    """Either here or in another folder."""
    assert set(SHORT) | set(ELSEWHERE) == set(faults.FAULTS)


def test_read_only_folder_is_refused(tmp_path: Path) -> None:
    """One line and exit 2, for a new run and for a resumed one; existing files stay as they are."""
    mount = tmp_path / "mounted"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(mount)], capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not allowed here")
    command = [
        sys.executable, "-c", "from dbo.platform.cli.main import main; main()", "run", "rounds=3", "engine.name=local",
        "task.name=quadratic", "tracking.uri=off", "--quiet", "--out", str(mount / "r"),
    ]
    try:
        subprocess.run(command, check=True, timeout=120, cwd=tmp_path)
        before = (mount / "r" / "metrics.jsonl").read_bytes()
        subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
        for more in (["rounds=3"], ["--resume"], ["--out", str(mount / "new")]):
            done = subprocess.run(
                [*command, *more], capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
            )
            assert done.returncode == 2, done.stderr
            assert "Read-only file system" in done.stderr
            assert "Traceback" not in done.stderr
        assert (mount / "r" / "metrics.jsonl").read_bytes() == before
    finally:
        subprocess.run(["umount", str(mount)], check=False)


def test_rows_are_completed_in_pieces(tmp_path: Path) -> None:
    """Each row is kept when it has ended; --resume runs the others; the page has all of them."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{results.BEGIN}\nold\n{results.END}\nafter\n")

    def run(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "tests.faults", *arguments, "--short", "--results", str(tmp_path / "r.jsonl"),
             "--markdown", str(page)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout

    assert "secrets …" in run("secrets")
    assert "secrets …" not in run("secrets", "yaml", "--resume")
    run("yaml", "--sabotage")
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    assert [row[0] for row in rows] == ["`secrets` (short)", "`yaml` (short)"]
    assert [dict(zip(results.HEADINGS, row, strict=True))["sabotaged"] for row in rows] == ["not run", "NO"]


def test_a_long_row_is_completed_in_pieces(tmp_path: Path) -> None:
    """Every case runs once, in its order; counts, seconds and loads of all calls are added up; no file is left."""
    ran: list[str] = []

    def make_case(name: str) -> Callable[[Row], None]:
        def case(row: Row) -> None:
            ran.append(name)
            row.count(name != "b", f"{name} failed")
            row.seconds.append(1.0)
        return case

    pieces, cases = Pieces(tmp_path / "part.json", limit=2), {name: make_case(name) for name in "abc"}
    first = pieces.run(Row("long", "target"), cases)
    assert (ran, first.is_complete, first.tried) == (["a", "b"], False, 2)
    stored = json.loads(pieces.path.read_text()) if pieces.path else {}
    assert (stored["done"], stored["row"]["total_seconds"] > 0) == (["a", "b"], True)
    second = pieces.run(Row("long", "target"), cases)
    assert (ran, second.is_complete, second.total_seconds > 0) == (["a", "b", "c"], True, True)
    assert (second.tried, second.survived, second.seconds, second.problems) == (3, 2, [1.0] * 3, ["b failed"])
    assert len(second.loads) == 3
    assert list(tmp_path.iterdir()) == []


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    """Nothing is written where no table belongs."""
    (tmp_path / "page.md").write_text("text\n")
    with pytest.raises(ValueError, match="has no lines"):
        results.write_markdown(tmp_path / "page.md", [], [])
    assert (tmp_path / "page.md").read_text() == "text\n"


def test_command_prints_the_table() -> None:
    """Exit 0 and a table with one row; an unknown name is refused with a list of the known ones."""
    command = [sys.executable, "-m", "tests.faults"]
    done = subprocess.run(
        [*command, "flips", "--short"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit flips" in done.stdout
    wrong = subprocess.run([*command, "nonsense"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert wrong.returncode == 2
    assert "allowed: " in wrong.stderr
