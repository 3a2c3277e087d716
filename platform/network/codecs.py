"""Encode rows as bytes, decode them, and measure the bytes without encoding; `row_format` defines the forms.

The measured lengths are exactly those of the encoded rows, so a run in one process counts the same bytes as a run on a
cluster. Rows of a torch device are encoded and decoded there, by `torch_codecs`: only encoded bytes cross.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from dbo.algorithms.api import Array, Message, Packed, PackedRow
from dbo.platform.network.row_format import (
    BITMAP,
    DENSE,
    DTYPES,
    INDEX,
    LEVELS,
    CorruptError,
    RowFormat,
    RowType,
    WireError,
    body_length,
    index_width,
    packed_length,
    shortest_form,
)

Table = NDArray[np.int64]                     # (nodes, 3) what a channel's rows cost
ENCODED, VALUE_BYTES, VALUES = range(3)       # its columns: bytes of the body, bytes of values in it, values

_CODES = {"f4": 1, "f8": 2}
_CODES_BY_SIZE = {4: 1, 8: 2}                 # NumPy and torch dtypes have no name in common, but a size
_PADDED = "the last byte of the levels is not padded with zeros"
_WHOLE = {8: "<u1", 16: "<u2"}                # levels of whole bytes need no packing


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Rows of a message that were encoded on a device, by row, and why a row could not be encoded."""

    rows: dict[int, tuple[RowFormat, memoryview]]
    errors: dict[int, str]


class EncodedRow(NamedTuple):
    """A received row whose body is checked, but not expanded: that is done on a device."""

    format: RowFormat
    body: memoryview


def _is_on_device(message: Message | Packed) -> TypeGuard[Message]:
    return isinstance(message, Message) and not isinstance(message.values, np.ndarray)


# Measuring


def measure_messages(messages: Mapping[str, Message | Packed]) -> dict[str, Table]:
    """Return the table of each message. Counts of a device cross together: the host waits once."""
    on_device = {
        name: message.values for name, message in messages.items()
        if _is_on_device(message) and message.form not in ("dense", "levels")
    }
    if not on_device:
        return {name: measure_rows(message) for name, message in messages.items()}
    from dbo.platform.network import torch_codecs  # imports torch, which is slow

    counts = torch_codecs.count_nonzeros(on_device)
    return {name: measure_rows(message, counts.get(name)) for name, message in messages.items()}


def measure_rows(message: Message | Packed, nonzeros: tuple[int, ...] | None = None) -> Table:
    """Return the table of a message's rows; `nonzeros` are the counts of a sparse message, if they are known."""
    nodes, dim = message.shape
    if isinstance(message, Packed):
        return measure_sparse(tuple(row.entries.size for row in message.rows), dim, message.rows[0].entries.itemsize)
    itemsize = message.values.dtype.itemsize
    if message.form == "dense":
        return measure_dense(nodes, dim, itemsize)
    if message.form == "levels":
        return _uniform(nodes, itemsize + packed_length(dim, message.bits), dim)
    return measure_sparse(_count_nonzeros(message.values) if nonzeros is None else nonzeros, dim, itemsize)


def measure_dense(nodes: int, dim: int, itemsize: int) -> Table:
    """Return the table of dense rows."""
    return _uniform(nodes, dim * itemsize, dim)


@lru_cache(maxsize=1024)
def measure_sparse(nonzeros: tuple[int, ...], dim: int, itemsize: int) -> Table:
    """Return the table of sparse rows with so many nonzero entries.

    A row that travels dense carries its zeros as values, and no positions.
    """
    table = np.empty((len(nonzeros), 3), dtype=np.int64)
    for row, count in enumerate(nonzeros):
        form = shortest_form(count, dim, itemsize)
        values = dim if form == DENSE else count
        table[row] = body_length(form, 0, dim, values, itemsize), values * itemsize, values
    table.setflags(write=False)
    return table


@lru_cache(maxsize=256)
def _uniform(nodes: int, length: int, values: int) -> Table:
    """Return the table of rows whose length does not depend on their values; all of it counts as values."""
    table = np.tile(np.array([length, length, values], dtype=np.int64), (nodes, 1))
    table.setflags(write=False)
    return table


