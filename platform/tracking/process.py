"""Runs in MLflow, fed from their folders by a process of its own: training never waits for a tracking server.

    python -m dbo.platform.tracking.process ROOT --uri URI --experiment NAME --follow

follows the folder of a run or a group until its standard input closes, then brings over the rest and ends. If the
command that started it is killed, its input closes too: what was recorded is brought over, and the run is KILLED.
"""

import argparse
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from dbo.platform.cli.console import console
from dbo.platform.config import tracking_uri
from dbo.platform.config.redact import masked
from dbo.platform.errors import InputError, RunError

_POLL = 1.0                     # seconds between two looks at the folder
_BACKOFF = (1.0, 2.0, 4.0, 8.0, 15.0)
_ATTEMPTS = 3                   # that may fail in a row once the command has ended
_ALONE = 60.0                   # seconds without progress that a writer goes on for after its command was killed
_LINGER = 20.0                  # seconds that processes of a killed command may hold on to their folders
_SILENCE = 30.0                 # seconds without a word after which a command no longer waits for its writer
_ERROR, _NOTICE = re.compile(r"\w(Error|Exception)\b"), re.compile(r"\b(WARNING|INFO)\b")

Say = Callable[[str], None]


@contextmanager
def following(root: Path, uri: str | None, experiment: str, say: Say = print) -> Iterator[None]:
    """Has a writer follow `root`; at the end gives it a bounded time, and tells what is left and how to bring it in."""
    if uri == tracking_uri.OFF:
        yield
        return
    store, since = tracking_uri.place(uri, root), time.time()
    command = [sys.executable, "-m", "dbo.platform.tracking.process", str(root), "--uri", store,
               "--experiment", experiment, "--follow", "--since", repr(since)]
    with tempfile.TemporaryFile() as complaints:
        writer = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints,
            start_new_session=True,             # Ctrl-C is for the command: the writer then brings over what there is
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        refused = False
        try:
            yield
        except InputError:
            refused = not _ended(root, since)   # nothing has been run, nothing is to be written
            raise
        finally:
            try:
                if not refused:
                    with console.status("bringing the rest to MLflow"):
                        _await(writer, root, store, say, complaints)
            finally:
                writer.kill()
                writer.wait()
                for pipe in (writer.stdin, writer.stdout):
                    with suppress(OSError):
                        pipe.close()            # type: ignore[union-attr]


def _ended(root: Path, since: float) -> bool:
    """Whether what is in a folder was begun and has come to an end since then."""
    from dbo.platform.runs.run_folder import started_since
    from dbo.platform.tracking import reader as source

    with suppress(InputError, OSError):
        if not source.is_group(root):
            return source.run_ending(root) is not None and started_since(root, since)
        written = (root / source.GROUP).stat().st_mtime
        return written >= since and source.group_ending(source.read_group(root)) is not None
    return False


def _await(writer: "subprocess.Popen[bytes]", root: Path, store: str, say: Say, complaints: IO[bytes]) -> None:
    """Lets the writer end; every word from it is a sign of progress."""
    assert writer.stdin is not None
    assert writer.stdout is not None
    with suppress(OSError):
        writer.stdin.close()
    word: dict[str, Any] = {}
    rest = b""
    while select.select([writer.stdout], [], [], _SILENCE)[0]:
        raw = os.read(writer.stdout.fileno(), 1 << 16)
        if not raw:
            break
        *lines, rest = (rest + raw).split(b"\n")
        if lines:
            word = json.loads(lines[-1])
    if not word.get("done"):
        say(_left(word, root, store, complaints))


def _left(word: dict[str, Any], root: Path, store: str, complaints: IO[bytes]) -> str:
    complaints.seek(0)
    error = word.get("error") or ("" if word else complaint(complaints.read().decode(errors="replace")))
    what, them = ("the end of the run is" if word else "the run is"), "it"
    if word.get("left"):
        what, them = f"{word['left']} points of {word['points']} are", "them"
    command = f"dbo sync {root}" + (f" --uri {store}" if tracking_uri.exposed(store) else "")
    return f"{what} not in MLflow yet; `{command}` brings {them}" + (f" ({masked(error)})" if error else "")


def complaint(text: str) -> str:
    """The last line that names an error: libraries that try again write before it that they will, and after it when."""
    lines = [line.strip() for line in text.strip().splitlines()]
    named = (line for line in reversed(lines) if _ERROR.search(line) and not _NOTICE.search(line))
    return next(named, (lines or ["the writer gave no sign"])[-1])


