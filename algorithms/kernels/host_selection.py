"""Select the top-k of NumPy rows and quantize them.

`selection` has compiled kernels for wide rows, `short_loops` for the short rows of a block.
"""

from typing import Any

import numpy as np

from dbo.algorithms.compression.grid import level_values, quantize_entries
from dbo.algorithms.kernels import short
from dbo.algorithms.protocol import Array

_INTEGERS: dict[int, Any] = {4: np.int32, 8: np.int64}      # by the bytes of a float


def keep_largest(rows: Array, k: int) -> Array:
    """Keep each row's k largest entries by magnitude, NaN first, the first of equal ones; set the others to 0.0."""
    loops = short.short_loops(rows)
    if loops is not None:
        return short.keep_largest(loops, rows, k)
    dropped = _mark_smallest(np.abs(rows), rows.shape[1] - k)
    kept: Array = np.where(dropped, 0.0, rows) + 0.0      # turns −0.0, which is not sent, into 0.0
    return kept


def _mark_smallest(magnitude: Array, count: int) -> Array:
    """Return a mask of each row's `count` smallest entries: the last of equal ones, and NaN is the largest.

    Where the threshold is zero the mask may hold fewer: a zero is not sent whether it is kept or not.
    """
    # Magnitudes compare like the integers with their bits, NaN last; NumPy partitions integers faster.
    ranked = magnitude.view(_INTEGERS[magnitude.dtype.itemsize]).copy()
    ranked.partition(count, axis=1)
    threshold = ranked[:, count : count + 1].view(magnitude.dtype)
    # NaN is not below, so no row marks more than `count` entries: the total is right only if every row is.
    below: Array = magnitude < threshold
    if int(np.count_nonzero(below)) != len(magnitude) * count:
        for i in (i for i, value in enumerate(threshold[:, 0].tolist()) if value != 0):
            _break_ties(magnitude[i], threshold[i, 0], below[i], count)
    return below


def _break_ties(magnitude: Array, threshold: Any, below: Array, count: int) -> None:
    """Extend one row's mask to `count` entries with the last of those that equal the threshold."""
    tied = magnitude == threshold
    if np.isnan(threshold):
        tied = np.isnan(magnitude)
        below[:] = ~tied
    missing = count - int(np.count_nonzero(below))
    if missing:
        below[np.nonzero(tied)[0][-missing:]] = True


def round_scale(largest: Array, kept_bits: int) -> Array:
    """Round magnitudes up to floats whose bits after the first ones are 0; NaN where one is not finite."""
    kind: Any = {4: np.uint32, 8: np.uint64}[largest.itemsize]
    rest = kind((1 << (8 * largest.itemsize - kept_bits)) - 1)
    finite = np.isfinite(largest)
    up = ((np.where(finite, largest, 0).view(kind) + rest) & ~rest).view(largest.dtype)
    return np.asarray(np.where(finite, up, largest.dtype.type(np.nan)))


def level_tables(scale: Array, span: Array, bits: int, log: bool) -> Array:
    """Return the magnitudes that the levels of each row stand for, ascending, in float64."""
    return np.stack([level_values(float(s), int(n), bits, log) for s, n in zip(scale, span, strict=True)])


def quantize_rows(rows: Array, bits: int, log: bool) -> tuple[Array, Array, Array]:
    """Return the nonzero entries of each row at their levels, with scales and spans."""
    values, scales, spans = np.zeros_like(rows), np.zeros(len(rows), rows.dtype), np.zeros(len(rows), np.int64)
    for i, row in enumerate(rows):
        at = np.flatnonzero(row)
        values[i, at], _, scales[i], spans[i] = quantize_entries(row[at], bits, log)
    return values, scales, spans
