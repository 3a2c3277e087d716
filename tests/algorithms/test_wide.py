"""Steps on wide rows: the kernels compute what the plain expressions say, ties, zeros and NaN included."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo.algorithms import wide
from dbo.algorithms.compressors import TopK, kept, largest
from dbo.algorithms.draws import Draws
from dbo.algorithms.exchange import Message, Packed, PackedRow, Sum

DTYPES = (np.float32, np.float64)
KEY = Draws(5, np.arange(3), 0)


@pytest.fixture(autouse=True)
def everything_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide, "WIDE", 1)
    monkeypatch.setattr(wide, "_SAMPLE", 64)      # brackets that miss are then common


def rows_of(seed: int, nodes: int, dim: int, dtype: Any) -> Any:
    return np.random.default_rng(seed).standard_normal((nodes, dim)).astype(dtype)


@st.composite
def residuals(draw: st.DrawFn, special: tuple[float, ...] = ()) -> tuple[Any, Any]:
    """Rows and reference points, with as many ties and zeros as the draw wants."""
    dtype = draw(st.sampled_from(DTYPES))
    nodes, dim = draw(st.integers(1, 3)), draw(st.integers(1, 700))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    levels = draw(st.sampled_from([1, 2, 5, 10**6]))
    rows, reference = (np.round(rng.standard_normal((nodes, dim)) * levels).astype(dtype) for _ in range(2))
    rows[rng.random(rows.shape) < draw(st.sampled_from([0.0, 0.3, 0.95]))] = 0
    reference[rng.random(rows.shape) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = 0
    if special:
        there = rng.random(rows.shape) < draw(st.sampled_from([0.01, 0.4]))
        rows[there] = rng.choice(np.array(special, dtype), int(there.sum()))
    return rows, reference


def plain(rows: Any, reference: Any, ratio: float) -> tuple[Any, Any]:
    values = largest(rows - reference, kept(ratio, rows.shape[1]))
    return values, reference + values


@settings(deadline=None)
@given(residuals(), st.floats(0.01, 0.999))
def test_top_k_is_the_plain_definition(pair: Any, ratio: float) -> None:
    """The message is that of TopK to the last bit, and the reference has taken it in."""
    rows, reference = pair
    values, after = plain(rows, reference, ratio)
    message, heard = wide.residual(TopK(ratio=ratio), rows, reference, KEY, "y")
    assert isinstance(message, Packed)
    assert message.values.tobytes() == values.tobytes()
    np.testing.assert_array_equal(heard, after)
    assert message.kept == kept(ratio, rows.shape[1])


@settings(deadline=None)
@given(residuals(special=(np.nan, np.inf, -np.inf)), st.floats(0.01, 0.999))
def test_top_k_counts_nan_as_largest(pair: Any, ratio: float) -> None:
    """NaN goes before inf and inf before the rest, as in the plain definition."""
    rows, reference = pair
    with np.errstate(invalid="ignore"):
        values, after = plain(rows, reference, ratio)
        message, heard = wide.residual(TopK(ratio=ratio), rows, reference, KEY, "y")
    np.testing.assert_array_equal(message.values, values)
    np.testing.assert_array_equal(heard, after)


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_are_their_expressions(dtype: Any) -> None:
    """Every step of the module against its docstring, and where it is written."""
    v, a, b, t, u = (rows_of(seed, 3, 501, dtype) for seed in range(5))
    close = {"rtol": 1e-5 if dtype is np.float32 else 1e-13, "atol": 1e-6 if dtype is np.float32 else 1e-13}

    def check(step: Any, expected: Any, into: Any, *rest: Any) -> None:
        given_ = into.copy()
        found = step(given_)
        np.testing.assert_allclose(found, expected, **close)
        assert np.shares_memory(found, given_)

    check(lambda v: wide.moved(v, 0.5, a, b, (-0.3, t)), v + 0.5 * (a - b) - 0.3 * t, v)
    check(lambda v: wide.moved(v, 0.5, a, b, (1, t), (-1, u)), v + 0.5 * (a - b) + t - u, v)
    check(lambda a: wide.gossiped(v, 0.5, a, (-0.3, t)), v + 0.5 * (a - v) - 0.3 * t, a)
    check(lambda a: wide.gossiped(v, 0.5, a, (1, t), (-1, u)), v + 0.5 * (a - v) + t - u, a)
    check(lambda v: wide.plus(v, (0.7, t)), v + 0.7 * t, v)
    check(lambda v: wide.plus(v, (1, t), (-1, u)), v + t - u, v)
    check(lambda t: wide.averaged(v, 0.3, t), 0.7 * v + 0.3 * t, t)
    check(lambda t: wide.series_step(v, t, 1.5, b), v - t / 1.5 + b, t)


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
    wide.use(threads)
    try:
        found, told = wide.summed(weights, list(rows)), wide.told(known.copy(), Sum(terms, 333))
    finally:
        wide.use(1)
    expected = weights.toarray().astype(dtype) @ rows
    close = {"rtol": 1e-4 if dtype is np.float32 else 1e-12, "atol": 1e-5 if dtype is np.float32 else 1e-13}
    np.testing.assert_allclose(found, expected, **close)
    np.testing.assert_allclose(told, known + expected, **close)
    np.testing.assert_allclose(np.asarray(Sum(terms, 333)), expected, **close)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_finds_one_bad_entry(dtype: Any, bad: float) -> None:
    """Whichever row it is in; the largest finite number is not bad."""
    rows = rows_of(0, 3, 1000, dtype)
    rows[0, 5] = np.finfo(dtype).max
    assert wide.finite(rows)
    rows[2, 999] = bad
    assert not wide.finite(rows)


def test_numba_is_imported_for_wide_rows_only() -> None:
    """A start with small problems does not pay for the compiler."""
    code = "import sys; from dbo.algorithms.registry import algorithms; algorithms(); assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_narrow_rows_and_tensors_are_left_to_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written in place, no message is packed, and Q is the compressor's own."""
    monkeypatch.setattr(wide, "WIDE", 1 << 16)
    v, reference = rows_of(0, 3, 64, np.float32), rows_of(1, 3, 64, np.float32)
    before = v.tobytes(), reference.tobytes()
    message, heard = wide.residual(TopK(), v, reference, KEY, "y")
    assert isinstance(message, Message)
    assert heard is not reference
    assert wide.moved(v, 0.5, reference, v, (1, v)) is not v
    assert (v.tobytes(), reference.tobytes()) == before
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(wide, "WIDE", 1)
    theirs, _ = wide.residual(TopK(), torch.from_numpy(v), torch.from_numpy(reference), KEY, "y")
    np.testing.assert_array_equal(np.asarray(theirs.values), message.values)
