"""Sweeps on Ray Tune, end to end: cells in their folders, none run twice, failures kept to their cells."""

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tests.faults import sweep_kills

from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.placement import reuse_actors
from dbo.platform.runs.run_folder import read_events, read_metrics
from dbo.platform.runs.runner import run
from dbo.platform.runs.schema import CLOCKS
from dbo.sweeps import plan, runner, tune_runner
from dbo.sweeps.live_table import LiveTable

pytestmark = pytest.mark.ray
SweepFile = Callable[..., Path]
Command = Callable[..., Any]


FRAGILE = '''
from dataclasses import dataclass
from typing import Any
from dbo.algorithms.api import algorithm, mix

@dataclass(frozen=True, kw_only=True)
class Config:
    step: float = 0.1

@dataclass(frozen=True)
class State:
    x: Any
    y: Any
    direction: Any

def init(shard, cfg):
    return State(shard.x0, shard.y0, shard.x0)

@algorithm("fragile", config=Config, state=State, init=init, packets=lambda cfg: 1)
async def fragile(st, shard, cfg):
    """Raises if its step is too large."""
    x, = await mix(x=st.x)
    if cfg.step > 1:
        raise ArithmeticError("too far")
    return State(x, st.y, st.direction)
'''


def read_group(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "group.json").read_bytes()))


def read_values(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k not in CLOCKS} for r in read_metrics(folder / "metrics.jsonl")]


def count_starts(out: Path) -> dict[str, int]:
    """Return how often each cell was started or resumed."""
    files = out.glob("cells/*/events.jsonl")
    return {file.parent.name: sum(event.kind == "started" for event in read_events(file)) for file in files}


@pytest.mark.usefixtures("ray")
def test_a_grid_is_cached_and_can_be_extended(sweep_file: SweepFile, dbo: Command, tmp_path: Path) -> None:
    """Four cells, equal to single runs; the same command again runs nothing; with one more seed it runs two cells."""
    out, file = tmp_path / "out", sweep_file()
    done = dbo("sweep", file, "--out", out)
    assert done.code == 0, done.out + done.err
    assert "quick: 4 cells; about" in done.out
    assert "MB between nodes" in done.out
    assert "[4/4 done" in done.out
    assert f"after sweep {out}" in done.out.replace("\n", "")
    group = read_group(out)
    assert (group["kind"], group["status"], group["target"]) == ("sweep", "finished", "direction_norm=0.5")
    assert group["axes"] == {"algorithm.inner_steps": [1, 2], "seed": [0, 1]}
    assert count_starts(out) == {Path(member).name: 1 for member in group["members"]}
    cell = out / group["members"][3]
    alone = run(Experiment.read(cell / "experiment.yaml"), tmp_path / "alone")
    assert read_values(cell) == read_values(alone.folder)
    assert alone.summary["run_key"].startswith(cell.name)
    assert list(pd.read_csv(out / "summary.csv")["cells"]) == [2, 2]
    assert not (out / ".tune").exists()

    again = dbo("sweep", file, "--out", out, "--resume")
    assert again.code == 0
    assert "4 cells, 4 already done" in again.out
    assert set(count_starts(out).values()) == {1}

    more = dbo("sweep", file, "axes.seed=[0,1,2]", "--out", out)
    assert more.code == 0
    assert "6 cells, 4 already done" in more.out
    assert list(count_starts(out).values()) == [1] * 6
    assert read_group(out)["key"] == group["key"]
    assert read_group(out)["members"][:4] == group["members"]
    assert dbo("sweep", file, "rounds=7", "--out", out).code == 2


