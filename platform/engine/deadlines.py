"""Call functions of Ray that may never return, and give up after a deadline.

Many of them wait for the GCS or the raylet without a timeout of their own. They release the GIL, so a second thread can
wait for them and go on without them.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Return what `call` returns, or raise what it raises; raise `TimeoutError` if it takes longer.

    The call itself cannot be ended: it stays behind in a thread that does not keep the process alive.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    threading.Thread(target=work, name="dbo call with a deadline", daemon=True).start()
    if not ended.wait(seconds):
        raise TimeoutError(f"no answer within {seconds:g} s")
    if errors:
        raise errors[0]
    return results[0]
