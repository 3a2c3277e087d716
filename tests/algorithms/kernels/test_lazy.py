"""Lazy sums of wide rows: one pass in float64, operands stay as they are, everything else sees arrays."""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.compression.compressors import COMPRESSORS, TopK, compressor
from dbo.algorithms.gossip import Message, Packed, PackedRow, dense, mix
from dbo.algorithms.kernels import fused
from dbo.algorithms.kernels.lazy import Rows, RowSum, map_difference, unwrap, unwrap_rows, wrap, wrap_sum
from dbo.algorithms.rng import Key

torch = pytest.importorskip("torch")

DIM = 5000      # more than two tiles, and not a multiple of 64
KEY = Key(5, np.arange(3), 0)
EXPRESSIONS: dict[str, Callable[..., Any]] = {
    "step": lambda a, b, c, d, e: a + 0.3 * (b - c) - 0.7 * d,
    "track": lambda a, b, c, d, e: a + (0.3 * (b - c) + (d - e)),
    "average": lambda a, b, c, d, e: (1 - 0.3) * a + 0.3 * b,
    "series": lambda a, b, c, d, e: a - b / 3.0 + c,
    "negated": lambda a, b, c, d, e: -(a - b) * np.float64(0.5),
    "storm": lambda a, b, c, d, e: (1 - 0.2) * (a + b - c) + 0.2 * b,
    "zero": lambda a, b, c, d, e: 0 * a,
    "twice": lambda a, b, c, d, e: a + a + (a - 2 * a),
    "integers": lambda a, b, c, d, e: 2 * a - 3 * b,
}


