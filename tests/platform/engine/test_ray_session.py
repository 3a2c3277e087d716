"""A command ends within a stated time, with the exit code of its run, whatever has become of Ray by then."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.faults.shutdown import SHUTDOWN_SECONDS, end_after_hit, find_marked, marked_environment

from dbo.platform.engine import ray_session
from dbo.platform.errors import InputError


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Return an environment without a cluster; processes that inherit it are ended after the test."""
    with marked_environment() as found:
        yield found


@pytest.mark.ray
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_finished_run_exits_with_0(name: str, number: int, tmp_path: Path, environment: dict[str, str]) -> None:
    """Although the GCS or the raylet is stopped or dead when training has ended; no process is left behind."""
    code, seconds, output = end_after_hit(name, number, tmp_path, environment)
    assert code == 0, output
    assert seconds < SHUTDOWN_SECONDS
    assert '"status": "finished"' in (tmp_path / "run" / "summary.json").read_text()
    assert (tmp_path / "run" / "report.html").exists()
    deadline = time.monotonic() + 75         # agents of Ray retry to reach the GCS for a minute
    while find_marked(environment["DBO_TEST_MARK"]):
        assert time.monotonic() < deadline, find_marked(environment["DBO_TEST_MARK"])
        time.sleep(0.5)


@pytest.mark.ray
@pytest.mark.slow
def test_without_a_deadline_the_command_hangs(tmp_path: Path, environment: dict[str, str]) -> None:
    """Control: Ray's own end waits for a stopped raylet for ever."""
    with pytest.raises(subprocess.TimeoutExpired):
        end_after_hit("raylet", signal.SIGSTOP, tmp_path, environment, sabotage=True, timeout=90)
    assert (tmp_path / "hit").exists()
    assert time.time() - float((tmp_path / "hit").read_text()) > SHUTDOWN_SECONDS


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


@pytest.mark.parametrize(("command", "expected"), [
    ("default_worker.py", True), ("ray::IDLE", True), ("ray::BlockActor.step", True), ("ray::DashboardAgent", False),
    ("ray::RuntimeEnvAgent", False), ("log_monitor.py", False),
])
def test_agents_are_no_workers(command: str, expected: bool) -> None:
    """A raylet ends with its agents: they are never killed because they are stopped."""
    assert ray_session.is_worker_command(command.encode()) == expected


def test_a_port_that_never_answers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system accepts connections for a GCS that is stopped; Ray would wait for it."""
    monkeypatch.setattr(ray_session, "_ANSWER_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(InputError, match=f"no Ray cluster answers at {address}: no answer within 1 s"):
            ray_session._probe(address)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"+OK\r\n", b"x", b""])
def test_a_server_of_another_kind_is_refused_at_once(answer: bytes) -> None:
    """Ray would retry for minutes: the port of its dashboard, say, is not the one of the head."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def respond() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 10)
                connection.sendall(answer)

        served = pool.submit(respond)
        with pytest.raises(InputError, match=f"no Ray cluster answers at {address}: what listens there is no head"):
            ray_session._probe(address)
        served.result()


@pytest.mark.ray
def test_a_head_that_answers_is_accepted(ray: Any) -> None:
    """Control of the tests above."""
    ray_session._probe(ray.get_runtime_context().gcs_address)
