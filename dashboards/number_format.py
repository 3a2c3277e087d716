"""Format numbers for pages and tables: significant digits, thinned curves."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def thin_indices(length: int, most: int, keep: Sequence[int] = ()) -> NDArray[np.int64]:
    """Return at most `most` positions, evenly spread, with the first, the last and those to keep among them."""
    if length <= most:
        return np.arange(length)
    even = np.round(np.linspace(0, length - 1, most - len(keep))).astype(np.int64)
    return np.unique(np.concatenate([even, np.array(keep, dtype=np.int64)]))


def round_significant(values: Any, digits: int = 4) -> list[float | int | None]:
    """Return plain numbers with so many significant digits; None for those that are not finite."""
    return [_round(value, digits) for value in np.asarray(values, dtype=np.float64).tolist()]


def _round(value: float, digits: int) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def format_number(value: float | None, digits: int = 3) -> str:
    """Format a number for a table: plain, without needless zeros, with separated thousands."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.{digits - 1}e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}".replace(",", "\u202f")
    return f"{value:.{digits}g}"
