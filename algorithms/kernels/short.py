"""Choose compiled loops for the rows of a small block; results are those of NumPy, to the last bit."""

import sys
from functools import cache
from typing import Any

import numpy as np

from dbo.algorithms.kernels.fused import MIN_ENTRIES, is_cached
from dbo.algorithms.protocol import Array

_FEWEST = 1 << 11      # entries of a block's rows from which the import of numba pays

_TYPES = (np.dtype(np.float32), np.dtype(np.float64))
_imported: dict[np.dtype[Any], Any] = {}      # type of floats → the loops compiled for it
_INFINITY = {4: 0x7F800000, 8: 0x7FF0000000000000}      # bits, by the bytes of a float


def short_loops(rows: Array) -> Any:
    """Return the compiled loops if they suit these rows; None: use NumPy. Imports numba, which is slow."""
    return _import_loops(rows.dtype) if _are_short(rows) and rows.dtype in _TYPES else None


def imported_loops(rows: Array) -> Any:
    """Return what `short_loops` returns, if the loops are imported: for work that alone does not pay for it."""
    loops = _imported.get(rows.dtype)
    return loops if loops is not None and _are_short(rows) else None


def _are_short(rows: Array) -> bool:
    return rows.size >= _FEWEST and rows.ndim == 2 and rows.shape[1] < MIN_ENTRIES and rows.flags.carray


@cache
def _import_loops(dtype: np.dtype[Any]) -> Any:
    from dbo.algorithms.kernels import short_loops

    if not is_cached(short_loops.keep_largest):
        print("dbo: compiling kernels for short rows, once", file=sys.stderr, flush=True)
    short_loops.compile_loops(dtype.name)
    _imported[dtype] = short_loops
    return short_loops


def keep_largest(loops: Any, rows: Array, k: int) -> Array:
    """Keep each row's k largest entries by magnitude, NaN first, the first of equal ones; set the others to 0.0."""
    dtype, one, top, nan = _describe_bits(rows.itemsize)
    kept = np.empty_like(rows)
    loops.keep_largest(
        rows.view(dtype), k, one, top, nan, np.empty(rows.shape[1], dtype), np.empty(1, dtype), kept.view(dtype))
    return kept


@cache
def _describe_bits(size: int) -> tuple[np.dtype[Any], Any, Any, Any]:
    """Return the integers of so many bytes, and of that type: 1, the highest bit of a magnitude, that of NaN."""
    dtype = np.dtype(f"u{size}")
    kind = dtype.type
    return dtype, kind(1), kind(1 << (8 * size - 2)), kind(_INFINITY[size] + 1)


def multiply_sparse(loops: Any, weights: Any, rows: Array) -> Array:
    """Return W @ rows for a matrix of SciPy in CSR form."""
    product = np.empty((weights.shape[0], rows.shape[1]), rows.dtype)
    loops.multiply_sparse(weights.indptr, weights.indices, weights.data, rows, product)
    return product
