"""A call that never returns is given up; one that returns keeps its value and its error."""

import threading
import time

import pytest

from dbo.platform.engine.deadlines import call_within


def test_value_and_error_of_a_call_are_passed_on() -> None:
    assert call_within(5, lambda: 42) == 42
    with pytest.raises(ZeroDivisionError):
        call_within(5, lambda: 1 // 0)


def test_call_that_takes_too_long_is_given_up() -> None:
    """After the deadline, not after the call."""
    forever, start = threading.Event(), time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.2 s"):
        call_within(0.2, forever.wait)
    assert time.monotonic() - start < 5
    forever.set()


def test_observer_can_end_the_wait() -> None:
    """It gets the seconds so far; what it raises is raised. Control: an observer that raises nothing."""
    forever, waits = threading.Event(), []

    def observe(waited: float) -> None:
        waits.append(waited)
        raise ConnectionError

    with pytest.raises(ConnectionError):
        call_within(60, forever.wait, observe)
    assert 1 < waits[0] < 30
    with pytest.raises(TimeoutError):
        call_within(3, forever.wait, lambda waited: None)
    forever.set()
