"""What travels between nodes: real bytes, in a format that can be checked before it is believed.

A packet is a header, then a record per message; everything is little-endian:

    header   magic "DBOP" · version, messages u16 · sender, epoch, round, step u32 · length of the rest u64 · crc32 u32
    record   length of the name u8 · dtype u8 · form u8 · bits u8 · dim u32 · count u32 · name (UTF-8) · body

The checksum covers all but itself, so a flipped bit anywhere is found. A body is in one of four forms:

    dense    `count` = dim values
    index    `count` positions in the smallest unsigned width that dim fits into, ascending, then their values
    bitmap   a bit per entry, ⌈dim/8⌉ bytes, then `count` values
    levels   the unit, then dim integers of `bits` bits each, stored as level + 2^(bits−1); one bit is −1 or +1

A sparse message takes the smallest of the first three; the last two never send a zero. `sizes` knows all lengths
without encoding anything: a run in one process counts the same bytes as a run on a cluster.
"""

import struct
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from zlib import crc32

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from dbo.algorithms.gossip import Message, Packed, PackedRow
from dbo.algorithms.protocol import Array

VERSION = 1

_MAGIC = b"DBOP"
_HEADER = struct.Struct("<4sHHIIIIQ")
_CHECKSUM = struct.Struct("<I")
_RECORD = struct.Struct("<BBBBII")
_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<f8")}
_CODES = {"f4": 1, "f8": 2}
_DENSE, _INDEX, _BITMAP, _LEVELS = range(4)
_WHOLE = {8: "<u1", 16: "<u2"}               # levels that are whole integers need no packing

ENCODED, VALUE_BYTES, VALUES = range(3)      # columns of `Sizes.tables`


class WireError(ValueError):
    """A packet that cannot be encoded or must not be believed."""


class Truncated(WireError):
    """The packet ends before it should."""


class Foreign(WireError):
    """These bytes are no packet of ours."""


class VersionMismatch(WireError):
    """A packet of another version of the format."""


class Corrupt(WireError):
    """The packet's parts contradict each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Whose packet, and to which step of which attempt it belongs."""

    sender: int
    epoch: int
    round: int
    step: int


@dataclass(frozen=True, slots=True)
class Packet:
    """A packet as its receivers see it: one row per channel."""

    sender: int
    epoch: int
    round: int
    step: int
    channels: dict[str, Array | PackedRow]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The lengths of the packets that a block's rows are about to send."""

    header: int                              # bytes of a packet that are no body: its header and its records' heads
    tables: dict[str, NDArray[np.int64]]     # channel → (nodes, 3): bytes of the body, bytes of values, values

    @property
    def bodies(self) -> dict[str, NDArray[np.int64]]:
        """Channel → (nodes,) bytes of the body."""
        return {name: table[:, ENCODED] for name, table in self.tables.items()}

    @property
    def total(self) -> NDArray[np.int64]:
        """(nodes,) the lengths of the whole packets."""
        return np.asarray(self.header + sum(self.bodies.values()), dtype=np.int64)


def sizes(messages: Mapping[str, Message | Packed]) -> Sizes:
    """Exactly the lengths that `encode` gives, for all rows at once and without encoding."""
    return Sizes(_heads(tuple(messages)), {name: _table(message) for name, message in messages.items()})


@lru_cache(maxsize=1024)
def sparse_sizes(nonzeros: tuple[int, ...], dim: int, itemsize: int) -> NDArray[np.int64]:
    """The (nodes, 3) table of sparse rows with so many non-zero entries.

    A row that goes out dense carries its zeros as values, and no positions.
    """
    table = np.empty((len(nonzeros), 3), dtype=np.int64)
    for row, count in enumerate(nonzeros):
        form = _sparse_form(count, dim, itemsize)
        values = dim if form == _DENSE else count
        table[row] = _body_length(form, 0, dim, values, itemsize), values * itemsize, values
    table.setflags(write=False)
    return table


def dense_sizes(nodes: int, dim: int, itemsize: int) -> NDArray[np.int64]:
    """The (nodes, 3) table of dense rows."""
    return _uniform(nodes, dim * itemsize, dim)


def encode(header: Header, messages: Mapping[str, Message | Packed], row: int) -> bytes:
    """The packet of one row of the messages."""
    parts: list[bytes | memoryview] = []
    for name, message in messages.items():
        try:
            parts += _record(name, message, row)
        except WireError as error:
            raise WireError(f"channel {name!r}: {error}") from None
    try:
        head = _HEADER.pack(
            _MAGIC, VERSION, len(messages), header.sender, header.epoch, header.round, header.step,
            sum(len(part) for part in parts),
        )
    except struct.error as error:
        raise WireError(f"{header} with {len(messages)} messages does not fit: {error}") from None
    checksum = crc32(head)
    for part in parts:
        checksum = crc32(part, checksum)
    return b"".join([head, _CHECKSUM.pack(checksum), *parts])


