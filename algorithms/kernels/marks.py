"""Kernels for marks, a bit per entry and 64 to a word: their positions, and a Rice code of the gaps between them.

The code of a gap g with parameter l is g >> l in unary, ended by a one, and the lowest l bits of g. Unary parts and
lowest bits are two streams, the first bit lowest; `platform/network/positions.py` describes them.
"""

from typing import Any

import numpy as np

from dbo.algorithms.kernels.compiled import compiled, trailing_zeros
from dbo.algorithms.protocol import Array

_ONE, _SIX, _LAST = np.uint64(1), np.uint64(6), np.uint64(63)


@compiled
def find_positions(words: Array, out: Array) -> None:
    """Write the positions of the marks to `out`, which has space for all of them."""
    at = 0
    for i in range(words.size):
        word = words[i]
        base = np.uint64(64 * i)
        while word != 0:
            out[at] = base + trailing_zeros(word)
            at += 1
            word &= word - _ONE


@compiled
def sum_gaps(words: Array, shift: int) -> int:
    """Return Σ (g >> shift) over the gaps in front of the marks."""
    total: Any = np.uint64(0)
    start: Any = np.uint64(0)
    by = np.uint64(shift)
    for i in range(words.size):
        word = words[i]
        base = np.uint64(64 * i)
        while word != 0:
            position = base + trailing_zeros(word)
            total += (position - start) >> by
            start = position + _ONE
            word &= word - _ONE
    return int(total)


@compiled
def encode_gaps(words: Array, shift: int, unary: Array, lowest: Array) -> None:
    """Write the two streams of the Rice code into words of zeros; `lowest` has a word more than its bits need."""
    by = np.uint64(shift)
    mask = (_ONE << by) - _ONE
    start: Any = np.uint64(0)
    at: Any = np.uint64(0)
    bit: Any = np.uint64(0)
    for i in range(words.size):
        word = words[i]
        base = np.uint64(64 * i)
        while word != 0:
            position = base + trailing_zeros(word)
            gap = position - start
            start = position + _ONE
            at += gap >> by
            unary[at >> _SIX] |= _ONE << (at & _LAST)
            at += _ONE
            if shift:
                rest, off = gap & mask, bit & _LAST
                lowest[bit >> _SIX] |= rest << off
                if off + by > np.uint64(64):
                    lowest[(bit >> _SIX) + _ONE] |= rest >> (np.uint64(64) - off)
                bit += by
            word &= word - _ONE


@compiled
def decode_gaps(unary: Array, lowest: Array, shift: int, dim: int, words: Array) -> int:
    """Set the marks that the two streams describe; return their number, or −1 if one is not below dim."""
    by = np.uint64(shift)
    mask = (_ONE << by) - _ONE
    end = np.uint64(dim)
    start: Any = np.uint64(0)
    before: Any = np.uint64(0)
    bit: Any = np.uint64(0)
    count = 0
    for i in range(unary.size):
        word = unary[i]
        base = np.uint64(64 * i)
        while word != 0:
            at = base + trailing_zeros(word)
            gap = (at - before) << by
            before = at + _ONE
            if shift:
                off = bit & _LAST
                rest = lowest[bit >> _SIX] >> off
                if off + by > np.uint64(64):
                    rest |= lowest[(bit >> _SIX) + _ONE] << (np.uint64(64) - off)
                gap |= rest & mask
                bit += by
            position = start + gap
            if position >= end:
                return -1
            words[position >> _SIX] |= _ONE << (position & _LAST)
            start = position + _ONE
            count += 1
            word &= word - _ONE
    return count


def compile_kernels() -> None:
    """Compile the kernels, or load them from the cache."""
    words, out = np.ones(2, dtype=np.uint64), np.zeros(4, dtype=np.uint64)
    find_positions(words, np.zeros(2, dtype=np.int64))
    sum_gaps(words, 1)
    encode_gaps(words, 1, out, out.copy())
    decode_gaps(out, out, 1, 128, words)
