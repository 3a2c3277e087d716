"""Run compiled kernels over wide rows: sums of many terms in one pass, on several threads.

`lazy.py` builds the sums; `compiled.py` holds the loops. numba is imported when the first wide row needs it.
"""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dbo.algorithms.protocol import Array
from dbo.threads import run_rows

if TYPE_CHECKING:
    from dbo.algorithms.kernels.compiled import Terms

MIN_ENTRIES = 1 << 16      # entries of a row from which a kernel outweighs its call
T = TypeVar("T")

_threads = 1


def set_threads(count: int) -> None:
    """Set the number of threads; a row is processed by one thread, so the number changes no bit."""
    global _threads
    _threads = count


def map_rows(function: Callable[[int], T], rows: int) -> list[T]:
    """Return [function(0), function(1), …], computed on the threads."""
    return run_rows(function, rows, _threads)


@cache
def _kernels() -> Any:
    """Import the compiled kernels, and numba with them."""
    from dbo.algorithms.kernels import compiled

    return compiled


@cache
def compile_kernels(dtype: str) -> None:
    """Compile the kernels for one dtype, or load them from the cache: not in the middle of a measurement."""
    from dbo.algorithms.kernels import codes, marks, selection

    form = selection.fastest_form()
    if not is_cached(form.pack):
        print("dbo: compiling kernels for wide rows, once", file=sys.stderr, flush=True)
    v, w = np.zeros(64, dtype=dtype), np.ones(64, dtype=dtype)
    evaluate([(v[None], [(1.0, w[None])])])
    selection.top_k(v, w, 1)
    all_finite(v[None])
    marks.compile_kernels()
    codes.compile_kernels(dtype)


def is_cached(kernel: Any) -> bool:
    """Decide whether numba has this kernel on disk."""
    file = kernel.py_func.__module__.rpartition(".")[2]
    name = kernel.py_func.__qualname__.replace("<", "").replace(">", "")
    folder = kernel.stats.cache_path
    return folder is not None and any(Path(folder).glob(f"{file}.{name}-*.nbc"))


def all_finite(rows: Array) -> bool:
    """Decide whether wide rows hold neither NaN nor inf."""
    # The bits that are all set in NaN and inf, and in no other number.
    exponent: Any = np.uint32(0x7F800000) if rows.dtype == np.float32 else np.uint64(0x7FF0000000000000)
    return all(map_rows(lambda i: _kernels().all_finite(rows[i].view(exponent.dtype), exponent), len(rows)))


def can_fuse(*arrays: Any) -> bool:
    """Decide whether these are stacked rows that the compiled kernels support."""
    return all(
        isinstance(a, np.ndarray) and a.ndim == 2 and a.shape[1] >= MIN_ENTRIES and a.dtype.char in "fd"
        and a.flags.c_contiguous
        for a in arrays
    )


def is_tensor(value: Any) -> bool:
    """Decide whether a value is a torch tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_large(value: Any) -> bool:
    """Decide whether a value is an array or a tensor of rows that are wide enough for lazy arithmetic."""
    if isinstance(value, np.ndarray):
        return value.ndim == 2 and value.shape[1] >= MIN_ENTRIES and can_fuse(value)
    return is_tensor(value) and value.ndim == 2 and value.shape[1] >= MIN_ENTRIES and value.is_floating_point()


@cache
def can_expand() -> bool:
    """Decide whether the processor adds packed rows faster with expanding loads."""
    return bool(_kernels().can_expand())


def evaluate(
    sums: Sequence[tuple[Array, Sequence[tuple[Any, Any]]]], visit: "Callable[[int, Terms], Any] | None" = None
) -> list[Any]:
    """Compute Σ c a of each sum (out, terms) into its `out`, all in one pass; later sums may use earlier ones.

    A term is a coefficient, one number or one per row, and rows: an array, or a `RowSum`. `visit` is called instead of
    the kernel, with a row's number and its terms. It evaluates them, and its results are returned.
    """
    shape, dtype = sums[0][0].shape, sums[0][0].dtype
    addresses = {id(a): a.ctypes.data for out, terms in sums for a in (out, *(a for _, a in terms))
                 if isinstance(a, np.ndarray)}

    def list_terms(i: int) -> "Terms":
        offset = i * shape[1] * dtype.itemsize
        weights: list[float] = []
        rows: list[int] = []          # addresses, or −1 − the number of a packed row
        packed: dict[int, tuple[int, Any]] = {}
        ends = []
        for _, terms in sums:
            places: dict[int, int] = {}      # number of a packed row → its term in this sum
            for c, a in terms:
                coefficient = c if isinstance(c, float) else float(c[i, 0])
                if isinstance(a, np.ndarray):
                    weights.append(coefficient)
                    rows.append(addresses[id(a)] + offset)
                    continue
                for weight, row in a.terms[i]:
                    if isinstance(row, np.ndarray):
                        weights.append(coefficient * weight)
                        rows.append(row.ctypes.data)
                        continue
                    number = packed.setdefault(id(row), (len(packed), row))[0]
                    if number in places:      # a node's own message, once sent and once received
                        weights[places[number]] += coefficient * weight
                        continue
                    places[number] = len(weights)
                    weights.append(coefficient * weight)
                    rows.append(-1 - number)
            ends.append(len(rows))
        given = [row for _, row in packed.values()]
        return (
            _integers([addresses[id(out)] + offset for out, _ in sums]), _integers(ends),
            np.array(weights, dtype=np.float64), _integers(rows), _integers([row.words.ctypes.data for row in given]),
            _integers([row.entries.ctypes.data for row in given]), _integers([row.entries.size for row in given]),
        )

    def evaluate_row(i: int) -> Any:
        terms = list_terms(i)
        return evaluate_terms(terms, shape[1], dtype) if visit is None else visit(i, terms)

    return map_rows(evaluate_row, shape[0])


def evaluate_terms(terms: "Terms", dim: int, dtype: Any) -> None:
    """Compute the sums of one row."""
    _kernels().evaluate(np.empty(0, dtype), dim, terms, can_expand())


def _integers(values: list[int]) -> Array:
    return np.array(values, dtype=np.int64)
