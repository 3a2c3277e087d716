"""Select the exact top-k of a wide residual, with kernels compiled by numba in two forms that give the same bits.

A regular sample brackets the k-th largest magnitude. One pass over the row (`gather`) packs the entries that are not
below the bracket. The threshold is found among the few entries inside the bracket. A pass over the packed entries
(`settle`) removes those below the threshold. If the sample was misleading, the bracket is widened: that costs time, but
the selection stays exact.

The scalar form visits the marked entries one by one. The vector form processes a register of entries at a time and uses
LLVM's compressing stores and expanding loads: one instruction each with AVX-512, a branch per entry without. Everything
is in one file because numba's cache detects changes of one file only.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import extending
from numba.core import cgutils, registry, types
from numba.cpython.unsafe import numbers

from dbo.algorithms.compression.compressors import keep_largest
from dbo.algorithms.compression.grid import quantize_entries
from dbo.algorithms.gossip import PackedRow
from dbo.algorithms.kernels.compiled import add_packed1, compiled
from dbo.algorithms.protocol import Array

llvm: Any = cgutils
ir = llvm.ir              # LLVM's types of the version that numba uses
tuple_of: Any = types.UniTuple
trailing_zeros: Any = numbers.trailing_zeros

_SAMPLE = 8192    # entries of the sample: more cause more cache misses, fewer a wider bracket
_CHUNK = 2048     # entries that stay in the L1 cache between two loops over them
_EIGHT_TO_ONE, _TOP = np.uint64(0x0102040810204080), np.uint64(56)
_REGISTER = 64    # bytes


def intrinsic(function: Callable[..., Any]) -> Any:
    """Wrap numba's decorator with a type: the function returns a signature and a code generator."""
    return extending.intrinsic(function)


class Form(NamedTuple):
    """The two passes of a selection."""

    gather: Any
    settle: Any


@cache
def fastest_form() -> Form:
    """Return the faster form for the processor that numba compiles for.

    AMD's Zen has AVX-512, but its compressing store is slow microcode: the scalar form is faster there.
    """
    _, processor, features = registry.cpu_target.target_context.codegen().magic_tuple()
    return VECTOR if "+avx512f" in features.split(",") and not processor.startswith("znver") else SCALAR


def top_k_quantized(v: Array, reference: Array, k: int, bits: int, log: bool) -> tuple[PackedRow, Any, int]:
    """Do the same with quantized entries; return the row with its scale and span."""
    row = top_k(v, reference, k, np.empty_like(reference))
    entries, scale, span = quantize_entries(row.entries, bits, log)
    words = row.words
    if not entries.all():
        unpacked = np.unpackbits(words.view(np.uint8), bitorder="little")
        unpacked[row.positions(v.size)[entries == 0]] = 0
        words, entries = np.packbits(unpacked, bitorder="little").view(np.uint64), entries[entries != 0]
    add_packed1(reference, v.dtype.type(1), words, entries)
    return PackedRow(words, entries), scale, span


