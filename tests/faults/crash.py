"""Test 1, actors: SIGKILL in every phase of a round, and an actor that hangs."""

import json
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.placement import reuse_actors
from dbo.platform.engine.ray_engine import RayEngine
from dbo.platform.engine.ray_session import connect
from dbo.platform.runs.runner import run
from tests.faults.row import Row, count_evaluations, hash_run

PHASES = ("begin", "compute", "compress", "send", "receive", "mix", "checkpoint")
TOPOLOGIES = ("ring", "two_hop", "erdos_renyi")
ALGORITHMS: dict[str, dict[str, Any]] = {
    "c2dfb": {"inner_steps": 4, "eta_in": 0.3, "eta_out": 0.1, "gamma_in": 0.3},
    "madsbo": {"inner_steps": 4, "higp_steps": 8, "eta_x": 0.3, "eta_y": 0.4, "eta_z": 0.15},
    "mdbo": {"eta": 0.3, "beta_x": 0.7, "beta_y": 0.7, "alpha_x": 2.0, "alpha_y": 2.0, "lipschitz": 1.2},
}
SETTINGS: dict[str, Any] = {
    "nodes": 6, "dtype": "float64", "task": {"name": "quadratic", "dim_x": 4, "dim_y": 8}, "rounds": 10,
    "checkpoint_every": 4, "engine": {"name": "ray", "nodes_per_actor": 3}, "tracking": {"uri": "off"},
}


def actors(short: bool, sabotage: bool = False) -> Row:
    """Every phase × algorithm × topology. Sabotage: only the dead actors are rolled back."""
    row = Row("actors", "all bit-identical")
    connect(None)
    names = ("c2dfb",) if short else tuple(ALGORITHMS)
    with tempfile.TemporaryDirectory() as folder_name, reuse_actors():
        root = Path(folder_name)
        plugin = root / "kills.py"
        shutil.copy(Path(__file__).with_name("kill_plugin.py"), plugin)
        for name in names:
            for topology in ("ring",) if short else TOPOLOGIES:
                experiment = Experiment(
                    **SETTINGS, algorithm={"name": name, **ALGORITHMS[name]}, topology={"name": topology},
                    plugins=[str(plugin)],
                )
                calm = run(experiment, root / f"calm-{name}-{topology}")
                for phase in ("compute", "checkpoint") if short else PHASES:
                    folder = root / f"{name}-{topology}-{phase}"
                    round_ = 8 if phase == "checkpoint" else 6
                    plugin.with_name("trigger.json").write_text(json.dumps({"phase": phase, "round": round_}))
                    with _partial_rollback() if sabotage else mock.MagicMock():
                        hit = run(experiment, folder)
                    killed = not plugin.with_name("trigger.json").exists()
                    plugin.with_name("trigger.json").unlink(missing_ok=True)
                    row.seconds += [recovery["seconds"] for recovery in hit.summary["recoveries"]]
                    count_evaluations(row, folder, experiment.rounds + 1)
                    same = hash_run(folder) == hash_run(calm.folder)
                    row.count(killed and same, f"{name}, {topology}, {phase}: killed={killed}, same={same}")
        if not sabotage:
            _hang(row, root)
    return row


def _partial_rollback() -> Any:
    """Let survivors keep the state of the round that was abandoned."""
    restore = RayEngine.restore

    def restore_partly(engine: RayEngine, blocks: Any) -> None:
        if blocks is None:
            restore(engine, blocks)
            return
        now = engine._ray.get([actor.snapshot.remote() for actor in engine._actors])
        survivors = [old if (old["oracles"] == 0).all() else new for old, new in zip(blocks, now, strict=True)]
        restore(engine, [new if new["oracles"].any() else old for old, new in zip(blocks, survivors, strict=True)])

    return mock.patch.object(RayEngine, "restore", restore_partly)


def _hang(row: Row, root: Path) -> None:
    """Stop an actor instead of killing it: Ray reports nothing to the driver."""
    engine = {**SETTINGS["engine"], "step_timeout": 8.0}
    experiment = Experiment(**{**SETTINGS, "engine": engine}, algorithm={"name": "c2dfb", **ALGORITHMS["c2dfb"]})
    calm = run(experiment, root / "calm")
    stopped: list[int] = []
    advance = RayEngine.advance

    def stop_in_round_6(engine: RayEngine, round_: int, last: int | None = None) -> None:
        if round_ == 6 and not stopped:
            stopped.append(engine.pids()[0])
            os.kill(stopped[0], signal.SIGSTOP)
        advance(engine, round_, last)

    with mock.patch.object(RayEngine, "advance", stop_in_round_6):
        hit = run(experiment, root / "hung")
    row.seconds += [recovery["seconds"] for recovery in hit.summary["recoveries"]]
    row.count(bool(stopped) and hash_run(hit.folder) == hash_run(calm.folder), "a stopped actor: other bits")
