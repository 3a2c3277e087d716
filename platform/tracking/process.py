"""Send runs to MLflow from a background process, so that training never waits for a tracking server.

    python -m dbo.platform.tracking.process ROOT --uri URI --experiment NAME --follow

follows the folder of a run or a group until its standard input closes, sends the rest and ends. If the command that
started it is killed, its input closes too: it sends what was recorded and marks the run as KILLED.
"""

import argparse
import json
import os
import re
import select
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console

from dbo.platform.config import tracking_uri
from dbo.platform.config.redact import redact_server
from dbo.platform.errors import InputError

if TYPE_CHECKING:
    from dbo.platform.tracking.sync import Writer

_POLL = 1.0                     # seconds between two looks at the folder
_BACKOFF = (1.0, 2.0, 4.0, 8.0, 15.0)
_ATTEMPTS = 3                   # failures in a row that are allowed once the command has ended
_ORPHAN_SECONDS = 60.0          # without progress, after which a process whose command was killed gives up
_LOCK_SECONDS = 20.0            # for which processes of a killed command may keep their folders locked
_SILENCE_SECONDS = 30.0         # without a message, after which a command stops waiting for its background process
_FINISH_SECONDS = 600.0         # in all, after which it stops although points still arrive
_ERROR, _NOTICE = re.compile(r"\w(Error|Exception)\b"), re.compile(r"\b(WARNING|INFO)\b")

Log = Callable[[str], None]
Status = dict[str, Any]         # a message of the background process: points, left, error, done


# ---- in the command --------------------------------------------------------------------------------------------------


@contextmanager
def follow_in_background(root: Path, uri: str | None, experiment: str, log: Log = print) -> Iterator[None]:
    """Send `root` to MLflow from a background process during the `with` block.

    At the end, wait for the process for a bounded time. If points are missing then, log how to send them.
    """
    if uri == tracking_uri.OFF:
        yield
        return
    store, since = tracking_uri.resolve_uri(uri, root), time.time()
    command = [sys.executable, "-m", "dbo.platform.tracking.process", str(root), "--uri", store,
               "--experiment", experiment, "--follow", "--since", repr(since)]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            start_new_session=True,             # Ctrl-C is for the command: the process then sends what is recorded
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        refused = False
        try:
            yield
        except InputError:
            refused = not _has_ended(root, since)       # nothing was run: write nothing
            raise
        finally:
            try:
                if not refused:
                    with Console().status("sending the remaining points to MLflow"):
                        _wait_for(process, root, store, log, errors)
            finally:
                process.kill()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=5)
                for pipe in (process.stdin, process.stdout):
                    with suppress(OSError):
                        pipe.close()            # type: ignore[union-attr]


def _has_ended(root: Path, since: float) -> bool:
    """Decide whether the run or group in a folder started and ended since then."""
    from dbo.platform.runs.run_folder import GROUP_FILE, has_group, has_started_since, read_group
    from dbo.platform.tracking import reader

    with suppress(InputError, OSError):
        if not has_group(root):
            return reader.read_run_ending(root) is not None and has_started_since(root, since)
        written = (root / GROUP_FILE).stat().st_mtime
        return written >= since and reader.build_group_ending(read_group(root)) is not None
    return False


