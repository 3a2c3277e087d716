"""Fused kernels for wide rows, compiled by numba: one pass over memory where NumPy arithmetic takes several.

This file holds loops and nothing else; `fused.py` decides when they run. Each works on one row, in a fixed order, so no
result depends on how rows are spread over threads. The kernels of top-k are in `selection_kernels.py`.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numba
import numpy as np
from numba import extending, types
from numba.core import cgutils, registry
from numba.cpython.unsafe import numbers

from dbo.algorithms.protocol import Array

trailing_zeros: Any = numbers.trailing_zeros
leading_zeros: Any = numbers.leading_zeros
carray: Any = numba.carray      # type: ignore[attr-defined]
pointer_to: Any = types.CPointer
llvm: Any = cgutils
ir = llvm.ir              # LLVM's types of the version that numba uses

# The sums of one row: outs, ends, weights, rows, words, entries, counts. Sum number n has the terms up to ends[n] and
# is written to the address outs[n]. Term k is weights[k] times the row at the address rows[k], or times packed row
# number −1 − rows[k]. Packed row number p has its words at words[p] and its counts[p] entries at entries[p].
Terms: TypeAlias = tuple[Array, Array, Array, Array, Array, Array, Array]

_TILE = 1024      # entries of a few unpacked rows that stay in the L1 cache, a multiple of 64
_AHEAD = 8192     # bytes: how far the memory of rows and of packed entries is requested in advance
_REGISTER = 64    # bytes of a register of AVX-512
_LINE = 64        # bytes of a cache line


@cache
def _hash_kernels() -> str:
    """Return a hash of the code of this folder."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def compiled(function: Callable[..., Any]) -> Any:
    """Compile with a cache on disk: beside this file, else in the user's cache folder, else without a cache.

    numba's cache detects changes of a kernel's own file only, and kernels call those of other files. So the name of a
    cached kernel contains a hash of all of them.
    """
    function.__qualname__ += f"_{_hash_kernels()}"
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


# Entries whose sums stay in registers; with AVX-512 there are twice as many of them.
BLOCK = 64 if can_expand() else 32


def can_fuse_products() -> bool:
    """Decide whether the processor has a fused multiply-add; without it the bits of float64 sums differ."""
    return "+fma" in find_processor()[1]


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


@intrinsic
def count_marks(typing: Any, word: Any) -> Any:
    """Count the bits that are set."""
    return types.uint64(types.uint64), lambda context, builder, signature, arguments: builder.ctpop(arguments[0])


# ---- packed rows -----------------------------------------------------------------------------------------------------


@intrinsic
def _expand(typing: Any, out: Any, i: Any, entries: Any, at: Any, marks: Any) -> Any:
    """Write to out[i:] a register of entries: the next ones where the lowest marks are set, 0 elsewhere.

    Reads a whole register from entries[at] on. With AVX-512 the entries are expanded in a register: an expanding load
    is slow microcode on AMD's processors. Without AVX-512 this compiles, but is not meant to run.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, i, packed, at, marks = arguments
        itemsize = entries.dtype.bitwidth // 8
        lanes = ir.VectorType(context.get_value_type(entries.dtype), _REGISTER // itemsize)

        def address(kind: Any, array: Any, at: Any) -> Any:
            return builder.gep(context.make_array(kind)(context, builder, array).data, [at])

        bits = builder.trunc(marks, ir.IntType(lanes.count))
        mask = builder.bitcast(bits, ir.VectorType(ir.IntType(1), lanes.count))
        source, zeros = address(entries, packed, at), ir.Constant(lanes, None)
        if can_expand():
            given = builder.load(builder.bitcast(source, lanes.as_pointer()), align=itemsize)
            # Without this LLVM merges the two instructions into an expanding load.
            given = builder.asm(ir.FunctionType(lanes, [lanes]), "", "=v,0", [given], side_effect=False)
            name, arguments = "x86.avx512.mask.expand", [given, zeros, mask]
        else:
            name, arguments = "masked.expandload", [source, mask, zeros]
        kind = ir.FunctionType(lanes, [argument.type for argument in arguments])
        full_name = f"llvm.{name}.v{lanes.count}f{entries.dtype.bitwidth}"
        values = builder.call(llvm.get_or_insert_function(builder.module, kind, full_name), arguments)
        builder.store(values, builder.bitcast(address(out, target, i), lanes.as_pointer()), align=itemsize)
        return context.get_dummy_value()

    return types.void(out, types.uint64, entries, types.uint64, types.uint64), generate


def _prefetch(builder: Any, address: Any) -> None:
    """Ask for the cache line of an address, in the L2 cache; none is wrong."""
    place, option = builder.inttoptr(address, ir.IntType(8).as_pointer()), ir.IntType(32)
    options = [ir.Constant(option, value) for value in (0, 2, 1)]      # to read, into L2, data
    kind = ir.FunctionType(ir.VoidType(), [place.type, option, option, option])
    builder.call(llvm.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0"), [place, *options])


@intrinsic
def _count_lanes(typing: Any, like: Any) -> Any:
    """Return how many entries a register of AVX-512 holds, as a constant of the compiler."""
    lanes = ir.Constant(ir.IntType(64), 8 * _REGISTER // like.dtype.bitwidth)
    return types.uint64(like), lambda context, builder, signature, arguments: lanes


@intrinsic
def _request(typing: Any, array: Any, at: Any) -> Any:
    """Ask for the cache line of array[at]."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(array)(context, builder, arguments[0]).data
        _prefetch(builder, builder.ptrtoint(builder.gep(data, [arguments[1]]), ir.IntType(64)))
        return context.get_dummy_value()

    return types.void(array, types.uint64), generate


