"""Wrapped shards: oracle calls are counted, pooled rows are means, and x stays at its start."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.shard_wrappers import CountingShard, hold_x, pool_nodes
from dbo.platform.runs.runner import prepare

Tiny = Callable[..., Experiment]
ORACLES = ("f", "g", "f_x", "f_y", "g_x", "g_y", "g_yy", "g_xy")


def point(shard: Any, nodes: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x, y, v = (rng.standard_normal((nodes, dim)) for dim in (shard.dim_x, shard.dim_y, shard.dim_y))
    return {name: (x, y, v) if name in ("g_yy", "g_xy") else (x, y) for name in ORACLES}


@pytest.mark.parametrize(
    ("name", "counts"),
    [("f", (0, 0, 0, 0)), ("g", (0, 0, 0, 0)), *((name, (1, 0, 0, 1)) for name in ("f_x", "f_y", "g_x", "g_y")),
     ("g_yy", (0, 1, 0, 1)), ("g_xy", (0, 0, 1, 1))],
)
def test_calls_are_counted(tiny: Tiny, name: str, counts: tuple[int, ...]) -> None:
    """Gradients, products and their samples are counted, function values are not; values stay the same."""
    inner = prepare(tiny()).problem.shard(range(4))
    shard = CountingShard(inner)
    rows = point(shard, 4)[name]
    np.testing.assert_array_equal(getattr(shard, name)(*rows), getattr(inner, name)(*rows))
    sizes = inner.sizes[1 if name.startswith("f") else 0]
    assert tuple(shard.counters().values()) == (*counts[:3], counts[3] * int(sizes.max()))


def test_products_of_some_rows_are_counted_for_them_only(tiny: Tiny) -> None:
    """`g_yy_of` returns all products, counts those of the mask, and the maximum over rows is reported."""
    shard = CountingShard(prepare(tiny()).problem.shard(range(4)))
    rows = point(shard, 4)["g_yy"]
    np.testing.assert_array_equal(shard.g_yy_of(np.arange(4) < 1, *rows), shard.shard.g_yy(*rows))
    assert shard.calls[1].tolist() == [1, 0, 0, 0]
    assert shard.counters()["hvp_calls"] == 1


class FusedShard:
    """Another shard with a fused weighted gradient."""

    def __init__(self, shard: Any) -> None:
        self.shard = shard

    def __getattr__(self, name: str) -> Any:
        return getattr(self.shard, name)

    def h_y(self, x: Any, y: Any, f_weight: float, g_weight: float) -> Any:
        return f_weight * self.shard.f_y(x, y) + g_weight * self.shard.g_y(x, y)


def test_weighted_gradient_counts_two_gradients(tiny: Tiny) -> None:
    """The fused ∇_y (a f + b g) costs what its two terms cost; a shard without it has None."""
    inner = FusedShard(prepare(tiny()).problem.shard(range(4)))
    shard = CountingShard(inner)
    assert shard.h_y is not None
    x, y = point(shard, 4)["f"]
    np.testing.assert_array_equal(shard.h_y(x, y, 0.5, 2.0), inner.h_y(x, y, 0.5, 2.0))
    samples = int((inner.shard.sizes[0] + inner.shard.sizes[1]).max())
    assert shard.counters() == {"gradient_calls": 2, "hvp_calls": 0, "jvp_calls": 0, "samples": samples}
    assert CountingShard(inner.shard).h_y is None


def test_pooled_row_is_the_mean_of_all_nodes(tiny: Tiny) -> None:
    """One row, whose oracles are the means over the nodes at a common point."""
    problem = prepare(tiny()).problem
    inner, pooled = problem.shard(range(4)), pool_nodes(problem).shard([0])
    assert pooled.nodes == 1
    for name, rows in point(pooled, 1).items():
        expected = getattr(inner, name)(*(np.repeat(row, 4, axis=0) for row in rows)).mean(axis=0, keepdims=True)
        np.testing.assert_allclose(getattr(pooled, name)(*rows), expected, rtol=1e-12, err_msg=name)
    with pytest.raises(ValueError, match="single row 0"):
        pool_nodes(problem).shard([1])


def test_oracles_ignore_x_if_it_is_held(tiny: Tiny) -> None:
    """Every oracle is evaluated at x0, whatever x is passed."""
    problem = prepare(tiny()).problem
    inner, held = problem.shard(range(4)), hold_x(problem).shard(range(4))
    for name, (_, *rows) in point(held, 4).items():
        elsewhere = np.full_like(held.x0, 3.0)
        np.testing.assert_array_equal(
            getattr(held, name)(elsewhere, *rows), getattr(inner, name)(held.x0, *rows), err_msg=name
        )
