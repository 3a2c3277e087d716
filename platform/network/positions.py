"""Encode the positions of a sparse row's values with a Rice code of the gaps between them.

A gap g takes g >> l in unary, ended by a one, and its lowest l bits. The parameter l depends on the numbers of entries
and values alone, so it is not sent. All unary parts come first, padded to a byte, then all lowest bits: a receiver
finds the end of the unary parts by counting ones. k random positions among d take at most 1.03 log₂ C(d, k) bits, so no
arithmetic coder is worth its time, and the length is a sum over the gaps.
"""

from bisect import bisect_right
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbo.algorithms.api import MANY_WORDS, PackedRow, mark_kernels
from dbo.platform.network.row_format import CorruptError, pack_codes, packed_length, unpack_codes

_GOLDEN = (5**0.5 - 1) / 2


@cache
def parameter_limits(dim: int) -> tuple[int, ...]:
    """Return, ascending, the numbers of values below which the parameter is larger by one.

    With density p the code with l + 1 is the shorter one if u = (1 − p)^(2^l) satisfies u + u² > 1.
    """
    limits = (int(np.ceil(dim * -np.expm1(np.log(_GOLDEN) / 2**shift))) for shift in range(32))
    return tuple(sorted(limit for limit in limits if limit > 1))


def rice_parameter(count: int, dim: int) -> int:
    """Return l."""
    limits = parameter_limits(dim)
    return len(limits) - bisect_right(limits, count)


def unary_bytes(positions: NDArray[Any], dim: int) -> int:
    """Return the bytes of the unary parts."""
    shift = rice_parameter(positions.size, dim)
    return packed_length(positions.size + int((_gaps(positions) >> shift).sum()), 1)


def unary_bytes_packed(row: PackedRow, dim: int) -> int:
    """Return the bytes of the unary parts of a packed row."""
    if row.words.size < MANY_WORDS:
        return unary_bytes(row.positions(dim), dim)
    count = row.entries.size
    return packed_length(count + mark_kernels().sum_gaps(row.words, rice_parameter(count, dim)), 1)


def encode_positions(positions: NDArray[Any], dim: int) -> bytes:
    """Return the code of ascending positions."""
    shift, gaps = rice_parameter(positions.size, dim), _gaps(positions)
    ends = np.cumsum((gaps >> shift) + 1)
    unary = np.zeros(int(ends[-1]) if ends.size else 0, dtype=np.bool_)
    unary[ends - 1] = True
    return np.packbits(unary, bitorder="little").tobytes() + pack_codes(gaps & ((1 << shift) - 1), shift)


def encode_packed(row: PackedRow, dim: int, unary_length: int) -> list[bytes | memoryview]:
    """Return the code of a packed row's marks in parts, given the bytes of the unary one."""
    if row.words.size < MANY_WORDS:
        return [encode_positions(row.positions(dim), dim)]
    shift = rice_parameter(row.entries.size, dim)
    length = packed_length(row.entries.size, shift)
    unary, lowest = (np.zeros(size // 8 + 2, dtype=np.uint64) for size in (unary_length, length))
    mark_kernels().encode_gaps(row.words, shift, unary, lowest)
    return [
        words.astype("<u8", copy=False).view(np.uint8)[:size].data
        for words, size in ((unary, unary_length), (lowest, length))
    ]


def code_length(body: memoryview, count: int, dim: int) -> tuple[int, int]:
    """Return the bytes of the two parts of a code; raise CorruptError if these bytes cannot hold them.

    Nothing larger than the bytes themselves is allocated.
    """
    shift = rice_parameter(count, dim)
    lowest = packed_length(count, shift)
    if not count:
        return 0, lowest
    return count_unary_bytes(body, count, packed_length(count + (dim >> shift), 1)), lowest


def count_unary_bytes(body: memoryview, count: int, most: int) -> int:
    """Return the bytes, at most so many, up to the one that ends the last of `count` unary parts."""
    most = min(len(body), most)
    ones = np.cumsum(np.bitwise_count(np.frombuffer(body, "<u8", count=most // 8)), dtype=np.uint32)
    word = int(np.searchsorted(ones, np.uint32(count)))
    seen = int(ones[word - 1]) if word else 0
    for at in range(8 * word, min(8 * word + 8, most)):
        seen += body[at].bit_count()
        if seen == count:
            return at + 1
    raise CorruptError(f"the gaps do not end with {count} values")


def decode_positions(body: memoryview, count: int, dim: int) -> NDArray[np.int64]:
    """Return the positions in a code; raise CorruptError if there is one that no sender makes."""
    shift = rice_parameter(count, dim)
    first, second = code_length(body, count, dim)
    ends = np.flatnonzero(np.unpackbits(np.frombuffer(body, np.uint8, count=first), bitorder="little"))
    gaps = np.diff(ends, prepend=-1) - 1
    lowest = unpack_codes(np.frombuffer(body[first : first + second], np.uint8), shift, count)
    positions: NDArray[np.int64] = np.cumsum(((gaps << shift) | lowest) + 1) - 1
    if count and int(positions[-1]) >= dim:
        raise CorruptError(f"a gap ends behind the {dim} entries")
    return positions


def decode_words(body: memoryview, count: int, dim: int) -> tuple[NDArray[np.uint64], int]:
    """Return the positions in a code as marks, and its bytes; raise CorruptError as `decode_positions` does."""
    shift = rice_parameter(count, dim)
    first, second = code_length(body, count, dim)
    unary, lowest = as_words(body[:first]), as_words(body[first : first + second])
    if not is_padded(body[first : first + second], count * shift):
        raise CorruptError("the last byte of the gaps is not padded with zeros")
    words = np.zeros(-(-dim // 64), dtype=np.uint64)
    if mark_kernels().decode_gaps(unary, lowest, shift, dim, words) != count:
        raise CorruptError(f"a gap ends behind the {dim} entries")
    return words, first + second


def _gaps(positions: NDArray[Any]) -> NDArray[np.int64]:
    return np.diff(positions.astype(np.int64, copy=False), prepend=-1).astype(np.int64, copy=False) - 1


def find_positions(words: NDArray[np.uint64], count: int) -> NDArray[np.int64]:
    """Return the positions of so many marks."""
    found = np.empty(count, dtype=np.int64)
    mark_kernels().find_positions(words, found)
    return found


def is_padded(data: memoryview, bits: int) -> bool:
    """Decide whether the last byte of so many bits is padded with zeros."""
    return not (bits % 8 and data[-1] >> bits % 8)


def as_words(data: memoryview) -> NDArray[np.uint64]:
    """Copy bytes to where words are aligned, with a word of zeros behind them."""
    padded = np.zeros((len(data) // 8 + 2) * 8, dtype=np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    return padded.view("<u8").astype(np.uint64, copy=False)