def decode(data: bytes | bytearray | memoryview, packed: Container[str] = ()) -> Packet:
    """The packet in these bytes; a WireError if anything about them is not as it must be.

    The channels named in `packed` are not unpacked: their rows come as they travelled, marks and entries.
    """
    view = memoryview(data).cast("B")
    count, sender, epoch, round_, step = _open(view)
    channels: dict[str, Array | PackedRow] = {}
    at = _HEADER.size + _CHECKSUM.size
    for _ in range(count):
        if len(view) - at < _RECORD.size:
            raise Corrupt(f"{len(channels)} messages of {count}, then no room for another")
        length, dtype, form, bits, dim, values = _RECORD.unpack_from(view, at)
        at += _RECORD.size
        name = _name(view[at : at + length], length)
        at += length
        if name in channels:
            raise Corrupt(f"channel {name!r} comes twice")
        try:
            end = at + _checked_length(dtype, form, bits, dim, values)
            if end > len(view):
                raise Corrupt(f"a body of {end - at} bytes where {len(view) - at} are left")
            if form == _BITMAP and name in packed:
                channels[name] = _packed_row(view[at:end], _DTYPES[dtype], dim, values)
            else:
                row = _DECODERS[form](view[at:end], _DTYPES[dtype], bits, dim, values)
                channels[name] = PackedRow.of(row) if name in packed else row
        except Corrupt as error:
            raise Corrupt(f"channel {name!r}: {error}") from None
        except MemoryError:
            raise Corrupt(f"channel {name!r}: {dim} entries do not fit into memory") from None
        at = end
    if at != len(view):
        raise Corrupt(f"{len(view) - at} bytes after the last message")
    return Packet(sender, epoch, round_, step, channels)


# Sizes


@lru_cache(maxsize=256)
def _heads(names: tuple[str, ...]) -> int:
    """Bytes of a packet besides the bodies."""
    return _HEADER.size + _CHECKSUM.size + sum(_RECORD.size + len(name.encode()) for name in names)


@lru_cache(maxsize=256)
def _uniform(nodes: int, length: int, values: int) -> NDArray[np.int64]:
    """The table of rows whose length does not depend on what is in them; all of it counts as values."""
    table = np.tile(np.array([length, length, values], dtype=np.int64), (nodes, 1))
    table.setflags(write=False)
    return table


def _table(message: Message | Packed) -> NDArray[np.int64]:
    nodes, dim = message.shape
    if isinstance(message, Packed):
        return sparse_sizes(tuple(row.entries.size for row in message.rows), dim, message.rows[0].entries.itemsize)
    itemsize = message.values.dtype.itemsize
    if message.form == "dense":
        return _uniform(nodes, dim * itemsize, dim)
    if message.form == "levels":
        return _uniform(nodes, itemsize + _packed(dim, message.bits), dim)
    return sparse_sizes(_nonzeros(message.values), dim, itemsize)


def _nonzeros(values: Array) -> tuple[int, ...]:
    """Entries of each row that are not zero."""
    if not isinstance(values, np.ndarray):
        return tuple(array_namespace(values).count_nonzero(values, axis=1).tolist())
    there = values != 0
    if values.shape[1] > 4096:      # counting row by row is quicker once a row outweighs a call
        return tuple(int(np.count_nonzero(row)) for row in there)
    return tuple(np.add.reduce(there, axis=1, dtype=np.int64).tolist())


def _index_width(dim: int) -> int:
    """Bytes of the smallest unsigned integer that holds every position."""
    return 1 if dim <= 1 << 8 else 2 if dim <= 1 << 16 else 4