def _count_nonzeros(values: Array) -> tuple[int, ...]:
    """Return the number of nonzero entries of each row."""
    nonzero = values != 0
    if values.shape[1] > 4096:      # counting row by row is quicker once a row outweighs a call
        return tuple(int(np.count_nonzero(row)) for row in nonzero)
    return tuple(np.add.reduce(nonzero, axis=1, dtype=np.int64).tolist())


# Encoding


def encode_on_device(
    messages: Mapping[str, Message | Packed], rows: Iterable[int], tables: Mapping[str, Table]
) -> dict[str, Message | Packed | EncodedRows]:
    """Return the messages with those of a device encoded there, and copied to the host in one piece.

    `tables` are those of `measure_messages`: forms and lengths are known before anything is encoded.
    """
    on_device = {name: message for name, message in messages.items() if _is_on_device(message)}
    if not on_device:
        return dict(messages)
    from dbo.platform.network import torch_codecs  # imports torch, which is slow

    return {**messages, **torch_codecs.encode_rows(on_device, tuple(rows), tables)}


def encode_row(message: Message | Packed | EncodedRows, row: int) -> tuple[RowFormat, list[bytes | memoryview]]:
    """Return the format of one row of a message and the parts of its body."""
    if isinstance(message, EncodedRows):
        if row in message.errors:
            raise WireError(message.errors[row])
        format_, encoded = message.rows[row]
        return format_, [encoded]
    if isinstance(message, Packed):
        return _encode_packed(message.rows[row], message.dim)
    if _is_on_device(message):
        return encode_row(encode_on_device({"": message}, [row], measure_messages({"": message}))[""], row)
    values = message.values[row]
    code = _CODES.get(values.dtype.str[1:])
    if code is None:
        raise WireError(f"dtype {values.dtype} is not allowed; must be float32 or float64")
    if values.ndim != 1 or values.size >= 1 << 32:
        raise WireError(f"a row of shape {values.shape} is not allowed; must be flat and shorter than 2^32")
    values = values.astype(DTYPES[code], copy=False)
    if message.form == "dense":
        return RowFormat(code, DENSE, 0, values.size, values.size), [values.tobytes()]
    if message.form == "levels":
        body = _encode_levels(message, row, values.dtype)
        return RowFormat(code, LEVELS, message.bits, values.size, values.size), [body]
    if message.form == "sparse":
        return _encode_sparse(values, code)
    raise WireError(f"unknown form {message.form!r}")


def _encode_sparse(values: NDArray[Any], code: int) -> tuple[RowFormat, list[bytes | memoryview]]:
    nonzero, dim = values != 0, values.size
    count = int(np.count_nonzero(nonzero))
    form = shortest_form(count, dim, values.itemsize)
    if form == DENSE:
        # Receivers of a sparse row get +0.0 in whichever form it travels.
        return RowFormat(code, form, 0, dim, dim), [np.where(nonzero, values, values.dtype.type(0)).tobytes()]
    (at,) = nonzero.nonzero()
    where = at.astype(f"<u{index_width(dim)}") if form == INDEX else np.packbits(nonzero, bitorder="little")
    return RowFormat(code, form, 0, dim, count), [where.tobytes(), values[at].tobytes()]


def _encode_packed(row: PackedRow, dim: int) -> tuple[RowFormat, list[bytes | memoryview]]:
    """Encode a row that is packed already: nothing but copies, unless another form is shorter."""
    code, count = _CODES[row.entries.dtype.str[1:]], row.entries.size
    form = shortest_form(count, dim, row.entries.itemsize)
    entries = row.entries.astype(DTYPES[code], copy=False)
    if form == BITMAP:
        body = [row.words.astype("<u8", copy=False).view(np.uint8)[: packed_length(dim, 1)], entries]
    elif form == INDEX:
        body = [row.positions(dim).astype(f"<u{index_width(dim)}"), entries]
    else:
        count, body = dim, [row.dense(dim).astype(DTYPES[code], copy=False)]
    return RowFormat(code, form, 0, dim, count), [part.data.cast("B") for part in body]


