"""Evaluation: the columns of a record, the penalty metric, and metrics that are not finite."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.base import Record
from dbo.platform.engine.evaluation import evaluate, first_nonfinite_metric
from dbo.platform.engine.local import LocalEngine
from dbo.platform.runs.runner import prepare

Tiny = Callable[..., Experiment]


def evaluated(experiment: Experiment, has_penalty: bool = True) -> tuple[Record, Record, LocalEngine]:
    """Both records after one round; without `has_penalty` the algorithm does not declare its λ."""
    parts, setup = experiment.parts, prepare(experiment)
    algorithm = parts.algorithm if has_penalty else replace(parts.algorithm, penalty=None)
    engine = LocalEngine(algorithm, parts.config, setup.problem, setup.network, [[0, 1], [2, 3]])
    engine.advance(1)
    return *evaluate(engine, setup.problem, algorithm, parts.config), engine


def test_penalty_error_is_the_distance_to_the_penalty_solution(tiny: Tiny) -> None:
    """λ comes from the algorithm's declaration; without one, and for other methods, there is no such column."""
    experiment = tiny()
    record, _, engine = evaluated(experiment)
    target = prepare(experiment).problem.penalty_solution(experiment.algorithm["lam"])
    x = engine.rows("x")
    assert target is not None
    assert x is not None
    expected = np.linalg.norm(x.mean(axis=0) - target) / np.linalg.norm(target)
    assert record["penalty_error"] == pytest.approx(expected, rel=1e-12)
    assert list(record)[-1] == "penalty_error"
    assert "penalty_error" not in evaluated(experiment, has_penalty=False)[0]
    assert "penalty_error" not in evaluated(tiny(algorithm={"name": "d_soba"}))[0]
    assert "penalty_error" not in evaluated(tiny(task={"name": "coefficient_tuning"}))[0]


def test_consensus_is_the_distance_to_the_mean(tiny: Tiny) -> None:
    """`apart_x` per node, and their root mean square as `consensus_x`."""
    record, nodes, engine = evaluated(tiny())
    x = engine.rows("x")
    assert x is not None
    distances = np.linalg.norm(x - x.mean(axis=0), axis=1)
    np.testing.assert_allclose(nodes["apart_x"], distances, rtol=1e-12, atol=1e-15)
    assert record["consensus_x"] == pytest.approx(np.sqrt(np.mean(distances**2)), rel=1e-12)


def test_first_nonfinite_metric_is_named() -> None:
    """Missing metrics and integers are fine; the first NaN or inf is named."""
    assert first_nonfinite_metric({"test_accuracy": None, "packets": 3, "upper_loss": 1.0}) is None
    assert first_nonfinite_metric({"upper_loss": 1.0, "lower_loss": float("inf"), "z": float("nan")}) == "lower_loss"
