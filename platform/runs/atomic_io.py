"""Write files that are either as they were or as they should be, never half of each.

Temporary files have random names and are created exclusively: a symbolic link in the folder is never written through.
Errors of the system name the file, and what was being written.
"""

import errno
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dbo.platform.regular_files import open_regular

_TOKEN = "[0-9a-f]{16}"      # what makes a temporary name unpredictable
_STALE = 600.0               # seconds without a write after which the writer of a temporary file is considered dead
_CHUNK = 1 << 20


def write_atomically(path: Path, data: bytes | str | Iterable[bytes | memoryview], what: str = "") -> None:
    """Write aside, flush to the disk, rename; `what` describes the content in error messages."""
    raw = data.encode() if isinstance(data, str) else data
    remove_leftovers(path.parent, path.name, older_than=_STALE)
    aside = temporary_path(path)
    with describe_errors(path, what or path.name):
        try:
            write_durably(aside, [raw] if isinstance(raw, bytes) else raw)
            os.replace(aside, path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def write_durably(path: Path, pieces: Iterable[bytes | memoryview]) -> str:
    """Write a new file to the disk before returning; return the SHA-256 of the data."""
    digest = hashlib.sha256()
    with open(path, "xb", opener=open_without_links) as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def append_durably(path: Path, line: str, what: str) -> None:
    """Append a line to the disk before returning. A last line that was cut off is dropped first."""
    with describe_errors(path, what):
        drop_partial_line(path)
        with open(path, "a", encoding="utf-8", opener=open_without_links) as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def drop_partial_line(path: Path) -> None:
    """Drop a last line without its end: text appended to it would damage the file for good."""
    try:
        file = open(path, "r+b", opener=open_without_links)    # noqa: SIM115
    except FileNotFoundError:
        return
    with file:
        size = end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _CHUNK)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            end = start + newline + 1
            if newline >= 0:
                break
        if end < size:
            file.truncate(end)
            os.fsync(file.fileno())


def truncate(path: Path, size: int) -> None:
    """Shorten a file to its first `size` bytes, durable on return."""
    with open(path, "r+b", opener=open_without_links) as file:
        if file.seek(0, os.SEEK_END) > size:
            file.truncate(size)
            os.fsync(file.fileno())


def read_chunks(path: Path, size: int) -> Iterator[bytes]:
    """Yield the first `size` bytes of a file in chunks; fewer if the file is shorter or missing."""
    try:
        file = open(path, "rb", opener=open_regular)    # noqa: SIM115
    except FileNotFoundError:
        return
    with file:
        while size > 0 and (chunk := file.read(min(size, _CHUNK))):
            size -= len(chunk)
            yield chunk


def open_without_links(path: str, flags: int) -> int:
    """Open a file for `open(opener=…)`; a symbolic link in its place is an OSError."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def read_bounded(path: Path, limit: int) -> bytes:
    """Return the content of a small file; more than `limit` bytes are an OSError, before they are in memory."""
    with open(path, "rb", opener=open_regular) as file:
        data = file.read(min(limit, os.fstat(file.fileno()).st_size) + 1)       # a buffer of this size is allocated
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"more than {limit:,} bytes", str(path))
    return data


def temporary_path(path: Path) -> Path:
    """Return a random name in the same folder. It starts with a dot: readers and uploads skip it."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")


def remove_leftovers(folder: Path, *names: str, older_than: float = 0.0) -> None:
    """Remove temporary files for these names that a crashed writer has left, and nothing else.

    `older_than`: seconds since the last write. Only a caller that excludes other writers may choose 0.
    """
    pattern = re.compile(rf"\.({'|'.join(map(re.escape, names))})\.{_TOKEN}\.new")
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if pattern.fullmatch(entry.name):
                with suppress(OSError):        # another process was faster
                    found = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode) and time.time() - found.st_mtime >= older_than:
                        os.unlink(entry.path)


@contextmanager
def describe_errors(path: Path, what: str) -> Iterator[None]:
    """Name the file in errors of the system, and what was being written: a full disk names neither."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(error.errno, f"{reason} (writing {what})", str(path)) from error


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
