"""Stop or kill Ray's own processes when training has ended, and actors during a round."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.heartbeat import Heartbeats
from dbo.platform.engine.placement import reuse_actors
from dbo.platform.engine.ray_engine import RayEngine
from dbo.platform.engine.ray_session import connect
from dbo.platform.runs.runner import run
from tests.faults.crash import ALGORITHMS, SETTINGS
from tests.faults.row import Row, count_evaluations, hash_run

SHUTDOWN_SECONDS = 30.0        # from the end of training to the end of the command, as docs/reliability.md states
DETECTION_SECONDS = 30.0
# Run `dbo run`, and hit a process of its cluster between the end of training and the release of the actors.
COMMAND = """
import os, sys, time
from dbo.platform.engine import ray_session
from dbo.platform.engine.ray_engine import RayEngine

name, number, mark, sabotage, *command = sys.argv[1:]
close = RayEngine.close

def hit_and_close(engine):
    pid = next(pid for pid, found in ray_session._own_processes.items() if found == name)
    os.kill(pid, int(number))
    time.sleep(0.2)
    open(mark, "w").write(repr(time.time()))
    close(engine)

RayEngine.close = hit_and_close
if sabotage:
    ray_session._disconnect = lambda: None
sys.argv = ["dbo", *command]
from dbo.platform.cli.main import main
main()
"""
OPTIONS = (
    "rounds=3", "nodes=4", "task={name: quadratic, dim_x: 4, dim_y: 8}", "engine.nodes_per_actor=2", "tracking.uri=off",
)


@contextmanager
def marked_environment() -> Iterator[dict[str, str]]:
    """Yield an environment without a cluster, in which processes can be found again; end those that are left."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    mark = f"shutdown-{os.getpid()}-{time.monotonic_ns()}"
    try:
        yield {**plain, "DBO_TEST_MARK": mark}
    finally:
        for pid in find_marked(mark):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def find_marked(mark: str) -> list[int]:
    """Return the processes that inherited the mark."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def end_after_hit(
    name: str, number: int, folder: Path, environment: dict[str, str], sabotage: bool = False, timeout: float = 300
) -> tuple[int, float, str]:
    """Return exit code, seconds since the end of training, and output of a run whose Ray was hit."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, name, str(int(number)), str(folder / "hit"), "yes" if sabotage else "",
         "run", *OPTIONS, "--out", str(folder / "run")],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=timeout, check=False,
    )
    return done.returncode, time.time() - float((folder / "hit").read_text()), done.stdout + done.stderr


def shutdown(short: bool, sabotage: bool = False) -> Row:
    """GCS and raylet stopped and killed when training has ended. Sabotage: Ray ends in its own way, without a limit."""
    row = Row("shutdown", f"exit code 0 within {SHUTDOWN_SECONDS:g} s")
    hits = [(name, number) for name in ("gcs_server", "raylet") for number in (signal.SIGSTOP, signal.SIGKILL)]
    for name, number in [("raylet", signal.SIGSTOP)] if short or sabotage else hits:
        case = f"{name}, {number.name}"
        with tempfile.TemporaryDirectory() as folder_name, marked_environment() as environment:
            folder = Path(folder_name)
            environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
            try:
                code, seconds, _ = end_after_hit(name, number, folder, environment, sabotage, timeout=90)
            except subprocess.TimeoutExpired:
                row.count(False, f"{case}: the command does not end")
                continue
            finished = '"finished"' in (folder / "run" / "summary.json").read_text()
            row.seconds.append(seconds)
            in_time = finished and code == 0 and seconds < SHUTDOWN_SECONDS
            row.count(in_time, f"{case}: exit code {code} after {seconds:.0f} s")
    return row


def silence(short: bool, sabotage: bool = False) -> Row:
    """Actors stopped in a round, with step_timeout = 600. Sabotage: nobody looks at the processes."""
    row = Row("silent actors", f"detected within {DETECTION_SECONDS:g} s, bit-identical")
    settings = {**SETTINGS, "algorithm": {"name": "c2dfb", **ALGORITHMS["c2dfb"]}}
    settings["engine"] = {**SETTINGS["engine"], "step_timeout": 40.0 if sabotage else 600.0}
    connect(None)
    blind = mock.patch.object(Heartbeats, "find_silent", return_value={}) if sabotage else nullcontext()
    with tempfile.TemporaryDirectory() as folder_name, reuse_actors(), blind:
        root, experiment = Path(folder_name), Experiment(**settings)
        calm = run(experiment, root / "calm")
        for number in range(1 if short or sabotage else 4):
            stopped: list[float] = []
            with mock.patch.object(RayEngine, "advance", _stop_in_round_6(RayEngine.advance, number % 2, stopped)):
                hit = run(experiment, root / f"hit-{number}")
            lost = find_event(hit.folder, "lost")
            seconds = lost["timestamp"] - stopped[0] if lost else float("inf")
            row.seconds.append(seconds)
            count_evaluations(row, hit.folder, experiment.rounds + 1)
            same = hash_run(hit.folder) == hash_run(calm.folder)
            row.count(same and seconds < DETECTION_SECONDS, f"actor {number % 2}: {seconds:.0f} s, same={same}")
    return row


def _stop_in_round_6(advance: Callable[..., None], block: int, stopped: list[float]) -> Callable[..., None]:
    def advance_and_stop(engine: RayEngine, round_: int, last: int | None = None) -> None:
        if round_ == 6 and not stopped:
            os.kill(engine.pids()[block], signal.SIGSTOP)
            stopped.append(time.time())
        advance(engine, round_, last)

    return advance_and_stop


def find_event(folder: Path, kind: str) -> dict[str, Any] | None:
    """Return the first event of this kind."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return next((event for event in events if event["kind"] == kind), None)
