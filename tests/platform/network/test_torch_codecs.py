"""Rows of a torch device travel in the bytes of NumPy rows, and nothing but these bytes crosses to the host."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.platform.network.rows import HEADER, cluster_rows, compress, decode_one, encode_one, random_rows, seal

from dbo.algorithms.api import Grid, Identity, Lazy, Message, Qsgd, RandK, RowTopK, Sign, TopK, TopShare, dense
from dbo.platform.network.codecs import encode_on_device, measure_messages
from dbo.platform.network.packet import decode, encode, expect_rows, measure
from dbo.platform.network.row_format import BITMAP, DENSE, INDEX, LEVELS, RICE, CorruptError, WireError

torch = pytest.importorskip("torch")
torch_codecs = pytest.importorskip("dbo.platform.network.torch_codecs")

# With 640 entries: positions, a bitmap and a dense row are the shortest form of these.
COMPRESSORS = {
    "identity": Identity(), "index": TopK(ratio=0.002), "bitmap": TopK(ratio=0.3), "full": TopK(ratio=1.0),
    "rice": TopK(ratio=0.1), "rand_k": RandK(), "lazy": Lazy(threshold=0.9),
    "share": TopShare(share=0.5, bits=6), **{f"log-{n}": TopK(ratio=0.1, bits=n) for n in (2, 4, 11, 16)},
    **{f"uniform-{n}": TopK(ratio=0.3, bits=n, levels="uniform") for n in (2, 8, 13)}, "all-4": TopK(ratio=1.0, bits=4),
    "sign": Sign(), **{f"qsgd-{n}": Qsgd(levels=n) for n in (1, 3, 7, 100, 127, 4000, 2**15 - 1)},
}
every_compressor = pytest.mark.parametrize("name", COMPRESSORS)


def on_torch(message: Message) -> Message:
    """Return the same message, to the last bit, as tensors."""
    def convert(array: Any) -> Any:
        return None if array is None else torch.asarray(array.copy())

    return Message(
        convert(message.values), message.form, message.kept, convert(message.levels), convert(message.unit),
        message.bits, None if message.grid is None else Grid(
            message.grid.bits, message.grid.log, convert(message.grid.scale), convert(message.grid.span)
        ), message.width,
    )


@every_compressor
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("dim", [1, 7, 257, 640, 70_001])
def test_bytes_are_those_of_numpy(name: str, dtype: Any, dim: int) -> None:
    """Packets and measured lengths of every compressor; one row is zero."""
    message = compress(COMPRESSORS[name], random_rows(3, dim, dtype))
    theirs = on_torch(message)
    np.testing.assert_array_equal(measure({"y": theirs}).total, measure({"y": message}).total)
    for row in range(3):
        assert encode_one(theirs, row) == encode_one(message, row)


@pytest.mark.parametrize("make", [cluster_rows, random_rows])
@pytest.mark.parametrize("ratio", [0.9, 0.2, 0.01, 0.001])
def test_codes_of_large_quantized_rows_are_those_of_numpy(make: Any, ratio: float) -> None:
    """Every code of positions: lengths, bytes and decoded rows."""
    message = compress(TopK(ratio=ratio, bits=4), make(3, 70_001, np.float32))
    theirs = on_torch(message)
    sizes = measure({"y": theirs})
    np.testing.assert_array_equal(sizes.total, measure({"y": message}).total)
    encoded = encode_on_device({"y": theirs}, range(3), sizes.tables)
    for row in range(3):
        data = encode_one(message, row)
        assert encode(HEADER, encoded, row) == data
        expanded = torch_codecs.decode_rows({"y": [decode_one(data, message, expand=False)]}, "cpu")["y"]
        assert expanded.numpy().tobytes() == message.values[row].tobytes()


@every_compressor
def test_compressed_on_the_device_gives_the_same_bytes(name: str) -> None:
    """Compression on tensors and compression on arrays, without ties; a unit may differ in its last bit."""
    rows = np.random.default_rng(5).standard_normal((2, 640))
    ours, theirs = (compress(COMPRESSORS[name], array) for array in (rows, torch.asarray(rows.copy())))
    if ours.form != "levels":
        assert encode_one(ours, 1) == encode_one(theirs, 1)
        return
    np.testing.assert_array_equal(theirs.levels.numpy(), ours.levels)
    np.testing.assert_allclose(theirs.unit.numpy(), ours.unit, rtol=1e-15)
    assert encode_one(ours, 1)[36 + 13 + 8 :] == encode_one(theirs, 1)[36 + 13 + 8 :]      # behind the unit


SPECIAL = [0.0, -0.0, 1.0, -3.0, np.nan, np.inf, -np.inf, 5e-324]


@settings(deadline=None)
@given(st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=70), st.sampled_from(["sparse", "dense"]))
def test_special_values_travel_alike(values: list[float], form: Any) -> None:
    """NaN, inf, −0.0 and the smallest numbers: same bytes, and the same row after decoding."""
    message = Message(np.array([values]), form=form, kept=1)
    data = encode_one(on_torch(message))
    assert data == encode_one(message)
    row = torch_codecs.decode_rows({"y": [decode_one(data, message, expand=False)]}, "cpu")["y"]
    assert row.numpy().tobytes() == decode_one(data, message).tobytes()


@every_compressor
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_expanded_rows_are_those_of_numpy(name: str, dtype: Any) -> None:
    """Bodies of several rows and channels, uploaded together, expand to the rows that NumPy decodes."""
    messages = {"a": compress(COMPRESSORS[name], random_rows(3, 641, dtype)), "b": dense(random_rows(3, 5, dtype))}
    packets = [encode(HEADER, messages, row) for row in range(3)]
    expect = expect_rows(messages)
    received = [decode(packet, expected=expect, expand=False).channels for packet in packets]
    rows = torch_codecs.decode_rows({name: [each[name] for each in received] for name in messages}, "cpu")
    for channel in messages:
        expected = np.stack([decode(packet, expected=expect).channels[channel] for packet in packets])
        assert rows[channel].numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("ratio", [0.03, 0.3, 1.0])
def test_groups_travel_alike(ratio: float) -> None:
    """Rows whose groups of 20 entries travel as a whole: same bytes, and the same rows after decoding."""
    message = compress(RowTopK(ratio=ratio, width=20), random_rows(3, 640, np.float32))
    theirs = on_torch(message)
    for row in range(3):
        data = encode_one(message, row)
        assert encode_one(theirs, row) == data
        assert len(data) == measure({"y": theirs}).total[row]
        expanded = torch_codecs.decode_rows({"y": [decode_one(data, message, expand=False)]}, "cpu")["y"]
        assert expanded.numpy().tobytes() == message.values[row].tobytes()


def test_all_forms_are_covered() -> None:
    """Control: the compressors above produce every form of a row."""
    found = {
        decode(encode_one(compress(q, random_rows(3, 640, np.float32)), 1), expand=False).channels["y"].format.form
        for name, q in COMPRESSORS.items() if name != "lazy"
    }
    assert found == {DENSE, INDEX, BITMAP, LEVELS, RICE}


def count_fetches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list to which every fetch appends its bytes."""
    fetched: list[int] = []
    original = torch_codecs.fetch
    monkeypatch.setattr(
        torch_codecs, "fetch", lambda tensor: (fetched.append(tensor.nbytes), original(tensor))[1])
    return fetched


