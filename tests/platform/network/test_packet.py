"""Packets: several channels in one, every damaged byte detected, every error with its own exception."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.platform.network.rows import HEADER, compress, encode_one, random_rows, seal, set_byte

from dbo.algorithms.api import Message, Qsgd, Sign, TopK, dense
from dbo.platform.network.codecs import CorruptError, WireError
from dbo.platform.network.packet import (
    Header,
    NotAPacketError,
    TruncatedError,
    VersionError,
    decode,
    encode,
    measure,
)


def test_a_packet_carries_several_channels() -> None:
    """Messages of different forms, dims and dtypes travel in one packet; header fields and order are kept."""
    messages = {
        "x": dense(random_rows(3, 5, np.float64)),
        "y.d": compress(TopK(), random_rows(3, 640, np.float32)),
        "ȳ": compress(Qsgd(levels=5), random_rows(3, 11, np.float32)),
        "z.s": compress(Sign(), random_rows(3, 13, np.float64)),
    }
    sizes = measure(messages)
    for row in range(3):
        data = encode(HEADER, messages, row)
        packet = decode(memoryview(bytearray(data)))
        assert packet.header == HEADER
        assert list(packet.channels) == list(messages)
        assert all(packet.channels[c].tobytes() == m.values[row].tobytes() for c, m in messages.items())
        assert len(data) == sizes.total[row]
    assert decode(encode(HEADER, {}, 0)).channels == {}
    assert len(encode(HEADER, {}, 0)) == measure({}).total == measure({}).header


SMALL = {
    "index": compress(TopK(ratio=0.02), random_rows(2, 100, np.float32)),
    "bitmap": compress(TopK(ratio=0.3), random_rows(2, 30, np.float64)),
    "levels": compress(Qsgd(levels=5), random_rows(2, 7, np.float32)),
    "sign": compress(Sign(), random_rows(2, 9, np.float32)),
    "dense": dense(random_rows(2, 3, np.float32)),
}


def test_every_flipped_bit_is_detected() -> None:
    """No packet with one bit flipped, wherever, is accepted."""
    data = encode(HEADER, SMALL, 1)
    for at in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises((TruncatedError, NotAPacketError, VersionError, CorruptError)):
            decode(flipped)


def test_every_truncation_is_detected() -> None:
    """No proper prefix of a packet is accepted, and nothing may follow it."""
    data = encode(HEADER, SMALL, 1)
    for length in range(len(data)):
        with pytest.raises(TruncatedError):
            decode(data[:length])
    with pytest.raises(CorruptError, match="too many"):
        decode(data + b"\0")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damage_under_a_right_checksum_raises_nothing_else(data: st.DataObject) -> None:
    """Whatever the bytes, decoding gives a packet or a WireError, never another exception."""
    packet = bytearray(encode(HEADER, SMALL, 1))
    for _ in range(data.draw(st.integers(1, 4))):
        packet[data.draw(st.integers(36, len(packet) - 1))] = data.draw(st.integers(0, 15) | st.integers(0, 255))
    cut = data.draw(st.integers(36, len(packet)))
    with suppress(WireError):
        decode(seal(bytes(packet[:cut])))


@settings(max_examples=200)
@given(st.binary(max_size=80))
def test_random_bytes_are_refused(noise: bytes) -> None:
    """Random bytes raise a WireError."""
    with pytest.raises(WireError):
        decode(noise)


INDEX = encode_one(SMALL["index"], 1)          # 2 positions of one byte from 49 on, then 2 float32
BITMAP = encode_one(SMALL["bitmap"], 1)        # 30 entries: 4 bytes of bitmap, then 9 float64
LEVELS = encode_one(SMALL["levels"], 1)        # 7 levels of 4 bits: unit, then 4 bytes, the last one half full


@pytest.mark.parametrize(
    ("data", "kind", "reason"),
    [
        (b"", TruncatedError, "0 bytes"),
        (b"PK\3\4" + INDEX[4:], NotAPacketError, "starts with"),
        (INDEX[:4] + b"\2" + INDEX[5:], VersionError, "version 2"),
        (INDEX[:32] + b"\0\0\0\0" + INDEX[36:], CorruptError, "checksum"),
        (set_byte(INDEX, 6, 2), CorruptError, "1 messages of 2"),
        (set_byte(INDEX, 6, 0), CorruptError, "after the last message"),
        (set_byte(INDEX, 36, 0), CorruptError, "name of 0 bytes"),
        (set_byte(INDEX, 36, 255), CorruptError, "name of 255 bytes"),
        (set_byte(INDEX, 48, 0xFF), CorruptError, "not UTF-8"),
        (set_byte(INDEX, 37, 9), CorruptError, "unknown dtype 9"),
        (set_byte(INDEX, 38, 7), CorruptError, "unknown form 7"),
        (set_byte(INDEX, 39, 4), CorruptError, "4 bits"),
        (set_byte(INDEX, 40, 1), CorruptError, "2 values for 1 entries"),
        (set_byte(INDEX, 44, 9), CorruptError, "are left"),
        (set_byte(INDEX, 50, 100), CorruptError, "below 100"),
        (set_byte(INDEX, 50, INDEX[49]), CorruptError, "ascend"),
        (seal(INDEX[:51] + bytes(4) + INDEX[55:]), CorruptError, "a zero among the values"),
        (seal(INDEX + b"\0"), CorruptError, "after the last message"),
        (seal(INDEX[:-1]), CorruptError, "are left"),
        (seal(INDEX[:6] + b"\2" + INDEX[7:] + INDEX[36:]), CorruptError, "comes twice"),
        (set_byte(BITMAP, 49, BITMAP[49] ^ 2), CorruptError, "bitmap"),
        (set_byte(BITMAP, 52, BITMAP[52] | 128), CorruptError, "bitmap"),
        (seal(BITMAP[:49] + b"\xff\0\0\x80" + BITMAP[53:]), CorruptError, "does not mark 9 values"),
        (set_byte(LEVELS, 39, 0), CorruptError, "0 bits"),
        (set_byte(LEVELS, 39, 17), CorruptError, "17 bits"),
        (set_byte(LEVELS, 44, 6), CorruptError, "6 values for 7 entries"),
        (set_byte(LEVELS, len(LEVELS) - 1, LEVELS[-1] | 128), CorruptError, "not padded"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_contradiction_has_its_own_error(data: bytes, kind: type[WireError], reason: str) -> None:
    """Each wrong field has its own exception and message, also under a right checksum."""
    with pytest.raises(kind, match=reason):
        decode(data)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ({"y": dense(np.zeros((1, 3), dtype=np.int64))}, "dtype int64 is not allowed"),
        ({"": dense(np.zeros((1, 3)))}, "1 to 255 bytes"),
        ({"y" * 256: dense(np.zeros((1, 3)))}, "1 to 255 bytes"),
        ({"y": dense(np.zeros((1, 3, 2)))}, "must be flat"),
        ({"y": Message(np.zeros((1, 3)), form="levels", bits=4)}, "need integers, a unit"),
        ({"y": Message(np.zeros((1, 2)), "levels", 2, np.array([[8, 0]]), np.ones(1), 4)}, "do not fit into 4 bits"),
        ({"y": Message(np.zeros((1, 2)), "levels", 2, np.array([[1, 0]]), np.ones(1), 1)}, "−1 or \\+1"),
        ({"y": Message(np.zeros((1, 2)), "levels", 2, np.array([[1, 0]]), np.ones(1), 17)}, "1 to 16 bits"),
        ({"y": Message(np.zeros((1, 2)), "unknown")}, "unknown form 'unknown'"),  # type: ignore[arg-type]
    ],
)
def test_a_message_that_does_not_fit_the_format_is_refused(messages: dict[str, Message], reason: str) -> None:
    """A message that cannot be encoded is refused with the name of its channel."""
    with pytest.raises(WireError, match=reason) as error:
        encode(HEADER, messages, 0)
    assert str(error.value).startswith("channel ")


def test_header_fields_must_fit() -> None:
    """A sender or round outside 32 bits is refused, not wrapped around."""
    for header in (Header(sender=-1, epoch=0, round=0, step=0), Header(sender=0, epoch=0, round=2**32, step=0)):
        with pytest.raises(WireError, match="does not fit"):
            encode(header, {}, 0)
