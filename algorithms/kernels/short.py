"""Choose compiled loops for the rows of a small block; results are those of NumPy, to the last bit."""

import sys
from functools import cache
from typing import Any

import numpy as np

from dbo.algorithms.kernels.fused import MIN_ENTRIES, is_cached
from dbo.algorithms.protocol import Array

_FEWEST = 1 << 11      # entries of a block's rows from which the import of numba pays

_TYPES = (np.dtype(np.float32), np.dtype(np.float64))
_INFINITY = {4: 0x7F800000, 8: 0x7FF0000000000000}      # bits, by the bytes of a float


def short_loops(rows: Array) -> Any:
    """Return the compiled loops if they suit these rows; None: use NumPy. Imports numba, which is slow."""
    if rows.size < _FEWEST or rows.ndim != 2 or rows.shape[1] >= MIN_ENTRIES or not rows.flags.carray:
        return None
    return _import_loops(rows.dtype) if rows.dtype in _TYPES else None


@cache
def _import_loops(dtype: np.dtype[Any]) -> Any:
    from dbo.algorithms.kernels import short_loops

    if not is_cached(short_loops.keep_largest):
        print("dbo: compiling kernels for short rows, once", file=sys.stderr, flush=True)
    short_loops.compile_loops(dtype.name)
    return short_loops


def keep_largest(loops: Any, rows: Array, k: int) -> Array:
    """Keep each row's k largest entries by magnitude, NaN first, the first of equal ones; set the others to 0.0."""
    size = rows.itemsize
    words = rows.view(f"u{size}")
    kind, kept = words.dtype.type, np.empty_like(rows)
    loops.keep_largest(
        words, k, kind(1), kind(1 << (8 * size - 2)), kind(_INFINITY[size] + 1), np.empty(rows.shape[1], kind),
        np.empty(1, kind), kept.view(words.dtype),
    )
    return kept
