"""Call functions of Ray that may never return, and give up after a deadline.

Many of them wait for the GCS or the raylet without a timeout of their own. They release the GIL, so a second thread can
wait for them and go on without them.
"""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_LOOK_SECONDS = 2.0            # between two calls of `on_wait`


def call_within(seconds: float, call: Callable[[], T], on_wait: Callable[[float], None] | None = None) -> T:
    """Return what `call` returns, or raise what it raises; raise `TimeoutError` if it takes longer.

    The call itself cannot be ended: it stays behind in a thread that does not keep the process alive. `on_wait` gets
    the seconds so far every now and then; what it raises ends the wait.
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
    start = time.monotonic()
    while not ended.wait(min(_LOOK_SECONDS, max(0.0, start + seconds - time.monotonic()))):
        waited = time.monotonic() - start
        if waited >= seconds:
            raise TimeoutError(f"no answer within {seconds:g} s")
        if on_wait is not None:
            on_wait(waited)
    if errors:
        raise errors[0]
    return results[0]
