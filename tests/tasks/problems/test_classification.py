"""Test metrics of classification problems."""

from typing import Any

import numpy as np
import pytest

from dbo.platform.config.experiment import Experiment
from dbo.platform.runs.runner import prepare
from dbo.tasks.problems import classification
from dbo.tasks.problems.classification import accuracy_and_loss, linear_accuracy


def test_accuracy_and_loss_by_hand() -> None:
    """Two of three are correct; the loss is the mean of −log p of the label."""
    scores = np.log(np.array([[0.7, 0.3], [0.4, 0.6], [0.9, 0.1]]))
    accuracy, loss = accuracy_and_loss(scores, np.array([0, 1, 1]))
    assert accuracy == 2 / 3
    np.testing.assert_allclose(loss, -np.mean(np.log([0.7, 0.6, 0.1])))


@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.1, 3.0])
@pytest.mark.parametrize("models", [1, 5, 700])
def test_accuracies_of_many_models_at_once(models: int, spread: float) -> None:
    """They are those of the models one by one, however far the models are from their mean."""
    rng = np.random.default_rng(0)
    features, labels = rng.standard_normal((400, 8)), rng.integers(0, 3, 400)
    y = rng.standard_normal(24) + spread * rng.standard_normal((models, 24))
    found = linear_accuracy([features[labels == label] for label in range(3)], y, classes=3)
    expected = [accuracy_and_loss(features @ row.reshape(8, 3), labels)[0] for row in y]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_first_of_equal_scores_is_the_prediction() -> None:
    """As `argmax` has it: models at zero predict class 0, whatever the number of models."""
    features = np.ones((10, 2))
    found = linear_accuracy([features[:7], features[:3]], np.zeros((6, 4)), classes=2)
    np.testing.assert_array_equal(found, np.full(6, 0.7))


def test_samples_far_from_the_boundary_are_not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of models near their mean only the samples are computed whose prediction can differ."""
    rng, counted = np.random.default_rng(0), []
    features, labels = rng.standard_normal((400, 8)), rng.integers(0, 3, 400)
    y = rng.standard_normal(24) + 1e-3 * rng.standard_normal((20, 24))
    count = classification._count_hits
    monkeypatch.setattr(
        classification, "_count_hits", lambda scores, label: counted.append(len(scores)) or count(scores, label))
    linear_accuracy([features[labels == label] for label in range(3)], y, classes=3)
    assert 0 < sum(counted) < 40


@pytest.mark.parametrize("task", [
    {"name": "coefficient_tuning"}, {"name": "hyper_cleaning"}, {"name": "hyper_representation"},
    {"name": "coefficient_tuning", "dataset": "synthetic_text", "features": 40, "classes": 4, "documents": 300},
])
def test_nodes_are_evaluated_as_single_models(task: dict[str, Any]) -> None:
    """`evaluate_nodes` has the metrics of `evaluate` except for the loss, dense and sparse features alike."""
    problem = prepare(Experiment(task=task, nodes=6, dtype="float64", engine={"name": "local"})).problem
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((6, dim)) for dim in (problem.dim_x, problem.dim_y))
    one_by_one, at_once = problem.evaluate(x, y), problem.evaluate_nodes(x, y)
    assert at_once.keys() == one_by_one.keys() - {"test_loss"}
    for name, values in at_once.items():
        np.testing.assert_allclose(values, one_by_one[name], rtol=1e-12)
