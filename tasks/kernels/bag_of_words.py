"""Compile the loops of the sparse linear classifier with numba: one node at a time, each parameter array read once.

A node's documents contain a part of the words only. Scores read just the rows of these words. Gradients are built word
by word, so that one pass writes both the regulariser, which covers every word, and the contribution of the documents.
"""

from typing import Any

import numpy as np
from numba import types

from dbo.tasks.arrays import Array
from dbo.tasks.kernels.compiling import broadcast, compiled, find_item, inline, intrinsic, ir, llvm, prefetch

_AHEAD = 16      # terms: how far the rows that they need are requested in advance
_ALIGNED = 16    # bytes that are written past the cache at once
_LARGE = 1 << 22      # bytes of an array that is written past the cache


@intrinsic
def _sum_lanes(
    typing: Any, width: Any, has_ridge: Any, ahead: Any, past_cache: Any,
    out: Any, p: Any, c: Any, factor: Any, own: Any, indices: Any, data: Any, first: Any, last: Any, others: Any,
    indices2: Any, data2: Any, first2: Any, last2: Any, others2: Any,
) -> Any:
    """Write Σ_k data[k] others[indices[k]], first ≤ k < last, to `width` entries of out[p] from c on.

    With `has_ridge` the sum starts from factor · own[p]. The terms of the second list come after those of the first.
    The sums stay in registers: rows have an entry per class, too few for the loops that a compiler vectorizes. With
    `past_cache` they are written without reading their memory first; the rows of `out` are then aligned.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, _, _, target, p, c, scale, given = arguments[:9]
        lists = [((indices, data, others), arguments[9:14]), ((indices2, data2, others2), arguments[14:])]
        number, itemsize = context.get_value_type(out.dtype), out.dtype.bitwidth // 8
        integer = ir.IntType(64)
        parts: list[tuple[int, Any]] = []      # the first entry of a register, and its type
        while (at := sum(vector.count for _, vector in parts)) < width.literal_value:
            lanes = next(n for n in (16, 8, 4, 2, 1) if n <= width.literal_value - at)
            parts.append((at, ir.VectorType(number, lanes)))

        def find(kind: Any, array: Any, *at: Any) -> Any:
            return find_item(context, builder, kind, array, *at)

        def place(kind: Any, array: Any, row: Any, part: tuple[int, Any]) -> Any:
            at, vector = part
            address = find(kind, array, row, builder.add(c, ir.Constant(integer, at)))
            return builder.bitcast(address, vector.as_pointer())

        def request(kind: Any, source: Any, row: Any) -> None:
            """Ask for the cache lines of a row; none is wrong."""
            for at in range(0, width.literal_value * itemsize + 63, 64):
                byte = ir.Constant(integer, min(at, width.literal_value * itemsize - 1))
                address = builder.bitcast(find(kind, source, row, c), ir.IntType(8).as_pointer())
                prefetch(builder, builder.gep(address, [byte]))

        def add(kinds: Any, given: Any) -> None:
            """Add the terms of one list."""
            (of_numbers, of_factors, of_rows), (numbers, factors, first, last, rows) = kinds, given

            def read_index(k: Any) -> Any:
                return builder.sext(builder.load(find(of_numbers, numbers, k)), integer)

            with llvm.for_range(builder, last, start=first) as loop:
                if ahead.literal_value:
                    size = context.make_array(of_numbers)(context, builder, numbers).nitems
                    later = builder.add(loop.index, ir.Constant(integer, ahead.literal_value))
                    end = builder.sub(size, ir.Constant(integer, 1))
                    later = builder.select(builder.icmp_signed("<", later, end), later, end)
                    request(of_rows, rows, read_index(later))
                row, value = read_index(loop.index), builder.load(find(of_factors, factors, loop.index))
                for part, total in zip(parts, totals, strict=True):
                    other = builder.load(place(of_rows, rows, row, part), align=itemsize)
                    product = builder.fmul(broadcast(builder, value, part[1]), other)
                    builder.store(builder.fadd(builder.load(total), product), total)

        def write_past_cache(part: tuple[int, Any], values: Any) -> None:
            """Write a register in parts of `_ALIGNED` bytes."""
            at, vector = part
            lanes = _ALIGNED // itemsize
            for first in range(0, vector.count, lanes):
                order = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [*range(first, first + lanes)])
                some = builder.shuffle_vector(values, ir.Constant(vector, ir.Undefined), order)
                write = builder.store(some, place(out, target, p, (at + first, some.type)), align=_ALIGNED)
                write.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))

        totals = [llvm.alloca_once(builder, vector) for _, vector in parts]
        for part, total in zip(parts, totals, strict=True):
            value = ir.Constant(part[1], None)
            if has_ridge.literal_value:
                value = builder.fmul(
                    broadcast(builder, scale, part[1]), builder.load(place(own, given, p, part), align=itemsize))
            builder.store(value, total)
        for kinds, values in lists:
            add(kinds, values)
        for part, total in zip(parts, totals, strict=True):
            if past_cache.literal_value:
                write_past_cache(part, builder.load(total))
            else:
                builder.store(builder.load(total), place(out, target, p, part), align=itemsize)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(
        width, has_ridge, ahead, past_cache, out, integer, integer, out.dtype, own,
        indices, data, integer, integer, others, indices2, data2, integer, integer, others2,
    ), generate


@intrinsic
def _finish_writing(typing: Any) -> Any:
    """Let other threads see what was written past the cache."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@compiled
