"""Evaluate linear combinations of wide rows lazily: one pass over memory per update, written as the paper writes it.

NumPy takes a pass and a fresh array per operator, which dominates a round where rows have megabytes. So the engine
hands wide rows to algorithms as `Rows`. Sums, differences and products with numbers build a list of terms, each a
coefficient and an array. The list is evaluated in one pass when somebody needs the entries: an oracle, a compressor, a
packet, any other function, or the end of the round. Sums run in float64 and are rounded once. Operands are never
written into; only the memory of rows that nothing refers to any more is used again.

An evaluation includes the intermediate sums that a variable still refers to, because they are needed later. All of them
are computed in the same pass. Temporaries of an expression are not stored.
"""

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias, TypeVar
from weakref import ReferenceType, ref

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from dbo.algorithms.kernels import fused
from dbo.algorithms.protocol import Array

T = TypeVar("T")

_MAX_TERMS = 64      # a longer sum is evaluated at once: its terms would keep too much memory

Coefficient: TypeAlias = Any      # a float, or (nodes, 1) floats


@dataclass(frozen=True, slots=True)
class RowSum:
    """Σ_k w_k r_k for each row of a block, not yet computed: the weights and the rows, dense or packed."""

    terms: tuple[tuple[tuple[float, Any], ...], ...]
    dim: int
    dtype: Any


class _Sum:
    """Σ_k c_k a_k, or the array that it has become."""

    __slots__ = ("array", "dtype", "handle", "shape", "size", "terms")

    def __init__(self, shape: tuple[int, int], dtype: Any, terms: "tuple[Term, ...]", array: Any = None) -> None:
        self.shape, self.dtype, self.terms, self.array = shape, dtype, terms, array
        self.size: int = sum(source.size if isinstance(source, _Sum) else 1 for _, source in terms) if terms else 1
        self.handle: ReferenceType[Rows] | None = None

    @property
    def is_needed(self) -> bool:
        """Decide whether to store this sum where another one includes it: if a variable still refers to it.

        A message or a neighbour sum alone is not stored, because most algorithms use it once.
        """
        is_visible = self.handle is not None and self.handle() is not None
        return is_visible and not (len(self.terms) == 1 and isinstance(self.terms[0][1], RowSum))

    def keep(self, array: Any) -> None:
        """Store the result and release the terms."""
        self.array, self.terms, self.size = array, (), 1


Term: TypeAlias = "tuple[Coefficient, _Sum | RowSum]"


class Rows(NDArrayOperatorsMixin):
    """Wide rows (nodes, dim) with lazy arithmetic; everything else treats them as the array that they stand for."""

    __slots__ = ("__weakref__", "_sum")

    def __init__(self, total: _Sum) -> None:
        self._sum = total
        total.handle = ref(self)

    @property
    def shape(self) -> tuple[int, int]:
        return self._sum.shape

    @property
    def dtype(self) -> Any:
        return self._sum.dtype

    ndim = 2

    @property
    def is_compiled(self) -> bool:
        """Decide whether compiled kernels evaluate these rows: NumPy rows, not tensors."""
        return isinstance(self.dtype, np.dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, at: Any) -> Any:
        return unwrap(self)[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        raise TypeError("rows cannot be changed in place; compute new ones")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(unwrap(self), dtype=dtype, copy=copy)

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        import array_api_compat

        return array_api_compat.array_namespace(unwrap(self))

    def __getattr__(self, name: str) -> Any:
        return getattr(unwrap(self), name)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method == "__call__" and options.keys() <= {"out"} and ufunc in _LAZY:
            total = _LAZY[ufunc](*inputs)
            if total is not None:
                return total
        options.pop("out", None)      # `y -= g` gives new rows: the old ones belong to the state
        if not self.is_compiled:
            return wrap(_OPERATORS.get(ufunc.__name__, ufunc)(*map(unwrap, inputs), **options))
        return wrap(getattr(ufunc, method)(*map(unwrap, inputs), **options))

    def __array_function__(self, function: Any, kinds: Any, arguments: Any, options: Any) -> Any:
        return wrap(function(*_unwrap_all(arguments), **_unwrap_all(options)))

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, arguments: Any = (), options: Any = None) -> Any:
        return wrap(function(*_unwrap_all(arguments), **_unwrap_all(options or {})))


