"""Fused kernels for wide rows, compiled by numba: one pass over memory where NumPy arithmetic takes several.

This file holds loops and nothing else; `fused.py` decides when they run. Each works on one row, in a fixed order, so no
result depends on how rows are spread over threads. The kernels of top-k are in `selection.py`.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.cpython.unsafe import numbers

from dbo.algorithms.protocol import Array

trailing_zeros: Any = numbers.trailing_zeros

_WORDS = 512      # words whose 32,768 entries stay in the L2 cache


def compiled(function: Callable[..., Any]) -> Any:
    """Compile with a cache on disk: beside this file, else in the user's cache folder, else without a cache."""
    try:
        return numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:
        return numba.njit(nogil=True, error_model="numpy")(function)


# ---- updates ---------------------------------------------------------------------------------------------------------
# The output array comes first and is also an operand: a second name for it would prevent vectorization. Where there are
# two terms, they are added first: a tracker adds the difference of two gradients, which is small where both are large.


@compiled
def add1(v: Array, c: float, t: Array) -> None:
    """v += c t."""
    for i in range(v.size):
        v[i] = v[i] + c * t[i]


@compiled
def add2(v: Array, c: float, t: Array, e: float, u: Array) -> None:
    """v += c t + e u."""
    for i in range(v.size):
        v[i] = v[i] + (c * t[i] + e * u[i])


@compiled
def neumann(h: Array, p: Array, lipschitz: float, b: Array) -> None:
    """h = p − h / L + b."""
    for i in range(h.size):
        h[i] = p[i] - h[i] / lipschitz + b[i]


@compiled
def step(v: Array, gamma: float, a: Array, b: Array, c: float, t: Array) -> None:
    """v += γ (a − b) + c t."""
    for i in range(v.size):
        v[i] = v[i] + gamma * (a[i] - b[i]) + c * t[i]


@compiled
def track(s: Array, gamma: float, a: Array, b: Array, new: Array, old: Array) -> None:
    """s += γ (a − b) + new − old; old = new."""
    for i in range(s.size):
        s[i] = s[i] + (gamma * (a[i] - b[i]) + (new[i] - old[i]))
        old[i] = new[i]


@compiled
def shift(s: Array, new: Array, old: Array) -> None:
    """s += new − old; old = new."""
    for i in range(s.size):
        s[i] = s[i] + (new[i] - old[i])
        old[i] = new[i]


@compiled
def gossip1(a: Array, gamma: float, v: Array, c: float, t: Array) -> None:
    """a = v + γ (a − v) + c t."""
    for i in range(v.size):
        a[i] = v[i] + gamma * (a[i] - v[i]) + c * t[i]


@compiled
def gossip2(a: Array, gamma: float, v: Array, c: float, t: Array, e: float, u: Array) -> None:
    """a = v + γ (a − v) + c t + e u."""
    for i in range(v.size):
        a[i] = v[i] + (gamma * (a[i] - v[i]) + (c * t[i] + e * u[i]))


@compiled
def average(v: Array, c: float, e: float, t: Array) -> None:
    """v = e t + c v."""
    for i in range(v.size):
        v[i] = e * t[i] + c * v[i]


# ---- neighbour sums --------------------------------------------------------------------------------------------------


@compiled
def sum1(out: Array, fresh: bool, w: float, r: Array) -> None:
    """out = w r, or out += w r."""
    if fresh:
        for i in range(out.size):
            out[i] = w * r[i]
    else:
        for i in range(out.size):
            out[i] = out[i] + w * r[i]


@compiled
def sum2(out: Array, fresh: bool, w: float, r: Array, x: float, s: Array) -> None:
    """The same for two rows, in their order."""
    if fresh:
        for i in range(out.size):
            out[i] = w * r[i] + x * s[i]
    else:
        for i in range(out.size):
            out[i] = out[i] + w * r[i] + x * s[i]


@compiled
def sum3(out: Array, fresh: bool, w: float, r: Array, x: float, s: Array, y: float, t: Array) -> None:
    """The same for three rows, in their order."""
    if fresh:
        for i in range(out.size):
            out[i] = w * r[i] + x * s[i] + y * t[i]
    else:
        for i in range(out.size):
            out[i] = out[i] + w * r[i] + x * s[i] + y * t[i]


@compiled
def _add_some(out: Array, weight: float, words: Array, entries: Array, first: int, at: Any) -> Any:
    """Add the entries marked in the words from `first` on, as many as the L2 cache holds; return the next position."""
    for i in range(first, min(first + _WORDS, words.size)):
        word = words[i]
        base = np.uint64(64 * i)
        while word != 0:
            j = base + trailing_zeros(word)
            out[j] = out[j] + weight * entries[at]
            at += np.uint64(1)
            word &= word - np.uint64(1)
    return at


@compiled
def add_packed1(out: Array, w: float, r: Array, a: Array) -> None:
    """out += w q for a packed q: 64 marks to a word of r, the marked entries in order in a."""
    at = np.uint64(0)
    for first in range(0, r.size, _WORDS):
        at = _add_some(out, w, r, a, first, at)


@compiled
def add_packed2(out: Array, w: float, r: Array, a: Array, x: float, s: Array, b: Array) -> None:
    """The same for two, in their order, with `out` read and written once."""
    at, bt = np.uint64(0), np.uint64(0)
    for first in range(0, r.size, _WORDS):
        at = _add_some(out, w, r, a, first, at)
        bt = _add_some(out, x, s, b, first, bt)


@compiled
def add_packed3(
    out: Array, w: float, r: Array, a: Array, x: float, s: Array, b: Array, y: float, t: Array, c: Array
) -> None:
    """The same for three."""
    at, bt, ct = np.uint64(0), np.uint64(0), np.uint64(0)
    for first in range(0, r.size, _WORDS):
        at = _add_some(out, w, r, a, first, at)
        bt = _add_some(out, x, s, b, first, bt)
        ct = _add_some(out, y, t, c, first, ct)


SUMS = (sum1, sum2, sum3)                                      # by number of rows
PACKED_SUMS = (add_packed1, add_packed2, add_packed3)


@compiled
def all_finite(bits: Array, exponent: int) -> bool:
    """Decide whether no number with these bits has all bits of the exponent set: neither NaN nor inf."""
    worst: Any = bits[0] & exponent
    for i in range(bits.size):
        worst = max(worst, bits[i] & exponent)
    return bool(worst < exponent)
