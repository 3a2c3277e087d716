"""Keep rows in a ball: SOBA's v, whose bound several proofs need."""

import array_api_compat

from dbo.algorithms.protocol import Array


def project(v: Array, radius: float) -> Array:
    """Project each row onto the ball; rows inside it do not change, to the last bit."""
    xp = array_api_compat.array_namespace(v)
    norm = xp.sqrt(xp.sum(v * v, axis=1, keepdims=True))
    projected: Array = xp.where(norm > radius, v * (radius / xp.where(norm > 0, norm, 1)), v)
    return projected