def _wait_for(process: "subprocess.Popen[bytes]", root: Path, store: str, log: Log, errors: IO[bytes]) -> None:
    """Let the process finish; every message from it is a sign of progress."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError):
        process.stdin.close()
    status: Status = {}
    rest = b""
    end = time.monotonic() + _FINISH_SECONDS
    while (left := end - time.monotonic()) > 0 and \
            select.select([process.stdout], [], [], min(left, _SILENCE_SECONDS))[0]:
        raw = os.read(process.stdout.fileno(), 1 << 16)
        if not raw:
            break
        *lines, rest = (rest + raw).split(b"\n")
        if lines:
            status = json.loads(lines[-1])
    if not status.get("done"):
        log(_describe_missing(status, root, store, errors))


def _describe_missing(status: Status, root: Path, store: str, errors: IO[bytes]) -> str:
    """Return a line with what is not in MLflow, the command that sends it, and the reason."""
    errors.seek(0)
    error = status.get("error") or ("" if status else last_error_line(errors.read().decode(errors="replace")))
    missing, pronoun = ("the end of the run is" if status else "the run is"), "it"
    if status.get("left"):
        missing, pronoun = f"{status['left']} of {status['points']} points are", "them"
    uri = ["--uri", store] if tracking_uri.find_exposed_credentials(store) else []
    command = shlex.join(["dbo", "sync", str(root), *uri])
    reason = f" ({redact_server(error, store)})" if error else ""
    return f"{missing} not in MLflow yet; `{command}` sends {pronoun}{reason}"


def last_error_line(text: str) -> str:
    """Return the last line that names an error; libraries that retry log other lines before and after it."""
    lines = [line.strip() for line in text.strip().splitlines()]
    named = (line for line in reversed(lines) if _ERROR.search(line) and not _NOTICE.search(line))
    return next(named, (lines or ["no message from the background process"])[-1])


# ---- in the background process ---------------------------------------------------------------------------------------


def _follow(root: Path, uri: str, experiment: str, since: float) -> None:
    os.nice(10)
    parent = os.getppid()
    # Imports take seconds: wait until there is something to send. With wrong input there never is.
    while not any((root / name).exists() for name in ("experiment.yaml", "group.json")) and not _input_closes(0.1):
        pass
    from dbo.platform.tracking.client import Store, mlflow_environment
    from dbo.platform.tracking.sync import Writer, describe_error

    os.environ.update(mlflow_environment(uri))
    messages = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)                               # the command reads our messages, not the output of libraries
    ended = progressed = 0.0
    failures = 0
    error = ""

    def on_progress() -> None:
        nonlocal progressed, failures
        progressed, failures = time.monotonic(), 0
        if ended:
            _send_status(messages, writer, error)

    writer = Writer(root, Store(uri, experiment), since, on_progress)
    import mlflow  # noqa: F401 - slow: import it now, not between two looks at the folder

    while True:
        pause = _POLL if not failures else _BACKOFF[min(failures, len(_BACKOFF)) - 1]
        if not ended and _input_closes(pause):
            ended = progressed = time.monotonic()
            failures = 0
        elif ended and failures:
            time.sleep(pause)
        is_last = bool(ended)
        try:
            writer.write(is_last)
            error, failures = "", 0
            if is_last and writer.has_running and time.monotonic() - ended < _LOCK_SECONDS:
                time.sleep(_POLL)
            elif is_last:
                _send_status(messages, writer, "", done=True)
                return
        except Exception as failure:
            error, failures = describe_error(failure, uri), failures + 1
            with suppress(Exception):
                writer.count_points()
            if is_last:
                _send_status(messages, writer, error)
                is_orphan = os.getppid() != parent
                if time.monotonic() - progressed > _ORPHAN_SECONDS or (not is_orphan and failures >= _ATTEMPTS):
                    return


def _input_closes(seconds: float) -> bool:
    """Wait for at most `seconds`; return whether standard input has closed."""
    return bool(select.select([sys.stdin], [], [], seconds)[0]) and not os.read(sys.stdin.fileno(), 1 << 16)


def _send_status(messages: IO[str], writer: "Writer", error: str, done: bool = False) -> None:
    status: Status = {"points": writer.points, "left": writer.unsent, "error": error, "done": done}
    with suppress(OSError):                     # the command may have been killed
        messages.write(json.dumps(status) + "\n")


def main() -> None:
    """Entry point of the background process."""
    parser = argparse.ArgumentParser(prog="python -m dbo.platform.tracking.process", description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--uri", required=True)
    parser.add_argument("--experiment", default="dbo")
    parser.add_argument("--follow", action="store_true")
    parser.add_argument("--since", type=float, default=0.0)
    given = parser.parse_args()
    if given.follow:
        _follow(given.root, given.uri, given.experiment, given.since)
    else:
        from dbo.platform.tracking.sync import sync_folder

        sync_folder(given.root, given.uri, given.experiment)


if __name__ == "__main__":
    main()
