"""Silent actors are found within 30 s; actors in long native calls are not silent, with or without the GIL."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.heartbeat import Heartbeats, Place, kill_processes, read_states
from dbo.platform.engine.ray_engine import RayEngine
from dbo.platform.errors import RunError
from dbo.platform.runs.runner import NoCallback, run

SMALL: dict[str, Any] = {
    "nodes": 4, "rounds": 6, "dtype": "float64", "task": {"name": "quadratic", "dim_x": 4, "dim_y": 8},
    "checkpoint_every": 3, "algorithm": {"name": "c2dfb"}, "tracking": {"uri": "off"},
    "engine": {"name": "ray", "nodes_per_actor": 2},
}
# A native call that holds the GIL: no thread of the process runs until it returns. `CDLL` releases it.
NATIVE = """
import ctypes, time
from pathlib import Path
from dbo.algorithms.api import algorithm
from dbo.algorithms.methods import c2dfb

LIBRARY = ctypes.{library}(None)

@algorithm("{name}", config=c2dfb.Config, state=c2dfb.State, init=c2dfb.init)
async def native(st, shard, cfg):
    '''Sleeps for 9 seconds in C, once.'''
    if int(st.t[0, 0]) == 2 and 0 in shard.ids and not Path({mark!r}).exists():
        Path({mark!r}).touch()
        LIBRARY.sleep(9)
    return await c2dfb.c2dfb.round(st, shard, cfg)
"""


class Notices(NoCallback):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_notice(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    yield process
    process.kill()
    process.wait()


def wait_for_state(pid: int, letters: str) -> None:
    deadline = time.monotonic() + 10
    while read_states([pid]).get(pid, "X") not in letters:
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- states of processes ---------------------------------------------------------------------------------------------


def test_states_come_from_the_kernel(sleeper: Any) -> None:
    """T for a stopped process; one that does not exist has none, and is left to Ray."""
    wait_for_state(sleeper.pid, "S")
    os.kill(sleeper.pid, signal.SIGSTOP)
    wait_for_state(sleeper.pid, "T")
    kill_processes([sleeper.pid])
    sleeper.wait()
    assert read_states([sleeper.pid]) == {}


class OneMachine:
    """The part of `ray` that heartbeats of the driver's own machine need."""

    def get_runtime_context(self) -> Any:
        return self

    def get_node_id(self) -> str:
        return "here"