@pytest.mark.usefixtures("ray")
def test_a_failure_ends_the_cell_and_not_the_sweep(sweep_file: SweepFile, dbo: Command, tmp_path: Path) -> None:
    """An exception in one cell: exit 1 with its error. A cell that diverged is a result. Both are in the tables."""
    out = tmp_path / "out"
    (tmp_path / "fragile.py").write_text(FRAGILE)
    file = sweep_file(axes={"algorithm.step": [0.1, 2.0]})
    done = dbo("sweep", file, "algorithm={name: fragile}", "plugins=[fragile.py]", "--out", out)
    assert done.code == 1, done.out + done.err
    assert "1 of 2 cells failed; step=2" in done.err
    assert "too far" in done.err
    table = pd.read_csv(out / "cells.csv")
    assert list(table["status"]) == ["finished", "failed"]
    assert "too far" in table["error"].iloc[1]
    assert read_group(out)["status"] == "failed"

    wild = dbo("sweep", sweep_file(axes={"algorithm.eta_in": [0.3, 1e6]}), "rounds=60", "--out", tmp_path / "wild")
    assert wild.code == 0, wild.out + wild.err
    assert list(pd.read_csv(tmp_path / "wild" / "cells.csv")["status"]) == ["finished", "diverged"]
    assert "diverged" in wild.out


def test_cells_with_actors_never_wait_for_each_other(
    ray: Any, sweep_file: SweepFile, dbo: Command, tmp_path: Path
) -> None:
    """Two cells on the Ray engine that each need more than half of the cluster run one after the other, in the trials'
    own placement groups, with the results of the local engine. Idle actors of this process are released for them, and
    another user's run, which requests almost no CPU, fits beside them."""
    with reuse_actors():
        one = {**plan.read_sweep(sweep_file(), []).experiment, "rounds": 1, "engine": {"name": "ray"}}
        run(Experiment(**one), tmp_path / "before")
        beside = ray.util.placement_group([{"CPU": 0.01}])
        assert beside.wait(30)
        try:
            _check_cells_with_actors(ray, sweep_file, dbo, tmp_path, set(ray.util.placement_group_table()))
        finally:
            ray.util.remove_placement_group(beside)


def _check_cells_with_actors(
    ray: Any, sweep_file: SweepFile, dbo: Command, tmp_path: Path, others: set[str]
) -> None:
    groups: set[str] = set()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.2):
            for name, row in ray.util.placement_group_table().items():
                if row["state"] == "CREATED" and name not in others:
                    groups.add(f"{sorted(bundle.get('CPU', 0) for bundle in row['bundles'].values())}")

    watcher = threading.Thread(target=watch)
    watcher.start()
    out = tmp_path / "out"
    try:
        done = dbo("sweep", sweep_file(), "axes.seed=[0]", "engine={name: ray, nodes_per_actor: 2}", "--out", out)
    finally:
        ended.set()
        watcher.join()
    assert done.code == 0, done.out + done.err
    share = math.floor(95 * tune_runner.compute_fair_share([ray.cluster_resources()["CPU"]], 2)) / 100
    assert groups == {f"[{share}, {share}]"}          # those of the trials, and no others for the actors
    for member in read_group(out)["members"]:
        settings = Experiment.read(out / member / "experiment.yaml").to_dict()
        local = Experiment(**{**settings, "engine": {"name": "local"}})
        alone = run(local, tmp_path / Path(member).name)
        last, other = read_values(out / member)[-1], read_values(alone.folder)[-1]
        assert last["upper_loss"] == pytest.approx(other["upper_loss"], rel=1e-10)


