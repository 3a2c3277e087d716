"""Recovery on Ray after kills: of actors in 36 runs on graphs and six on stars, of ten drivers, of one machine."""

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dbo.platform.config.experiment import Experiment
from dbo.platform.engine import placement
from dbo.platform.engine.ray_engine import RayEngine
from dbo.platform.runs.runner import run

pytestmark = pytest.mark.ray
BIN = Path(sys.executable).parent
ALGORITHMS: dict[str, dict[str, Any]] = {
    "c2dfb": {"inner_steps": 4, "eta_in": 0.3, "eta_out": 0.1, "gamma_in": 0.3},
    "madsbo": {"inner_steps": 4, "higp_steps": 8, "eta_x": 0.3, "eta_y": 0.4, "eta_z": 0.15},
    "mdbo": {"eta": 0.3, "beta_x": 0.7, "beta_y": 0.7, "alpha_x": 2.0, "alpha_y": 2.0, "lipschitz": 1.2},
}
TOPOLOGIES, SEEDS = ("ring", "two_hop", "erdos_renyi"), range(4)
SETTINGS: dict[str, Any] = {
    "nodes": 6, "dtype": "float64", "task": {"name": "quadratic", "dim_x": 4, "dim_y": 8}, "rounds": 12,
    "checkpoint_every": 4, "engine": {"name": "ray", "nodes_per_actor": 3},
}


class Killer:
    """Kill random actors at random moments of rounds, from another thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.random = random.Random(seed)
        self.kills, self.at_once = 1 + seed % 2, 1 + seed // 2 % 2
        self.killed = 0
        self.timer: threading.Timer | None = None
        advance, killer = RayEngine.advance, self

        def advance_under_attack(engine: RayEngine, round_: int, last: int | None = None) -> None:
            if killer.killed < killer.kills and killer.random.random() < 0.4:
                killer.killed += 1
                victims = killer.random.sample(engine.pids(), killer.at_once)
                threading.Timer(killer.random.uniform(0, 0.03), killer.kill, [victims]).start()
            advance(engine, round_, last)

        monkeypatch.setattr(RayEngine, "advance", advance_under_attack)

    def kill(self, victims: list[int]) -> None:
        for pid in victims:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.mark.parametrize(("algorithm", "topology"), [
    pytest.param(algorithm, topology, marks=[] if (algorithm, topology) == ("c2dfb", "ring") else pytest.mark.slow)
    for algorithm in ALGORITHMS for topology in TOPOLOGIES
])
def test_killed_actors_do_not_change_results(
    ray: Any, same: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, topology: str
) -> None:
    """Four runs per algorithm and topology, each with one or two kills of one or both actors: all bit-identical."""
    steps = {"name": algorithm, **ALGORITHMS[algorithm]}
    experiment = Experiment(**SETTINGS, algorithm=steps, topology={"name": topology})
    undisturbed = run(experiment, tmp_path / "undisturbed")
    recoveries = 0
    for seed in SEEDS:
        with monkeypatch.context() as patch:
            Killer(patch, seed)
            hit = run(experiment, tmp_path / f"hit-{seed}")
        recoveries += len(hit.summary["recoveries"])
        assert same(undisturbed.folder, hit.folder), f"seed {seed}"
    assert recoveries >= len(SEEDS)


@pytest.mark.parametrize(("algorithm", "victims"), [
    ("fedbioacc", "server"), ("fedbioacc", "clients"),
    *(pytest.param("fedbioacc", both, marks=pytest.mark.slow) for both in ("both",)),
    *(pytest.param("fednest", which, marks=pytest.mark.slow) for which in ("server", "clients", "both")),
])
def test_killed_server_or_clients_do_not_change_results(
    ray: Any, same: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, victims: str
) -> None:
    """Half of the clients take part in a round, with two local steps: the server's memory and the draws come back."""
    # Not in round 1: a later one proves that the state of the last checkpoint is restored.
    steps = {"name": algorithm, "local_steps": 2, "participation": 0.5, "eta_x": 0.05, "eta_y": 0.2}
    settings = {**SETTINGS, "engine": {"name": "ray", "nodes_per_actor": 6}}
    experiment = Experiment(**settings, algorithm=steps)
    undisturbed = run(experiment, tmp_path / "undisturbed")
    advance, killed = RayEngine.advance, []

    def kill_in_round_seven(engine: RayEngine, round_: int, last: int | None = None) -> None:
        if round_ == 7 and not killed:
            assert engine.blocks == [list(range(6)), [6]], "the server has an actor of its own"
            clients, server = engine.pids()
            killed.extend({"clients": [clients], "server": [server], "both": [clients, server]}[victims])
            for pid in killed:
                threading.Timer(0.002, os.kill, [pid, signal.SIGKILL]).start()
        advance(engine, round_, last)

    monkeypatch.setattr(RayEngine, "advance", kill_in_round_seven)
    hit = run(experiment, tmp_path / "hit")
    assert killed
    assert hit.summary["recoveries"]
    assert same(undisturbed.folder, hit.folder)


