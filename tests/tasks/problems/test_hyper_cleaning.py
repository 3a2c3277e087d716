"""Hyper-cleaning: corrupted labels, weights of samples, batches and the F1 score."""

from functools import cache

import numpy as np
import pytest

from dbo.tasks.api import Batches, Setup
from dbo.tasks.datasets.digits import Digits
from dbo.tasks.partitions import ByClass
from dbo.tasks.problems.hyper_cleaning import HyperCleaning, HyperCleaningProblem, corrupt_labels, find_f1

DIGITS = Digits()


@cache
def build(nodes: int = 5, data: Digits = DIGITS) -> HyperCleaningProblem:
    task = HyperCleaning(random_features=40, components=20)
    return task.build(Setup(nodes=nodes, seed=3, dtype="float64", partition=ByClass(), data=data))


def test_labels_are_replaced_with_the_given_probability() -> None:
    """By another class, each of them as often; the seed decides which."""
    labels = np.arange(20_000) % 10
    changed, corrupted = corrupt_labels(labels, 10, 0.3, seed=0)
    assert abs(corrupted.mean() - 0.3) < 0.01
    np.testing.assert_array_equal(changed != labels, corrupted)
    shares = np.bincount((changed - labels)[corrupted] % 10, minlength=10) / corrupted.sum()
    np.testing.assert_allclose(shares, [0, *[1 / 9] * 9], atol=0.02)
    np.testing.assert_array_equal(corrupt_labels(labels, 10, 0.3, seed=0)[0], changed)
    assert (corrupt_labels(labels, 10, 0.3, seed=1)[0] != changed).any()


def test_validation_and_test_labels_stay_clean() -> None:
    """Only the train part is corrupted."""
    samples = Digits().load(3, None)
    for part in ("val", "test"):
        np.testing.assert_array_equal(getattr(build().samples, part).labels, getattr(samples, part).labels)
    np.testing.assert_array_equal(build().samples.train.labels != samples.train.labels, build().corrupted)


def test_corruption_does_not_move_samples_to_other_nodes() -> None:
    """The partition sees the true labels: 80 % of a class are at its home."""
    samples = Digits().load(3, None)
    at_home = np.isin(build().train[0], np.flatnonzero(samples.train.labels % 5 == 0))
    assert at_home.mean() > 0.75


def test_a_node_touches_the_logits_of_its_own_samples_alone() -> None:
    """Derivatives in x are zero elsewhere, and g does not change with another node's logits."""
    problem = build()
    shard = problem.shard([1, 3])
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal(shard.x0.shape), rng.standard_normal(shard.y0.shape)
    for row, node in enumerate((1, 3)):
        others = np.setdiff1d(np.arange(problem.dim_x), problem.train[node])
        for rows in (shard.g_x(x, y), shard.g_xy(x, y, y)):
            assert np.all(rows[row, others] == 0)
            assert np.all(rows[row, problem.train[node]] != 0)
        changed = x.copy()
        changed[row, others] += 5.0
        assert shard.g(changed, y)[row] == shard.g(x, y)[row]


def test_extreme_weights_select_samples() -> None:
    """With logits ±60 the lower level is that of the chosen samples alone, without overflow."""
    problem = build()
    shard = problem.shard([2])
    y = np.random.default_rng(1).standard_normal(shard.y0.shape)
    clean = ~problem.corrupted
    own = problem.train[2][clean[problem.train[2]]]
    part = problem.samples.train.take(own)
    scores = part.features @ y.reshape(-1, 10)
    losses = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(own)), part.labels]
    with np.errstate(over="raise"):
        value = shard.g(np.where(clean, 1e4, -1e4)[None], y)
    np.testing.assert_allclose(value, losses.sum() / len(problem.train[2]) + 0.005 * np.sum(y * y), rtol=1e-12)


@pytest.mark.parametrize("name", ["g_x", "g_y", "f_y"])
def test_batches_are_unbiased(name: str) -> None:
    """The mean over batches that contain every sample equally often is the gradient on all samples."""
    shard = build(nodes=3, data=Digits(test_fraction=0.95)).shard([1])
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal(shard.x0.shape), rng.standard_normal(shard.y0.shape)
    have = int(shard.sizes[0 if name[0] == "g" else 1][0])
    batches = [(np.arange(4) + first)[None] % have for first in range(have)]
    rows = [getattr(shard.subset(b, None) if name[0] == "g" else shard.subset(None, b), name)(x, y) for b in batches]
    np.testing.assert_allclose(np.mean(rows, axis=0), getattr(shard, name)(x, y), rtol=1e-9, atol=1e-12)
    assert not np.allclose(rows[0], rows[1])


def test_a_batch_moves_only_its_own_logits() -> None:
    """∇_x g of a batch is non-zero at the drawn samples, at the same cells in every packing."""
    problem = build()
    batches = Batches(lower=4, upper=4)
    whole = problem.shard(range(5)).draw_batch(batches, 2, 1)
    alone = problem.shard([3]).draw_batch(batches, 2, 1)
    y = np.random.default_rng(3).standard_normal((5, problem.dim_y))
    x = np.zeros((5, problem.dim_x))
    rows = whole.g_x(x, y)
    assert [np.count_nonzero(row) for row in rows] == [4] * 5
    np.testing.assert_allclose(alone.g_x(x[:1], y[3:4])[0], rows[3], rtol=1e-12)
    assert set(np.flatnonzero(rows[3])) <= set(problem.train[3])


def test_f1_counts_hits_among_found_and_corrupted() -> None:
    """2 · hits / (found + corrupted); nothing found scores 0; the start finds nothing."""
    corrupted = np.array([True, True, False, False])
    assert find_f1(np.array([True, False, True, False]), corrupted) == 0.5
    assert find_f1(corrupted, corrupted) == 1.0
    assert find_f1(np.zeros(4, dtype=bool), corrupted) == 0.0
    problem = build()
    found = np.where(problem.corrupted, -1e-3, 1e-3)
    y = np.zeros((2, problem.dim_y))
    x = np.stack([np.zeros(problem.dim_x), found])
    np.testing.assert_array_equal(problem.evaluate(x, y)["corruption_f1"], [0.0, 1.0])