def test_stopped_process_is_silent_after_half_of_the_timeout(sleeper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at once, since a debugger stops it for a moment; and never while it runs."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    heartbeats = Heartbeats(OneMachine(), timeout=20.0)
    heartbeats.watch({3: Place("here", sleeper.pid)})
    heartbeats.begin()

    def look(at: float) -> list[int]:
        now[0] = at
        return list(heartbeats.find_silent())

    assert look(0) == look(100) == []
    os.kill(sleeper.pid, signal.SIGSTOP)
    monkeypatch.undo()
    wait_for_state(sleeper.pid, "T")
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert look(102) == look(111) == []
    assert look(112) == [3]
    os.kill(sleeper.pid, signal.SIGCONT)
    monkeypatch.undo()
    wait_for_state(sleeper.pid, "RS")
    assert heartbeats.find_silent() == {}


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("phase", ["round", "assignment"])
def test_stopped_actor_is_found_within_30_seconds(
    ray: Any, same: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """With step_timeout = 600, in a round and while it gets its data. The user sees what the program waits for."""
    experiment, notices = Experiment(**SMALL), Notices()
    calm = run(experiment, tmp_path / "calm")
    stopped: list[float] = []
    advance = RayEngine.advance

    def stop(pid: int) -> None:
        if not stopped:
            os.kill(pid, signal.SIGSTOP)
            stopped.append(time.time())

    def stop_in_round_5(engine: RayEngine, round_: int, last: int | None = None) -> None:
        if round_ == 5:
            stop(engine.pids()[0])
        advance(engine, round_, last)

    if phase == "round":
        monkeypatch.setattr(RayEngine, "advance", stop_in_round_5)
    else:
        monkeypatch.setattr(RayEngine, "_assign", stop_first(RayEngine._assign, stop))
    begin = time.time()
    survived = run(experiment, tmp_path / "hit", callback=notices)
    assert stopped
    assert same(calm.folder, survived.folder)
    assert any("waiting for" in text and "actors" in text for text in notices.texts), notices.texts
    if phase == "round":
        events = [json.loads(line) for line in (tmp_path / "hit" / "events.jsonl").read_text().splitlines()]
        lost = next(event for event in events if event["kind"] == "lost")
        assert "is stopped" in lost["reason"]
        assert 0 < lost["timestamp"] - stopped[0] < 30
    else:
        assert time.time() - begin < 60


def stop_first(assign: Callable[[RayEngine], None], stop: Callable[[int], None]) -> Callable[[RayEngine], None]:
    """Stop the first actor after it has been located and before it has its data."""

    def assign_stopped(engine: RayEngine) -> None:
        collect = engine._collect

        def collect_and_stop(refs: Any, **more: Any) -> Any:
            values = collect(refs, **more)
            if more.get("task") == "the start of their processes" and isinstance(values[0], Place):
                stop(values[0].pid)
            return values

        engine._collect = collect_and_stop      # type: ignore[method-assign]
        try:
            assign(engine)
        finally:
            del engine._collect

    return assign_stopped


def write_native(folder: Path, name: str, library: str) -> dict[str, Any]:
    """Write a plugin whose algorithm spends seconds in a native call; return the experiment."""
    plugin = folder / f"{name}.py"
    plugin.write_text(NATIVE.format(name=name, library=library, mark=str(folder / "called")))
    return {**SMALL, "algorithm": {"name": name}, "plugins": [str(plugin)]}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("library", ["PyDLL", "CDLL"])
def test_long_native_call_is_no_silence(ray: Any, tmp_path: Path, library: str) -> None:
    """A call that holds the GIL (PyDLL), or not (CDLL), for longer than heartbeat_timeout: no actor is replaced."""
    settings = write_native(tmp_path, f"native_{library.lower()}", library)
    settings["engine"] = {**SMALL["engine"], "heartbeat_timeout": 3.0}
    done = run(Experiment(**settings), tmp_path / "run")
    assert (tmp_path / "called").exists()
    assert done.summary["recoveries"] == []


@pytest.mark.ray
@pytest.mark.slow
def test_step_timeout_still_limits_long_work(ray: Any, tmp_path: Path) -> None:
    """Control of the test above: the same call with step_timeout = 4 counts as lost, for that reason."""
    settings = write_native(tmp_path, "native_limited", "PyDLL")
    settings["engine"] = {**SMALL["engine"], "step_timeout": 4.0}
    done = run(Experiment(**settings), tmp_path / "run")
    # The driver, or the actor that waits for the other's packets, whichever notices it first.
    reason = r"(no answer|no packets from block \d+) within 4 s \(engine\.step_timeout\)"
    assert re.search(reason, done.summary["recoveries"][0]["reason"])


@pytest.mark.ray
@pytest.mark.slow
def test_actors_that_are_silent_again_and_again_end_the_run(
    ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three attempts to start, each found within the heartbeat's time, not after 600 s."""
    monkeypatch.setattr(RayEngine, "_assign", stop_first(RayEngine._assign, lambda pid: os.kill(pid, signal.SIGSTOP)))
    settings = {**SMALL, "engine": {**SMALL["engine"], "heartbeat_timeout": 2.0}}
    begin = time.monotonic()
    reason = r"the actors cannot be started: lost 1 block\(s\) \[0\]: process \d+ is stopped"
    with pytest.raises(RunError, match=reason):
        run(Experiment(**settings), tmp_path / "run")
    assert time.monotonic() - begin < 90
