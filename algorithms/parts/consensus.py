"""Derive the consensus step of a loop that mixes reference points, from contraction and spectral gap.

Let node i hold d_i, and let all know a copy d̂_i that each message brings nearer: the error e = d − d̂ shrinks by 1 − δ.
Mixing the copies, d ← d + γ (W − I) d̂, moves the mode of I − W with eigenvalue μ by (with Q replaced by its mean δ)

    [d, e] ← [[1 − γμ, γμ], [−(1 − δ) γμ, (1 − δ)(1 + γμ)]] [d, e],     determinant 1 − δ, trace 2 − δ − δγμ.

Its eigenvalues are real, and the mode decays without oscillation, as long as γμ ≤ (1 − √(1 − δ))² / δ, about δ / 4. A
larger γ makes the mode swing and no faster: messages lag behind what they correct. The slowest mode has μ = ρ, the
spectral gap. So γ = (1 − √(1 − δ))² / (δ ρ), at most 1, is the largest step from which any mode gains.

This is a linear model of gossip alone. It does not prove that a method converges: theory (BEER, Zhao et al. 2022) takes
γ = c δ ρ with a small c, and steps η that shrink with it.
"""

import math
from typing import Any, Protocol

from dbo.algorithms.protocol import NetworkFacts


class Compresses(Protocol):
    """A configuration with a compressor of the lower level's rows."""

    @property
    def compressor(self) -> Any: ...


def consensus_step(contraction: float, spectral_gap: float) -> float:
    """Return γ = min(1, (1 − √(1 − δ))² / (δ ρ)); 1 without a network."""
    if spectral_gap <= 0:
        return 1.0
    damped = (1 - math.sqrt(1 - min(contraction, 1.0))) ** 2 / contraction
    return min(1.0, damped / spectral_gap)


def derive_gamma(cfg: Compresses, network: NetworkFacts, dim_x: int, dim_y: int) -> float:
    """Return the consensus step of rows of y: `gamma_in: auto`."""
    return consensus_step(cfg.compressor.contraction(dim_y), network.spectral_gap)