def _packed(dim: int, bits: int) -> int:
    return -(-dim * bits // 8)


def _sparse_form(count: int, dim: int, itemsize: int) -> int:
    """The shortest form; of equal ones dense before bitmap before index."""
    index, bitmap = count * _index_width(dim), -(-dim // 8)
    if dim * itemsize <= count * itemsize + min(index, bitmap):
        return _DENSE
    return _BITMAP if bitmap <= index else _INDEX


def _body_length(form: int, bits: int, dim: int, count: int, itemsize: int) -> int:
    if form == _LEVELS:
        return itemsize + _packed(dim, bits)
    return count * itemsize + {_DENSE: 0, _INDEX: count * _index_width(dim), _BITMAP: -(-dim // 8)}[form]


def _checked_length(dtype: int, form: int, bits: int, dim: int, count: int) -> int:
    """The length of a body, from what its record says; Corrupt if that cannot be."""
    if dtype not in _DTYPES:
        raise Corrupt(f"unknown dtype {dtype}")
    if form not in _DECODERS:
        raise Corrupt(f"unknown form {form}")
    if not (1 <= bits <= 16 if form == _LEVELS else bits == 0):
        raise Corrupt(f"{bits} bits, levels have 1 to 16 and everything else 0")
    if count > dim or (form in (_DENSE, _LEVELS) and count != dim):
        raise Corrupt(f"{count} values for {dim} entries")
    return _body_length(form, bits, dim, count, _DTYPES[dtype].itemsize)


# Encoding


def _host(array: Any) -> NDArray[Any]:
    """The array in this machine's memory, wherever it lived."""
    return array if isinstance(array, np.ndarray) else np.asarray(array.detach().cpu().numpy())


def _record(name: str, message: Message | Packed, row: int) -> list[bytes | memoryview]:
    encoded = name.encode()
    if not 1 <= len(encoded) <= 255:
        raise WireError(f"a name has 1 to 255 bytes, this one {len(encoded)}")
    if isinstance(message, Packed):
        return _packed_record(encoded, message, row)
    values = _host(message.values[row])
    code = _CODES.get(values.dtype.str[1:])
    if code is None:
        raise WireError(f"dtype {values.dtype} cannot travel, only float32 and float64 can")
    if values.ndim != 1 or values.size >= 1 << 32:
        raise WireError(f"a row is flat and shorter than 2^32, got shape {values.shape}")
    values = values.astype(_DTYPES[code], copy=False)
    dim = count = values.size
    if message.form == "levels":
        form, body = _LEVELS, _encode_levels(message, row, values.dtype)
    elif message.form == "sparse":
        there = values != 0
        count = int(np.count_nonzero(there))
        form = _sparse_form(count, dim, values.itemsize)
        if form == _INDEX:
            (at,) = there.nonzero()
            body = at.astype(f"<u{_index_width(dim)}").tobytes() + values[at].tobytes()
        elif form == _BITMAP:
            body = np.packbits(there, bitorder="little").tobytes() + values[there.nonzero()[0]].tobytes()
        else:
            # Receivers of a sparse row see +0.0 whichever form it took.
            count, body = dim, (values + values.dtype.type(0)).tobytes()
    elif message.form == "dense":
        form, body = _DENSE, values.tobytes()
    else:
        raise WireError(f"unknown form {message.form!r}")
    bits = message.bits if form == _LEVELS else 0
    return [_RECORD.pack(len(encoded), code, form, bits, dim, count) + encoded, body]


def _packed_record(name: bytes, message: Packed, row: int) -> list[bytes | memoryview]:
    """A row that is packed already: nothing but copies, unless another form is shorter."""
    packed, dim = message.rows[row], message.dim
    entries = packed.entries
    code, count = _CODES[entries.dtype.str[1:]], entries.size
    form = _sparse_form(count, dim, entries.itemsize)
    entries = entries.astype(_DTYPES[code], copy=False)
    if form == _BITMAP:
        marks = packed.words.astype("<u8", copy=False).view(np.uint8)
        body = [marks[: -(-dim // 8)].data, entries.data]
    elif form == _INDEX:
        body = [packed.positions(dim).astype(f"<u{_index_width(dim)}").data, entries.data]
    else:
        count, body = dim, [packed.dense(dim).astype(_DTYPES[code], copy=False).data]
    return [_RECORD.pack(len(name), code, form, 0, dim, count) + name, *(part.cast("B") for part in body)]


def _encode_levels(message: Message, row: int, dtype: np.dtype[Any]) -> bytes:
    bits = message.bits
    if message.levels is None or message.unit is None or not 1 <= bits <= 16:
        raise WireError(f"levels need integers, a unit and 1 to 16 bits, got bits={bits}")
    levels = _host(message.levels[row])
    unit = _host(message.unit[row : row + 1]).astype(dtype)
    if bits == 1:
        if not np.all(np.abs(levels) == 1):
            raise WireError("levels of one bit are −1 or +1")
        codes = (levels > 0).astype(np.uint16)
    else:
        half = 1 << (bits - 1)
        if levels.size and not (-half <= levels.min() and levels.max() < half):
            raise WireError(f"levels from {levels.min()} to {levels.max()} do not fit into {bits} bits")
        codes = (levels + half).astype("<u2")
    return unit.tobytes() + _pack(codes, bits)


def _pack(codes: NDArray[Any], bits: int) -> bytes:
    """The lowest `bits` bits of each code, one after the other, the lowest first."""
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
    return packed.T.tobytes()[: _packed(codes.size, bits)]


# Decoding


def _open(view: memoryview) -> tuple[int, int, int, int, int]:
    """Number of messages, sender, epoch, round and step, once header and checksum are found in order."""
    start = _HEADER.size + _CHECKSUM.size
    if bytes(view[:4]) != _MAGIC[: len(view)]:
        raise Foreign(f"a packet starts with {_MAGIC!r}, this one with {bytes(view[:4])!r}")
    if len(view) < start:
        raise Truncated(f"{len(view)} bytes, a header has {start}")
    _, version, count, sender, epoch, round_, step, length = _HEADER.unpack_from(view)
    if version != VERSION:
        raise VersionMismatch(f"a packet of version {version}, this is version {VERSION}")
    if len(view) < start + length:
        raise Truncated(f"{len(view)} bytes of {start + length}")
    if len(view) > start + length:
        raise Corrupt(f"{len(view) - start - length} bytes too many")
    (expected,) = _CHECKSUM.unpack_from(view, _HEADER.size)
    if crc32(view[start:], crc32(view[: _HEADER.size])) != expected:
        raise Corrupt("the checksum does not match")
    return count, sender, epoch, round_, step


def _name(view: memoryview, length: int) -> str:
    if not 1 <= length == len(view):
        raise Corrupt(f"a channel name of {length} bytes where {len(view)} are left")
    try:
        return bytes(view).decode()
    except UnicodeDecodeError:
        raise Corrupt(f"a channel name that is not UTF-8: {bytes(view)!r}") from None


def _decode_dense(body: memoryview, dtype: np.dtype[Any], bits: int, dim: int, count: int) -> Array:
    return np.frombuffer(body, dtype).astype(dtype.newbyteorder("="))


def _decode_index(body: memoryview, dtype: np.dtype[Any], bits: int, dim: int, count: int) -> Array:
    width = _index_width(dim)
    at = np.frombuffer(body, f"<u{width}", count=count)
    if count and (int(at[-1]) >= dim or not np.all(at[1:] > at[:-1])):
        raise Corrupt(f"positions must ascend and stay below {dim}")
    row = np.zeros(dim, dtype.newbyteorder("="))
    row[at] = _nonzero_values(body[count * width :], dtype)
    return row


def _decode_bitmap(body: memoryview, dtype: np.dtype[Any], bits: int, dim: int, count: int) -> Array:
    length = -(-dim // 8)
    there = np.unpackbits(np.frombuffer(body, np.uint8, count=length), bitorder="little").view(np.bool_)
    if there[dim:].any() or int(np.count_nonzero(there)) != count:
        raise Corrupt(f"the bitmap of {dim} entries does not mark {count} values")
    row = np.zeros(dim, dtype.newbyteorder("="))
    row[there.nonzero()[0]] = _nonzero_values(body[length:], dtype)
    return row


def _packed_row(body: memoryview, dtype: np.dtype[Any], dim: int, count: int) -> PackedRow:
    """What `_decode_bitmap` decodes, checked as well, but left as it is and copied to where words are aligned."""
    length = -(-dim // 8)
    marks = np.zeros(-(-dim // 64) * 8, dtype=np.uint8)
    marks[:length] = np.frombuffer(body, np.uint8, count=length)
    words = marks.view("<u8").astype(np.uint64, copy=False)
    if (dim % 8 and marks[length - 1] >> dim % 8) or int(np.bitwise_count(words).sum()) != count:
        raise Corrupt(f"the bitmap of {dim} entries does not mark {count} values")
    return PackedRow(words, _nonzero_values(body[length:], dtype).astype(dtype.newbyteorder("=")))


def _decode_levels(body: memoryview, dtype: np.dtype[Any], bits: int, dim: int, count: int) -> Array:
    unit = np.frombuffer(body, dtype, count=1)[0].astype(dtype.newbyteorder("="))
    codes = _unpack(np.frombuffer(body, np.uint8, offset=dtype.itemsize), bits, dim)
    levels = 2 * codes - 1 if bits == 1 else codes - (1 << (bits - 1))
    row: Array = levels.astype(unit.dtype) * unit
    return row


def _unpack(packed: NDArray[np.uint8], bits: int, dim: int) -> NDArray[np.int32]:
    """What `_pack` packed; Corrupt if the last byte is filled up with anything but zeros."""
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
        raise Corrupt("the last byte of the levels is not filled up with zeros")
    return codes[:dim]


def _nonzero_values(body: memoryview, dtype: np.dtype[Any]) -> Array:
    values: Array = np.frombuffer(body, dtype)
    if not values.all():
        raise Corrupt("a zero among the values of a sparse row")
    return values


_DECODERS = {_DENSE: _decode_dense, _INDEX: _decode_index, _BITMAP: _decode_bitmap, _LEVELS: _decode_levels}
