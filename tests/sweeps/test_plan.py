"""A sweep file is checked to the last value before anything starts, and says which cells there are."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbo.platform.config import yaml_io
from dbo.platform.errors import InputError
from dbo.sweeps import plan
from dbo.sweeps.grid import Cells, shown

Sheet = Callable[..., Path]
Command = Callable[..., Any]


@pytest.mark.parametrize("name", plan.shipped())
def test_shipped_sweeps_are_valid(name: str) -> None:
    """Every sweep that comes along can be planned, without its data."""
    cells = Cells(plan.read(plan.find(name)), sized=False)
    assert len(cells.fixed) > 1


def test_the_papers_panels_are_shipped() -> None:
    """K, compression ratio and λ, on digits; newsgroups by an override."""
    for name, key in (("k", "algorithm.inner_steps"), ("ratio", "algorithm.compressor.ratio"),
                      ("lambda", "algorithm.lam")):
        sweep = plan.read(plan.find(f"sensitivity-{name}"))
        assert list(sweep.axes) == [key]
        assert len(sweep.axes[key]) == 6
        other = Cells(plan.read(plan.find(f"sensitivity-{name}"), ["task.dataset=newsgroups"]), sized=False)
        assert other.fixed[0].experiment.task["dataset"] == "newsgroups"


@pytest.mark.parametrize(("arguments", "says"), [
    (["rounds=0"], "rounds: 0 is not allowed"),
    (["mod=grid"], "did you mean 'mode'"),
    (["axes.algorithm.inner_step=[1]"], "algorithm.inner_step: unknown key, did you mean 'inner_steps'?"),
    (["axes.algorithm.inner_steps=[1,0]"], "algorithm.inner_steps: 0 is not allowed"),
    (["axes.algorithm.inner_steps=3"], "axes.algorithm.inner_steps: 3 is not allowed; must be a list"),
    (["axes.algorithm.inner_steps=[]"], "must be a list of values"),
    (["axes.algorithm.inner_steps=[2,2]"], "a value is given twice"),
    (["axes.algorithm.inner_steps={low: 1, high: 3}"], "a range is not allowed; mode grid takes a list"),
    (["axes.topology.name=[ring,rung]"], "topology.name: unknown value 'rung', did you mean 'ring'?"),
    (["algorithm.inner_steps=3"], "algorithm.inner_steps: is an axis of this sweep"),
    (["mode=random"], "trials: a value is required"),
    (["mode=tpe", "trials=3"], "axes.seed: is not allowed in a search"),
    (["trials=3"], "trials: 3 is not allowed; mode grid"),
    (["metric=accuracy"], "metric: unknown value 'accuracy'"),
    (["target=accuracy"], "is not metric=level"),
    (["stop={scheduler: asha, gace: 2}"], "stop.gace: unknown key, did you mean 'grace'?"),
    (["stop={scheduler: best}"], "stop.scheduler: 'best' is not allowed"),
    (["name=a/b"], "name: 'a/b' is not allowed"),
    (["--out", "s3://bucket/x"], "--out: s3://bucket/x is not allowed; must be a folder"),
    (["other.yaml"], "one sweep at most"),
])
def test_what_is_wrong_is_told(sheet: Sheet, dbo: Command, arguments: list[str], says: str) -> None:
    """One line that names the field and what is allowed, exit 2, nothing written."""
    file = sheet()
    done = dbo("sweep", file, *arguments)
    assert done.code == 2
    assert says in done.err
    assert done.err.count("\n") == 1
    assert [path.name for path in file.parent.iterdir()] == ["quick.yaml"]


@pytest.mark.parametrize(("text", "says"), [
    ("axes: {seed: [0]}\nexperimnt: {}", "experimnt: unknown key, did you mean 'experiment'?"),
    ("experiment: {}", "axes: a value is required"),
    ("axes: {}", "axes:"),
    ("axes: [1]", "axes: [1] is not allowed; must be a mapping"),
    ("axes: {seed: [0]}\nexperiment: {lam: 3}", "lam: unknown key"),
])
def test_files_are_strict(tmp_path: Path, text: str, says: str) -> None:
    """Keys that nobody knows, and files that lack what they need."""
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(InputError, match=re.escape(says)):
        Cells(plan.read(tmp_path / "s.yaml"))


def test_unknown_names_and_no_name(dbo: Command) -> None:
    """An unknown name is answered with the nearest, none at all with the list."""
    done = dbo("sweep", "sensitivity-q")
    assert done.code == 2
    assert "did you mean 'sensitivity-k'" in done.err
    done = dbo("sweep")
    assert done.code == 0
    assert "sensitivity-lambda" in done.out


def labels(sweep: plan.Sweep) -> list[str]:
    return [cell.label for cell in Cells(sweep).fixed]


def test_grid(sheet: Sheet) -> None:
    """All combinations, the last axis quickest; a component's parameters come and go with its name."""
    sweep = plan.read(sheet(axes={"topology": [{"name": "ring"}, {"name": "erdos_renyi", "p": 0.9}], "seed": [3, 4]}))
    assert labels(sweep) == ["topology=ring seed=3", "topology=ring seed=4",
                             "topology=erdos_renyi,p=0.9 seed=3", "topology=erdos_renyi,p=0.9 seed=4"]
    cells = Cells(sweep).fixed
    assert cells[3].experiment.topology == {"name": "erdos_renyi", "p": 0.9}
    assert len({cell.name for cell in cells}) == 4


