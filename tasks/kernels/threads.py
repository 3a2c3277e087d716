"""Run work on the nodes of a block in threads: each node is the work of one thread, so the count changes no bit."""

from collections.abc import Callable
from typing import TypeVar

from dbo.threads import run_rows

T = TypeVar("T")

_threads = 1


def set_threads(count: int) -> None:
    """Set the number of threads that `map_rows` uses."""
    global _threads
    _threads = count


def map_rows(work: Callable[[int], T], rows: int) -> list[T]:
    """Return [work(0), work(1), …], computed on the threads."""
    return run_rows(work, rows, _threads)


def map_ranges(work: Callable[[int, int], None], rows: int) -> None:
    """Call work(start, stop) for ranges that cover all rows, on the threads."""
    if _threads == 1:
        work(0, rows)
    else:
        map_rows(lambda i: work(i, i + 1), rows)
