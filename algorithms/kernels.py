"""Kernels at memory speed for rows of many entries: compiled by numba, one pass where arithmetic takes many.

This file holds loops and nothing else; `wide.py` decides when they run and what runs in their place. Each works on one
row or on rows given one by one, in a fixed order, so no result depends on how rows are spread over threads.

The selection is exact. A regular sample brackets the k-th largest magnitude, one pass over the row packs what is not
below the bracket, the threshold is found among the few entries within it, and a pass over what was packed takes out the
rest. A bracket that missed is widened: a sample can cost time, never an entry.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.cpython.unsafe import numbers

from dbo.algorithms.protocol import Array

trailing_zeros: Any = numbers.trailing_zeros

_CHUNK = 2048     # entries that stay in the first cache between two loops over them
_WORDS = 512      # words of marks whose 32,768 entries stay in the second cache
_EIGHT_TO_ONE, _TOP = np.uint64(0x0102040810204080), np.uint64(56)


def _compiled(function: Callable[..., Any]) -> Any:
    """Cached on disk: beside this file, in the user's cache where that cannot be written, or else not at all."""
    try:
        return numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:
        return numba.njit(nogil=True, error_model="numpy")(function)


# ---- steps -----------------------------------------------------------------------------------------------------------
# The array that is written comes first and is read in the same place: a second name for it would cost the vector units.


@_compiled
def plus1(v: Array, c: float, t: Array) -> None:
    """v += c t."""
    for i in range(v.size):
        v[i] = v[i] + c * t[i]


@_compiled
def plus2(v: Array, c: float, t: Array, e: float, u: Array) -> None:
    """v += c t + e u."""
    for i in range(v.size):
        v[i] = v[i] + c * t[i] + e * u[i]


@_compiled
def series(h: Array, p: Array, lipschitz: float, b: Array) -> None:
    """h = p − h / L + b."""
    for i in range(h.size):
        h[i] = p[i] - h[i] / lipschitz + b[i]


@_compiled
def add1(v: Array, gamma: float, a: Array, b: Array, c: float, t: Array) -> None:
    """v += γ (a − b) + c t."""
    for i in range(v.size):
        v[i] = v[i] + gamma * (a[i] - b[i]) + c * t[i]


@_compiled
def add2(v: Array, gamma: float, a: Array, b: Array, c: float, t: Array, e: float, u: Array) -> None:
    """v += γ (a − b) + c t + e u."""
    for i in range(v.size):
        v[i] = v[i] + gamma * (a[i] - b[i]) + c * t[i] + e * u[i]


@_compiled
def towards1(a: Array, gamma: float, v: Array, c: float, t: Array) -> None:
    """a = v + γ (a − v) + c t."""
    for i in range(v.size):
        a[i] = v[i] + gamma * (a[i] - v[i]) + c * t[i]


@_compiled
def towards2(a: Array, gamma: float, v: Array, c: float, t: Array, e: float, u: Array) -> None:
    """a = v + γ (a − v) + c t + e u."""
    for i in range(v.size):
        a[i] = v[i] + gamma * (a[i] - v[i]) + c * t[i] + e * u[i]


@_compiled
def blend(v: Array, c: float, e: float, t: Array) -> None:
    """v = e t + c v."""
    for i in range(v.size):
        v[i] = e * t[i] + c * v[i]


# ---- neighbour sums --------------------------------------------------------------------------------------------------


@_compiled
def sum1(out: Array, fresh: bool, w: float, r: Array) -> None:
    """out = w r, or out += w r."""
    if fresh:
        for i in range(out.size):
            out[i] = w * r[i]
    else:
        for i in range(out.size):
            out[i] = out[i] + w * r[i]


@_compiled
def sum2(out: Array, fresh: bool, w: float, r: Array, x: float, s: Array) -> None:
    """The same for two rows, in their order."""
    if fresh:
        for i in range(out.size):
            out[i] = w * r[i] + x * s[i]
    else:
        for i in range(out.size):
            out[i] = out[i] + w * r[i] + x * s[i]


@_compiled
def sum3(out: Array, fresh: bool, w: float, r: Array, x: float, s: Array, y: float, t: Array) -> None:
    """The same for three rows, in their order."""
    if fresh:
        for i in range(out.size):
            out[i] = w * r[i] + x * s[i] + y * t[i]
    else:
        for i in range(out.size):
            out[i] = out[i] + w * r[i] + x * s[i] + y * t[i]


@_compiled
def _add_some(out: Array, weight: float, words: Array, entries: Array, first: int, at: Any) -> Any:
    """Adds what is marked in the words from `first` on, as much as the second cache holds; the next entry's place."""
    for i in range(first, min(first + _WORDS, words.size)):
        word = words[i]
        base = np.uint64(64 * i)
        while word != 0:
            j = base + trailing_zeros(word)
            out[j] = out[j] + weight * entries[at]
            at += np.uint64(1)
            word &= word - np.uint64(1)
    return at


