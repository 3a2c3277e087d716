"""Cut a machine off the cluster, for 20 seconds and for good, while a run uses it."""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dbo.platform.config.experiment import Experiment
from dbo.platform.runs.runner import run
from tests.faults.machines import PORT, Machines, find_obstacle, start_machines
from tests.faults.row import Row, count_evaluations, hash_run
from tests.faults.shutdown import find_event

DETECTION_SECONDS = 30.0
SETTINGS: dict[str, Any] = {
    "nodes": 6, "dtype": "float64", "task": {"name": "quadratic", "dim_x": 4, "dim_y": 8}, "rounds": 400,
    "eval_every": 20, "checkpoint_every": 20, "algorithm": {"name": "c2dfb", "inner_steps": 2},
    "engine": {"name": "ray", "nodes_per_actor": 2}, "tracking": {"uri": "off"},
}
# A driver whose rounds take a tenth of a second: the fault hits in the middle. It prints how many machines it used.
DRIVER = """
import json, sys, time
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.ray_engine import RayEngine
from dbo.platform.runs.runner import NoCallback, run

class Notices(NoCallback):
    def on_notice(self, text):
        print(text, file=sys.stderr, flush=True)

advance, machines = RayEngine.advance, set()

def advance_slowly(engine, round_, last=None):
    machines.update(place.machine for place in engine._heartbeats.places.values())
    time.sleep(0.1)
    advance(engine, round_, last)

RayEngine.advance = advance_slowly
result = run(Experiment(**json.loads(sys.argv[1])), sys.argv[2], callback=Notices())
print(json.dumps({"machines": len(machines), "recoveries": len(result.summary["recoveries"])}))
"""


def start_driver(machines: Machines, folder: Path, **engine: Any) -> Any:
    """Start a run on the cluster; return when some rounds are recorded."""
    settings = {**SETTINGS, "engine": {**SETTINGS["engine"], "address": f"{machines.address(0)}:{PORT}", **engine}}
    with open(folder.with_suffix(".log"), "wb") as log:
        process = machines.popen(
            0, sys.executable, "-c", DRIVER, json.dumps(settings), str(folder), stdout=log, stderr=log)
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or len((folder / "metrics.jsonl").read_bytes().splitlines()) < 4:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise RuntimeError(folder.with_suffix(".log").read_text()[-3000:])
        time.sleep(0.1)
    return process


def read_end(folder: Path) -> dict[str, Any]:
    """Return what a driver printed last."""
    found: dict[str, Any] = json.loads(folder.with_suffix(".log").read_text().splitlines()[-1])
    return found


def find_detection(folder: Path, since: float) -> float | None:
    """Return after how many seconds the loss was detected; None if nothing was lost."""
    lost = find_event(folder, "lost")
    return lost["timestamp"] - since if lost else None


def run_undisturbed(folder: Path) -> Path:
    """Run the same experiment on one machine."""
    return run(Experiment(**SETTINGS), folder).folder


def partitions(short: bool, sabotage: bool = False) -> Row:
    """The link of one of three machines cut for 20 s and for good; then the healed machine joins again.

    Sabotage: heartbeats have an hour, so that only Ray itself finds out.
    """
    row = Row("partitions", f"detected within {DETECTION_SECONDS:g} s, bit-identical")
    if obstacle := find_obstacle():
        row.count(False, obstacle)
        return row
    more = {"heartbeat_timeout": 3600.0} if sabotage else {}
    with tempfile.TemporaryDirectory() as base, start_machines(3) as machines:
        undisturbed = hash_run(run_undisturbed(Path(base) / "undisturbed"))
        for seconds in (20, None) if not short and not sabotage else (None,):
            folder = Path(base) / f"cut-{seconds}"
            driver, cut = start_driver(machines, folder, **more), time.time()
            machines.cut(2)
            if seconds is not None:
                time.sleep(seconds)
                machines.heal(2)
            code = driver.wait(timeout=400)
            detection = find_detection(folder, cut)
            row.seconds += [] if detection is None else [detection]
            count_evaluations(row, folder, SETTINGS["rounds"] // SETTINGS["eval_every"] + 1)
            same = hash_run(folder) == undisturbed
            in_time = detection is not None and detection < DETECTION_SECONDS
            row.count(code == 0 and same and (in_time or seconds is not None),
                      f"cut for {seconds or 'ever'}: exit code {code}, detected after {detection}, same={same}")
        if not short and not sabotage:
            _rejoin(row, machines, Path(base) / "rejoined")
    return row


def _rejoin(row: Row, machines: Machines, folder: Path) -> None:
    """Heal the link, run `ray start`, and check that the next run uses the machine."""
    machines.heal(2)
    machines.wait_until_empty(2)
    machines.start_ray(2)
    machines.wait_for(3)
    code, used = start_driver(machines, folder).wait(timeout=200), read_end(folder)["machines"]
    row.count(code == 0 and used == 3, f"after ray start: exit code {code}, {used} machines used")
