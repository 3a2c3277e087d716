"""A sweep file is validated before anything starts, and defines which cells there are."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dbo.platform.config import yaml_io
from dbo.platform.errors import InputError
from dbo.platform.runs import compare
from dbo.sweeps import plan
from dbo.sweeps.grid import Grid, format_value

PRESETS = plan.SWEEP_FOLDERS["paper/"].parents[1] / "algorithms" / "presets"
SweepFile = Callable[..., Path]
Command = Callable[..., Any]


@pytest.mark.parametrize("name", plan.list_shipped_sweeps())
def test_shipped_sweeps_are_valid(name: str) -> None:
    """Every shipped sweep has cells, also where its data are missing."""
    grid = Grid(plan.read_sweep(plan.find_sweep(name)), measure=False)
    assert len(grid.cells) > 1


@pytest.mark.parametrize("name", [name for name in plan.list_shipped_sweeps() if "/" not in name])
def test_shipped_sweeps_have_at_least_five_seeds(name: str) -> None:
    """Their data are embedded, so seeds cost seconds."""
    assert plan.read_sweep(plan.find_sweep(name)).axes["seed"][:5] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("file", sorted((plan.SWEEP_FOLDERS["paper/"].parents[1] / "docs/examples").glob("*.yaml")))
def test_example_comparisons_on_embedded_data_have_five_seeds(file: Path) -> None:
    experiments, _ = compare.plan(str(file), [], [], None)
    is_embedded = experiments[0].task["dataset"] == "digits"
    assert sorted({experiment.seed for experiment in experiments}) == list(range(5 if is_embedded else 3))


def test_the_papers_panels_are_shipped() -> None:
    """K, compression ratio and λ, with five seeds, on digits; on newsgroups by an override."""
    for name, key in (("k", "algorithm.inner_steps"), ("ratio", "algorithm.compressor.ratio"),
                      ("lambda", "algorithm.lam")):
        file = plan.find_sweep(f"sensitivity-{name}")
        sweep = plan.read_sweep(file)
        assert list(sweep.axes) == [key, "seed"]
        assert len(sweep.axes[key]) == 6
        other = Grid(plan.read_sweep(file, ["task.dataset=newsgroups"]), measure=False)
        assert other.cells[0].experiment.task["dataset"] == "newsgroups"


@pytest.mark.parametrize(("arguments", "message"), [
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
    (["other.yaml"], "at most one sweep is allowed"),
])
def test_wrong_input_is_refused_in_one_line(
    sweep_file: SweepFile, dbo: Command, arguments: list[str], message: str
) -> None:
    """The line names the field and what is allowed; exit 2, nothing is written."""
    file = sweep_file()
    done = dbo("sweep", file, *arguments)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
    assert [path.name for path in file.parent.iterdir()] == ["quick.yaml"]


@pytest.mark.parametrize(("text", "message"), [
    ("axes: {seed: [0]}\nexperimnt: {}", "experimnt: unknown key, did you mean 'experiment'?"),
    ("experiment: {}", "axes: a value is required"),
    ("axes: {}", "axes:"),
    ("axes: [1]", "axes: [1] is not allowed; must be a mapping"),
    ("axes: {seed: [0]}\nexperiment: {lam: 3}", "lam: unknown key"),
])
def test_unknown_or_missing_keys_of_a_file_are_refused(tmp_path: Path, text: str, message: str) -> None:
    """Unknown keys, and files without required ones."""
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(InputError, match=re.escape(message)):
        Grid(plan.read_sweep(tmp_path / "s.yaml"))


def test_an_unknown_name_gets_a_suggestion_and_no_name_the_list(dbo: Command) -> None:
    """`dbo sweep NAME` suggests the nearest name; `dbo sweep` lists the shipped sweeps."""
    done = dbo("sweep", "sensitivity-q")
    assert done.code == 2
    assert "did you mean 'sensitivity-k'" in done.err
    done = dbo("sweep")
    assert done.code == 0
    assert "sensitivity-lambda" in done.out


def labels(sweep: plan.Sweep) -> list[str]:
    return [cell.label for cell in Grid(sweep).cells]


def test_grid_has_all_combinations(sweep_file: SweepFile) -> None:
    """The last axis varies fastest; a component's parameters come and go with its name."""
    topologies = [{"name": "ring"}, {"name": "erdos_renyi", "p": 0.9}]
    sweep = plan.read_sweep(sweep_file(axes={"topology": topologies, "seed": [3, 4]}))
    assert labels(sweep) == ["topology=ring seed=3", "topology=ring seed=4",
                             "topology=erdos_renyi,p=0.9 seed=3", "topology=erdos_renyi,p=0.9 seed=4"]
    cells = Grid(sweep).cells
    assert cells[3].experiment.topology == {"name": "erdos_renyi", "p": 0.9}
    assert len({cell.name for cell in cells}) == 4


