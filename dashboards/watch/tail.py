"""Read files of a run that is still being written: lines as they come, and small files that are replaced as a whole.

Nothing here raises for what a file holds: a run that is running, was killed, or is damaged is shown as what it is.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

from dbo.platform.errors import InputError

T = TypeVar("T")

_MARK = 256                  # bytes before the current position, by which a replaced file is recognised
_MAX_READ = 16 * 2**20       # bytes of a file that are read at a time
_MAX_SMALL = 4 * 2**20       # no small file of a run is larger


class Tail:
    """The complete lines of a growing file.

    A run that recovers or restarts truncates or replaces the file: lines read before are then void.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset, self._mark = 0, b""

    def read(self) -> tuple[bool, list[bytes]]:
        """Return whether previous lines are void, and the lines that are new."""
        is_void = False
        try:
            with _open(self.path) as file:
                file.seek(self._offset - len(self._mark))
                if file.read(len(self._mark)) != self._mark:
                    is_void, self._offset = True, 0
                    file.seek(0)
                chunk = file.read(_MAX_READ)
        except OSError:
            is_void = self._offset > 0
            self._offset, self._mark = 0, b""
            return is_void, []
        end = chunk.rfind(b"\n") + 1
        self._offset += end
        self._mark = chunk[:end][-_MARK:] if is_void or end >= _MARK else (self._mark + chunk[:end])[-_MARK:]
        return is_void, chunk[:end].splitlines()


class SmallFile:
    """A file that is replaced as a whole, and read again only after that."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, ...] | None = None

    def has_changed(self) -> bool:
        """Decide whether the file is another one than at the previous call."""
        try:
            stat = self.path.stat()
            stamp: tuple[int, ...] | None = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        except OSError:
            stamp = None
        changed, self._stamp = stamp != self._stamp, stamp
        return changed

    def read_text(self) -> str:
        try:
            with _open(self.path) as file:
                return file.read(_MAX_SMALL).decode("utf-8", "replace")
        except OSError:
            return ""


def _open(path: Path) -> IO[bytes]:
    if not path.is_file():
        raise FileNotFoundError(path)       # a pipe would make us wait for its other end
    return open(path, "rb")


def try_parse(parse: Callable[[Any], T], text: str | bytes) -> T | None:
    """Parse with a function of `runs.schema`; None if the text is damaged."""
    try:
        return parse(text)
    except (ValueError, InputError):
        return None


def last_line(path: Path) -> bytes:
    """Return the last complete line of a file, without reading what is before it."""
    try:
        with _open(path) as file:
            size, step = file.seek(0, 2), 65536
            while True:
                start = max(0, size - step)
                file.seek(start)
                lines = file.read(size - start).split(b"\n")       # the last part is what follows the last newline
                if len(lines) > 2 or start == 0 or step > _MAX_READ:
                    return lines[-2] if len(lines) > 2 or (start == 0 and len(lines) == 2) else b""
                step *= 4
    except OSError:
        return b""


def number(value: Any) -> float | int | None:
    """Return a finite number, None for everything else: the page's JSON has no NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:
        return None


def numbers(values: Any) -> list[float | int | None] | None:
    """Return the numbers of a list, None for everything else."""
    return [number(value) for value in values] if isinstance(values, list) else None


def text(value: Any, most: int = 300) -> str:
    """Return a string or number as a short text; empty for everything else, which could be of any size."""
    if not isinstance(value, str | int | float):
        return ""
    try:
        return str(value)[:most].encode("utf-8", "replace").decode()      # halves of characters cannot be sent
    except ValueError:                                                    # a number of thousands of digits
        return ""