def _encode_levels(message: Message, row: int, dtype: np.dtype[Any]) -> bytes:
    bits, (all_levels, units) = message.bits, check_levels(message)
    levels, unit = all_levels[row], units[row : row + 1].astype(dtype)
    if bits == 1:
        if not np.all(np.abs(levels) == 1):
            raise WireError("levels of one bit must be −1 or +1")
        codes = (levels > 0).astype(np.uint16)
    else:
        half = 1 << (bits - 1)
        if levels.size and not (-half <= levels.min() and levels.max() < half):
            raise WireError(f"levels from {levels.min()} to {levels.max()} do not fit into {bits} bits")
        codes = (levels + half).astype("<u2")
    return unit.tobytes() + _pack_bits(codes, bits)


def check_levels(message: Message) -> tuple[Array, Array]:
    """Return levels and units of a message; raise WireError if it lacks them or their shapes do not fit."""
    levels, unit = message.levels, message.unit
    if levels is None or unit is None or not 1 <= message.bits <= 16:
        raise WireError(f"levels need integers, a unit and 1 to 16 bits, got bits={message.bits}")
    shapes = tuple(levels.shape), tuple(unit.shape)
    if shapes != (message.shape, message.shape[:1]):
        raise WireError(f"expected levels and unit of shapes {message.shape} and {message.shape[:1]}, got {shapes}")
    return levels, unit


