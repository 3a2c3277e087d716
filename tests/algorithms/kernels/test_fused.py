"""Compiled kernels for wide rows: the exact top-k in every form, with ties, zeros and NaN."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo.algorithms.compression.compressors import TopK, count_kept, keep_largest
from dbo.algorithms.gossip import Packed, PackedRow
from dbo.algorithms.kernels import compiled, fused, selection, selection_kernels
from dbo.algorithms.kernels.lazy import wrap
from dbo.algorithms.rng import Key

DTYPES = (np.float32, np.float64)
KEY = Key(5, np.arange(3), 0)
# Every form that the processor at hand can run, not the fastest one alone.
FORMS = selection.usable_forms(compiled.find_processor()[1])
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


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
    operands = wrap(rows), wrap(reference)
    before = rows.tobytes(), reference.tobytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "fastest_form", lambda: form)
        message = TopK(ratio=ratio)(operands[0] - operands[1], KEY, "y")
    assert isinstance(message, Packed)
    assert message.kept == count_kept(ratio, rows.shape[1])
    updated = np.asarray(operands[1] + message.values)
    assert (rows.tobytes(), reference.tobytes()) == before, "a selection changes none of its operands"
    return message, updated


def plain(rows: Any, reference: Any, ratio: float) -> tuple[Any, Any]:
    values = keep_largest(rows - reference, count_kept(ratio, rows.shape[1]))
    return values, reference + values


@every_form
@settings(deadline=None)
@given(pair=residuals(), ratio=st.floats(0.01, 0.999))
def test_top_k_is_the_plain_definition(form: selection.Form, pair: Any, ratio: float) -> None:
    """The message is that of TopK to the last bit, and it has been added to the reference."""
    rows, reference = pair
    values, after = plain(rows, reference, ratio)
    message, updated = compress(form, ratio, rows, reference)
    assert np.asarray(message.values).tobytes() == values.tobytes()
    np.testing.assert_array_equal(updated, after)


@every_form
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


@every_form
@settings(deadline=None)
@given(pair=residuals(special=(1e-310, -1e-310, 1e-45, -3e-45, -0.0, np.inf)), ratio=st.sampled_from([1e-9, 0.999]))
def test_top_k_of_denormals_and_infinities(form: selection.Form, pair: Any, ratio: float) -> None:
    """The smallest positive number is larger than zero."""
    rows, reference = pair
    values, after = plain(rows, reference, ratio)
    message, updated = compress(form, ratio, rows, reference)
    assert np.asarray(message.values).tobytes() == values.tobytes()
    np.testing.assert_array_equal(updated, after)


@settings(deadline=None)
@given(residuals(special=(-0.0, 1e-45, 3.0, -3.0)), st.floats(0.001, 0.999))
def test_all_forms_of_the_selection_give_the_same_bits(pair: Any, ratio: float) -> None:
    """Marks, entries and the reference, the sign of its zeros included."""
    rows, reference = pair
    reference = np.copysign(reference, rows)
    one, updated = compress(selection.SCALAR, ratio, rows, reference)
    for form in FORMS.values():
        other, also_updated = compress(form, ratio, rows, reference)
        assert updated.tobytes() == also_updated.tobytes()
        for a, b in zip(one.rows, other.rows, strict=True):
            assert a.words.tobytes() == b.words.tobytes()
            assert a.entries.tobytes() == b.entries.tobytes()


@every_form
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "dim", [1, 7, 16, 63, 64, 65, selection.CHUNK - 1, selection.CHUNK, selection.CHUNK + 1, 49_800])
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
        arrays = [
            np.zeros(dim, dtype), np.zeros(-(-dim // 64), np.uint64), *np.zeros((2, dim + 2 * selection.CHUNK), dtype),
            np.zeros(above.size, dtype),
        ]
        frames, (reference, words, entries, found, out) = zip(*map(framed, arrays), strict=True)
        _, framed_row = framed(row)
        count = form.pack(selection._no_terms(), False, framed_row, reference, low, words, entries)
        assert entries[:count].tobytes() == expected[expected != 0].tobytes()
        assert not entries[count + 64 :].any()      # what a register holds behind the packed entries
        size = np.abs(expected[expected != 0])
        larger, inside, has_nan = form.find(entries[:count], number(0.5), number(1.2), found)
        assert not has_nan
        assert larger == above.size
        assert found[:inside].tobytes() == size[(size >= number(0.5)) & (size <= number(1.2))].tobytes()
        assert form.settle(number(1.2), 0, words, entries[:count], out) == above.size
        assert out.tobytes() == above.tobytes()
        kept = PackedRow(words.copy(), out).dense(dim)
        np.testing.assert_array_equal(kept, np.where(np.abs(row) > 1.2, row, 0))
        for frame in frames:
            assert (frame[:64] == 77).all()
            assert (frame[-64:] == 77).all()


AT_THE_EDGE = """
import mmap, sys, tempfile
import numpy as np
from dbo.algorithms.kernels import compiled, selection

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
        for form in selection.usable_forms(compiled.find_processor()[1]).values():
            row = at_the_edge(np.arange(1, dim + 1, dtype=dtype))
            reference, words = at_the_edge(0 * row), at_the_edge(np.zeros(-(-dim // 64), np.uint64))
            packed = np.zeros(2 * selection.CHUNK, dtype)
            half = row.dtype.type(dim // 2)
            count = form.pack(selection._no_terms(), False, row, reference, half, words, packed)
            entries, found, out = map(at_the_edge, (packed[:count], packed[:count], packed[: count - 1]))
            assert form.find(entries, half, half, found) == (count - 1, 1, False)
            assert form.find(entries, half, row[-1], found) == (0, count, False)
            assert form.settle(half, 0, words, entries, out) == count - 1
            assert np.array_equal(out, row[row > half])
"""


def test_a_selection_accesses_nothing_behind_its_arrays() -> None:
    """Neither for reading nor for writing back the same bytes."""
    pytest.importorskip("resource")      # a mapped file can be truncated on Unix only
    subprocess.run([sys.executable, "-c", AT_THE_EDGE], check=True, timeout=120)


@every_form
def test_a_selection_reports_a_full_buffer(form: selection.Form) -> None:
    """More entries than the arrays hold give −1 instead of an overflow."""
    row, one, size = np.ones(5 * selection.CHUNK, np.float32), np.float32(1), 2 * selection.CHUNK + 500
    words, entries = np.zeros(row.size // 64, np.uint64), np.zeros(3 * selection.CHUNK, np.float32)
    assert form.pack(selection._no_terms(), False, row, 0 * row, one, words, entries[:size]) == -1
    assert entries[: 2 * selection.CHUNK].all()
    assert not entries[size:].any()


@every_form
@pytest.mark.parametrize("factor", [0.0, 1e-3, 0.5, 0.9, 1.0, 1.1, 1e9, np.inf, np.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_expected_threshold_changes_no_bit(
    form: selection.Form, dtype: Any, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right or wrong, with and without sums that are pending; these are evaluated even if the entries do not fit."""
    monkeypatch.setattr(selection, "fastest_form", lambda: form)
    random = np.random.default_rng(3)
    a, b, v = random.standard_normal((3, 50_000)).astype(dtype)
    expected, least = selection.top_k(a + b, v, 500)
    assert least == np.sort(np.abs(a + b - v))[-500]
    for is_pending in (False, True):
        out = np.zeros((1, 50_000), dtype)

        def visit(
            i: int, terms: Any, out: Any = out, is_pending: bool = is_pending
        ) -> tuple[PackedRow, float]:
            if not is_pending:
                fused.evaluate_terms(terms, 50_000, dtype)
            return selection.top_k(out[i], v, 500, factor * least, terms if is_pending else None)

        ((row, found),) = fused.evaluate([(out, [(1.0, a[None]), (1.0, b[None])])], visit)
        assert out[0].tobytes() == (a + b).tobytes()
        assert (row.words.tobytes(), row.entries.tobytes()) == (expected.words.tobytes(), expected.entries.tobytes())
        assert found == least


def test_thresholds_are_expected_from_the_last_ones() -> None:
    """A tenth below the last one, less where they fall, and never half of it or less by trend alone."""
    assert selection.expect_threshold((0.0, 0.0)) == 0
    assert selection.expect_threshold((0.0, 2.0)) == 0.9 * 2.0
    assert selection.expect_threshold((1.0, 2.0)) == 0.9 * 2.0
    assert selection.expect_threshold((4.0, 3.0)) == 0.9 * 3.0 * 0.75
    assert selection.expect_threshold((100.0, 1.0)) == 0.9 * 0.5


def test_the_next_selection_of_a_channel_expects_the_last_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row its own; other channels start without one."""
    given: list[float] = []
    original = selection.top_k

    def top_k(v: Any, reference: Any, k: int, expected: float = 0.0, terms: Any = None) -> Any:
        given.append(expected)
        return original(v, reference, k, expected, terms)

    monkeypatch.setattr(selection, "top_k", top_k)
    selection._thresholds.cache_clear()
    rows = rows_of(0, 2, 3000, np.float32)
    for channel in ("y", "y", "z"):
        selection.pack_largest(wrap(rows), 300, None, log=False, channel=channel)
    least = [float(np.sort(np.abs(row))[-300]) for row in rows]
    assert given == [0.0, 0.0, 0.9 * least[0], 0.9 * least[1], 0.0, 0.0]


@pytest.mark.parametrize(
    ("processor", "features", "expected"),
    [
        ("znver4", {"+avx512f", "+avx512vl", "+avx2", "+bmi2"}, selection.AVX512),
        ("skylake-avx512", {"+avx512f", "+avx512vl", "+avx2", "+bmi2"}, selection.AVX512),
        ("znver3", {"+avx2", "+bmi2"}, selection.AVX2),
        ("haswell", {"+avx2", "+bmi2"}, selection.AVX2),
        ("znver2", {"+avx2", "+bmi2"}, selection.AVX2._replace(settle=selection.SCALAR.settle)),
        ("ivybridge", {"+avx", "-avx2"}, selection.SCALAR),
        ("apple-m1", {"+neon"}, selection.SCALAR),
    ],
)
def test_the_fastest_form_of_a_processor(processor: str, features: set[str], expected: selection.Form) -> None:
    assert selection.choose_form(processor, frozenset(features)) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("levels", [1, 3, 50, 10**6])
@pytest.mark.parametrize("size", [1, 2, 100, 5000, 60_000])
def test_a_value_is_found_by_its_rank(size: int, levels: int, dtype: Any) -> None:
    """As by sorting, with any number of ties."""
    values = np.round(np.abs(np.random.default_rng(size).standard_normal(size)) * levels).astype(dtype)
    ordered = np.sort(values)
    for rank in {0, size // 3, size - 1}:
        for low, high in ((dtype(0), dtype(np.inf)), (ordered[0], ordered[-1])):
            least, above = selection_kernels.find_rank(values.copy(), rank, low, high)
            assert least == ordered[rank]
            assert above == np.count_nonzero(ordered > least)


@pytest.mark.parametrize("levels", ["log", "uniform"])
@pytest.mark.parametrize("bits", [2, 4, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_top_k_is_the_compressors(dtype: Any, bits: int, levels: Any) -> None:
    """Wide rows are quantized as narrow ones are, and the reference adds what receivers decode."""
    q = TopK(ratio=0.05, bits=bits, levels=levels)
    v, reference = rows_of(0, 3, 5000, dtype), rows_of(1, 3, 5000, dtype)
    plain = q(v - reference, KEY, "y")
    message = q(wrap(v) - wrap(reference), KEY, "y")
    assert isinstance(message, Packed)
    assert message.grid is not None
    assert plain.grid is not None
    assert np.asarray(message.values).tobytes() == np.asarray(plain.values).tobytes()
    assert message.grid.scale.tobytes() == plain.grid.scale.tobytes()
    assert message.grid.span.tolist() == plain.grid.span.tolist()
    np.testing.assert_array_equal(np.asarray(wrap(reference) + message.values), reference + plain.values)


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


def test_a_selection_keeps_nothing_of_the_buffers_that_the_next_one_overwrites() -> None:
    """Buffers belong to the thread; a message has memory of its own, and no more than its entries need."""
    rows, zeros = rows_of(0, 2, 5000, np.float32), np.zeros(5000, np.float32)
    first, _ = selection.top_k(rows[0], zeros, 1000)
    before = first.entries.tobytes()
    second, _ = selection.top_k(rows[1], zeros, 1000)
    assert first.entries.tobytes() == before
    assert not np.shares_memory(first.entries, second.entries)
    assert first.entries.base is None
    assert first.entries.size == 1000


@pytest.mark.parametrize(("features", "is_fused"), [({"+avx2", "+fma"}, True), ({"+avx2", "-fma"}, False)])
def test_products_are_fused_where_the_processor_can(
    features: set[str], is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of the C library for every product would take many times as long."""
    monkeypatch.setattr(compiled, "find_processor", lambda: ("any", frozenset(features)))
    assert compiled.can_fuse_products() is is_fused


def test_cached_kernels_depend_on_the_code_of_all_of_them() -> None:
    """numba detects changes of a kernel's own file only."""
    assert compiled.evaluate.py_func.__qualname__ == f"evaluate_{compiled._hash_kernels()}"
    assert selection.SCALAR.pack.py_func.__qualname__.endswith(compiled._hash_kernels())
