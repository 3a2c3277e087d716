"""Steps on rows of many entries: one pass over memory each, in buffers that exist already.

Arithmetic on arrays takes a pass and a fresh array per operator. With rows of megabytes that is what a round costs, so
the algorithms that are run on such rows say their steps through the functions below. For narrow rows, and on a GPU,
each is the plain expression in its docstring; for wide NumPy rows a compiled kernel computes the same in one pass and
writes into an argument that the caller has no more use for. numba is imported when the first wide row comes.
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dbo.algorithms.compression.compressors import Compressor, TopK, kept, largest
from dbo.algorithms.gossip import Message, Packed, PackedRow, Sum
from dbo.algorithms.protocol import Array
from dbo.algorithms.rng import Draws

WIDE = 1 << 16      # entries of a row from which a kernel outweighs its call
_SAMPLE = 1 << 13   # entries from which a threshold is guessed: more are more cache misses, fewer a wider bracket
T = TypeVar("T")

_threads = 1


def use(threads: int) -> None:
    """So many threads from here on; each row is one thread's work, so the count changes no bit."""
    global _threads
    _threads = threads


def each(work: Callable[[int], T], rows: int) -> list[T]:
    """work(0), work(1), … on the threads in use."""
    if _threads == 1 or rows == 1:
        return [work(i) for i in range(rows)]
    return list(_pool(_threads).map(work, range(rows)))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="rows")


@cache
def warm(dtype: str) -> None:
    """Compiles the kernels for one dtype, or takes them from the cache: not in the middle of a measurement."""
    from dbo.algorithms.kernels import compiled, selection

    form = selection.fastest()
    if not _compiled_earlier(form.gather):
        print("dbo: compiling kernels for wide rows, once", file=sys.stderr, flush=True)
    number = np.dtype(dtype).type
    one, v, w = number(1), np.zeros(64, dtype=dtype), np.ones(64, dtype=dtype)
    words = np.zeros(1, dtype=np.uint64)
    for kernel in (compiled.plus1, compiled.plus2):
        kernel(v, *(one, w) * (1 if kernel is compiled.plus1 else 2))
    compiled.add(v, one, w, w, one, w)
    compiled.track(v, one, w, w, w, w.copy())
    compiled.jump(v, w, w.copy())
    compiled.towards1(v, one, w, one, w)
    compiled.towards2(v, one, w, one, w, one, w)
    compiled.blend(v, one, one, w)
    compiled.series(v, w, one, w)
    for count, kernel in enumerate((compiled.sum1, compiled.sum2, compiled.sum3), start=1):
        kernel(v, True, *(one, w) * count)
    selection.sample(v, w, 1, w.copy())
    form.gather(v, w, one, one, words, np.zeros(4096, dtype), np.zeros(4096, dtype))
    form.settle(v, one, 1, words, w.copy())
    for count, kernel in enumerate((compiled.add_packed1, compiled.add_packed2, compiled.add_packed3), start=1):
        kernel(v, *(one, words, w) * count)
    compiled.finite(v.view(f"u{v.itemsize}"), exponent(v.dtype))


def exponent(dtype: Any) -> Any:
    """The bits that are all set in NaN and inf, and in nothing else."""
    return np.uint32(0x7F800000) if dtype == np.float32 else np.uint64(0x7FF0000000000000)


def finite(rows: Array) -> bool:
    """Whether wide rows hold neither NaN nor inf."""
    from dbo.algorithms.kernels import compiled

    mask = exponent(rows.dtype)
    return all(each(lambda i: compiled.finite(rows[i].view(mask.dtype), mask), len(rows)))


def _compiled_earlier(kernel: Any) -> bool:
    """Whether numba has this kernel on disk."""
    file = kernel.py_func.__module__.rpartition(".")[2]
    place = kernel.stats.cache_path
    return place is not None and any(Path(place).glob(f"{file}.{kernel.py_func.__name__}-*.nbc"))


def is_wide(*arrays: Any) -> bool:
    """Whether these are stacked rows that kernels take."""
    return all(isinstance(a, np.ndarray) and a.ndim == 2 and a.shape[1] >= WIDE and _taken(a) for a in arrays)


