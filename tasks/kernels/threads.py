"""Run work on the nodes of a block in threads: each node is the work of one thread, so the count changes no bit."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

T = TypeVar("T")

_threads = 1


def set_threads(threads: int) -> None:
    """Set the number of threads that `map_rows` uses."""
    global _threads
    _threads = threads


def map_rows(work: Callable[[int], T], rows: int) -> list[T]:
    """Return [work(0), work(1), …], computed on the threads."""
    if _threads == 1 or rows == 1:
        return [work(i) for i in range(rows)]
    return list(_pool(_threads).map(work, range(rows)))


def map_ranges(work: Callable[[int, int], None], rows: int) -> None:
    """Call work(start, stop) for ranges that cover all rows, on the threads."""
    if _threads == 1:
        work(0, rows)
    else:
        map_rows(lambda i: work(i, i + 1), rows)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="nodes")
