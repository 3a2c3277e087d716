"""Packets: several channels in one, every damaged byte detected, every error with its own exception."""

import re
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.platform.network.rows import HEADER, cluster_rows, compress, encode_one, random_rows, seal, set_byte

from dbo.algorithms.api import Message, Qsgd, RowTopK, Sign, TopK, dense
from dbo.platform.network.enumeration import enumerated_length
from dbo.platform.network.packet import (
    Header,
    NotAPacketError,
    TruncatedError,
    VersionError,
    decode,
    encode,
    expect_rows,
    measure,
)
from dbo.platform.network.row_format import GOLOMB, NUMBER, CorruptError, WireError
from dbo.platform.network.row_format import RICE as RICE_FORM
from dbo.platform.network.torch_codecs import decode_rows


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
        packet = decode(memoryview(bytearray(data)), expected=expect_rows(messages))
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
RICE = encode_one(compress(TopK(ratio=0.03), random_rows(2, 300, np.float32)), 1)     # 9 gaps: 2 + 5 bytes from 49 on
CODED = encode_one(compress(TopK(ratio=0.03, bits=4), random_rows(2, 300, np.float32)), 1)    # scale, span, gaps, codes
GROUPS = encode_one(compress(RowTopK(ratio=0.1, width=10), random_rows(2, 300, np.float32)), 1)
LEVELS = encode_one(SMALL["levels"], 1)        # 7 levels of 4 bits: unit, then 4 bytes, the last one half full