def alive(ray: Any) -> set[str]:
    """Return the actors of all drivers that are not dead."""
    return {key for key, actor in ray._private.state.actors().items() if actor["State"] != "DEAD"}


@pytest.mark.parametrize("drivers", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_drivers_do_not_change_results(drivers: int, ray: Any, same: Any, tmp_path: Path) -> None:
    """Drivers killed with SIGKILL at random moments and resumed: no actor is orphaned, all bits are the same."""
    experiment = Experiment(**{**SETTINGS, "rounds": 40}, algorithm={"name": "c2dfb"})
    (tmp_path / "e.yaml").write_text(experiment.to_yaml())
    undisturbed = run(experiment, tmp_path / "undisturbed")
    placement.release_idle_actors()      # the drivers need the CPUs
    before = alive(ray)
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    pick, resumed = random.Random(0), 0
    for number in range(drivers):
        folder = tmp_path / f"run-{number}"
        command = [BIN / "dbo", "run", "e.yaml", "tracking.uri=off", "--out", folder, "--quiet"]
        driver = subprocess.Popen(command, env=environment, cwd=tmp_path)
        wait_for_line(folder / "metrics.jsonl", pick.randint(1, 30), driver)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        unfinished = not (folder / "summary.json").exists()
        resumed += unfinished
        subprocess.run([*command, "--resume"], env=environment, cwd=tmp_path, check=True, timeout=120)
        assert same(undisturbed.folder, folder), f"driver {number}"
    assert resumed >= 0.8 * drivers - 1, "the drivers were killed too late to prove anything"
    deadline = time.monotonic() + 20
    while alive(ray) - before:
        assert time.monotonic() < deadline, "an actor outlived its driver"
        time.sleep(0.2)


def wait_for_line(file: Path, lines: int, driver: "subprocess.Popen[bytes]") -> None:
    """Wait until so many evaluations are recorded."""
    while driver.poll() is None:
        if file.exists() and len(file.read_bytes().splitlines()) >= lines:
            return
        time.sleep(0.005)


def test_own_cluster_ends_with_its_driver(tmp_path: Path) -> None:
    """No process is left of the cluster that a killed driver started for itself.

    Most end within seconds; Ray's agents, if the GCS died before them, retry for a fixed minute.
    """
    (tmp_path / "e.yaml").write_text(Experiment(**{**SETTINGS, "rounds": 100_000}).to_yaml())
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment["DBO_TEST_MARK"] = mark = f"mark-{os.getpid()}"
    driver = subprocess.Popen(
        [BIN / "dbo", "run", "e.yaml", "tracking.uri=off", "--out", "out", "--quiet"], env=environment, cwd=tmp_path
    )
    wait_for_line(tmp_path / "out" / "metrics.jsonl", 2, driver)
    family = marked(mark)
    assert len(family) > 3
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    deadline = time.monotonic() + 100
    while marked(mark):
        assert time.monotonic() < deadline, f"left behind: {marked(mark)}"
        time.sleep(0.2)


def marked(mark: str) -> dict[int, str]:
    """Return the processes that inherited the mark, with their commands."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80]
            except OSError:
                continue
    return found


LOST_MACHINE = """
import json, sys, threading, time
from pathlib import Path
from ray.cluster_utils import Cluster
import ray
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.ray_engine import RayEngine
from dbo.platform.engine.placement import reuse_actors
from dbo.platform.runs.runner import run

settings, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
machines = [cluster.add_node(num_cpus=1) for _ in range(2)]
ray.init(address=cluster.address, log_to_driver=False)
experiment = Experiment(**settings)
undisturbed = run(experiment, folder / "undisturbed")
begin, advance, seen = RayEngine._start_actors, RayEngine.advance, {}

def spread(engine):
    begin(engine)
    table = ray._private.state.actors()
    seen["machines"] = {a["Address"]["NodeID"] for a in table.values() if a["State"] == "ALIVE"}

def storm(engine, round_, last=None):
    if round_ == 6 and machines:
        cluster.remove_node(machines.pop(), allow_graceful=False)
    advance(engine, round_, last)

RayEngine._start_actors, RayEngine.advance = spread, storm
hit = run(experiment, folder / "hit")
found = {"machines": len(seen["machines"]), "recoveries": len(hit.summary["recoveries"])}
(folder / "found.json").write_text(json.dumps(found))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
def test_lost_machine_does_not_change_results(same: Any, tmp_path: Path) -> None:
    """Three machines (raylets) with an actor each, one lost in round 6: the run continues on two, bit-identical."""
    settings = {**SETTINGS, "engine": {"name": "ray", "nodes_per_actor": 2, "placement_timeout": 10.0}}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment |= {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",      # loopback
        "RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "3",
    }
    done = subprocess.run(
        [sys.executable, "-c", LOST_MACHINE, json.dumps(settings), str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_bytes())
    assert found["machines"] == 3
    assert found["recoveries"] >= 1
    assert same(tmp_path / "undisturbed", tmp_path / "hit")
