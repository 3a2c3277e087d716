"""Decode the bodies of rows, checked completely before a row is allocated; `row_format` defines the forms."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dbo.algorithms.api import EIGHTHS, MANY_WORDS, Array, PackedRow, code_kernels, level_values, read_scale
from dbo.platform.network.enumeration import decode_enumerated, enumerated_length
from dbo.platform.network.golomb import decode_golomb, decode_golomb_positions, golomb_parts
from dbo.platform.network.positions import (
    as_words,
    code_length,
    decode_positions,
    decode_words,
    is_padded,
    rice_parameter,
)
from dbo.platform.network.row_format import (
    BITMAP,
    DENSE,
    DTYPES,
    GOLOMB,
    INDEX,
    LEVELS,
    LOG,
    NUMBER,
    PADDED,
    RICE,
    WIDTH_BYTES,
    CorruptError,
    RowFormat,
    index_width,
    is_refined,
    packed_length,
    unpack_codes,
    values_length,
)


class EncodedRow(NamedTuple):
    """A received row whose body is checked, but not expanded: that is done on a device."""

    format: RowFormat
    body: memoryview


def body_length(row: RowFormat, body: memoryview) -> int:
    """Return the bytes of a row's body at the start of these bytes, for a format that `check_format` accepts.

    Raise CorruptError if there are fewer; allocate nothing larger than the bytes.
    """
    itemsize, count = DTYPES[row.dtype].itemsize, row.values
    if row.form == LEVELS:
        return _check_left(itemsize + packed_length(row.dim, row.bits), body)
    if not count:
        return 0
    width = read_width(row, body)
    if row.kind == NUMBER and not enumerated_length(count, row.dim):
        raise CorruptError(f"{count} of {row.dim} positions are not enumerated")
    head = WIDTH_BYTES * (width > 1) + row.grid_length
    length = head + values_length(count * width, row.bits, itemsize)
    if row.kind == RICE:      # before the unary parts are counted
        _check_left(length + packed_length(count, rice_parameter(count, row.dim // width)), body)
    return _check_left(length + positions_length(row, body[head:], width), body)


def positions_length(row: RowFormat, body: memoryview, width: int = 1) -> int:
    """Return the bytes of the positions at the start of these bytes; raise CorruptError if these cannot hold a code."""
    if row.kind == GOLOMB:
        return sum(golomb_parts(body, row.values, row.order))
    if row.kind == RICE:
        return sum(code_length(body, row.values, row.dim // width))
    return {
        DENSE: 0, INDEX: row.values * index_width(row.dim), BITMAP: packed_length(row.dim, 1),
        NUMBER: enumerated_length(row.values, row.dim),
    }[row.kind]


def _check_left(length: int, body: memoryview) -> int:
    if length > len(body):
        raise CorruptError(f"expected a body of {length} bytes, got {len(body)}: no more are left")
    return length


def read_width(row: RowFormat, body: memoryview) -> int:
    """Return the entries of a group."""
    if not row.is_grouped:
        return 1
    width = int.from_bytes(body[:WIDTH_BYTES], "little")
    if width < 2 or row.dim % width or row.values > row.dim // width:
        raise CorruptError(f"{row.values} groups of {width} of {row.dim} entries")
    return width


def decode_row(body: memoryview, row: RowFormat, packed: bool = False) -> Array | PackedRow:
    """Return the row in a body of a format that `check_format` accepts; a `packed` one stays marks and entries."""
    dtype = DTYPES[row.dtype]
    if row.form == LEVELS:
        values = _decode_levels(body, dtype, row)
    elif row.form == DENSE and not row.bits:
        values = np.frombuffer(body, dtype).astype(dtype.newbyteorder("="))
    elif row.is_grouped:
        values = _decode_groups(body, dtype, row)
    elif packed:
        return _decode_packed(body, dtype, row)
    else:
        at, entries = _decode_sparse(body, dtype, row)
        values = np.zeros(row.dim, dtype.newbyteorder("="))
        values[at] = entries
    return PackedRow.of(values) if packed else values


def check_row(body: memoryview, row: RowFormat) -> EncodedRow:
    """Return a body as it is, once everything is checked that `decode_row` checks."""
    dtype = DTYPES[row.dtype]
    if row.form == LEVELS:
        if (padded := row.dim * row.bits % 8) and body[-1] >> padded:
            raise CorruptError(PADDED)
    elif row.is_grouped:
        if row.values:
            _decode_group_positions(body, row)
    elif row.form != DENSE or row.bits:
        _decode_sparse(body, dtype, row)
    return EncodedRow(row, body)


def _decode_sparse(body: memoryview, dtype: np.dtype[Any], row: RowFormat) -> tuple[Any, Array]:
    """Return the positions and the values of a row."""
    if not row.values:
        return np.zeros(0, np.int64), np.zeros(0, dtype.newbyteorder("="))
    rest = body[row.grid_length :]
    at: Any
    if row.form == DENSE:
        at, length = slice(None), 0
    elif row.form == INDEX:
        positions = _read_positions(rest, row)
        at, length = positions, positions.nbytes
    elif row.form == BITMAP:
        length = packed_length(row.dim, 1)
        marked = np.unpackbits(np.frombuffer(rest, np.uint8, count=length), bitorder="little")
        if marked[row.dim :].any() or int(np.count_nonzero(marked)) != row.values:
            raise CorruptError(f"the bitmap of {row.dim} entries does not mark {row.values} values")
        at = np.flatnonzero(marked)
    else:
        at, length = decode_code(rest, row), positions_length(row, rest)
    return at, _read_values(body, rest[length:], dtype, row)


def decode_code(body: memoryview, row: RowFormat) -> NDArray[np.int64]:
    """Return the positions in a code; raise CorruptError if there is one that no sender makes."""
    if row.kind == NUMBER:
        return decode_enumerated(body, row.values, row.dim)
    if row.kind == GOLOMB:
        return decode_golomb_positions(body, row.values, row.dim, row.order)
    return decode_positions(body, row.values, row.dim)


def _decode_packed(body: memoryview, dtype: np.dtype[Any], row: RowFormat) -> PackedRow:
    """Check and decode a body, but leave the positions marks, copied to where words are aligned."""
    rest = body[row.grid_length :]
    if row.form == BITMAP and row.values:
        length = packed_length(row.dim, 1)
        marks = np.zeros(-(-row.dim // 64) * 8, dtype=np.uint8)
        marks[:length] = np.frombuffer(rest, np.uint8, count=length)
        words = marks.view("<u8").astype(np.uint64, copy=False)
        if (row.dim % 8 and marks[length - 1] >> row.dim % 8) or int(np.bitwise_count(words).sum()) != row.values:
            raise CorruptError(f"the bitmap of {row.dim} entries does not mark {row.values} values")
    elif row.form == RICE and row.values and row.dim >= 64 * MANY_WORDS:
        words, length = decode_words(rest, row.values, row.dim)
    elif row.kind == GOLOMB and row.values:
        words, length = decode_golomb(rest, row.values, row.dim, row.order)
    else:
        at, entries = _decode_sparse(body, dtype, row)
        marked = np.zeros(-(-row.dim // 64) * 64, dtype=np.bool_)
        marked[: row.dim][at] = True
        return PackedRow(np.packbits(marked, bitorder="little").view("<u8"), entries)
    return PackedRow(words, _read_values(body, rest[length:], dtype, row))


def _decode_group_positions(body: memoryview, row: RowFormat) -> tuple[NDArray[np.int64], int, int]:
    """Return the positions of groups, their width, and where their values start."""
    width, count = read_width(row, body), row.values
    at = decode_positions(body[WIDTH_BYTES:], count, row.dim // width)
    return at, width, WIDTH_BYTES + sum(code_length(body[WIDTH_BYTES:], count, row.dim // width))


def _decode_groups(body: memoryview, dtype: np.dtype[Any], row: RowFormat) -> Array:
    values = np.zeros(row.dim, dtype.newbyteorder("="))
    if row.values:
        at, width, start = _decode_group_positions(body, row)
        values.reshape(-1, width)[at] = np.frombuffer(body[start:], dtype).reshape(-1, width)
    return values


def _read_positions(body: memoryview, row: RowFormat) -> NDArray[Any]:
    at: NDArray[Any] = np.frombuffer(body, f"<u{index_width(row.dim)}", count=row.values)
    if row.values and (int(at[-1]) >= row.dim or not np.all(at[1:] > at[:-1])):
        raise CorruptError(f"positions must ascend and stay below {row.dim}")
    return at


def _read_values(body: memoryview, rest: memoryview, dtype: np.dtype[Any], row: RowFormat) -> Array:
    """Return the values of a sparse row, in the native byte order; scale and span are at the start of its body."""
    if not row.bits:
        return _read_nonzero(rest, dtype).astype(dtype.newbyteorder("="))
    if body[1] >> 7:
        raise CorruptError("a negative scale")
    bits, log = row.value_bits, bool(row.bits & LOG)
    scale, span = read_scale(body[:2], dtype), body[2] if log else 0
    if span > EIGHTHS:
        raise CorruptError(f"levels over {span} eighths of an octave, there are {EIGHTHS} at most")
    levels = level_values(float(scale), span, bits, log)
    with np.errstate(all="ignore"):
        levels = levels.astype(scale.dtype)
    if is_refined(row.dim, row.bits):
        return _read_many(rest, row.values, bits, levels)
    codes = unpack_codes(np.frombuffer(rest, np.uint8), bits, row.values)
    values: Array = np.concatenate([levels, -levels])[codes]
    if not (values != 0).all():
        raise CorruptError("a zero among the values of a sparse row")
    return values


def _read_many(rest: memoryview, count: int, bits: int, levels: Array) -> Array:
    """Return the values of a wide quantized row."""
    if not is_padded(rest[: packed_length(count, bits)], count * bits):
        raise CorruptError(PADDED)
    values = np.empty(count, levels.dtype)
    if code_kernels().unpack_values(as_words(rest), bits, levels, values):
        raise CorruptError("a zero among the values of a sparse row")
    return values


def _decode_levels(body: memoryview, dtype: np.dtype[Any], row: RowFormat) -> Array:
    unit = np.frombuffer(body, dtype, count=1)[0].astype(dtype.newbyteorder("="))
    codes = unpack_codes(np.frombuffer(body, np.uint8, offset=dtype.itemsize), row.bits, row.dim)
    levels = 2 * codes - 1 if row.bits == 1 else codes - (1 << (row.bits - 1))
    with np.errstate(all="ignore"):      # the unit of a damaged or diverged sender may be any bits
        values: Array = levels.astype(unit.dtype) * unit
    return values


def _read_nonzero(body: memoryview, dtype: np.dtype[Any]) -> Array:
    values: Array = np.frombuffer(body, dtype)
    # Not values.all(): that reduction raises a floating-point warning for a signalling NaN, a comparison does not.
    if not (values != 0).all():
        raise CorruptError("a zero among the values of a sparse row")
    return values
