"""Fused updates of wide rows compute the plain expressions, with ties, zeros and NaN."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo.algorithms.compression.compressors import TopK, count_kept, keep_largest
from dbo.algorithms.gossip import Message, Packed, PackedRow, PackedSum
from dbo.algorithms.kernels import fused, selection
from dbo.algorithms.rng import Key

DTYPES = (np.float32, np.float64)
KEY = Key(5, np.arange(3), 0)
FORMS = (selection.SCALAR, selection.VECTOR)
both_forms = pytest.mark.parametrize("form", FORMS, ids=["scalar", "vector"])


@pytest.fixture(autouse=True)
def every_row_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "MIN_ENTRIES", 1)
    monkeypatch.setattr(selection, "_SAMPLE", 64)      # brackets that miss are then common


def rows_of(seed: int, nodes: int, dim: int, dtype: Any) -> Any:
    return np.random.default_rng(seed).standard_normal((nodes, dim)).astype(dtype)


@st.composite
def residuals(draw: st.DrawFn, special: tuple[float, ...] = ()) -> tuple[Any, Any]:
    """Rows and reference points, with few or many ties and zeros."""
    dtype = draw(st.sampled_from(DTYPES))
    nodes, dim = draw(st.integers(1, 3)), draw(st.integers(1, 700))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    levels = draw(st.sampled_from([1, 2, 5, 10**6]))
    rows, reference = (np.round(rng.standard_normal((nodes, dim)) * levels).astype(dtype) for _ in range(2))
    rows[rng.random(rows.shape) < draw(st.sampled_from([0.0, 0.3, 0.95]))] = 0
    reference[rng.random(rows.shape) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = 0
    if special:
        replaced = rng.random(rows.shape) < draw(st.sampled_from([0.01, 0.4]))
        rows[replaced] = rng.choice(np.array(special, dtype), int(replaced.sum()))
    return rows, reference


def compress(form: selection.Form, ratio: float, rows: Any, reference: Any) -> tuple[Any, Any]:
    """Return a message and the reference after it, by one form of the selection, even if it is not the faster one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "fastest_form", lambda: form)
        message, updated = fused.compress_residual(TopK(ratio=ratio), rows, reference.copy(), KEY, "y")
    assert isinstance(message, Packed)
    assert message.kept == count_kept(ratio, rows.shape[1])
    return message, updated


def plain(rows: Any, reference: Any, ratio: float) -> tuple[Any, Any]:
    values = keep_largest(rows - reference, count_kept(ratio, rows.shape[1]))
    return values, reference + values


@both_forms
@settings(deadline=None)
@given(pair=residuals(), ratio=st.floats(0.01, 0.999))
def test_top_k_is_the_plain_definition(form: selection.Form, pair: Any, ratio: float) -> None:
    """The message is that of TopK to the last bit, and it has been added to the reference."""
    rows, reference = pair
    values, after = plain(rows, reference, ratio)
    message, updated = compress(form, ratio, rows, reference)
    assert message.values.tobytes() == values.tobytes()
    np.testing.assert_array_equal(updated, after)


@both_forms
@settings(deadline=None)
@given(pair=residuals(special=(np.nan, np.inf, -np.inf)), ratio=st.floats(0.01, 0.999))
def test_top_k_counts_nan_as_largest(form: selection.Form, pair: Any, ratio: float) -> None:
    """NaN is kept before inf and inf before the rest, as in the plain definition."""
    rows, reference = pair
    with np.errstate(invalid="ignore"):
        values, after = plain(rows, reference, ratio)
        message, updated = compress(form, ratio, rows, reference)
    np.testing.assert_array_equal(message.values, values)
    np.testing.assert_array_equal(updated, after)


@both_forms
@settings(deadline=None)
@given(pair=residuals(special=(1e-310, -1e-310, 1e-45, -3e-45, -0.0, np.inf)), ratio=st.sampled_from([1e-9, 0.999]))
def test_top_k_of_denormals_and_infinities(form: selection.Form, pair: Any, ratio: float) -> None:
    """The smallest positive number is larger than zero."""
    rows, reference = pair
    values, after = plain(rows, reference, ratio)
    message, updated = compress(form, ratio, rows, reference)
    assert message.values.tobytes() == values.tobytes()
    np.testing.assert_array_equal(updated, after)


@settings(deadline=None)
@given(residuals(special=(-0.0, 1e-45, 3.0, -3.0)), st.floats(0.001, 0.999))
def test_both_forms_of_the_selection_give_the_same_bits(pair: Any, ratio: float) -> None:
    """Marks, entries and the reference, the sign of its zeros included."""
    rows, reference = pair
    reference = np.copysign(reference, rows)
    (one, updated), (other, also_updated) = (compress(form, ratio, rows, reference) for form in FORMS)
    assert updated.tobytes() == also_updated.tobytes()
    for a, b in zip(one.rows, other.rows, strict=True):
        assert a.words.tobytes() == b.words.tobytes()
        assert a.entries.tobytes() == b.entries.tobytes()


