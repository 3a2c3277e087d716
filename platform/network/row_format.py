"""Define the forms in which a row travels, their lengths, and the checks of a format before a row is allocated.

A row travels in one of four forms; everything is little-endian:

    dense    `count` = dim values
    index    `count` positions in the smallest unsigned width that dim fits into, ascending, then their values
    bitmap   a bit per entry, ⌈dim/8⌉ bytes, then `count` values
    levels   the unit, then dim integers of `bits` bits each, stored as level + 2^(bits−1); one bit is −1 or +1

A sparse message takes the shortest of the first three; index and bitmap never carry a zero.
"""

from typing import Any, NamedTuple

import numpy as np

DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<f8")}
DENSE, INDEX, BITMAP, LEVELS = range(4)


class WireError(ValueError):
    """A packet that cannot be encoded or must not be trusted."""


class CorruptError(WireError):
    """Parts of the packet contradict each other."""


class RowFormat(NamedTuple):
    """What a receiver must know of a body to decode it."""

    dtype: int      # 1: float32, 2: float64
    form: int
    bits: int       # of a level; 0 in every other form
    dim: int
    values: int     # in the body: `count` above


class RowType(NamedTuple):
    """What a receiver expects of a row, whatever its form."""

    dtype: int
    dim: int

    def __str__(self) -> str:
        return f"{self.dim} entries of {DTYPES[self.dtype].name if self.dtype in DTYPES else f'dtype {self.dtype}'}"


def index_width(dim: int) -> int:
    """Return the bytes of the smallest unsigned integer that holds every position."""
    return 1 if dim <= 1 << 8 else 2 if dim <= 1 << 16 else 4


def packed_length(dim: int, bits: int) -> int:
    """Return the bytes of dim integers of so many bits each."""
    return -(-dim * bits // 8)


def shortest_form(count: int, dim: int, itemsize: int) -> int:
    """Return the shortest form of a sparse row; of equal ones dense before bitmap before index."""
    index, bitmap = count * index_width(dim), packed_length(dim, 1)
    if dim * itemsize <= count * itemsize + min(index, bitmap):
        return DENSE
    return BITMAP if bitmap <= index else INDEX


def body_length(form: int, bits: int, dim: int, count: int, itemsize: int) -> int:
    """Return the bytes of a body."""
    if form == LEVELS:
        return itemsize + packed_length(dim, bits)
    return count * itemsize + {DENSE: 0, INDEX: count * index_width(dim), BITMAP: packed_length(dim, 1)}[form]


def check_format(row: RowFormat, expected: RowType | None, left: int) -> int:
    """Return the length of the body that a format describes; allocate nothing.

    Raise CorruptError if there is no such body, if its row is not the expected one, or if fewer bytes are `left`.
    """
    if row.dtype not in DTYPES:
        raise CorruptError(f"unknown dtype {row.dtype}")
    if row.form not in (DENSE, INDEX, BITMAP, LEVELS):
        raise CorruptError(f"unknown form {row.form}")
    if not (1 <= row.bits <= 16 if row.form == LEVELS else row.bits == 0):
        raise CorruptError(f"{row.bits} bits, levels have 1 to 16 and all other forms 0")
    if row.values > row.dim or (row.form in (DENSE, LEVELS) and row.values != row.dim):
        raise CorruptError(f"{row.values} values for {row.dim} entries")
    if expected is not None and (row.dtype != expected.dtype or row.dim != expected.dim):
        raise CorruptError(f"expected {expected}, got {RowType(row.dtype, row.dim)}")
    length = body_length(row.form, row.bits, row.dim, row.values, DTYPES[row.dtype].itemsize)
    if length > left:
        raise CorruptError(f"expected a body of {length} bytes, got {left}: no more are left")
    return length
