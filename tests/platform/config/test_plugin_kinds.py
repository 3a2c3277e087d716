"""Plugins of every kind in one file: used by name, listed, validated, shipped to other processes."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbo import components
from dbo.platform.config import plugins
from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError, RunError
from dbo.platform.runs.runner import prepare, run

Tiny = Callable[..., Experiment]
Command = Callable[..., Any]

ALL_KINDS = '''
import networkx as nx
import numpy as np
import torch
import dbo
from dataclasses import dataclass


@dbo.dataset("two_moons")
class TwoMoons:
    """Two half circles."""

    samples: int = dbo.param(80, ge=12, help="in all parts together")

    def load(self, seed, data_dir):
        rng = np.random.default_rng(seed)
        labels = rng.permutation(np.arange(self.samples) % 2)
        angle = np.pi * rng.random(self.samples) + np.pi * labels
        inputs = np.stack([np.cos(angle) + labels, np.sin(angle)], axis=1)
        inputs += 0.1 * rng.standard_normal(inputs.shape)
        parts = [dbo.Part(inputs[k::4], labels[k::4]) for k in range(3)]
        return dbo.Split(*parts, classes=2)


@dbo.partition("in_turn")
class InTurn:
    """Sample j to node j mod m."""

    def assign(self, labels, nodes, rng):
        return [np.arange(node, len(labels), nodes) for node in range(nodes)]


@dbo.topology("path")
class Path:
    """A line of nodes."""

    def graph(self, nodes, seed):
        return nx.path_graph(nodes)


@dbo.compressor("first")
class First:
    """Keeps the first entries."""

    share: float = dbo.param(0.5, gt=0, le=1, help="of the entries")

    def __call__(self, rows, key, channel):
        count = max(1, int(self.share * rows.shape[1]))
        values = rows + 0.0
        values[:, count:] = 0.0
        return dbo.Message(values, form="sparse", kept=count)

    def contraction(self, dim):
        return 0.0


@dbo.task("moon_kernel")
class MoonKernel(dbo.TorchTask):
    """Feature scales (upper level) of a logistic regression (lower level)."""

    datasets = ("two_moons",)
    directions = {"test_accuracy": "max", "margin": "max"}
    ridge: float = dbo.param(0.1, gt=0, help="on y")

    def init(self, generator):
        return torch.zeros(6), torch.zeros(6)

    def scores(self, x, y, inputs):
        a, b = inputs[:, 0], inputs[:, 1]
        features = torch.stack([torch.ones_like(a), a, b, a * b, a * a, b * b], dim=1)
        return features @ (torch.exp(x) * y)

    def lower(self, x, y, batch):
        return self.upper(x, y, batch) + self.ridge * y.square().sum()

    def upper(self, x, y, batch):
        sign = 2.0 * batch.labels - 1
        return torch.nn.functional.softplus(-sign * self.scores(x, y, batch.inputs)).mean()

    def metrics(self, x, y, test):
        scores = self.scores(x, y, test.inputs)
        return {"test_accuracy": ((scores > 0) == (test.labels > 0)).double().mean(), "margin": scores.abs().min()}


@dataclass(frozen=True, kw_only=True)
class Config:
    step: float = dbo.param(0.1, gt=0, help="step size", schedule=True)
    compressor: dbo.Compressor = dbo.param(dbo.TopK(ratio=0.5), help="Q")

@dataclass(frozen=True)
class State:
    t: dbo.Array
    x: dbo.Array
    y: dbo.Array
    direction: dbo.Array

def init(shard, cfg):
    return State(dbo.counter(shard), shard.x0, shard.y0, 0 * shard.x0)

@dbo.algorithm("descend", config=Config, state=State, init=init, packets=lambda cfg: 1, batches=lambda cfg: 1)
async def descend(st, shard, cfg):
    """Descend: compressed gossip and sampled gradient steps."""
    batch = shard.sample(dbo.round_key(shard, st.t))
    y = await dbo.mix(cfg.compressor(st.y - cfg.step * batch.g_y(st.x, st.y), dbo.round_key(shard, st.t), "y"))
    return State(st.t + 1, st.x, y, st.direction)
'''


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(ALL_KINDS)
    return path


def experiment(plugin: Path, **changes: Any) -> Experiment:
    return Experiment(**{
        "plugins": [str(plugin)], "task": {"name": "moon_kernel", "samples": 120},
        "algorithm": {"name": "descend", "compressor": {"name": "first", "share": 1.0}}, "topology": "path",
        "partition": "in_turn", "nodes": 3, "rounds": 8, "checkpoint_every": 3, "dtype": "float64", "engine": "local",
        "tracking": {"uri": "off"}, "batch_size": 5, **changes,
    })


def test_every_kind_works_together(plugin: Path, tmp_path: Path) -> None:
    """A run with nothing built in; the task's own metric is recorded for the mean model and the nodes."""
    result = run(experiment(plugin), tmp_path / "run")
    assert result.status == "finished"
    assert {"margin", "node_margin_mean", "test_accuracy", "samples"} <= set(result.history.columns)
    assert result.history["samples"].iloc[-1] == 8 * 5
    assert result.history["upper_loss"].iloc[-1] < result.history["upper_loss"].iloc[0]
    assert result.experiment.task == {"name": "moon_kernel", "ridge": 0.1, "samples": 120, "dataset": "two_moons"}


