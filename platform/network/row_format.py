"""Define the forms in which a row travels, their lengths, and the checks of a format before a row is allocated.

A row travels in one of seven forms; everything is little-endian:

    dense    `count` = dim values
    index    `count` positions in the smallest unsigned width that dim fits into, ascending, then their values
    bitmap   a bit per entry, ⌈dim/8⌉ bytes, then `count` values
    levels   the unit, then dim integers of `bits` bits each, stored as level + 2^(bits−1); one bit is −1 or +1
    rice     a Rice code of the `count` positions (`positions`), then their values
    number   the number of the set of `count` positions (`enumeration`), then their values
    golomb   `form` − 32 is the order of an Exp-Golomb code of the `count` positions (`golomb`), then their values

A sparse message takes the shortest of all but levels; number and golomb are forms of quantized rows of at least 65,536
entries only, where positions weigh most. All but dense and levels never carry a zero. Sparse rows may be

    quantized   `bits` is not 0, + 128 for logarithmic levels: the body starts with the first two bytes of the scale,
                then for logarithmic levels a byte, the span. Values are integers of `bits` bits: the level from 0 on,
                + 2^(bits−1) if negative (`algorithms/compression/grid.py`)
    grouped     `form` + 16, only of rice: the body starts with the width u16; a position is that of a group of so many
                entries, which travels as a whole, and `count` are groups
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dbo.algorithms.api import MANY_WORDS

DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<f8")}
DENSE, INDEX, BITMAP, LEVELS, RICE, NUMBER = range(6)
GOLOMB = 32        # the form of order 0
ORDERS = 10        # of the Exp-Golomb codes
LOG = 128          # in `bits`: the levels of a quantized row are logarithmic
GROUPED = 16       # in `form`: positions are those of groups
WIDTH_BYTES = 2    # of the width of a group
MAX_WIDTH = (1 << 8 * WIDTH_BYTES) - 1

_WHOLE = {8: "<u1", 16: "<u2"}                # codes of whole bytes need no packing


class WireError(ValueError):
    """A packet that cannot be encoded or must not be trusted."""


class CorruptError(WireError):
    """Parts of the packet contradict each other."""


def is_refined(dim: int, bits: int) -> bool:
    """Decide whether a row may travel in the forms number and golomb."""
    return bool(bits) and dim >= 64 * MANY_WORDS


class RowFormat(NamedTuple):
    """What a receiver must know of a body to decode it."""

    dtype: int      # 1: float32, 2: float64
    form: int
    bits: int       # of a level, with LOG; 0: values are floats
    dim: int
    values: int     # in the body: `count` above

    @property
    def kind(self) -> int:
        """The form without the order of a code, and without the flag of groups."""
        return GOLOMB if self.form >= GOLOMB else self.form % GROUPED

    @property
    def is_grouped(self) -> bool:
        return self.form == RICE + GROUPED

    @property
    def order(self) -> int:
        """The order of the Exp-Golomb code."""
        return self.form - GOLOMB

    @property
    def value_bits(self) -> int:
        """The bits of a quantized value; 0 if values are floats."""
        return self.bits & ~LOG

    @property
    def grid_length(self) -> int:
        """The bytes of the scale and the span."""
        return grid_length(self.bits) if self.form != LEVELS else 0


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


def grid_length(bits: int) -> int:
    """Return the bytes of the scale and the span of a quantized row, 0 for a row of floats."""
    return 0 if bits == 0 else 3 if bits & LOG else 2


def values_length(count: int, bits: int, itemsize: int) -> int:
    """Return the bytes of the values of a sparse row."""
    return packed_length(count, bits & ~LOG) if bits else count * itemsize


@lru_cache(maxsize=4096)
def choose_form(
    count: int, dim: int, itemsize: int, bits: int, codes: tuple[tuple[int, int], ...]
) -> tuple[int, int]:
    """Return the shortest form of a sparse row and the bytes of its body, given (form, bytes) of codes of positions.

    Of equal ones dense comes before bitmap before index before the codes, in their order. Quantized rows are dense only
    if nothing is left out.
    """
    values = values_length(count, bits, itemsize)
    lengths = {BITMAP: values + packed_length(dim, 1), INDEX: values + count * index_width(dim)}
    lengths |= {form: values + length for form, length in codes}
    if not bits or count == dim:
        lengths = {DENSE: values_length(dim, bits, itemsize)} | lengths
    form = min(lengths, key=lambda form: lengths[form])
    return form, lengths[form] + grid_length(bits)


def check_format(row: RowFormat, expected: RowType | None) -> None:
    """Raise CorruptError if no row has this format, or if its row is not the expected one; allocate nothing."""
    if row.dtype not in DTYPES:
        raise CorruptError(f"unknown dtype {row.dtype}")
    if row.form not in (DENSE, INDEX, BITMAP, LEVELS, RICE, RICE + GROUPED, NUMBER, *range(GOLOMB, GOLOMB + ORDERS)):
        raise CorruptError(f"unknown form {row.form}")
    if row.kind in (NUMBER, GOLOMB) and not is_refined(row.dim, row.bits):
        raise CorruptError(f"form {row.form} of {row.dim} entries and {row.bits} bits, it is of quantized wide rows")
    if row.form == RICE + GROUPED and row.bits:
        raise CorruptError(f"{row.bits} bits, groups have 0")
    if row.form == LEVELS and not 1 <= row.bits <= 16:
        raise CorruptError(f"{row.bits} bits, levels have 1 to 16")
    if row.form != LEVELS and row.bits and not 2 <= row.value_bits <= 16:
        raise CorruptError(f"{row.value_bits} bits, quantized values have 2 to 16")
    if row.values > row.dim or (row.form in (DENSE, LEVELS) and row.values != row.dim):
        raise CorruptError(f"{row.values} values for {row.dim} entries")
    if expected is not None and (row.dtype != expected.dtype or row.dim != expected.dim):
        raise CorruptError(f"expected {expected}, got {RowType(row.dtype, row.dim)}")


def pack_codes(codes: NDArray[Any], bits: int) -> bytes:
    """Return the lowest `bits` bits of each code, one after the other, the lowest first."""
    if bits in _WHOLE:
        return codes.astype(_WHOLE[bits]).tobytes()
    if bits <= 1:
        return np.packbits(codes.astype(np.bool_), bitorder="little").tobytes() if bits else b""
    # Eight codes fill `bits` bytes exactly, so the j-th of every eight lies at the same place.
    groups = -(-codes.size // 8)
    eights = np.zeros((groups, 8), dtype=np.uint32 if bits <= 16 else np.uint64)
    eights.reshape(-1)[: codes.size] = codes
    packed = np.zeros((bits, groups), dtype=np.uint8)
    for j, code in enumerate(np.ascontiguousarray(eights.T)):
        byte, shift = divmod(j * bits, 8)
        for k in range(-(-(shift + bits) // 8)):
            packed[byte + k] |= ((code << shift >> 8 * k) & 255).astype(np.uint8)
    return packed.T.tobytes()[: packed_length(codes.size, bits)]


def unpack_codes(packed: NDArray[np.uint8], bits: int, count: int) -> NDArray[Any]:
    """Reverse `pack_codes`; raise CorruptError if the last byte is padded with anything but zeros."""
    if bits == 0:
        return np.zeros(count, dtype=np.int32)
    if bits in _WHOLE:
        return packed.view(_WHOLE[bits]).astype(np.int32)
    groups, kind = -(-count // 8), np.int32 if bits <= 16 else np.int64
    if bits == 1:
        codes: NDArray[Any] = np.unpackbits(packed, bitorder="little").astype(np.int32)
    else:
        padded = np.zeros((groups, bits), dtype=np.uint8)
        padded.reshape(-1)[: packed.size] = packed
        columns = padded.T.astype(kind)
        eights = np.zeros((8, groups), dtype=kind)
        for j, code in enumerate(eights):
            byte, shift = divmod(j * bits, 8)
            for k in range(-(-(shift + bits) // 8)):
                code |= columns[byte + k] << 8 * k >> shift
        codes = (eights & ((1 << bits) - 1)).T.reshape(-1)
    if codes[count:].any():
        raise CorruptError(PADDED)
    return codes[:count]


PADDED = "the last byte of the levels is not padded with zeros"