def top_k(v: Array, reference: Array, k: int, target: Array | None = None) -> PackedRow:
    """Pack the k largest |v − reference| of a row, ties by position, NaN first, and add them to the reference.

    With a `target` they are added to that instead, which may be memory of any content.
    """
    form = fastest_form()
    dim, number = v.size, v.dtype.type
    tiny = np.nextafter(number(0), number(1))
    stride = dim // _SAMPLE | 1
    stride -= 2 if stride % 5 == 0 else 0      # rows are features × classes, often with a multiple of 5 classes
    sampled = np.empty(dim // stride, dtype=v.dtype)
    sample(v, reference, stride, sampled)
    sampled.sort()
    at, off = sampled.size * (1 - k / dim), 4 * np.sqrt(sampled.size * k / dim * (1 - k / dim)) + 2
    low = max(sampled[int(at - off)], tiny) if at > off else tiny
    high = sampled[int(at + off)] if at + off < sampled.size else number(np.inf)
    words = np.empty(-(-dim // 64), dtype=np.uint64)
    entries = np.empty(min(k + int(2 * off / sampled.size * dim), dim) + 4096, dtype=v.dtype)
    found = np.empty(entries.size, dtype=v.dtype)
    count, inside, has_nan = form.gather(v, reference, low, high, words, entries, found)
    if count < 0 or not (count - inside < k and (k <= count or low == tiny)):      # misleading sample
        entries, found = np.empty(dim + 4096, dtype=v.dtype), np.empty(dim + 4096, dtype=v.dtype)
        count, inside, has_nan = form.gather(v, reference, tiny, number(np.inf), words, entries, found)
    if has_nan:
        return _top_k_with_nan(v, reference, k, reference if target is None else target)
    least, ties = tiny, dim
    if count >= k:                              # else fewer than k are nonzero, and zeros are not sent
        candidates, rank = found[:inside], count - k
        candidates.partition(rank)
        least = candidates[rank]
        ties = k - (count - inside) - int(np.count_nonzero(candidates > least))
    count = form.settle(reference if target is None else target, least, ties, words, entries)
    return PackedRow(words, entries[:count])


def _top_k_with_nan(v: Array, reference: Array, k: int, target: Array) -> PackedRow:
    """Do the same for a row with NaN, without kernels: it ends the run, so it need not be fast."""
    values = keep_largest((v - reference)[None], k)[0]
    target += values
    return PackedRow.of(values)


@compiled
def sample(a: Array, b: Array, stride: int, out: Array) -> None:
    """Write |a − b| at regular positions to `out`."""
    for i in range(out.size):
        out[i] = abs(a[i * stride] - b[i * stride])


# ---- scalar form -----------------------------------------------------------------------------------------------------


@compiled
def gather(
    a: Array, b: Array, low: float, high: float, words: Array, entries: Array, found: Array
) -> tuple[Any, Any, bool]:
    """Pack all of a − b that is not below `low` > 0 in magnitude, and collect the magnitudes up to `high` among it.

    Return how many entries were packed (−1: more than fit), how many magnitudes were collected, and whether an entry is
    NaN.
    """
    at: Any = np.uint64(0)
    inside: Any = np.uint64(0)
    has_nan = False
    r = np.empty(_CHUNK, dtype=a.dtype)
    mark = np.zeros(_CHUNK, dtype=np.uint8)
    marks = mark.view(np.uint64)
    for start in range(0, a.size, _CHUNK):
        if at + _CHUNK > entries.size:
            return np.int64(-1), np.int64(0), False
        p, q = a[start : start + _CHUNK], b[start : start + _CHUNK]    # views: an offset would prevent vectorization
        for i in range(p.size):
            r[i] = p[i] - q[i]
        for i in range(p.size):
            mark[i] = np.uint8(0) if abs(r[i]) < low else np.uint8(1)
        for i in range(p.size, _CHUNK):
            mark[i] = 0
        here = words[start // 64 :]
        for i in range((p.size + 63) // 64):
            word = np.uint64(0)
            for j in range(8):    # the product moves eight bytes' marks into the highest byte
                word |= (marks[8 * i + j] * _EIGHT_TO_ONE >> _TOP) << np.uint64(8 * j)
            here[i] = word
            base = np.uint64(64 * i)
            while word != 0:
                v = r[base + trailing_zeros(word)]
                entries[at] = v
                at += np.uint64(1)
                found[inside] = abs(v)
                inside += np.uint64(abs(v) <= high)
                has_nan |= v != v
                word &= word - np.uint64(1)
    return np.int64(at), np.int64(inside), has_nan


@compiled
def _settle_some(
    b: Array, base: Any, least: float, ties: int, word: Any, entries: Array, read: Any, at: Any
) -> tuple[Any, Any, Any, int]:
    """Settle the marks of one word, moving its entries from `read` to `at`; return the kept marks and the positions."""
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
    """Keep the entries of a packed q above `least` and the first `ties` equal to it; b += q; return their number."""
    at: Any = np.uint64(0)
    read: Any = np.uint64(0)
    for i in range(words.size):
        words[i], read, at, ties = _settle_some(b, np.uint64(64 * i), least, ties, words[i], entries, read, at)
    return int(at)


SCALAR = Form(gather, settle)


# ---- vector form -----------------------------------------------------------------------------------------------------


class Lanes:
    """LLVM instructions on one register of an array's entries."""

    def __init__(self, context: Any, builder: Any, array: Any) -> None:
        self.context, self.builder = context, builder
        self.number = context.get_value_type(array.dtype)
        self.count = _REGISTER * 8 // int(array.dtype.bitwidth)
        self.vector = ir.VectorType(self.number, self.count)
        self.mask = ir.VectorType(ir.IntType(1), self.count)
        self.name = f"v{self.count}f{8 * _REGISTER // self.count}"

    def _call(self, name: str, result: Any, *arguments: Any) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        function = llvm.get_or_insert_function(self.builder.module, kind, f"llvm.{name}.{self.name}")
        return self.builder.call(function, arguments)

    def address(self, kind: Any, array: Any, at: Any) -> Any:
        """Return the address of array[at]."""
        return self.builder.gep(self.context.make_array(kind)(self.context, self.builder, array).data, [at])

    def _as_vector(self, address: Any) -> Any:
        return self.builder.bitcast(address, self.vector.as_pointer())

    def load(self, address: Any) -> Any:
        return self.builder.load(self._as_vector(address), align=_REGISTER // self.count)

    def store(self, values: Any, address: Any) -> None:
        self.builder.store(values, self._as_vector(address), align=_REGISTER // self.count)

    def compress(self, values: Any, address: Any, mask: Any) -> None:
        """Write the values in the mask contiguously, and nothing behind them."""
        self._call("masked.compressstore", ir.VoidType(), values, address, mask)

    def expand(self, address: Any, mask: Any) -> Any:
        """Read as many values as the mask has, and nothing behind them; the other lanes are zero."""
        return self._call("masked.expandload", self.vector, address, mask, ir.Constant(self.vector, None))

    def magnitude(self, values: Any) -> Any:
        return self._call("fabs", self.vector, values)

    def broadcast(self, number: Any) -> Any:
        """Return a register with the number in every lane."""
        undefined = ir.Constant(self.vector, ir.Undefined)
        first = self.builder.insert_element(undefined, number, ir.Constant(ir.IntType(32), 0))
        return self.builder.shuffle_vector(
            first, undefined, ir.Constant(ir.VectorType(ir.IntType(32), self.count), None)
        )

    def bits(self, mask: Any) -> Any:
        """Return a mask as a 64-bit integer, the first lane lowest."""
        return self.builder.zext(self.builder.bitcast(mask, ir.IntType(self.count)), ir.IntType(64))

    def of_bits(self, bits: Any) -> Any:
        return self.builder.bitcast(self.builder.trunc(bits, ir.IntType(self.count)), self.mask)

    def pair(self, signature: Any, first: Any, second: Any) -> Any:
        return self.context.make_tuple(self.builder, signature.return_type, (self.bits(first), self.bits(second)))


_WORD = types.uint64
_TWO_WORDS = tuple_of(types.uint64, 2)


@intrinsic
def _count(typing: Any, word: Any) -> Any:
    """Count the bits that are set."""
    return _WORD(_WORD), lambda context, builder, signature, arguments: builder.ctpop(arguments[0])


@intrinsic
def _pack(typing: Any, a: Any, b: Any, i: Any, low: Any, entries: Any, at: Any) -> Any:
    """Pack a register of a − b from i on, where not below `low`, to entries[at:]; return the mask of those packed."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        do = Lanes(context, builder, a)
        ours, theirs, i, low, packed, at = arguments
        r = builder.fsub(do.load(do.address(a, ours, i)), do.load(do.address(b, theirs, i)))
        keep = builder.fcmp_unordered("uge", do.magnitude(r), do.broadcast(low))
        do.compress(r, do.address(entries, packed, at), keep)
        return do.bits(keep)

    return _WORD(a, b, _WORD, a.dtype, entries, _WORD), generate


@intrinsic
def _find(typing: Any, entries: Any, i: Any, high: Any, found: Any, at: Any) -> Any:
    """Pack a register of magnitudes up to `high` of entries[i:] to found[at:]; return the masks of those and of NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        do = Lanes(context, builder, entries)
        packed, i, high, magnitudes, at = arguments
        r = do.load(do.address(entries, packed, i))
        size = do.magnitude(r)
        inside = builder.fcmp_ordered("<=", size, do.broadcast(high))
        do.compress(size, do.address(found, magnitudes, at), inside)
        return do.pair(signature, inside, builder.fcmp_unordered("uno", r, r))

    return _TWO_WORDS(entries, _WORD, entries.dtype, found, _WORD), generate


@intrinsic
def _keep(typing: Any, b: Any, i: Any, word: Any, least: Any, entries: Any, read: Any, at: Any) -> Any:
    """Of the entries at `read`, which the word marks, move those above `least` to `at` and add them to b[i:].

    Return the masks of the kept entries and of those equal to `least`; if there are any of the latter, nothing was kept
    and nothing changed.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        do = Lanes(context, builder, b)
        reference, i, word, least, packed, read, at = arguments
        v = do.expand(do.address(entries, packed, read), do.of_bits(word))
        size, bound = do.magnitude(v), do.broadcast(least)
        equal = builder.fcmp_ordered("==", size, bound)
        tied = builder.icmp_unsigned("!=", do.bits(equal), ir.Constant(ir.IntType(64), 0))
        kept = builder.select(tied, ir.Constant(do.mask, None), builder.fcmp_ordered(">", size, bound))
        do.compress(v, do.address(entries, packed, at), kept)
        address = do.address(b, reference, i)
        before = do.load(address)
        do.store(builder.select(kept, builder.fadd(before, v), before), address)    # b + 0 would turn −0 into 0
        return do.pair(signature, kept, equal)

    return _TWO_WORDS(b, _WORD, _WORD, b.dtype, entries, _WORD, _WORD), generate


@compiled
def vector_gather(
    a: Array, b: Array, low: float, high: float, words: Array, entries: Array, found: Array
) -> tuple[Any, Any, bool]:
    """`gather`, a register at a time; packed entries are searched while they are in the L1 cache."""
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
    has_nan = nan != 0
    for i in range(seen, at):
        v = entries[i]
        if abs(v) <= high:
            found[inside] = abs(v)
            inside += np.uint64(1)
        has_nan |= v != v
    return np.int64(at), np.int64(inside), has_nan


@compiled
def vector_settle(b: Array, least: float, ties: int, words: Array, entries: Array) -> int:
    """`settle`, a register at a time; ties are resolved by the scalar form, by position."""
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
