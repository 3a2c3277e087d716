"""Files of a run that are still being written: lines as they come, and whatever else can be read at this moment.

Nothing here raises for what it finds: a run that is going on, was killed, or is damaged is shown as what it is.
"""

import json
import math
from pathlib import Path
from typing import IO, Any

_MARK = 256                  # bytes before the place where reading stopped, by which a rewritten file is known
_CHUNK = 16 * 2**20          # at most this much of a file is read at a time
_WHOLE = 4 * 2**20           # no small file of a run is larger


class Tail:
    """The complete lines of a growing file.

    A run that recovers or starts again cuts the file, or replaces it by another one: what was read before is then void.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset, self._mark = 0, b""

    def read(self) -> tuple[bool, list[bytes]]:
        """Whether earlier lines are void, and the lines that are new."""
        void = False
        try:
            with _opened(self.path) as file:
                file.seek(self._offset - len(self._mark))
                if file.read(len(self._mark)) != self._mark:
                    void, self._offset = True, 0
                    file.seek(0)
                chunk = file.read(_CHUNK)
        except OSError:
            void = self._offset > 0
            self._offset, self._mark = 0, b""
            return void, []
        end = chunk.rfind(b"\n") + 1
        self._offset += end
        self._mark = chunk[:end][-_MARK:] if void or end >= _MARK else (self._mark + chunk[:end])[-_MARK:]
        return void, chunk[:end].splitlines()


class Small:
    """A file that is replaced as a whole: its content, read again only when it is another one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, ...] | None = None

    def changed(self) -> bool:
        try:
            stat = self.path.stat()
            seen: tuple[int, ...] | None = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        except OSError:
            seen = None
        changed, self._seen = seen != self._seen, seen
        return changed

    def text(self) -> str:
        try:
            with _opened(self.path) as file:
                return file.read(_WHOLE).decode("utf-8", "replace")
        except OSError:
            return ""

    def mapping(self) -> dict[str, Any]:
        """A JSON object; empty if there is none."""
        try:
            found = json.loads(self.text())
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


def _opened(path: Path) -> IO[bytes]:
    if not path.is_file():
        raise FileNotFoundError(path)       # a pipe would make us wait for its other end
    return open(path, "rb")


def parsed(line: bytes, key: str, kind: type) -> dict[str, Any] | None:
    """The object in a line, if it has a `key` of this kind."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    good = isinstance(found, dict) and isinstance(found.get(key), kind) and not isinstance(found[key], bool)
    return found if good else None


def last_line(path: Path, most: int = _CHUNK) -> bytes:
    """The last complete line of a file, without reading what is before it."""
    try:
        with _opened(path) as file:
            size, step = file.seek(0, 2), 65536
            while True:
                start = max(0, size - step)
                file.seek(start)
                lines = file.read(size - start).split(b"\n")       # the last part is what follows the last newline
                if len(lines) > 2 or start == 0 or step > most:
                    return lines[-2] if len(lines) > 2 or (start == 0 and len(lines) == 2) else b""
                step *= 4
    except OSError:
        return b""


def number(value: Any) -> float | int | None:
    """A finite number, or nothing: the page's JSON has no NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:
        return None


def numbers(values: Any) -> list[float | int | None] | None:
    return [number(value) for value in values] if isinstance(values, list) else None


def text(value: Any, most: int = 300) -> str:
    """A string or number as a short text; nothing of anything else, which could be of any size."""
    if not isinstance(value, str | int | float):
        return ""
    try:
        return str(value)[:most].encode("utf-8", "replace").decode()      # halves of characters cannot be sent
    except ValueError:                                                    # a number of thousands of digits
        return ""