def test_a_data_set_of_a_plugin_serves_built_in_tasks(plugin: Path) -> None:
    """`dataset` may be a mapping: its name and its parameters."""
    made = experiment(
        plugin, task={"name": "coefficient_tuning", "dataset": {"name": "two_moons", "samples": 60}},
        algorithm="c2dfb", partition="iid",
    )
    assert prepare(made).problem.dim_x == 2
    assert made.task["samples"] == 60


def test_unknown_names_list_the_plugins_components(plugin: Path) -> None:
    """A plugin's names are as good as built-in ones, in messages too."""
    for section, name in (("topology", "path"), ("partition", "in_turn"), ("task", "moon_kernel")):
        with pytest.raises(InputError, match=rf"{section}.name: unknown value 'nope'; allowed: .*{name}"):
            experiment(plugin, **{section: {"name": "nope"}})
    with pytest.raises(InputError, match=r"task.samples: 3 is not allowed; must be ≥ 12"):
        experiment(plugin, task={"name": "moon_kernel", "samples": 3})


def test_list_shows_every_kind(dbo: Command, plugin: Path) -> None:
    shown = dbo("list", f"plugins=[{plugin}]").out
    assert all(name in shown for name in ("two_moons", "in_turn", "path", "first", "moon_kernel", "descend"))
    assert "in all parts together" in dbo("list", "two_moons", f"plugins=[{plugin}]").out


def test_an_edited_plugin_is_another_experiment(plugin: Path) -> None:
    """Whatever it registers: the key covers the whole file, but not its comments."""
    before = experiment(plugin).run_key
    plugin.write_text(ALL_KINDS + "# a comment\n")
    assert experiment(plugin).run_key == before
    plugin.write_text(ALL_KINDS.replace("% nodes", "% nodes").replace("0.1 * rng", "0.2 * rng"))
    assert experiment(plugin).run_key != before


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def assign(self", "def give(self", "partition 'in_turn': InTurn needs a method assign"),
        ("float = dbo.param(0.5", "float = dbo.param(5.0", "compressor 'first'.share: 5.0 is not allowed"),
        ('@dbo.topology("path")', '@dbo.topology("ring")', "topology 'ring' is the name of a built-in one"),
        ('    """A line of nodes."""\n', "", "topology 'path': Path needs a docstring"),
        ("ridge: float = dbo", "ridge = dbo", "'ridge' is a field but has no type"),
    ],
)
def test_mistakes_in_a_plugin_are_one_line(plugin: Path, old: str, new: str, message: str) -> None:
    """With the file; with the line where the file's code fails."""
    assert old in ALL_KINDS
    plugin.write_text(ALL_KINDS.replace(old, new))
    with pytest.raises(InputError) as caught:
        experiment(plugin)
    assert message in str(caught.value)
    assert "mine.py" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("        rng = np.random.default_rng(seed)\n", "        return 1 / 0\n", "ZeroDivisionError"),
        ("features @ (torch", "features @ nothing @ (torch", "name 'nothing' is not defined"),
    ],
)
def test_mistakes_at_run_time_have_file_and_line(plugin: Path, old: str, new: str, message: str) -> None:
    assert old in ALL_KINDS
    plugin.write_text(ALL_KINDS.replace(old, new))
    line = plugin.read_text()[: plugin.read_text().index(new)].count("\n") + 1
    with pytest.raises(InputError) as caught:
        prepare(experiment(plugin))
    assert message in str(caught.value)
    assert f"{plugin.resolve()}, line {line}" in str(caught.value)