def _taken(a: Array) -> bool:
    return bool(a.dtype.char in "fd" and a.flags.c_contiguous)


def moved(v: Array, gamma: float, a: Array, b: Array, eta: float, s: Array) -> Array:
    """v + γ (a − b) − η s; wide rows: written into v."""
    if not is_wide(v, a, b, s):
        return v + gamma * (a - b) - eta * s
    from dbo.algorithms.kernels import compiled

    number = v.dtype.type
    each(lambda i: compiled.add(v[i], number(gamma), a[i], b[i], number(-eta), s[i]), len(v))
    return v


def tracked(s: Array, gamma: float, a: Array, b: Array, new: Array, old: Array) -> tuple[Array, Array]:
    """s + γ (a − b) + new − old, and new; wide rows: written into s and old, so that `new` can be let go."""
    if not is_wide(s, a, b, new, old):
        return s + (gamma * (a - b) + (new - old)), new
    from dbo.algorithms.kernels import compiled

    number = s.dtype.type
    each(lambda i: compiled.track(s[i], number(gamma), a[i], b[i], new[i], old[i]), len(s))
    return s, old


def jumped(s: Array, new: Array, old: Array) -> tuple[Array, Array]:
    """s + new − old, and new; wide rows: written into s and old, so that `new` can be let go."""
    if not is_wide(s, new, old):
        return s + (new - old), new
    from dbo.algorithms.kernels import compiled

    each(lambda i: compiled.jump(s[i], new[i], old[i]), len(s))
    return s, old


def gossiped(v: Array, gamma: float, wv: Array, *terms: tuple[float, Array]) -> Array:
    """v + γ (wv − v) + Σ c t over the terms (c, t), of which there are one or two; wide rows: written into wv."""
    if not is_wide(v, wv, *(t for _, t in terms)):
        return v + (gamma * (wv - v) + _sum(terms))
    from dbo.algorithms.kernels import compiled

    kernel = compiled.towards1 if len(terms) == 1 else compiled.towards2
    number = v.dtype.type

    def row(i: int) -> None:
        kernel(wv[i], number(gamma), v[i], *(part for c, t in terms for part in (number(c), t[i])))

    each(row, len(v))
    return wv


def plus(v: Array, *terms: tuple[float, Array]) -> Array:
    """v + Σ c t over the terms (c, t), of which there are one or two; wide rows: written into v."""
    if not is_wide(v, *(t for _, t in terms)):
        return v + _sum(terms)
    from dbo.algorithms.kernels import compiled

    kernel = compiled.plus1 if len(terms) == 1 else compiled.plus2
    number = v.dtype.type
    each(lambda i: kernel(v[i], *(part for c, t in terms for part in (number(c), t[i]))), len(v))
    return v


def cleared(v: Array) -> Array:
    """0 · v; wide rows: written into v."""
    if not is_wide(v):
        return 0 * v
    each(lambda i: v[i].fill(0), len(v))
    return v


def series_step(p: Array, h: Array, lipschitz: float, b: Array) -> Array:
    """p − h / L + b; wide rows: written into h."""
    if not is_wide(p, h, b):
        return p - h / lipschitz + b
    from dbo.algorithms.kernels import compiled

    number = p.dtype.type
    each(lambda i: compiled.series(h[i], p[i], number(lipschitz), b[i]), len(p))
    return h


def _sum(terms: Sequence[tuple[float, Array]]) -> Array:
    """Σ c t, added up before it meets a large vector: a difference of two gradients loses nothing then."""
    (c, first), *others = terms
    total = first if c == 1 else c * first
    for c, t in others:
        total = total + t if c == 1 else total - t if c == -1 else total + c * t
    return total


def averaged(v: Array, share: float, new: Array) -> Array:
    """(1 − share) v + share · new; wide rows: written into new."""
    if not is_wide(v, new):
        return (1 - share) * v + share * new
    from dbo.algorithms.kernels import compiled

    number = v.dtype.type
    each(lambda i: compiled.blend(new[i], number(share), number(1 - share), v[i]), len(v))
    return new