@pytest.mark.parametrize("key", ["target=public_accuracy_mean=0.5", "metric=public_accuracy_min"])
def test_a_target_or_metric_of_public_models_asks_for_them(sweep_file: SweepFile, key: str) -> None:
    """Every cell evaluates them; without it none does."""
    task = ["task={name: coefficient_tuning}"]
    asked = Grid(plan.read_sweep(sweep_file(), [*task, key])).cells
    assert all(cell.experiment.eval_public for cell in asked)
    plain = Grid(plan.read_sweep(sweep_file(), [*task, "target=node_accuracy_mean=0.5", "metric=test_accuracy"])).cells
    assert not any(cell.experiment.eval_public for cell in plain)


def test_one_at_a_time_varies_each_axis_alone(sweep_file: SweepFile) -> None:
    """The base, then each other value alone; each of them for every seed."""
    sweep = plan.read_sweep(sweep_file(), ["mode=one_at_a_time", "axes.algorithm.lam=[5.0,10.0]", "axes.seed=[7,8]"])
    cells = Grid(sweep).cells
    points = {(c.experiment.algorithm["inner_steps"], c.experiment.algorithm["lam"], c.experiment.seed) for c in cells}
    assert points == {(k, lam, seed) for k, lam in ((2, 10.0), (1, 10.0), (2, 5.0)) for seed in (7, 8)}
    assert len(cells) == 6


def test_an_extended_grid_is_the_same_sweep(sweep_file: SweepFile) -> None:
    """More values on an axis: the same sweep key, and the existing cells keep their names."""
    small, large = (Grid(plan.read_sweep(sweep_file(), more)) for more in ([], ["axes.seed=[0,1,2]"]))
    assert small.key == large.key
    assert {cell.name for cell in small.cells} < {cell.name for cell in large.cells}
    assert Grid(plan.read_sweep(sweep_file(), ["rounds=7"])).key != small.key


def test_random_samples_depend_on_the_seed_alone(sweep_file: SweepFile) -> None:
    """They are within their ranges, and a longer search begins with the shorter one."""
    axes = {"algorithm.eta_in": {"low": 0.01, "high": 1.0, "log": True}, "algorithm.inner_steps": {"low": 1, "high": 3},
            "topology.name": ["ring", "complete"]}
    few, many = (Grid(plan.read_sweep(sweep_file(axes=axes, mode="random", trials=n))).cells for n in (4, 9))
    assert [c.name for c in few] == [c.name for c in many][:4]
    assert all(0.01 <= c.values["algorithm.eta_in"] <= 1.0 for c in many)
    assert {c.values["algorithm.inner_steps"] for c in many} <= {1, 2, 3}
    assert len({c.name for c in many}) == 9


