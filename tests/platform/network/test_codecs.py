"""Codecs: a row is decoded to exactly what was encoded, in the shortest form, and measured without encoding."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.platform.network.rows import BODY, compress, encode_one, random_rows, seal

from dbo.algorithms.api import Compressor, Identity, Message, Packed, PackedRow, Qsgd, RandK, Sign, TopK, dense
from dbo.platform.network.codecs import ENCODED, VALUE_BYTES, VALUES, CorruptError, measure_sparse
from dbo.platform.network.packet import decode, measure

COMPRESSORS: list[Compressor] = [
    Identity(), *(TopK(ratio=r) for r in (0.001, 0.03, 0.2, 0.9, 1.0)), RandK(ratio=0.3),
    *(Qsgd(levels=2**bits - 1) for bits in range(1, 16)), Sign(),
]


@pytest.mark.parametrize("q", COMPRESSORS, ids=repr)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("dim", [1, 2, 9, 256, 257, 1000])
def test_decoding_reverses_encoding(q: Compressor, dtype: Any, dim: int) -> None:
    """decode(encode(m)) is m.values to the last bit, and `measure` is its length, for every compressor and row."""
    message = compress(q, random_rows(4, dim, dtype))
    sizes = measure({"y": message})
    for row in range(4):
        data = encode_one(message, row)
        values = decode(data).channels["y"]
        assert values.dtype == dtype
        assert values.tobytes() == message.values[row].tobytes()
        assert len(data) == sizes.total[row] == sizes.header + sizes.bodies["y"][row]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70_000), st.floats(0, 1), st.sampled_from([np.float32, np.float64]), st.integers(0, 9))
def test_sparse_rows_take_the_shortest_form(dim: int, share: float, dtype: Any, seed: int) -> None:
    """A sparse body is the least of dense, index + value and bitmap + value; no zero travels beside positions."""
    generator = np.random.default_rng(seed)
    values = np.where(generator.random((1, dim)) < share, generator.standard_normal((1, dim)), 0).astype(dtype)
    message = Message(values, form="sparse", kept=1)
    data = encode_one(message)
    n, item = np.count_nonzero(values), values.itemsize
    index = next(width for width in (1, 2, 4) if dim <= 256**width)
    assert len(data) - BODY == min(dim * item, n * (item + index), n * item + (dim + 7) // 8)
    table = measure({"y": message}).tables["y"]
    assert table[0, ENCODED] == len(data) - BODY
    assert table[0, VALUE_BYTES] == table[0, VALUES] * item
    assert table[0, VALUES] in (n, dim)
    assert decode(data).channels["y"].tobytes() == values[0].tobytes()


def test_the_forms_at_the_papers_size() -> None:
    """20 % of 2 032 620 float32 travel with a bitmap: 406 524 · 4 + 254 078 bytes; 1 % with 4-byte positions."""
    (length, value_bytes, values), = measure_sparse((406_524,), 2_032_620, 4).tolist()
    assert (length, value_bytes, values) == (1_626_096 + 254_078, 1_626_096, 406_524)
    assert measure_sparse((20_326,), 2_032_620, 4)[0, ENCODED] == 20_326 * 8


def test_positions_take_the_smallest_width() -> None:
    """One byte up to 256 entries, two up to 65 536, four beyond: the last position still fits."""
    for dim, width in ((256, 1), (257, 2), (65_536, 2), (65_537, 4)):
        values = np.zeros((1, dim), dtype=np.float32)
        values[0, -1] = 2.5
        data = encode_one(Message(values, form="sparse", kept=1))
        assert len(data) - BODY == 4 + width
        assert measure_sparse((1,), dim, 4).tolist() == [[4 + width, 4, 1]]
        assert decode(data).channels["y"].tobytes() == values.tobytes()


def test_a_nearly_full_sparse_row_travels_dense() -> None:
    """Where positions cost more than the zeros they save, the zeros travel and count as values."""
    values = np.ones((1, 1000), dtype=np.float32)
    values[0, :10] = 0
    message = Message(values, form="sparse", kept=1000)
    assert measure({"y": message}).tables["y"].tolist() == [[4000, 4000, 1000]]
    assert len(encode_one(message)) - BODY == 4000


def test_zeros_of_a_sparse_row_are_positive_in_every_form() -> None:
    """A receiver gets +0.0 for −0.0, whether the zeros travel or not."""
    for nonzeros in (1, 30, 60):
        values = np.full((1, 64), -0.0, dtype=np.float32)
        values[0, :nonzeros] = 1.5
        row = decode(encode_one(Message(values, form="sparse", kept=1))).channels["y"]
        assert row.tobytes() == np.where(values[0] != 0, values[0], 0.0).astype(np.float32).tobytes()


def test_dense_rows_keep_every_bit() -> None:
    """−0.0, denormals, NaN payloads and infinities of a dense row arrive unchanged; decoded rows are writable."""
    bits = np.array([[0x80000000, 1, 0x7FC12345, 0xFF800000, 0x7F7FFFFF]], dtype=np.uint32)
    values = decode(encode_one(dense(bits.view(np.float32)))).channels["y"]
    np.testing.assert_array_equal(values.view(np.uint32), bits[0])
    values[0] = 1.0


# Quiet and signalling NaN of both signs, with payloads.
NAN_BITS = {
    np.float32: np.array([0x7FC12345, 0x7F800001, 0xFF812345], dtype=np.uint32),
    np.float64: np.array([0x7FF8000000000001, 0x7FF0000000000001, 0xFFF0123456789ABC], dtype=np.uint64),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("packed", [(), ("y",)], ids=["row", "packed"])
@pytest.mark.parametrize("nonzeros", [3, 40, 400], ids=["index", "bitmap", "full"])
@pytest.mark.parametrize("form", ["dense", "sparse", "packed"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_signalling_nan_is_decoded_without_a_warning(dtype: Any, form: str, nonzeros: int, packed: tuple[str]) -> None:
    """A diverged sender's NaN arrives with every bit, and raises no floating-point warning on the way."""
    bits = np.zeros(400, dtype=NAN_BITS[dtype].dtype)
    bits[:nonzeros] = np.resize(NAN_BITS[dtype], nonzeros)
    values = bits.view(dtype)[None, :]
    message = Packed((PackedRow.of(values[0]),), 400, nonzeros) if form == "packed" \
        else Message(values, form=form, kept=nonzeros)  # type: ignore[arg-type]
    row = decode(encode_one(message), packed).channels["y"]
    assert isinstance(row, PackedRow) == bool(packed)
    assert len(encode_one(message)) == measure({"y": message}).total[0]
    full = row.dense(400) if isinstance(row, PackedRow) else row
    np.testing.assert_array_equal(full.view(bits.dtype), bits)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bits", [1, 4])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_unit_that_is_no_number_is_decoded_without_a_warning(dtype: Any, bits: int) -> None:
    """Levels times a signalling NaN, an infinity or the largest number: not finite, and no warning."""
    infinite = np.array([np.inf, np.finfo(dtype).max], dtype=dtype)
    for unit in (*NAN_BITS[dtype].view(dtype), *infinite):
        levels = np.where(np.arange(9) % 2, 1, -1)[None, :]
        levels[0, 0] = -1 if bits == 1 else -8
        message = Message(np.zeros((1, 9), dtype), "levels", 9, levels, np.array([unit], dtype), bits)
        row = decode(encode_one(message)).channels["y"]
        assert bits == 1 or not np.all(np.isfinite(row))


@pytest.mark.filterwarnings("error")
def test_a_zero_among_sparse_values_is_still_refused() -> None:
    """Control: the check that must not raise a warning for NaN finds a zero beside it."""
    values = np.zeros((1, 400), dtype=np.float32)
    values[0, :3] = NAN_BITS[np.float32].view(np.float32)
    data = encode_one(Message(values, form="sparse", kept=3))
    with pytest.raises(CorruptError, match="a zero among the values"):
        decode(seal(data[:-4] + bytes(4)))


def test_torch_rows_are_encoded_as_numpy_rows_are() -> None:
    """A tensor's packet and its size are those of the same NumPy rows."""
    torch = pytest.importorskip("torch")
    rows = random_rows(2, 640, np.float32)
    for q in (Identity(), TopK()):
        ours, theirs = compress(q, rows), compress(q, torch.from_numpy(rows))
        assert encode_one(theirs, 1) == encode_one(ours, 1)
        np.testing.assert_array_equal(measure({"y": theirs}).total, measure({"y": ours}).total)
    message = compress(Qsgd(), torch.from_numpy(rows))
    assert decode(encode_one(message, 1)).channels["y"].tobytes() == message.values[1].numpy().tobytes()
