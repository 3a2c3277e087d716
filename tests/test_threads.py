"""Rows on several threads."""

import threading
import time

import pytest

from dbo.threads import run_rows


@pytest.mark.parametrize("threads", [1, 2, 3, 20])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 50])
def test_results_are_in_the_order_of_rows(rows: int, threads: int) -> None:
    def work(i: int) -> int:
        time.sleep(0.001 * (i % 3 == 0))
        return i * i

    assert run_rows(work, rows, threads) == [i * i for i in range(rows)]


def test_the_caller_works_beside_the_other_threads() -> None:
    """Two rows that wait for each other are done by two threads, one of which is the caller's."""
    both = threading.Barrier(2, timeout=20)
    used = run_rows(lambda i: (both.wait(), threading.current_thread())[1], 2, 2)
    assert len(set(used)) == 2
    assert threading.current_thread() in used


@pytest.mark.parametrize("bad", [0, 5, 9])
def test_an_error_reaches_the_caller(bad: int) -> None:
    """One of any row and kind; the next call works."""
    def work(i: int) -> int:
        if i == bad:
            raise IndexError("of the work")
        time.sleep(0.001)
        return i

    with pytest.raises(IndexError, match="of the work"):
        run_rows(work, 10, 2)
    assert run_rows(lambda i: i, 3, 2) == [0, 1, 2]


def test_work_may_run_rows_itself() -> None:
    """Threads that are all busy are not waited for."""
    assert run_rows(lambda i: sum(run_rows(lambda j: i * j, 4, 2)), 6, 2) == [6 * i for i in range(6)]
