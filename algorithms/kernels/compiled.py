"""Fused kernels for wide rows, compiled by numba: one pass over memory where NumPy arithmetic takes several.

This file holds loops and nothing else; `fused.py` decides when they run. Each works on one row, in a fixed order, so no
result depends on how rows are spread over threads. The kernels of top-k are in `selection.py`.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import extending, types
from numba.cpython.unsafe import numbers

from dbo.algorithms.protocol import Array

trailing_zeros: Any = numbers.trailing_zeros
carray: Any = numba.carray      # type: ignore[attr-defined]
pointer_to: Any = types.CPointer

_TILE = 2048      # entries whose sums in float64 stay in the L1 cache


def compiled(function: Callable[..., Any]) -> Any:
    """Compile with a cache on disk: beside this file, else in the user's cache folder, else without a cache."""
    try:
        return numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:
        return numba.njit(nogil=True, error_model="numpy")(function)


def intrinsic(function: Callable[..., Any]) -> Any:
    """Wrap numba's decorator with a type: the function returns a signature and a code generator."""
    return extending.intrinsic(prefer_literal=True)(function)


@intrinsic
def _at(typing: Any, address: Any, like: Any) -> Any:
    """Return an address as a pointer to entries of the type of `like`."""
    kind = pointer_to(like.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(kind))

    return kind(address, like), generate


@compiled
def _add_dense(total: Array, weight: float, row: Array) -> None:
    for i in range(total.size):
        total[i] += weight * row[i]


@compiled
def _add_packed(total: Array, weight: float, words: Array, entries: Array, at: Any) -> Any:
    """Add the entries marked in the words, the first of which is entries[at]; return the next position."""
    for i in range(words.size):
        word = words[i]
        base = np.uint64(64 * i)
        while word != 0:
            j = base + trailing_zeros(word)
            total[j] += weight * entries[at]
            at += np.uint64(1)
            word &= word - np.uint64(1)
    return at


@compiled
def _round_to(out: Array, total: Array) -> None:
    for i in range(out.size):
        out[i] = total[i]


@compiled
def evaluate(
    like: Array, dim: int, outs: Array, ends: Array, weights: Array, rows: Array, packed: Array
) -> None:
    """Compute sums of rows of the type of `like`, given by their addresses, a tile of entries at a time.

    Sum number n has the terms up to ends[n] and is written to outs[n]. Where packed[k] is not 0, rows[k] is the address
    of a packed row's words and packed[k] that of its entries.
    """
    at = np.zeros(rows.size, dtype=np.uint64)      # how many entries of each packed row have been added
    whole = np.empty(_TILE, dtype=np.float64)
    marks = np.empty(0, dtype=np.uint64)
    for start in range(0, dim, _TILE):
        size = min(_TILE, dim - start)
        total = whole[:size]
        first = 0
        for n in range(outs.size):
            total[:] = 0
            for k in range(first, ends[n]):
                if packed[k] == 0:
                    _add_dense(total, weights[k], carray(_at(rows[k] + start * like.itemsize, like), size))
                else:
                    words = carray(_at(rows[k] + start // 8, marks), (size + 63) // 64)
                    at[k] = _add_packed(total, weights[k], words, carray(_at(packed[k], like), dim), at[k])
            _round_to(carray(_at(outs[n] + start * like.itemsize, like), size), total)
            first = ends[n]


@compiled
def all_finite(bits: Array, exponent: int) -> bool:
    """Decide whether no number with these bits has all bits of the exponent set: neither NaN nor inf."""
    worst: Any = bits[0] & exponent
    for i in range(bits.size):
        worst = max(worst, bits[i] & exponent)
    return bool(worst < exponent)