@pytest.fixture(autouse=True)
def every_row_is_lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "MIN_ENTRIES", 2)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of sums of each pass over memory."""
    found: list[int] = []
    original = fused.evaluate

    def evaluate(sums: Any) -> None:
        found.append(len(sums))
        original(sums)

    monkeypatch.setattr(fused, "evaluate", evaluate)
    return found


def make_rows(count: int, dtype: Any = np.float32, nodes: int = 3) -> list[Any]:
    return [np.random.default_rng(seed).standard_normal((nodes, DIM)).astype(dtype) for seed in range(count)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expression_is_evaluated_in_float64_and_rounded_once(name: str, dtype: Any) -> None:
    """Arrays and tensors; the operands stay as they are."""
    arrays = make_rows(5, dtype)
    expected = EXPRESSIONS[name](*(array.astype(np.float64) for array in arrays))
    before = [array.tobytes() for array in arrays]
    for convert in (np.asarray, torch.from_numpy):
        rows = EXPRESSIONS[name](*(wrap(convert(array)) for array in arrays))
        assert isinstance(rows, Rows)
        found = unwrap(rows)
        assert str(found.dtype).endswith(np.dtype(dtype).name)
        close = {"rtol": 6.1e-8, "atol": 1e-12} if dtype is np.float32 else {"rtol": 1e-14, "atol": 1e-15}
        np.testing.assert_allclose(np.asarray(found), expected, **close)
        assert not any(np.shares_memory(np.asarray(found), array) for array in arrays)
    assert [array.tobytes() for array in arrays] == before


def test_small_differences_of_large_numbers_lose_no_digits() -> None:
    """Control: in float32 the same sum loses them all."""
    big, one = np.full((1, DIM), 1e8, np.float32), np.full((1, DIM), 1, np.float32)
    found = unwrap(wrap(big) + wrap(one) - wrap(big))
    assert (found == 1).all()
    assert (big + one - big == 0).all()


def test_an_update_is_one_pass(passes: list[int]) -> None:
    """Temporaries are not stored; nothing happens before somebody needs the entries, and then only once."""
    a, b, c, d = map(wrap, make_rows(4))
    rows = a + 0.3 * (b - c) - 0.7 * d
    assert passes == []
    for _ in range(2):
        unwrap(rows)
    assert passes == [1]


def test_a_sum_that_is_still_needed_is_stored_in_the_same_pass(passes: list[int]) -> None:
    """A variable refers to it; one that only the expression used is not stored."""
    a, b, c = map(wrap, make_rows(3))
    kept, forgotten = a + b, b - c
    rows = kept + 2.0 * forgotten
    del forgotten
    found = unwrap(rows)
    assert passes == [2]
    stored = unwrap(kept)
    assert passes == [2]
    arrays = [row.astype(np.float64) for row in make_rows(3)]
    np.testing.assert_allclose(stored, arrays[0] + arrays[1], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found, arrays[0] + arrays[1] + 2 * (arrays[1] - arrays[2]), rtol=1e-6, atol=1e-6)


def test_memory_that_nothing_refers_to_is_recycled() -> None:
    """The sum replaces it; a variable, a view or another pending sum that needs it prevents that."""

    def place(rows: Any) -> int:
        return int(np.asarray(rows).ctypes.data)

    a, b = make_rows(2)
    expected = a + b

    def replace(hold: Callable[[Any], Any]) -> bool:
        """Add b to rows; return whether the sum has their memory."""
        rows = wrap(a.copy())
        before, held = place(rows), hold(rows)
        rows = rows + wrap(b)
        found = unwrap(rows)
        np.testing.assert_array_equal(found, expected)
        if held is not None:
            np.testing.assert_array_equal(unwrap(held)[0], a[0])
        return place(found) == before

    assert replace(lambda rows: None)
    assert not replace(lambda rows: rows)
    assert not replace(unwrap)
    assert not replace(lambda rows: unwrap(rows)[:1])
    assert not replace(lambda rows: 1.0 * rows)
    assert not replace(lambda rows: torch.from_numpy(unwrap(rows)))


def test_recycled_memory_is_not_that_of_another_sum() -> None:
    """Two sums share a temporary whose rows nobody else refers to."""
    a, b, c = make_rows(3)
    shared = wrap(a.copy()) + wrap(b.copy())
    first, second = shared - wrap(c), shared + wrap(c)
    del shared
    found = unwrap_rows([first, second])
    exact = [row.astype(np.float64) for row in (a, b, c)]
    np.testing.assert_allclose(found[0], exact[0] + exact[1] - exact[2], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found[1], exact[0] + exact[1] + exact[2], rtol=1e-6, atol=1e-6)


def test_tensors_that_nothing_refers_to_are_freed_before_the_next_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of tensors are computed one after the other; rows that only the first one needs end with it."""
    from dbo.algorithms.kernels import torch_sums

    a, b, c = (torch.from_numpy(rows) for rows in make_rows(3))
    dying, shared = a.clone(), b.clone()
    first, second = wrap(dying) + wrap(shared), wrap(shared) - wrap(c)
    watched, alive = [weakref.ref(dying), weakref.ref(shared)], []
    del dying, shared
    original = torch_sums.evaluate

    def evaluate(*arguments: Any) -> Any:
        alive.append([reference() is not None for reference in watched])
        return original(*arguments)

    monkeypatch.setattr(torch_sums, "evaluate", evaluate)
    found = unwrap_rows([first, second])
    assert alive == [[True, True], [False, True]]
    assert [reference() for reference in watched] == [None, None]
    for rows, expected in zip(found, (a + b, b - c), strict=True):
        np.testing.assert_allclose(rows, expected, rtol=1e-6, atol=1e-6)


def test_a_sum_of_tensors_replaces_no_operand() -> None:
    """Views, detached tensors and NumPy arrays may share the memory of rows that nothing seems to refer to."""
    for share in (lambda rows: rows[:1], lambda rows: rows.detach(), lambda rows: rows.numpy()):
        tensor = torch.from_numpy(make_rows(1)[0].copy())
        held, rows = share(tensor), wrap(tensor)
        before = np.asarray(held).copy()
        del tensor
        rows = rows + rows
        unwrap(rows)
        np.testing.assert_array_equal(np.asarray(held), before)


def test_several_sums_are_evaluated_together(passes: list[int]) -> None:
    """One pass for each shape."""
    a, b = map(wrap, make_rows(2))
    first, second = a + b, a - b
    other = wrap(make_rows(1)[0][:, :100].copy())
    unwrap_rows([first, second, 2 * other, np.ones(3)])
    assert passes == [2, 1]


