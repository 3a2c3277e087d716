"""Loops over short rows, compiled by numba: the calls of NumPy take longer than the rows of a small block.

This file holds loops and nothing else; `short.py` decides when they run.
"""

from typing import Any

import numpy as np

from dbo.algorithms.kernels.compiled import BLOCK, compiled, sum_entries
from dbo.algorithms.protocol import Array


@compiled
def keep_largest(
    rows: Array, k: int, one: Any, top: Any, nan: Any, magnitudes: Array, word: Array, kept: Array
) -> None:
    """Copy the k largest of each row of floats, given as unsigned integers, to `kept`; set the others to 0.

    Magnitudes compare like the integers with their bits. The k-th largest is found bit by bit, from `top` on. All NaN
    count as `nan`, the largest magnitude. `one`, and a value that passes through `word`, have the type of the rows.
    """
    dim, zero = rows.shape[1], one - one
    for i in range(rows.shape[0]):
        row, out = rows[i], kept[i]
        for j in range(dim):
            word[0] = row[j] & (top | (top - one))
            magnitudes[j] = min(word[0], nan)
        word[0] = zero
        threshold, bit, count = word[0], top, dim
        while bit and count != k:
            word[0] = threshold | bit
            reached, least = np.int32(0), word[0]      # 32 bits: more counts in a register
            for j in range(dim):
                reached = np.int32(reached + (magnitudes[j] >= least))
            if reached >= k:
                threshold, count = word[0], reached
            bit = bit >> one
        if count == k:
            for j in range(dim):
                word[0] = row[j] if magnitudes[j] else zero
                out[j] = word[0] if magnitudes[j] >= threshold else zero
            continue
        left = k - count      # of those that equal the threshold, of which there are too many, the first are kept
        for j in range(dim):
            left += magnitudes[j] == threshold
        for j in range(dim):
            is_kept = magnitudes[j] > threshold
            if magnitudes[j] == threshold:
                is_kept = left > 0 and threshold > 0
                left -= 1
            out[j] = row[j] if is_kept else zero


@compiled
def measure_rows(
    rows: Array, limits: Array, itemsize: int, bits: int, index_width: int, head: int, at: Array, table: Array
) -> None:
    """Write the bytes of the body of each sparse row, the bytes of values in it, and the values, to `table`.

    `limits` are those of the parameter of the Rice code. Values have `bits` each, or 0 for floats of `itemsize` bytes.
    """
    dim = rows.shape[1]
    for i in range(rows.shape[0]):
        row, count = rows[i], 0
        for j in range(dim):
            at[count] = j
            count += row[j] != 0
        table[i] = 0
        if not count:
            continue
        shift = 0
        for limit in limits:
            shift += limit > count
        unary, before = count, -1
        for n in range(count):
            unary += (at[n] - before - 1) >> shift
            before = at[n]
        rice = (unary + 7) // 8 + (count * shift + 7) // 8
        positions = min(rice, (dim + 7) // 8, count * index_width)
        values = (count * bits + 7) // 8 if bits else count * itemsize
        whole = (dim * bits + 7) // 8 if bits else dim * itemsize
        is_whole = whole <= values + positions and (not bits or count == dim)      # quantized rows: nothing left out
        table[i, 0] = head + (whole if is_whole else values + positions)
        table[i, 1] = head + (whole if is_whole else values)
        table[i, 2] = dim if is_whole else count


@compiled
def multiply_sparse(indptr: Array, indices: Array, weights: Array, rows: Array, out: Array) -> None:
    """Write W @ rows to `out`, for W in CSR form: terms in the order of the columns, each product and sum rounded.

    A few entries of all rows after the other: their sums stay in registers, and of many rows more stays in the cache.
    """
    dim, size = rows.shape[1], rows.itemsize
    places, factors = np.empty(indices.size, np.int64), np.empty(indices.size, np.float64)
    for k in range(indices.size):
        places[k] = rows.ctypes.data + indices[k] * dim * size
        factors[k] = weights[k]
    for start in range(0, dim, BLOCK):
        for i in range(out.shape[0]):
            target, first, last = out.ctypes.data + i * dim * size, np.int64(indptr[i]), np.int64(indptr[i + 1])
            if start + BLOCK <= dim:
                sum_entries(BLOCK, 0, rows, target, places, factors, first, last, start * size, 0)
                continue
            at = start
            while at + 8 <= dim:
                sum_entries(8, 0, rows, target, places, factors, first, last, at * size, 0)
                at += 8
            while at < dim:
                sum_entries(1, 0, rows, target, places, factors, first, last, at * size, 0)
                at += 1


def compile_loops(dtype: str) -> None:
    """Compile the loops for floats of one type, or load them from the cache."""
    rows, kind = np.ones((1, 2), dtype), np.dtype(f"u{np.dtype(dtype).itemsize}")
    word = np.zeros(2, kind)
    keep_largest(rows.view(kind), 1, kind.type(1), kind.type(2), kind.type(2), word, word, rows.view(kind))
    integers = np.zeros((1, 3), np.int64)
    measure_rows(rows, integers[0], 4, 0, 1, 0, integers[0], integers)
    ends = np.zeros(2, np.int32)      # as in a small matrix of SciPy
    multiply_sparse(ends, ends[:0], rows[0], rows, rows.copy())
