"""Draw from the generators of many keys at once: the numbers of `np.random.default_rng(key)`, to the last bit.

A generator of NumPy takes longer to build than a batch to draw. Seeding (`SeedSequence`) is 32-bit arithmetic, and the
generator (PCG64, XSL-RR 128/64) is linear: the n-th state is Aⁿ s + (Aⁿ⁻¹ + … + 1) c modulo 2¹²⁸. So all numbers of all
keys are a few operations on arrays. M. O'Neill: PCG, Harvey Mudd College HMC-CS-2014-0905.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
Longs = NDArray[np.uint64]

_POOL = 4                                                   # words of NumPy's SeedSequence
_INIT_A, _MULT_A = 0x43B0D7E5, 0x931E8875
_INIT_B, _MULT_B = 0x8B51F9DD, 0x58F38DED
_MIX_L, _MIX_R = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_STEP = 0x2360ED051FC65DA44385DF649FCCF645                  # of PCG64
_LOW = (1 << 64) - 1
_32, _HALF = np.uint64(32), np.uint64(0xFFFFFFFF)


def draw_integers(keys: Words, high: NDArray[Any], count: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return (keys, 2 · count) numbers below `high`, (keys,), and which rows are not those of the generator.

    Row i is `np.random.default_rng(keys[i]).integers(high[i], size=2 * count)`, for 1 < high < 2³². Where the generator
    rejects a number, which happens to one of a million, the caller has to ask it.
    """
    generated = _generate(*_seed(keys), count)
    words = generated.astype("<u8", copy=False).view("<u4").reshape(len(keys), 2 * count)   # lower half first
    limit = high.astype(np.uint64)[:, None]
    product = words * limit                                 # Lemire: the upper half of a product is below `high`
    rest = ((np.uint64(1 << 32) - limit) % limit).astype(np.uint32)
    is_rejected = np.logical_or.reduce(product.astype(np.uint32) < rest, axis=1)
    product >>= _32
    return product.view(np.int64), is_rejected


def _seed(keys: Words) -> tuple[Longs, Longs, Longs, Longs]:
    """Return initial state and increment of PCG64 of each key, upper and lower half of each."""
    words = np.ascontiguousarray(keys.T)
    if len(words) < _POOL:
        words = np.concatenate([words, np.zeros((_POOL - len(words), len(keys)), np.uint32)])
    constants = _constants(_INIT_A, _MULT_A, 4 * max(_POOL, len(words)))
    at = 0

    def scramble(value: Words) -> Words:
        nonlocal at
        at += 1
        return _fold((value ^ constants[at - 1]) * constants[at])

    def mix(one: Words, other: Words) -> Words:
        return _fold(one * _MIX_L - other * _MIX_R)

    pool = [scramble(word) for word in words[:_POOL]]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                pool[target] = mix(pool[target], scramble(pool[source]))
    for word in words[_POOL:]:
        for target in range(_POOL):
            pool[target] = mix(pool[target], scramble(word))
    more = _constants(_INIT_B, _MULT_B, 8)
    state = []
    for n in range(8):
        state.append(_fold((pool[n % _POOL] ^ more[n]) * more[n + 1]).astype(np.uint64))
    high, low, inc_high, inc_low = (state[2 * n] | (state[2 * n + 1] << _32) for n in range(4))
    one = np.uint64(1)
    inc_high, inc_low = (inc_high << one) | (inc_low >> np.uint64(63)), (inc_low << one) | one
    # PCG64 starts from (init + increment), one step on.
    return *_add(*_advance(*_add(high, low, inc_high, inc_low), _STEP), inc_high, inc_low), inc_high, inc_low


def _fold(words: Words) -> Words:
    folded: Words = np.bitwise_xor(words, words >> np.uint32(16))
    return folded


def _generate(high: Longs, low: Longs, inc_high: Longs, inc_low: Longs, count: int) -> Longs:
    """Return (keys, count) outputs."""
    factors, sums = _powers(count)
    state = _multiply(high[:, None], low[:, None], *factors)
    top, bottom = _add(*state, *_multiply(inc_high[:, None], inc_low[:, None], *sums))
    turn = top >> np.uint64(58)
    bottom ^= top
    turned: Longs = np.bitwise_or(bottom >> turn, bottom << (-turn & np.uint64(63)))
    return turned


def _advance(high: Longs, low: Longs, factor: int) -> tuple[Longs, Longs]:
    return _multiply(high, low, np.uint64(factor >> 64), np.uint64(factor & _LOW))


def _multiply(high: Longs, low: Longs, by_high: Any, by_low: Any) -> tuple[Longs, Longs]:
    """Return the product modulo 2¹²⁸, upper and lower half."""
    a, b = low >> _32, low & _HALF
    c, d = by_low >> _32, by_low & _HALF
    middle = (b * d >> _32) + a * d                         # no sum of these exceeds 64 bits
    other = (middle & _HALF) + b * c
    upper = a * c + (middle >> _32) + (other >> _32)
    upper += high * by_low
    upper += low * by_high
    return upper, low * by_low


def _add(high: Longs, low: Longs, more_high: Longs, more_low: Longs) -> tuple[Longs, Longs]:
    total = low + more_low
    return high + more_high + (total < low), total


@lru_cache(maxsize=4)
def _constants(first: int, factor: int, count: int) -> Words:
    """Return first · factorⁿ for n = 0 … count."""
    return np.array([first * pow(factor, n, 1 << 32) & 0xFFFFFFFF for n in range(count + 1)], dtype=np.uint32)


@lru_cache(maxsize=16)
def _powers(count: int) -> tuple[tuple[Longs, Longs], tuple[Longs, Longs]]:
    """Return Aⁿ and Aⁿ⁻¹ + … + 1 for n = 1 … count, upper and lower half of each."""
    factors, sums, power, total = [], [], 1, 0
    for _ in range(count):
        power, total = power * _STEP % (1 << 128), (total * _STEP + 1) % (1 << 128)
        factors.append(power)
        sums.append(total)
    halves = [np.array([n >> shift & _LOW for n in numbers], dtype=np.uint64)
              for numbers in (factors, sums) for shift in (64, 0)]
    return (halves[0], halves[1]), (halves[2], halves[3])
