"""Compressors: contraction, exact selection, and independence of packing."""

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dbo.algorithms.compression.compressors import (
    COMPRESSORS,
    Compressor,
    Identity,
    Lazy,
    Qsgd,
    RandK,
    RowTopK,
    Sign,
    TopK,
    TopShare,
    count_kept,
)
from dbo.algorithms.rng import Key

DTYPES = (np.float32, np.float64)
EVERY: list[Compressor] = [
    Identity(), TopK(ratio=0.2), TopK(ratio=1.0), RandK(ratio=0.3), Qsgd(levels=1), Qsgd(levels=7), Qsgd(), Sign(),
    TopK(bits=4), TopK(ratio=1.0, bits=3, levels="uniform"), RandK(ratio=0.3, bits=6), RowTopK(ratio=0.3),
    TopShare(share=0.5), TopShare(bits=5), Lazy(threshold=0.0, bits=4),
]
CONTRACTIVE: list[Compressor] = [
    Identity(), TopK(ratio=0.2), TopK(ratio=0.7), Sign(), RowTopK(ratio=0.2), RowTopK(ratio=0.6), TopShare(share=0.3),
    TopShare(share=0.99, ratio=0.5), TopShare(share=0.5, ratio=1.0, bits=4), Lazy(threshold=0.0),
    *(TopK(ratio=ratio, bits=bits) for ratio in (0.2, 1.0) for bits in (2, 3, 4, 8, 16)),
    *(TopK(ratio=ratio, bits=bits, levels="uniform") for ratio in (0.2, 1.0) for bits in (2, 4, 16)),
]


def key(nodes: int, round_: int = 0, first: int = 0) -> Key:
    return Key(5, np.arange(first, first + nodes), round_)


def rows_of(seed: int, nodes: int, dim: int, dtype: Any) -> Any:
    return np.random.default_rng(seed).standard_normal((nodes, dim)).astype(dtype)


def reference_top_k(row: Any, k: int) -> Any:
    """Top-k by a stable sort: NaN first, then by magnitude, ties by position."""
    order = np.lexsort((np.where(np.isnan(row), 0, -np.abs(row)), ~np.isnan(row)))
    out = np.zeros_like(row)
    out[order[:k]] = row[order[:k]] + 0.0
    return out


@st.composite
def stacks(draw: st.DrawFn, elements: st.SearchStrategy[float] | None = None) -> Any:
    dtype = draw(st.sampled_from(DTYPES))
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 40)))
    width = 32 if dtype is np.float32 else 64
    # Entries from a small set make ties and zeros common.
    few = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 1e-3])
    many = st.floats(-1e6, 1e6, width=width)  # type: ignore[arg-type]
    return draw(arrays(dtype, shape, elements=st.one_of(few, many) if elements is None else elements))


@given(stacks(), st.floats(0.01, 1.0))
def test_top_k_is_the_stable_sorts(rows: Any, ratio: float) -> None:
    """Top-k keeps exactly k = max(1, ⌊ratio·d⌋) entries by magnitude; of equal ones the lowest positions."""
    message = TopK(ratio=ratio)(rows, key(len(rows)), "y")
    k = max(1, int(np.floor(ratio * rows.shape[1])))
    assert message.kept == k
    assert message.values.dtype == rows.dtype
    expected = np.stack([reference_top_k(row, k) for row in rows])
    assert message.values.tobytes() == expected.tobytes()


@given(stacks(st.sampled_from([0.0, 1.0, -1.0, 3.0, np.nan, np.inf, -np.inf])), st.floats(0.01, 1.0))
def test_top_k_counts_nan_as_largest(rows: Any, ratio: float) -> None:
    """NaN is kept before everything else, inf included, and ties among NaN are broken by position."""
    k = count_kept(ratio, rows.shape[1])
    expected = np.stack([reference_top_k(row, k) for row in rows])
    np.testing.assert_array_equal(TopK(ratio=ratio)(rows, key(len(rows)), "y").values, expected)


@settings(deadline=None)
@given(stacks(st.sampled_from([0.0, -0.0, 1.0, -1.0, 3.0, 0.5, np.nan, np.inf])), st.floats(0.01, 1.0))
def test_top_k_selects_the_same_on_torch(rows: Any, ratio: float) -> None:
    """NumPy rows and torch rows give the same message."""
    torch = pytest.importorskip("torch")
    ours = TopK(ratio=ratio)(rows, key(len(rows)), "y").values
    theirs = TopK(ratio=ratio)(torch.from_numpy(rows.copy()), key(len(rows)), "y").values
    np.testing.assert_array_equal(np.asarray(theirs), ours)


