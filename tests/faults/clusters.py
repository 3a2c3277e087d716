"""Stop or kill processes of Ray while a run starts, trains or sweeps: it ends in a stated time, and loses nothing."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from dbo.platform.config.experiment import Experiment
from dbo.platform.engine import ray_engine, ray_session
from dbo.platform.engine.placement import release_idle_actors
from dbo.platform.runs.run_folder import read_events, read_summary
from dbo.platform.runs.runner import NoCallback, run
from tests.faults.crash import ALGORITHMS, SETTINGS
from tests.faults.drivers import COMMAND, find_children, wait_for_child
from tests.faults.row import Pieces, Row, count_evaluations, hash_run
from tests.faults.shutdown import marked_environment

DETECTION_SECONDS = 30.0
GCS_SECONDS = 90.0              # Ray ends a driver a minute after the death of its GCS
ROUNDS = 300
CELL_SECONDS = 30.0             # of training in a cell of the sweep: more than the command needs to notice
OPTIONS = (
    "nodes=4", "checkpoint_every=20", "dtype=float64", "task={name: quadratic, dim_x: 4, dim_y: 8}",
    "engine={name: ray, nodes_per_actor: 2}", "tracking.uri=off", "--quiet",
)
HEAD = """
import ray, time
found = ray.init("local", include_dashboard=False, num_cpus=1, _node_ip_address="127.0.0.1", log_to_driver=False)
print(found.address_info["gcs_address"], flush=True)
time.sleep(600)
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended that was hit."""

    code: int | None            # None: it did not end
    seconds: float              # from the hit to the end
    errors: str

    @property
    def is_one_line(self) -> bool:
        lines = [line for line in self.errors.strip().splitlines() if line.startswith("dbo: ")]
        return len(lines) == 1 and "Traceback" not in self.errors


def hit(
    command: Sequence[str], name: str, number: int, is_ready: Callable[[], bool], place: Path, within: float,
    progress: Callable[[], int] = lambda: 0,
) -> Ended:
    """Start a command, send a signal to a process of its cluster once it is ready, and wait for its end.

    It has not ended (`code` is None) if nothing happens for `within` seconds: neither its end nor any progress. On a
    busy machine a run that goes on may take longer than that.
    """
    with marked_environment() as environment:
        environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
        with subprocess.Popen(
            [*COMMAND, *command], cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env=environment,
        ) as driver:
            while driver.poll() is None and not is_ready():
                time.sleep(0.05)
            start = time.perf_counter()
            if driver.poll() is None:
                os.kill(wait_for_child(driver.pid, name), number)
            reached = progress()
            while True:
                try:
                    _, errors = driver.communicate(timeout=within)
                    return Ended(driver.returncode, time.perf_counter() - start, errors)
                except subprocess.TimeoutExpired:
                    before, reached = reached, progress()
                    if reached == before:
                        driver.kill()
                        return Ended(None, time.perf_counter() - start, "")


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def processes(short: bool, sabotage: bool = False, pieces: Pieces | None = None) -> Row:
    """Every process of Ray at every stage. Sabotage: nobody looks at workers that have not answered yet."""
    row = Row("processes of Ray", f"ends or goes on within {DETECTION_SECONDS:g} s (GCS: {GCS_SECONDS:g} s), same bits")
    if sabotage or short:
        stop_workers_at_start(row, sabotage)
        return row
    with tempfile.TemporaryDirectory() as base:
        place = Path(base)
        return (pieces or Pieces()).run(row, {
            "workers stopped at the start": lambda row: stop_workers_at_start(row, sabotage=False),
            "GCS stopped": lambda row: hit_run(row, place, "gcs_server", signal.SIGSTOP),
            "GCS killed": lambda row: hit_run(row, place, "gcs_server", signal.SIGKILL),
            "raylet stopped": lambda row: hit_run(row, place, "raylet", signal.SIGSTOP),
            "GCS of a long run killed": lambda row: kill_gcs_of_a_long_run(row, place),
            "GCS of a sweep stopped": lambda row: stop_gcs_of_a_sweep(row, place),
            "connect to a stopped GCS": lambda row: connect_to_a_stopped_gcs(row, place),
        })


def run_undisturbed(place: Path) -> None:
    """Run into place/calm what `hit_run` compares with."""
    command = [*COMMAND, "run", *OPTIONS, f"rounds={ROUNDS}", "--out", "calm"]
    subprocess.run(command, cwd=place, check=True, timeout=300)


def stop_workers_at_start(row: Row, sabotage: bool) -> None:
    """Stop the first process that the cluster starts for the actors of a run, before it can answer."""
    ray_session.connect(None)
    settings = {**SETTINGS, "algorithm": {"name": "c2dfb", **ALGORITHMS["c2dfb"]}}
    settings["engine"] = {**SETTINGS["engine"], "placement_timeout": 40.0 if sabotage else 60.0}
    experiment = Experiment(**settings)
    place_actors, stopped, noticed = ray_engine.place_actors, list[float](), list[float]()

    def place_and_stop(*arguments: object, **options: object) -> object:
        known = set(_list_workers())
        group = place_actors(*arguments, **options)      # type: ignore[arg-type]
        deadline = time.monotonic() + 60
        while not (new := set(_list_workers()) - known):
            assert time.monotonic() < deadline, "the cluster starts no process"
            time.sleep(0.005)
        os.kill(min(new), signal.SIGSTOP)
        stopped.append(time.perf_counter())
        return group

    class Notices(NoCallback):
        def on_notice(self, text: str) -> None:
            if "stopped before its actor answered" in text:
                noticed.append(time.perf_counter())
                row.notes.append(text)

    blind = mock.patch.object(ray_engine, "list_stopped_workers", return_value=[])
    with tempfile.TemporaryDirectory() as base, blind if sabotage else nullcontext():
        calm = run(experiment, Path(base) / "calm")
        release_idle_actors()
        _end_idle_workers()
        with mock.patch.object(ray_engine, "place_actors", place_and_stop):
            hit_run = run(experiment, Path(base) / "hit", callback=Notices())
        seconds = noticed[0] - stopped[0] if noticed else float("inf")
        row.seconds += [seconds] if noticed else []
        is_same = hash_run(hit_run.folder) == hash_run(calm.folder)
        row.count(is_same and seconds < DETECTION_SECONDS, f"stopped at the start: {seconds:.0f} s, same={is_same}")


def _list_workers() -> list[int]:
    raylet = next(pid for pid, name in ray_session._own_processes.items() if name == "raylet")
    return [pid for pid in ray_session._list_children([raylet]) if ray_session.is_worker(pid)]


def _end_idle_workers() -> None:
    """End what Ray keeps for the next actor, so that it has to start a process."""
    for pid in _list_workers():
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    time.sleep(1)


def hit_run(row: Row, place: Path, name: str, number: signal.Signals) -> None:
    """Hit a process in the middle of a run; one that does not end well is resumed."""
    if not (place / "calm").exists():
        run_undisturbed(place)
    case, folder = f"{name}, {number.name}", place / f"{name}-{number.name}"
    command = ["run", *OPTIONS, f"rounds={ROUNDS}", "--out", str(folder)]

    def count() -> int:
        return count_lines(folder / "metrics.jsonl")

    ended = hit(command, name, number, lambda: count() > 40, place, within=GCS_SECONDS, progress=count)
    row.notes.append(f"{case} in round 40 of {ROUNDS}: exit code {ended.code} after {ended.seconds:.0f} s")
    if ended.code == 1:
        row.seconds.append(ended.seconds)
        ended_well = ended.is_one_line and _has_failed(folder) and ended.seconds < GCS_SECONDS
        subprocess.run([*COMMAND, *command, "--resume"], cwd=place, check=False, timeout=300)
    else:
        ended_well = ended.code == 0
    is_same = (folder / "state.safetensors").exists() and hash_run(folder) == hash_run(place / "calm")
    row.count(ended_well and is_same, f"{case}: exit code {ended.code}, same={is_same}, {ended.errors[-200:]!r}")
    count_evaluations(row, folder, ROUNDS + 1)


def _has_failed(folder: Path) -> bool:
    summary = read_summary(folder)
    ends = [event.status for event in read_events(folder / "events.jsonl") if event.kind == "ended"]
    return summary is not None and summary.status == "failed" and ends == ["failed"]


def kill_gcs_of_a_long_run(row: Row, place: Path) -> None:
    """Ray ends the driver; the guard process records it."""
    folder = place / "long"
    ended = hit(
        ["run", *OPTIONS, "rounds=100000", "--out", str(folder)], "gcs_server", signal.SIGKILL,
        lambda: count_lines(folder / "metrics.jsonl") > 40, place, within=GCS_SECONDS)
    row.seconds.append(ended.seconds)
    row.notes.append(f"gcs_server, SIGKILL in round 40 of 100000: exit code {ended.code} after {ended.seconds:.0f} s")
    row.count(ended.code == 1 and ended.is_one_line and _has_failed(folder), f"long run: {ended}")


def stop_gcs_of_a_sweep(row: Row, place: Path) -> None:
    """A sweep whose GCS is stopped fails with one line; started again, it has all cells."""
    (place / "sweep.yaml").write_text(
        "name: s\nexperiment: {nodes: 4, rounds: 1000000, eval_every: 20, checkpoint_every: 20, dtype: float64, "
        f"task: {{name: quadratic, dim_x: 4, dim_y: 8}}, until: {{seconds: {CELL_SECONDS:g}}}, "
        "algorithm: {name: c2dfb}, engine: {name: local}, tracking: {uri: 'off'}}\n"
        "axes: {seed: [0, 1, 2, 3]}\nmetric: upper_loss\ntarget: hypergradient_norm=0.5\n")
    cells = place / "sweep" / "cells"
    ended = hit(
        ["sweep", "sweep.yaml", "--out", "sweep"], "gcs_server", signal.SIGSTOP,
        lambda: any(count_lines(path) > 2 for path in cells.glob("*/metrics.jsonl")), place, within=GCS_SECONDS)
    row.seconds.append(ended.seconds)
    row.notes.append(f"gcs_server, SIGSTOP in a sweep: exit code {ended.code} after {ended.seconds:.0f} s")
    again = subprocess.run(
        [*COMMAND, "sweep", "sweep.yaml", "--out", "sweep"], cwd=place, check=False, timeout=300, capture_output=True)
    finished = sum(summary.status == "finished" for path in cells.iterdir() if (summary := read_summary(path)))
    row.count(
        ended.code == 1 and ended.is_one_line and again.returncode == 0 and finished == 4,
        f"sweep: {ended}, again {again.returncode}, {finished} cells")


def connect_to_a_stopped_gcs(row: Row, place: Path) -> None:
    """Wrong input: nothing answers at the address."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment |= {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    with subprocess.Popen(
        [sys.executable, "-c", HEAD], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as head:
        assert head.stdout is not None
        address = head.stdout.readline().strip()
        os.kill(wait_for_child(head.pid, "gcs_server"), signal.SIGSTOP)
        children = find_children(head.pid)
        start = time.perf_counter()
        try:
            done = subprocess.run(
                [*COMMAND, "run", *OPTIONS, f"engine.address={address}", "--out", "never"], cwd=place, check=False,
                timeout=GCS_SECONDS, capture_output=True, text=True, env=environment)
            code, errors = done.returncode, done.stderr
        except subprocess.TimeoutExpired:
            code, errors = -1, ""
        finally:
            for pid in [*children.values(), head.pid]:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
    seconds = time.perf_counter() - start
    row.seconds.append(seconds)
    is_refused = code == 2 and "no Ray cluster answers" in errors and errors.count("\n") == 1
    row.count(is_refused and seconds < DETECTION_SECONDS, f"stopped GCS: {code} after {seconds:.0f} s, {errors[-200:]}")
