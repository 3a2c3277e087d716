"""Choose compiled loops for the rows of a small block; results are those of NumPy, to the last bit."""

import sys
from functools import cache
from typing import Any

import numpy as np

from dbo.algorithms.kernels.fused import MIN_ENTRIES, is_cached
from dbo.algorithms.protocol import Array

_FEWEST = 1 << 11      # entries of a block's rows from which the import of numba pays

_INFINITY = {4: 0x7F800000, 8: 0x7FF0000000000000}      # bits, by the bytes of a float


def short_loops(rows: Array) -> Any:
    """Return the compiled loops if they suit these rows; None: use NumPy. Imports numba, which is slow."""
    is_short = (
        rows.ndim == 2 and rows.size >= _FEWEST and rows.shape[1] < MIN_ENTRIES and rows.dtype.char in "fd"
        and rows.dtype.isnative and rows.flags.c_contiguous and rows.flags.writeable
    )
    return _import_loops(rows.dtype.name) if is_short else None


@cache
def _import_loops(dtype: str) -> Any:
    from dbo.algorithms.kernels import short_loops

    if not is_cached(short_loops.keep_largest):
        print("dbo: compiling kernels for short rows, once", file=sys.stderr, flush=True)
    short_loops.compile_loops(dtype)
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