def test_a_sweep_without_resources_reports_what_is_missing(
    ray: Any, sweep_file: SweepFile, dbo: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user takes the whole cluster for some seconds: it is reported, and then the cells run."""
    monkeypatch.setattr(tune_runner, "_IDLE_NOTICE_AFTER", 0.5)
    taken = ray.util.placement_group([{"CPU": ray.cluster_resources()["CPU"]}])
    assert taken.wait(60)
    release = threading.Timer(5, ray.util.remove_placement_group, [taken])
    release.start()
    done = dbo("sweep", sweep_file(), "axes.seed=[0]", "--out", tmp_path / "out")
    release.join()
    assert done.code == 0, done.out + done.err
    assert "or others use the cluster; CPU: a cell needs 1, free are 0 of" in done.out
    assert "[2/2 done" in done.out


@pytest.mark.usefixtures("ray")
def test_tpe_samples_within_its_ranges_and_can_be_extended(
    sweep_file: SweepFile, dbo: Command, tmp_path: Path
) -> None:
    """More trials in the same folder: the search keeps the cells that it has, and runs each once."""
    out = tmp_path / "out"
    axes = {"algorithm.eta_in": {"low": 0.001, "high": 0.5, "log": True}, "topology": [{"name": "ring"}]}
    file = sweep_file(axes=axes, mode="tpe", trials=3)
    done = dbo("sweep", file, "--out", out)
    assert done.code == 0, done.out + done.err
    first = (out / "search.jsonl").read_text()
    assert len(first.splitlines()) == len(read_group(out)["members"]) == 3
    assert dbo("sweep", file, "trials=5", "--out", out).code == 0
    assert (out / "search.jsonl").read_text().startswith(first)
    assert list(count_starts(out).values()) == [1] * 5
    table = pd.read_csv(out / "cells.csv")
    assert table["algorithm.eta_in"].between(0.001, 0.5).all()


@pytest.mark.usefixtures("ray")
def test_asha_stops_weak_cells(sweep_file: SweepFile, dbo: Command, tmp_path: Path) -> None:
    """Stopped cells are complete: the same command again does not run them."""
    file = sweep_file(
        axes={"algorithm.eta_in": [0.3, 0.2, 0.001, 0.0005, 0.0002, 0.0001]},
        stop={"scheduler": "asha", "grace": 2, "factor": 3},
    )
    done = dbo("sweep", file, "rounds=60", "--out", tmp_path / "asha")
    assert done.code == 0, done.out + done.err
    table = pd.read_csv(tmp_path / "asha" / "cells.csv")
    assert set(table["status"]) == {"finished", "stopped"}
    assert (table.loc[table["status"] == "stopped", "rounds"] < 60).all()
    again = dbo("sweep", file, "rounds=60", "--out", tmp_path / "asha")
    assert "6 already done" in again.out


def test_a_cell_takes_a_cpu_for_each_of_its_threads(ray: Any, sweep_file: SweepFile, tmp_path: Path) -> None:
    """Two threads take two CPUs; more threads than any machine has CPUs take all of one machine."""
    cpus = ray.cluster_resources()["CPU"]
    for threads, taken in ((1, 1.0), (2, min(2.0, cpus)), (1000, cpus)):
        grid = runner.build_grid(plan.read_sweep(sweep_file(), [f"engine={{name: local, threads: {threads}}}"]))
        table = LiveTable(grid.sweep, 1, 0, lambda: None, None)
        driver = tune_runner.TuneRunner(grid, tmp_path, table, lambda: None)
        assert driver.make_bundles(grid.cells[0]) == [{"CPU": taken}]
        assert runner.count_local_slots(grid) == max(1, int(cpus // threads))


@pytest.mark.slow
def test_a_killed_driver_loses_nothing(ray: Any, tmp_path: Path) -> None:
    """Twelve cells, SIGKILL to the driver at two random times, the same command again: every cell runs, none twice."""
    report = sweep_kills.run_and_kill(
        tmp_path, kills=2, seed=1, rounds=200, environment={"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    )
    assert len(report.killed_at) == 2
    assert report.ok, report


@pytest.mark.slow
def test_two_sweeps_can_share_an_mlflow_store(ray: Any, sweep_file: SweepFile, tmp_path: Path) -> None:
    """Started at the same time, with the same MLflow file: both finish, with a parent and four children each."""
    import mlflow

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    sweep_file()
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "dbo.platform.cli", "sweep", "quick.yaml", f"name={name}",
             f"tracking.uri={uri}", "--quiet", "--out", name],
            cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) for name in ("one", "two")
    ]
    for process in both:
        output = process.communicate(timeout=400)[0]
        assert process.returncode == 0, output
    client = mlflow.MlflowClient(tracking_uri=uri)
    runs = [r for e in client.search_experiments() for r in client.search_runs([e.experiment_id])]
    parents = {r.info.run_id for r in runs if "dbo.group_key" in r.data.tags}
    children = [r.data.tags["mlflow.parentRunId"] for r in runs if "mlflow.parentRunId" in r.data.tags]
    assert len(parents) == 2
    assert sorted(children.count(parent) for parent in parents) == [4, 4]
    assert {r.info.status for r in runs} == {"FINISHED"}
