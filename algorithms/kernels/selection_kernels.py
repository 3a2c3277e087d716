"""Compiled kernels of the top-k selection, in three forms that give the same bits.

The scalar form visits the marked entries one by one, on any processor. The vector forms process a register of entries
at a time: they move the marked ones to its front and store the whole register, so that the next store overwrites what
is behind them. AVX-512 has an instruction for that. A compressing store to memory would be slow microcode on AMD's
processors. AVX2 permutes the register by a table.
"""

from typing import Any, NamedTuple

import numpy as np
from numba.core import cgutils, types
from numba.cpython.unsafe import numbers

from dbo.algorithms.kernels.compiled import Terms, compiled, count_marks, evaluate_tiles, intrinsic, prepare
from dbo.algorithms.protocol import Array

llvm: Any = cgutils
ir = llvm.ir              # LLVM's types of the version that numba uses
tuple_of: Any = types.UniTuple
trailing_zeros: Any = numbers.trailing_zeros

CHUNK = 16384     # entries that stay in the L2 cache between two loops over them, a multiple of a tile
_EIGHT_TO_ONE, _TOP = np.uint64(0x0102040810204080), np.uint64(56)
_BITS = 10        # that a histogram distinguishes …
BUCKETS = 1 << _BITS
_SAMPLED = 4 << _BITS      # … and that of a sample, for numbers up to 16 times the lowest
_WORD = types.uint64


class Form(NamedTuple):
    """The passes of a selection."""

    pack: Any
    find: Any
    search: Any
    settle: Any


@compiled
def sample(a: Array, b: Array, stride: int, out: Array) -> None:
    """Write |a − b| at regular positions to `out`."""
    for i in range(out.size):
        out[i] = abs(a[i * stride] - b[i * stride])


# ---- threshold -------------------------------------------------------------------------------------------------------


@intrinsic
def _bits(typing: Any, value: Any) -> Any:
    """Return the bits of a number as an integer: numbers that are not negative have the order of their bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.zext(builder.bitcast(arguments[0], ir.IntType(value.bitwidth)), ir.IntType(64))

    return _WORD(value), generate


@intrinsic
def _number(typing: Any, bits: Any, like: Any) -> Any:
    """Return the number of the type of `like` that has these bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = context.get_value_type(like)
        return builder.bitcast(builder.trunc(arguments[0], ir.IntType(like.bitwidth)), number)

    return like(_WORD, like), generate


@compiled
def _bracket(entries: Array, k: int, low: float, stride: int) -> tuple[Any, Any]:
    """Return numbers that the k-th largest magnitude lies between, from every `stride`-th entry; none is below `low`.

    They are four standard deviations of its rank away, rounded to one of 2^10 numbers between powers of two. The
    selection is exact nevertheless: if they miss the k-th largest, `search` looks again.
    """
    size = (entries.size - 1) // stride + 1
    share = 1 - k / entries.size
    at, off = size * share, 4 * np.sqrt(size * share * (1 - share)) + 2
    by = np.uint64(13 if entries.itemsize == 4 else 42)      # bits of a mantissa, without the first ten
    first, last = _bits(low), np.uint64(_SAMPLED - 1)
    counts = np.zeros(_SAMPLED, np.int64)
    for i in range(size):
        counts[min((_bits(abs(entries[i * stride])) - first) >> by, last)] += 1
    bucket, below = 0, 0
    while below + counts[bucket] <= at - off:
        below += counts[bucket]
        bucket += 1
    least = _number(first + (np.uint64(bucket) << by), low)
    while bucket < _SAMPLED - 1 and below + counts[bucket] <= at + off:
        below += counts[bucket]
        bucket += 1
    if bucket == _SAMPLED - 1:
        return least, entries.dtype.type(np.inf)
    return least, _number(first + (np.uint64(bucket + 1) << by), low)


