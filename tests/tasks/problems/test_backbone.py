"""Batches of a perceptron: passes that are computed ahead give the results of those computed alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dbo.tasks.api import Batches, Setup
from dbo.tasks.datasets.digits import Digits
from dbo.tasks.kernels import gathered_products
from dbo.tasks.kernels.compiling import has_avx512
from dbo.tasks.kernels.threads import set_threads
from dbo.tasks.partitions import ByClass
from dbo.tasks.problems import backbone
from dbo.tasks.problems.hyper_representation import HyperRepresentation

Array = Any
STEPS = 11
BATCHES = Batches(lower=5, upper=7, per_round=STEPS)
SETUP = Setup(nodes=4, seed=0, dtype="float64", partition=ByClass(), data=Digits())


@pytest.fixture(params=["relu", "tanh", "compiled relu", "compiled tanh"])
def shard(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    is_compiled, activation = request.param.startswith("compiled"), request.param.split()[-1]
    if is_compiled:
        compile_batches(monkeypatch)
    hidden = (56, 24, 8) if is_compiled else (12, 9, 6)
    return build_shard(hidden, activation)


def compile_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the compiled products for small batches too."""
    if not has_avx512():
        pytest.skip("needs AVX-512")
    monkeypatch.setattr(backbone, "_FEWEST", 0)


def build_shard(hidden: tuple[int, ...], activation: Any = "relu", ids: Sequence[int] = range(4)) -> Any:
    return HyperRepresentation(hidden=hidden, activation=activation).build(SETUP).shard(ids)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of batches that were computed together, where that is more than one."""
    counts: list[int] = []
    original = backbone.Backbone.forward_batches

    def forward_batches(self: Any, features: Array, at: Array, x: Array) -> Any:
        counts.extend([len(at)] if len(at) > 1 else [])
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


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_compiled_products_give_the_gradients_of_blas(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All oracles of a batch, with the compiled products and without."""
    shard = build_shard((56, 24, 8), activation)
    rng = np.random.default_rng(0)
    x, y, v = (rng.standard_normal(part.shape) * 0.3 for part in (shard.x0, shard.y0, shard.y0))

    def evaluate() -> list[Array]:
        batch = draw_alone(shard, 0, 0)
        return [getattr(batch, name)(x, y) for name in ("f_x", "g_x", "f_y", "g_y", "f", "g")] + [batch.g_xy(x, y, v)]

    of_blas = evaluate()
    compile_batches(monkeypatch)
    calls: list[str] = []
    for name in ("multiply", "multiply_transposed"):
        monkeypatch.setattr(gathered_products, name, record_calls(calls, name))
    for compiled, other in zip(evaluate(), of_blas, strict=True):
        np.testing.assert_allclose(compiled, other, rtol=1e-11, atol=1e-13)
    assert set(calls) == {"multiply", "multiply_transposed"}


def record_calls(calls: list[str], name: str) -> Any:
    original = getattr(gathered_products, name)

    def call(*arguments: Any) -> None:
        calls.append(name)
        original(*arguments)

    return call


@pytest.mark.parametrize("threads", [1, 2])
def test_a_block_of_any_size_has_the_same_bits(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Compiled products of four nodes at once are those of one node, also ahead and on several threads."""
    compile_batches(monkeypatch)
    whole, part = build_shard((56, 24, 8)), build_shard((56, 24, 8), ids=[2])
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(rows.shape) * 0.3 for rows in (whole.x0, whole.y0))
    own = x[2:3], y[2:3]
    one = batch = None
    try:
        for step in range(4):
            set_threads(threads)
            batch = whole.draw_batch(BATCHES, 0, step)
            expected = [getattr(batch, name)(x, y)[2:3] for name in ("g_y", "f_x")]
            set_threads(1)
            one = part.draw_batch(BATCHES, 0, step)
            for name, rows in zip(("g_y", "f_x"), expected, strict=True):
                np.testing.assert_array_equal(getattr(one, name)(*own), rows)
    finally:
        set_threads(1)


def test_layers_that_fill_no_register_are_left_to_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_batches(monkeypatch)
    shard = build_shard((12, 9, 6))
    assert shard.train.backbone.find_products(shard.train.features, 64) is None
