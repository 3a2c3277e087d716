"""Encode the positions of a wide quantized row's values with an Exp-Golomb code of the gaps between them.

A Rice code suits values that are anywhere with the same probability. Where they cluster, most gaps are short and some
are long: the Exp-Golomb code of order o gives a gap g about 2 log₂(g / 2^o) + o bits. It takes n = ⌊log₂((g >> o) + 1)⌋
in unary, ended by a one, and the lowest n + o bits of g − (2^n − 1) 2^o. Streams are those of the Rice code
(`positions`). The order with the shortest code is found from a histogram of the gaps, and is part of the form.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbo.algorithms.api import PackedRow, code_kernels
from dbo.platform.network.positions import as_words, count_unary_bytes, find_positions, is_padded, rice_parameter
from dbo.platform.network.row_format import ORDERS, CorruptError, packed_length

_MOST_BITS = 32      # of the unary part of a gap below 2^32


def golomb_length(count: Any, digits: Any, order: Any) -> Any:
    """Return the bytes of the code of this order, given the number of values and Σ n."""
    return (count + digits + 7) // 8 + (count * order + digits + 7) // 8


def measure_codes(row: PackedRow, dim: int) -> tuple[int, int, int]:
    """Return the bytes of the unary parts of the Rice code of a row's marks, and what `measure_golomb` returns."""
    count, digits = row.entries.size, np.zeros(ORDERS, dtype=np.int64)
    gaps = code_kernels().sum_digits(row.words, rice_parameter(count, dim), digits)
    lengths = [golomb_length(count, total, order) for order, total in enumerate(digits.tolist())]
    best = min(lengths)
    return packed_length(count + gaps, 1), best, lengths.index(best)


def measure_golomb(row: PackedRow) -> tuple[int, int]:
    """Return the bytes of the shortest code of a row's marks, and its order: the lowest of equally short ones."""
    return measure_codes(row, 64 * row.words.size)[1:]


def encode_golomb(words: NDArray[Any], count: int, order: int, length: int) -> list[bytes | memoryview]:
    """Return the code of marks in parts, given the bytes of both."""
    unary, lowest = (np.zeros(length // 8 + 2, dtype=np.uint64) for _ in range(2))
    code_kernels().encode_golomb(words, order, unary, lowest)
    streams = [stream.astype("<u8", copy=False).view(np.uint8) for stream in (unary, lowest)]
    first, second = golomb_parts(streams[0].data, count, order)
    return [streams[0][:first].data, streams[1][:second].data]


def golomb_parts(body: memoryview, count: int, order: int) -> tuple[int, int]:
    """Return the bytes of the two parts of a code; raise CorruptError if these bytes cannot hold them.

    Nothing larger than the bytes themselves is allocated.
    """
    first = count_unary_bytes(body, count, packed_length(count * (1 + _MOST_BITS), 1))
    return first, packed_length(count * order + _sum_digits(body, first, count), 1)


def _sum_digits(body: memoryview, first: int, count: int) -> int:
    """Return Σ n, given the bytes of the unary parts: the zeros in front of the last one."""
    return 8 * (first - 1) + body[first - 1].bit_length() - count


def decode_golomb(body: memoryview, count: int, dim: int, order: int) -> tuple[NDArray[np.uint64], int]:
    """Return the positions in a code as marks, and its bytes; raise CorruptError if no sender makes it."""
    first, second = golomb_parts(body, count, order)
    digits = _sum_digits(body, first, count)
    unary, lowest = as_words(body[:first]), as_words(body[first : first + second])
    if not is_padded(body[first : first + second], count * order + digits):
        raise CorruptError("the last byte of the gaps is not padded with zeros")
    words = np.zeros(-(-dim // 64), dtype=np.uint64)
    if code_kernels().decode_golomb(unary, lowest, order, dim, words) != count:
        raise CorruptError(f"a gap ends behind the {dim} entries")
    return words, first + second


def decode_golomb_positions(body: memoryview, count: int, dim: int, order: int) -> NDArray[np.int64]:
    """Return the positions in a code; raise CorruptError if there is one that no sender makes."""
    return find_positions(decode_golomb(body, count, dim, order)[0], count)
