"""Hypergradients from a node's own Hessian, its inverse replaced by a truncated Neumann series.

H⁻¹ ≈ P_J = (1/L) Σ_{j<J} (I − H/L)^j with L ≥ λ_max(H). Each node takes its *own* H_i, so the mean of these
hypergradients is that of ψ only where all nodes have the same lower level: methods that use it are biased by
heterogeneity, however long the series.
"""

from typing import Literal

import array_api_compat
import numpy as np

from dbo.algorithms.kernels.fused import series_step
from dbo.algorithms.protocol import Array, Shard
from dbo.algorithms.rng import Draws

Neumann = Literal["deterministic", "sampled"]


def hypergradient(
    shard: Shard, x: Array, y: Array, key: Draws, *, neumann: Neumann, terms: int, lipschitz: float
) -> Array:
    """∇_x f − ∇²_xy g p with p ≈ (∇²_yy g)⁻¹ ∇_y f, all of the node's own functions."""
    f_y = shard.f_y(x, y)
    if neumann == "sampled":
        p = sampled_inverse(shard, x, y, f_y, sample_lengths(key, terms), terms, lipschitz)
    else:
        p = truncated_inverse(shard, x, y, f_y, terms, lipschitz)
    return shard.f_x(x, y) - shard.g_xy(x, y, p)


def truncated_inverse(shard: Shard, x: Array, y: Array, b: Array, terms: int, lipschitz: float) -> Array:
    """P_J b, by Horner's rule: J − 1 Hessian-vector products."""
    p = b
    for _ in range(terms - 1):
        p = series_step(p, shard.g_yy(x, y, p), lipschitz, b)
    return p / lipschitz


def sampled_inverse(
    shard: Shard, x: Array, y: Array, b: Array, lengths: Array, terms: int, lipschitz: float
) -> Array:
    """(J/L) (I − H/L)^{J_i} b, one term of the series with a factor that makes it right on average.

    Rows leave one by one as their product is long enough: what is computed for them beyond is thrown away, and not
    counted as theirs.
    """
    products = getattr(shard, "g_yy_of", lambda rows, *point: shard.g_yy(*point))
    xp = array_api_compat.array_namespace(b)
    p = b
    for j in range(int(lengths.max(initial=0))):
        longer = lengths > j
        still = xp.asarray(longer[:, None], device=array_api_compat.device(b))
        p = xp.where(still, p - products(longer, x, y, p) / lipschitz, p)
    return p * (terms / lipschitz)


def sample_lengths(key: Draws, terms: int) -> Array:
    """J_i, uniform on {0, …, J − 1}, one per row."""
    return np.array([generator.integers(terms) for generator in key.generators("neumann")], dtype=np.int64)
