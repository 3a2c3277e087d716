"""Kill drivers under `dbo supervise`, and the raylet under a driver."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from dbo.platform.config.experiment import Experiment
from dbo.platform.runs.run_folder import read_events, read_summary
from dbo.platform.runs.runner import run
from tests.faults.row import TINY, Row, count_evaluations, hash_run

COMMAND = [sys.executable, "-m", "dbo.platform.cli"]
UNGUARDED = (      # sabotage: the driver runs without its guard
    "import sys; from contextlib import nullcontext; from dbo.platform.runs import runner; "
    "runner.guard_driver = lambda folder: nullcontext(); from dbo.platform.cli import main; "
    "sys.argv = ['dbo', *sys.argv[1:]]; main.main()"
)


def supervised(short: bool, sabotage: bool = False) -> Row:
    """Kill the driver three times under `dbo supervise`. Sabotage: no restart is allowed."""
    row = Row("supervise", "exit 0, same bits, no evaluation lost")
    rng, tries = random.Random(0), 1 if short else 10
    experiment = Experiment(**{**TINY, "rounds": 400, "checkpoint_every": 20})
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        (base / "e.yaml").write_text(experiment.to_yaml())
        expected = hash_run(run(experiment, base / "undisturbed").folder)
        for number in range(tries):
            folder = base / f"r{number}"
            options = ["--retries", "0" if sabotage else "3", "--delay", "0.1"]
            command = [*COMMAND, "supervise", *options, "run", "e.yaml", "--out", str(folder), "--quiet"]
            with subprocess.Popen(command, cwd=base, stdout=subprocess.DEVNULL) as process:
                for lines in sorted(rng.sample(range(5, 380), 3)):
                    row.seconds += _kill_child(process, folder / "metrics.jsonl", lines)
                process.wait(timeout=300)
            is_same = process.returncode == 0 and hash_run(folder) == expected
            row.count(is_same, f"try {number}: exit {process.returncode}, same bits={is_same}")
            count_evaluations(row, folder, experiment.rounds + 1)
    return row


def _kill_child(process: "subprocess.Popen[bytes]", metrics: Path, lines: int) -> list[float]:
    """Kill the driver when so many evaluations are recorded; return the seconds until the next driver started."""
    while process.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") < lines):
        time.sleep(0.005)
    children = find_children(process.pid)
    if not children:
        return []
    begin, events = time.perf_counter(), metrics.with_name("events.jsonl")
    started = len(read_events(events))
    os.kill(next(iter(children.values())), signal.SIGKILL)
    while process.poll() is None and len(read_events(events)) == started:
        time.sleep(0.01)
    return [time.perf_counter() - begin] if process.poll() is None else []


def find_children(pid: int) -> dict[str, int]:
    """Return name → process id of the children of a process, whichever of its threads has started them."""
    found = {}
    for entry in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in entry.read_text().split():
                with suppress(OSError):          # it has just ended
                    found[Path(f"/proc/{child}/comm").read_text().strip()] = int(child)
    return found


def wait_for_child(pid: int, name: str, seconds: float = 30.0) -> int:
    """Return the child of a process with this name; a fault that hits nothing would test nothing."""
    deadline = time.monotonic() + seconds
    while name not in (children := find_children(pid)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"process {pid} has no child {name}: {children}")
        time.sleep(0.02)
    return children[name]


def raylet(short: bool, sabotage: bool = False) -> Row:
    """Kill the raylet of a running driver. Sabotage: the driver has no guard."""
    row = Row("raylet", "exit 1, one line, event and failed summary, resumable")
    settings = ("run", "nodes=4", "rounds=100000", "checkpoint_every=50", "task.name=quadratic", "engine.name=ray",
                "engine.nodes_per_actor=2", "tracking.uri=off", "--quiet", "--out")
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    program = [sys.executable, "-c", UNGUARDED] if sabotage else COMMAND
    for number in range(1 if short else 5):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "r"
            with subprocess.Popen(
                [*program, *settings, str(folder)], cwd=place, stderr=subprocess.PIPE, text=True, env=environment,
            ) as driver:
                metrics = folder / "metrics.jsonl"
                while driver.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") < 60):
                    time.sleep(0.05)
                begin = time.perf_counter()
                os.kill(wait_for_child(driver.pid, "raylet"), signal.SIGKILL)
                _, errors = driver.communicate(timeout=120)
            row.seconds.append(time.perf_counter() - begin)
            summary, last = read_summary(folder), (errors.strip().splitlines() or [""])[-1]
            events = [event.status for event in read_events(folder / "events.jsonl") if event.kind == "ended"]
            is_recorded = summary is not None and summary.status == "failed" and events == ["failed"]
            row.count(
                is_recorded and driver.returncode == 1 and last.startswith("dbo: "),
                f"try {number}: exit {driver.returncode}, recorded={is_recorded}, {last[:100]!r}")
    return row
