"""Encode and decode packets: what travels between nodes, checked completely before it is used.

A packet is a header, then a record per message; everything is little-endian:

    header   magic "DBOP" · version, messages u16 · sender, epoch, round, step u32 · length of the rest u64 · crc32 u32
    record   length of the name u8 · dtype u8 · form u8 · bits u8 · dim u32 · count u32 · name (UTF-8) · body
             of a sparse row without values: a byte 0

The checksum covers all other bytes, so a flipped bit anywhere is found. It does not authenticate a sender: a record may
announce any dimension. So a receiver passes the rows that it expects, and `decode` compares every record with them, and
every length with the bytes that are left, before it allocates a row. `codecs` defines the bodies.
"""

import struct
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import lru_cache
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from dbo.algorithms.api import Array, Message, Packed, PackedRow
from dbo.platform.network.codecs import (
    ENCODED,
    VALUES,
    EncodedRows,
    Table,
    encode_row,
    expect_row,
    measure_messages,
)
from dbo.platform.network.decoding import EncodedRow, body_length, check_row, decode_row
from dbo.platform.network.row_format import RICE, CorruptError, RowFormat, RowType, WireError, check_format

VERSION = 3

_MAGIC = b"DBOP"
_HEADER = struct.Struct("<4sHHIIIIQ")
_CHECKSUM = struct.Struct("<I")
_RECORD = struct.Struct("<BBBBII")
_START = _HEADER.size + _CHECKSUM.size      # of the first record
_NOTHING = b"\0"                             # the record of a sparse row without values
_MAX_UNCHECKED = 100_000                    # entries beyond those that the bytes can hold, if no rows are expected


class TruncatedError(WireError):
    """The packet ends too early."""


class NotAPacketError(WireError):
    """The bytes do not start as a packet does."""


class VersionError(WireError):
    """The packet is of another version of the format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The sender of a packet, and the step of which attempt it belongs to."""

    sender: int
    epoch: int
    round: int
    step: int


@dataclass(frozen=True, slots=True)
class Packet:
    """A packet as its receivers see it: one row per channel."""

    header: Header
    channels: dict[str, Array | PackedRow | EncodedRow]


@dataclass(frozen=True, slots=True)
class PacketSizes:
    """The lengths of the packets that the rows of a block are about to send."""

    header: NDArray[np.int64]       # (nodes,) bytes of a packet outside of bodies: its header and its records' heads
    tables: dict[str, Table]        # channel → (nodes, 3) bytes of the body, bytes of values, values

    @property
    def bodies(self) -> dict[str, NDArray[np.int64]]:
        """Channel → (nodes,) bytes of the body."""
        return {name: table[:, ENCODED] for name, table in self.tables.items()}

    @property
    def total(self) -> NDArray[np.int64]:
        """(nodes,) the lengths of the whole packets."""
        return np.asarray(self.header + sum(self.bodies.values()), dtype=np.int64)


def measure(messages: Mapping[str, Message | Packed]) -> PacketSizes:
    """Return exactly the lengths that `encode` gives, for all rows at once and without encoding."""
    tables = measure_messages(messages)
    nodes = len(next(iter(tables.values()))) if tables else 1
    head = _measure_heads(nodes, tuple(messages))
    for name, message in messages.items():
        values = tables[name][:, VALUES]
        if message.form == "sparse" and np.count_nonzero(values) < nodes:
            head = head + (values == 0) * (len(_NOTHING) - _head_length(name))
    return PacketSizes(head, tables)


@lru_cache(maxsize=256)
def _measure_heads(nodes: int, names: tuple[str, ...]) -> NDArray[np.int64]:
    """Return the bytes outside of bodies if every row has values; read-only, because packets share them."""
    head = np.full(nodes, _START + sum(map(_head_length, names)), dtype=np.int64)
    head.setflags(write=False)
    return head


@lru_cache(maxsize=256)
def _head_length(name: str) -> int:
    """Return the bytes of a record outside of its body."""
    return _RECORD.size + len(name.encode())


def encode(header: Header, messages: Mapping[str, Message | Packed | EncodedRows], row: int) -> bytes:
    """Return the packet of one row of the messages."""
    parts: list[bytes | memoryview] = []
    for name, message in messages.items():
        try:
            parts += _encode_record(name.encode(), message, row)
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


def _encode_record(name: bytes, message: Message | Packed | EncodedRows, row: int) -> list[bytes | memoryview]:
    if not 1 <= len(name) <= 255:
        raise WireError(f"a name of {len(name)} bytes is not allowed; must have 1 to 255 bytes")
    format_, body = encode_row(message, row)
    if format_.form == RICE and not format_.values:
        return [_NOTHING]
    return [_RECORD.pack(len(name), *format_) + name, *body]


