"""Exact top-k of a wide residual, compiled by numba in two forms that give the same bits.

A regular sample brackets the k-th largest magnitude, one pass over the row packs what is not below the bracket, the
threshold is found among the few entries within it, and a pass over what was packed takes out the rest. A bracket that
missed is widened: a sample can cost time, never an entry.

The scalar form goes from mark to mark. The vector form takes a register of entries at a time and leaves the packing to
LLVM's compressing stores and expanding loads: one instruction each with AVX-512, a branch per entry without. All of
this is in one file because numba's cache follows the changes of one file.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import extending
from numba.core import cgutils, registry, types
from numba.cpython.unsafe import numbers

from dbo.algorithms.kernels.compiled import compiled
from dbo.algorithms.protocol import Array

llvm: Any = cgutils
ir = llvm.ir              # LLVM's types as numba has them: of the version that it speaks
tuple_of: Any = types.UniTuple
trailing_zeros: Any = numbers.trailing_zeros

_CHUNK = 2048     # entries that stay in the first cache between two loops over them
_EIGHT_TO_ONE, _TOP = np.uint64(0x0102040810204080), np.uint64(56)
_REGISTER = 64    # bytes


def intrinsic(function: Callable[..., Any]) -> Any:
    """numba's, with a type: (typing, types of the arguments) answers with a signature and what writes the code."""
    return extending.intrinsic(function)


class Form(NamedTuple):
    """The two passes of a selection."""

    gather: Any
    settle: Any


@cache
def fastest() -> Form:
    """The form for the processor that numba compiles for.

    AMD's Zen has AVX-512, but its compressing store is a long microprogram: the scalar form there too.
    """
    _, processor, features = registry.cpu_target.target_context.codegen().magic_tuple()
    return VECTOR if "+avx512f" in features.split(",") and not processor.startswith("znver") else SCALAR


@compiled
def sample(a: Array, b: Array, stride: int, out: Array) -> None:
    """|a − b| at regular places."""
    for i in range(out.size):
        out[i] = abs(a[i * stride] - b[i * stride])


# ---- scalar form -----------------------------------------------------------------------------------------------------