@pytest.mark.parametrize(
    ("data", "kind", "reason"),
    [
        (b"", TruncatedError, "0 bytes"),
        (b"PK\3\4" + INDEX[4:], NotAPacketError, "starts with"),
        (INDEX[:4] + b"\1" + INDEX[5:], VersionError, "version 1"),
        (INDEX[:32] + b"\0\0\0\0" + INDEX[36:], CorruptError, "checksum"),
        (set_byte(INDEX, 6, 2), CorruptError, "expected 2 messages, got 1"),
        (set_byte(INDEX, 6, 0), CorruptError, "after the last message"),
        (set_byte(INDEX, 36, 0), CorruptError, "name of 0 bytes"),
        (set_byte(INDEX, 36, 255), CorruptError, "name of 255 bytes"),
        (set_byte(INDEX, 48, 0xFF), CorruptError, "not UTF-8"),
        (set_byte(INDEX, 37, 9), CorruptError, "unknown dtype 9"),
        (set_byte(INDEX, 38, 7), CorruptError, "unknown form 7"),
        (set_byte(INDEX, 39, 1), CorruptError, "1 bits, quantized values have 2 to 16"),
        (set_byte(INDEX, 40, 1), CorruptError, "2 values for 1 entries"),
        (set_byte(INDEX, 44, 9), CorruptError, "expected a body of 45 bytes, got 10"),
        (set_byte(INDEX, 50, 100), CorruptError, "below 100"),
        (set_byte(INDEX, 50, INDEX[49]), CorruptError, "ascend"),
        (seal(INDEX[:51] + bytes(4) + INDEX[55:]), CorruptError, "a zero among the values"),
        (seal(INDEX + b"\0"), CorruptError, "after the last message"),
        (seal(INDEX[:-1]), CorruptError, "expected a body of 10 bytes, got 9"),
        (seal(INDEX[:6] + b"\2" + INDEX[7:] + INDEX[36:]), CorruptError, "comes twice"),
        (set_byte(BITMAP, 49, BITMAP[49] ^ 2), CorruptError, "bitmap"),
        (set_byte(BITMAP, 52, BITMAP[52] | 128), CorruptError, "bitmap"),
        (seal(BITMAP[:49] + b"\xff\0\0\x80" + BITMAP[53:]), CorruptError, "does not mark 9 values"),
        (set_byte(RICE, 49, 0), CorruptError, "do not end with 9 values"),
        (set_byte(RICE, 49, 255), CorruptError, "do not end with 9 values"),
        (set_byte(RICE, 55, RICE[55] | 128), CorruptError, "not padded"),
        (seal(RICE[:49] + b"\0" + RICE[49:]), CorruptError, "a gap ends behind the 300 entries"),
        (set_byte(CODED, 50, CODED[50] | 128), CorruptError, "a negative scale"),
        (set_byte(CODED, 51, 97), CorruptError, "97 eighths of an octave"),
        (seal(CODED[:49] + b"\0\0" + CODED[51:]), CorruptError, "a zero among the values"),
        (set_byte(CODED, 39, 16), CorruptError, "expected a body of"),
        (set_byte(GROUPS, 49, 7), CorruptError, "groups of 7 of 300 entries"),
        (set_byte(GROUPS, 39, 4), CorruptError, "4 bits, groups have 0"),
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


# ---- what a receiver expects -----------------------------------------------------------------------------------------

MOST = 1 << 20      # bytes that decoding a packet of 100 bytes may allocate
TINY = {
    "x": dense(random_rows(2, 3, np.float32)),
    "y": compress(TopK(ratio=0.02), random_rows(2, 100, np.float64)),
}
PACKET = encode(HEADER, TINY, 1)      # records at bytes 36 and 61
EXPECTED = expect_rows(TINY)
RECORDS = (36, 61)


def forge_record(data: bytes, at: int, **fields: int) -> bytes:
    """Return the packet with other numbers in the record at this byte, under a right checksum."""
    names = ("name", "dtype", "form", "bits", "dim", "values")
    record = dict(zip(names, struct.unpack_from("<BBBBII", data, at), strict=True)) | fields
    return seal(data[:at] + struct.pack("<BBBBII", *record.values()) + data[at + 12 :])


def forge_empty_row(dim: int, dtype: int = 2) -> bytes:
    """Return 49 bytes: a sparse row of this dimension without a single value, in a record of full length."""
    return seal(PACKET[:6] + b"\1" + PACKET[7:36] + struct.pack("<BBBBII", 1, dtype, 4, 0, dim, 0) + b"y")


@contextmanager
def limit_memory(most: int = MOST) -> Iterator[None]:
    """Fail if the peak of the memory that is allocated inside is above this number of bytes."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < most, f"{peak} bytes allocated, expected less than {most}"


@pytest.mark.parametrize("packed", [(), ("y",)], ids=["row", "packed"])
@pytest.mark.parametrize("dtype", [1, 2])
@pytest.mark.parametrize("dim", [1 << 20, 1 << 28, (1 << 32) - 1])
def test_a_short_packet_cannot_request_much_memory(dim: int, dtype: int, packed: tuple[str, ...]) -> None:
    """49 bytes that announce 2^28 entries of float64 once allocated 2 GB; refused, with expected rows or without."""
    data = forge_empty_row(dim, dtype)
    assert len(data) == 49
    expected = expect_rows({"y": dense(np.zeros((1, 100)))})
    with limit_memory(100_000):
        with pytest.raises(CorruptError, match=rf"^channel 'y': expected 100 entries of float64, got {dim} entries"):
            decode(data, packed, expected=expected)
        with pytest.raises(CorruptError, match=f"^expected at most 100392 entries in 49 bytes, got {dim}$"):
            decode(data, packed)


def test_many_records_cannot_request_much_memory() -> None:
    """Without expected rows the limit holds for a packet, not for each of its records."""
    messages = {f"c{number}": Message(np.eye(1, 60_000), form="sparse") for number in range(100)}
    data = encode(HEADER, messages, 0)
    with limit_memory(), pytest.raises(CorruptError, match="expected at most 1"):
        decode(data)


def test_expected_rows_may_be_larger_than_the_packet() -> None:
    """Control: a receiver with rows of 2^20 entries gets one from 49 bytes, and the tests measure its memory."""
    data, expected = forge_empty_row(1 << 20), expect_rows({"y": dense(np.zeros((1, 1 << 20)))})
    assert decode(data, expected=expected).channels["y"].shape == (1 << 20,)
    with pytest.raises(AssertionError, match="bytes allocated"), limit_memory():
        decode(data, expected=expected)


@pytest.mark.parametrize("bits", [0, 16, 130])
@pytest.mark.parametrize("form", [1, 2, 4, 20], ids=["index", "bitmap", "rice", "groups"])
@pytest.mark.parametrize("dim", [0, 1, 100, 1 << 17])
def test_a_full_record_without_values_is_a_row_of_zeros(dim: int, form: int, bits: int) -> None:
    """Nobody sends one, but every way of decoding agrees about it, and none raises anything but a WireError."""
    data = forge_record(forge_empty_row(dim), 36, form=form, bits=bits)
    expected = expect_rows({"y": dense(np.zeros((1, dim)))})
    if form == 20 and bits:
        with pytest.raises(CorruptError, match="groups have 0"):
            decode(data, expected=expected)
        return
    row, packed, encoded = (
        decode(data, names, expected=expected, expand=expand).channels["y"]
        for names, expand in (((), True), (("y",), True), ((), False))
    )
    assert not row.any()
    assert np.array_equal(packed.dense(dim), row)
    assert np.array_equal(decode_rows({"y": [encoded]}, "cpu")["y"].numpy()[0], row)


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("packed", [False, True])
def test_expected_rows_change_no_bit(row: int, packed: bool) -> None:
    """Control: the right expectation accepts every form, and the rows are those decoded without one."""
    data, sparse = encode(HEADER, SMALL, row), ("index", "bitmap") if packed else ()
    got = decode(data, sparse, header=HEADER, expected=expect_rows(SMALL))
    free = decode(encode(HEADER, SMALL, 1), sparse) if row else got      # a row without values needs the expectation
    assert got.header == free.header == HEADER
    assert [*got.channels] == [*SMALL]
    for name, message in SMALL.items():
        one, other = (
            channels[name].dense(message.shape[1]) if name in sparse else channels[name]
            for channels in (got.channels, free.channels)
        )
        assert one.dtype == other.dtype == message.values.dtype
        assert one.tobytes() == other.tobytes() == message.values[row].tobytes()


def test_a_torch_message_expects_what_the_same_numpy_message_expects() -> None:
    """A block on a GPU has the expectations of a block on the CPU."""
    torch = pytest.importorskip("torch")
    for dtype in (np.float32, np.float64):
        rows = random_rows(2, 7, dtype)
        assert expect_rows({"y": dense(torch.from_numpy(rows))}) == expect_rows({"y": dense(rows)})


X, Y = np.zeros((1, 3), np.float32), np.zeros((1, 100))


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        ({"x": X, "y": np.zeros((1, 101))}, "channel 'y': expected 101 entries of float64, got 100 entries of float64"),
        ({"x": X, "y": np.float32(Y)}, "channel 'y': expected 100 entries of float32, got 100 entries of float64"),
        ({"x": np.zeros((1, 3)), "y": Y}, "channel 'x': expected 3 entries of float64, got 3 entries of float32"),
        ({"x": X}, "expected packet with channels ['x'], got 2 of them"),
        ({"x": X, "y": Y, "z": X}, "expected packet with channels ['x', 'y', 'z'], got 2 of them"),
        ({"y": Y, "x": X}, "expected packet with channels ['y', 'x'], got 'x' at position 0"),
        ({"x": X, "z": Y}, "expected packet with channels ['x', 'z'], got 'y' at position 1"),
        ({}, "expected packet with channels [], got 2 of them"),
    ],
)
def test_a_packet_with_other_rows_is_refused(own: dict[str, Any], reason: str) -> None:
    """Another dimension, dtype, name, number or order of channels: one line with what was expected and what came."""
    with pytest.raises(CorruptError) as error:
        decode(PACKET, expected=expect_rows({name: dense(rows) for name, rows in own.items()}))
    assert str(error.value) == reason


def test_every_record_is_checked_before_a_row_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong last record is refused before the first row is decoded."""
    monkeypatch.setattr("dbo.platform.network.packet.decode_row", lambda *_: pytest.fail("a row was decoded"))
    for data in (forge_record(PACKET, 61, dim=99), forge_record(PACKET, 61, values=3), seal(PACKET + b"\0")):
        with pytest.raises(CorruptError):
            decode(data, expected=EXPECTED)


@pytest.mark.parametrize("change", ["sender", "epoch", "round", "step"])
def test_the_header_is_checked_first(change: str) -> None:
    """A packet of another step is reported as such, whatever its channels."""
    header = Header(**{"sender": 3, "epoch": 1, "round": 70000, "step": 15} | {change: 9})
    with pytest.raises(WireError, match=f"^expected packet .*{change}=9.*, got Header"):
        decode(PACKET, header=header, expected={})


COUNTS = st.integers(0, 300) | st.sampled_from([2**k + d for k in (8, 16, 20, 28, 31) for d in (-1, 0, 1)]) | \
    st.integers(0, 2**32 - 1)
EXPECTATIONS = st.sampled_from([EXPECTED, None])
PACKED = st.sampled_from([(), ("y",), ("x", "y")])
EMPTY = seal(PACKET[:61] + struct.pack("<BBBBII", 1, 2, 4, 0, 100, 0) + b"y")      # y has no value: any dimension fits
PACKETS = st.sampled_from([EMPTY, PACKET] + [
    encode(HEADER, {"x": TINY["x"], "y": compress(q, random_rows(2, 100, np.float64))}, 1)
    for q in (TopK(ratio=0.1), TopK(ratio=0.1, bits=4), TopK(ratio=0.3, bits=3, levels="uniform"), RowTopK(width=4))
])
FIELDS = st.fixed_dictionaries({"dim": COUNTS}) | st.fixed_dictionaries({}, optional={
    "dim": COUNTS, "values": COUNTS, "dtype": st.integers(0, 3),
    "form": st.integers(0, 5) | st.integers(16, 21) | st.integers(31, 42),
    "bits": st.integers(0, 17) | st.integers(128, 145),
})


@given(st.binary(max_size=64), st.booleans(), EXPECTATIONS)
def test_fuzz_random_bytes(noise: bytes, has_header: bool, expected: Any) -> None:
    """Random bytes, alone or as the records of a header with a right checksum: WireError, and little memory."""
    data = seal(PACKET[:36] + noise) if has_header else noise
    with limit_memory(), pytest.raises(WireError):
        decode(data, expected=expected)


@settings(max_examples=300)
@given(st.data(), PACKETS, EXPECTATIONS, PACKED)
def test_fuzz_changed_bytes(data: st.DataObject, good: bytes, expected: Any, packed: tuple[str, ...]) -> None:
    """Bytes of header and records changed, the packet cut or continued, a right checksum: nothing but WireError."""
    packet = bytearray(good)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.sampled_from([*range(4, 24), *range(36, 49), *range(61, len(packet))]))
        packet[at] = data.draw(st.integers(0, 3) | st.integers(0, 255))
    end = data.draw(st.just(len(packet)) | st.integers(36, len(packet)))
    changed = seal(bytes(packet[:end]) + data.draw(st.just(b"") | st.binary(max_size=8)))
    with limit_memory(), suppress(WireError):
        decode(changed, packed, expected=expected)


@settings(max_examples=300)
@given(PACKETS, st.sampled_from(RECORDS), FIELDS, PACKED)
def test_fuzz_forged_dimensions(good: bytes, at: int, fields: dict[str, int], packed: tuple[str, ...]) -> None:
    """Any dimension, count, dtype, form and bits under a right checksum: no row but the expected one is accepted."""
    data = forge_record(good, at, **fields)
    with limit_memory(), suppress(WireError):
        decode(data, packed)
    with limit_memory(), suppress(WireError):
        decode(data, packed, expected=EXPECTED)
        dtype, dim = EXPECTED["xy"[RECORDS.index(at)]]
        assert (fields.get("dtype", dtype), fields.get("dim", dim)) == (dtype, dim)


@given(st.integers(0, 2**64 - 1) | st.integers(0, 200), st.integers(0, 2**16 - 1), EXPECTATIONS)
def test_fuzz_forged_lengths(length: int, count: int, expected: Any) -> None:
    """Any length of the packet and number of messages in the header, under a checksum that fits: WireError."""
    head = PACKET[:6] + struct.pack("<H", count) + PACKET[8:24] + struct.pack("<Q", length)
    data = head + struct.pack("<I", crc32(PACKET[36:], crc32(head))) + PACKET[36:]
    with limit_memory():
        if data == PACKET:
            decode(data, expected=expected)
            return
        with pytest.raises(WireError):
            decode(data, expected=expected)


# ---- wide rows, whose codes are read by compiled kernels -------------------------------------------------------------

LARGE = 70_001


def encode_large(make: Any, ratio: float, bits: int | None) -> bytes:
    return encode_one(compress(TopK(ratio=ratio, bits=bits), make(1, LARGE, np.float32, seed=5)))


def normal_rows(nodes: int, dim: int, dtype: Any, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal((nodes, dim)).astype(dtype)


LARGE_PACKETS = {
    "rice": encode_large(normal_rows, 0.01, None), "rice, 4 bits": encode_large(normal_rows, 0.01, 4),
    "golomb, 4 bits": encode_large(cluster_rows, 0.01, 4), "golomb, 9 bits": encode_large(cluster_rows, 0.05, 9),
    "number": encode_large(normal_rows, 0.002, 3),
}
LARGE_EXPECTED = expect_rows({"y": dense(np.zeros((1, LARGE), np.float32))})
NUMBER_BYTES = enumerated_length(140, LARGE)
PADDED_PACKET = LARGE_PACKETS["golomb, 9 bits"]      # 31,500 bits of values
GOLOMB_PACKET, NUMBER_PACKET = LARGE_PACKETS["golomb, 4 bits"], LARGE_PACKETS["number"]


def decode_in_every_way(data: bytes) -> tuple[list[str], list[bytes]]:
    """Return what refuses these bytes, and the rows otherwise: as an array, as marks, and expanded on a device."""
    reasons, rows = [], []
    for packed, expand in (((), True), (("y",), True), ((), False)):
        try:
            with limit_memory(1 << 22):
                row = decode(data, packed, expected=LARGE_EXPECTED, expand=expand).channels["y"]
        except CorruptError as error:
            reasons.append(str(error))
            continue
        full = decode_rows({"y": [row]}, "cpu")["y"].numpy()[0] if not expand else row.dense(LARGE) if packed else row
        rows.append(full.tobytes())
    return reasons, rows


@pytest.mark.parametrize("name", LARGE_PACKETS)
def test_large_packets_have_the_forms_of_their_names(name: str) -> None:
    """Control: the tests below change these forms, and unchanged they are decoded alike in every way."""
    row = decode(LARGE_PACKETS[name], expected=LARGE_EXPECTED, expand=False).channels["y"]
    kinds = {"rice": RICE_FORM, "golomb": GOLOMB, "number": NUMBER}
    assert row.format.kind == kinds[name.split(",")[0]]
    reasons, rows = decode_in_every_way(LARGE_PACKETS[name])
    assert not reasons
    assert len(set(rows)) == 1


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(LARGE_PACKETS)), st.data())
def test_fuzz_bytes_of_large_rows(name: str, data: st.DataObject) -> None:
    """Hostile bytes, forms, bits and counts reach the kernels: every way of decoding refuses them, or gives one row."""
    packet = bytearray(LARGE_PACKETS[name])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.sampled_from([38, 39, 44, 45]) | st.integers(49, 60) | st.integers(49, len(packet) - 1))
        packet[at] = data.draw(st.sampled_from([0, 1, 4, 5, 32, 41, 128, 255]) | st.integers(0, 255))
    end = data.draw(st.just(len(packet)) | st.integers(36, len(packet)))
    with np.errstate(all="ignore"):
        reasons, rows = decode_in_every_way(seal(bytes(packet[:end])))
    assert len(reasons) in (0, 3)
    assert len(set(rows)) <= 1


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (forge_record(GOLOMB_PACKET, 36, form=32 + 10), "unknown form 42"),
        (forge_record(GOLOMB_PACKET, 36, form=31), "unknown form 31"),
        (forge_record(GOLOMB_PACKET, 36, bits=0), "it is of quantized wide rows"),
        (forge_record(NUMBER_PACKET, 36, bits=0), "it is of quantized wide rows"),
        (forge_record(GOLOMB_PACKET, 36, form=32 + 9), "expected a body of|bytes after the last message|a gap ends"),
        (forge_record(GOLOMB_PACKET, 36, values=LARGE), "the gaps do not end with|no more are left"),
        (set_byte(PADDED_PACKET, len(PADDED_PACKET) - 1, PADDED_PACKET[-1] | 128), "not padded with zeros"),
        (forge_record(NUMBER_PACKET, 36, values=257), "257 of 70001 positions are not enumerated"),
        (seal(NUMBER_PACKET[:52] + b"\xff" * NUMBER_BYTES + NUMBER_PACKET[52 + NUMBER_BYTES :]), "have this number"),
        (seal(GOLOMB_PACKET[:52] + bytes(400) + GOLOMB_PACKET[452:]), "the gaps do not end with|a gap ends|no more"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_forged_codes_of_large_rows_are_refused(data: bytes, reason: str) -> None:
    """Another order, form, number of values or number of a set, in every way of decoding."""
    reasons, rows = decode_in_every_way(data)
    assert not rows
    assert len(reasons) == 3
    for found in reasons:
        assert re.search(reason, found)


@pytest.mark.parametrize("form", [5, 32, 41])
@pytest.mark.parametrize("values", [1, 256, 100_000, (1 << 28) - 1])
def test_a_short_packet_with_a_code_cannot_request_much_memory(form: int, values: int) -> None:
    """A record that announces 2^28 entries and their codes, with 60 bytes of body: refused, with little memory."""
    data = forge_record(seal(GOLOMB_PACKET[:109]), 36, form=form, dim=1 << 28, values=values)
    for expected in (None, expect_rows({"y": dense(np.zeros((1, LARGE), np.float32))})):
        for packed in ((), ("y",)):
            with limit_memory(100_000), pytest.raises(CorruptError):
                decode(data, packed, expected=expected)


# ---- what a sender may send ------------------------------------------------------------------------------------------


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
        ({"y": Message(np.zeros((1, 2)), "levels", 2, np.array([[1, 0, 1]]), np.ones(1), 4)}, r"got \(\(1, 3\), "),
        ({"y": Message(np.zeros((1, 2)), "levels", 2, np.array([[1, 0]]), np.ones(0), 4)}, r", \(0,\)\)$"),
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
