"""Fused kernels for wide rows, compiled by numba: one pass over memory where NumPy arithmetic takes several.

This file holds loops and nothing else; `fused.py` decides when they run. Each works on one row, in a fixed order, so no
result depends on how rows are spread over threads. The kernels of top-k are in `selection.py`.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import extending, types
from numba.core import cgutils, registry
from numba.cpython.unsafe import numbers

from dbo.algorithms.protocol import Array

trailing_zeros: Any = numbers.trailing_zeros
carray: Any = numba.carray      # type: ignore[attr-defined]
pointer_to: Any = types.CPointer
llvm: Any = cgutils
ir = llvm.ir              # LLVM's types of the version that numba uses

_TILE = 512       # entries whose sums in float64 stay in the L1 cache, beside those of the rows that are added


def compiled(function: Callable[..., Any]) -> Any:
    """Compile with a cache on disk: beside this file, else in the user's cache folder, else without a cache."""
    try:
        return numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:
        return numba.njit(nogil=True, error_model="numpy")(function)


def find_processor() -> tuple[str, frozenset[str]]:
    """Return the name and the features of the processor that numba compiles for, in the words of LLVM."""
    _, processor, features = registry.cpu_target.target_context.codegen().magic_tuple()
    return processor, frozenset(features.split(","))


def can_expand() -> bool:
    """Decide whether the processor has AVX-512, which adds packed rows a register at a time."""
    return find_processor()[1] >= {"+avx512f", "+avx512vl"}


def intrinsic(function: Callable[..., Any]) -> Any:
    """Wrap numba's decorator with a type: the function returns a signature and a code generator."""
    return extending.intrinsic(prefer_literal=True)(function)


@intrinsic
def _at(typing: Any, address: Any, like: Any) -> Any:
    """Return an address as a pointer to entries of the type of `like`."""
    kind = pointer_to(like.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(kind))

    return kind(address, like), generate


@compiled
def _add1(total: Array, u: float, a: Array) -> None:
    for i in range(total.size):
        total[i] += u * a[i]


@compiled
def _add2(total: Array, u: float, a: Array, v: float, b: Array) -> None:
    for i in range(total.size):
        total[i] += u * a[i] + v * b[i]


@compiled
def _add4(total: Array, u: float, a: Array, v: float, b: Array, w: float, c: Array, x: float, d: Array) -> None:
    for i in range(total.size):
        total[i] += (u * a[i] + v * b[i]) + (w * c[i] + x * d[i])


@compiled
def _add_dense(total: Array, like: Array, weights: Array, rows: Array, first: int, last: int, offset: int) -> None:
    """Add the dense rows first … last − 1, several at a time: memory delivers several streams faster than one."""
    k, n = first, total.size
    while k + 4 <= last:
        _add4(
            total, weights[k], carray(_at(rows[k] + offset, like), n),
            weights[k + 1], carray(_at(rows[k + 1] + offset, like), n),
            weights[k + 2], carray(_at(rows[k + 2] + offset, like), n),
            weights[k + 3], carray(_at(rows[k + 3] + offset, like), n),
        )
        k += 4
    if k + 2 <= last:
        _add2(
            total, weights[k], carray(_at(rows[k] + offset, like), n),
            weights[k + 1], carray(_at(rows[k + 1] + offset, like), n),
        )
        k += 2
    if k < last:
        _add1(total, weights[k], carray(_at(rows[k] + offset, like), n))


@compiled
def _add_packed(total: Array, weight: float, words: Array, entries: Array, at: Any) -> Any:
    """Add the entries marked in the words, the first of which is entries[at]; return the next position."""
    for i in range(words.size):
        word = words[i]
        base = np.uint64(64 * i)
        while word != 0:
            j = base + trailing_zeros(word)
            total[j] += weight * entries[at]
            at += np.uint64(1)
            word &= word - np.uint64(1)
    return at


