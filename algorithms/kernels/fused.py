"""Update wide rows in place: one pass over memory per update, in buffers that exist already.

NumPy arithmetic takes a pass and a fresh array per operator, which dominates a round where rows have megabytes. For
narrow rows, and on a GPU, each function below is the plain expression in its docstring. For wide NumPy rows a compiled
kernel computes the same in one pass and writes into an argument that the caller no longer needs. numba is imported when
the first wide row needs it.
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dbo.algorithms.compression.compressors import Compressor, TopK, count_kept
from dbo.algorithms.compression.grid import Grid
from dbo.algorithms.gossip import Message, Packed, PackedSum
from dbo.algorithms.protocol import Array
from dbo.algorithms.rng import Key

MIN_ENTRIES = 1 << 16      # entries of a row from which a kernel outweighs its call
T = TypeVar("T")

_threads = 1


def set_threads(threads: int) -> None:
    """Set the number of threads; a row is processed by one thread, so the number changes no bit."""
    global _threads
    _threads = threads


def map_rows(function: Callable[[int], T], rows: int) -> list[T]:
    """Return [function(0), function(1), …], computed on the threads."""
    if _threads == 1 or rows == 1:
        return [function(i) for i in range(rows)]
    return list(_pool(_threads).map(function, range(rows)))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="rows")


@cache
def _kernels() -> Any:
    """Import the compiled kernels, and numba with them."""
    from dbo.algorithms.kernels import compiled

    return compiled


@cache
def compile_kernels(dtype: str) -> None:
    """Compile the kernels for one dtype, or load them from the cache: not in the middle of a measurement."""
    from dbo.algorithms.kernels import marks, selection

    kernels, form = _kernels(), selection.fastest_form()
    if not _is_cached(form.gather):
        print("dbo: compiling kernels for wide rows, once", file=sys.stderr, flush=True)
    number = np.dtype(dtype).type
    one, v, w = number(1), np.zeros(64, dtype=dtype), np.ones(64, dtype=dtype)
    words = np.zeros(1, dtype=np.uint64)
    kernels.add1(v, one, w)
    kernels.add2(v, one, w, one, w)
    kernels.step(v, one, w, w, one, w)
    kernels.track(v, one, w, w, w, w.copy())
    kernels.shift(v, w, w.copy())
    kernels.gossip1(v, one, w, one, w)
    kernels.gossip2(v, one, w, one, w, one, w)
    kernels.average(v, one, one, w)
    kernels.neumann(v, w, one, w)
    for count, kernel in enumerate(kernels.SUMS, start=1):
        kernel(v, True, *(one, w) * count)
    selection.sample(v, w, 1, w.copy())
    form.gather(v, w, one, one, words, np.zeros(4096, dtype), np.zeros(4096, dtype))
    form.settle(v, one, 1, words, w.copy())
    for count, kernel in enumerate(kernels.PACKED_SUMS, start=1):
        kernel(v, *(one, words, w) * count)
    all_finite(v[None])
    marks.compile_kernels()


def _is_cached(kernel: Any) -> bool:
    """Decide whether numba has this kernel on disk."""
    file = kernel.py_func.__module__.rpartition(".")[2]
    folder = kernel.stats.cache_path
    return folder is not None and any(Path(folder).glob(f"{file}.{kernel.py_func.__name__}-*.nbc"))


def all_finite(rows: Array) -> bool:
    """Decide whether wide rows hold neither NaN nor inf."""
    # The bits that are all set in NaN and inf, and in no other number.
    exponent: Any = np.uint32(0x7F800000) if rows.dtype == np.float32 else np.uint64(0x7FF0000000000000)
    return all(map_rows(lambda i: _kernels().all_finite(rows[i].view(exponent.dtype), exponent), len(rows)))


def can_fuse(*arrays: Any) -> bool:
    """Decide whether these are stacked rows that the kernels support."""
    return all(
        isinstance(a, np.ndarray) and a.ndim == 2 and a.shape[1] >= MIN_ENTRIES and a.dtype.char in "fd"
        and a.flags.c_contiguous
        for a in arrays
    )


def _run(kernel: Any, out: Array, *operands: Any) -> Array:
    """Run a kernel on each row of `out` and of the other arrays, with numbers in their dtype; return `out`."""
    number = out.dtype.type

    def run_row(i: int) -> None:
        kernel(out[i], *(part[i] if isinstance(part, np.ndarray) else number(part) for part in operands))

    map_rows(run_row, len(out))
    return out


def step_in_place(v: Array, gamma: float, a: Array, b: Array, eta: float, s: Array) -> Array:
    """v + γ (a − b) − η s; wide rows: written into v."""
    if not can_fuse(v, a, b, s):
        return v + gamma * (a - b) - eta * s
    return _run(_kernels().step, v, gamma, a, b, -eta, s)


def track_in_place(s: Array, gamma: float, a: Array, b: Array, new: Array, old: Array) -> tuple[Array, Array]:
    """s + γ (a − b) + new − old, and new; wide rows: written into s and old, so that `new` can be freed."""
    if not can_fuse(s, a, b, new, old):
        return s + (gamma * (a - b) + (new - old)), new
    return _run(_kernels().track, s, gamma, a, b, new, old), old


def shift_in_place(s: Array, new: Array, old: Array) -> tuple[Array, Array]:
    """s + new − old, and new; wide rows: written into s and old, so that `new` can be freed."""
    if not can_fuse(s, new, old):
        return s + (new - old), new
    return _run(_kernels().shift, s, new, old), old


def gossip_in_place(v: Array, gamma: float, wv: Array, *terms: tuple[float, Array]) -> Array:
    """v + γ (wv − v) + Σ c t over one or two terms (c, t); wide rows: written into wv."""
    if not can_fuse(v, wv, *(t for _, t in terms)):
        return v + (gamma * (wv - v) + _sum(terms))
    kernel = _kernels().gossip1 if len(terms) == 1 else _kernels().gossip2
    return _run(kernel, wv, gamma, v, *chain(*terms))


def add_in_place(v: Array, *terms: tuple[float, Array]) -> Array:
    """v + Σ c t over one or two terms (c, t); wide rows: written into v."""
    if not can_fuse(v, *(t for _, t in terms)):
        return v + _sum(terms)
    return _run(_kernels().add1 if len(terms) == 1 else _kernels().add2, v, *chain(*terms))


def _sum(terms: Sequence[tuple[float, Array]]) -> Array:
    """Σ c t, before it is added to a large vector: a difference of two gradients then loses no digits."""
    (c, first), *others = terms
    total = first if c == 1 else c * first
    for c, t in others:
        total = total + t if c == 1 else total - t if c == -1 else total + c * t
    return total


def zero_in_place(v: Array) -> Array:
    """0 · v; wide rows: written into v."""
    if not can_fuse(v):
        return 0 * v
    map_rows(lambda i: v[i].fill(0), len(v))
    return v


def neumann_in_place(p: Array, h: Array, lipschitz: float, b: Array) -> Array:
    """p − h / L + b; wide rows: written into h."""
    if not can_fuse(p, h, b):
        return p - h / lipschitz + b
    return _run(_kernels().neumann, h, p, lipschitz, b)


def average_in_place(v: Array, share: float, new: Array) -> Array:
    """(1 − share) v + share · new; wide rows: written into new."""
    if not can_fuse(v, new):
        return (1 - share) * v + share * new
    return _run(_kernels().average, new, share, 1 - share, v)


def weighted_sum(weights: Any, rows: Sequence[Array]) -> Array:
    """weights @ rows for a list of wide rows and weights in CSR form; sums run in the order of the columns."""
    number = rows[0].dtype.type
    out = np.empty((weights.shape[0], rows[0].size), dtype=rows[0].dtype)

    def sum_row(i: int) -> None:
        span = range(weights.indptr[i], weights.indptr[i + 1])
        if not span:
            out[i] = 0
        for start in range(0, len(span), 3):
            some = span[start : start + 3]
            pairs = ((number(weights.data[k]), rows[weights.indices[k]]) for k in some)
            _kernels().SUMS[len(some) - 1](out[i], start == 0, *chain(*pairs))

    map_rows(sum_row, len(out))
    return out


def add_message_in_place(v: Array, message: Array | PackedSum) -> Array:
    """v + message; wide rows: written into v."""
    if not isinstance(message, PackedSum):
        return add_in_place(v, (1, message))
    number = v.dtype.type

    def add_row(i: int) -> None:
        for start in range(0, len(message.terms[i]), 3):
            some = message.terms[i][start : start + 3]
            triples = ((number(weight), row.words, row.entries) for weight, row in some)
            _kernels().PACKED_SUMS[len(some) - 1](v[i], *chain(*triples))

    map_rows(add_row, len(v))
    return v


def compress_residual(
    q: Compressor, v: Array, reference: Array, key: Key, channel: str
) -> tuple[Message | Packed, Array]:
    """Q(v − reference), and reference + Q(v − reference); wide rows: written into reference."""
    if isinstance(q, TopK) and q.ratio < 1 and can_fuse(v, reference):
        from dbo.algorithms.kernels import selection

        k = count_kept(q.ratio, v.shape[1])
        if q.bits is not None:
            return _quantize_residual(q, q.bits, v, reference, k)
        rows = map_rows(lambda i: selection.top_k(v[i], reference[i], k), len(v))
        return Packed(tuple(rows), v.shape[1], kept=k), reference
    message = q(v - reference, key, channel)
    return message, add_in_place(reference, (1, message.values))


def _quantize_residual(q: TopK, bits: int, v: Array, reference: Array, k: int) -> tuple[Packed, Array]:
    """Do the same for wide rows and quantized values."""
    from dbo.algorithms.kernels import selection

    log = q.levels == "log"
    rows = map_rows(lambda i: selection.top_k_quantized(v[i], reference[i], k, bits, log), len(v))
    scales, spans = np.array([scale for _, scale, _ in rows], dtype=v.dtype), np.array([span for _, _, span in rows])
    return Packed(tuple(row for row, _, _ in rows), v.shape[1], kept=k, grid=Grid(bits, log, scales, spans)), reference
