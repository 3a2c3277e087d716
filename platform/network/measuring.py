"""Measure many short sparse rows at once: the rows of a packet's channels, below each other.

A row of a few hundred entries takes less time than the calls that measure it. The lengths are those of `codecs`.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbo.platform.network.positions import parameter_limits
from dbo.platform.network.row_format import LOG, WIDTH_BYTES, grid_length, index_width

Counts = NDArray[np.int64]

MAX_ENTRIES = 1 << 20      # of rows that are measured at once: their marks stay in the cache; wider rows go one by one


def measure_compiled(loops: Any, values: NDArray[Any], bits: int) -> Counts:
    """Return what `measure_together` returns for single entries, with the compiled loops for these rows."""
    rows, dim = values.shape
    table = np.empty((rows, 3), dtype=np.int64)
    loops.measure_rows(values, *_row_facts(dim, values.itemsize, bits), np.empty(dim + 1, dtype=np.int64), table)
    return table


def measure_in_pieces(values: NDArray[Any], bits: int, width: int) -> Counts:
    """Return what `measure_together` returns, for any number of rows."""
    step = max(1, MAX_ENTRIES // max(1, values.shape[1]))
    pieces = [measure_together(values[start : start + step], bits, width) for start in range(0, len(values), step)]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def measure_together(values: NDArray[Any], bits: int, width: int) -> Counts:
    """Return for each of the rows, (rows, dim), the bytes of its body, the bytes of values in it, and the values.

    `bits` are those of a record, 0 for floats; `width` is that of a group of entries, 1 for single ones.
    """
    rows, dim = values.shape
    groups, itemsize = dim // width, values.dtype.itemsize
    # One more mark ends each row: the gap to the next mark then begins with the next row.
    marks = np.ones((rows, groups + 1), dtype=np.bool_)
    if width == 1:
        np.not_equal(values, 0, out=marks[:, :-1])
    else:
        np.any(values.reshape(rows, groups, width) != 0, axis=2, out=marks[:, :-1])
    at = np.flatnonzero(marks)
    ends = np.searchsorted(at, np.arange(groups, marks.size, groups + 1))      # of the rows among the marks
    counts = np.empty_like(ends)
    counts[0] = ends[0]
    counts[1:] = ends[1:] - ends[:-1] - 1
    limits = _limits(groups)
    shifts = limits.size - np.searchsorted(limits, counts, side="right")
    rice = -(-(counts + _sum_gaps(at, ends, counts, shifts)) // 8) - (-counts * shifts // 8)
    whole: Any = _values_length(dim, bits, itemsize)
    if bits:      # quantized rows are dense only if nothing is left out
        whole = np.where(counts < dim, np.iinfo(np.int64).max, whole)
    if width > 1:
        coded = WIDTH_BYTES + rice + counts * width * itemsize
    else:
        positions = np.minimum(rice, np.minimum(-(-dim // 8), counts * index_width(dim)))
        coded = _values_length(counts, bits, itemsize) + positions
    table = np.empty((rows, 3), dtype=np.int64)
    table[:, 0] = np.minimum(whole, coded)
    table[:, 2] = np.where(whole <= coded, dim, counts * width)
    table[:, 1] = _values_length(table[:, 2], bits, itemsize)
    if bits:
        table[:, :2] += grid_length(bits)
    if not counts.all():
        table[counts == 0] = 0
    return table


@lru_cache(maxsize=64)
def _row_facts(dim: int, itemsize: int, bits: int) -> tuple[Counts, int, int, int, int]:
    return _limits(dim), itemsize, bits & ~LOG, index_width(dim), grid_length(bits)


@lru_cache(maxsize=64)
def _limits(dim: int) -> Counts:
    return np.array(parameter_limits(dim), dtype=np.int64)


def _sum_gaps(at: Counts, ends: Counts, counts: Counts, shifts: Counts) -> Counts:
    """Return for each row Σ gap >> shift over its marks but the last; `ends` are the places of the last ones."""
    gaps = np.empty_like(at)
    gaps[0] = at[0]
    np.subtract(at[1:], at[:-1], out=gaps[1:])
    gaps[1:] -= 1
    gaps[ends] = 0
    gaps >>= shifts[0] if (shifts == shifts[0]).all() else np.repeat(shifts, counts + 1)
    sums: Counts = np.add.reduceat(gaps, ends - counts)
    return sums


def _values_length(count: Any, bits: int, itemsize: int) -> Any:
    """Return the bytes of so many values; `row_format.values_length` of one number."""
    return -(-count * (bits & ~LOG) // 8) if bits else count * itemsize
