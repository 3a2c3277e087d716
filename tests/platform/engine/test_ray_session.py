"""A command ends within a stated time, with the exit code of its run, whatever has become of Ray by then."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dbo.platform.engine import ray_session

pytestmark = pytest.mark.ray

SECONDS = 30.0      # from the end of training to the end of the command, as docs/reliability.md states
# Run `dbo run`, and hit a process of its cluster between the end of training and the release of the actors.
COMMAND = """
import os, signal, sys, time
from dbo.platform.engine import ray_session
from dbo.platform.engine.ray_engine import RayEngine

name, number, mark, *command = sys.argv[1:]
close = RayEngine.close

def hit_and_close(engine):
    pid = next(pid for pid, found in ray_session._own_processes.items() if found == name)
    os.kill(pid, int(number))
    time.sleep(0.2)
    open(mark, "w").write(repr(time.time()))
    close(engine)

RayEngine.close = hit_and_close
sys.argv = ["dbo", *command]
from dbo.platform.cli.main import main
main()
"""
OPTIONS = (
    "rounds=3", "nodes=4", "task={name: quadratic, dim_x: 4, dim_y: 8}", "engine.nodes_per_actor=2", "tracking.uri=off",
)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Return an environment without a cluster, in which the processes of the test can be found; end them."""
    mark = f"shutdown-{os.getpid()}-{time.monotonic_ns()}"
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    yield {**plain, "DBO_TEST_MARK": mark}
    for pid in find_marked(mark):
        os.kill(pid, signal.SIGKILL)


def find_marked(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def end_with(name: str, number: int, folder: Path, environment: dict[str, str]) -> tuple[int, float, str]:
    """Return exit code, seconds since the end of training, and output of a run whose Ray was hit."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, name, str(int(number)), str(folder / "hit"),
         "run", *OPTIONS, "--out", str(folder / "run")],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )
    return done.returncode, time.time() - float((folder / "hit").read_text()), done.stdout + done.stderr


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_finished_run_exits_with_0(name: str, number: int, tmp_path: Path, environment: dict[str, str]) -> None:
    """Although the GCS or the raylet is stopped or dead when training has ended; no process is left behind."""
    code, seconds, output = end_with(name, number, tmp_path, environment)
    assert code == 0, output
    assert seconds < SECONDS
    assert '"status": "finished"' in (tmp_path / "run" / "summary.json").read_text()
    assert (tmp_path / "run" / "report.html").exists()
    deadline = time.monotonic() + 75         # agents of Ray retry to reach the GCS for a minute
    while find_marked(environment["DBO_TEST_MARK"]):
        assert time.monotonic() < deadline, find_marked(environment["DBO_TEST_MARK"])
        time.sleep(0.5)


@pytest.mark.slow
def test_without_deadlines_the_command_hangs(tmp_path: Path, environment: dict[str, str]) -> None:
    """Control: Ray's own end waits for a stopped raylet for ever."""
    code = COMMAND.replace("RayEngine.close = hit", "import atexit; atexit.register = lambda *a, **k: None\nRayEngine.close = hit")
    assert code != COMMAND
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(
            [sys.executable, "-c", code.replace("main()\n", "import ray; main()\n"), "raylet", str(int(signal.SIGSTOP)), str(tmp_path / "hit"),
             "run", *OPTIONS, "--out", str(tmp_path / "run")],
            env=environment, capture_output=True, timeout=2 * SECONDS, check=False,
        )
    assert (tmp_path / "hit").exists()


@pytest.mark.parametrize(("code", "recorded"), [(None, 0), (0, 0), (2, 2), ("text", 1)])
def test_exit_code_is_recorded_as_the_system_sees_it(
    code: object, recorded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sys.exit` takes None and texts, too."""
    monkeypatch.setattr(ray_session, "_exit_code", None)
    ray_session.set_exit_code(code)
    assert ray_session._exit_code == recorded


def test_lost_process_of_the_own_cluster_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead or a stopped one; a stopped one only if asked for. Control: one that runs."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    monkeypatch.setattr(ray_session, "_own_processes", {child.pid: "raylet"})
    try:
        assert ray_session.find_lost_process() is None
        os.kill(child.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while ray_session.find_lost_process() is None:
            assert time.monotonic() < deadline
        assert "is stopped" in (ray_session.find_lost_process() or "")
        assert ray_session.find_lost_process(or_stopped=False) is None
    finally:
        child.kill()
        child.wait()
    assert "has died" in (ray_session.find_lost_process() or "")
    assert ray_session.find_lost_process(["gcs_server"]) is None