@intrinsic
def _add_marked(typing: Any, total: Any, i: Any, weight: Any, entries: Any, at: Any, marks: Any) -> Any:
    """Add to total[i : i + 8] the next entries where the lowest eight marks are set; reads eight entries.

    With AVX-512 the entries are expanded in a register: an expanding load is slow microcode on AMD's processors.
    Without AVX-512 this compiles, but is not meant to run.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, i, weight, packed, at, marks = arguments
        number = context.get_value_type(entries.dtype)
        lanes, doubles = ir.VectorType(number, 8), ir.VectorType(ir.DoubleType(), 8)

        def address(kind: Any, array: Any, at: Any) -> Any:
            return builder.gep(context.make_array(kind)(context, builder, array).data, [at])

        mask = builder.bitcast(builder.trunc(marks, ir.IntType(8)), ir.VectorType(ir.IntType(1), 8))
        source, zeros = address(entries, packed, at), ir.Constant(lanes, None)
        if can_expand():
            name, given = "x86.avx512.mask.expand", builder.load(
                builder.bitcast(source, lanes.as_pointer()), align=entries.dtype.bitwidth // 8)
            arguments = [given, zeros, mask]
        else:
            name, arguments = "masked.expandload", [source, mask, zeros]
        kind = ir.FunctionType(lanes, [argument.type for argument in arguments])
        function = llvm.get_or_insert_function(builder.module, kind, f"llvm.{name}.v8f{entries.dtype.bitwidth}")
        values = builder.call(function, arguments)
        if number != ir.DoubleType():
            values = builder.fpext(values, doubles)
        undefined, first = ir.Constant(doubles, ir.Undefined), ir.Constant(ir.IntType(32), 0)
        factors = builder.shuffle_vector(
            builder.insert_element(undefined, weight, first), undefined,
            ir.Constant(ir.VectorType(ir.IntType(32), 8), None),
        )
        target = builder.bitcast(address(total, sums, i), doubles.as_pointer())
        before = builder.load(target, align=8)
        builder.store(builder.fadd(before, builder.fmul(factors, values)), target, align=8)
        return context.get_dummy_value()

    return types.void(total, types.uint64, types.float64, entries, types.uint64, types.uint64), generate


@intrinsic
def count_marks(typing: Any, word: Any) -> Any:
    """Count the bits that are set."""
    return types.uint64(types.uint64), lambda context, builder, signature, arguments: builder.ctpop(arguments[0])


@compiled
def _expand_packed(total: Array, weight: float, words: Array, entries: Array, at: Any) -> Any:
    """`_add_packed`, eight entries at a time; `total` has an entry for every bit of the words."""
    for i in range(words.size):
        word = words[i]
        if at + np.uint64(72) > entries.size:      # a register would read behind the last entry
            return _add_packed(total[64 * i :], weight, words[i:], entries, at)
        for j in range(np.uint64(0), np.uint64(64), np.uint64(8)):
            some = (word >> j) & np.uint64(255)
            _add_marked(total, np.uint64(64 * i) + j, weight, entries, at, some)
            at += count_marks(some)
    return at


@compiled
def _round_to(out: Array, total: Array) -> None:
    for i in range(out.size):
        out[i] = total[i]


@compiled
def evaluate(
    like: Array, dim: int, outs: Array, ends: Array, weights: Array, rows: Array, packed: Array, counts: Array,
    expand: bool,
) -> None:
    """Compute sums of rows of the type of `like`, given by their addresses, a tile of entries at a time.

    Sum number n has the terms up to ends[n], dense ones first, and is written to outs[n]. Where packed[k] is not 0,
    rows[k] is the address of a packed row's words and packed[k] that of its counts[k] entries. `expand` is for
    processors with AVX-512; the sums are the same without it.
    """
    at = np.zeros(rows.size, dtype=np.uint64)      # how many entries of each packed row have been added
    whole = np.empty(_TILE, dtype=np.float64)
    marks = np.empty(0, dtype=np.uint64)
    for start in range(0, dim, _TILE):
        size = min(_TILE, dim - start)
        total = whole[:size]
        first = 0
        for n in range(outs.size):
            total[:] = 0
            dense = first
            while dense < ends[n] and packed[dense] == 0:
                dense += 1
            _add_dense(total, like, weights, rows, first, dense, start * like.itemsize)
            for k in range(dense, ends[n]):
                words = carray(_at(rows[k] + start // 8, marks), (size + 63) // 64)
                entries = carray(_at(packed[k], like), counts[k])
                if expand:
                    at[k] = _expand_packed(whole, weights[k], words, entries, at[k])
                else:
                    at[k] = _add_packed(total, weights[k], words, entries, at[k])
            _round_to(carray(_at(outs[n] + start * like.itemsize, like), size), total)
            first = ends[n]


@compiled
def all_finite(bits: Array, exponent: int) -> bool:
    """Decide whether no number with these bits has all bits of the exponent set: neither NaN nor inf."""
    worst: Any = bits[0] & exponent
    for i in range(bits.size):
        worst = max(worst, bits[i] & exponent)
    return bool(worst < exponent)
