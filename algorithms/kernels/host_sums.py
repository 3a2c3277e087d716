"""Evaluate sums of wide NumPy rows with the compiled kernels of `fused`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dbo.algorithms.kernels import fused
from dbo.algorithms.protocol import Array


def evaluate(shape: tuple[int, int], dtype: Any, terms: Sequence[tuple[Any, Array]]) -> Array:
    """Return Σ c a over the terms (c, a), one at least, as a new array."""
    out = np.empty(shape, dtype)
    fused.evaluate([(out, terms)])
    return out


def all_finite(rows: Array) -> bool:
    """Decide whether rows hold neither NaN nor inf."""
    return fused.all_finite(rows)
