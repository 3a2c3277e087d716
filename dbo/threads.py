"""Run work on rows in threads: each row is the work of one thread, so the number of threads changes no bit."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def run_rows(work: Callable[[int], T], rows: int, threads: int) -> list[T]:
    """Return [work(0), work(1), …], computed on so many threads, one of which is the caller's."""
    if threads == 1 or rows == 1:
        return [work(i) for i in range(rows)]
    found: list[Any] = [None] * rows
    left = deque(range(rows))

    def take_row() -> int | None:
        try:
            return left.popleft()
        except IndexError:
            return None

    def take_rows() -> None:
        for i in iter(take_row, None):
            found[i] = work(i)

    others = [_pool(threads).submit(take_rows) for _ in range(min(threads, rows) - 1)]
    try:
        take_rows()
    finally:
        for other in others:
            if not other.cancel():      # it has begun
                other.result()
    return found


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="rows")
