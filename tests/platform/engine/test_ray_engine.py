"""The Ray engine: the same numbers as in process, whatever dies on the way."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.registry import algorithms
from dbo.platform.config.engines import RaySettings
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.base import Work
from dbo.platform.engine.factory import start_engine
from dbo.platform.engine.placement import bundle_for, pack_nodes
from dbo.platform.engine.ray_actor import Block
from dbo.platform.engine.ray_engine import RayEngine
from dbo.platform.engine.shard_wrappers import pooled
from dbo.platform.errors import NodeFailure, RunError
from dbo.platform.network.topology import single_node
from dbo.platform.runs import runner as running
from dbo.platform.runs.runner import prepare, run

pytestmark = pytest.mark.ray

SMALL: dict[str, Any] = {
    "nodes": 4, "dtype": "float64", "task": {"name": "quadratic", "dim_x": 4, "dim_y": 8}, "checkpoint_every": 3,
}


def experiment(name: str = "c2dfb", rounds: int = 6, **changes: Any) -> Experiment:
    return Experiment(**{
        **SMALL, "rounds": rounds, "algorithm": {"name": name},
        "engine": {"name": "ray", "nodes_per_actor": 2}, **changes,
    })


@pytest.mark.parametrize("name", list(algorithms()))
def test_ray_equals_local(ray: Any, tmp_path: Path, name: str) -> None:
    """Every registered algorithm gives on Ray, two nodes to an actor, what it gives in process (relative 1e-10)."""
    on_ray = run(experiment(name, rounds=3), tmp_path / "ray")
    local = run(experiment(name, rounds=3, engine={"name": "local"}), tmp_path / "local")
    for key in ("x", "y"):
        np.testing.assert_allclose(on_ray.state[key], local.state[key], rtol=1e-10, atol=1e-12)
    for key in ("bytes_links", "bytes_broadcast", "packets", "gradient_calls", "hvp_calls", "jvp_calls"):
        assert list(on_ray.history[key]) == list(local.history[key])


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_packing_does_not_matter(ray: Any, tmp_path: Path, rows: int) -> None:
    """One actor per node, uneven packing, one actor for all: the same run to float tolerance, the same bytes."""
    packed = run(experiment(engine={"name": "ray", "nodes_per_actor": rows}), tmp_path / "ray")
    local = run(experiment(engine={"name": "local"}), tmp_path / "local")
    np.testing.assert_allclose(packed.state["x"], local.state["x"], rtol=1e-10, atol=1e-12)
    assert list(packed.history["bytes_links"]) == list(local.history["bytes_links"])


def test_recovery_without_rollback_is_caught(
    ray: Any, same: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: if only the lost block went back, the result would differ, and the comparison sees it."""
    calm = run(experiment(rounds=8), tmp_path / "calm")
    advance, seen = RayEngine.advance, []

    def forgetful(engine: RayEngine, round_: int) -> None:
        advance(engine, round_)
        if round_ == 5 and not seen:
            seen.append(round_)
            engine._collect([engine._actors[0].restore.remote(None, engine._epoch)])

    monkeypatch.setattr(RayEngine, "advance", forgetful)
    hurt = run(experiment(rounds=8), tmp_path / "hurt")
    assert not same(calm.folder, hurt.folder)


