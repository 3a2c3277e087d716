"""Compute hypergradients from a node's own Hessian, with a truncated Neumann series for its inverse.

H⁻¹ ≈ P_J = (1/L) Σ_{j<J} (I − H/L)^j with L ≥ λ_max(H). Each node uses its *own* H_i, so the mean of these
hypergradients is that of ψ only where all nodes have the same lower level: methods that use it are biased under
heterogeneity, however long the series.

With mini-batches every factor I − H/L has samples of its own. Factors are then independent, and the mean of the sampled
series is the series. One batch for all of them (`batch_per: round`) would bias it.
"""

from collections.abc import Callable
from typing import Literal, TypeAlias

import array_api_compat
import numpy as np

from dbo.algorithms.protocol import Array, CountsRows, Shard
from dbo.algorithms.rng import Key

Neumann = Literal["deterministic", "sampled"]
Draw: TypeAlias = Callable[[int], Shard]      # the number of a step → the batch that it sees


def hypergradient(
    draw: Draw, x: Array, y: Array, key: Key, *, neumann: Neumann, terms: int, lipschitz: float
) -> Array:
    """Return ∇_x f − ∇²_xy g p with p ≈ (∇²_yy g)⁻¹ ∇_y f, all of the node's own functions.

    The batch of step 0 serves ∇_x f, ∇_y f and ∇²_xy g, those of steps 1 … J − 1 the factors of the series.
    """
    batch = draw(0)
    f_y = batch.f_y(x, y)
    if neumann == "sampled":
        p = sampled_inverse(draw, x, y, f_y, sample_lengths(key, terms), terms, lipschitz)
    else:
        p = truncated_inverse(draw, x, y, f_y, terms, lipschitz)
    return batch.f_x(x, y) - batch.g_xy(x, y, p)


def draw_from(shard: Shard, key: Key) -> Draw:
    """Return the function that draws the batches of the key's round."""
    return lambda step: shard.sample(key.at(step))


def truncated_inverse(draw: Draw, x: Array, y: Array, b: Array, terms: int, lipschitz: float) -> Array:
    """Return P_J b, by Horner's rule: J − 1 Hessian-vector products, on the batches of steps 1 … J − 1."""
    p = b
    for j in range(1, terms):
        p = p - draw(j).g_yy(x, y, p) / lipschitz + b
    return p / lipschitz


def sampled_inverse(
    draw: Draw, x: Array, y: Array, b: Array, lengths: Array, terms: int, lipschitz: float
) -> Array:
    """Return (J/L) (I − H/L)^{J_i} b: one term of the series, scaled so that its mean is the series.

    Products are computed for all rows until the longest one is done; a row neither uses nor counts more than J_i.
    """
    xp = array_api_compat.array_namespace(b)
    p = b
    for j in range(int(lengths.max(initial=0))):
        active, batch = lengths > j, draw(j + 1)
        hvp = batch.g_yy_of(active, x, y, p) if isinstance(batch, CountsRows) else batch.g_yy(x, y, p)
        p = xp.where(xp.asarray(active[:, None], device=array_api_compat.device(b)), p - hvp / lipschitz, p)
    return p * (terms / lipschitz)


def sample_lengths(key: Key, terms: int) -> Array:
    """Sample J_i, uniform on {0, …, J − 1}, one per row."""
    return np.array([generator.integers(terms) for generator in key.generators("neumann")], dtype=np.int64)
