"""Codecs: a row is decoded to exactly what was encoded, in the shortest form, and measured without encoding."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.platform.network.rows import BODY, cluster_rows, compress, decode_one, encode_one, random_rows, seal

from dbo.algorithms.api import (
    Compressor,
    Grid,
    Identity,
    Lazy,
    Message,
    Packed,
    PackedRow,
    Qsgd,
    RandK,
    RowTopK,
    Sign,
    TopK,
    TopShare,
    dense,
)
from dbo.algorithms.kernels.lazy import wrap
from dbo.platform.network import codecs
from dbo.platform.network.codecs import (
    ENCODED,
    VALUE_BYTES,
    VALUES,
    Counted,
    measure_messages,
    measure_rows,
    measure_sparse,
)
from dbo.platform.network.packet import decode, measure
from dbo.platform.network.positions import encode_positions
from dbo.platform.network.row_format import GOLOMB, NUMBER, RICE, CorruptError, WireError

COMPRESSORS: list[Compressor] = [
    Identity(), *(TopK(ratio=r) for r in (0.001, 0.03, 0.2, 0.9, 1.0)), RandK(ratio=0.3), RowTopK(ratio=0.4),
    *(TopK(ratio=0.3, bits=bits) for bits in range(2, 17)), RandK(ratio=0.1, bits=5), TopK(ratio=1.0, bits=3),
    *(TopK(ratio=0.1, bits=bits, levels="uniform") for bits in (2, 4, 16)), TopShare(bits=4), Lazy(threshold=0.9),
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
        values = decode_one(data, message)
        assert values.dtype == dtype
        assert values.tobytes() == message.values[row].tobytes()
        assert len(data) == sizes.total[row] == sizes.header[row] + sizes.bodies["y"][row]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70_000), st.floats(0, 1), st.sampled_from([np.float32, np.float64]), st.integers(0, 9))
def test_sparse_rows_take_the_shortest_form(dim: int, share: float, dtype: Any, seed: int) -> None:
    """A sparse body is the least of dense, and values with positions, a bitmap or a Rice code; no zero travels."""
    generator = np.random.default_rng(seed)
    values = np.where(generator.random((1, dim)) < share, generator.standard_normal((1, dim)), 0).astype(dtype)
    message = Message(values, form="sparse", kept=1)
    data = encode_one(message)
    n, item = np.count_nonzero(values), values.itemsize
    index = next(width for width in (1, 2, 4) if dim <= 256**width)
    rice = len(encode_positions(np.flatnonzero(values), dim))
    table = measure({"y": message}).tables["y"]
    if n:
        assert len(data) - BODY == min(dim * item, n * item + min(n * index, (dim + 7) // 8, rice))
        assert table[0, ENCODED] == len(data) - BODY
    assert table[0, VALUE_BYTES] == table[0, VALUES] * item
    assert table[0, VALUES] in (n, dim)
    assert decode_one(data, message).tobytes() == values[0].tobytes()


def test_nothing_costs_one_byte() -> None:
    """A sparse row without values is a single byte beside the packet's header, and only its receivers can name it."""
    message = Message(np.zeros((1, 1000)), form="sparse", kept=5)
    data = encode_one(message)
    assert len(data) == 36 + 1 == measure({"y": message}).total[0]
    assert not decode_one(data, message).any()
    with pytest.raises(CorruptError):
        decode(data)


def bound(k: int, dim: int, bits: int) -> float:
    """Return the bytes of k values of so many bits, and of the choice of k positions among dim."""
    choices = (math.lgamma(dim + 1) - math.lgamma(k + 1) - math.lgamma(dim - k + 1)) / math.log(2)
    return (choices + k * bits) / 8


@pytest.mark.parametrize(("dim", "ratio"), [(d, r) for d in (100_000, 700_001) for r in (0.2, 0.05, 0.01, 0.001)])
@pytest.mark.parametrize("clustered", [False, True], ids=["random", "clustered"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16, None])
def test_every_body_is_close_to_the_entropy_bound(dim: int, ratio: float, bits: int | None, clustered: bool) -> None:
    """At most 1.03 times log₂ C(d, k) bits for positions and b bits per value, of every row."""
    nodes = 4 if dim == 100_000 else 1
    rows = cluster_rows(nodes, dim) if clustered else np.random.default_rng(3).standard_normal((nodes, dim))
    message = compress(TopK(ratio=ratio, bits=bits), rows.astype(np.float32))
    table = measure({"y": message}).tables["y"]
    counts = np.count_nonzero(message.values, axis=1)
    bounds = [bound(int(k), dim, bits or 32) for k in counts]
    assert np.max(table[:, ENCODED] / bounds) <= 1.03