def test_small_problems_run_on_the_local_engine(sweep_file: SweepFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no engine is given, the size of the problem decides, before the run key is computed."""
    monkeypatch.setattr("dbo.sweeps.grid.LOCAL_MAX_SIZE", 4 * 12)
    assert Grid(plan.read_sweep(sweep_file())).cells[0].experiment.engine["name"] == "local"
    monkeypatch.setattr("dbo.sweeps.grid.LOCAL_MAX_SIZE", 4 * 12 - 1)
    assert Grid(plan.read_sweep(sweep_file())).cells[0].experiment.engine["name"] == "ray"
    given = Grid(plan.read_sweep(sweep_file(), ["engine.nodes_per_actor=2"])).cells[0].experiment.engine
    assert (given["name"], given["nodes_per_actor"]) == ("ray", 2)


def test_a_packed_sweep_has_the_same_cells(sweep_file: SweepFile, tmp_path: Path) -> None:
    """A job gets the sweep with its overrides, and copies of the files that it names."""
    edges = tmp_path / "edges.txt"
    edges.write_text("0 1\n1 2\n2 3\n")
    sweep = plan.read_sweep(sweep_file(), ["rounds=4", "axes.seed=[5]", f"topology={{name: edges, file: {edges}}}",
                                           "engine={name: ray, address: '1.2.3.4:5'}"])
    folder = tmp_path / "job"
    folder.mkdir()
    plan.pack_sweep(sweep, folder)
    assert (folder / "edges.txt").read_text() == edges.read_text()
    data = yaml_io.read(folder / "sweep.yaml")
    assert data["experiment"]["topology"]["file"] == "edges.txt"
    assert "address" not in data["experiment"]["engine"]
    again = plan.read_sweep(folder / "sweep.yaml", [f"topology.file={edges}"])
    assert [c.name for c in Grid(again).cells] == [c.name for c in Grid(sweep).cells]


def test_starts_of_a_packed_sweep_travel_along(sweep_file: SweepFile, tmp_path: Path) -> None:
    """An axis of starts is relative to the sweep's file, and a job gets copies."""
    model = {"x": np.ones(4), "y": np.ones(8)}
    save_file(model, tmp_path / "one.safetensors")
    file = sweep_file(axes={"start": [None, "one.safetensors"]})
    sweep = plan.read_sweep(file)
    assert sweep.axes["start"] == [None, str(file.parent / "one.safetensors")]
    (tmp_path / "job").mkdir()
    plan.pack_sweep(sweep, tmp_path / "job")
    assert yaml_io.read(tmp_path / "job" / "sweep.yaml")["axes"]["start"] == [None, "one.safetensors"]
    assert (tmp_path / "job" / "one.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()


def test_labels_have_four_digits() -> None:
    """Components are written as name and parameters."""
    assert format_value({"name": "erdos_renyi", "p": 0.4}) == "erdos_renyi,p=0.4"
    assert format_value(0.123456) == "0.1235"


def test_cells_of_a_grid_are_skipped(tmp_path: Path) -> None:
    """Three seeds on one network, one elsewhere; what is no value of an axis is refused."""
    file = tmp_path / "s.yaml"
    text = "axes: {topology: [{name: ring}, {name: complete}], seed: [0, 1, 2]}\nexperiment: {engine: {name: local}}\n"
    file.write_text(text + "skip: [{topology: {name: complete}, seed: [1, 2]}]\n")
    cells = Grid(plan.read_sweep(file)).cells
    assert [(cell.values["topology"]["name"], cell.values["seed"]) for cell in cells] == [
        ("ring", 0), ("ring", 1), ("ring", 2), ("complete", 0)]
    for rule, message in (("{seed: 7}", "skip.0.seed: 7 is not allowed"), ("{rounds: 3}", "skip.0: unknown value")):
        file.write_text(f"{text}skip: [{rule}]\n")
        with pytest.raises(InputError, match=message):
            plan.read_sweep(file)


SKIPPED = """axes: {topology: [{name: ring}, {name: complete}], seed: [0, 1, 2]}
experiment: {engine: {name: local}}
skip: [{topology: {name: complete}, seed: [1, 2]}]
"""


@pytest.mark.parametrize(("override", "expected"), [
    ("axes.seed=[0]", [("ring", 0), ("complete", 0)]),
    ("axes.seed=[0,2]", [("ring", 0), ("ring", 2), ("complete", 0)]),
    ("axes.topology=[{name: ring}]", [("ring", 0), ("ring", 1), ("ring", 2)]),
    ("axes={seed: [1]}", [("ring", 1)]),
])
def test_an_overridden_axis_drops_the_skipped_values_that_it_removes(
    tmp_path: Path, override: str, expected: list[tuple[str, int]]
) -> None:
    """A rule without a value that is left skips nothing."""
    file = tmp_path / "s.yaml"
    file.write_text(SKIPPED)
    cells = Grid(plan.read_sweep(file, [override]), measure=False).cells
    assert [(cell.experiment.topology["name"], cell.experiment.seed) for cell in cells] == expected


def test_a_typo_in_the_skip_of_a_file_is_an_error_also_with_overrides(tmp_path: Path) -> None:
    """Neither a value that the file's axis never had, nor a rule on the command line, is dropped."""
    file = tmp_path / "s.yaml"
    file.write_text(SKIPPED.replace("[1, 2]}]", "[1, 7]}]"))
    for overrides in ([], ["axes.seed=[0]"], ["axes.topology=[{name: complete}]"]):
        with pytest.raises(InputError, match=r"skip.0.seed: 7 is not allowed"):
            plan.read_sweep(file, overrides)
    file.write_text(SKIPPED)
    with pytest.raises(InputError, match=r"skip.0.seed: 1 is not allowed"):
        plan.read_sweep(file, ["axes.seed=[0]", "skip=[{seed: 1}]"])


TABLE1 = ["table1", "table1-frozen", "table1-paper-values", "table1-presets"]


def test_the_controls_of_the_papers_table_have_its_budgets() -> None:
    """Rounds, evaluations and threads of all four files are equal; ψ, which is approximate, is in the first alone."""
    files = {name: yaml_io.read(plan.SWEEP_FOLDERS["paper/"] / f"{name}.yaml") for name in TABLE1}
    for key in ("task", "partition", "engine", "seeds", "target", "until", "rounds", "eval_every", "checkpoint_every"):
        assert [files[name][key] for name in TABLE1] == [files["table1"][key]] * 4, key
    assert {name: file.get("psi_every", "end") for name, file in files.items()} == {
        name: "end" if name == "table1" else None for name in TABLE1}


def test_shipped_files_have_names_of_their_own() -> None:
    """Folders, MLflow runs and the keys of sweeps are named by them."""
    files = [file for folder in plan.SWEEP_FOLDERS.values() for file in folder.glob("*.yaml")]
    names = [yaml_io.read(file).get("name", file.stem) for file in files]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("name", TABLE1)
def test_the_papers_table_has_seeds_and_a_stop_rule(name: str) -> None:
    experiments, target = compare.plan(str(plan.SWEEP_FOLDERS["paper/"] / f"{name}.yaml"), [], [], None)
    assert sorted({experiment.seed for experiment in experiments}) == [0, 1, 2]
    assert {experiment.until.target for experiment in experiments if experiment.until} == {str(target)}


BEYOND = sorted({file.stem for file in plan.SWEEP_FOLDERS["beyond/"].glob("*.yaml")})


@pytest.mark.parametrize("name", BEYOND)
def test_comparisons_beyond_the_paper_choose_and_measure_on_different_seeds(name: str) -> None:
    """A search scores the tune split of a seed that no comparison has; a comparison has no tune split."""
    experiments, target = compare.plan(str(plan.SWEEP_FOLDERS["beyond/"] / f"{name}.yaml"), [], [], None)
    is_search = name == "damping" or name.startswith("search-")
    assert (target.metric == "tune_accuracy") == is_search
    assert {experiment.seed for experiment in experiments} == ({20} if is_search else {31, 32, 33})
    assert all((experiment.tune_fraction > 0) == is_search for experiment in experiments)
    assert all(experiment.eval_public != is_search for experiment in experiments)      # by a target public_…


def test_the_papers_mnist_figure_has_three_seeds_on_the_ring_alone() -> None:
    """Ten cells for each of four methods, two of them with the steps of their presets."""
    cells = [cell.experiment for cell in Grid(plan.read_sweep(plan.find_sweep("paper/figure3")), measure=False).cells]
    assert len(cells) == 4 * 2 * (3 + 1 + 1)
    names = ("c2dfb", "c2dfb_nc", "madsbo", "lean")
    assert Counter(cell.algorithm["name"] for cell in cells) == dict.fromkeys(names, 10)
    assert all(cell.rounds == 1200 and cell.parts.batches.lower == 64 for cell in cells)
    for name in ("c2dfb_nc", "madsbo"):
        preset = yaml_io.read(PRESETS / f"{name}.yaml")["hyper_representation/mnist"]
        steps = preset.get("values", preset)
        assert all(steps.items() <= cell.algorithm.items() for cell in cells if cell.algorithm["name"] == name)
