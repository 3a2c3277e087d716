"""The wire: bytes that give back exactly what was sent, and nothing else."""

import struct
from contextlib import suppress
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo.algorithms.compression.compressors import Compressor, Identity, Qsgd, RandK, Sign, TopK
from dbo.algorithms.gossip import Message, dense
from dbo.algorithms.rng import Draws
from dbo.platform.network import wire
from dbo.platform.network.wire import (
    Corrupt,
    Foreign,
    Header,
    Truncated,
    VersionMismatch,
    WireError,
    decode,
    encode,
    sizes,
)

HEADER = Header(sender=3, epoch=1, round=70000, step=15)
EVERY: list[Compressor] = [
    Identity(), *(TopK(ratio=r) for r in (0.001, 0.03, 0.2, 0.9, 1.0)), RandK(ratio=0.3),
    *(Qsgd(levels=2**bits - 1) for bits in range(1, 16)), Sign(),
]


def rows_of(nodes: int, dim: int, dtype: Any, seed: int = 0) -> Any:
    rows = np.random.default_rng(seed).standard_normal((nodes, dim)).astype(dtype)
    rows[:, ::7] = 0
    rows[0] = 0
    return rows


def compressed(q: Compressor, rows: Any) -> Message:
    return q(rows, Draws(0, np.arange(len(rows)), 0), "y")


def sealed(data: bytes) -> bytes:
    """The packet with its length and checksum made right again: only its meaning is wrong."""
    head = struct.pack("<Q", len(data) - 36)
    data = data[:24] + head + data[32:]
    return data[:32] + struct.pack("<I", crc32(data[36:], crc32(data[:32]))) + data[36:]


def one(message: Message, row: int = 0) -> bytes:
    """A packet with one message: its record starts at byte 36, its name "y" at 48, its body at 49."""
    return encode(HEADER, {"y": message}, row)


def with_byte(data: bytes, at: int, value: int) -> bytes:
    return sealed(data[:at] + bytes([value]) + data[at + 1 :])


@pytest.mark.parametrize("q", EVERY, ids=repr)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("dim", [1, 2, 9, 256, 257, 1000])
def test_decoding_gives_the_message_back(q: Compressor, dtype: Any, dim: int) -> None:
    """decode(encode(m)) is m.values to the last bit, and `sizes` is its length, for every compressor and row."""
    message = compressed(q, rows_of(4, dim, dtype))
    counted = sizes({"y": message})
    for row in range(4):
        data = one(message, row)
        values = decode(data).channels["y"]
        assert values.dtype == dtype
        assert values.tobytes() == message.values[row].tobytes()
        assert len(data) == counted.total[row] == counted.header + counted.bodies["y"][row]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70_000), st.floats(0, 1), st.sampled_from([np.float32, np.float64]), st.integers(0, 9))