def expect_rows(messages: Mapping[str, Message | Packed]) -> dict[str, RowType]:
    """Return what `decode` is to expect of a neighbour, given the own messages of the same step."""
    return {name: expect_row(message) for name, message in messages.items()}


def decode(
    data: bytes | bytearray | memoryview,
    packed: Container[str] = (),
    *,
    header: Header | None = None,
    expected: Mapping[str, RowType] | None = None,
    expand: bool = True,
) -> Packet:
    """Return the packet in these bytes; raise WireError if anything about them is wrong.

    Rows of the channels named in `packed` are not unpacked: they stay marks and entries. Without `expand` all rows stay
    encoded, as checked parts of `data`. A receiver passes the `header`
    and the rows that it expects, channels in order. Another packet is refused before a row is allocated. Without
    `expected`, rows with many more entries than the bytes can hold are refused, and so are those without values, whose
    records say nothing else.
    """
    view = memoryview(data).cast("B")
    got, count = _read_header(view)
    if header is not None and got != header:
        raise WireError(f"expected packet {header}, got {got}")
    channels: dict[str, Array | PackedRow | EncodedRow] = {}
    for name, (row, start, end) in _read_records(view, count, expected).items():
        body = view[start:end]
        try:
            channels[name] = decode_row(body, row, name in packed) if expand else check_row(body, row)
        except CorruptError as error:
            raise CorruptError(f"channel {name!r}: {error}") from None
    return Packet(got, channels)


def _read_records(
    view: memoryview, count: int, expected: Mapping[str, RowType] | None
) -> dict[str, tuple[RowFormat, int, int]]:
    """Return channel → (format, start and end of the body), once every record is verified; allocate no row."""
    if expected is not None and count != len(expected):
        raise CorruptError(f"expected packet with channels {[*expected]}, got {count} of them")
    names = None if expected is None else [*expected]
    records: dict[str, tuple[RowFormat, int, int]] = {}
    at, entries = _START, 0
    for _ in range(count):
        if names is not None and at < len(view) and view[at] == 0:
            assert expected is not None
            name = names[len(records)]
            records[name] = RowFormat(expected[name].dtype, RICE, 0, expected[name].dim, 0), at + 1, at + 1
            at += 1
            continue
        if len(view) - at < _RECORD.size:
            raise CorruptError(f"expected {count} messages, got {len(records)}: no space for another")
        length, *format_ = _RECORD.unpack_from(view, at)
        at += _RECORD.size
        name = _read_name(view[at : at + length], length)
        at += length
        if name in records:
            raise CorruptError(f"channel {name!r} comes twice")
        if names is not None and name != names[len(records)]:
            raise CorruptError(f"expected packet with channels {names}, got {name!r} at position {len(records)}")
        row = RowFormat(*format_)
        try:
            check_format(row, None if expected is None else expected[name])
            end = at + body_length(row, view[at:])
        except CorruptError as error:
            raise CorruptError(f"channel {name!r}: {error}") from None
        records[name] = row, at, end
        at, entries = end, entries + row.dim
    if at != len(view):
        raise CorruptError(f"{len(view) - at} bytes after the last message")
    # At most 8 entries fit into a byte, except where a row travels as positions: those allow any dimension.
    if expected is None and entries > (most := 8 * len(view) + _MAX_UNCHECKED):
        raise CorruptError(f"expected at most {most} entries in {len(view)} bytes, got {entries}")
    return records


def _read_header(view: memoryview) -> tuple[Header, int]:
    """Return the header and the number of messages, once header and checksum are verified."""
    if bytes(view[:4]) != _MAGIC[: len(view)]:
        raise NotAPacketError(f"a packet starts with {_MAGIC!r}, this one with {bytes(view[:4])!r}")
    if len(view) < _START:
        raise TruncatedError(f"{len(view)} bytes, a header has {_START}")
    _, version, count, sender, epoch, round_, step, length = _HEADER.unpack_from(view)
    if version != VERSION:
        raise VersionError(f"a packet of version {version}, this is version {VERSION}")
    if len(view) < _START + length:
        raise TruncatedError(f"{len(view)} bytes of {_START + length}")
    if len(view) > _START + length:
        raise CorruptError(f"{len(view) - _START - length} bytes too many")
    (expected,) = _CHECKSUM.unpack_from(view, _HEADER.size)
    if crc32(view[_START:], crc32(view[: _HEADER.size])) != expected:
        raise CorruptError("the checksum does not match")
    return Header(sender=sender, epoch=epoch, round=round_, step=step), count


def _read_name(view: memoryview, length: int) -> str:
    if not 1 <= length == len(view):
        raise CorruptError(f"a channel name of {length} bytes where {len(view)} are left")
    try:
        return bytes(view).decode()
    except UnicodeDecodeError:
        raise CorruptError(f"a channel name that is not UTF-8: {bytes(view)!r}") from None
