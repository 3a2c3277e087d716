"""Encode rows as bytes, decode them, and measure the bytes without encoding.

A row travels in one of four forms; everything is little-endian:

    dense    `count` = dim values
    index    `count` positions in the smallest unsigned width that dim fits into, ascending, then their values
    bitmap   a bit per entry, ⌈dim/8⌉ bytes, then `count` values
    levels   the unit, then dim integers of `bits` bits each, stored as level + 2^(bits−1); one bit is −1 or +1

A sparse message takes the shortest of the first three; index and bitmap never carry a zero. The measured lengths are
exactly those of the encoded rows, so a run in one process counts the same bytes as a run on a cluster.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from dbo.algorithms.api import Array, Message, Packed, PackedRow

Table = NDArray[np.int64]                     # (nodes, 3) what a channel's rows cost
ENCODED, VALUE_BYTES, VALUES = range(3)       # its columns: bytes of the body, bytes of values in it, values

_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<f8")}
_CODES = {"f4": 1, "f8": 2}
_CODES_BY_SIZE = {4: 1, 8: 2}                 # NumPy and torch dtypes have no name in common, but a size
_DENSE, _INDEX, _BITMAP, _LEVELS = range(4)
_WHOLE = {8: "<u1", 16: "<u2"}                # levels of whole bytes need no packing


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
        return f"{self.dim} entries of {_DTYPES[self.dtype].name if self.dtype in _DTYPES else f'dtype {self.dtype}'}"


# Measuring


def measure_rows(message: Message | Packed) -> Table:
    """Return the table of a message's rows."""
    nodes, dim = message.shape
    if isinstance(message, Packed):
        return measure_sparse(tuple(row.entries.size for row in message.rows), dim, message.rows[0].entries.itemsize)
    itemsize = message.values.dtype.itemsize
    if message.form == "dense":
        return measure_dense(nodes, dim, itemsize)
    if message.form == "levels":
        return _uniform(nodes, itemsize + _packed_length(dim, message.bits), dim)
    return measure_sparse(_count_nonzeros(message.values), dim, itemsize)


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
        form = _shortest_form(count, dim, itemsize)
        values = dim if form == _DENSE else count
        table[row] = _body_length(form, 0, dim, values, itemsize), values * itemsize, values
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
    if not isinstance(values, np.ndarray):
        return tuple(array_namespace(values).count_nonzero(values, axis=1).tolist())
    nonzero = values != 0
    if values.shape[1] > 4096:      # counting row by row is quicker once a row outweighs a call
        return tuple(int(np.count_nonzero(row)) for row in nonzero)
    return tuple(np.add.reduce(nonzero, axis=1, dtype=np.int64).tolist())


def _index_width(dim: int) -> int:
    """Return the bytes of the smallest unsigned integer that holds every position."""
    return 1 if dim <= 1 << 8 else 2 if dim <= 1 << 16 else 4