@pytest.mark.parametrize(("q", "bodies"), [
    (TopK(ratio=0.01), 50_135), (TopK(ratio=0.01, bits=4), 15_138), (Qsgd(), 1_000_000 + 4), (Sign(), 125_000 + 4),
    (RandK(ratio=0.2), 892_349),
], ids=["top_k", "top_k 4 bits", "qsgd", "sign", "rand_k"])
def test_as_many_bytes_cross_as_are_encoded(monkeypatch: pytest.MonkeyPatch, q: Any, bodies: int) -> None:
    """10⁶ float32: the body, 24 bytes for the number of values and lengths of codes, 2 of status and form. Not 4 MB."""
    rows = torch.asarray(np.random.default_rng(0).standard_normal((1, 1_000_000)).astype(np.float32))
    message = compress(q, rows)
    fetched = count_fetches(monkeypatch)
    sizes = measure({"y": message})
    data = encode(HEADER, encode_on_device({"y": message}, [0], sizes.tables), 0)
    assert len(data) == sizes.total[0] == bodies + 49
    assert bodies <= sum(fetched) <= bodies + 26
    received = decode(data, expected=expect_rows({"y": message}), expand=False).channels["y"]
    assert len(received.body) == bodies            # what is uploaded, up to the alignment of its two parts
    assert torch.equal(torch_codecs.decode_rows({"y": [received]}, "cpu")["y"], message.values)