def test_a_death_that_shows_first_in_a_neighbour_is_recovered(
    ray: Any, same: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The survivors' steps fail for want of the dead one's packets, and are seen first: still a loss, not a failure."""
    setup = experiment(rounds=5)
    calm = run(setup, tmp_path / "calm")
    collect, advance, struck = RayEngine._collect, RayEngine.advance, []

    def late(engine: RayEngine, refs: list[Any], **more: Any) -> list[Any]:
        if struck == ["now"]:
            struck.append("seen")
            time.sleep(1)      # by then the neighbours' failures have arrived as well
        return collect(engine, refs, **more)

    def hit(engine: RayEngine, round_: int) -> None:
        if round_ == 4 and not struck:
            pid = engine.pids()[-1]
            struck.append("now")
            os.kill(pid, signal.SIGKILL)
        advance(engine, round_)

    monkeypatch.setattr(RayEngine, "_collect", late)
    monkeypatch.setattr(RayEngine, "advance", hit)
    survived = run(setup, tmp_path / "hit")
    assert len(survived.summary["recoveries"]) >= 1
    assert same(calm.folder, survived.folder)


def test_a_late_call_of_an_earlier_epoch_touches_nothing(tiny: Any) -> None:
    """The fence stands before the deed: a stale begin starts no round and spoils none that follows."""
    setup = tiny()
    made = prepare(setup)
    block = Block()
    block.assign(made.problem, setup.resolved(), made.network, range(4), 3, 1, 0.0)
    with pytest.raises(RuntimeError, match="epoch 2 reached a block of epoch 3"):
        block.begin(2, 1)
    assert block.begin(3, 1) is not None


def test_recoveries_are_bounded(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With max_recoveries used up the run fails, says so, and keeps its checkpoint."""
    advance = RayEngine.advance

    def doomed(engine: RayEngine, round_: int) -> None:
        if round_ == 5:
            os.kill(engine.pids()[0], signal.SIGKILL)
        advance(engine, round_)

    monkeypatch.setattr(RayEngine, "advance", doomed)
    with pytest.raises(RunError, match="max_recoveries = 1 is used up"):
        run(experiment(engine={"name": "ray", "nodes_per_actor": 2, "max_recoveries": 1}), tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_bytes())
    assert summary["status"] == "failed"
    assert len(summary["recoveries"]) == 1
    assert (tmp_path / "run" / "checkpoints" / "round-00000003").exists()


def test_an_exception_in_a_node_is_told_once(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that raises: which nodes, which round, which step, the original traceback; all actors are ended."""
    plugin = tmp_path / "faulty.py"
    plugin.write_text(
        "from dbo.algorithms.methods import c2dfb\n"
        "from dbo.algorithms.registry import algorithm\n"
        "@algorithm('faulty', config=c2dfb.Config, state=c2dfb.State, init=c2dfb.init, packets=lambda c: 16)\n"
        "async def faulty(st, shard, cfg):\n"
        "    '''Raises in round 3 on node 2.'''\n"
        "    if int(st.t[0, 0]) == 2 and 2 in shard.ids:\n"
        "        raise ArithmeticError('two and two make five')\n"
        "    return await c2dfb.c2dfb.round(st, shard, cfg)\n"
    )
    broken = experiment("faulty", plugins=[str(plugin)])
    pids: list[int] = []
    begin = RayEngine._begin
    monkeypatch.setattr(RayEngine, "_begin", lambda engine: (begin(engine), pids.extend(engine.pids())))
    with pytest.raises(NodeFailure, match="two and two make five") as caught:
        run(broken, tmp_path / "run")
    assert caught.value.nodes == (2, 3)
    assert caught.value.round == 3
    assert "ArithmeticError" in caught.value.trace
    assert pids
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "an actor outlived the failure"
        time.sleep(0.1)


def test_too_large_a_request_is_told(ray: Any, tmp_path: Path) -> None:
    """A cluster that cannot seat the actors: what is missing, after a bounded wait."""
    greedy = experiment(engine={
        "name": "ray", "nodes_per_actor": 1, "cpus_per_node": 64.0, "placement_timeout": 1.0,
    })
    start = time.monotonic()
    with pytest.raises(RunError, match=r"CPU: needed 256 \(64 per actor\), cluster has 2"):
        run(greedy, tmp_path / "run")
    assert time.monotonic() - start < 20


def test_payloads_do_not_pile_up(ray: Any) -> None:
    """References to packets are dropped when they have been consumed: the object store stays where it was."""
    setup = experiment(task={"name": "quadratic", "dim_x": 4, "dim_y": 400}, algorithm={"name": "dsgda_gt"})
    parts, made = setup.parts, prepare(setup)
    engine = start_engine(
        RaySettings(nodes_per_actor=2),
        Work(parts.algorithm, parts.config, made.problem, made.network, setup.resolved())
    )
    try:
        used = []
        for round_ in range(1, 121):
            engine.advance(round_)
            if round_ % 40 == 0:
                used.append(ray.available_resources().get("object_store_memory", 0.0))
        assert abs(used[-1] - used[0]) < 2e6
    finally:
        engine.close()


def test_tests_on_ray_stay_in_one_process(request: pytest.FixtureRequest) -> None:
    """Where tests run in several processes: two clusters on one machine are twice the load, and none tells."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        assert request.node.nodeid.endswith("@ray")


def test_packing_follows_the_resources() -> None:
    """auto: one actor per node while there are CPUs (or GPU shares), packed in runs of neighbours otherwise."""

    class Cluster:
        def __init__(self, **resources: float) -> None:
            self.resources = resources

        def cluster_resources(self) -> dict[str, float]:
            return self.resources

    assert len(pack_nodes(RaySettings(), Cluster(CPU=16), 10)) == 10
    assert pack_nodes(RaySettings(), Cluster(CPU=2), 5) == [[0, 1, 2], [3, 4]]
    assert len(pack_nodes(RaySettings(gpus_per_node=0.5), Cluster(CPU=64, GPU=2), 10)) == 4
    assert len(pack_nodes(RaySettings(cpus_per_node=4), Cluster(CPU=16), 10)) == 4
    assert len(pack_nodes(RaySettings(nodes_per_actor=3), Cluster(CPU=1), 10)) == 4


def test_resource_requests() -> None:
    """GPU shares add up per row and are whole above 1; without a reservation next to no CPU is asked for."""
    assert bundle_for(RaySettings(), rows=5) == {"CPU": 0.01}
    assert bundle_for(RaySettings(cpus_per_node=2, nodes_per_actor=3), rows=3) == {"CPU": 6}
    assert bundle_for(RaySettings(gpus_per_node=0.25, nodes_per_actor=2), rows=2)["GPU"] == 0.5
    assert bundle_for(RaySettings(gpus_per_node=0.25, nodes_per_actor=6), rows=6)["GPU"] == 2
    packed = RaySettings(gpus_per_node=0.5, cpus_per_node=4)
    assert bundle_for(packed, rows=3) == {"CPU": 4, "GPU": 0.5}      # packed by auto: they share one reservation


def test_single_machine_reference_runs_in_one_actor(ray: Any) -> None:
    """A reference that sees all data is one row in one actor and sends nothing."""
    setup = experiment("f2ba")
    parts, made = setup.parts, prepare(setup)
    engine = start_engine(
        RaySettings(), Work(parts.algorithm, parts.config, pooled(made.problem), single_node(), setup.resolved()))
    engine.advance(1)
    assert engine.ledger().bytes_links == 0
    engine.close()


def test_local_engine_needs_no_ray(tmp_path: Path) -> None:
    """engine.name=local does not even import Ray."""
    code = (
        "import sys\n"
        "from dbo.platform.config.experiment import Experiment\n"
        "from dbo.platform.runs.runner import run\n"
        "local = Experiment(nodes=4, rounds=2, task={'name': 'quadratic'}, engine={'name': 'local'})\n"
        f"run(local, {str(tmp_path / 'r')!r})\n"
        "assert 'ray' not in sys.modules and 'torch' not in sys.modules and 'mlflow' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_own_cluster_is_closed_to_others(ray: Any) -> None:
    """A cluster that dbo starts listens on loopback only, wants a token, and has no dashboard."""
    assert os.environ["RAY_AUTH_MODE"] == "token"
    context = ray.get_runtime_context()
    assert context.gcs_address.startswith("127.0.0.1:")
    assert not ray._private.worker.global_worker.node.webui_url
    assert {node["NodeManagerAddress"] for node in ray.nodes()} == {"127.0.0.1"}


def test_the_driver_never_touches_a_payload(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Driver code touches payloads nowhere: results of begin and step are only ever handed on as references."""
    got: list[Any] = []
    original = ray.get

    def spy(refs: Any, **more: Any) -> Any:
        answer = original(refs, **more)
        got.append(answer)
        return answer

    monkeypatch.setattr(ray, "get", spy)
    setup = experiment(rounds=1)
    parts, made = setup.parts, running.prepare(setup)
    engine = parts.engine.start(Work(parts.algorithm, parts.config, made.problem, made.network, setup.resolved()))
    got.clear()
    engine.advance(1)
    seen = list(got)
    engine.close()
    assert seen == [[None, None]]