def _is_large(out: Array) -> bool:
    """Decide whether to write an array past the cache: it would not be there any more when somebody reads it."""
    is_aligned = out.ctypes.data % _ALIGNED == 0 and out.shape[1] * out.itemsize % _ALIGNED == 0
    return is_aligned and out.size * out.itemsize >= _LARGE


@inline
def _sum_row(
    past_cache: bool, out: Array, p: int, factor: float, own: Array,
    indices: Array, data: Array, first: int, last: int, others: Array,
    indices2: Array, data2: Array, first2: int, last2: int, others2: Array,
) -> None:
    """out[p] = factor · own[p] + Σ_k data[k] others[indices[k]] + Σ_k data2[k] others2[indices2[k]]."""
    c = 0
    while c + 20 <= out.shape[1]:
        if past_cache:
            _sum_lanes(
                20, 1, 0, 1, out, p, c, factor, own, indices, data, first, last, others,
                indices2, data2, first2, last2, others2)
        else:
            _sum_lanes(
                20, 1, 0, 0, out, p, c, factor, own, indices, data, first, last, others,
                indices2, data2, first2, last2, others2)
        c += 20
    while c + 4 <= out.shape[1]:
        _sum_lanes(
            4, 1, 0, 0, out, p, c, factor, own, indices, data, first, last, others,
            indices2, data2, first2, last2, others2)
        c += 4
    while c < out.shape[1]:
        _sum_lanes(
            1, 1, 0, 0, out, p, c, factor, own, indices, data, first, last, others,
            indices2, data2, first2, last2, others2)
        c += 1


@compiled
def scores(indptr: Array, indices: Array, data: Array, w: Array, out: Array) -> None:
    """out = A w, for A (documents, words) in CSR form and w (words, classes)."""
    none = out.dtype.type(0)
    for i in range(out.shape[0]):
        c, first, last = 0, indptr[i], indptr[i + 1]
        while c + 20 <= out.shape[1]:
            _sum_lanes(20, 0, _AHEAD, 0, out, i, c, none, out, indices, data, first, last, w, indices, data, 0, 0, w)
            c += 20
        while c + 4 <= out.shape[1]:
            _sum_lanes(4, 0, _AHEAD, 0, out, i, c, none, out, indices, data, first, last, w, indices, data, 0, 0, w)
            c += 4
        while c < out.shape[1]:
            _sum_lanes(1, 0, _AHEAD, 0, out, i, c, none, out, indices, data, first, last, w, indices, data, 0, 0, w)
            c += 1


@compiled
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


@compiled
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


@compiled
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


@compiled
def gradient(indptr: Array, indices: Array, data: Array, r: Array, out: Array) -> None:
    """out = Aᵀ r, for Aᵀ (words, documents) in CSR form and r (documents, classes)."""
    none = out.dtype.type(0)
    for p in range(out.shape[0]):
        out[p, :] = 0
        first, last = indptr[p], indptr[p + 1]
        if first < last:
            _sum_row(False, out, p, none, out, indices, data, first, last, r, indices, data, 0, 0, r)


@compiled
def ridge_gradient(
    indptr: Array, indices: Array, data: Array, r: Array, ridge: Array, w: Array, out: Array
) -> None:
    """out = ridge ∘ w + Aᵀ r."""
    past_cache = _is_large(out)
    for p in range(out.shape[0]):
        _sum_row(past_cache, out, p, ridge[p], w, indices, data, indptr[p], indptr[p + 1], r, indices, data, 0, 0, r)
    _finish_writing()


@compiled
def weighted_gradient(
    indptr: Array, indices: Array, data: Array, r: Array, ridge: Array, w: Array,
    indptr2: Array, indices2: Array, data2: Array, r2: Array, out: Array,
) -> None:
    """out = ridge ∘ w + Aᵀ r + Bᵀ r2."""
    past_cache = _is_large(out)
    for p in range(out.shape[0]):
        _sum_row(
            past_cache, out, p, ridge[p], w, indices, data, indptr[p], indptr[p + 1], r,
            indices2, data2, indptr2[p], indptr2[p + 1], r2)
    _finish_writing()


@compiled
def row_products(w: Array, v: Array, factor: Array, out: Array) -> None:
    """out_p = factor_p Σ_c w_pc v_pc."""
    for p in range(out.size):
        a, b = w[p], v[p]
        total = out.dtype.type(0)
        for c in range(a.size):
            total += a[c] * b[c]
        out[p] = factor[p] * total
