"""Quantize the kept values of a sparse row: a sign and a level of `bits` − 1 bits, with one scale per row.

The scale s is the largest magnitude, rounded up to a float of which only the first 16 bits are set. L = 2^(bits−1)
levels divide (0, s]:

    uniform   level n is n s/L; a value takes the nearest, and those below s/(2L) are not sent
    log       level n covers [a, a/r) with r = 2^(−S/L) and a = s r^(L−n+1), and stands for 2a/(1 + r): the point with
              the smallest worst relative error, (1 − r)/(1 + r). The S octaves, in eighths and at most 12, reach
              down to the smallest kept value; those below are not sent

Levels are products, quotients and square roots of float64 numbers, which IEEE 754 rounds correctly: a receiver computes
the sender's bits on any processor.
"""

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from dbo.algorithms.kernels.interface import selection_of
from dbo.algorithms.protocol import Array

EIGHTHS = 96                # largest span: 12 octaves, in eighths of an octave
_EXCESS = 2.0**-4           # most by which rounding up enlarges a float64 scale, relative; a float32 one by 2^−7
_KEPT_BITS = 16             # of a scale


@dataclass(frozen=True, slots=True)
class Grid:
    """The levels of a quantized sparse message, one scale and span per row."""

    bits: int               # of a value: its sign and its level
    log: bool               # levels are logarithmic, not uniform
    scale: Array            # (nodes,) in the dtype of the values
    span: Array             # (nodes,) octaves that the levels cover, in eighths; 0 for uniform ones

    def magnitudes(self, row: int) -> Array:
        """Return the (2^(bits−1),) magnitudes that the values of a row can have, ascending, in their dtype."""
        scale = self.scale[row]
        return level_values(float(scale), int(self.span[row]), self.bits, self.log).astype(scale.dtype)


def level_values(scale: float, span: int, bits: int, log: bool) -> Array:
    """Return the magnitudes that the levels stand for, ascending, in float64."""
    with np.errstate(all="ignore"):      # the scale of a damaged or diverged sender may be any number
        return np.asarray(scale * level_shares(span if log else 0, bits, log))


@lru_cache(maxsize=64)
def level_shares(span: int, bits: int, log: bool) -> Array:
    """Return the magnitudes of levels with the scale 1; read-only, because callers share them."""
    powers = inverse_powers(span, bits) if log else np.ones(0)
    count = 1 << (bits - 1)
    shares: Array = 2 * powers[:0:-1] / (1 + powers[1]) if log else np.arange(1, count + 1) / count
    shares.setflags(write=False)
    return shares


def level_edges(scale: float, span: int, bits: int, log: bool) -> Array:
    """Return the smallest magnitude that each level covers, ascending, in float64."""
    count = 1 << (bits - 1)
    if not log:
        return np.asarray(scale * ((2 * np.arange(count) + 1) / (2 * count)))
    return np.asarray(scale * inverse_powers(span, bits)[:0:-1])


@lru_cache(maxsize=64)
def inverse_powers(span: int, bits: int) -> Array:
    """Return r^0, …, r^L for r = 2^(−span / 8L): a product over the binary digits of the exponent."""
    count = 1 << (bits - 1)
    exponents = span * np.arange(count + 1)      # in units of 1/(8 L) octave: digit bits + 2 is one octave
    powers = np.ones(count + 1)
    for digit, factor in enumerate(digit_factors(bits)):
        powers = np.where(exponents >> digit & 1, powers * factor, powers)
    powers.setflags(write=False)
    return powers


def digit_factors(bits: int) -> list[float]:
    """Return what each binary digit of an exponent, in units of 1/(8 L) octave, multiplies a power by."""
    factors = [2.0 ** -(1 << digit) for digit in range(5)]
    for _ in range(bits + 2):
        factors.insert(0, math.sqrt(factors[0]))
    return factors


def level_tables(scale: Any, span: Any, bits: int, log: bool) -> Any:
    """Return (rows, 2^(bits−1)) `level_values` of each row, in float64; those of tensors have the same bits."""
    return selection_of(scale).level_tables(scale, span, bits, log)