def summed(weights: Any, rows: Sequence[Array]) -> Array:
    """weights @ rows for wide rows given one by one, weights in CSR form; sums run in the order of the columns."""
    from dbo.algorithms.kernels import compiled

    number = rows[0].dtype.type
    out = np.empty((weights.shape[0], rows[0].size), dtype=rows[0].dtype)
    by_count = {1: compiled.sum1, 2: compiled.sum2, 3: compiled.sum3}

    def row(i: int) -> None:
        span = range(weights.indptr[i], weights.indptr[i + 1])
        if not span:
            out[i] = 0
        for start in range(0, len(span), 3):
            some = span[start : start + 3]
            pairs = (part for k in some for part in (number(weights.data[k]), rows[weights.indices[k]]))
            by_count[len(some)](out[i], start == 0, *pairs)

    each(row, len(out))
    return out


def residual(q: Compressor, v: Array, reference: Array, key: Draws, channel: str) -> tuple[Message | Packed, Array]:
    """Q(v − reference), and reference + Q(v − reference); wide rows: written into reference."""
    if isinstance(q, TopK) and q.ratio < 1 and is_wide(v, reference):
        k = kept(q.ratio, v.shape[1])
        rows = each(lambda i: top_k(v[i], reference[i], k), len(v))
        return Packed(tuple(rows), v.shape[1], kept=k), reference
    message = q(v - reference, key, channel)
    return message, plus(reference, (1, message.values))


def told(known: Array, news: Array | Sum) -> Array:
    """known + news; wide rows: written into `known`."""
    if not isinstance(news, Sum):
        return plus(known, (1, news))
    from dbo.algorithms.kernels import compiled

    number = known.dtype.type
    by_count = {1: compiled.add_packed1, 2: compiled.add_packed2, 3: compiled.add_packed3}

    def row(i: int) -> None:
        for start in range(0, len(news.terms[i]), 3):
            some = news.terms[i][start : start + 3]
            by_count[len(some)](known[i], *(part for w, q in some for part in (number(w), q.words, q.entries)))

    each(row, len(known))
    return known


def top_k(v: Array, reference: Array, k: int) -> PackedRow:
    """Packs the k largest |v − reference| of a row, ties by position, NaN first; adds them to the reference."""
    from dbo.algorithms.kernels import selection

    form = selection.fastest()
    dim, number = v.size, v.dtype.type
    tiny = np.nextafter(number(0), number(1))
    stride = dim // _SAMPLE | 1
    stride -= 2 if stride % 5 == 0 else 0      # features × classes: classes are often a multiple of 5
    guess = np.empty(dim // stride, dtype=v.dtype)
    selection.sample(v, reference, stride, guess)
    guess.sort()
    at, off = guess.size * (1 - k / dim), 4 * np.sqrt(guess.size * k / dim * (1 - k / dim)) + 2
    low = max(guess[int(at - off)], tiny) if at > off else tiny
    high = guess[int(at + off)] if at + off < guess.size else number(np.inf)
    words = np.empty(-(-dim // 64), dtype=np.uint64)
    entries = np.empty(min(k + int(2 * off / guess.size * dim), dim) + 4096, dtype=v.dtype)
    found = np.empty(entries.size, dtype=v.dtype)
    count, inside, broken = form.gather(v, reference, low, high, words, entries, found)
    if count < 0 or not (count - inside < k and (k <= count or low == tiny)):      # the sample misled
        entries, found = np.empty(dim + 4096, dtype=v.dtype), np.empty(dim + 4096, dtype=v.dtype)
        count, inside, broken = form.gather(v, reference, tiny, number(np.inf), words, entries, found)
    if broken:
        return _broken(v, reference, k)
    least, ties = tiny, dim
    if count >= k:                              # otherwise fewer than k are not zero, and a zero is not sent
        candidates, place = found[:inside], count - k
        candidates.partition(place)
        least = candidates[place]
        ties = k - (count - inside) - int(np.count_nonzero(candidates > least))
    count = form.settle(reference, least, ties, words, entries)
    return PackedRow(words, entries[:count])


def _broken(v: Array, reference: Array, k: int) -> PackedRow:
    """The same for a row with NaN, by the plain definition: it ends the run, so it need not be fast."""
    values = largest((v - reference)[None], k)[0]
    reference += values
    return PackedRow.of(values)
