"""Batches of a perceptron: passes that are computed ahead give the results of those computed alone."""

from typing import Any

import numpy as np
import pytest

from dbo.tasks.api import Batches, Setup
from dbo.tasks.datasets.digits import Digits
from dbo.tasks.partitions import ByClass
from dbo.tasks.problems import backbone
from dbo.tasks.problems.hyper_representation import HyperRepresentation

Array = Any
STEPS = 11
BATCHES = Batches(lower=5, upper=7, per_round=STEPS)
SETUP = Setup(nodes=4, seed=0, dtype="float64", partition=ByClass(), data=Digits())


@pytest.fixture(params=["relu", "tanh"])
def shard(request: pytest.FixtureRequest) -> Any:
    return HyperRepresentation(hidden=(12, 9, 6), activation=request.param).build(SETUP).shard(range(4))


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of batches that were computed together."""
    counts: list[int] = []
    original = backbone.Backbone.forward_batches

    def forward_batches(self: Any, features: Array, at: Array, x: Array) -> Any:
        counts.append(len(at))
        return original(self, features, at, x)

    monkeypatch.setattr(backbone.Backbone, "forward_batches", forward_batches)
    return counts


def draw_alone(shard: Any, round_: int, step: int) -> Any:
    """The same batch, which knows of no other."""
    numbers = [
        BATCHES.draw(level, shard.seed, shard.ids, sizes, round_, step)
        for level, sizes in zip(("lower", "upper"), shard.sizes, strict=True)
    ]
    return shard.subset(*numbers)


@pytest.mark.parametrize("rows", [4, 1000])
def test_batches_computed_ahead_equal_batches_computed_alone(
    shard: Any, ahead: list[int], monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """All oracles of all steps at one x; four rows at once are less than a batch."""
    monkeypatch.setattr(backbone, "_ROWS", rows)
    rng = np.random.default_rng(0)
    x, y, v = (rng.standard_normal(part.shape) * 0.3 for part in (shard.x0, shard.y0, shard.y0))
    batch = None
    for step in range(STEPS):
        batch, alone = shard.draw_batch(BATCHES, 2, step), draw_alone(shard, 2, step)
        for name in ("g_y", "f_y", "f", "g", "f_x", "g_x"):
            np.testing.assert_allclose(getattr(batch, name)(x, y), getattr(alone, name)(x, y), rtol=1e-11, atol=1e-13)
        for name in ("g_yy", "g_xy"):
            np.testing.assert_allclose(
                getattr(batch, name)(x, y, v), getattr(alone, name)(x, y, v), rtol=1e-11, atol=1e-13)
    assert ahead == [2, 2, 4, 4, 4, 4]      # on both levels: one alone, two, four, and the four that are left


def test_an_x_that_moves_computes_nothing_ahead(shard: Any, ahead: list[int]) -> None:
    batch = None
    for step in range(STEPS):
        x = shard.x0 + 0.1 * step
        batch, alone = shard.draw_batch(BATCHES, 0, step), draw_alone(shard, 0, step)
        np.testing.assert_array_equal(batch.g_y(x, shard.y0), alone.g_y(x, shard.y0))
    assert ahead == []


def test_passes_ahead_are_dropped_where_x_moves(shard: Any, ahead: list[int]) -> None:
    """x moves in the middle of a round: the batches after it are computed at the new x."""
    old, new, batch = shard.x0, shard.x0 + 0.1, None
    for step in range(STEPS):
        x = old if step < 4 else new
        batch, alone = shard.draw_batch(BATCHES, 0, step), draw_alone(shard, 0, step)
        np.testing.assert_allclose(batch.g_y(x, shard.y0), alone.g_y(x, shard.y0), rtol=1e-11, atol=1e-13)
    assert ahead


def test_a_round_leaves_nothing_behind(shard: Any, ahead: list[int]) -> None:
    """When the last batch of a round is dropped, its x and the passes ahead are freed; the next round starts anew."""
    for round_ in range(2):
        batch = None
        for step in range(3):
            batch = shard.draw_batch(BATCHES, round_, step)
            batch.g_y(shard.x0, shard.y0)
        assert shard.train.cache.ahead() is not None
        del batch
        assert shard.train.cache.ahead() is None
    assert ahead == [2, 2]