def round_scale(largest: Array) -> Array:
    """Round magnitudes up to floats whose bits after the first 16 are 0; NaN where one is not finite."""
    rounded: Array = selection_of(largest).round_scale(largest, _KEPT_BITS)
    return rounded


def scale_code(scale: Any) -> bytes:
    """Return the first two bytes of a scale, little-endian."""
    return np.asarray(scale).astype(np.asarray(scale).dtype.newbyteorder("<")).tobytes()[-2:]


def read_scale(code: bytes | memoryview, dtype: np.dtype[Any]) -> Any:
    """Reverse `scale_code`."""
    padded = bytes(dtype.itemsize - 2) + bytes(code)
    return np.frombuffer(padded, dtype.newbyteorder("<")).astype(dtype.newbyteorder("="))[0]


def choose_span(scale: float, smallest: float) -> int:
    """Return the fewest eighths of an octave below the scale that cover this magnitude, at most `EIGHTHS`."""
    return int(np.count_nonzero(scale * eighths()[:-1] > smallest))


@cache
def eighths() -> Array:
    """Return 2^(−n/8) for n = 0, …, 96, as exactly as `inverse_powers`."""
    octaves = np.arange(EIGHTHS + 1) // 8
    return np.asarray(inverse_powers(8, 4)[np.arange(EIGHTHS + 1) % 8] * 2.0**-octaves)


def quantize_entries(entries: Array, bits: int, log: bool) -> tuple[Array, Array | None, Any, int]:
    """Return the nonzero entries of one row at their levels, 0 where they are not sent; the levels, scale and span.

    Levels count from 1; 0 is not sent. They are None where two of them have the same magnitude: a code is the first of
    these. The entries of a row that is not finite all become NaN: a diverged run must not go unnoticed.
    """
    magnitude = np.abs(entries)
    scale = round_scale(np.max(magnitude, initial=0, keepdims=True))[0]
    if not entries.size or np.isnan(scale):
        return np.full_like(entries, scale), None, scale, 0
    span = choose_span(float(scale), float(magnitude.min())) if log else 0
    edges = level_edges(float(scale), span, bits, log).astype(entries.dtype)
    values = level_values(float(scale), span, bits, log).astype(entries.dtype)
    level = np.searchsorted(edges, magnitude, side="right")
    level = level.astype(np.uint8 if bits <= 8 else np.uint16)
    levels = np.concatenate([np.zeros(1, entries.dtype), values])
    differ = bool((values[1:] > values[:-1]).all())
    return np.copysign(levels[level], entries) + entries.dtype.type(0), level if differ else None, scale, span


def quantize_rows(rows: Array, bits: int, log: bool) -> tuple[Array, Grid]:
    """Quantize the nonzero entries of each row; return the rows as receivers decode them, and their grid."""
    values, scale, span = selection_of(rows).quantize_rows(rows, bits, log)
    return values, Grid(bits, log, scale, span)


def quantized_share(bits: int, log: bool, kept: int) -> float:
    """Return the least share of ‖v‖² that remains of any v with `kept` entries: 1 − ‖Q(v) − v‖²/‖v‖².

    Uniform levels: the largest entry has a relative error of at most e, the others an error of at most c s and of at
    most themselves. Logarithmic levels: sent entries have a relative error of at most e, the others are below c s. Both
    give ‖Q(v) − v‖² ≤ (e² + t)/(1 + t) ‖v‖² with t = (k − 1) (c s / max|v|)².
    """
    count = 1 << (bits - 1)
    if log:
        ratio = 2.0 ** (-EIGHTHS / 8 / count)
        error, least = (1 - ratio) / (1 + ratio), 2.0 ** (-EIGHTHS / 8)
    else:
        error, least = min(_EXCESS, (1 + _EXCESS) / (2 * count)), 1 / (2 * count)
    unsent = (kept - 1) * (least * (1 + _EXCESS)) ** 2
    return float((1 - error**2) / (1 + unsent))