def test_top_k_distinct_entries_are_counted_exactly() -> None:
    """Without ties and zeros exactly k entries of a row are not zero, at every ratio."""
    rows = rows_of(0, 10, 640, np.float32)
    for ratio in (1e-9, 0.001, 0.2, 0.5, 0.999, 1.0):
        message = TopK(ratio=ratio)(rows, key(10), "y")
        assert set(np.count_nonzero(message.values, axis=1)) == {max(1, int(ratio * 640))} == {message.kept}


def test_every_tie_is_broken_by_the_lowest_position() -> None:
    """A row of equal magnitudes keeps its first k entries."""
    rows = np.array([[-1.0, 1, 1, -1, 1], [2, 1, 1, 1, 1], [1, 1, 1, 1, 2]])
    values = TopK(ratio=0.4)(rows, key(3), "y").values
    np.testing.assert_array_equal(values, [[-1, 1, 0, 0, 0], [2, 1, 0, 0, 0], [1, 0, 0, 0, 2]])


@given(stacks())
def test_deterministic_compressors_contract(rows: Any) -> None:
    """‖Q(v) − v‖² ≤ (1 − δ)‖v‖² for each row and every deterministic compressor."""
    exact = rows.astype(np.float64)
    for q in CONTRACTIVE:
        error = np.sum((q(exact, key(len(rows)), "y").values - exact) ** 2, axis=1)
        size = np.sum(exact**2, axis=1)
        assert np.all(error <= (1 - q.contraction(rows.shape[1])) * size + 1e-9 * size + 1e-300)


@settings(max_examples=30, deadline=None)
@given(stacks(), st.sampled_from([1e-3, 1.0, 30.0]), st.floats(0.5, 1.0), st.sampled_from([0.2, 0.9]))
def test_lazy_contracts_up_to_its_threshold(rows: Any, threshold: float, decay: float, ratio: float) -> None:
    """‖Q(v) − v‖² ≤ (1 − δ)‖v‖² + d τ², τ = threshold · decay^round, for rows of any size and of about τ."""
    exact, dim = rows.astype(np.float64), rows.shape[1]
    unit = exact / np.maximum(np.sqrt(np.mean(exact**2, axis=1, keepdims=True)), 1e-150)
    for round_ in range(4):
        tau = threshold * decay**round_
        for bits, v in product((None, 4), (exact, *(size * tau * unit for size in (0.99, 1.01, 1.4)))):
            q = Lazy(threshold=threshold, decay=decay, ratio=ratio, bits=bits)
            error = np.sum((q(v, key(len(rows), round_), "y").values - v) ** 2, axis=1)
            bound = (1 - q.contraction(dim)) * np.sum(v**2, axis=1) + dim * tau**2
            assert np.all(error <= bound * (1 + 1e-9) + 1e-300)


def test_lazy_needs_its_threshold_in_the_bound() -> None:
    """Control: a row just below the threshold is lost whole, which δ alone does not allow."""
    q, rows = Lazy(threshold=1.0, decay=0.5, ratio=0.5), np.full((1, 8), 0.99)
    for round_, is_silent in ((0, True), (1, False)):
        error = np.sum((q(rows, key(1, round_), "y").values - rows) ** 2)
        assert (error > (1 - q.contraction(8)) * np.sum(rows**2) + 1e-9) == is_silent


