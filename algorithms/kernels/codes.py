"""Kernels for the codes of quantized values, and for an Exp-Golomb code of the gaps between marks.

Value codes are a level and a sign, one after the other, the first bit lowest. The Exp-Golomb code of order o of a gap g
is n = ⌊log₂((g >> o) + 1)⌋ in unary, ended by a one, and the lowest n + o bits of g − (2^n − 1) 2^o. Unary parts and
lowest bits are two streams, as in `marks`; `platform/network/golomb.py` describes them. All arrays are in host memory.
"""

from typing import Any

import numpy as np

from dbo.algorithms.kernels.compiled import compiled, leading_zeros, trailing_zeros
from dbo.algorithms.protocol import Array

_ONE, _SIX, _LAST = np.uint64(1), np.uint64(6), np.uint64(63)
_FEW = np.uint64(1 << 10)      # gaps below are counted in a histogram
_WIDEST = np.uint64(32)        # lowest bits of a gap: more belong to no gap below 2^32


@compiled
def pack_levels(levels: Array, entries: Array, bits: int, words: Array) -> None:
    """Write level − 1, and above it a bit that is set for negative entries, into words of zeros.

    There is a word more than the codes need.
    """
    by, off, at = np.uint64(bits), np.uint64(0), 0
    word: Any = np.uint64(0)
    for i in range(levels.size):
        code = np.uint64(levels[i]) - _ONE | np.uint64(entries[i] < 0) << (by - _ONE)
        word |= code << off
        off += by
        if off > _LAST:      # the word is full, and the highest bits of the code may belong to the next one
            words[at] = word
            at += 1
            off -= np.uint64(64)
            word = code >> (by - off)
    words[at] = word


@compiled
def unpack_values(words: Array, bits: int, magnitudes: Array, out: Array) -> bool:
    """Write the values of the codes to `out`; return whether one is zero. There is a word more than the codes need."""
    by, bit = np.uint64(bits), np.uint64(0)
    mask, has_zero = (_ONE << (by - _ONE)) - _ONE, False
    for i in range(out.size):
        at, off = bit >> _SIX, bit & _LAST
        code = words[at] >> off
        if off + by > np.uint64(64):
            code |= words[at + _ONE] << (np.uint64(64) - off)
        value = magnitudes[code & mask]
        has_zero |= value == 0
        out[i] = -value if code >> (by - _ONE) & _ONE else value
        bit += by
    return has_zero


@compiled
def _count_digits(gap: Any, order: Any) -> Any:
    """Return n."""
    return _LAST - leading_zeros((gap >> np.uint64(order)) + _ONE)


@compiled
def sum_digits(words: Array, shift: int, sums: Array) -> int:
    """Add Σ n over the gaps in front of the marks to sums[o], for every order o; return Σ (g >> shift)."""
    few = np.zeros(_FEW, dtype=np.int64)
    start: Any = np.uint64(0)
    total: Any = np.uint64(0)
    by = np.uint64(shift)
    for i in range(words.size):
        word = words[i]
        base = np.uint64(64 * i)
        while word != 0:
            position = base + trailing_zeros(word)
            gap = position - start
            start = position + _ONE
            word &= word - _ONE
            total += gap >> by
            if gap < _FEW:
                few[gap] += 1
                continue
            for order in range(sums.size):
                sums[order] += np.int64(_count_digits(gap, order))
    for small in range(few.size - 2, -1, -1):      # the numbers of gaps that are not smaller
        few[small] += few[small + 1]
    for order in range(sums.size):
        least = np.uint64(1) << np.uint64(order)
        at = least                                  # (2^n − 1) 2^o, from which a gap has n digits
        while at < _FEW:
            sums[order] += few[at]
            at = np.uint64(2) * at + least
    return int(total)


@compiled
def encode_golomb(words: Array, order: int, unary: Array, lowest: Array) -> None:
    """Write the two streams of the code into words of zeros; `lowest` has a word more than its bits need."""
    by = np.uint64(order)
    start: Any = np.uint64(0)
    at: Any = np.uint64(0)
    off: Any = np.uint64(0)
    rests: Any = np.uint64(0)
    ends: Any = np.uint64(0)
    filled, here = 0, np.uint64(0)
    for i in range(words.size):
        word = words[i]
        base = np.uint64(64 * i)
        while word != 0:
            position = base + trailing_zeros(word)
            gap = position - start
            start = position + _ONE
            digits = _count_digits(gap, order)
            at += digits
            if at >> _SIX != here:
                unary[here] = ends
                here, ends = at >> _SIX, np.uint64(0)
            ends |= _ONE << (at & _LAST)
            at += _ONE
            rest, width = gap - (((_ONE << digits) - _ONE) << by), digits + by
            rests |= rest << off
            off += width
            if off > _LAST:      # as in `pack_levels`
                lowest[filled] = rests
                filled += 1
                off -= np.uint64(64)
                rests = rest >> (width - off)
            word &= word - _ONE
    unary[here], lowest[filled] = ends, rests

@compiled
def decode_golomb(unary: Array, lowest: Array, order: int, dim: int, words: Array) -> int:
    """Set the marks that the two streams describe; return their number, or −1 if one is not below dim.

    `lowest` has a word more than the bits that belong to `unary`.
    """
    by, end = np.uint64(order), np.uint64(dim)
    start: Any = np.uint64(0)
    before: Any = np.uint64(0)
    bit: Any = np.uint64(0)
    count = 0
    for i in range(unary.size):
        word = unary[i]
        base = np.uint64(64 * i)
        while word != 0:
            at = base + trailing_zeros(word)
            digits = at - before
            before = at + _ONE
            width, off = digits + by, bit & _LAST
            if width > _WIDEST:
                return -1
            rest = lowest[bit >> _SIX] >> off
            if off + width > np.uint64(64):
                rest |= lowest[(bit >> _SIX) + _ONE] << (np.uint64(64) - off)
            bit += width
            position = start + (rest & ((_ONE << width) - _ONE)) + (((_ONE << digits) - _ONE) << by)
            if position >= end:
                return -1
            words[position >> _SIX] |= _ONE << (position & _LAST)
            start = position + _ONE
            count += 1
            word &= word - _ONE
    return count


def compile_kernels(dtype: str) -> None:
    """Compile the kernels for values of one type, or load them from the cache."""
    words, out, entries = np.ones(2, dtype=np.uint64), np.zeros(4, dtype=np.uint64), np.ones(2, dtype=dtype)
    for kind in (np.uint8, np.uint16):
        pack_levels(np.ones(2, kind), entries, 4, out)
    unpack_values(out, 4, np.ones(8, dtype), entries)
    sum_digits(words, 1, np.zeros(2, dtype=np.int64))
    encode_golomb(words, 1, out, out.copy())
    decode_golomb(out, out, 1, 128, words)
