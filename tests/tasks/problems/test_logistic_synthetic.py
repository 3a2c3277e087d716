"""Synthetic logistic regression: sizes of features, labels, and batches."""

from functools import cache

import numpy as np
import pytest

from dbo.tasks.api import Setup
from dbo.tasks.partitions import Iid
from dbo.tasks.problems.logistic_synthetic import LogisticProblem, LogisticSynthetic


@cache
def build(nodes: int = 4, noise: float = 0.1) -> LogisticProblem:
    task = LogisticSynthetic(dim=20, train_samples=60, val_samples=30, test_samples=30, label_noise=noise)
    return task.build(Setup(nodes=nodes, seed=1, dtype="float64", partition=Iid()))


def test_features_of_node_i_have_deviation_i() -> None:
    """1, 2, 3, …, on every level; a node's samples do not depend on the number of nodes."""
    for part in (build().train, build().val, build().test):
        np.testing.assert_allclose(part.inputs.std(axis=(1, 2)), [1, 2, 3, 4], rtol=0.1)
    np.testing.assert_array_equal(build(nodes=2).train.inputs, build().train.inputs[:2])


def test_values_are_the_logistic_loss() -> None:
    """g is log(1 + exp(−b aᵀy)), averaged, plus the regulariser; large margins do not overflow."""
    problem = build()
    shard = problem.shard([1])
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal(20), rng.standard_normal(20)
    margins = problem.train.labels[1] * (problem.train.inputs[1] @ y)
    expected = np.mean(np.log1p(np.exp(-margins))) + np.sum(np.exp(x) * y * y) / (2 * 60)
    np.testing.assert_allclose(shard.g(x[None], y[None]), expected)
    with np.errstate(over="raise"):
        assert np.isfinite(shard.g(x[None], 1e4 * y[None])).all()


def test_labels_are_learnable() -> None:
    """The weights that made the labels classify them, up to the noise; without noise exactly."""
    clean = build(noise=0.0)
    y = np.zeros((1, 20))
    shard = clean.shard(range(4))
    for _ in range(300):
        y = y - 0.5 * shard.g_y(np.full((4, 20), -10.0), np.tile(y, (4, 1))).mean(axis=0)
    assert clean.evaluate(y, y)["test_accuracy"][0] > 0.9
    assert clean.evaluate(-y, -y)["test_accuracy"][0] < 0.1


@pytest.mark.parametrize("name", ["g_y", "f_y"])
def test_batches_are_unbiased(name: str) -> None:
    """The mean over batches that contain every sample equally often is the gradient on all samples."""
    shard = build().shard([0, 3])
    x, y = np.random.default_rng(2).standard_normal((2, 2, 20))
    have = int(shard.sizes[0 if name[0] == "g" else 1][0])
    batches = [np.stack([(np.arange(4) + first) % have, (np.arange(4) + 2 * first) % have]) for first in range(have)]
    rows = [getattr(shard.subset(b, None) if name[0] == "g" else shard.subset(None, b), name)(x, y) for b in batches]
    np.testing.assert_allclose(np.mean(rows, axis=0), getattr(shard, name)(x, y), rtol=1e-9, atol=1e-12)
    assert not np.allclose(rows[0], rows[1])