@pytest.mark.parametrize("levels", ["log", "uniform"])
@pytest.mark.parametrize("bits", [2, 3, 8, 9, 16])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_quantized_rows_travel_in_every_form(dtype: Any, bits: int, levels: Any) -> None:
    """Rows of arrays and packed rows with known levels: same bytes, of the measured length, and the same row back."""
    found, dim = set(), 70_001
    for make in (cluster_rows, random_rows):
        for ratio in (0.3, 0.03, 0.001):
            rows = make(2, dim, dtype)
            rows[0, 0] = 1.0      # no row of zeros
            plain, q = compress(TopK(ratio=ratio, bits=bits, levels=levels), rows), wrap(rows)
            packed = compress(TopK(ratio=ratio, bits=bits, levels=levels), q)
            assert isinstance(packed, Packed)
            for row in range(2):
                data = encode_one(plain, row)
                assert data == encode_one(packed, row)
                for message in (plain, packed):
                    assert measure({"y": message}).total[row] == len(data)
                for channels in ((), ("y",)):
                    got = decode_one(data, plain, channels)
                    assert (got.dense(dim) if channels else got).tobytes() == plain.values[row].tobytes()
                found.add(decode_one(data, plain, expand=False).format.kind)
    assert {RICE, NUMBER, GOLOMB} <= found


def test_a_row_that_is_not_finite_has_no_levels() -> None:
    """A diverged row of a quantized message arrives as NaN."""
    rows = cluster_rows(1, 70_001)
    rows[0, 7] = np.inf
    message = compress(TopK(ratio=0.01, bits=4), wrap(rows))
    assert measure({"y": message}).total[0] == len(encode_one(message))
    assert np.isnan(decode_one(encode_one(message), message)[message.rows[0].positions(70_001)]).all()


@pytest.mark.parametrize("log", [False, True])
def test_a_value_beside_the_levels_is_refused(log: bool) -> None:
    """Control: a quantized row can hold its levels only."""
    grid = Grid(4, log, np.ones(1), np.full(1, 8))
    with pytest.raises(WireError, match="a value is on none of the 8 levels"):
        encode_one(Message(np.array([[0.0, 0.37, 1.0]]), form="sparse", kept=2, grid=grid))


def test_groups_must_fit() -> None:
    """A row of 10 entries has no groups of 3."""
    with pytest.raises(WireError, match="a width of 3 is not allowed for rows of 10 entries; must divide them"):
        measure({"y": Message(np.ones((1, 10)), form="sparse", kept=1, width=3)})


def test_positions_of_groups_are_shorter() -> None:
    """The mask of features is 20 times shorter than that of entries: kept groups cost their values and little more."""
    rows = np.random.default_rng(0).standard_normal((1, 20 * 5000)).astype(np.float32)
    grouped, single = compress(RowTopK(ratio=0.05, width=20), rows), compress(TopK(ratio=0.05), rows)
    sizes = [measure({"y": message}).bodies["y"][0] - 4 * 5000 for message in (grouped, single)]
    assert sizes[0] <= bound(250, 5000, 0) * 1.03 + 2 < sizes[1] / 15


def test_positions_take_the_smallest_width() -> None:
    """One byte up to 256 entries, two up to 65 536, three of a Rice code beyond: the last position still fits."""
    for dim, width in ((256, 1), (257, 2), (65_536, 2), (65_537, 3)):
        values = np.zeros((1, dim), dtype=np.float32)
        values[0, -1] = 2.5
        data = encode_one(Message(values, form="sparse", kept=1))
        assert len(data) - BODY == 4 + width
        assert measure_sparse((Counted(1, 1),), dim, 4).tolist() == [[4 + width, 4, 1]]
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


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("bits", [None, 2, 9])
def test_rows_measured_together_have_the_lengths_of_single_ones(bits: int | None, width: int) -> None:
    """Channels of a packet are measured in one go: rows of any density, empty and full ones, keep their lengths."""
    rng = np.random.default_rng(width)
    for dim in (4, 64, 640, 2000):
        messages = {}
        for name, log in (("a", False), ("b", True), ("c", False)):
            kept = rng.random((7, dim)) < np.array([0.0, 0.003, 0.05, 0.3, 0.9, 1.0, 0.3])[:, None]
            values = (rng.standard_normal((7, dim)) * kept).astype(np.float32)
            grid = Grid(bits, log, np.ones(7), np.zeros(7)) if bits and width == 1 else None
            messages[name] = Message(values, form="sparse", kept=1, grid=grid, width=width)
        messages["d"] = dense(np.ones((7, dim)))
        together = measure_messages(messages)
        assert list(together) == list(messages)
        for name, message in messages.items():
            np.testing.assert_array_equal(together[name], measure_rows(message))


@pytest.mark.parametrize("width", [1, 4])
def test_the_rows_of_ten_thousand_nodes_are_measured_together(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many short rows are measured in pieces, never one by one, with the lengths of single ones."""
    rng = np.random.default_rng(width)
    values = (rng.standard_normal((10_000, 120)) * (rng.random((10_000, 120)) < 0.2)).astype(np.float32)
    message = Message(values, form="sparse", kept=24, width=width)
    one_by_one = measure_rows(message)
    monkeypatch.setattr(codecs, "measure_rows", lambda *_: pytest.fail("measured one by one"))
    np.testing.assert_array_equal(measure_messages({"y": message})["y"], one_by_one)
    monkeypatch.setattr(codecs, "short_loops", lambda rows: None)      # as without numba's loops
    np.testing.assert_array_equal(measure_messages({"y": message})["y"], one_by_one)
