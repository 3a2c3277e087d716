"""Every operation on rows has an implementation for NumPy and one for torch, and they agree."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.kernels import interface, marks

torch = pytest.importorskip("torch")
torch_marks = pytest.importorskip("dbo.algorithms.kernels.torch_marks")

FAMILIES: dict[type, Callable[[Any], Any]] = {
    interface.SelectionKernels: interface.selection_of, interface.SumKernels: interface.sums_of,
    interface.MarkKernels: interface.marks_of,
}
RNG = np.random.default_rng(3)
ROWS = RNG.standard_normal((5, 300))
ROWS[1] = np.round(ROWS[1])                                    # many ties, zeros of both signs
ROWS[2, ::7] = np.nan
ROWS[3, 5], ROWS[4] = -np.inf, -0.0
SPARSE = np.where(np.abs(ROWS) > 1.2, ROWS, 0.0)
SCALES, SPANS = np.array([1.5, 0.25, 3.0]), np.array([8, 40, 96])
TERMS = [(0.3, RNG.standard_normal((4, 1000))), (-2.0, RNG.standard_normal((4, 1000))), (1.0, np.ones((4, 1000)))]
MARKED = RNG.random(64 * 9) < 0.2
WORDS = np.packbits(MARKED, bitorder="little").view(np.uint64)
GAPS = np.diff(np.flatnonzero(MARKED), prepend=-1) - 1


def code(shift: int, break_it: bool = False) -> tuple[Any, ...]:
    """Return the two streams of the marks' code, made by the host, and words for the answer."""
    unary, lowest = np.zeros(40, dtype=np.uint64), np.zeros(40, dtype=np.uint64)
    marks.encode_gaps(WORDS, shift, unary, lowest)
    return unary, lowest, shift, 64 * 9 - 200 * break_it, np.zeros(9, dtype=np.uint64)


CASES: dict[str, list[tuple[Any, ...]]] = {
    "keep_largest": [(ROWS, k) for k in (1, 2, 40, 299)],
    "quantize_rows": [(SPARSE, bits, log) for bits in (2, 5, 9) for log in (False, True)],
    "round_scale": [(np.abs(ROWS).max(axis=1), 16), (np.abs(ROWS[0]).astype(np.float32), 16)],
    "level_tables": [(SCALES, SPANS, bits, log) for bits in (2, 9) for log in (False, True)],
    "evaluate": [((4, 1000), np.dtype("float64"), TERMS), ((4, 1000), np.dtype("float64"), TERMS[:1])],
    "all_finite": [(ROWS,), (TERMS[0][1],), (ROWS[3:],)],
    "find_positions": [(WORDS, np.zeros(MARKED.sum(), dtype=np.int64))],
    "sum_gaps": [(WORDS, shift) for shift in (0, 1, 3)],
    "encode_gaps": [
        (WORDS, shift, np.zeros(40, dtype=np.uint64), np.zeros(40, dtype=np.uint64)) for shift in (0, 1, 2, 5)],
    "decode_gaps": [*(code(shift) for shift in (0, 1, 2, 5)), code(2, break_it=True)],
}
OPERATIONS = [(family, name) for family in FAMILIES for name in vars(family) if not name.startswith("_")]
SAME_BITS = {"keep_largest", "round_scale", "level_tables", "quantize_rows"} | {
    name for family, name in OPERATIONS if family is interface.MarkKernels}


def to_torch(value: Any) -> Any:
    """Return copies on the device; words are int64 there, with the same bits."""
    if isinstance(value, np.ndarray):
        return torch.asarray(value.view(np.int64).copy() if value.dtype == np.uint64 else value.copy())
    if isinstance(value, np.dtype):
        return torch.float64
    if isinstance(value, list):
        return [(c, to_torch(a)) for c, a in value]
    return value


def to_numpy(value: Any, like: Any) -> Any:
    array = value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    return array.view(np.uint64) if getattr(like, "dtype", None) == np.uint64 else array


def find_operation(family: type, name: str, array: Any) -> Callable[..., Any]:
    module = FAMILIES[family](array)
    operation = getattr(module, name, None)
    assert operation is not None, f"{name} has no implementation in {module.__name__}"
    given = list(inspect.signature(getattr(operation, "py_func", operation)).parameters)
    assert given == [key for key in inspect.signature(getattr(family, name)).parameters if key != "self"]
    return operation  # type: ignore[no-any-return]


@pytest.mark.parametrize(("family", "name"), OPERATIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_twins_agree(family: type, name: str) -> None:
    """Results and written arguments agree: selections, levels and codes to the last bit, sums to 1e-10."""
    for case in CASES[name]:
        ours = [value.copy() if isinstance(value, np.ndarray) else value for value in case]
        theirs = [to_torch(value) for value in case]
        found = find_operation(family, name, ROWS)(*ours), find_operation(family, name, torch.zeros(1))(*theirs)
        host, device = (list(f) if isinstance(f, tuple) else [f] for f in found)
        pairs = [(a, b) for a, b in zip(host, device, strict=True) if a is not None]
        is_broken = name == "decode_gaps" and found[0] == -1      # then nobody uses the marks
        pairs += [
            (a, b) for a, b in zip(ours, theirs, strict=True) if isinstance(a, np.ndarray) and not is_broken]
        for a, b in pairs:
            if name in SAME_BITS:
                np.testing.assert_array_equal(to_numpy(b, a), a)
            else:
                np.testing.assert_allclose(to_numpy(b, a), a, rtol=1e-10, atol=1e-14)


def test_every_compiled_mark_kernel_is_an_operation() -> None:
    """A compiled kernel that is added without a name in the interface, and so without a twin, is found."""
    functions = {name: getattr(value, "py_func", value) for name, value in vars(marks).items() if callable(value)}
    kernels = {name for name, function in functions.items() if function.__module__ == marks.__name__
               and not name.startswith("_")} - {"compile_kernels"}
    assert kernels == {name for family, name in OPERATIONS if family is interface.MarkKernels}


def test_a_missing_twin_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without its twin an operation fails; so does one without a case."""
    monkeypatch.delattr(torch_marks, "sum_gaps")
    with pytest.raises(AssertionError, match=r"sum_gaps has no implementation in .*torch_marks"):
        test_twins_agree(interface.MarkKernels, "sum_gaps")
    monkeypatch.delitem(CASES, "sum_gaps")
    with pytest.raises(KeyError):
        test_twins_agree(interface.MarkKernels, "sum_gaps")


def test_a_wrong_tie_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a twin that takes the last of equal entries differs."""
    from dbo.algorithms.kernels import torch_selection

    right = torch_selection.keep_largest
    monkeypatch.setattr(torch_selection, "keep_largest", lambda rows, k: right(rows.flip(1), k).flip(1))
    with pytest.raises(AssertionError):
        test_twins_agree(interface.SelectionKernels, "keep_largest")
