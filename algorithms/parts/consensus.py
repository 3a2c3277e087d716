"""Derive the consensus step of a loop that mixes reference points, from the compressor and the network.

Let node i hold d_i, and let all know a copy d̂_i that each message brings nearer. Mixing the copies,
d ← d + γ (W − I) d̂, moves the mode of I − W with eigenvalue μ and the error e = d − d̂ of the copies. With Q replaced by
its mean contraction δ,

    [d, e] ← [[1 − γμ, γμ], [−(1 − δ) γμ, (1 − δ)(1 + γμ)]] [d, e],     determinant 1 − δ, trace 2 − δ − δγμ.

Its eigenvalues are real, and the mode decays without oscillation, as long as γμ ≤ (1 − √(1 − δ))² / δ, about δ / 4. The
slowest mode has μ = ρ, the spectral gap: `damped_step` is the largest step from which any mode gains.

The mean hides that random messages have a variance. Take an entry that a message has with probability δ. Between two of
its messages, T steps apart, d̂ stays and d moves by −Tγμ d: E (1 − Tγμ)² < 1 needs γμ < 2δ/(2 − δ), and is smallest at
half of that. `mean_square_step` is this half for the fastest mode, so that all modes are stable.

Primal-dual loops integrate old copies, D ← D + γ/(2η) (I − W) d̂. Without gradients a mode grows; the curvature has to
damp it. With c = η · curvature and a = γμ/2, modes are stable in mean square for

    a < c δ/(1 − δ)     LEAD: every step pushes by copies of mean age (1 − δ)/δ
    a < c + κμδ         edge-triggered, about: the messages of both ends push, one of them by an old copy

A run does not know c, which is one over the condition number if η is near 1/L: `DAMPING` is assumed. Top-k renews what
is far off first: in LEAD, `DAMPING_LARGEST` takes its place; in tracked and edge-triggered loops, `damped_step`.

docs/beyond.md has what is measured. None of this proves that a method converges: theory (BEER, Zhao et al. 2022) takes
γ = c δ ρ with a small c, and steps η that shrink with it.
"""

import math
from typing import Any, Protocol

from dbo.algorithms.compression.compressors import is_deterministic
from dbo.algorithms.protocol import NetworkFacts

DAMPING = 0.01              # assumed c of primal-dual loops
DAMPING_LARGEST = 0.1       # of LEAD, with messages of the largest entries


class Compresses(Protocol):
    """A configuration with a compressor of the lower level's rows."""

    @property
    def compressor(self) -> Any: ...


class CompressesAndDamps(Compresses, Protocol):
    """The same with κ."""

    @property
    def damping(self) -> float: ...


def damped_step(contraction: float, spectral_gap: float) -> float:
    """Return γ = min(1, (1 − √(1 − δ))² / (δ ρ)); 1 without a network."""
    if spectral_gap <= 0:
        return 1.0
    damped = (1 - math.sqrt(1 - min(contraction, 1.0))) ** 2 / contraction
    return min(1.0, damped / spectral_gap)


def mean_square_step(contraction: float, fastest: float) -> float:
    """Return γ = min(1, δ / ((2 − δ) μ_max)); 1 where nothing is lost."""
    if fastest <= 0 or contraction >= 1:
        return 1.0
    return min(1.0, contraction / ((2 - contraction) * fastest))


def lead_step(contraction: float, fastest: float, curvature: float) -> float:
    """Return half of the limit a = c δ/(1 − δ) of the fastest mode, a = γ μ_max/2; at most `mean_square_step`."""
    step = mean_square_step(contraction, fastest)
    if fastest <= 0 or contraction >= 1:
        return step
    return min(step, curvature * contraction / ((1 - contraction) * fastest))


def triggered_step(contraction: float, fastest: float, damping: float) -> float:
    """Return half of the limit a = c + κμδ of the fastest mode; at most `mean_square_step`."""
    step = mean_square_step(contraction, fastest)
    if fastest <= 0 or contraction >= 1:
        return step
    return min(step, DAMPING / fastest + damping * contraction)


def bound_fastest(network: NetworkFacts) -> float:
    """Return 2 D/(1 + D) ≥ μ_max for D neighbours at most: Metropolis weights leave w_ii ≥ 1/(1 + D) at a node."""
    return 2 * network.places / (1 + network.places)


def derive_gamma(cfg: Compresses, network: NetworkFacts, dim_x: int, dim_y: int) -> float:
    """Return the consensus step of rows of y in a tracked loop: `gamma_in: auto`."""
    delta = cfg.compressor.contraction(dim_y)
    if is_deterministic(cfg.compressor):
        return damped_step(delta, network.spectral_gap)
    return mean_square_step(delta, bound_fastest(network))


def derive_lead_gamma(cfg: Compresses, network: NetworkFacts, dim_x: int, dim_y: int) -> float:
    """Return the consensus step of rows of y in a loop of LEAD."""
    curvature = DAMPING_LARGEST if is_deterministic(cfg.compressor) else DAMPING
    return lead_step(cfg.compressor.contraction(dim_y), bound_fastest(network), curvature)


def derive_triggered_gamma(cfg: CompressesAndDamps, network: NetworkFacts, dim_x: int, dim_y: int) -> float:
    """Return the consensus step of rows of y in an edge-triggered loop."""
    delta = cfg.compressor.contraction(dim_y)
    if is_deterministic(cfg.compressor):
        return damped_step(delta, network.spectral_gap)
    return triggered_step(delta, bound_fastest(network), cfg.damping)