def test_two_fetches_serve_all_rows_and_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the numbers of values, one for the bodies; a step of dense rows needs one fetch in all."""
    rows = torch.asarray(random_rows(4, 640, np.float32))
    sparse = {"a": compress(TopK(), rows), "b": compress(TopK(ratio=0.01), rows), "c": dense(rows)}
    fetched = count_fetches(monkeypatch)
    encode_on_device(sparse, [0, 1, 3], measure_messages(sparse))
    assert len(fetched) == 2
    fetched.clear()
    encode_on_device({"c": dense(rows)}, range(4), measure_messages({"c": dense(rows)}))
    assert fetched == [4 * 640 * 4]


@pytest.mark.parametrize(("levels", "bits"), [
    ([0, 1], 1), ([4, 0], 3), ([0, -5], 3), ([128, 0], 8), ([-2**15 - 1], 16),
])
def test_levels_that_do_not_fit_are_refused(levels: list[int], bits: int) -> None:
    """The row with the wrong level is refused, and no other."""
    dim = len(levels)
    good = [1] * dim
    message = on_torch(Message(
        np.ones((2, dim)), form="levels", kept=dim, levels=np.array([good, levels]), unit=np.ones(2), bits=bits
    ))
    encode_one(message, 0)
    with pytest.raises(WireError, match=rf"channel 'y': levels do not fit into {bits} bits"):
        encode_one(message, 1)


@pytest.mark.parametrize(("message", "reason"), [
    (dense(np.ones((1, 3), dtype=np.float16)), "dtype torch.float16 is not allowed; must be float32 or float64"),
    (Message(np.ones((1, 3)), form="levels", bits=4), "levels need integers, a unit and 1 to 16 bits"),
])
def test_messages_without_a_format_are_refused(message: Message, reason: str) -> None:
    """The error names the channel and what is allowed."""
    with pytest.raises(WireError, match=f"channel 'y': {reason}"):
        encode(HEADER, encode_on_device({"y": on_torch(message)}, [0], {"y": np.zeros((1, 3), dtype=int)}), 0)


PACKETS = {
    name: encode_one(compress(q, random_rows(2, 61, np.float32)), 1) for name, q in COMPRESSORS.items()
}


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(PACKETS)), st.data())
def test_damaged_bodies_are_refused_alike(name: str, data: st.DataObject) -> None:
    """With a right checksum: a body that `decode` refuses is refused before it is uploaded, with the same words."""
    packet = bytearray(PACKETS[name])
    for _ in range(data.draw(st.integers(1, 3))):
        packet[data.draw(st.integers(49, len(packet) - 1))] = data.draw(st.sampled_from([0, 1, 128, 255]))
    reasons = []
    for expand in (True, False):
        try:
            decode(seal(bytes(packet)), expand=expand)
            reasons.append("")
        except CorruptError as error:
            reasons.append(str(error))
    assert reasons[0] == reasons[1]


@pytest.mark.parametrize(("name", "at", "value"), [("index", 49, 255), ("bitmap", 49, 0), ("qsgd-3", -1, 255)])
def test_some_damage_is_refused(name: str, at: int, value: int) -> None:
    """Control: descending positions, a lost mark, and padding that is not zero."""
    packet = bytearray(PACKETS[name])
    packet[at] = value
    with pytest.raises(CorruptError):
        decode(seal(bytes(packet)), expand=False)
