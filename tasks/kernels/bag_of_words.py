"""Compile the loops of the sparse linear classifier with numba: one node at a time, each parameter array read once.

A node's documents contain a part of the words only. Scores read just the rows of these words. Gradients are built word
by word, so that one pass writes both the regulariser, which covers every word, and the contribution of the documents.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import extending, types
from numba.core import cgutils

from dbo.tasks.arrays import Array


def _compile(function: Callable[..., Any]) -> Any:
    """Compile with a cache on disk, in the user's cache folder if this one is read-only, else without a cache."""
    try:
        return numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:
        return numba.njit(nogil=True, error_model="numpy")(function)


def _intrinsic(function: Callable[..., Any]) -> Any:
    """Declare a function that writes its own LLVM code; numba has no types for its calls."""
    return extending.intrinsic(prefer_literal=True)(function)


_llvm: Any = cgutils
_ir = _llvm.ir


@_intrinsic
def _add_lanes(
    typing: Any, lanes: Any, row: Any, c: Any, indices: Any, data: Any, first: Any, last: Any, others: Any
) -> Any:
    """Add Σ_k data[k] others[indices[k]] to a few entries of the row from c on, with the sums in a register.

    Rows have an entry per class: too few for the loops that a compiler vectorizes.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, target, c, numbers, factors, first, last, source = arguments
        number, itemsize = context.get_value_type(row.dtype), row.dtype.bitwidth // 8
        vector = _ir.VectorType(number, lanes.literal_value)

        def find(kind: Any, array: Any, *at: Any) -> Any:
            made = context.make_array(kind)(context, builder, array)
            return _llvm.get_item_pointer(context, builder, kind, made, list(at), wraparound=False)

        def place(address: Any) -> Any:
            return builder.bitcast(address, vector.as_pointer())

        total = _llvm.alloca_once(builder, vector)
        own = place(find(row, target, c))
        builder.store(builder.load(own, align=itemsize), total)
        with _llvm.for_range(builder, last, start=first) as loop:
            index = builder.sext(builder.load(find(indices, numbers, loop.index)), _ir.IntType(64))
            undefined = _ir.Constant(vector, _ir.Undefined)
            factor = builder.shuffle_vector(
                builder.insert_element(
                    undefined, builder.load(find(data, factors, loop.index)), _ir.Constant(_ir.IntType(32), 0)),
                undefined, _ir.Constant(_ir.VectorType(_ir.IntType(32), lanes.literal_value), None),
            )
            other = builder.load(place(find(others, source, index, c)), align=itemsize)
            builder.store(builder.fadd(builder.load(total), builder.fmul(factor, other)), total)
        builder.store(builder.load(total), own, align=itemsize)
        return context.get_dummy_value()

    return types.void(lanes, row, types.int64, indices, data, types.int64, types.int64, others), generate


@_compile
def _add_rows(row: Array, indices: Array, data: Array, first: int, last: int, others: Array) -> None:
    """row += Σ_k data[k] others[indices[k]] over first ≤ k < last."""
    c, end = 0, row.size
    while c + 16 <= end:
        _add_lanes(16, row, c, indices, data, first, last, others)
        c += 16
    while c + 4 <= end:
        _add_lanes(4, row, c, indices, data, first, last, others)
        c += 4
    while c < end:
        _add_lanes(1, row, c, indices, data, first, last, others)
        c += 1


@_compile
def scores(indptr: Array, indices: Array, data: Array, w: Array, out: Array) -> None:
    """out = A w, for A (documents, words) in CSR form and w (words, classes)."""
    for i in range(out.shape[0]):
        row = out[i]
        row[:] = 0
        _add_rows(row, indices, data, indptr[i], indptr[i + 1], w)


@_compile
def residual_in_place(s: Array, labels: Array, weight: float) -> None:
    """Replace scores by weight · (softmax − label)."""
    for i in range(s.shape[0]):
        row = s[i]
        top = row.max()
        total = row.dtype.type(0)
        for c in range(row.size):
            row[c] = np.exp(row[c] - top)
            total += row[c]
        factor = weight / total
        for c in range(row.size):
            row[c] *= factor
        row[labels[i]] -= weight


@_compile
def curvature_in_place(s: Array, v: Array, weight: float) -> None:
    """Replace v by weight · p ∘ (v − ⟨p, v⟩), p the softmax of the scores s; s is overwritten."""
    for i in range(s.shape[0]):
        row, u = s[i], v[i]
        top = row.max()
        total, inner = row.dtype.type(0), row.dtype.type(0)
        for c in range(row.size):
            row[c] = np.exp(row[c] - top)
            total += row[c]
            inner += row[c] * u[c]
        inner /= total
        factor = weight / total
        for c in range(row.size):
            u[c] = factor * row[c] * (u[c] - inner)


@_compile
def sum_losses(s: Array, labels: Array) -> float:
    """Return the sum of the documents' cross-entropies."""
    total = 0.0
    for i in range(s.shape[0]):
        row = s[i]
        top = row.max()
        inner = row.dtype.type(0)
        for c in range(row.size):
            inner += np.exp(row[c] - top)
        total += np.log(inner) + top - row[labels[i]]
    return total


@_compile
def gradient(indptr: Array, indices: Array, data: Array, r: Array, out: Array) -> None:
    """out = Aᵀ r, for Aᵀ (words, documents) in CSR form and r (documents, classes)."""
    for p in range(out.shape[0]):
        row = out[p]
        row[:] = 0
        if indptr[p] < indptr[p + 1]:
            _add_rows(row, indices, data, indptr[p], indptr[p + 1], r)


@_compile
def ridge_gradient(
    indptr: Array, indices: Array, data: Array, r: Array, ridge: Array, w: Array, out: Array
) -> None:
    """out = ridge ∘ w + Aᵀ r."""
    for p in range(out.shape[0]):
        row, own, factor = out[p], w[p], ridge[p]
        for c in range(row.size):
            row[c] = factor * own[c]
        if indptr[p] < indptr[p + 1]:
            _add_rows(row, indices, data, indptr[p], indptr[p + 1], r)


@_compile
def weighted_gradient(
    indptr: Array, indices: Array, data: Array, r: Array, ridge: Array, w: Array,
    indptr2: Array, indices2: Array, data2: Array, r2: Array, out: Array,
) -> None:
    """out = ridge ∘ w + Aᵀ r + Bᵀ r2."""
    for p in range(out.shape[0]):
        row, own, factor = out[p], w[p], ridge[p]
        for c in range(row.size):
            row[c] = factor * own[c]
        if indptr[p] < indptr[p + 1]:
            _add_rows(row, indices, data, indptr[p], indptr[p + 1], r)
        if indptr2[p] < indptr2[p + 1]:
            _add_rows(row, indices2, data2, indptr2[p], indptr2[p + 1], r2)


@_compile
def row_products(w: Array, v: Array, factor: Array, out: Array) -> None:
    """out_p = factor_p Σ_c w_pc v_pc."""
    for p in range(out.size):
        a, b = w[p], v[p]
        total = out.dtype.type(0)
        for c in range(a.size):
            total += a[c] * b[c]
        out[p] = factor[p] * total