@compiled
def _unpack(out: Array, words: Array, entries: Array, at: Any) -> Any:
    """Write the marked entries, the first of which is entries[at], and zeros between; return the next position."""
    out[: 64 * words.size] = 0
    for i in range(words.size):
        word = words[i]
        base = np.uint64(64 * i)
        while word != 0:
            out[base + trailing_zeros(word)] = entries[at]
            at += np.uint64(1)
            word &= word - np.uint64(1)
    return at


@compiled
def _unpack_fast(out: Array, words: Array, entries: Array, at: Any) -> Any:
    """`_unpack`, a register of entries at a time."""
    step = _count_lanes(out)
    mask = (np.uint64(1) << step) - np.uint64(1)
    for i in range(words.size):
        word = words[i]
        if at + np.uint64(64) + step > entries.size:      # a register would read behind the last entry
            return _unpack(out[64 * i :], words[i:], entries, at)
        _request(entries, at + np.uint64(_AHEAD // entries.itemsize))
        for j in range(np.uint64(0), np.uint64(64), step):
            some = (word >> j) & mask
            _expand(out, np.uint64(64 * i) + j, entries, at, some)
            at += count_marks(some)
    return at


# ---- sums ------------------------------------------------------------------------------------------------------------


@intrinsic
def sum_entries(
    typing: Any, count: Any, double: Any, like: Any, out: Any, rows: Any, weights: Any, first: Any, last: Any,
    offset: Any, ahead: Any,
) -> Any:
    """Write Σ_k weights[k] · row k of a few entries to the address `out`; rows[k] is an address, first ≤ k < last.

    The sums stay in registers, in float64 if `double`. Sums of float32 rows then round each product and its addition
    once, where the processor can. Memory is requested `ahead` bytes in advance. These are vector
    instructions: a compiler that finds loops to vectorize would give up where `out` is the memory of one of the rows.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, _, target, addresses, factors, first, last, offset, _ = arguments
        number, itemsize = context.get_value_type(like.dtype), like.dtype.bitwidth // 8
        kind = ir.DoubleType() if double.literal_value else number
        # Half a register of AVX-512: its conversions take twice the time of these.
        width = min(count.literal_value, 4 if kind == ir.DoubleType() else 8)
        lanes, totals = ir.VectorType(number, width), ir.VectorType(kind, width)
        parts = range(0, count.literal_value * itemsize, width * itemsize)

        def find(address: Any, part: int) -> Any:
            return builder.add(builder.add(address, offset), ir.Constant(ir.IntType(64), part))

        def place(address: Any, part: int) -> Any:
            return builder.inttoptr(find(address, part), lanes.as_pointer())

        def item(kind: Any, array: Any, k: Any) -> Any:
            return builder.load(builder.gep(context.make_array(kind)(context, builder, array).data, [k]))

        def add_product(weight: Any, values: Any, total: Any) -> Any:
            if kind == number or not can_fuse_products():
                return builder.fadd(total, builder.fmul(weight, values))
            fused = ir.FunctionType(totals, [totals] * 3)
            name = f"llvm.fma.v{width}f64"
            return builder.call(llvm.get_or_insert_function(builder.module, fused, name), [weight, values, total])

        for line in range(0, count.literal_value * itemsize, 64) if ahead.literal_value else ():
            _prefetch(builder, find(target, ahead.literal_value + line))
        sums = [llvm.alloca_once(builder, totals) for _ in parts]
        for total in sums:
            builder.store(ir.Constant(totals, None), total)
        with llvm.for_range(builder, last, start=first) as loop:
            row, weight = item(rows, addresses, loop.index), item(weights, factors, loop.index)
            if kind != ir.DoubleType():
                weight = builder.fptrunc(weight, kind)
            undefined = ir.Constant(totals, ir.Undefined)
            weight = builder.shuffle_vector(
                builder.insert_element(undefined, weight, ir.Constant(ir.IntType(32), 0)),
                undefined, ir.Constant(ir.VectorType(ir.IntType(32), width), None),
            )
            for line in range(0, count.literal_value * itemsize, 64) if ahead.literal_value else ():
                _prefetch(builder, find(row, ahead.literal_value + line))
            for part, total in zip(parts, sums, strict=True):
                values = builder.load(place(row, part), align=itemsize)
                if kind != number:
                    values = builder.fpext(values, totals)
                builder.store(add_product(weight, values, builder.load(total)), total)
        for part, total in zip(parts, sums, strict=True):
            result = builder.load(total)
            if kind != number:
                result = builder.fptrunc(result, lanes)
            builder.store(result, place(target, part), align=itemsize)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(count, double, like, integer, rows, weights, integer, integer, integer, ahead), generate


@compiled
def _is_exact(weights: Array, first: int, last: int) -> bool:
    """Decide whether a sum is ±a ± b: rounded in float64 and then in float32, it has the bits of a sum in float32."""
    return last - first <= 2 and bool(np.all(np.abs(weights[first:last]) == 1))


@compiled
def _sum_tile(
    like: Array, outs: Array, ends: Array, exact: Array, rows: Array, weights: Array, size: int, offset: int,
    is_packed: bool,
) -> None:
    """Write every sum of a tile, a block of entries after the other: the next sum finds them in the L1 cache."""
    whole = size // BLOCK * BLOCK
    for i in range(0, whole, BLOCK):
        first, at = 0, i * like.itemsize
        for n in range(outs.size):
            if exact[n] and is_packed:
                sum_entries(BLOCK, 0, like, outs[n] + offset, rows, weights, first, ends[n], at, _AHEAD)
            elif exact[n]:
                sum_entries(BLOCK, 0, like, outs[n] + offset, rows, weights, first, ends[n], at, 0)
            elif is_packed:      # without packed rows the processor asks for memory early enough by itself
                sum_entries(BLOCK, 1, like, outs[n] + offset, rows, weights, first, ends[n], at, _AHEAD)
            else:
                sum_entries(BLOCK, 1, like, outs[n] + offset, rows, weights, first, ends[n], at, 0)
            first = ends[n]
    for i in range(whole, size):
        first = 0
        for n in range(outs.size):
            sum_entries(1, 1, like, outs[n] + offset, rows, weights, first, ends[n], i * like.itemsize, 0)
            first = ends[n]


@compiled
def prepare(like: Array, terms: Terms) -> tuple[Array, Array, Array, Array]:
    """Return what `evaluate_tiles` needs besides the terms: counts of entries, unpacked rows, exactness, addresses."""
    outs, ends, weights, rows, words, _, _ = terms
    # What a thread writes all the time lies in cache lines of its own, away from the memory of other threads.
    memory = np.empty(words.size * _TILE + 4 * _LINE, dtype=like.dtype)
    aligned = -memory.ctypes.data % _LINE // like.itemsize + _LINE
    unpacked = memory[aligned : aligned + words.size * _TILE].reshape(words.size, _TILE)
    at = np.zeros(words.size + 2 * _LINE, dtype=np.uint64)[_LINE : _LINE + words.size]      # entries added so far
    places = np.empty(rows.size + 2 * _LINE, dtype=np.int64)[_LINE : _LINE + rows.size]
    exact = np.empty(outs.size, dtype=np.bool_)
    for n in range(outs.size):
        exact[n] = _is_exact(weights, ends[n - 1] if n else 0, ends[n])
    return at, unpacked, exact, places


@compiled
def evaluate_tiles(
    like: Array, terms: Terms, prepared: tuple[Array, Array, Array, Array], first: int, last: int, expand: bool
) -> None:
    """Compute the sums from entry `first`, a multiple of the tile, to entry `last`; to be called in this order."""
    outs, ends, weights, rows, words, entries, counts = terms
    at, unpacked, exact, places = prepared
    marks = np.empty(0, dtype=np.uint64)
    for start in range(first, last, _TILE):
        size, offset = min(_TILE, last - start), start * like.itemsize
        for p in range(words.size):
            here = carray(_at(words[p] + start // 8, marks), (size + 63) // 64)
            given = carray(_at(entries[p], like), counts[p])
            _request(here, np.uint64(_LINE))
            if expand:
                at[p] = _unpack_fast(unpacked[p], here, given, at[p])
            else:
                at[p] = _unpack(unpacked[p], here, given, at[p])
        for k in range(rows.size):
            if rows[k] < 0:
                places[k] = unpacked[-1 - rows[k]].ctypes.data
                continue
            places[k] = rows[k] + offset
        _sum_tile(like, outs, ends, exact, places, weights, size, offset, words.size > 0)


@compiled
def evaluate(like: Array, dim: int, terms: Terms, expand: bool) -> None:
    """Compute sums of rows of the type of `like`, given by their addresses, a tile of entries at a time.

    A tile of a packed row is unpacked once for all sums. `expand` is for processors with AVX-512; the sums are the same
    without it.
    """
    evaluate_tiles(like, terms, prepare(like, terms), 0, dim, expand)


@compiled
def all_finite(bits: Array, exponent: int) -> bool:
    """Decide whether no number with these bits has all bits of the exponent set: neither NaN nor inf."""
    worst: Any = bits[0] & exponent
    for i in range(bits.size):
        worst = max(worst, bits[i] & exponent)
    return bool(worst < exponent)
