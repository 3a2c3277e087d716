"""How many threads work on the nodes of a block: each node is one thread's work, so the count changes no bit."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

T = TypeVar("T")

_threads = 1


def use(threads: int) -> None:
    """So many from here on."""
    global _threads
    _threads = threads


def each(work: Callable[[int], T], nodes: int) -> list[T]:
    """work(0), work(1), … on the threads in use."""
    if _threads == 1 or nodes == 1:
        return [work(i) for i in range(nodes)]
    return list(_pool(_threads).map(work, range(nodes)))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="nodes")