@compiled
def find_rank(values: Array, rank: int, low: float, high: float) -> tuple[Any, int]:
    """Return the value with this rank in ascending order, and how many are larger; all are from `low` ≥ 0 to `high`.

    Histograms of the bits, the highest first, leave ever fewer candidates. `values` are reordered.
    """
    counts = np.empty(BUCKETS, np.int64)
    first, size, larger = _bits(low), values.size, 0
    by = 0
    while (_bits(high) - first) >> np.uint64(by) >= np.uint64(BUCKETS):
        by += 1
    while True:
        counts[:] = 0
        for i in range(size):
            counts[(_bits(values[i]) - first) >> np.uint64(by)] += 1
        below, bucket = 0, np.uint64(0)
        while below + counts[bucket] <= rank:
            below += counts[bucket]
            bucket += np.uint64(1)
        rank -= below
        larger += size - below - counts[bucket]
        if by == 0:
            return _number(first + bucket, low), larger
        inside = 0
        for i in range(size):
            v = values[i]
            values[inside] = v
            inside += (_bits(v) - first) >> np.uint64(by) == bucket
        size = inside
        first += bucket << np.uint64(by)
        by = max(0, by - _BITS)


# ---- scalar form -----------------------------------------------------------------------------------------------------


@compiled
def pack(
    terms: Terms, expand: bool, a: Array, b: Array, low: float, words: Array, entries: Array
) -> Any:
    """Evaluate sums, and pack all of a − b that is not below `low` > 0 in magnitude, NaN too; return how many.

    `a` and `b` may be rows that the sums write: entries are packed while they are in the cache. Return −1 if they do
    not fit; the sums are evaluated nevertheless.
    """
    at: Any = np.uint64(0)
    is_full, prepared = False, prepare(a, terms)
    r = np.empty(CHUNK, dtype=a.dtype)
    mark = np.zeros(CHUNK, dtype=np.uint8)
    marks = mark.view(np.uint64)
    for start in range(0, a.size, CHUNK):
        if terms[0].size > 0:
            evaluate_tiles(a, terms, prepared, start, min(start + CHUNK, a.size), expand)
        is_full |= at + CHUNK > entries.size
        if is_full:
            continue
        p, q = a[start : start + CHUNK], b[start : start + CHUNK]    # views: an offset would prevent vectorization
        for i in range(p.size):
            r[i] = p[i] - q[i]
        for i in range(p.size):
            mark[i] = np.uint8(0) if abs(r[i]) < low else np.uint8(1)
        for i in range(p.size, CHUNK):
            mark[i] = 0
        here = words[start // 64 :]
        for i in range((p.size + 63) // 64):
            word = np.uint64(0)
            for j in range(8):    # the product moves eight bytes' marks into the highest byte
                word |= (marks[8 * i + j] * _EIGHT_TO_ONE >> _TOP) << np.uint64(8 * j)
            here[i] = word
            base = np.uint64(64 * i)
            while word != 0:
                entries[at] = r[base + trailing_zeros(word)]
                at += np.uint64(1)
                word &= word - np.uint64(1)
    return np.int64(-1) if is_full else np.int64(at)


@compiled
def find(entries: Array, low: float, high: float, found: Array) -> tuple[Any, Any, bool]:
    """Collect the magnitudes from `low` to `high`; return how many are above, how many were collected, any NaN."""
    above, inside, has_nan = _find_rest(entries, low, high, found, 0, np.uint64(0), np.uint64(0), False)
    return above, inside, has_nan


@compiled
def _find_rest(
    entries: Array, low: float, high: float, found: Array, start: Any, above: Any, inside: Any, has_nan: bool
) -> tuple[Any, Any, bool]:
    """`find` from entry `start` on, entry by entry."""
    for i in range(start, entries.size):
        size = abs(entries[i])
        found[inside] = size
        inside += np.uint64(low <= size <= high)
        above += np.uint64(size > high)
        has_nan |= size != size
    return np.int64(above), np.int64(inside), has_nan


@compiled
def _settle_one(least: float, ties: int, v: float, out: Array, at: Any) -> tuple[Any, int]:
    """Write the entry to out[at] if it is kept; return whether it is, and the ties that are left."""
    if abs(v) > least or (abs(v) == least and ties > 0):
        out[at] = v
        return np.uint64(1), ties - 1 if abs(v) == least else ties
    return np.uint64(0), ties


@compiled
def settle(least: float, ties: int, words: Array, entries: Array, out: Array) -> int:
    """Write the packed entries above `least` and the first `ties` equal to it to `out`; return how many.

    The marks of the others are cleared.
    """
    at: Any = np.uint64(0)
    read: Any = np.uint64(0)
    for i in range(words.size):
        word = words[i]
        kept = word
        while word != 0:
            is_kept, ties = _settle_one(least, ties, entries[read], out, at)
            kept ^= (np.uint64(1) - is_kept) << trailing_zeros(word)
            at += is_kept
            read += np.uint64(1)
            word &= word - np.uint64(1)
        words[i] = kept
    return int(at)


def make_search(find: Any) -> Any:
    """Compile the search for a threshold with one form of `find`."""

    @compiled
    def search(entries: Array, k: int, low: float, sampled: int, found: Array) -> tuple[Any, int, bool]:
        """Return the k-th largest magnitude, how many equal to it belong to the k largest, and whether one is NaN.

        There are at least k entries, none below `low` > 0. About `sampled` of them tell where to look.
        """
        least, most = _bracket(entries, k, low, entries.size // sampled + 1)
        above, inside, has_nan = find(entries, least, most, found)
        if not has_nan and not above < k <= above + inside:      # a misleading sample
            least, most = low, entries.dtype.type(np.inf)
            above, inside, has_nan = find(entries, least, most, found)
        if has_nan:
            return low, 0, True
        threshold, larger = find_rank(found[:inside], inside - (k - above), least, most)
        return threshold, k - above - larger, False

    return search


SCALAR = Form(pack, find, make_search(find), settle)


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

    def masks(self, signature: Any, *masks: Any) -> Any:
        return self.context.make_tuple(self.builder, signature.return_type, tuple(map(self.bits, masks)))


_TWO_WORDS, _THREE_WORDS = tuple_of(types.uint64, 2), tuple_of(types.uint64, 3)


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
def _find(typing: Any, register: Any, entries: Any, i: Any, low: Any, high: Any, found: Any, at: Any) -> Any:
    """Pack a register of magnitudes from `low` to `high` of entries[i:] to found[at:].

    Return the masks of those, of those above, and of NaN.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        do = Lanes(context, builder, entries, register.literal_value)
        _, packed, i, low, high, magnitudes, at = arguments
        size = do.magnitude(do.load(do.address(entries, packed, i)))
        above = builder.fcmp_ordered(">", size, do.broadcast(high))
        inside = builder.and_(
            builder.fcmp_ordered(">=", size, do.broadcast(low)), builder.fcmp_ordered("<=", size, do.broadcast(high)))
        do.store(do.compress(size, inside), do.address(found, magnitudes, at))
        return do.masks(signature, inside, above, builder.fcmp_unordered("uno", size, size))

    return _THREE_WORDS(register, entries, _WORD, entries.dtype, entries.dtype, found, _WORD), generate


@intrinsic
def _keep(typing: Any, register: Any, entries: Any, read: Any, least: Any, out: Any, at: Any) -> Any:
    """Write the entries of a register at `read` that are above `least` to out[at:].

    Return the masks of those and of ties.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        do = Lanes(context, builder, entries, register.literal_value)
        _, packed, read, least, target, at = arguments
        v = do.load(do.address(entries, packed, read))
        size, bound = do.magnitude(v), do.broadcast(least)
        equal, above = builder.fcmp_ordered("==", size, bound), builder.fcmp_ordered(">", size, bound)
        do.store(do.compress(v, above), do.address(out, target, at))
        return do.masks(signature, above, equal)

    return _TWO_WORDS(register, entries, _WORD, entries.dtype, out, _WORD), generate


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
def _pack_last_word(a: Array, b: Array, low: float, words: Array, entries: Array, at: Any) -> Any:
    """Pack the entries of the last word, if it is not a whole one; return the next position."""
    whole = a.size // 64
    if whole < words.size:
        word = np.uint64(0)
        for i in range(64 * whole, a.size):
            v = a[i] - b[i]
            if not abs(v) < low:
                entries[at] = v
                at += np.uint64(1)
                word |= np.uint64(1) << np.uint64(i - 64 * whole)
        words[whole] = word
    return at


def make_vector_form(register: int) -> Form:
    """Compile the form that works on registers of so many bytes."""

    @compiled
    def pack(
        terms: Terms, expand: bool, a: Array, b: Array, low: float, words: Array, entries: Array
    ) -> Any:
        """`pack`, a register at a time."""
        at: Any = np.uint64(0)
        step = np.uint64(register // a.itemsize)
        is_full, prepared = False, prepare(a, terms)
        for start in range(0, a.size, CHUNK):
            if terms[0].size > 0:
                evaluate_tiles(a, terms, prepared, start, min(start + CHUNK, a.size), expand)
            is_full |= at + CHUNK + step > entries.size
            if is_full:
                continue
            for i in range(start // 64, min(start + CHUNK, a.size) // 64):
                word = np.uint64(0)
                for j in range(np.uint64(0), np.uint64(64), step):
                    some = _pack(register, a, b, np.uint64(64 * i) + j, low, entries, at)
                    at += count_marks(some)
                    word |= some << j
                words[i] = word
        return np.int64(-1) if is_full else np.int64(_pack_last_word(a, b, low, words, entries, at))

    @compiled
    def find(entries: Array, low: float, high: float, found: Array) -> tuple[Any, Any, bool]:
        """`find`, a register at a time."""
        above, inside, nan = np.uint64(0), np.uint64(0), np.uint64(0)
        step, start = np.uint64(register // entries.itemsize), np.uint64(0)
        while start + step <= entries.size and inside + step <= found.size:
            some, more, bad = _find(register, entries, start, low, high, found, inside)
            start += step
            inside += count_marks(some)
            above += count_marks(more)
            nan |= bad
        larger, kept, has_nan = _find_rest(entries, low, high, found, np.int64(start), above, inside, nan != 0)
        return larger, kept, has_nan

    @compiled
    def settle(least: float, ties: int, words: Array, entries: Array, out: Array) -> int:
        """`settle`, a register of packed entries at a time; ties are resolved one by one, by position."""
        total, whole = np.uint64(entries.size), np.uint64(64)
        flags = np.empty(total // whole + np.uint64(2), np.uint64)
        flags[-2:] = 0
        at: Any = np.uint64(0)
        step = np.uint64(register // entries.itemsize)
        for read in range(np.uint64(0), total, whole):
            flag, tied, next_at = np.uint64(0), np.uint64(1), at
            if read + whole <= total and at + whole <= out.size:
                tied = np.uint64(0)
                for j in range(np.uint64(0), whole, step):
                    above, equal = _keep(register, entries, read + j, least, out, next_at)
                    flag |= above << j
                    tied |= equal
                    next_at += count_marks(above)
            if tied != 0:
                flag, next_at = np.uint64(0), at
                for j in range(min(whole, total - read)):
                    kept, ties = _settle_one(least, ties, entries[read + j], out, next_at)
                    flag |= kept << j
                    next_at += kept
            flags[read // whole] = flag
            at = next_at
        _deposit_flags(flags, words)
        return int(at)

    return Form(pack, find, make_search(find), settle)


AVX512, AVX2 = make_vector_form(64), make_vector_form(32)
