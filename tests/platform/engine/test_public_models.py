"""Public models: Σ_j w_ij (what neighbours have of y_j), on request of every method with neighbours."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.registry import algorithms
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.base import Record
from dbo.platform.engine.block import PUBLIC
from dbo.platform.engine.evaluation import evaluate
from dbo.platform.engine.local import LocalEngine
from dbo.platform.runs.result import Result
from dbo.platform.runs.runner import prepare, run

GOSSIP = [name for name, made in algorithms().items() if made.network == "gossip"]
KEPT = ["c2dfb_lead", "lean"]                                   # in the state, so always reported
PUBLISHED = [name for name in GOSSIP if algorithms()[name].public is not None]
COLUMNS = ("public_accuracy_mean", "public_accuracy_min")
HELD: dict[str, Callable[[Any], Any]] = {"c2dfb_lead": lambda st: st.loop_y.ref, "lean": lambda st: st.loop_y.ref}


def digits(name: str = "c2dfb", **changes: Any) -> Experiment:
    return Experiment(**{
        "nodes": 4, "dtype": "float64", "rounds": 3, "psi_every": None, "engine": {"name": "local"},
        "algorithm": {"name": name}, **changes})


def started(experiment: Experiment, blocks: list[list[int]] | None = None, rounds: int = 2) -> tuple[LocalEngine, Any]:
    parts, setup = experiment.parts, prepare(experiment)
    engine = LocalEngine(
        parts.algorithm, parts.config, setup.problem, setup.network, blocks or [[*range(experiment.nodes)]])
    if rounds:
        engine.advance(1, rounds)
    return engine, setup


def evaluated(experiment: Experiment, blocks: list[list[int]] | None = None, requested: bool = True) -> Record:
    engine, setup = started(experiment, blocks)
    return evaluate(
        engine, setup.problem, experiment.parts.algorithm, experiment.parts.config, experiment.eval_nodes,
        experiment.seed, setup.network.weights if requested else None)[0]


def without_public(record: Record) -> Record:
    return {key: value for key, value in record.items() if key not in COLUMNS}


@pytest.mark.parametrize("name", PUBLISHED)
def test_public_models_are_those_of_the_copies(name: str) -> None:
    """Their accuracy is that of (x_i, Σ_j w_ij ŷ_j), computed node by node, and no other column changes."""
    experiment = digits(name)
    engine, setup = started(experiment)
    copies = engine.rows(PUBLIC) if name not in KEPT else HELD[name](engine.local_blocks[0].state)
    x = engine.rows("x")
    assert copies is not None
    assert x is not None
    mixed = setup.network.weights.toarray() @ copies
    expected = [float(setup.problem.evaluate(x[[i]], mixed[[i]])["test_accuracy"][0]) for i in range(4)]
    record = evaluated(experiment)
    assert record[COLUMNS[0]] == pytest.approx(np.mean(expected), abs=1e-12)
    assert record[COLUMNS[1]] == pytest.approx(min(expected), abs=1e-12)
    unasked = evaluated(experiment, requested=False)
    assert without_public(unasked) == without_public(record)
    assert (COLUMNS[0] in unasked) == (name in KEPT)


@pytest.mark.parametrize("name", ["c2dfb", "c2dfb_nc", "mdbo", "lean"])
@pytest.mark.parametrize("blocks", [[[0], [1], [2], [3]], [[3, 0], [1], [2]]], ids=["of one", "uneven"])
def test_packing_does_not_change_public_models(name: str, blocks: list[list[int]]) -> None:
    """However nodes are packed into blocks."""
    whole, packed = evaluated(digits(name)), evaluated(digits(name), blocks)
    assert [packed[column] for column in COLUMNS] == [whole[column] for column in COLUMNS]


def test_a_sample_of_nodes_has_its_own_public_models() -> None:
    """`eval_nodes`: neighbours outside of the sample count in the sum, and the sample alone is evaluated."""
    experiment = digits(eval_nodes=2)
    record = evaluated(experiment)
    engine, setup = started(experiment)
    copies, x = engine.rows(PUBLIC), engine.rows("x")
    assert copies is not None
    assert x is not None
    found = setup.problem.evaluate_nodes(x, setup.network.weights @ copies)["test_accuracy"]
    pairs = {float(np.mean(found[[i, j]])) for i in range(4) for j in range(i)}
    assert record["nodes_evaluated"] == 2
    assert record[COLUMNS[0]] in pairs
    assert min(found) <= record[COLUMNS[1]] <= record[COLUMNS[0]]


@pytest.mark.parametrize("name", ["fednest", "f2sa", "slam"])
def test_without_neighbours_that_have_y_there_are_no_public_models(name: str) -> None:
    """With a server, on a single machine, and where nobody sends its y: the columns are absent, requested or not."""
    result = run(digits(name, eval_public=True))
    assert not set(COLUMNS) & set(result.history.columns)


def columns(result: Result, names: tuple[str, ...] = COLUMNS) -> list[list[float]]:
    return [list(result.history[name]) for name in names]


@pytest.mark.parametrize("name", ["c2dfb", "mdbo", "lean"])
def test_requested_metrics_change_no_bit_of_training(tmp_path: Path, name: str) -> None:
    """The same states, bytes and other metrics, with `eval_public` and without; a stop rule asks for it as well."""
    plain, asked = run(digits(name), tmp_path / "plain"), run(digits(name, eval_public=True), tmp_path / "asked")
    for key in ("x", "y"):
        assert plain.state[key].tobytes() == asked.state[key].tobytes()
    for key in ("bytes_links", "bytes_broadcast", "packets", "gradient_calls", "node_accuracy_mean", "test_accuracy"):
        assert list(plain.history[key]) == list(asked.history[key])
    assert (plain.folder / "nodes.jsonl").read_bytes() == (asked.folder / "nodes.jsonl").read_bytes()
    assert (COLUMNS[0] in plain.history) == (name in KEPT)
    stopped = run(digits(name, until={"target": "public_accuracy_mean=0.05"}), tmp_path / "stopped")
    assert stopped.summary["ended_by"].startswith("until target public_accuracy_mean")
    assert columns(stopped) == [values[: len(stopped.history)] for values in columns(asked)]


def test_run_key_without_the_request_is_the_old_one() -> None:
    """The key is part of the run key only where it is set: a run without it has no other columns."""
    assert "eval_public" not in digits()._identity
    assert digits(eval_public=True).run_key != digits().run_key == digits(eval_public=False).run_key


@pytest.mark.ray
@pytest.mark.parametrize("name", ["c2dfb", "mdbo"])
def test_ray_has_the_public_models_of_the_local_engine(ray: Any, tmp_path: Path, name: str) -> None:
    """Two nodes to an actor."""
    on_ray = run(digits(name, eval_public=True, engine={"name": "ray", "nodes_per_actor": 2}), tmp_path / "ray")
    local = run(digits(name, eval_public=True), tmp_path / "local")
    assert columns(on_ray) == columns(local)
    assert columns(on_ray, ("bytes_links",)) == columns(local, ("bytes_links",))