def test_sums_that_need_each_other_are_evaluated_in_order() -> None:
    """Whatever the order in which somebody asks for them."""
    a, b = make_rows(2, np.float64)
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        message = TopK()(wrap(a), KEY, "y").values
        rest = wrap(a) - message
        values: list[Any] = [message, rest, rest + wrap(b)]
        found = dict(zip(order, unwrap_rows([values[i] for i in order]), strict=True))
        kept = np.asarray(TopK()(a, KEY, "y").values)
        np.testing.assert_array_equal(found[0], kept)
        np.testing.assert_array_equal(found[1], a - kept)
        np.testing.assert_allclose(found[2], a - kept + b, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_function_sees_both_rows_of_a_difference(threads: int) -> None:
    """What is pending of a − b is evaluated once and kept; the difference itself is not."""
    random = np.random.default_rng(3)
    p, q, r = (wrap(random.standard_normal((3, DIM)).astype(np.float32)) for _ in range(3))
    a, b = p + 0.5 * q, q - r
    expected = unwrap(p + 0.5 * q), unwrap(q - r)
    difference = a - b

    def see(i: int, v: Any, reference: Any, terms: Any) -> tuple[Any, Any]:
        fused.evaluate_terms(terms, DIM, v.dtype)
        return v.copy(), reference.copy()

    fused.set_threads(threads)
    try:
        seen = map_difference(difference, see)
    finally:
        fused.set_threads(1)
    assert seen is not None
    for place, array in enumerate(expected):
        np.testing.assert_array_equal(np.stack([rows[place] for rows in seen]), array)
    assert a._sum.array is not None
    assert b._sum.array is not None
    assert difference._sum.array is None
    again = map_difference(difference, lambda i, v, reference, terms: (terms, v[0] - reference[0]))
    assert again is not None
    assert {terms for terms, _ in again} == {None}      # nothing is pending any more
    np.testing.assert_array_equal([value for _, value in again], (expected[0] - expected[1])[:, 0])


@pytest.mark.parametrize("make", [lambda a, b: a + b, lambda a, b: 2 * a, lambda a, b: b], ids=["a + b", "2 a", "b"])
def test_other_rows_are_no_difference(make: Any) -> None:
    a, b = (wrap(np.ones((3, DIM), dtype=np.float32)) for _ in range(2))
    assert map_difference(make(a, b), lambda i, v, reference, terms: None) is None


def test_long_sums_are_evaluated_on_the_way(passes: list[int]) -> None:
    """Otherwise their terms would keep the memory of hundreds of arrays."""
    a = wrap(make_rows(1)[0])
    total = a
    for _ in range(200):
        total = total + a
    assert 1 <= len(passes) <= 5
    np.testing.assert_allclose(unwrap(total), 201 * unwrap(a), rtol=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_over_neighbours(dtype: Any, threads: int) -> None:
    """Dense and packed rows, one to seven neighbours: W @ rows, alone and inside of an expression."""
    weights = np.tril(np.random.default_rng(1).random((7, 7)))
    rows, known = make_rows(2, dtype, nodes=7)
    rows[:, ::3] = 0
    packed = [PackedRow.of(row) for row in rows]
    expected = weights @ rows.astype(np.float64)
    close = {"rtol": 1e-6 if dtype is np.float32 else 1e-13, "atol": 1e-6 if dtype is np.float32 else 1e-14}
    fused.set_threads(threads)
    try:
        for some in (list(rows), packed):
            terms = tuple(tuple(zip(line[: i + 1], some, strict=False)) for i, line in enumerate(weights))
            mixed = wrap_sum(RowSum(terms, DIM, rows.dtype))
            np.testing.assert_allclose(unwrap(wrap(known) - 0.5 * mixed), known - 0.5 * expected, **close)
            np.testing.assert_allclose(unwrap(mixed), expected, **close)
    finally:
        fused.set_threads(1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("dim", [5, 64, 130, 2048, 2049, 5000])
def test_packed_rows_are_added_alike_on_every_processor(monkeypatch: pytest.MonkeyPatch, dim: int, dtype: Any) -> None:
    """With expanding loads and without them: the same bits."""
    rows, known = (row[:, :dim].copy() for row in make_rows(2, dtype))
    packed = [PackedRow.of(np.where(np.abs(row) > 1, row, 0)) for row in rows]
    terms = tuple(((0.3, packed[i]), (-0.7, packed[0])) for i in range(3))
    found = []
    for expands in (False, True):
        monkeypatch.setattr(fused, "can_expand", lambda expands=expands: expands)
        found.append(unwrap(wrap(known) + wrap_sum(RowSum(terms, dim, rows.dtype))).tobytes())
    assert found[0] == found[1]


@pytest.mark.parametrize("signs", [(1.0, 1.0), (1.0, -1.0), (-1.0, 1.0)])
def test_a_sum_of_two_rows_has_the_bits_of_float64_rounded_once(signs: tuple[float, float]) -> None:
    """It is computed in float32; numbers of all magnitudes, denormal and infinite results included."""
    random = np.random.default_rng(3)
    a, b = (random.integers(0, 1 << 32, (2, DIM), dtype=np.uint32).view(np.float32) for _ in range(2))
    a, b = (np.where(np.isfinite(row), row, np.float32(1)) for row in (a, b))
    b[:, ::2] = a[:, ::2] * np.float32(1 + 2**-20)      # cancellation
    with np.errstate(over="ignore"):
        expected = (signs[0] * a.astype(np.float64) + signs[1] * b.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(unwrap(signs[0] * wrap(a) + signs[1] * wrap(b)), expected)


def test_a_packed_row_serves_several_sums() -> None:
    """It is unpacked once; every sum has its own weight."""
    a, b, row = make_rows(3, np.float64)
    packed = tuple(((1.0, PackedRow.of(np.where(np.abs(each) > 1, each, 0))),) for each in row)
    sent = np.where(np.abs(row) > 1, row, 0)
    mixed = wrap_sum(RowSum(packed, DIM, row.dtype))
    found = unwrap_rows([wrap(a) + mixed, wrap(b) - 0.25 * mixed])
    np.testing.assert_allclose(found[0], a + sent, rtol=1e-14)
    np.testing.assert_allclose(found[1], b - 0.25 * sent, rtol=1e-14, atol=1e-15)


def test_a_packed_row_is_one_term_of_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's own message, sent and received, counts once with both weights; in another sum it has its own."""
    counts: list[list[int]] = []
    original = fused.evaluate_terms

    def evaluate_terms(terms: Any, dim: int, dtype: Any) -> None:
        counts.append(terms[1].tolist())
        original(terms, dim, dtype)

    monkeypatch.setattr(fused, "evaluate_terms", evaluate_terms)
    known, a, b = np.random.default_rng(0).standard_normal((3, 2, DIM))
    own, other = ([PackedRow.of(np.where(np.abs(each) > 1, each, 0)) for each in rows] for rows in (a, b))
    sent = wrap_sum(RowSum(tuple(((1.0, row),) for row in own), DIM, a.dtype))
    mixed = wrap_sum(RowSum(tuple(((0.25, p), (0.75, q)) for p, q in zip(own, other, strict=True)), DIM, a.dtype))
    gap, hat = wrap(known) - sent + mixed, wrap(known) + sent
    found = unwrap_rows([gap, hat])
    assert counts == [[3, 5]] * 2
    a, b = (np.where(np.abs(rows) > 1, rows, 0) for rows in (a, b))
    np.testing.assert_allclose(found[0], known - 0.75 * a + 0.75 * b, rtol=0, atol=1e-14)
    np.testing.assert_allclose(found[1], known + a, rtol=0, atol=1e-14)


def test_a_factor_per_row() -> None:
    """(nodes, 1) numbers, as norms or multipliers have them."""
    a, b = make_rows(2, np.float64)
    factor = np.array([[1.0], [-2.0], [0.5]])
    rows = wrap(a) + factor * wrap(b)
    assert isinstance(rows, Rows)
    np.testing.assert_allclose(unwrap(rows), a + factor * b, rtol=1e-14)
    tensors = wrap(torch.from_numpy(a)) + torch.from_numpy(factor) * wrap(torch.from_numpy(b))
    np.testing.assert_allclose(unwrap(tensors).numpy(), a + factor * b, rtol=1e-14)


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_other_functions_see_the_array(convert: Any) -> None:
    """NumPy's and torch's functions, methods, indices and comparisons; wide results have lazy arithmetic again."""
    import array_api_compat

    a, b = make_rows(2, np.float64)
    rows = wrap(convert(a)) - wrap(convert(b))
    xp = array_api_compat.array_namespace(rows)
    root = xp.sqrt(xp.sum(rows * rows, axis=1, keepdims=True))
    scaled = xp.where(root > 1, rows / 2, rows)
    assert isinstance(scaled, Rows)
    np.testing.assert_allclose(np.asarray(unwrap(scaled)), (a - b) / 2, rtol=1e-14)
    np.testing.assert_allclose(np.asarray(rows.mean(0)), (a - b).mean(0), rtol=1e-12, atol=1e-15)
    np.testing.assert_array_equal(np.asarray(rows[1, 5:9]), (a - b)[1, 5:9])
    np.testing.assert_array_equal(np.asarray(unwrap(rows > 0)), a - b > 0)
    np.testing.assert_allclose(np.asarray(unwrap(abs(rows) ** 2)), (a - b) ** 2, rtol=1e-14)
    assert (len(rows), rows.shape, rows.ndim) == (3, (3, DIM), 2)


def test_an_array_on_the_left_joins_the_sum(passes: list[int]) -> None:
    a, b = make_rows(2)
    rows = a - 0.5 * wrap(b)
    assert isinstance(rows, Rows)
    np.testing.assert_allclose(unwrap(rows), a - 0.5 * b, rtol=1e-6, atol=1e-6)
    assert passes == [1]


def test_rows_are_not_changed_in_place() -> None:
    """`y -= g` gives new rows, as for numbers; an assignment to entries is refused."""
    a, b = make_rows(2)
    before = a.tobytes()
    rows = old = wrap(a)
    rows -= 0.5 * wrap(b)
    assert unwrap(old) is a
    assert a.tobytes() == before
    np.testing.assert_allclose(unwrap(rows), a - 0.5 * b, rtol=1e-6, atol=1e-6)
    with pytest.raises(TypeError, match="cannot be changed in place"):
        rows[0] = 1


@pytest.mark.parametrize("value", [np.ones((3, 1)), np.ones(3), np.ones((3, 4), np.int64), np.ones((3, 4, 2)), None, 1])
def test_other_values_stay_as_they_are(value: Any) -> None:
    assert wrap(value) is value
    assert unwrap(value) is value


def test_narrow_rows_are_plain_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their arithmetic is NumPy's, to the last bit."""
    monkeypatch.setattr(fused, "MIN_ENTRIES", DIM + 1)
    (rows,) = make_rows(1)
    assert wrap(rows) is rows
    assert isinstance(TopK()(rows, KEY, "y"), Message)


def test_messages_are_evaluated_when_they_are_sent() -> None:
    """A dense channel holds an array; a packed one joins a sum without being unpacked."""
    a, b = make_rows(2)
    outgoing: Any = mix(x=wrap(a) - wrap(b))
    assert isinstance(outgoing.channels["x"].values, np.ndarray)
    message = TopK()(wrap(a) - wrap(b), KEY, "y")
    assert isinstance(message, Packed)
    expected = np.asarray(TopK()(a - b, KEY, "y").values)
    np.testing.assert_array_equal(np.asarray(message.values), expected)
    np.testing.assert_allclose(np.asarray(wrap(b) + message.values), b + expected, rtol=1e-6)


def test_a_compressor_of_a_plugin_sees_arrays() -> None:
    """It may use any library."""
    seen = []

    @compressor("seen_by_a_test")
    class Seen:
        """Remembers what it was given."""

        def __call__(self, rows: Any, key: Any, channel: str) -> Message:
            seen.append(type(rows))
            return dense(rows)

        def contraction(self, dim: int) -> float:
            return 1.0

    try:
        a, b = map(wrap, make_rows(2))
        Seen()(a - b, KEY, "y")
    finally:
        COMPRESSORS.forget(__name__)
    assert seen == [np.ndarray]
