"""Gradients of the fully first-order penalty reformulation (Kwon et al. 2023; eqs. (2)–(4) of the C²DFB paper).

ψ_λ(x) = min_y f(x, y) + λ (g(x, y) − min_z g(x, z)), whose gradient needs first-order oracles only. The central
difference is ψ_±λ(x) = (λ/2) (min_y [g + f/λ](x, y) − min_y [g − f/λ](x, y)): F²SA-p with p = 2, arXiv 2509.02937.
"""

from typing import Literal

from dbo.algorithms.protocol import Array, Shard

YObjective = Literal["h_over_lambda", "h"]


def upper_gradient(shard: Shard, lam: float, x: Array, y: Array, z: Array) -> Array:
    """Return eq. (4): ∇_x f(x, y) + λ (∇_x g(x, y) − ∇_x g(x, z)).

    All three on the samples of `shard`: two batches would leave λ times the difference of their noises.
    """
    return shard.f_x(x, y) + lam * (shard.g_x(x, y) - shard.g_x(x, z))


def y_gradient(shard: Shard, lam: float, objective: YObjective, x: Array, y: Array) -> Array:
    """Return ∇_y of h = f + λ g, or of h / λ.

    departs: the paper's theory takes η_in ~ 1/(λ L_g) for this loop and its experiments η_in = 1 for both; stepping on
    h / λ with one η_in is the reading under which one step size fits both loops. `h` is the paper's text, literally.
    """
    if shard.h_y is not None:
        return shard.h_y(x, y, 1.0, lam) if objective == "h" else shard.h_y(x, y, 1.0 / lam, 1.0)
    if objective == "h":
        return shard.f_y(x, y) + lam * shard.g_y(x, y)
    return shard.f_y(x, y) / lam + shard.g_y(x, y)


def shifted_gradient(shard: Shard, lam: float, x: Array, y: Array) -> Array:
    """Return ∇_y of g + f / λ; a negative λ gives that of g − f / |λ|."""
    if shard.h_y is not None:
        return shard.h_y(x, y, 1.0 / lam, 1.0)
    return shard.g_y(x, y) + shard.f_y(x, y) / lam


def central_gradient(shard: Shard, lam: float, x: Array, y_plus: Array, y_minus: Array) -> Array:
    """Return ∇ψ_±λ: ½ (∇_x f(x, y₊) + ∇_x f(x, y₋)) + (λ/2) (∇_x g(x, y₊) − ∇_x g(x, y₋)).

    All four on the samples of `shard`, as in `upper_gradient`.
    """
    return 0.5 * (shard.f_x(x, y_plus) + shard.f_x(x, y_minus)) + (lam / 2) * (
        shard.g_x(x, y_plus) - shard.g_x(x, y_minus))
