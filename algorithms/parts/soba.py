"""The three directions of SOBA (Dagréou et al. 2022): a bilevel step without inner loops or inverses.

v approximates the solution of ∇²_yy g v = ∇_y f and moves along the residual of that equation. At the same time y moves
along ∇_y g, and x along the hypergradient with the current v. At a common zero of the three means, y = y*(x),
v = (mean ∇²_yy g_i)⁻¹ mean ∇_y f_i, and the hypergradient of ψ is 0.
"""

from dataclasses import dataclass

from dbo.algorithms.protocol import Array, Shard


@dataclass(frozen=True, slots=True)
class Directions:
    """One row per node for each of the three variables: the local directions, or trackers of their means."""

    x: Array
    y: Array
    v: Array


def directions(shard: Shard, x: Array, y: Array, v: Array) -> Directions:
    """Return D_x = ∇_x f − ∇²_xy g v, D_y = ∇_y g, D_v = ∇²_yy g v − ∇_y f: three gradients, an HVP and a JVP."""
    return Directions(
        x=shard.f_x(x, y) - shard.g_xy(x, y, v),
        y=shard.g_y(x, y),
        v=shard.g_yy(x, y, v) - shard.f_y(x, y),
    )


def first_order_directions(shard: Shard, x: Array, y: Array, v: Array, delta: float) -> Directions:
    """Return the same with central differences of gradients for both products: seven gradients, error O(δ² |v|³).

    Both sides of a difference see the samples of `shard`: two batches would leave their noise divided by δ.
    """
    ahead, behind = y + delta * v, y - delta * v
    jvp = (shard.g_x(x, ahead) - shard.g_x(x, behind)) / (2 * delta)
    hvp = (shard.g_y(x, ahead) - shard.g_y(x, behind)) / (2 * delta)
    return Directions(x=shard.f_x(x, y) - jvp, y=shard.g_y(x, y), v=hvp - shard.f_y(x, y))
