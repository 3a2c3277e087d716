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
from dbo.platform.engine.placement import waiting_room
from dbo.platform.runs.run_folder import CLOCKS, RunFolder, read_events, read_metrics
from dbo.platform.runs.runner import run
from dbo.sweeps import plan, tune_runner
from dbo.sweeps import runner as sweeping
from dbo.sweeps.grid import Cells
from dbo.sweeps.live_table import Board
from dbo.sweeps.tune_runner import fair_share

pytestmark = pytest.mark.ray
Sheet = Callable[..., Path]
Command = Callable[..., Any]


FRAGILE = '''
from dataclasses import dataclass
from typing import Any
from dbo.algorithms.gossip import mix
from dbo.algorithms.registry import algorithm

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
    """Breaks when it steps too far."""
    x, = await mix(x=st.x)
    if cfg.step > 1:
        raise ArithmeticError("too far")
    return State(x, st.y, st.direction)
'''


def group(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "group.json").read_bytes()))


def values(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k not in CLOCKS} for r in read_metrics(folder / "metrics.jsonl")]


def starts(out: Path) -> dict[str, int]:
    """How often each cell was begun or gone on with."""
    files = out.glob("cells/*/events.jsonl")
    return {file.parent.name: sum(event["kind"] == "started" for event in read_events(file)) for file in files}


@pytest.mark.usefixtures("ray")
def test_a_grid_its_cache_and_its_extension(sheet: Sheet, dbo: Command, tmp_path: Path) -> None:
    """Four cells like single runs; a second time nothing is run; one seed more, and two cells are."""
    out, file = tmp_path / "out", sheet()
    done = dbo("sweep", file, "--out", out)
    assert done.code == 0, done.out + done.err
    assert "quick: 4 cells; about" in done.out
    assert "MB between nodes" in done.out
    assert "[4/4 done" in done.out
    assert f"after sweep {out}" in done.out.replace("\n", "")
    about = group(out)
    assert (about["kind"], about["status"], about["target"]) == ("sweep", "finished", "hypergradient_norm=0.5")
    assert about["axes"] == {"algorithm.inner_steps": [1, 2], "seed": [0, 1]}
    assert starts(out) == {Path(member).name: 1 for member in about["members"]}
    cell = out / about["members"][3]
    alone = run(Experiment.read(cell / "experiment.yaml"), tmp_path / "alone")
    assert values(cell) == values(alone.folder)
    assert alone.summary["run_key"].startswith(cell.name)
    assert list(pd.read_csv(out / "summary.csv")["cells"]) == [2, 2]
    assert not (out / ".tune").exists()

    again = dbo("sweep", file, "--out", out, "--resume")
    assert again.code == 0
    assert "4 cells, 4 of them done already" in again.out
    assert set(starts(out).values()) == {1}

    more = dbo("sweep", file, "axes.seed=[0,1,2]", "--out", out)
    assert more.code == 0
    assert "6 cells, 4 of them done already" in more.out
    assert list(starts(out).values()) == [1] * 6
    assert group(out)["key"] == about["key"]
    assert group(out)["members"][:4] == about["members"]
    assert dbo("sweep", file, "rounds=7", "--out", out).code == 2


@pytest.mark.usefixtures("ray")
def test_a_failure_ends_the_cell_and_not_the_sweep(sheet: Sheet, dbo: Command, tmp_path: Path) -> None:
    """An exception in one cell: exit 1 with its first error; one that diverged is a result. Both are in the tables."""
    out = tmp_path / "out"
    (tmp_path / "fragile.py").write_text(FRAGILE)
    done = dbo("sweep", sheet(axes={"algorithm.step": [0.1, 2.0]}), "algorithm={name: fragile}", "plugins=[fragile.py]",
               "--out", out)
    assert done.code == 1, done.out + done.err
    assert "1 of 2 cells failed; step=2" in done.err
    assert "too far" in done.err
    table = pd.read_csv(out / "cells.csv")
    assert list(table["status"]) == ["finished", "failed"]
    assert "too far" in table["error"].iloc[1]
    assert group(out)["status"] == "failed"

    wild = dbo("sweep", sheet(axes={"algorithm.eta_in": [0.3, 1e6]}), "rounds=60", "--out", tmp_path / "wild")
    assert wild.code == 0, wild.out + wild.err
    assert list(pd.read_csv(tmp_path / "wild" / "cells.csv")["status"]) == ["finished", "diverged"]
    assert "diverged" in wild.out


def test_cells_with_actors_never_wait_for_each_other(ray: Any, sheet: Sheet, dbo: Command, tmp_path: Path) -> None:
    """Two cells on the Ray engine that each need more than half of the cluster: one after the other, in the trials' own
    placement groups; results as in one process. Actors of this process that wait for a next run make room, and a run of
    somebody else's, which asks for next to nothing, fits beside them."""
    with waiting_room():
        one = {**plan.read(sheet(), []).experiment, "rounds": 1, "engine": {"name": "ray"}}
        run(Experiment(**one), tmp_path / "before")
        beside = ray.util.placement_group([{"CPU": 0.01}])
        assert beside.wait(30)
        try:
            _cells_with_actors(ray, sheet, dbo, tmp_path, set(ray.util.placement_group_table()))
        finally:
            ray.util.remove_placement_group(beside)


