"""Compiled kernels of the top-k selection, in three forms that give the same bits.

The scalar form visits the marked entries one by one, on any processor. The vector forms process a register of entries
at a time: they move the marked ones to its front and store the whole register, so that the next store overwrites what
is behind them. AVX-512 has an instruction for that. A compressing store to memory would be slow microcode on AMD's
processors. AVX2 permutes the register by a table. Everything is in one file because numba's cache detects changes of
one file only.
"""

from typing import Any, NamedTuple

import numpy as np
from numba.core import cgutils, types
from numba.cpython.unsafe import numbers

from dbo.algorithms.kernels.compiled import compiled, count_marks, intrinsic
from dbo.algorithms.protocol import Array

llvm: Any = cgutils
ir = llvm.ir              # LLVM's types of the version that numba uses
tuple_of: Any = types.UniTuple
trailing_zeros: Any = numbers.trailing_zeros

_CHUNK = 2048     # entries that stay in the L1 cache between two loops over them
_EIGHT_TO_ONE, _TOP = np.uint64(0x0102040810204080), np.uint64(56)
BUCKETS = 1024    # of the histogram that finds a threshold


class Form(NamedTuple):
    """The two passes of a selection."""

    gather: Any
    settle: Any


@compiled
def sample(a: Array, b: Array, stride: int, out: Array) -> None:
    """Write |a − b| at regular positions to `out`."""
    for i in range(out.size):
        out[i] = abs(a[i * stride] - b[i * stride])


@compiled
def narrow(values: Array, lowest: float, scale: float, rank: int) -> tuple[int, int]:
    """Move the values of the histogram bucket with this rank to the front; return how many are below it and in it."""
    counts = np.zeros(BUCKETS, np.int64)
    for i in range(values.size):
        counts[int((np.float64(values[i]) - lowest) * scale)] += 1
    below, bucket = 0, 0
    while below + counts[bucket] <= rank:
        below += counts[bucket]
        bucket += 1
    inside = 0
    for i in range(values.size):
        v = values[i]
        if int((np.float64(v) - lowest) * scale) == bucket:
            values[inside] = v
            inside += 1
    return below, inside


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
    least: float, ties: int, word: Any, entries: Array, read: Any, at: Any
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
        else:
            kept ^= np.uint64(1) << bit
    return kept, read, at, ties


@compiled
def settle(least: float, ties: int, words: Array, entries: Array) -> int:
    """Keep the packed entries above `least` and the first `ties` equal to it; return their number."""
    at: Any = np.uint64(0)
    read: Any = np.uint64(0)
    for i in range(words.size):
        words[i], read, at, ties = _settle_some(least, ties, words[i], entries, read, at)
    return int(at)


SCALAR = Form(gather, settle)


# ---- vector forms ----------------------------------------------------------------------------------------------------


class Lanes:
    """LLVM instructions on one register of an array's entries."""

    def __init__(self, context: Any, builder: Any, array: Any, register: int) -> None:
        self.context, self.builder = context, builder
        self.number = context.get_value_type(array.dtype)
        self.itemsize = int(array.dtype.bitwidth) // 8
        self.count = register // self.itemsize
        self.vector = ir.VectorType(self.number, self.count)
        self.name = f"v{self.count}f{8 * self.itemsize}"

    def _call(self, name: str, result: Any, *arguments: Any) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(llvm.get_or_insert_function(self.builder.module, kind, f"llvm.{name}"), arguments)

    def address(self, kind: Any, array: Any, at: Any) -> Any:
        """Return the address of a register of entries from array[at] on."""
        data = self.context.make_array(kind)(self.context, self.builder, array).data
        return self.builder.bitcast(self.builder.gep(data, [at]), self.vector.as_pointer())

    def load(self, address: Any) -> Any:
        return self.builder.load(address, align=self.itemsize)

    def store(self, values: Any, address: Any) -> None:
        self.builder.store(values, address, align=self.itemsize)

    def compress(self, values: Any, mask: Any) -> Any:
        """Move the values in the mask to the front of the register; what is behind them does not matter."""
        if self.count * self.itemsize == 64:
            undefined = ir.Constant(self.vector, ir.Undefined)
            return self._call(f"experimental.vector.compress.{self.name}", self.vector, values, mask, undefined)
        eight = ir.VectorType(ir.FloatType(), 8)
        order = self.builder.load(self.builder.gep(self._orders(), [ir.Constant(ir.IntType(64), 0), self.bits(mask)]))
        compressed = self._call("x86.avx2.permps", eight, self.builder.bitcast(values, eight), order)
        return self.builder.bitcast(compressed, self.vector)

    def _orders(self) -> Any:
        """Return the table of AVX2: for each mask, where the 32-bit parts of the compressed register come from."""
        name = f"dbo_orders_{self.count}"
        found = self.builder.module.globals.get(name)
        if found is not None:
            return found
        parts, index = 8 // self.count, ir.IntType(32)
        rows = []
        for mask in range(1 << self.count):
            kept = [lane for lane in range(self.count) if mask >> lane & 1]
            kept += [0] * (self.count - len(kept))
            rows.append(ir.Constant(ir.VectorType(index, 8), [
                ir.Constant(index, parts * lane + part) for lane in kept for part in range(parts)
            ]))
        table = ir.Constant(ir.ArrayType(ir.VectorType(index, 8), len(rows)), rows)
        return llvm.global_constant(self.builder.module, name, table)

    def magnitude(self, values: Any) -> Any:
        return self._call(f"fabs.{self.name}", self.vector, values)

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

    def pair(self, signature: Any, first: Any, second: Any) -> Any:
        return self.context.make_tuple(self.builder, signature.return_type, (self.bits(first), self.bits(second)))