def make_row(kind: str, dim: int) -> Any:
    """Return (1, dim) of the kind: dense, almost all zeros, or with a few entries that hold almost all of ‖v‖²."""
    rng = np.random.default_rng(dim)
    row = rng.standard_normal((1, dim))
    if kind == "sparse":
        row[:, rng.permutation(dim)[max(1, dim // 20):]] = 0.0
    return row if kind != "heavy-tailed" else row * np.exp(4 * rng.standard_normal((1, dim)))


@pytest.mark.parametrize("q", [
    RandK(ratio=0.3), RandK(ratio=0.3, bits=3), RandK(ratio=0.5, bits=4, levels="uniform"), Qsgd(levels=1),
    Qsgd(levels=4), Qsgd(),
], ids=repr)
@pytest.mark.parametrize("dim", [1, 5, 64])
@pytest.mark.parametrize("kind", ["dense", "sparse", "heavy-tailed"])
def test_random_compressors_contract_in_expectation(q: Compressor, dim: int, kind: str) -> None:
    """E‖Q(v) − v‖² ≤ (1 − δ)‖v‖²: the mean over 600 samples, within four standard errors."""
    row = make_row(kind, dim)
    rows = np.repeat(row, 600, axis=0)
    error = np.sum((q(rows, key(600), "y").values - rows) ** 2, axis=1)
    margin = 4 * error.std() / np.sqrt(600)
    assert error.mean() <= (1 - q.contraction(dim)) * np.sum(row**2) + margin + 1e-12


@pytest.mark.parametrize("kind", ["dense", "sparse", "heavy-tailed"])
def test_a_larger_factor_is_refuted(kind: str) -> None:
    """Control: δ + 0.1 of rand-k is not what 600 samples show, of rows of any kind."""
    row = make_row(kind, 64)
    error = np.sum((RandK(ratio=0.3)(np.repeat(row, 600, axis=0), key(600), "y").values - row) ** 2, axis=1)
    margin = 4 * error.std() / np.sqrt(600)
    share = RandK(ratio=0.3).contraction(64)
    assert error.mean() <= (1 - share) * np.sum(row**2) + margin
    assert error.mean() > (1 - share - 0.1) * np.sum(row**2) + (margin if kind == "dense" else 0)


@pytest.mark.parametrize("levels", [1, 4, 127])
def test_qsgd_is_unbiased_up_to_its_scale(levels: int) -> None:
    """E Q(v) = v / (1 + ω): the mean over 4000 samples, entry by entry."""
    row = rows_of(1, 1, 12, np.float64)
    q = Qsgd(levels=levels)
    values = q(np.repeat(row, 4000, axis=0), key(4000), "y").values
    error = values.mean(axis=0) - row[0] / (1 + q.variance(12))
    assert np.all(np.abs(error) <= 5 * values.std(axis=0) / np.sqrt(4000) + 1e-12)


def test_rand_k_keeps_each_entry_equally_often() -> None:
    """Exactly k entries stay, unscaled, each with probability k/d."""
    rows = np.tile(np.arange(1.0, 11.0), (4000, 1))
    values = RandK(ratio=0.3)(rows, key(4000), "y").values
    assert set(np.count_nonzero(values, axis=1)) == {3}
    assert np.all((values == 0) | (values == rows))
    np.testing.assert_allclose((values != 0).mean(axis=0), 0.3, atol=0.04)


@given(stacks())
def test_compressing_twice_changes_nothing(rows: Any) -> None:
    """Identity and top-k are idempotent: what is kept once is kept again."""
    for q in (Identity(), TopK(ratio=0.3)):
        once = q(rows, key(len(rows)), "y").values
        assert q(once, key(len(rows)), "y").values.tobytes() == once.tobytes()


@pytest.mark.parametrize("q", EVERY, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_compressed_independently(q: Compressor, dtype: Any) -> None:
    """A row's message is the same, to the last bit, alone or stacked: random numbers are keyed by node."""
    rows = np.round(rows_of(3, 6, 77, dtype), 1)     # rounding makes ties
    rows[4] = 0
    whole = q(rows, key(6), "y")
    for start, stop in ((0, 1), (1, 2), (3, 6), (4, 5)):
        part = q(rows[start:stop], key(stop - start, first=start), "y")
        assert part.values.tobytes() == whole.values[start:stop].tobytes()
        if whole.unit is not None and part.unit is not None:
            assert part.unit.tobytes() == whole.unit[start:stop].tobytes()


@pytest.mark.parametrize("q", [RandK(ratio=0.3), Qsgd(levels=2)], ids=repr)
def test_random_numbers_are_keyed(q: Compressor) -> None:
    """Same key, same message; another channel, round, step or node, another one."""
    rows = np.repeat(rows_of(4, 1, 60, np.float64), 2, axis=0)
    first = q(rows, key(2), "y").values
    np.testing.assert_array_equal(q(rows, key(2), "y").values, first)
    others = (q(rows, key(2), "z"), q(rows, key(2, round_=1), "y"), q(rows, key(2).at(1), "y"))
    for other in others:
        assert not np.array_equal(other.values, first)
    assert not np.array_equal(first[0], first[1])


@pytest.mark.parametrize("q", EVERY, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_rows_stay_zero(q: Compressor, dtype: Any) -> None:
    """Q(0) = 0, and no zero but a dense one is negative."""
    for zero in (0.0, -0.0):
        message = q(np.full((3, 9), zero, dtype), key(3), "y")
        assert message.values.dtype == dtype
        assert not message.values.any()
        assert message.form == "dense" or not np.signbit(message.values).any()


@pytest.mark.parametrize("q", EVERY, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_entry_rows(q: Compressor, dtype: Any) -> None:
    """A single entry is kept, up to the scale of a quantizer."""
    rows = np.array([[-3.7], [1e-30], [2.0]], dtype)
    values = q(rows, key(3), "y").values
    scale = q.contraction(1) if isinstance(q, Qsgd) else 1.0
    np.testing.assert_allclose(values, rows * scale, rtol=0.1 if getattr(q, "bits", None) else 1e-6)


@pytest.mark.parametrize("q", EVERY, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_keep_the_dtype_and_the_input_is_not_changed(q: Compressor, dtype: Any) -> None:
    """The message has the rows' dtype, and the rows are not written to."""
    rows = rows_of(6, 3, 33, dtype)
    rows.setflags(write=False)
    message = q(rows, key(3), "y")
    assert message.values.dtype == dtype
    assert message.values.shape == rows.shape
    if message.form == "levels":
        assert message.levels is not None
        assert message.unit is not None
        assert message.unit.dtype == dtype
        np.testing.assert_array_equal(message.values, message.levels.astype(dtype) * message.unit[:, None])


@pytest.mark.parametrize("q", [
    TopK(), Qsgd(), Sign(), TopK(bits=4), TopK(bits=2, levels="uniform"), RowTopK(), TopShare(), TopShare(bits=4),
    Lazy(), Lazy(threshold=1e6, decay=1.0),
], ids=repr)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_nonfinite_row_gives_a_nonfinite_message(q: Compressor, bad: float) -> None:
    """NaN or inf in a row gives NaN or inf in its message, without a warning, and not in the other rows'."""
    rows = rows_of(7, 3, 20, np.float32)
    rows[1, 4] = bad
    nonfinite = ~np.isfinite(q(rows, key(3), "y").values).all(axis=1)
    np.testing.assert_array_equal(nonfinite, [False, True, False])


@pytest.mark.parametrize("q", [
    Qsgd(), Sign(), TopK(bits=4), TopK(bits=3, levels="uniform"), TopShare(bits=4), RowTopK(),
], ids=repr)
def test_quantizers_handle_extreme_magnitudes(q: Compressor) -> None:
    """No square overflows or underflows in float32: Q(c·v) = c·Q(v) for powers of two."""
    rows = rows_of(8, 2, 30, np.float32)
    plain = q(rows, key(2), "y").values
    for scale in (np.float32(2.0**100), np.float32(2.0**-100)):
        np.testing.assert_array_equal(q(rows * scale, key(2), "y").values, plain * scale)


def test_sign_of_zero_is_plus() -> None:
    """Sign sends ±‖v‖₁/d in one bit each, and +1 for a zero of either sign."""
    message = Sign()(np.array([[3.0, -1.0, 0.0, -0.0]]), key(1), "y")
    np.testing.assert_array_equal(message.values, [[1.0, -1.0, 1.0, 1.0]])
    assert message.bits == 1


def test_qsgd_levels_fit_their_bits() -> None:
    """Levels lie in [−s, s], and s fits the declared number of bits."""
    for levels in (1, 2, 3, 4, 7, 8, 127, 128, 2**15 - 1):
        message = Qsgd(levels=levels)(rows_of(9, 4, 3, np.float32), key(4), "y")
        assert message.levels is not None
        assert np.abs(message.levels).max() <= levels < 2 ** (message.bits - 1) <= 2**15


def test_the_table_names_every_compressor() -> None:
    """Names as experiment files spell them; every class has defaults and a one-line description."""
    assert list(COMPRESSORS) == ["identity", "top_k", "rand_k", "row_top_k", "top_share", "lazy", "qsgd", "sign"]
    for made in COMPRESSORS.values():
        assert made().contraction(10) > 0
        assert (made.__doc__ or "").partition("\n")[0].endswith(".")


@pytest.mark.parametrize("levels", ["log", "uniform"])
@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8, 12, 16])
def test_quantized_values_are_near(bits: int, levels: Any) -> None:
    """Logarithmic levels: a relative error of (1 − r)/(1 + r), r = 2^(−S/L). Uniform: half a step of the scale."""
    rows = rows_of(1, 4, 400, np.float64)
    message = TopK(ratio=0.5, bits=bits, levels=levels)(rows, key(4), "y")
    assert message.grid is not None
    kept, count = TopK(ratio=0.5)(rows, key(4), "y").values, 1 << (bits - 1)
    error = np.abs(message.values - kept)
    for row in range(4):
        assert len(np.unique(np.abs(message.values[row]))) <= count + 1
        if levels == "uniform":
            assert error[row].max() <= message.grid.scale[row] / (2 * count) * (1 + 1e-12)
        else:
            r = 2.0 ** (-message.grid.span[row] / 8 / count)
            assert np.all(error[row] <= (1 - r) / (1 + r) * np.abs(kept[row]) * (1 + 1e-12))


def test_fewer_levels_are_farther() -> None:
    """Control: the error of the test above is that of its number of levels."""
    rows = rows_of(1, 1, 400, np.float64)
    errors = [
        float(np.sum((TopK(ratio=1.0, bits=bits)(rows, key(1), "y").values - rows) ** 2)) for bits in (3, 4, 5, 6)
    ]
    assert all(more > 2 * less for more, less in pairwise(errors))


@given(stacks(), st.sampled_from([0.2, 0.5, 0.95]))
def test_top_share_keeps_the_fewest(rows: Any, share: float) -> None:
    """The kept entries hold the share of ‖v‖², and without the smallest of them they would not."""
    exact = rows.astype(np.float64)
    values = TopShare(share=share, ratio=1.0)(exact, key(len(rows)), "y").values
    for row, kept in zip(exact, values, strict=True):
        total, held = np.sum(row**2), np.sum(kept**2)
        assert held >= share * total * (1 - 1e-9)
        if held:
            assert held - np.min(kept[kept != 0] ** 2) < share * total * (1 + 1e-9)


def test_row_top_k_selects_groups() -> None:
    """The two rows of the 4 × 3 matrix with the largest norms, each as a whole; another width is refused."""
    matrix = np.array([[1.0, 0, 0], [0.8, 0.8, 0.8], [0, 0, 0], [0, 2.0, 0]])
    message = RowTopK(ratio=0.5, width=3)(matrix.reshape(1, 12), key(1), "y")
    np.testing.assert_array_equal(message.values.reshape(4, 3), matrix * [[0], [1], [0], [1]])
    assert message.kept == 6
    with pytest.raises(ValueError, match="width: 5 is not allowed; must divide the 12 entries of a row"):
        RowTopK(width=5)(matrix.reshape(1, 12), key(1), "y")


def test_lazy_sends_nothing_below_its_threshold() -> None:
    """A row of root mean square 0.5 is silent up to the round in which the threshold has decayed below that."""
    q, rows = Lazy(threshold=1.0, decay=0.5, ratio=0.5), np.full((1, 4), 0.5)
    assert not q(rows, key(1, round_=0), "y").values.any()
    assert not q(rows, key(1, round_=1), "y").values.any()
    assert np.count_nonzero(q(rows, key(1, round_=2), "y").values) == 2


@settings(deadline=None)
@given(stacks(), st.sampled_from([2, 3, 4, 9, 16]), st.sampled_from(["log", "uniform"]))
def test_quantized_rows_are_the_same_on_torch(rows: Any, bits: int, levels: Any) -> None:
    """NumPy rows and torch rows give the same values, scales and spans, to the last bit."""
    torch = pytest.importorskip("torch")
    q = TopK(ratio=0.6, bits=bits, levels=levels)
    ours, theirs = q(rows, key(len(rows)), "y"), q(torch.from_numpy(rows.copy()), key(len(rows)), "y")
    assert theirs.values.numpy().tobytes() == ours.values.tobytes()
    assert ours.grid is not None
    assert theirs.grid is not None
    assert np.asarray(theirs.grid.scale).tobytes() == ours.grid.scale.tobytes()
    np.testing.assert_array_equal(np.asarray(theirs.grid.span), ours.grid.span)