def wrap(value: Any) -> Any:
    """Return wide rows with lazy arithmetic; anything else as it is."""
    return Rows(_Sum(tuple(value.shape), value.dtype, (), value)) if fused.is_large(value) else value


def wrap_sum(total: RowSum) -> Rows:
    """Return rows that are a sum for each row."""
    return Rows(_Sum((len(total.terms), total.dim), total.dtype, ((1.0, total),)))


def unwrap(value: Any) -> Any:
    """Return the array that rows stand for; anything else as it is."""
    if not isinstance(value, Rows):
        return value
    if value._sum.array is None:
        _evaluate([value._sum])
    return value._sum.array


def unwrap_rows(values: Sequence[Any]) -> list[Any]:
    """Unwrap several values; what is pending is evaluated together."""
    _evaluate([value._sum for value in values if isinstance(value, Rows)])
    return [unwrap(value) for value in values]


def map_difference(rows: Rows, function: Callable[[int, Array, Array, Any], T]) -> list[T] | None:
    """Return function(i, a_i, b_i, terms) of every row of rows that are a − b, pending; None if they are not.

    The terms are what is pending of a_i and b_i: the function evaluates them. None if nothing is.
    """
    terms = rows._sum.terms
    if len(terms) != 2 or not all(isinstance(source, _Sum) for _, source in terms):
        return None
    (c, a), (e, b) = terms
    if not (isinstance(c, float) and isinstance(e, float) and (c, e) == (1.0, -1.0)):
        return None
    assert isinstance(a, _Sum)
    assert isinstance(b, _Sum)
    group = [*_list_pending([a, b])]      # of one shape, that of a and b

    results, programs = _plan(group)
    v, reference = results.get(a, a.array), results.get(b, b.array)

    def visit(i: int, pending: Any = None) -> T:
        return function(i, v[i], reference[i], pending)

    found: list[T] = fused.evaluate(programs, visit) if programs else fused.map_rows(visit, rows.shape[0])
    for total, array in results.items():
        total.keep(array)
    return found