_WORD = types.uint64
_TWO_WORDS = tuple_of(types.uint64, 2)


@intrinsic
def _deposit(typing: Any, bits: Any, word: Any) -> Any:
    """Place the lowest bits, one after the other, where the word has its marks."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        whole = ir.IntType(64)
        kind = ir.FunctionType(whole, [whole, whole])
        return builder.call(llvm.get_or_insert_function(builder.module, kind, "llvm.x86.bmi.pdep.64"), arguments)

    return _WORD(_WORD, _WORD), generate


@intrinsic
def _pack(typing: Any, register: Any, a: Any, b: Any, i: Any, low: Any, entries: Any, at: Any) -> Any:
    """Pack a register of a − b from i on, where not below `low`, to entries[at:]; return the mask of those packed."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        do = Lanes(context, builder, a, register.literal_value)
        _, ours, theirs, i, low, packed, at = arguments
        r = builder.fsub(do.load(do.address(a, ours, i)), do.load(do.address(b, theirs, i)))
        keep = builder.fcmp_unordered("uge", do.magnitude(r), do.broadcast(low))
        do.store(do.compress(r, keep), do.address(entries, packed, at))
        return do.bits(keep)

    return _WORD(register, a, b, _WORD, a.dtype, entries, _WORD), generate


@intrinsic
def _find(typing: Any, register: Any, entries: Any, i: Any, high: Any, found: Any, at: Any) -> Any:
    """Pack a register of magnitudes up to `high` of entries[i:] to found[at:]; return the masks of those and of NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        do = Lanes(context, builder, entries, register.literal_value)
        _, packed, i, high, magnitudes, at = arguments
        r = do.load(do.address(entries, packed, i))
        size = do.magnitude(r)
        inside = builder.fcmp_ordered("<=", size, do.broadcast(high))
        do.store(do.compress(size, inside), do.address(found, magnitudes, at))
        return do.pair(signature, inside, builder.fcmp_unordered("uno", r, r))

    return _TWO_WORDS(register, entries, _WORD, entries.dtype, found, _WORD), generate


@intrinsic
def _keep(typing: Any, register: Any, entries: Any, read: Any, least: Any, at: Any) -> Any:
    """Move the entries of a register at `read` that are above `least` to `at`; return the masks of those and of ties.

    If there are ties, nothing is moved.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        do = Lanes(context, builder, entries, register.literal_value)
        _, packed, read, least, at = arguments
        v = do.load(do.address(entries, packed, read))
        size, bound = do.magnitude(v), do.broadcast(least)
        equal, above = builder.fcmp_ordered("==", size, bound), builder.fcmp_ordered(">", size, bound)
        tied = builder.icmp_unsigned("!=", do.bits(equal), ir.Constant(ir.IntType(64), 0))
        with builder.if_then(builder.not_(tied)):
            do.store(do.compress(v, above), do.address(entries, packed, at))
        return do.pair(signature, above, equal)

    return _TWO_WORDS(register, entries, _WORD, entries.dtype, _WORD), generate


