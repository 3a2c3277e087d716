"""Number the sets of k positions among d: the shortest code of a few positions, ⌈log₂ C(d, k)⌉ bits for any of them.

The set p_1 < … < p_k has the number Σ C(p_i, i), from 0 to C(d, k) − 1 (the combinatorial number system), in
little-endian bytes. Its length depends on k and d alone. The work grows with k³, so only few positions are enumerated.
"""

from functools import lru_cache
from math import comb, exp, lgamma, log

import numpy as np
from numpy.typing import NDArray

from dbo.platform.network.row_format import CorruptError

MAX_COUNT = 256         # positions: 2 ms to encode, 3 ms to decode
MAX_DIM = 1 << 24       # entries: what float64 logarithms estimate a position among to a few places


@lru_cache(maxsize=256)
def enumerated_length(count: int, dim: int) -> int:
    """Return the bytes of the number of any `count` positions among `dim`; 0 if they are not enumerated."""
    if not 0 < count <= MAX_COUNT or dim > MAX_DIM:
        return 0
    return max(1, -(-(comb(dim, count) - 1).bit_length() // 8))


def encode_enumerated(positions: NDArray[np.int64], dim: int) -> bytes:
    """Return the number of ascending positions."""
    number = sum(comb(position, i) for i, position in enumerate(positions.tolist(), 1))
    return number.to_bytes(enumerated_length(positions.size, dim), "little")


def decode_enumerated(body: memoryview, count: int, dim: int) -> NDArray[np.int64]:
    """Return the positions with the number in a body; raise CorruptError if there are fewer sets."""
    number = int.from_bytes(body[: enumerated_length(count, dim)], "little")
    if number >= comb(dim, count):
        raise CorruptError(f"no {count} of {dim} positions have this number")
    positions = np.empty(count, np.int64)
    for i in range(count, 0, -1):
        positions[i - 1], rest = _find_last(number, i)
        number -= rest
    return positions


def _find_last(number: int, count: int) -> tuple[int, int]:
    """Return the largest p with C(p, count) ≤ number, and C(p, count)."""
    position = _estimate_last(number, count)
    found = comb(position, count)
    while found > number:
        found = found * (position - count) // position
        position -= 1
    while True:
        above = found * (position + 1) // (position + 1 - count) if found else comb(position + 1, count)
        if above > number:
            return position, found
        position, found = position + 1, above


def _estimate_last(number: int, count: int) -> int:
    """Return p with C(p, count) ≈ number, by Newton's method on log C."""
    if count == 1 or not number:
        return number if number else count - 1
    shift = max(0, number.bit_length() - 60)
    target = log(number >> shift) + shift * log(2)
    at = exp((target + lgamma(count + 1)) / count) + (count - 1) / 2
    for _ in range(4):
        at = max(at, count)
        at -= (lgamma(at + 1) - lgamma(at - count + 1) - lgamma(count + 1) - target) * (at - (count - 1) / 2) / count
    return max(count - 1, int(at))
