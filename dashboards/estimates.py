"""Means over seeds with bootstrap confidence intervals, and numbers as people read them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
_DRAWS = 1000
_BAND_DRAWS = 300       # per point of a curve: a shade needs no more


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean, its interval where there are two values at least, and how many values there are."""

    mean: float
    low: float | None
    high: float | None
    count: int

    def apart_from(self, other: "Estimate") -> bool:
        """Whether the intervals do not overlap."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return False
        return self.high < other.low or other.high < self.low


def _draws(count: int, draws: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, count, (draws, count))      # the same report twice is the same report


def estimate(values: Iterable[float | None]) -> Estimate | None:
    """The mean of what is there; None if nothing is."""
    there = np.array([value for value in values if value is not None and math.isfinite(value)], dtype=np.float64)
    if not there.size:
        return None
    if there.size == 1:
        return Estimate(float(there[0]), None, None, 1)
    means = there[_draws(there.size, _DRAWS)].mean(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(there.mean()), float(low), float(high), int(there.size))


def band(rows: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Interval of the mean at each point of a curve; a row per seed."""
    means = rows[_draws(len(rows), _BAND_DRAWS)].mean(axis=1)
    means.sort(axis=0)
    edge = int((1 - LEVEL) / 2 * _BAND_DRAWS)
    return means[edge], means[-1 - edge]


def thin(length: int, most: int, keep: Sequence[int] = ()) -> NDArray[np.int64]:
    """So many positions at most, spread evenly, the first, the last and those to be kept among them."""
    if length <= most:
        return np.arange(length)
    even = np.round(np.linspace(0, length - 1, most - len(keep))).astype(np.int64)
    return np.unique(np.concatenate([even, np.array(keep, dtype=np.int64)]))


def rounded(values: Any, digits: int = 4) -> list[float | int | None]:
    """As plain numbers with so many significant digits; None where there is none."""
    return [_short(value, digits) for value in np.asarray(values, dtype=np.float64).tolist()]


def _short(value: float, digits: int) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def show(value: float | None, digits: int = 3) -> str:
    """A number for a table: plain, no needless zeros, thousands set apart."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.{digits - 1}e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}".replace(",", "\u202f")
    return f"{value:.{digits}g}"