@compiled
def _settle_one(least: float, ties: int, entries: Array, read: Any, at: Any) -> tuple[Any, int]:
    """Move entry number `read` to `at` if it is kept; return whether it is, and the ties that are left."""
    v = entries[read]
    if abs(v) > least or (abs(v) == least and ties > 0):
        entries[at] = v
        return np.uint64(1), ties - 1 if abs(v) == least else ties
    return np.uint64(0), ties


@compiled
def _deposit_flags(flags: Array, words: Array) -> None:
    """Clear the marks of the words whose flag is 0; flags are in the order of the marks."""
    at = np.uint64(0)
    for i in range(words.size):
        word = words[i]
        shift, here = at & np.uint64(63), at >> np.uint64(6)
        bits = flags[here] >> shift
        if shift:
            bits |= flags[here + np.uint64(1)] << (np.uint64(64) - shift)
        words[i] = _deposit(bits, word)
        at += count_marks(word)


@compiled
def _gather_rest(
    a: Array, b: Array, low: float, high: float, words: Array, entries: Array, found: Array, whole: int, at: Any,
    seen: Any, inside: Any, has_nan: bool,
) -> tuple[Any, Any, bool]:
    """Finish a `gather`: the entries of the last word, and the packed ones that do not fill a register."""
    if whole < words.size:
        word = np.uint64(0)
        for i in range(64 * whole, a.size):
            v = a[i] - b[i]
            if not abs(v) < low:
                entries[at] = v
                at += np.uint64(1)
                word |= np.uint64(1) << np.uint64(i - 64 * whole)
        words[whole] = word
    for i in range(seen, at):
        v = entries[i]
        if abs(v) <= high:
            found[inside] = abs(v)
            inside += np.uint64(1)
        has_nan |= v != v
    return np.int64(at), np.int64(inside), has_nan


def make_vector_form(register: int) -> Form:
    """Compile the form that works on registers of so many bytes."""

    @compiled
    def gather(
        a: Array, b: Array, low: float, high: float, words: Array, entries: Array, found: Array
    ) -> tuple[Any, Any, bool]:
        """`gather`, a register at a time; packed entries are searched while they are in the L1 cache."""
        at: Any = np.uint64(0)
        seen: Any = np.uint64(0)
        inside: Any = np.uint64(0)
        nan = np.uint64(0)
        step = np.uint64(register // a.itemsize)
        whole = a.size // 64
        for start in range(0, a.size, _CHUNK):
            if at + _CHUNK + step > entries.size:
                return np.int64(-1), np.int64(0), False
            for i in range(start // 64, min(start + _CHUNK, a.size) // 64):
                word = np.uint64(0)
                for j in range(np.uint64(0), np.uint64(64), step):
                    some = _pack(register, a, b, np.uint64(64 * i) + j, low, entries, at)
                    at += count_marks(some)
                    word |= some << j
                words[i] = word
            while seen + step <= at:
                some, bad = _find(register, entries, seen, high, found, inside)
                seen += step
                inside += count_marks(some)
                nan |= bad
        packed, kept, has_nan = _gather_rest(a, b, low, high, words, entries, found, whole, at, seen, inside, nan != 0)
        return packed, kept, has_nan

    @compiled
    def settle(least: float, ties: int, words: Array, entries: Array) -> int:
        """`settle`, a register of packed entries at a time; ties are resolved one by one, by position."""
        total = np.uint64(0)
        for i in range(words.size):
            total += count_marks(words[i])
        flags = np.zeros(total // np.uint64(64) + np.uint64(2), np.uint64)
        at, read = np.uint64(0), np.uint64(0)
        step = np.uint64(register // entries.itemsize)
        while read < total:
            above = np.uint64(0)
            if read + step <= total:
                above, equal = _keep(register, entries, read, least, at)
                if equal == 0:
                    flags[read >> np.uint64(6)] |= above << (read & np.uint64(63))
                    at += count_marks(above)
                    read += step
                    continue
            for _ in range(min(step, total - read)):
                kept, ties = _settle_one(least, ties, entries, read, at)
                flags[read >> np.uint64(6)] |= kept << (read & np.uint64(63))
                at += kept
                read += np.uint64(1)
        _deposit_flags(flags, words)
        return int(at)

    return Form(gather, settle)


AVX512, AVX2 = make_vector_form(64), make_vector_form(32)
