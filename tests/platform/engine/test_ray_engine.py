"""The Ray engine gives the results of the local engine, whatever dies meanwhile."""

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

from dbo.algorithms.api import algorithms
from dbo.platform.config.engines import RaySettings
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.base import RunSpec
from dbo.platform.engine.block import Progress, ProtocolError
from dbo.platform.engine.factory import start_engine
from dbo.platform.engine.placement import bundle_for, pack_nodes
from dbo.platform.engine.ray_actor import BlockActor, Reached
from dbo.platform.engine.ray_engine import RayEngine
from dbo.platform.engine.shard_wrappers import pool_nodes
from dbo.platform.errors import NodeFailure, RunError
from dbo.platform.network.timing import Profile
from dbo.platform.network.topology import single_node
from dbo.platform.runs.replay import read_traffic
from dbo.platform.runs.run_folder import read_metrics
from dbo.platform.runs.runner import prepare, run

pytestmark = pytest.mark.ray

SMALL: dict[str, Any] = {
    "nodes": 4, "dtype": "float64", "task": {"name": "quadratic", "dim_x": 4, "dim_y": 8}, "checkpoint_every": 3,
}


STORE: dict[str, Any] = {"name": "ray", "nodes_per_actor": 2, "transport": "object_store"}


def experiment(name: str = "c2dfb", rounds: int = 6, **changes: Any) -> Experiment:
    return Experiment(**{
        **SMALL, "rounds": rounds, "algorithm": {"name": name},
        "engine": {"name": "ray", "nodes_per_actor": 2}, **changes,
    })


def start(setup: Experiment) -> RayEngine:
    parts, prepared = setup.parts, prepare(setup)
    engine = start_engine(
        parts.engine, RunSpec(parts.algorithm, parts.config, prepared.problem, prepared.network, setup.to_dict())
    )
    assert isinstance(engine, RayEngine)
    return engine


def assert_ray_equals_local(folder: Path, name: str, **changes: Any) -> None:
    """Run an algorithm on Ray, two nodes to an actor, and in process; compare states, bytes and counters."""
    on_ray = run(experiment(name, **changes), folder / "ray")
    local = run(experiment(name, engine={"name": "local"}, **changes), folder / "local")
    for key in ("x", "y"):
        np.testing.assert_allclose(on_ray.state[key], local.state[key], rtol=1e-10, atol=1e-12)
    for key in ("bytes_links", "bytes_broadcast", "packets", "gradient_calls", "hvp_calls", "jvp_calls"):
        assert list(on_ray.history[key]) == list(local.history[key])


@pytest.mark.parametrize("transport", ["auto", "object_store"])
def test_ray_records_the_traffic_of_a_star_like_local(ray: Any, tmp_path: Path, transport: str) -> None:
    """Bytes, packets and exchanges are the same; blocks differ, and the server has one of its own."""
    changes: dict[str, Any] = {"algorithm": {"name": "fednest", "participation": 0.5}, "eval_every": 2}
    engines = {"ray": {"name": "ray", "nodes_per_actor": 3, "transport": transport}, "local": {"name": "local"}}
    for name, engine in engines.items():
        run(experiment(engine=engine, **changes), tmp_path / name)
    on_ray, local = (
        [json.loads(line) for line in (tmp_path / name / "nodes.jsonl").read_text().splitlines()] for name in engines)
    assert len(local) == 4
    for key in ("round", "bytes", "packets", "exchanges", "channels"):
        assert [line[key] for line in on_ray] == [line[key] for line in local]
    assert len(set(local[-1]["packets"])) > 2
    assert read_metrics(tmp_path / "ray" / "metrics.jsonl")[-1]["block_nodes"] == [2, 2, 1]
    assert read_metrics(tmp_path / "local" / "metrics.jsonl")[-1]["block_nodes"] == [5]
    times = [read_traffic(tmp_path / name).replay(Profile(latency_ms=7, compute=0)) for name in engines]
    np.testing.assert_array_equal(*times)