def test_sparse_rows_take_the_shortest_form(dim: int, share: float, dtype: Any, seed: int) -> None:
    """A sparse body is the least of dense, index + value and bitmap + value; no zero travels beside positions."""
    generator = np.random.default_rng(seed)
    values = np.where(generator.random((1, dim)) < share, generator.standard_normal((1, dim)), 0).astype(dtype)
    message = Message(values, form="sparse", kept=1)
    data = one(message)
    n, item = np.count_nonzero(values), values.itemsize
    index = next(width for width in (1, 2, 4) if dim <= 256**width)
    assert len(data) - 49 == min(dim * item, n * (item + index), n * item + (dim + 7) // 8)
    table = sizes({"y": message}).tables["y"]
    assert table[0, wire.ENCODED] == len(data) - 49
    assert table[0, wire.VALUE_BYTES] == table[0, wire.VALUES] * item
    assert table[0, wire.VALUES] in (n, dim)
    assert decode(data).channels["y"].tobytes() == values[0].tobytes()


def test_the_forms_at_the_papers_size() -> None:
    """20 % of 2 032 620 float32 travel with a bitmap: 406 524 · 4 + 254 078 bytes; 1 % with 4-byte positions."""
    (length, value_bytes, values), = wire.sparse_sizes((406_524,), 2_032_620, 4).tolist()
    assert (length, value_bytes, values) == (1_626_096 + 254_078, 1_626_096, 406_524)
    assert wire.sparse_sizes((20_326,), 2_032_620, 4)[0, wire.ENCODED] == 20_326 * 8


def test_positions_take_the_smallest_width() -> None:
    """One byte up to 256 entries, two up to 65 536, four beyond: the last position still fits."""
    for dim, width in ((256, 1), (257, 2), (65_536, 2), (65_537, 4)):
        values = np.zeros((1, dim), dtype=np.float32)
        values[0, -1] = 2.5
        data = one(Message(values, form="sparse", kept=1))
        assert len(data) - 49 == 4 + width
        assert wire.sparse_sizes((1,), dim, 4).tolist() == [[4 + width, 4, 1]]
        assert decode(data).channels["y"].tobytes() == values.tobytes()


def test_a_nearly_full_sparse_row_goes_out_dense() -> None:
    """Where positions cost more than the zeros they save, the zeros travel and count as values."""
    values = np.ones((1, 1000), dtype=np.float32)
    values[0, :10] = 0
    message = Message(values, form="sparse", kept=1000)
    assert sizes({"y": message}).tables["y"].tolist() == [[4000, 4000, 1000]]
    assert len(one(message)) - 49 == 4000


def test_a_packet_carries_several_channels() -> None:
    """Messages of different forms, dims and dtypes travel together; header fields and order are kept."""
    messages = {
        "x": dense(rows_of(3, 5, np.float64)),
        "y.d": compressed(TopK(), rows_of(3, 640, np.float32)),
        "ȳ": compressed(Qsgd(levels=5), rows_of(3, 11, np.float32)),
        "z.s": compressed(Sign(), rows_of(3, 13, np.float64)),
    }
    counted = sizes(messages)
    for row in range(3):
        data = encode(HEADER, messages, row)
        packet = decode(memoryview(bytearray(data)))
        assert (packet.sender, packet.epoch, packet.round, packet.step) == (3, 1, 70000, 15)
        assert list(packet.channels) == list(messages)
        assert all(packet.channels[c].tobytes() == m.values[row].tobytes() for c, m in messages.items())
        assert len(data) == counted.total[row]
    assert decode(encode(HEADER, {}, 0)).channels == {}
    assert len(encode(HEADER, {}, 0)) == sizes({}).total == sizes({}).header


def test_dense_rows_keep_every_bit() -> None:
    """−0.0, denormals, NaN payloads and infinities of a dense row arrive as they left; decoded rows are writable."""
    bits = np.array([[0x80000000, 1, 0x7FC12345, 0xFF800000, 0x7F7FFFFF]], dtype=np.uint32)
    values = decode(one(dense(bits.view(np.float32)))).channels["y"]
    np.testing.assert_array_equal(values.view(np.uint32), bits[0])
    values[0] = 1.0


def test_torch_rows_travel_as_numpy_rows_do() -> None:
    """A tensor's packet and its size are those of the same NumPy rows."""
    torch = pytest.importorskip("torch")
    rows = rows_of(2, 640, np.float32)
    for q in (Identity(), TopK()):
        ours, theirs = compressed(q, rows), compressed(q, torch.from_numpy(rows))
        assert one(theirs, 1) == one(ours, 1)
        np.testing.assert_array_equal(sizes({"y": theirs}).total, sizes({"y": ours}).total)
    message = compressed(Qsgd(), torch.from_numpy(rows))
    assert decode(one(message, 1)).channels["y"].tobytes() == message.values[1].numpy().tobytes()


SMALL = {
    "index": compressed(TopK(ratio=0.02), rows_of(2, 100, np.float32)),
    "bitmap": compressed(TopK(ratio=0.3), rows_of(2, 30, np.float64)),
    "levels": compressed(Qsgd(levels=5), rows_of(2, 7, np.float32)),
    "sign": compressed(Sign(), rows_of(2, 9, np.float32)),
    "dense": dense(rows_of(2, 3, np.float32)),
}


def test_every_flipped_bit_is_found() -> None:
    """No packet with one bit flipped, wherever, is believed."""
    data = encode(HEADER, SMALL, 1)
    for at in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises((Truncated, Foreign, VersionMismatch, Corrupt)):
            decode(flipped)


def test_every_truncation_is_found() -> None:
    """No proper prefix of a packet is believed, and nothing may follow it."""
    data = encode(HEADER, SMALL, 1)
    for length in range(len(data)):
        with pytest.raises(Truncated):
            decode(data[:length])
    with pytest.raises(Corrupt, match="too many"):
        decode(data + b"\0")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damage_under_a_right_checksum_never_escapes(data: st.DataObject) -> None:
    """Whatever the bytes, decoding gives a packet or a WireError, never another exception."""
    packet = bytearray(encode(HEADER, SMALL, 1))
    for _ in range(data.draw(st.integers(1, 4))):
        packet[data.draw(st.integers(36, len(packet) - 1))] = data.draw(st.integers(0, 15) | st.integers(0, 255))
    cut = data.draw(st.integers(36, len(packet)))
    with suppress(WireError):
        decode(sealed(bytes(packet[:cut])))


@settings(max_examples=200)
@given(st.binary(max_size=80))
def test_noise_is_refused(noise: bytes) -> None:
    """Bytes that are no packet raise a WireError."""
    with pytest.raises(WireError):
        decode(noise)


INDEX = one(SMALL["index"], 1)          # 2 positions of one byte from 49 on, then 2 float32
BITMAP = one(SMALL["bitmap"], 1)        # 30 entries: 4 bytes of bitmap, then 9 float64
LEVELS = one(SMALL["levels"], 1)        # 7 levels of 4 bits: unit, then 4 bytes, the last one half full


@pytest.mark.parametrize(
    ("data", "kind", "said"),
    [
        (b"", Truncated, "0 bytes"),
        (b"PK\3\4" + INDEX[4:], Foreign, "starts with"),
        (INDEX[:4] + b"\2" + INDEX[5:], VersionMismatch, "version 2"),
        (INDEX[:32] + b"\0\0\0\0" + INDEX[36:], Corrupt, "checksum"),
        (with_byte(INDEX, 6, 2), Corrupt, "1 messages of 2"),
        (with_byte(INDEX, 6, 0), Corrupt, "after the last message"),
        (with_byte(INDEX, 36, 0), Corrupt, "name of 0 bytes"),
        (with_byte(INDEX, 36, 255), Corrupt, "name of 255 bytes"),
        (with_byte(INDEX, 48, 0xFF), Corrupt, "not UTF-8"),
        (with_byte(INDEX, 37, 9), Corrupt, "unknown dtype 9"),
        (with_byte(INDEX, 38, 7), Corrupt, "unknown form 7"),
        (with_byte(INDEX, 39, 4), Corrupt, "4 bits"),
        (with_byte(INDEX, 40, 1), Corrupt, "2 values for 1 entries"),
        (with_byte(INDEX, 44, 9), Corrupt, "are left"),
        (with_byte(INDEX, 50, 100), Corrupt, "below 100"),
        (with_byte(INDEX, 50, INDEX[49]), Corrupt, "ascend"),
        (sealed(INDEX[:51] + bytes(4) + INDEX[55:]), Corrupt, "a zero among the values"),
        (sealed(INDEX + b"\0"), Corrupt, "after the last message"),
        (sealed(INDEX[:-1]), Corrupt, "are left"),
        (sealed(INDEX[:6] + b"\2" + INDEX[7:] + INDEX[36:]), Corrupt, "comes twice"),
        (with_byte(BITMAP, 49, BITMAP[49] ^ 2), Corrupt, "bitmap"),
        (with_byte(BITMAP, 52, BITMAP[52] | 128), Corrupt, "bitmap"),
        (sealed(BITMAP[:49] + b"\xff\0\0\x80" + BITMAP[53:]), Corrupt, "does not mark 9 values"),
        (with_byte(LEVELS, 39, 0), Corrupt, "0 bits"),
        (with_byte(LEVELS, 39, 17), Corrupt, "17 bits"),
        (with_byte(LEVELS, 44, 6), Corrupt, "6 values for 7 entries"),
        (with_byte(LEVELS, len(LEVELS) - 1, LEVELS[-1] | 128), Corrupt, "filled up"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_contradiction_is_named(data: bytes, kind: type[WireError], said: str) -> None:
    """Each thing that can be wrong has its own type and words, also under a right checksum."""
    with pytest.raises(kind, match=said):
        decode(data)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ({"y": dense(np.zeros((1, 3), dtype=np.int64))}, "dtype int64 cannot travel"),
        ({"": dense(np.zeros((1, 3)))}, "1 to 255 bytes"),
        ({"y" * 256: dense(np.zeros((1, 3)))}, "1 to 255 bytes"),
        ({"y": dense(np.zeros((1, 3, 2)))}, "flat"),
        ({"y": Message(np.zeros((1, 3)), form="levels", bits=4)}, "need integers, a unit"),
        ({"y": Message(np.zeros((1, 2)), "levels", 2, np.array([[8, 0]]), np.ones(1), 4)}, "do not fit into 4 bits"),
        ({"y": Message(np.zeros((1, 2)), "levels", 2, np.array([[1, 0]]), np.ones(1), 1)}, "−1 or \\+1"),
        ({"y": Message(np.zeros((1, 2)), "levels", 2, np.array([[1, 0]]), np.ones(1), 17)}, "1 to 16 bits"),
        ({"y": Message(np.zeros((1, 2)), "shouted")}, "unknown form 'shouted'"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_travel_is_refused(messages: dict[str, Message], said: str) -> None:
    """A message that the format cannot hold is refused by its channel."""
    with pytest.raises(WireError, match=said) as error:
        encode(HEADER, messages, 0)
    assert str(error.value).startswith("channel ")


def test_header_fields_must_fit() -> None:
    """A sender or round outside 32 bits is refused, not wrapped around."""
    for header in (Header(sender=-1, epoch=0, round=0, step=0), Header(sender=0, epoch=0, round=2**32, step=0)):
        with pytest.raises(WireError, match="does not fit"):
            encode(header, {}, 0)