def _pack_bits(codes: NDArray[Any], bits: int) -> bytes:
    """Return the lowest `bits` bits of each code, one after the other, the lowest first."""
    if bits in _WHOLE:
        return codes.astype(_WHOLE[bits]).tobytes()
    if bits == 1:
        return np.packbits(codes.astype(np.bool_), bitorder="little").tobytes()
    # Eight codes fill `bits` bytes exactly, so the j-th of every eight lies at the same place.
    groups = -(-codes.size // 8)
    eights = np.zeros((groups, 8), dtype=np.uint32)
    eights.reshape(-1)[: codes.size] = codes
    packed = np.zeros((bits, groups), dtype=np.uint8)
    for j, code in enumerate(np.ascontiguousarray(eights.T)):
        byte, shift = divmod(j * bits, 8)
        for k in range(-(-(shift + bits) // 8)):
            packed[byte + k] |= ((code << shift >> 8 * k) & 255).astype(np.uint8)
    return packed.T.tobytes()[: packed_length(codes.size, bits)]


# Decoding


def expect_row(message: Message | Packed) -> RowType:
    """Return the type of a neighbour's row, given the own message of the same step, which `encode_row` accepts."""
    if isinstance(message, Packed):
        return RowType(_CODES_BY_SIZE[message.rows[0].entries.itemsize], message.dim)
    return RowType(_CODES_BY_SIZE[message.values.dtype.itemsize], message.shape[1])


def decode_row(body: memoryview, row: RowFormat, packed: bool = False) -> Array | PackedRow:
    """Return the row in a body of a format that `check_format` accepts; a `packed` one stays marks and entries."""
    dtype = DTYPES[row.dtype]
    if packed and row.form == BITMAP:
        return _unpack_bitmap(body, dtype, row)
    values = _DECODERS[row.form](body, dtype, row)
    return PackedRow.of(values) if packed else values


def check_row(body: memoryview, row: RowFormat) -> EncodedRow:
    """Return a body as it is, once everything is checked that `decode_row` checks."""
    dtype = DTYPES[row.dtype]
    if row.form == INDEX:
        _read_positions(body, row)
        _read_nonzero(body[row.values * index_width(row.dim) :], dtype)
    elif row.form == BITMAP:
        _unpack_bitmap(body, dtype, row)
    elif row.form == LEVELS and (padded := row.dim * row.bits % 8) and body[-1] >> padded:
        raise CorruptError(_PADDED)
    return EncodedRow(row, body)


def _decode_dense(body: memoryview, dtype: np.dtype[Any], row: RowFormat) -> Array:
    return np.frombuffer(body, dtype).astype(dtype.newbyteorder("="))


def _decode_index(body: memoryview, dtype: np.dtype[Any], row: RowFormat) -> Array:
    at = _read_positions(body, row)
    values = np.zeros(row.dim, dtype.newbyteorder("="))
    values[at] = _read_nonzero(body[at.nbytes :], dtype)
    return values


def _read_positions(body: memoryview, row: RowFormat) -> NDArray[Any]:
    at: NDArray[Any] = np.frombuffer(body, f"<u{index_width(row.dim)}", count=row.values)
    if row.values and (int(at[-1]) >= row.dim or not np.all(at[1:] > at[:-1])):
        raise CorruptError(f"positions must ascend and stay below {row.dim}")
    return at


def _decode_bitmap(body: memoryview, dtype: np.dtype[Any], row: RowFormat) -> Array:
    length = packed_length(row.dim, 1)
    marked = np.unpackbits(np.frombuffer(body, np.uint8, count=length), bitorder="little").view(np.bool_)
    if marked[row.dim :].any() or int(np.count_nonzero(marked)) != row.values:
        raise CorruptError(f"the bitmap of {row.dim} entries does not mark {row.values} values")
    values = np.zeros(row.dim, dtype.newbyteorder("="))
    values[marked.nonzero()[0]] = _read_nonzero(body[length:], dtype)
    return values


def _unpack_bitmap(body: memoryview, dtype: np.dtype[Any], row: RowFormat) -> PackedRow:
    """Check a body as `_decode_bitmap` does, but leave it packed, copied to where words are aligned."""
    length = packed_length(row.dim, 1)
    marks = np.zeros(-(-row.dim // 64) * 8, dtype=np.uint8)
    marks[:length] = np.frombuffer(body, np.uint8, count=length)
    words = marks.view("<u8").astype(np.uint64, copy=False)
    if (row.dim % 8 and marks[length - 1] >> row.dim % 8) or int(np.bitwise_count(words).sum()) != row.values:
        raise CorruptError(f"the bitmap of {row.dim} entries does not mark {row.values} values")
    return PackedRow(words, _read_nonzero(body[length:], dtype).astype(dtype.newbyteorder("=")))


def _decode_levels(body: memoryview, dtype: np.dtype[Any], row: RowFormat) -> Array:
    unit = np.frombuffer(body, dtype, count=1)[0].astype(dtype.newbyteorder("="))
    codes = _unpack_bits(np.frombuffer(body, np.uint8, offset=dtype.itemsize), row.bits, row.dim)
    levels = 2 * codes - 1 if row.bits == 1 else codes - (1 << (row.bits - 1))
    with np.errstate(all="ignore"):      # the unit of a damaged or diverged sender may be any bits
        values: Array = levels.astype(unit.dtype) * unit
    return values


def _unpack_bits(packed: NDArray[np.uint8], bits: int, dim: int) -> NDArray[np.int32]:
    """Reverse `_pack_bits`; raise CorruptError if the last byte is padded with anything but zeros."""
    if bits in _WHOLE:
        return packed.view(_WHOLE[bits]).astype(np.int32)
    groups = -(-dim // 8)
    if bits == 1:
        codes = np.unpackbits(packed, bitorder="little").astype(np.int32)
    else:
        padded = np.zeros((groups, bits), dtype=np.uint8)
        padded.reshape(-1)[: packed.size] = packed
        columns = padded.T.astype(np.int32)
        eights = np.zeros((8, groups), dtype=np.int32)
        for j, code in enumerate(eights):
            byte, shift = divmod(j * bits, 8)
            for k in range(-(-(shift + bits) // 8)):
                code |= columns[byte + k] << 8 * k >> shift
        codes = (eights & ((1 << bits) - 1)).T.reshape(-1)
    if codes[dim:].any():
        raise CorruptError(_PADDED)
    return codes[:dim]


def _read_nonzero(body: memoryview, dtype: np.dtype[Any]) -> Array:
    values: Array = np.frombuffer(body, dtype)
    # Not values.all(): that reduction raises a floating-point warning for a signalling NaN, a comparison does not.
    if not (values != 0).all():
        raise CorruptError("a zero among the values of a sparse row")
    return values


_DECODERS: dict[int, Callable[[memoryview, np.dtype[Any], RowFormat], Array]] = {
    DENSE: _decode_dense, INDEX: _decode_index, BITMAP: _decode_bitmap, LEVELS: _decode_levels,
}