@compiled
def gather(
    a: Array, b: Array, low: float, high: float, words: Array, entries: Array, found: Array
) -> tuple[Any, Any, bool]:
    """Packs all of a − b that is not below `low` in magnitude, and finds the magnitudes up to `high` among it.

    How many entries were packed (−1: more than there is room for), how many magnitudes were found, and whether a NaN is
    among the entries. `low` is above zero.
    """
    at: Any = np.uint64(0)
    inside: Any = np.uint64(0)
    broken = False
    r = np.empty(_CHUNK, dtype=a.dtype)
    mark = np.zeros(_CHUNK, dtype=np.uint8)
    marks = mark.view(np.uint64)
    for start in range(0, a.size, _CHUNK):
        if at + _CHUNK > entries.size:
            return np.int64(-1), np.int64(0), False
        p, q = a[start : start + _CHUNK], b[start : start + _CHUNK]    # views: an offset would cost the vector units
        for i in range(p.size):
            r[i] = p[i] - q[i]
        for i in range(p.size):
            mark[i] = np.uint8(0) if abs(r[i]) < low else np.uint8(1)
        for i in range(p.size, _CHUNK):
            mark[i] = 0
        here = words[start // 64 :]
        for i in range((p.size + 63) // 64):
            word = np.uint64(0)
            for j in range(8):    # the product moves the marks of eight bytes to the bits of the highest byte
                word |= (marks[8 * i + j] * _EIGHT_TO_ONE >> _TOP) << np.uint64(8 * j)
            here[i] = word
            base = np.uint64(64 * i)
            while word != 0:
                v = r[base + trailing_zeros(word)]
                entries[at] = v
                at += np.uint64(1)
                found[inside] = abs(v)
                inside += np.uint64(abs(v) <= high)
                broken |= v != v
                word &= word - np.uint64(1)
    return np.int64(at), np.int64(inside), broken


@compiled
def _settle_some(
    b: Array, base: Any, least: float, ties: int, word: Any, entries: Array, read: Any, at: Any
) -> tuple[Any, Any, Any, int]:
    """Settles the marks of one word, whose entries are at `read` and go to `at`: what is kept, and where that ends."""
    kept = word
    while word != 0:
        bit = trailing_zeros(word)
        v = entries[read]
        read += np.uint64(1)
        word &= word - np.uint64(1)
        if abs(v) > least or (abs(v) == least and ties > 0):
            if abs(v) == least:
                ties -= 1
            entries[at] = v
            at += np.uint64(1)
            b[base + bit] = b[base + bit] + v
        else:
            kept ^= np.uint64(1) << bit
    return kept, read, at, ties


@compiled
def settle(b: Array, least: float, ties: int, words: Array, entries: Array) -> int:
    """Of a packed q keeps what is above `least`, and of what equals it the first `ties`; b += q. How many are kept."""
    at: Any = np.uint64(0)
    read: Any = np.uint64(0)
    for i in range(words.size):
        words[i], read, at, ties = _settle_some(b, np.uint64(64 * i), least, ties, words[i], entries, read, at)
    return int(at)


SCALAR = Form(gather, settle)


# ---- vector form -----------------------------------------------------------------------------------------------------


class Lanes:
    """LLVM's instructions on one register of the numbers that an array holds, in the words of this file."""

    def __init__(self, context: Any, builder: Any, array: Any) -> None:
        self.context, self.builder = context, builder
        self.number = context.get_value_type(array.dtype)
        self.count = lanes(array)
        self.vector = ir.VectorType(self.number, self.count)
        self.mask = ir.VectorType(ir.IntType(1), self.count)
        self.name = f"v{self.count}f{8 * _REGISTER // self.count}"

    def _call(self, name: str, result: Any, *arguments: Any) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        function = llvm.get_or_insert_function(self.builder.module, kind, f"llvm.{name}.{self.name}")
        return self.builder.call(function, arguments)

    def place(self, kind: Any, array: Any, at: Any) -> Any:
        """The address of array[at]."""
        return self.builder.gep(self.context.make_array(kind)(self.context, self.builder, array).data, [at])

    def _whole(self, place: Any) -> Any:
        return self.builder.bitcast(place, self.vector.as_pointer())

    def load(self, place: Any) -> Any:
        return self.builder.load(self._whole(place), align=_REGISTER // self.count)

    def store(self, values: Any, place: Any) -> None:
        self.builder.store(values, self._whole(place), align=_REGISTER // self.count)

    def compress(self, values: Any, place: Any, mask: Any) -> None:
        """Writes the values in the mask side by side, and nothing behind them."""
        self._call("masked.compressstore", ir.VoidType(), values, place, mask)

    def expand(self, place: Any, mask: Any) -> Any:
        """Reads as many as the mask has, and nothing behind them; zero in the other lanes."""
        return self._call("masked.expandload", self.vector, place, mask, ir.Constant(self.vector, None))

    def magnitude(self, values: Any) -> Any:
        return self._call("fabs", self.vector, values)

    def all(self, number: Any) -> Any:
        """The number in every lane."""
        nothing = ir.Constant(self.vector, ir.Undefined)
        first = self.builder.insert_element(nothing, number, ir.Constant(ir.IntType(32), 0))
        return self.builder.shuffle_vector(
            first, nothing, ir.Constant(ir.VectorType(ir.IntType(32), self.count), None)
        )

    def bits(self, mask: Any) -> Any:
        """A mask as a number of 64 bits, the first lane the lowest."""
        return self.builder.zext(self.builder.bitcast(mask, ir.IntType(self.count)), ir.IntType(64))

    def of_bits(self, bits: Any) -> Any:
        return self.builder.bitcast(self.builder.trunc(bits, ir.IntType(self.count)), self.mask)

    def pair(self, signature: Any, first: Any, second: Any) -> Any:
        return self.context.make_tuple(self.builder, signature.return_type, (self.bits(first), self.bits(second)))


def lanes(array: Any) -> int:
    """How many numbers of an array's type a register holds."""
    return _REGISTER * 8 // int(array.dtype.bitwidth)


_WORD = types.uint64
_TWO_WORDS = tuple_of(types.uint64, 2)


@intrinsic
def _count(typing: Any, word: Any) -> Any:
    """How many bits are set."""
    return _WORD(_WORD), lambda context, builder, signature, arguments: builder.ctpop(arguments[0])


@intrinsic
def _pack(typing: Any, a: Any, b: Any, i: Any, low: Any, entries: Any, at: Any) -> Any:
    """Packs a register of a − b from place i on to entries[at:], as far as it is not below `low`; which that is."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        do = Lanes(context, builder, a)
        ours, theirs, i, low, packed, at = arguments
        r = builder.fsub(do.load(do.place(a, ours, i)), do.load(do.place(b, theirs, i)))
        keep = builder.fcmp_unordered("uge", do.magnitude(r), do.all(low))
        do.compress(r, do.place(entries, packed, at), keep)
        return do.bits(keep)

    return _WORD(a, b, _WORD, a.dtype, entries, _WORD), generate


@intrinsic
def _find(typing: Any, entries: Any, i: Any, high: Any, found: Any, at: Any) -> Any:
    """Packs the magnitudes up to `high` of a register of entries from place i on to found[at:]; which, and the NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        do = Lanes(context, builder, entries)
        packed, i, high, magnitudes, at = arguments
        r = do.load(do.place(entries, packed, i))
        size = do.magnitude(r)
        inside = builder.fcmp_ordered("<=", size, do.all(high))
        do.compress(size, do.place(found, magnitudes, at), inside)
        return do.pair(signature, inside, builder.fcmp_unordered("uno", r, r))

    return _TWO_WORDS(entries, _WORD, entries.dtype, found, _WORD), generate


@intrinsic
def _keep(typing: Any, b: Any, i: Any, word: Any, least: Any, entries: Any, read: Any, at: Any) -> Any:
    """Of the entries at `read`, which the word marks, moves what is above `least` to `at` and adds it to b[i:].

    What was kept, and what equals `least`; where anything does, nothing was kept and nothing changed.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        do = Lanes(context, builder, b)
        reference, i, word, least, packed, read, at = arguments
        v = do.expand(do.place(entries, packed, read), do.of_bits(word))
        size, bound = do.magnitude(v), do.all(least)
        equal = builder.fcmp_ordered("==", size, bound)
        tied = builder.icmp_unsigned("!=", do.bits(equal), ir.Constant(ir.IntType(64), 0))
        kept = builder.select(tied, ir.Constant(do.mask, None), builder.fcmp_ordered(">", size, bound))
        do.compress(v, do.place(entries, packed, at), kept)
        place = do.place(b, reference, i)
        before = do.load(place)
        do.store(builder.select(kept, builder.fadd(before, v), before), place)    # b + 0 would turn −0 into 0
        return do.pair(signature, kept, equal)

    return _TWO_WORDS(b, _WORD, _WORD, b.dtype, entries, _WORD, _WORD), generate


@compiled
def vector_gather(
    a: Array, b: Array, low: float, high: float, words: Array, entries: Array, found: Array
) -> tuple[Any, Any, bool]:
    """`gather`, a register at a time. What was packed is looked through while it is in the first cache."""
    at: Any = np.uint64(0)
    seen: Any = np.uint64(0)
    inside: Any = np.uint64(0)
    nan = np.uint64(0)
    step = np.uint64(_REGISTER // a.itemsize)
    whole = a.size // 64
    for start in range(0, a.size, _CHUNK):
        if at + _CHUNK > entries.size:
            return np.int64(-1), np.int64(0), False
        for i in range(start // 64, min(start + _CHUNK, a.size) // 64):
            word = np.uint64(0)
            for j in range(np.uint64(0), np.uint64(64), step):
                some = _pack(a, b, np.uint64(64 * i) + j, low, entries, at)
                at += _count(some)
                word |= some << j
            words[i] = word
        while seen + step <= at:
            some, bad = _find(entries, seen, high, found, inside)
            seen += step
            inside += _count(some)
            nan |= bad
    if whole < words.size:
        word = np.uint64(0)
        for i in range(64 * whole, a.size):
            v = a[i] - b[i]
            if not abs(v) < low:
                entries[at] = v
                at += np.uint64(1)
                word |= np.uint64(1) << np.uint64(i - 64 * whole)
        words[whole] = word
    broken = nan != 0
    for i in range(seen, at):
        v = entries[i]
        if abs(v) <= high:
            found[inside] = abs(v)
            inside += np.uint64(1)
        broken |= v != v
    return np.int64(at), np.int64(inside), broken


@compiled
def vector_settle(b: Array, least: float, ties: int, words: Array, entries: Array) -> int:
    """`settle`, a register at a time. A tie is decided in the scalar way, by position."""
    at: Any = np.uint64(0)
    read: Any = np.uint64(0)
    step = np.uint64(_REGISTER // b.itemsize)
    few = (np.uint64(1) << step) - np.uint64(1)
    whole = b.size // 64
    for i in range(whole):
        if words[i] == 0:
            continue
        word, kept = words[i], np.uint64(0)
        for j in range(np.uint64(0), np.uint64(64), step):
            base, some = np.uint64(64 * i) + j, (word >> j) & few
            above, equal = _keep(b, base, some, least, entries, read, at)
            if equal:
                above, read, at, ties = _settle_some(b, base, least, ties, some, entries, read, at)
            else:
                read += _count(some)
                at += _count(above)
            kept |= above << j
        words[i] = kept
    for i in range(whole, words.size):
        words[i], read, at, ties = _settle_some(b, np.uint64(64 * i), least, ties, words[i], entries, read, at)
    return int(at)


VECTOR = Form(vector_gather, vector_settle)