@both_forms
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 7, 16, 63, 64, 65, 2047, 2048, 2049, 6200])
def test_a_selection_writes_only_its_arrays(form: selection.Form, dim: int, dtype: Any) -> None:
    """The bytes before and behind them do not change, at any length and any share."""

    def framed(values: Any) -> tuple[Any, Any]:
        whole = np.full(values.size + 128, 77, dtype=values.dtype)
        whole[64:-64] = values
        return whole, whole[64:-64]

    row = rows_of(dim, 1, dim, dtype)[0]
    number = np.dtype(dtype).type
    for low in (number(0.01), number(1)):
        expected = np.where(np.abs(row) < low, 0, row)
        above = expected[np.abs(expected) > 1.2]
        arrays = [np.zeros(dim, dtype), np.zeros(-(-dim // 64), np.uint64), *np.zeros((2, dim + 4096), dtype)]
        frames, (reference, words, entries, found) = zip(*map(framed, arrays), strict=True)
        _, framed_row = framed(row)
        count, inside, has_nan = form.gather(framed_row, reference, low, number(1.2), words, entries, found)
        assert not has_nan
        assert entries[:count].tobytes() == expected[expected != 0].tobytes()
        assert count - inside == above.size
        assert not entries[count:].any()
        count = form.settle(reference, number(1.2), 0, words, entries)
        assert entries[:count].tobytes() == above.tobytes()
        np.testing.assert_array_equal(reference, np.where(np.abs(row) > 1.2, row, 0))
        for frame in frames:
            assert (frame[:64] == 77).all()
            assert (frame[-64:] == 77).all()


AT_THE_EDGE = """
import mmap, sys, tempfile
import numpy as np
from dbo.algorithms.kernels import selection

def at_the_edge(values):     # behind its last byte is an unmapped page: accessing it kills the process
    with tempfile.TemporaryFile() as file:
        end = -(-values.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        file.truncate(end + mmap.PAGESIZE)
        whole = mmap.mmap(file.fileno(), end + mmap.PAGESIZE)
        file.truncate(end)
    array = np.frombuffer(whole, values.dtype, values.size, end - values.nbytes)
    array[:] = values
    return array

for dtype in (np.float32, np.float64):
    for dim in (5, 64, 72, 1000):
        for form in (selection.SCALAR, selection.VECTOR):
            row = at_the_edge(np.arange(1, dim + 1, dtype=dtype))
            reference, words = at_the_edge(0 * row), at_the_edge(np.zeros(-(-dim // 64), np.uint64))
            packed, found = np.zeros((2, 4096), dtype)
            half = row.dtype.type(dim // 2)
            count, _, _ = form.gather(row, reference, half, half, words, packed, found)
            entries = at_the_edge(packed[:count])
            assert form.settle(reference, half, 0, words, entries) == count - 1
            assert np.array_equal(reference, np.where(row > half, row, 0))
"""


def test_a_selection_accesses_nothing_behind_its_arrays() -> None:
    """Neither for reading nor for writing back the same bytes."""
    pytest.importorskip("resource")      # a mapped file can be truncated on Unix only
    subprocess.run([sys.executable, "-c", AT_THE_EDGE], check=True, timeout=120)


@both_forms
def test_a_selection_reports_a_full_buffer(form: selection.Form) -> None:
    """More entries than the arrays hold give −1 instead of an overflow."""
    row, one = np.ones(10_000, np.float32), np.float32(1)
    words, entries = np.zeros(157, np.uint64), np.zeros((2, 5000), np.float32)
    count, _, _ = form.gather(row, 0 * row, one, one, words, entries[0, :4500], entries[1, :4500])
    assert count == -1
    assert not entries[:, 4500:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_updates_are_their_expressions(dtype: Any) -> None:
    """Every update of the module equals its docstring, and is written to the documented argument."""
    v, a, b, t, u = (rows_of(seed, 3, 501, dtype) for seed in range(5))
    close = {"rtol": 1e-5 if dtype is np.float32 else 1e-13, "atol": 1e-6 if dtype is np.float32 else 1e-13}

    def check(step: Any, expected: Any, into: Any, *rest: Any) -> None:
        given_ = into.copy()
        found = step(given_)
        np.testing.assert_allclose(found, expected, **close)
        assert np.shares_memory(found, given_)

    check(lambda v: fused.step_in_place(v, 0.5, a, b, 0.3, t), v + 0.5 * (a - b) - 0.3 * t, v)
    check(lambda v: fused.track_in_place(v, 0.5, a, b, t, u.copy())[0], v + 0.5 * (a - b) + t - u, v)
    check(lambda u: fused.track_in_place(v.copy(), 0.5, a, b, t, u)[1], t, u)
    check(lambda v: fused.shift_in_place(v, t, u.copy())[0], v + t - u, v)
    check(lambda u: fused.shift_in_place(v.copy(), t, u)[1], t, u)
    check(lambda a: fused.gossip_in_place(v, 0.5, a, (-0.3, t)), v + 0.5 * (a - v) - 0.3 * t, a)
    check(lambda a: fused.gossip_in_place(v, 0.5, a, (1, t), (-1, u)), v + 0.5 * (a - v) + t - u, a)
    check(lambda v: fused.add_in_place(v, (0.7, t)), v + 0.7 * t, v)
    check(lambda v: fused.add_in_place(v, (1, t), (-1, u)), v + t - u, v)
    check(lambda v: fused.zero_in_place(v), 0 * v, v)
    check(lambda t: fused.average_in_place(v, 0.3, t), 0.7 * v + 0.3 * t, t)
    check(lambda t: fused.neumann_in_place(v, t, 1.5, b), v - t / 1.5 + b, t)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_sums_over_neighbours(dtype: Any, threads: int) -> None:
    """Dense and packed rows, one to seven neighbours: W @ rows, whatever the number of threads."""
    sparse = pytest.importorskip("scipy.sparse")
    weights = sparse.csr_array(np.tril(np.random.default_rng(1).random((7, 7))))
    rows, known = rows_of(2, 7, 333, dtype), rows_of(3, 7, 333, dtype)
    rows[:, ::3] = 0
    packed = [PackedRow.of(row) for row in rows]
    terms = tuple(
        tuple((float(weights.data[k]), packed[weights.indices[k]])
              for k in range(weights.indptr[i], weights.indptr[i + 1])) for i in range(7)
    )
    fused.set_threads(threads)
    try:
        found = fused.weighted_sum(weights, list(rows))
        added = fused.add_message_in_place(known.copy(), PackedSum(terms, 333))
    finally:
        fused.set_threads(1)
    expected = weights.toarray().astype(dtype) @ rows
    close = {"rtol": 1e-4 if dtype is np.float32 else 1e-12, "atol": 1e-5 if dtype is np.float32 else 1e-13}
    np.testing.assert_allclose(found, expected, **close)
    np.testing.assert_allclose(added, known + expected, **close)
    np.testing.assert_allclose(np.asarray(PackedSum(terms, 333)), expected, **close)


@pytest.mark.parametrize("levels", ["log", "uniform"])
@pytest.mark.parametrize("bits", [2, 4, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_top_k_is_the_compressors(dtype: Any, bits: int, levels: Any) -> None:
    """Wide rows are quantized as narrow ones are, and the reference adds what receivers decode."""
    q = TopK(ratio=0.05, bits=bits, levels=levels)
    v, reference = rows_of(0, 3, 5000, dtype), rows_of(1, 3, 5000, dtype)
    plain = q(v - reference, KEY, "y")
    message, updated = fused.compress_residual(q, v, reference.copy(), KEY, "y")
    assert isinstance(message, Packed)
    assert message.grid is not None
    assert plain.grid is not None
    assert message.values.tobytes() == plain.values.tobytes()
    assert message.grid.scale.tobytes() == plain.grid.scale.tobytes()
    assert message.grid.span.tolist() == plain.grid.span.tolist()
    np.testing.assert_array_equal(updated, reference + plain.values)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_finite_finds_one_bad_entry(dtype: Any, bad: float) -> None:
    """Whichever row it is in; the largest finite number is not bad."""
    rows = rows_of(0, 3, 1000, dtype)
    rows[0, 5] = np.finfo(dtype).max
    assert fused.all_finite(rows)
    rows[2, 999] = bad
    assert not fused.all_finite(rows)


def test_numba_is_imported_for_fused_rows_only() -> None:
    """Small problems start without loading the compiler."""
    code = "import sys; from dbo.algorithms.registry import algorithms; algorithms(); assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_narrow_rows_and_tensors_use_plain_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written in place, no message is packed, and Q is the compressor's own."""
    monkeypatch.setattr(fused, "MIN_ENTRIES", 1 << 16)
    v, reference = rows_of(0, 3, 64, np.float32), rows_of(1, 3, 64, np.float32)
    before = v.tobytes(), reference.tobytes()
    message, updated = fused.compress_residual(TopK(), v, reference, KEY, "y")
    assert isinstance(message, Message)
    assert updated is not reference
    assert fused.step_in_place(v, 0.5, reference, v, 1, v) is not v
    for s, kept_ in (fused.track_in_place(v, 0.5, reference, v, reference, v), fused.shift_in_place(v, reference, v)):
        assert s is not v
        assert kept_ is reference
    assert (v.tobytes(), reference.tobytes()) == before
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(fused, "MIN_ENTRIES", 1)
    theirs, _ = fused.compress_residual(TopK(), torch.from_numpy(v), torch.from_numpy(reference), KEY, "y")
    np.testing.assert_array_equal(np.asarray(theirs.values), message.values)