@_compiled
def add_packed1(out: Array, w: float, r: Array, a: Array) -> None:
    """out += w q for a q in packed form: 64 marks to a word of r, the marked entries in order in a."""
    at = np.uint64(0)
    for first in range(0, r.size, _WORDS):
        at = _add_some(out, w, r, a, first, at)


@_compiled
def add_packed2(out: Array, w: float, r: Array, a: Array, x: float, s: Array, b: Array) -> None:
    """The same for two, in their order, with `out` read and written once."""
    at, bt = np.uint64(0), np.uint64(0)
    for first in range(0, r.size, _WORDS):
        at = _add_some(out, w, r, a, first, at)
        bt = _add_some(out, x, s, b, first, bt)


@_compiled
def add_packed3(
    out: Array, w: float, r: Array, a: Array, x: float, s: Array, b: Array, y: float, t: Array, c: Array
) -> None:
    """The same for three."""
    at, bt, ct = np.uint64(0), np.uint64(0), np.uint64(0)
    for first in range(0, r.size, _WORDS):
        at = _add_some(out, w, r, a, first, at)
        bt = _add_some(out, x, s, b, first, bt)
        ct = _add_some(out, y, t, c, first, ct)


# ---- top-k of a residual ---------------------------------------------------------------------------------------------


@_compiled
def sample(a: Array, b: Array, stride: int, out: Array) -> None:
    """|a − b| at regular places."""
    for i in range(out.size):
        out[i] = abs(a[i * stride] - b[i * stride])


@_compiled
def gather(
    a: Array, b: Array, low: float, high: float, words: Array, entries: Array, found: Array
) -> tuple[Any, Any, bool]:
    """Packs all of a − b that is not below `low` in magnitude, and finds the magnitudes up to `high` among it.

    How many entries were packed (−1: more than there is room for), how many magnitudes were found, and whether a NaN is
    among the entries. `low` is above zero.
    """
    at: Any = np.uint64(0)
    inside: Any = np.uint64(0)
    broken = False
    r = np.empty(_CHUNK, dtype=a.dtype)
    mark = np.zeros(_CHUNK, dtype=np.uint8)
    marks = mark.view(np.uint64)
    for start in range(0, a.size, _CHUNK):
        if at + _CHUNK > entries.size:
            return np.int64(-1), np.int64(0), False
        p, q = a[start : start + _CHUNK], b[start : start + _CHUNK]    # views: an offset would cost the vector units
        for i in range(p.size):
            r[i] = p[i] - q[i]
        for i in range(p.size):
            mark[i] = np.uint8(0) if abs(r[i]) < low else np.uint8(1)
        for i in range(p.size, _CHUNK):
            mark[i] = 0
        here = words[start // 64 :]
        for i in range((p.size + 63) // 64):
            word = np.uint64(0)
            for j in range(8):    # the product moves the marks of eight bytes to the bits of the highest byte
                word |= (marks[8 * i + j] * _EIGHT_TO_ONE >> _TOP) << np.uint64(8 * j)
            here[i] = word
            base = np.uint64(64 * i)
            while word != 0:
                v = r[base + trailing_zeros(word)]
                entries[at] = v
                at += np.uint64(1)
                found[inside] = abs(v)
                inside += np.uint64(abs(v) <= high)
                broken |= v != v
                word &= word - np.uint64(1)
    return np.int64(at), np.int64(inside), broken


@_compiled
def settle(b: Array, least: float, ties: int, words: Array, entries: Array) -> int:
    """Of a packed q keeps what is above `least`, and of what equals it the first `ties`; b += q. How many are kept."""
    at: Any = np.uint64(0)
    read: Any = np.uint64(0)
    for i in range(words.size):
        word = words[i]
        kept = word
        base = np.uint64(64 * i)
        while word != 0:
            bit = trailing_zeros(word)
            v = entries[read]
            read += np.uint64(1)
            word &= word - np.uint64(1)
            if abs(v) > least or (abs(v) == least and ties > 0):
                if abs(v) == least:
                    ties -= 1
                entries[at] = v
                at += np.uint64(1)
                b[base + bit] = b[base + bit] + v
            else:
                kept ^= np.uint64(1) << bit
        words[i] = kept
    return int(at)


@_compiled
def finite(bits: Array, exponent: int) -> bool:
    """Whether no number with these bits has all bits of the exponent set: neither NaN nor inf."""
    worst: Any = bits[0] & exponent
    for i in range(bits.size):
        worst = max(worst, bits[i] & exponent)
    return bool(worst < exponent)