def _cells_with_actors(ray: Any, sheet: Sheet, dbo: Command, tmp_path: Path, others: set[str]) -> None:
    seen: set[str] = set()
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.2):
            for name, row in ray.util.placement_group_table().items():
                if row["state"] == "CREATED" and name not in others:
                    seen.add(f"{sorted(bundle.get('CPU', 0) for bundle in row['bundles'].values())}")

    watcher = threading.Thread(target=look)
    watcher.start()
    out = tmp_path / "out"
    try:
        done = dbo("sweep", sheet(), "axes.seed=[0]", "engine={name: ray, nodes_per_actor: 2}", "--out", out)
    finally:
        ended.set()
        watcher.join()
    assert done.code == 0, done.out + done.err
    share = math.floor(95 * fair_share([ray.cluster_resources()["CPU"]], 2)) / 100
    assert seen == {f"[{share}, {share}]"}          # the trials' groups, and no others for the actors
    for member in group(out)["members"]:
        settings = Experiment.read(out / member / "experiment.yaml").resolved()
        inside = Experiment(**{**settings, "engine": {"name": "local"}})
        alone = run(inside, tmp_path / Path(member).name)
        last, other = values(out / member)[-1], values(alone.folder)[-1]
        assert last["upper_loss"] == pytest.approx(other["upper_loss"], rel=1e-10)