def test_one_at_a_time(sheet: Sheet) -> None:
    """The base, then each other value alone; seeds are crossed with all of them."""
    sweep = plan.read(sheet(), ["mode=one_at_a_time", "axes.algorithm.lam=[5.0,10.0]", "axes.seed=[7,8]"])
    cells = Cells(sweep).fixed
    points = {(c.experiment.algorithm["inner_steps"], c.experiment.algorithm["lam"], c.experiment.seed) for c in cells}
    assert points == {(k, lam, seed) for k, lam in ((2, 10.0), (1, 10.0), (2, 5.0)) for seed in (7, 8)}
    assert len(cells) == 6


def test_an_extended_grid_is_the_same_sweep(sheet: Sheet) -> None:
    """More values on an axis: the same key, and the cells that were there are still the same."""
    small, large = (Cells(plan.read(sheet(), more)) for more in ([], ["axes.seed=[0,1,2]"]))
    assert small.key == large.key
    assert {cell.name for cell in small.fixed} < {cell.name for cell in large.fixed}
    assert Cells(plan.read(sheet(), ["rounds=7"])).key != small.key


def test_random_draws_are_those_of_the_seed(sheet: Sheet) -> None:
    """Within their ranges; a longer search begins with the shorter one."""
    axes = {"algorithm.eta_in": {"low": 0.01, "high": 1.0, "log": True}, "algorithm.inner_steps": {"low": 1, "high": 3},
            "topology.name": ["ring", "complete"]}
    few, many = (Cells(plan.read(sheet(axes=axes, mode="random", trials=n))).fixed for n in (4, 9))
    assert [c.name for c in few] == [c.name for c in many][:4]
    assert all(0.01 <= c.values["algorithm.eta_in"] <= 1.0 for c in many)
    assert {c.values["algorithm.inner_steps"] for c in many} <= {1, 2, 3}
    assert len({c.name for c in many}) == 9


def test_small_problems_stay_in_one_process(sheet: Sheet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody says which engine, the size of the problem does, before the key is made of it."""
    monkeypatch.setattr("dbo.sweeps.grid.SMALL", 4 * 12)
    assert Cells(plan.read(sheet())).fixed[0].experiment.engine["name"] == "local"
    monkeypatch.setattr("dbo.sweeps.grid.SMALL", 4 * 12 - 1)
    assert Cells(plan.read(sheet())).fixed[0].experiment.engine["name"] == "ray"
    given = Cells(plan.read(sheet(), ["engine.nodes_per_actor=2"])).fixed[0].experiment.engine
    assert (given["name"], given["nodes_per_actor"]) == ("ray", 2)


def test_a_packed_sweep_makes_the_same_cells(sheet: Sheet, tmp_path: Path) -> None:
    """What a job gets is the sweep with its overrides, and the files it names."""
    edges = tmp_path / "edges.txt"
    edges.write_text("0 1\n1 2\n2 3\n")
    sweep = plan.read(sheet(), ["rounds=4", "axes.seed=[5]", f"topology={{name: edges, file: {edges}}}",
                                "engine={name: ray, address: '1.2.3.4:5'}"])
    folder = tmp_path / "job"
    folder.mkdir()
    plan.pack(sweep, folder)
    assert (folder / "edges.txt").read_text() == edges.read_text()
    data = yaml_io.read(folder / "sweep.yaml")
    assert data["experiment"]["topology"]["file"] == "edges.txt"
    assert "address" not in data["experiment"]["engine"]
    again = plan.read(folder / "sweep.yaml", [f"topology.file={edges}"])
    assert [c.name for c in Cells(again).fixed] == [c.name for c in Cells(sweep).fixed]


def test_values_are_told_briefly() -> None:
    assert shown({"name": "erdos_renyi", "p": 0.4}) == "erdos_renyi,p=0.4"
    assert shown(0.123456) == "0.1235"
