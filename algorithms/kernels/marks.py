"""Kernels for marks, a bit per entry and 64 to a word: their positions, and a Rice code of the gaps between them.

The code of a gap g with parameter l is g >> l in unary, ended by a one, and the lowest l bits of g. Unary parts and
lowest bits are two streams, the first bit lowest; `platform/network/positions.py` describes them.
"""

from functools import cache
from typing import Any

import numpy as np
from numba.core import cgutils, types

from dbo.algorithms.kernels.compiled import (
    compiled,
    count_marks,
    find_processor,
    intrinsic,
    leading_zeros,
    trailing_zeros,
)
from dbo.algorithms.protocol import Array

_llvm: Any = cgutils

_ONE, _SIX, _LAST = np.uint64(1), np.uint64(6), np.uint64(63)
# Number j has a bit wherever the position in a word has bit j set.
_PLANES = np.array([sum(1 << at for at in range(64) if at >> bit & 1) for bit in range(6)], dtype=np.uint64)


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


@intrinsic
def _extract(typing: Any, word: Any, mask: Any) -> Any:
    """Return the bits of the word at the marks of the mask, one after the other, the first lowest."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        whole = _llvm.ir.IntType(64)
        kind = _llvm.ir.FunctionType(whole, [whole, whole])
        return builder.call(
            _llvm.get_or_insert_function(builder.module, kind, "llvm.x86.bmi.pext.64"), arguments)

    return types.uint64(types.uint64, types.uint64), generate


@compiled
def _sum_gaps_one_by_one(words: Array, shift: int) -> int:
    """`sum_gaps`, mark by mark, on any processor."""
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


@cache
def _make_sum_gaps(shift: int) -> Any:
    """Compile `sum_gaps` for one shift ≤ 6, which processes all marks of a word at once.

    Σ (g >> l) = (Σ g − Σ (g mod 2^l)) / 2^l, and Σ g depends on the last mark alone. A gap is p − p' − 1 = p + not p'
    for marks at p' and p. So its lowest l bits are a sum of the lowest bits of positions in words. Each of these bits
    is extracted for all marks of a word into one integer.
    """
    by = np.uint64(shift)

    @compiled
    def sum_gaps_by_word(words: Array) -> int:
        last = _LAST                # of the last mark: its position in its word; −1 is in front of the first one
        count: Any = np.uint64(0)
        rest: Any = np.uint64(0)
        end: Any = np.uint64(0)
        for i in range(words.size):
            word = words[i]
            if word == 0:
                continue
            here = count_marks(word)
            mask = ~np.uint64(0) >> (np.uint64(64) - here)
            carry = np.uint64(0)
            for bit in range(by):
                plane = _extract(_PLANES[bit], word)
                other = ~(plane << _ONE | (last >> bit & _ONE))
                rest += count_marks((plane ^ other ^ carry) & mask) << bit
                carry = (plane & other) | (carry & (plane ^ other))
            count += here
            last = _LAST - leading_zeros(word)
            end = np.uint64(64 * i) + last + _ONE
        return int((end - count - rest) >> by)

    return sum_gaps_by_word


def sum_gaps(words: Array, shift: int) -> int:
    """Return Σ (g >> shift) over the gaps in front of the marks."""
    if shift <= len(_PLANES) and _can_extract():
        return int(_make_sum_gaps(shift)(words))
    return int(_sum_gaps_one_by_one(words, shift))


@cache
def _can_extract() -> bool:
    """Decide whether the processor extracts bits fast: it is slow microcode on the first two generations of Zen."""
    processor, features = find_processor()
    return "+bmi2" in features and processor not in ("znver1", "znver2")


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
    for shift in range(len(_PLANES) + 2):
        sum_gaps(words, shift)
    encode_gaps(words, 1, out, out.copy())
    decode_gaps(out, out, 1, 128, words)