def _unwrap_all(values: Any) -> Any:
    if isinstance(values, dict):
        return {name: _unwrap_all(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(_unwrap_all(value) for value in values)
    return unwrap(values)


# ---- building --------------------------------------------------------------------------------------------------------


def _add(a: Any, b: Any) -> Rows | None:
    return _combine(1.0, a, 1.0, b)


def _subtract(a: Any, b: Any) -> Rows | None:
    return _combine(1.0, a, -1.0, b)


def _combine(c: float, a: Any, e: float, b: Any) -> Rows | None:
    """Return c a + e b as pending rows; None if that is not a sum of rows of one kind."""
    first, second = _as_sum(a), _as_sum(b)
    if first is None or second is None or first.shape != second.shape or first.dtype != second.dtype:
        return None
    total = Rows(_Sum(first.shape, first.dtype, ((c, first), (e, second))))
    if total._sum.size > _MAX_TERMS:
        unwrap(total)
    return total


def _multiply(a: Any, b: Any) -> Rows | None:
    rows, factor = (a, b) if isinstance(a, Rows) else (b, a)
    number = _as_coefficient(factor, rows)
    if number is None:
        return None
    is_zero = isinstance(number, float) and number == 0.0 and rows.is_compiled
    return Rows(_Sum(rows.shape, rows.dtype, () if is_zero else ((number, rows._sum),)))


def _divide(a: Any, b: Any) -> Rows | None:
    return _multiply(a, 1.0 / b) if isinstance(a, Rows) and isinstance(b, Real) and b else None


def _negate(a: Any) -> Rows | None:
    return _multiply(-1.0, a)


_OPERATORS = {      # for tensors: Python's operators by the names of NumPy's functions
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.truediv,
    "negative": operator.neg, "power": operator.pow, "absolute": abs, "matmul": operator.matmul,
    "less": operator.lt, "less_equal": operator.le, "greater": operator.gt, "greater_equal": operator.ge,
    "equal": operator.eq, "not_equal": operator.ne, "floor_divide": operator.floordiv, "remainder": operator.mod,
}
_LAZY: dict[Any, Callable[..., Rows | None]] = {
    np.add: _add, np.subtract: _subtract, np.multiply: _multiply, np.divide: _divide, np.negative: _negate,
}


def _as_sum(value: Any) -> _Sum | None:
    if isinstance(value, Rows):
        return value._sum
    return _Sum(tuple(value.shape), value.dtype, (), value) if fused.is_large(value) else None


def _as_coefficient(value: Any, rows: Rows) -> Coefficient | None:
    """Return a number as a float, and (nodes, 1) numbers as they are; None for anything else."""
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, np.ndarray) and value.shape == (rows.shape[0], 1) and value.dtype == rows.dtype:
        return value
    return None


# ---- evaluation ------------------------------------------------------------------------------------------------------


def _evaluate(sums: Iterable[_Sum]) -> None:
    """Compute pending sums, and the visible ones that they are made of, in one pass for each shape."""
    groups: dict[Any, list[_Sum]] = {}
    for total in _list_pending(sums):
        groups.setdefault((total.shape, total.dtype), []).append(total)
    for group in groups.values():
        for total, array in _compute(group).items():
            total.keep(array)


def _list_pending(sums: Iterable[_Sum]) -> dict[_Sum, None]:
    """Return pending sums and the visible ones that they need, each after those that it needs."""
    pending: dict[_Sum, None] = {}
    for total in sums:
        if total.array is None:
            _collect(total, pending)
            pending[total] = None
    return pending


def _compute(group: list[_Sum]) -> dict[_Sum, Any]:
    """Return the arrays of sums of one shape, in an order in which each may use those before it."""
    if isinstance(group[0].dtype, np.dtype):
        results, programs = _plan(group)
        fused.evaluate(programs)
        return results
    from dbo.algorithms.kernels import torch_sums  # imports torch, which is slow

    results = {}
    for total in group:
        results[total] = torch_sums.evaluate(total.shape, total.dtype, list(_flatten(total, 1.0, results)))
        total.keep(results[total])      # what only this sum referred to is free before the next one is allocated
    return results


def _plan(group: list[_Sum]) -> tuple[dict[_Sum, Array], list[tuple[Array, list[tuple[Coefficient, Any]]]]]:
    """Return the arrays that sums of NumPy rows will be written to, and the sums for `fused.evaluate`."""
    results: dict[_Sum, Array] = {}
    programs = []
    for total in group:
        free = _find_unused(total)      # before the lists of terms refer to everything
        terms = list(_flatten(total, 1.0, results))
        results[total] = np.empty(total.shape, total.dtype) if free is None else free
        programs.append((results[total], terms))
    return results, programs


def _find_unused(total: _Sum) -> Array | None:
    """Return the memory of a term that nothing but this sum refers to; None if there is none.

    Its entries cannot be read again, so the sum may replace them. That saves a buffer and the reading of its memory.
    """
    for _, source in total.terms:
        if not isinstance(source, _Sum) or sys.getrefcount(source) != _REFERENCES + 1:      # and `source`
            continue
        if source.array is None:
            found = _find_unused(source)
        else:
            is_free = sys.getrefcount(source.array) == _REFERENCES and source.array.base is None
            found = source.array if is_free and source.array.flags.writeable else None
        if found is not None:
            return found
    return None


_REFERENCES = 2      # that `sys.getrefcount` finds for an object in one place: the place, and its own argument


def _collect(total: _Sum, pending: dict[_Sum, None]) -> None:
    """Add the visible pending sums that a sum needs."""
    for _, source in total.terms:
        if isinstance(source, _Sum) and source.array is None and source not in pending:
            _collect(source, pending)
            if source.is_needed:
                pending[source] = None


def _flatten(total: _Sum, factor: Coefficient, results: dict[_Sum, Any]) -> Iterable[tuple[Coefficient, Any]]:
    """Return the terms of a sum over arrays: those that exist, and those that the evaluation computes before it."""
    for coefficient, source in total.terms:
        c = factor * coefficient
        if isinstance(source, RowSum):
            yield c, source
        elif source.array is not None:
            yield c, source.array
        elif source in results:
            yield c, results[source]
        else:
            yield from _flatten(source, c, results)
