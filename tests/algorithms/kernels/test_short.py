"""Compiled loops for short rows give the results of NumPy, to the last bit."""

from typing import Any

import numpy as np
import pytest
from scipy import sparse

from dbo.algorithms.api import Message, TopK
from dbo.algorithms.kernels import host_selection, short
from dbo.platform.network import codecs
from dbo.platform.network.packet import Header, encode, measure

Array = Any
RNG = np.random.default_rng(7)


def make_rows(kind: str, dim: int, dtype: str) -> Array:
    rows = RNG.standard_normal((2 + 4096 // dim, dim))
    if kind == "ties":
        rows = np.round(rows, 1)
    elif kind == "zeros":
        rows[RNG.random(rows.shape) < 0.9] = -0.0
    elif kind == "nonfinite":
        rows[RNG.random(rows.shape) < 0.3] = np.nan
        rows[RNG.random(rows.shape) < 0.1] = -np.inf
    elif kind == "scales":
        rows *= 10.0 ** RNG.uniform(-44, 37, rows.shape)
    elif kind == "equal":
        rows[:] = -1.0
    return rows.astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "nonfinite", "scales", "equal"])
@pytest.mark.parametrize(("dim", "k"), [(2, 1), (65, 1), (300, 90), (300, 299), (1000, 7)])
def test_selection_is_that_of_numpy(kind: str, dim: int, k: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same entries of the same bits: NaN first, the first of equal ones, dropped entries and zeros are +0.0."""
    rows = make_rows(kind, dim, dtype)
    loops = short.short_loops(rows)
    assert loops is not None
    before = rows.copy()
    found = short.keep_largest(loops, rows, k)
    np.testing.assert_array_equal(rows, before)
    monkeypatch.setattr(short, "_FEWEST", rows.size + 1)
    expected = host_selection.keep_largest(rows, k)
    np.testing.assert_array_equal(found.view(f"u{rows.itemsize}"), expected.view(f"u{rows.itemsize}"))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["normal", "zeros", "nonfinite", "equal"])
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize(("dim", "ratio"), [(40, 0.1), (300, 0.02), (300, 0.4), (300, 1.0)])
def test_measured_lengths_are_those_of_the_packets(
    kind: str, dim: int, ratio: float, bits: int | None, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the loops, without them, and encoded: the same bytes, where some rows send nothing at all."""
    rows = make_rows(kind, dim, dtype)
    rows[1] = 0
    message = TopK(ratio=ratio, bits=bits)(rows, None, "x")      # type: ignore[arg-type]
    assert isinstance(message, Message)
    called = []
    original = codecs.measure_compiled
    monkeypatch.setattr(codecs, "measure_compiled", lambda *a: called.append(1) or original(*a))
    sizes = measure({"x": message, "yy": message})
    assert called == [1, 1]
    header = Header(sender=0, epoch=0, round=1, step=0)
    lengths = [len(encode(header, {"x": message, "yy": message}, row)) for row in range(len(rows))]
    np.testing.assert_array_equal(sizes.total, lengths)
    monkeypatch.setattr(short, "_FEWEST", rows.size + 1)
    expected = measure({"x": message, "yy": message})
    assert called == [1, 1]
    np.testing.assert_array_equal(sizes.header, expected.header)
    for name, table in expected.tables.items():
        np.testing.assert_array_equal(sizes.tables[name], table)


def test_rows_that_do_not_suit_the_loops_are_left_to_numpy() -> None:
    rows = np.zeros((4, 2048), dtype=np.float32)
    assert short.short_loops(rows) is not None
    fixed = rows.copy()
    fixed.setflags(write=False)
    for other in (rows[:1, :64], rows[:, ::2], rows.astype(">f4"), rows.astype(np.float16), rows[0], fixed,
                  np.zeros((1, 1 << 16), dtype=np.float32)):
        assert short.short_loops(other) is None


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["normal", "zeros", "nonfinite", "scales"])
def test_sparse_products_are_those_of_scipy(kind: str, dtype: str) -> None:
    """W @ rows with the bits of SciPy: a block mixes with either, depending on its size."""
    rows = make_rows(kind, 333, dtype)      # blocks of entries, then eight at a time, then single ones
    weights = sparse.random_array((7, len(rows)), density=0.4, rng=RNG, dtype=np.dtype(dtype)).tocsr()
    weights.sort_indices()
    loops = short.short_loops(rows)
    assert loops is short.imported_loops(rows) is not None
    with np.errstate(over="ignore", invalid="ignore"):
        found, expected = short.multiply_sparse(loops, weights, rows), weights @ rows
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == expected.dtype == rows.dtype
    assert short.imported_loops(rows[:1]) is None      # too few entries