def test_a_sweep_without_room_says_what_it_waits_for(
    ray: Any, sheet: Sheet, dbo: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else holds the whole cluster for some seconds: told, and then the cells run."""
    monkeypatch.setattr(tune_runner, "_PATIENCE", 0.5)
    held = ray.util.placement_group([{"CPU": ray.cluster_resources()["CPU"]}])
    assert held.wait(60)
    release = threading.Timer(5, ray.util.remove_placement_group, [held])
    release.start()
    done = dbo("sweep", sheet(), "axes.seed=[0]", "--out", tmp_path / "out")
    release.join()
    assert done.code == 0, done.out + done.err
    assert "waiting for room on the cluster: CPU: a cell needs 1, free are 0 of" in done.out
    assert "[2/2 done" in done.out


@pytest.mark.usefixtures("ray")
def test_searches(sheet: Sheet, dbo: Command, tmp_path: Path) -> None:
    """TPE draws within its ranges, goes on where it was, and tells the best first; ASHA stops who falls behind."""
    out = tmp_path / "out"
    axes = {"algorithm.eta_in": {"low": 0.001, "high": 0.5, "log": True}, "topology": [{"name": "ring"}]}
    file = sheet(axes=axes, mode="tpe", trials=3)
    done = dbo("sweep", file, "--out", out)
    assert done.code == 0, done.out + done.err
    first = (out / "search.jsonl").read_text()
    assert len(first.splitlines()) == len(group(out)["members"]) == 3
    assert dbo("sweep", file, "trials=5", "--out", out).code == 0
    assert (out / "search.jsonl").read_text().startswith(first)
    assert list(starts(out).values()) == [1] * 5
    table = pd.read_csv(out / "cells.csv")
    assert table["algorithm.eta_in"].between(0.001, 0.5).all()

    axes = {"algorithm.eta_in": [0.3, 0.2, 0.001, 0.0005, 0.0002, 0.0001]}
    stop = {"scheduler": "asha", "grace": 2, "factor": 3}
    done = dbo("sweep", sheet(axes=axes, stop=stop), "rounds=60", "--out", tmp_path / "asha")
    assert done.code == 0, done.out + done.err
    table = pd.read_csv(tmp_path / "asha" / "cells.csv")
    assert set(table["status"]) == {"finished", "stopped"}
    assert (table.loc[table["status"] == "stopped", "rounds"] < 60).all()
    again = dbo("sweep", sheet(axes=axes, stop=stop), "rounds=60", "--out", tmp_path / "asha")
    assert "6 of them done already" in again.out


def test_one_folder_one_sweep(sheet: Sheet, dbo: Command, tmp_path: Path) -> None:
    """While one sweep holds the folder another is refused, and so is a folder with a run in it."""
    out = tmp_path / "out"
    cells = Cells(plan.read(sheet()))
    with sweeping.Folder(out, cells, "dbo sweep quick.yaml"):
        assert group(out)["status"] == "running"
        done = dbo("sweep", sheet(), "--out", out)
        assert done.code == 2
        assert "is in use" in done.err
    run(cells.base, tmp_path / "run")
    done = dbo("sweep", sheet(), "--out", tmp_path / "run")
    assert done.code == 2
    assert "holds a run" in done.err


def test_dry_run(sheet: Sheet, dbo: Command, tmp_path: Path) -> None:
    """Cells and estimate, nothing written."""
    done = dbo("sweep", sheet(), "--dry-run", "--out", tmp_path / "out")
    assert done.code == 0
    assert "inner_steps=1 seed=0" in done.out
    assert "to run" in done.out
    assert not (tmp_path / "out").exists()


def test_an_estimate_counts_the_bytes(sheet: Sheet, tmp_path: Path) -> None:
    """Top-k messages of fixed length: the bytes of two rounds tell those of all."""
    from dbo.sweeps.estimate import estimate

    cells = Cells(plan.read(sheet())).fixed
    told = estimate(cells)
    for cell in cells:
        real = run(cell.experiment, tmp_path / cell.name).history.iloc[-1]["bytes_links"]
        assert told[cell.name].bytes_links == pytest.approx(real, rel=0.02)


def test_an_estimate_of_cells_that_were_not_tried(sheet: Sheet) -> None:
    """One cell, with the fewest inner steps, has been tried when time is up: others are reckoned by their packets."""
    from dbo.sweeps.estimate import estimate

    cells = Cells(plan.read(sheet(axes={"algorithm.inner_steps": [1, 7, 31]}))).fixed
    told = estimate(cells, budget=-1)
    one, seven, many = (told[cell.name] for cell in cells)
    assert seven.bytes_links == pytest.approx(4 * one.bytes_links)
    assert many.bytes_links == pytest.approx(16 * one.bytes_links)
    assert one.seconds < seven.seconds < many.seconds


def test_shares_of_cores() -> None:
    """The largest share of which the machines hold enough: whole cores first, and never across machines."""
    assert fair_share([8.0], 4) == 1.0
    assert fair_share([2.0], 2) == 1.0
    assert fair_share([2.0], 4) == 0.5
    assert fair_share([1.0, 1.0], 3) == 0.5
    assert fair_share([4.0, 4.0], 10) == 0.8
    assert fair_share([2.0], 1000) == 0.01


def test_a_cell_takes_a_core_for_each_of_its_threads(ray: Any, sheet: Sheet, tmp_path: Path) -> None:
    """Two threads, two cores, however many there are beyond; more threads than any machine has cores: all of one."""
    cores = ray.cluster_resources()["CPU"]
    for threads, taken in ((1, 1.0), (2, min(2.0, cores)), (1000, cores)):
        cells = sweeping.plan(plan.read(sheet(), [f"engine={{name: local, threads: {threads}}}"]))
        driver = tune_runner.Driver(cells, tmp_path, Board(cells.sweep, 1, 0, lambda: None, None), lambda: None)
        assert driver.bundles(cells.fixed[0]) == [{"CPU": taken}]
        assert sweeping.slots(cells) == max(1, int(cores // threads))


def test_a_killed_driver_loses_nothing(ray: Any, tmp_path: Path) -> None:
    """Twelve cells, SIGKILL to the driver at two random moments, the same command again: all of them, none twice."""
    report = sweep_kills.torture(
        tmp_path, kills=2, seed=1, rounds=200, environment={"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    )
    assert len(report.killed_at) == 2
    assert report.good, report


def test_two_sweeps_on_one_store(ray: Any, sheet: Sheet, tmp_path: Path) -> None:
    """Started at the same time, with the same MLflow file: both end, with a parent and four children each."""
    import mlflow

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    sheet()
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "dbo.platform.cli", "sweep", "quick.yaml", f"name={name}",
             f"tracking.uri={uri}", "--quiet", "--out", name],
            cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) for name in ("one", "two")
    ]
    for process in both:
        told = process.communicate(timeout=400)[0]
        assert process.returncode == 0, told
    client = mlflow.MlflowClient(tracking_uri=uri)
    runs = [r for e in client.search_experiments() for r in client.search_runs([e.experiment_id])]
    parents = {r.info.run_id for r in runs if "dbo.group_key" in r.data.tags}
    children = [r.data.tags["mlflow.parentRunId"] for r in runs if "mlflow.parentRunId" in r.data.tags]
    assert len(parents) == 2
    assert sorted(children.count(parent) for parent in parents) == [4, 4]
    assert {r.info.status for r in runs} == {"FINISHED"}


def test_a_held_folder_is_waited_for(sheet: Sheet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that outlives its driver still holds its cell: the next one waits, for a bounded time."""
    from dbo.sweeps import trial_worker

    cell = Cells(plan.read(sheet())).fixed[0]
    held = RunFolder(cell.folder(tmp_path))
    held.acquire()
    orders = trial_worker.Orders(
        out=str(tmp_path), start=".", settings={}, base={}, axes={}, metric="upper_loss", worst=1e30, chatty=False)
    told: list[dict[str, Any]] = []
    timer = threading.Timer(1.0, held.release)
    timer.start()
    trial_worker.conduct(cell.experiment.resolved(), orders, told.append)
    assert told[-1]["status"] == "finished"
    monkeypatch.setattr(trial_worker, "_HELD", 0.2)
    other = Cells(plan.read(sheet())).fixed[1]
    held = RunFolder(other.folder(tmp_path))
    held.acquire()
    trial_worker.conduct(other.experiment.resolved(), orders, told.append)
    assert told[-1]["status"] == "failed"
    assert "in use" in told[-1]["error"]
    held.release()