def _packed_length(dim: int, bits: int) -> int:
    return -(-dim * bits // 8)


def _shortest_form(count: int, dim: int, itemsize: int) -> int:
    """Return the shortest form of a sparse row; of equal ones dense before bitmap before index."""
    index, bitmap = count * _index_width(dim), _packed_length(dim, 1)
    if dim * itemsize <= count * itemsize + min(index, bitmap):
        return _DENSE
    return _BITMAP if bitmap <= index else _INDEX


def _body_length(form: int, bits: int, dim: int, count: int, itemsize: int) -> int:
    if form == _LEVELS:
        return itemsize + _packed_length(dim, bits)
    return count * itemsize + {_DENSE: 0, _INDEX: count * _index_width(dim), _BITMAP: _packed_length(dim, 1)}[form]


# Encoding


def encode_row(message: Message | Packed, row: int) -> tuple[RowFormat, list[bytes | memoryview]]:
    """Return the format of one row of a message and the parts of its body."""
    if isinstance(message, Packed):
        return _encode_packed(message.rows[row], message.dim)
    values = _on_host(message.values[row])
    code = _CODES.get(values.dtype.str[1:])
    if code is None:
        raise WireError(f"dtype {values.dtype} is not allowed; must be float32 or float64")
    if values.ndim != 1 or values.size >= 1 << 32:
        raise WireError(f"a row of shape {values.shape} is not allowed; must be flat and shorter than 2^32")
    values = values.astype(_DTYPES[code], copy=False)
    if message.form == "dense":
        return RowFormat(code, _DENSE, 0, values.size, values.size), [values.tobytes()]
    if message.form == "levels":
        body = _encode_levels(message, row, values.dtype)
        return RowFormat(code, _LEVELS, message.bits, values.size, values.size), [body]
    if message.form == "sparse":
        return _encode_sparse(values, code)
    raise WireError(f"unknown form {message.form!r}")


def _on_host(array: Any) -> NDArray[Any]:
    """Return the array in the memory of the host, wherever it is."""
    return array if isinstance(array, np.ndarray) else np.asarray(array.detach().cpu().numpy())


def _encode_sparse(values: NDArray[Any], code: int) -> tuple[RowFormat, list[bytes | memoryview]]:
    nonzero, dim = values != 0, values.size
    count = int(np.count_nonzero(nonzero))
    form = _shortest_form(count, dim, values.itemsize)
    if form == _DENSE:
        # Receivers of a sparse row get +0.0 in whichever form it travels.
        return RowFormat(code, form, 0, dim, dim), [np.where(nonzero, values, values.dtype.type(0)).tobytes()]
    (at,) = nonzero.nonzero()
    where = at.astype(f"<u{_index_width(dim)}") if form == _INDEX else np.packbits(nonzero, bitorder="little")
    return RowFormat(code, form, 0, dim, count), [where.tobytes(), values[at].tobytes()]


def _encode_packed(row: PackedRow, dim: int) -> tuple[RowFormat, list[bytes | memoryview]]:
    """Encode a row that is packed already: nothing but copies, unless another form is shorter."""
    code, count = _CODES[row.entries.dtype.str[1:]], row.entries.size
    form = _shortest_form(count, dim, row.entries.itemsize)
    entries = row.entries.astype(_DTYPES[code], copy=False)
    if form == _BITMAP:
        body = [row.words.astype("<u8", copy=False).view(np.uint8)[: _packed_length(dim, 1)], entries]
    elif form == _INDEX:
        body = [row.positions(dim).astype(f"<u{_index_width(dim)}"), entries]
    else:
        count, body = dim, [row.dense(dim).astype(_DTYPES[code], copy=False)]
    return RowFormat(code, form, 0, dim, count), [part.data.cast("B") for part in body]


def _encode_levels(message: Message, row: int, dtype: np.dtype[Any]) -> bytes:
    bits = message.bits
    if message.levels is None or message.unit is None or not 1 <= bits <= 16:
        raise WireError(f"levels need integers, a unit and 1 to 16 bits, got bits={bits}")
    shapes = tuple(message.levels.shape), tuple(message.unit.shape)
    if shapes != (message.shape, message.shape[:1]):
        raise WireError(f"expected levels and unit of shapes {message.shape} and {message.shape[:1]}, got {shapes}")
    levels = _on_host(message.levels[row])
    unit = _on_host(message.unit[row : row + 1]).astype(dtype)
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
    return packed.T.tobytes()[: _packed_length(codes.size, bits)]


# Decoding


def expect_row(message: Message | Packed) -> RowType:
    """Return the type of a neighbour's row, given the own message of the same step, which `encode_row` accepts."""
    if isinstance(message, Packed):
        return RowType(_CODES_BY_SIZE[message.rows[0].entries.itemsize], message.dim)
    return RowType(_CODES_BY_SIZE[message.values.dtype.itemsize], message.shape[1])


def check_format(row: RowFormat, expected: RowType | None, left: int) -> int:
    """Return the length of the body that a format describes; allocate nothing.

    Raise CorruptError if there is no such body, if its row is not the expected one, or if fewer bytes are `left`.
    """
    if row.dtype not in _DTYPES:
        raise CorruptError(f"unknown dtype {row.dtype}")
    if row.form not in _DECODERS:
        raise CorruptError(f"unknown form {row.form}")
    if not (1 <= row.bits <= 16 if row.form == _LEVELS else row.bits == 0):
        raise CorruptError(f"{row.bits} bits, levels have 1 to 16 and all other forms 0")
    if row.values > row.dim or (row.form in (_DENSE, _LEVELS) and row.values != row.dim):
        raise CorruptError(f"{row.values} values for {row.dim} entries")
    if expected is not None and (row.dtype != expected.dtype or row.dim != expected.dim):
        raise CorruptError(f"expected {expected}, got {RowType(row.dtype, row.dim)}")
    length = _body_length(row.form, row.bits, row.dim, row.values, _DTYPES[row.dtype].itemsize)
    if length > left:
        raise CorruptError(f"expected a body of {length} bytes, got {left}: no more are left")
    return length


def decode_row(body: memoryview, row: RowFormat, packed: bool = False) -> Array | PackedRow:
    """Return the row in a body of a format that `check_format` accepts; a `packed` one stays marks and entries."""
    dtype = _DTYPES[row.dtype]
    if packed and row.form == _BITMAP:
        return _unpack_bitmap(body, dtype, row)
    values = _DECODERS[row.form](body, dtype, row)
    return PackedRow.of(values) if packed else values


def _decode_dense(body: memoryview, dtype: np.dtype[Any], row: RowFormat) -> Array:
    return np.frombuffer(body, dtype).astype(dtype.newbyteorder("="))


def _decode_index(body: memoryview, dtype: np.dtype[Any], row: RowFormat) -> Array:
    width = _index_width(row.dim)
    at = np.frombuffer(body, f"<u{width}", count=row.values)
    if row.values and (int(at[-1]) >= row.dim or not np.all(at[1:] > at[:-1])):
        raise CorruptError(f"positions must ascend and stay below {row.dim}")
    values = np.zeros(row.dim, dtype.newbyteorder("="))
    values[at] = _read_nonzero(body[row.values * width :], dtype)
    return values


def _decode_bitmap(body: memoryview, dtype: np.dtype[Any], row: RowFormat) -> Array:
    length = _packed_length(row.dim, 1)
    marked = np.unpackbits(np.frombuffer(body, np.uint8, count=length), bitorder="little").view(np.bool_)
    if marked[row.dim :].any() or int(np.count_nonzero(marked)) != row.values:
        raise CorruptError(f"the bitmap of {row.dim} entries does not mark {row.values} values")
    values = np.zeros(row.dim, dtype.newbyteorder("="))
    values[marked.nonzero()[0]] = _read_nonzero(body[length:], dtype)
    return values


def _unpack_bitmap(body: memoryview, dtype: np.dtype[Any], row: RowFormat) -> PackedRow:
    """Check a body as `_decode_bitmap` does, but leave it packed, copied to where words are aligned."""
    length = _packed_length(row.dim, 1)
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
        raise CorruptError("the last byte of the levels is not padded with zeros")
    return codes[:dim]


def _read_nonzero(body: memoryview, dtype: np.dtype[Any]) -> Array:
    values: Array = np.frombuffer(body, dtype)
    # Not values.all(): that reduction raises a floating-point warning for a signalling NaN, a comparison does not.
    if not (values != 0).all():
        raise CorruptError("a zero among the values of a sparse row")
    return values


_DECODERS: dict[int, Callable[[memoryview, np.dtype[Any], RowFormat], Array]] = {
    _DENSE: _decode_dense, _INDEX: _decode_index, _BITMAP: _decode_bitmap, _LEVELS: _decode_levels,
}