def sync(folder: Path, uri: str | None, experiment: str | None, say: Say = print) -> None:
    """Brings one folder's runs into MLflow, and says what was new."""
    from dbo.platform.tracking.client import Store, environment
    from dbo.platform.tracking.sync import Writer, told

    root = root_of(folder)
    place = destination(root, uri)
    writer = Writer(root, Store(place, experiment or str(_recorded(root).get("experiment") or "dbo")))
    os.environ.update(environment(place))
    try:
        writer.write(last=True)
    except (InputError, RunError):
        raise
    except Exception as error:
        writer.count()
        raise RunError(f"{folder}: {writer.left} points of {writer.points} are not in MLflow: {told(error)}") from error
    for path, new, points in writer.runs:
        say(f"{path}: sent {new} new points of {points}" if new else f"{path}: up to date, {points} points")


def destination(root: Path, uri: str | None) -> str:
    """The store that a folder goes to: the one that is given, else the one that it names, if that may be asked."""
    if uri is None:
        uri = _recorded(root).get("uri")
        tracking_uri.check_recorded(f"{root}: tracking.uri", uri)
    return tracking_uri.place(uri if uri != tracking_uri.OFF else None, root)


def root_of(folder: Path) -> Path:
    """The folder itself, or that of the group that it belongs to, whose runs are tracked below one parent."""
    from dbo.platform.tracking import reader as source

    if not source.is_group(folder) and source.run_facts(folder) is None:
        raise InputError(f"{folder}: not the folder of a run, a comparison or a sweep")
    place = folder.resolve()
    for above in list(place.parents)[:2]:
        if source.is_group(above):
            members = source.read_group(above)["members"]
            if any((above / member).resolve() == place for member in members):
                return above
    return folder


def _recorded(root: Path) -> dict[str, Any]:
    """The tracking section of what lies in a folder."""
    from dbo.platform.config import yaml_io
    from dbo.platform.tracking import reader as source

    data = source.read_group(root) if source.is_group(root) else yaml_io.read(root / "experiment.yaml")
    section = data.get("tracking")
    return section if isinstance(section, dict) else {}


# ---- the writer's process ------------------------------------------------------------------------------------------


def _follow(root: Path, uri: str, experiment: str, since: float) -> None:
    os.nice(10)
    parent = os.getppid()
    # The libraries take seconds: not before there is something to write, wrong input never gets there.
    while not any((root / name).exists() for name in ("experiment.yaml", "group.json")) and not _closed(0.1):
        pass
    from dbo.platform.tracking.client import Store, environment
    from dbo.platform.tracking.sync import Writer, told

    os.environ.update(environment(uri))
    words = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)                               # the command reads our words, and none of the libraries'
    ended = progressed = 0.0
    failures = 0
    error = ""

    def progress() -> None:
        nonlocal progressed, failures
        progressed, failures = time.monotonic(), 0
        if ended:
            _tell(words, writer, error)

    writer = Writer(root, Store(uri, experiment), since, progress)
    import mlflow  # noqa: F401 - slow: now, not between two looks at the folder

    while True:
        waiting = _POLL if not failures else _BACKOFF[min(failures, len(_BACKOFF)) - 1]
        if not ended and _closed(waiting):
            ended = progressed = time.monotonic()
            failures = 0
        elif ended and failures:
            time.sleep(waiting)
        last = bool(ended)
        try:
            writer.write(last)
            error, failures = "", 0
            if last and writer.lingering and time.monotonic() - ended < _LINGER:
                time.sleep(_POLL)
            elif last:
                _tell(words, writer, "", done=True)
                return
        except Exception as failure:
            error, failures = told(failure), failures + 1
            with suppress(Exception):
                writer.count()
            if last:
                _tell(words, writer, error)
                alone = os.getppid() != parent
                if time.monotonic() - progressed > _ALONE or (not alone and failures >= _ATTEMPTS):
                    return


def _closed(seconds: float) -> bool:
    """Waits, and tells whether standard input has closed."""
    return bool(select.select([sys.stdin], [], [], seconds)[0]) and not os.read(sys.stdin.fileno(), 1 << 16)


def _tell(words: IO[str], writer: Any, error: str, done: bool = False) -> None:
    word = {"points": writer.points, "left": writer.left, "error": error, "done": done}
    with suppress(OSError):                     # the command may have been killed
        words.write(json.dumps(word) + "\n")


def main() -> None:
    """The writer's entry point."""
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
        sync(given.root, given.uri, given.experiment)


if __name__ == "__main__":
    main()
