"""`dbo supervise`: restart a command whose driver was killed or failed."""

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Annotated

import typer

from dbo.platform.cli.console import warn
from dbo.platform.errors import InputError

COMMANDS = ("run", "compare", "sweep", "submit")
_RESUMED = ("run", "sweep")             # take --resume; the others resume whenever they are repeated
_FINAL = (0, 2)                         # finished, or wrong input, which a repetition would refuse again
_MAX_DELAY = 60.0                       # seconds
_SET_DEATH_SIGNAL = 1                   # PR_SET_PDEATHSIG of Linux
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def supervise_command(
    context: typer.Context,
    retries: Annotated[int, typer.Option("--retries", metavar="N", min=0, help="Restarts at most.")] = 3,
    delay: Annotated[float, typer.Option(
        "--delay", metavar="S", min=0.0, help="Seconds before the first restart; doubles each time, up to 60.")] = 1.0,
) -> None:
    """Restart `run`, `compare`, `sweep` or `submit` with --resume when its driver is killed or fails.

    Write the command after the options: `dbo supervise --retries 5 run rounds=200 --out runs/a`. The exit code is that
    of the last attempt. Wrong input (exit code 2) and an interruption are never retried.
    """
    arguments = context.args
    if not arguments or arguments[0] not in COMMANDS:
        given = arguments[0] if arguments else ""
        raise InputError(f"supervise: {given!r} is not allowed; must be one of {', '.join(COMMANDS)}")
    sys.exit(Supervisor(arguments, retries, delay).run())


class Supervisor:
    """Runs a command as a child process, again and again until it ends well or the retries are used up."""

    def __init__(self, arguments: Sequence[str], retries: int, delay: float) -> None:
        self._arguments, self._retries, self._delay = list(arguments), retries, delay
        self._child: subprocess.Popen[bytes] | None = None
        self._is_stopping = False

    def run(self) -> int:
        """Return the exit code of the last attempt; of a child that a signal killed, 128 + its number."""
        previous = {number: signal.signal(number, self._pass_on) for number in _PASSED_ON}
        try:
            return self._run_attempts()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _run_attempts(self) -> int:
        for attempt in range(self._retries + 1):
            code = self._run_once(is_first=attempt == 0)
            if code in _FINAL or self._is_stopping or attempt == self._retries:
                return 128 - code if code < 0 else code
            delay = min(_MAX_DELAY, self._delay * 2**attempt)
            how = f"was killed by {_name_signal(-code)}" if code < 0 else f"exited with code {code}"
            warn(f"supervise: {self._arguments[0]} {how}; restart {attempt + 1} of {self._retries} in {delay:g} s")
            self._wait(delay)
            if self._is_stopping:
                return 128 - code if code < 0 else code
        raise AssertionError("there is always one attempt")

    def _run_once(self, is_first: bool) -> int:
        command = [sys.executable, "-m", "dbo.platform.cli", *self._arguments]
        if not is_first and self._arguments[0] in _RESUMED and "--resume" not in self._arguments:
            command.append("--resume")
        # A group of its own: Ctrl-C in a terminal reaches the child once, through this process.
        self._child = subprocess.Popen(command, process_group=0, preexec_fn=_end_with_parent)
        return self._child.wait()

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._is_stopping and (left := end - time.monotonic()) > 0:
            time.sleep(min(0.2, left))

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on to the child. After one that ends a process there is no restart."""
        self._is_stopping |= number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)


def _end_with_parent() -> None:
    """Let Linux send SIGTERM to this process when the supervisor is killed: nobody would stop it otherwise."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