@pytest.mark.parametrize("name", list(algorithms()))
def test_ray_equals_local(ray: Any, tmp_path: Path, name: str) -> None:
    """Every registered algorithm gives the same result on Ray and in process (relative 1e-10)."""
    assert_ray_equals_local(tmp_path, name, rounds=3)


@pytest.mark.parametrize("name", ["c2dfb", "d_soba", "undeclared", "varying"])
def test_transport_changes_no_bit(ray: Any, same: Any, tmp_path: Path, plugins: list[str], name: str) -> None:
    """Packets through sockets, many rounds to a call, and through the object store: the same run."""
    setup = {"rounds": 7, "eval_every": 5, "checkpoint_every": 6, "plugins": plugins}
    sockets = run(experiment(name, **setup), tmp_path / "sockets")
    store = run(experiment(name, **setup, engine=STORE), tmp_path / "store")
    assert same(sockets.folder, store.folder)


def test_rounds_between_evaluations_are_one_call(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sockets the driver fetches one value per actor, however many rounds and packets there are."""
    engine, fetched, collect = start(experiment("d_soba")), [], RayEngine._collect

    def spy(engine: RayEngine, refs: list[Any], **more: Any) -> list[Any]:
        fetched.append(collect(engine, refs, **more))
        return fetched[-1]

    try:
        engine.advance(1)
        monkeypatch.setattr(RayEngine, "_collect", spy)
        engine.advance(2, 40)
        assert fetched == [[Reached(40, Progress(1, is_open=False), 1)] * 2]
    finally:
        engine.close()


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_packing_does_not_matter(ray: Any, tmp_path: Path, rows: int) -> None:
    """One actor per node, uneven packing, one actor for all: the same run to float tolerance, the same bytes."""
    packed = run(experiment(engine={"name": "ray", "nodes_per_actor": rows}), tmp_path / "ray")
    local = run(experiment(engine={"name": "local"}), tmp_path / "local")
    np.testing.assert_allclose(packed.state["x"], local.state["x"], rtol=1e-10, atol=1e-12)
    assert list(packed.history["bytes_links"]) == list(local.history["bytes_links"])


# ---- packets per round -----------------------------------------------------------------------------------------------

UNDECLARED = '''
from dbo.algorithms.api import algorithm, mix
from dbo.algorithms.methods import c2dfb

FUNCTIONS = {"config": c2dfb.Config, "state": c2dfb.State, "init": c2dfb.init}

@algorithm("undeclared", **FUNCTIONS)
async def undeclared(st, shard, cfg):
    """The packets of C²DFB, not declared."""
    return await c2dfb.c2dfb.round(st, shard, cfg)

@algorithm("varying", **FUNCTIONS)
async def varying(st, shard, cfg):
    """Two more packets in every second round."""
    for _ in range(2 * (int(st.t[0, 0]) % 2)):
        await mix(st.x)
    return await c2dfb.c2dfb.round(st, shard, cfg)

@algorithm("disagreeing", **FUNCTIONS)
async def disagreeing(st, shard, cfg):
    """One more packet in round 3, on the block of node 2 only."""
    state = await c2dfb.c2dfb.round(st, shard, cfg)
    if int(st.t[0, 0]) == 2 and 2 in shard.ids:
        await mix(st.x)
    return state

@algorithm("wrong", packets=lambda cfg: 3, **FUNCTIONS)
async def wrong(st, shard, cfg):
    """More packets than declared."""
    return await c2dfb.c2dfb.round(st, shard, cfg)
'''


@pytest.fixture(scope="module")      # reused actors would refuse the same names from another file
def plugins(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Algorithms that do not declare the number of their packets."""
    plugin = tmp_path_factory.mktemp("plugins") / "undeclared.py"
    plugin.write_text(UNDECLARED)
    return [str(plugin)]


@pytest.mark.parametrize("name", ["undeclared", "varying"])
def test_undeclared_packets_equal_local(ray: Any, tmp_path: Path, plugins: list[str], name: str) -> None:
    """Ray finds out the number of packets, also if it varies by round: the result is that of the local engine."""
    assert_ray_equals_local(tmp_path, name, rounds=5, plugins=plugins)


def test_number_of_packets_is_learnt_in_the_first_round(
    ray: Any, plugins: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first round waits after every step, later ones once. After a restore to the start it is learnt again."""
    engine, fetched, collect = start(experiment("undeclared", plugins=plugins, engine=STORE)), [], RayEngine._collect

    def spy(engine: RayEngine, refs: list[Any], **more: Any) -> list[Any]:
        fetched.append(collect(engine, refs, **more))
        return fetched[-1]

    def waits(round_: int) -> int:
        fetched.clear()
        engine.advance(round_)
        assert all(isinstance(value, Progress) for values in fetched for value in values)
        return len(fetched)

    try:
        monkeypatch.setattr(RayEngine, "_collect", spy)
        every_step = int(experiment().parts.algorithm.packets(experiment().parts.config)) + 1
        assert [waits(round_) for round_ in (1, 2, 3)] == [every_step, 1, 1]
        engine.restore(None)
        assert waits(1) == every_step
    finally:
        engine.close()


@pytest.mark.parametrize("eval_every", [1, 6])
@pytest.mark.parametrize("transport", ["auto", "object_store"])
def test_disagreement_about_packets_is_an_error(
    ray: Any, tmp_path: Path, plugins: list[str], transport: str, eval_every: int
) -> None:
    """A block with one more packet than the others, in the middle of a call or not: the error names the blocks."""
    message = r"blocks \[0, 1\] finished after 16 packets, blocks \[2, 3\] did not"
    engine = {**STORE, "transport": transport}
    with pytest.raises(ProtocolError, match=message):
        run(experiment("disagreeing", plugins=plugins, engine=engine, eval_every=eval_every), tmp_path / "run")
    run(experiment(), tmp_path / "next")      # the actors are in order again


def test_wrong_declaration_is_reported(ray: Any, tmp_path: Path, plugins: list[str]) -> None:
    """More packets than declared: the round runs to its end, and the error has both numbers."""
    with pytest.raises(NodeFailure, match=r"wrong declares 3 packets per round and sent \d+"):
        run(experiment("wrong", plugins=plugins), tmp_path / "run")


def started_actor(tiny: Any, ids: range, epoch: int = 0) -> BlockActor:
    setup = tiny()
    prepared, actor = prepare(setup), BlockActor()
    actor.assign(prepared.problem, setup.to_dict(), prepared.network, ids, epoch, RaySettings())
    return actor


def test_step_after_the_end_of_a_round_does_nothing(tiny: Any) -> None:
    """It returns None and changes no state; so does a step for which a neighbour has no packets left."""
    whole = started_actor(tiny, range(4))
    number, payload = 0, whole.step(0, 1, 0)
    while payload is not None:
        number += 1
        payload = whole.step(0, 1, number)
    before = whole.snapshot()
    assert whole.report_step(0, 1, number + 1) == (None, Progress(number, is_open=False))
    after = whole.snapshot()
    assert all(np.array_equal(after[name], before[name]) for name in before)
    half = started_actor(tiny, range(2))
    assert half.step(0, 1, 0) is not None
    assert half.report_step(0, 1, 1, None) == (None, Progress(1, is_open=True))


def test_late_call_of_an_old_epoch_changes_nothing(tiny: Any) -> None:
    """A stale step is refused before it begins a round, so the next one can begin."""
    actor = started_actor(tiny, range(4), epoch=3)
    with pytest.raises(RuntimeError, match="epoch 2 reached a block of epoch 3"):
        actor.step(2, 1, 0)
    assert actor.step(3, 1, 0) is not None


# ---- failures and recovery -------------------------------------------------------------------------------------------


def test_recovery_without_rollback_is_caught(
    ray: Any, same: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: if only the lost block were rolled back, the result would differ, and the comparison detects it."""
    calm = run(experiment(rounds=8), tmp_path / "calm")
    advance, seen = RayEngine.advance, []

    def reset_one_block(engine: RayEngine, round_: int, last: int | None = None) -> None:
        advance(engine, round_, last)
        if round_ == 5 and not seen:
            seen.append(round_)
            engine._collect([engine._actors[0].restore.remote(None, engine._epoch)])

    monkeypatch.setattr(RayEngine, "advance", reset_one_block)
    hit = run(experiment(rounds=8), tmp_path / "hit")
    assert not same(calm.folder, hit.folder)


def test_death_that_shows_first_in_a_neighbour_is_recovered(
    ray: Any, same: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The survivors' steps fail first, without the dead block's packets: still a lost process, not a node failure."""
    setup = experiment(rounds=5)
    calm = run(setup, tmp_path / "calm")
    collect, advance, killed = RayEngine._collect, RayEngine.advance, []

    def collect_late(engine: RayEngine, refs: list[Any], **more: Any) -> list[Any]:
        if killed == ["now"]:
            killed.append("collected")
            time.sleep(1)      # by then the neighbours' failures have arrived as well
        return collect(engine, refs, **more)

    def kill_in_round_4(engine: RayEngine, round_: int, last: int | None = None) -> None:
        if round_ == 4 and not killed:
            pid = engine.pids()[-1]
            killed.append("now")
            os.kill(pid, signal.SIGKILL)
        advance(engine, round_, last)

    monkeypatch.setattr(RayEngine, "_collect", collect_late)
    monkeypatch.setattr(RayEngine, "advance", kill_in_round_4)
    survived = run(setup, tmp_path / "hit")
    assert len(survived.summary["recoveries"]) >= 1
    assert same(calm.folder, survived.folder)


OWN_METHODS: dict[str, dict[str, Any]] = {
    "c2dfb_lead": {"name": "c2dfb_lead", "inner_steps": 3},
    "c2dfb_central": {"name": "c2dfb_central", "inner_steps": 3, "eta_in": 0.3},
    "lean": {"name": "lean", "inner_steps": 3, "damping": 0.3, "momentum": 0.2, "ratio_z": 0.3},
    "c2dfb switches": {
        "name": "c2dfb", "inner_steps": 3, "eta_y": 0.3, "eta_z": 0.2, "gamma_in": "auto",
        "compressor_x": {"name": "top_k", "ratio": 0.5, "bits": 4},
    },
}


@pytest.mark.parametrize("label", OWN_METHODS)
def test_own_methods_survive_a_kill_with_the_same_bits(
    ray: Any, same: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: str
) -> None:
    """A worker that is killed in round 4 leaves the bits of a calm run; both equal the local engine."""
    changes = {"algorithm": OWN_METHODS[label]}
    assert_ray_equals_local(tmp_path, OWN_METHODS[label]["name"], **changes)
    advance, killed = RayEngine.advance, []

    def kill_in_round_4(engine: RayEngine, round_: int, last: int | None = None) -> None:
        if round_ == 4 and not killed:
            killed.append(engine.pids()[-1])
            os.kill(killed[0], signal.SIGKILL)
        advance(engine, round_, last)

    monkeypatch.setattr(RayEngine, "advance", kill_in_round_4)
    survived = run(experiment(**changes), tmp_path / "hit")
    assert len(survived.summary["recoveries"]) >= 1
    assert same(tmp_path / "ray", survived.folder)


def test_recoveries_are_bounded(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After max_recoveries the run fails with that reason, and keeps its checkpoint."""
    advance = RayEngine.advance

    def kill_in_round_5(engine: RayEngine, round_: int, last: int | None = None) -> None:
        if round_ == 5:
            os.kill(engine.pids()[0], signal.SIGKILL)
        advance(engine, round_, last)

    monkeypatch.setattr(RayEngine, "advance", kill_in_round_5)
    with pytest.raises(RunError, match="max_recoveries = 1 is used up"):
        run(experiment(engine={"name": "ray", "nodes_per_actor": 2, "max_recoveries": 1}), tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_bytes())
    assert summary["status"] == "failed"
    assert len(summary["recoveries"]) == 1
    assert (tmp_path / "run" / "checkpoints" / "round-00000003").exists()


def test_exception_in_a_node_is_reported_once(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has nodes, round, step and the original traceback; all actors are ended."""
    plugin = tmp_path / "faulty.py"
    plugin.write_text(
        "from dbo.algorithms.api import algorithm\n"
        "from dbo.algorithms.methods import c2dfb\n"
        "@algorithm('faulty', config=c2dfb.Config, state=c2dfb.State, init=c2dfb.init, packets=lambda c: 16)\n"
        "async def faulty(st, shard, cfg):\n"
        "    '''Raises in round 3 on node 2.'''\n"
        "    if int(st.t[0, 0]) == 2 and 2 in shard.ids:\n"
        "        raise ArithmeticError('two and two make five')\n"
        "    return await c2dfb.c2dfb.round(st, shard, cfg)\n"
    )
    broken = experiment("faulty", plugins=[str(plugin)])
    pids: list[int] = []
    begin = RayEngine._start_actors
    monkeypatch.setattr(RayEngine, "_start_actors", lambda engine: (begin(engine), pids.extend(engine.pids())))
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


def test_too_large_a_request_is_reported(ray: Any, tmp_path: Path) -> None:
    """If the cluster cannot place the actors, the error has what is missing, after a bounded time."""
    greedy = experiment(engine={
        "name": "ray", "nodes_per_actor": 1, "cpus_per_node": 64.0, "placement_timeout": 1.0,
    })
    begin = time.monotonic()
    with pytest.raises(RunError, match=r"CPU: needed 256 \(64 per actor\), cluster has 2"):
        run(greedy, tmp_path / "run")
    assert time.monotonic() - begin < 20


# ---- resources -------------------------------------------------------------------------------------------------------


def test_payloads_do_not_pile_up(ray: Any) -> None:
    """References to packets are dropped when they have been used: the object store does not grow."""
    engine = start(experiment(
        task={"name": "quadratic", "dim_x": 4, "dim_y": 400}, algorithm={"name": "dsgda_gt"}, engine=STORE
    ))
    try:
        used = []
        for round_ in range(1, 121):
            engine.advance(round_)
            if round_ % 40 == 0:
                used.append(ray.available_resources().get("object_store_memory", 0.0))
        assert abs(used[-1] - used[0]) < 2e6
    finally:
        engine.close()


def test_a_solve_keeps_no_rows_and_sends_a_point_once(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The solve for ψ frees the rows of the evaluation; x and y of its point are sent once, the factor every time."""
    engine = start(experiment())
    try:
        x, y = np.zeros(4), np.zeros(8)
        before = {name: engine.rows(name) for name in ("x", "y")}
        errors, counters, sent = engine.errors(), engine.counters(), []
        put = engine._put
        monkeypatch.setattr(engine, "_put", lambda value: (sent.append(value), put(value))[1])
        for point in (y, y, y + 1):
            engine.mean_oracle("g_yy", x, point, np.ones(8))
        assert [value.size for value in sent] == [4, 8, 8, 8, 8, 8]      # x, y and three factors, another y
        assert engine._views is not None
        assert not any(view.rows or view.errors.means for view in engine._views)
        assert (engine.errors(), engine.counters()) == (errors, counters)
        for name, rows in before.items():
            np.testing.assert_array_equal(engine.rows(name), rows)
        engine.advance(1)
        assert not engine._point
    finally:
        engine.close()


@pytest.mark.usefixtures("ray")
def test_tests_that_share_the_cluster_stay_in_one_process(request: pytest.FixtureRequest) -> None:
    """If tests run in several processes: each would start a cluster of its own."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        assert request.node.nodeid.endswith("@ray")


def test_packing_follows_the_resources() -> None:
    """auto: one actor per node if there are CPUs (or GPU shares), otherwise consecutive nodes share one."""

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
    assert pack_nodes(RaySettings(nodes_per_actor=2), Cluster(CPU=1), 4, has_server=True) == [[0, 1], [2, 3], [4]]
    assert len(pack_nodes(RaySettings(cpus_per_node=4), Cluster(CPU=16), 10, has_server=True)) == 4


def test_resource_requests() -> None:
    """GPU shares add up per row and are integers above 1; without a reservation almost no CPU is requested."""
    assert bundle_for(RaySettings(), rows=5) == {"CPU": 0.01}
    assert bundle_for(RaySettings(cpus_per_node=2, nodes_per_actor=3), rows=3) == {"CPU": 6}
    assert bundle_for(RaySettings(gpus_per_node=0.25, nodes_per_actor=2), rows=2)["GPU"] == 0.5
    assert bundle_for(RaySettings(gpus_per_node=0.25, nodes_per_actor=6), rows=6)["GPU"] == 2
    packed = RaySettings(gpus_per_node=0.5, cpus_per_node=4)
    assert bundle_for(packed, rows=3) == {"CPU": 4, "GPU": 0.5}      # packed by auto: they share one reservation


def test_single_machine_reference_runs_in_one_actor(ray: Any) -> None:
    """An algorithm on pooled data is one row in one actor and sends nothing."""
    setup = experiment("f2ba")
    parts, problem = setup.parts, pool_nodes(prepare(setup).problem)
    engine = start_engine(
        RaySettings(), RunSpec(parts.algorithm, parts.config, problem, single_node(), setup.to_dict()))
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
    """A cluster that dbo starts listens on loopback only, needs a token, and has no dashboard."""
    assert os.environ["RAY_AUTH_MODE"] == "token"
    context = ray.get_runtime_context()
    assert context.gcs_address.startswith("127.0.0.1:")
    assert not ray._private.worker.global_worker.node.webui_url
    assert {node["NodeManagerAddress"] for node in ray.nodes()} == {"127.0.0.1"}


def test_driver_never_fetches_a_payload(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver passes packets on as references; of a round it fetches only the blocks' progress."""
    fetched: list[Any] = []
    get = ray.get

    def spy(refs: Any, **more: Any) -> Any:
        fetched.append(get(refs, **more))
        return fetched[-1]

    monkeypatch.setattr(ray, "get", spy)
    engine = start(experiment(engine=STORE))
    fetched.clear()
    engine.advance(1)
    of_round = list(fetched)
    packets = engine._packets
    engine.close()
    assert of_round == [[Progress(packets, is_open=False)] * 2]


def test_short_run_imports_no_heavy_library(tmp_path: Path) -> None:
    """Before the first round of the README's example: no Ray, torch, MLflow or plotting library is imported."""
    code = (
        "import sys, dbo\n"
        "from dbo.platform.engine.local import LocalEngine\n"
        "heavy, seen, advance = {'ray', 'torch', 'mlflow', 'plotly', 'matplotlib'}, [], LocalEngine.advance\n"
        "def spy(self, first, last=None):\n"
        "    seen.append(heavy & sys.modules.keys())\n"
        "    advance(self, first, last)\n"
        "LocalEngine.advance = spy\n"
        "dbo.run(algorithm='c2dfb', task='coefficient_tuning', nodes=10, topology='ring', rounds=2, "
        f"out={str(tmp_path / 'r')!r})\n"
        "assert seen and seen[0] == set(), seen\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
