"""STORM (Cutkosky and Orabona 2019): an estimate that is corrected by a difference on the same samples."""

from dbo.algorithms.protocol import Array


def storm(estimate: Array, new: Array, before: Array, weight: float) -> Array:
    """Return (1 − w) (estimate + new − before) + w new."""
    return (1 - weight) * (estimate + new - before) + weight * new