SPLIT = "return dbo.Split(*parts, classes=2)"
ASSIGN = "return [np.arange(node, len(labels), nodes) for node in range(nodes)]"
GRAPH = "return nx.path_graph(nodes)"
MESSAGE = 'return dbo.Message(values, form="sparse", kept=count)'
FORMS = "must be a dbo.Message of shape (3, 6) and form 'dense' or 'sparse' or 'levels'"
# what a method returns → what it is replaced by, the method, and the message
WRONG_RETURNS = [
    (SPLIT, "return parts", "load", " returned a list; must be a dbo.Split of dbo.Part"),
    (SPLIT, "return dbo.Split(*((p.features, p.labels) for p in parts))", "load", " returned a dbo.Split of other"),
    (SPLIT, "return dbo.Split(*parts[:2], dbo.Part(inputs, labels[:3]))", "load",
     " returned 120 rows of features and 3 labels in test; must be as many, at least 1"),
    (SPLIT, "return dbo.Split(*parts[:2], dbo.Part(inputs * np.nan, labels), classes=2)", "load",
     " returned features with NaN or inf in test; must be finite"),
    (SPLIT, "return dbo.Split(*parts[:2], dbo.Part(inputs, labels - 1), classes=2)", "load",
     " returned labels in test that are not the numbers 0 to 1 of its 2 classes"),
    (SPLIT, "return dbo.Split(*parts[:2], dbo.Part(inputs, list(labels)), classes=2)", "load",
     " returned a ndarray of features and a list of labels in test; must be NumPy arrays"),
    (SPLIT, 'return dbo.Split(*parts[:2], dbo.Part(inputs, labels.astype("U1")), classes=2)', "load",
     " returned features of float64 and labels of <U1 in test; must be numbers"),
    (ASSIGN, "return 3", "assign", " returned a int; must be a list of 3 arrays of sample numbers, one per node"),
    (ASSIGN, "return [np.arange(len(labels))]", "assign", " returned 1 entries; must be a list of 3 arrays"),
    (ASSIGN, "return [np.arange(len(labels))] * nodes", "assign", " assigns sample 0 3 times; must assign every"),
    (ASSIGN, "return [np.array([node]) for node in range(nodes)]", "assign", " assigns sample 3 to no node"),
    (ASSIGN, "return [np.arange(0)] * nodes", "assign", " gives node 0 no samples; must give every node at least one"),
    (ASSIGN, "return [np.array([99])] * nodes", "assign", " returned sample 99; must be 0 to 29"),
    (ASSIGN, "return [np.array([0.5])] * nodes", "assign", " returned entries that are not arrays of integers"),
    (GRAPH, "return [(0, 1), (1, 2)]", "graph", " returned a list; must be a networkx graph"),
    (GRAPH, "return nx.path_graph(nodes + 1)", "graph", " returned a graph of 4 nodes; must have 3"),
    (GRAPH, "return nx.empty_graph(nodes)", "graph", ": the graph has 3 components, it must be connected"),
    (MESSAGE, "return values", "__call__", f" returned a ndarray; {FORMS}"),
    (MESSAGE, "return dbo.Message(values[:, :2])", "__call__", " returned a dbo.Message of shape (3, 2)"),
    (MESSAGE, 'return dbo.Message(values, form="few")', "__call__", " returned a dbo.Message of shape (3, 6) and"),
]


@pytest.mark.parametrize(("old", "new", "method", "message"), WRONG_RETURNS)
def test_wrong_returns_have_file_and_line(
    plugin: Path, tmp_path: Path, old: str, new: str, method: str, message: str
) -> None:
    """The error names the class, its method with file and line, what it returned and what it must return."""
    plugin.write_text(ALL_KINDS.replace(old, new))
    text = plugin.read_text()
    start = text.rindex(f"def {method}(", 0, text.index(new))
    with pytest.raises((InputError, RunError)) as caught:
        run(experiment(plugin), tmp_path / "run")
    line = text[:start].count("\n") + 1
    assert f".{method} ({plugin.resolve()}, line {line}){message}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_shipped_plugin_needs_no_file(plugin: Path) -> None:
    """Another process runs its source before it unpickles the problem; the file may be on another machine only."""
    made = experiment(plugin)
    shipped, record = plugins.ship(made.plugins), made.to_dict()
    module = shipped[0].module
    components.forget(module)
    del sys.modules[module], plugins._loaded[module]
    plugin.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        Experiment(**record)
    plugins.receive(shipped)
    assert Experiment(**record).run_key == made.run_key


@pytest.mark.ray
def test_every_kind_runs_on_ray(plugin: Path, tmp_path: Path) -> None:
    """Two actors give the results of one process, to rounding; the plugin is loaded in them before its objects."""
    local = run(experiment(plugin), tmp_path / "local")
    remote = run(experiment(plugin, engine={"name": "ray", "nodes_per_actor": 2}), tmp_path / "ray")
    np.testing.assert_allclose(remote.state["y"], local.state["y"], rtol=1e-10)


def test_a_partition_cannot_change_labels(plugin: Path) -> None:
    """The task uses the same labels."""
    plugin.write_text(ALL_KINDS.replace(ASSIGN, f"labels.sort(); {ASSIGN}"))
    with pytest.raises(InputError, match=r"read-only \("):
        prepare(experiment(plugin))


@pytest.mark.parametrize(("name", "message"), [
    ("upper_loss", "directions has 'upper_loss', which is a metric of dbo"), ("round", "which is a metric of dbo"),
    ("a/b", "directions has 'a/b'; a metric's name has letters, digits and _ only"), ("", "directions has ''"),
])
def test_metrics_of_a_task_have_names_of_their_own(plugin: Path, name: str, message: str) -> None:
    """One that dbo records would replace its column."""
    plugin.write_text(ALL_KINDS.replace('"margin": "max"}', f'"margin": "max", {name!r}: "max"}}'))
    with pytest.raises(InputError) as caught:
        prepare(experiment(plugin))
    assert message in str(caught.value)
