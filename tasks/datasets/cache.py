"""What was costly to read is kept: arrays in a file that is found by what they were made from, and checked when read.

The files lie below $XDG_CACHE_HOME (or ~/.cache) in dbo/, hold plain arrays (never pickles), and may be deleted at any
time. A file's name is a digest of the data set, of the version of its preparation and of the source files' contents, so
another source or another preparation never finds the arrays of an old one. Splits and scaling are not in the files:
they take a moment, and every seed would need files of its own.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from hashlib import file_digest, sha256
from pathlib import Path

import numpy as np

from dbo.tasks.api import Array, digest

_CHECKSUM = "sha256"


def cache_home() -> Path:
    """Where our own caches lie; by the XDG standard a relative $XDG_CACHE_HOME is ignored."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path("~/.cache").expanduser()) / "dbo"


def say(text: str) -> None:
    """One line for whoever waits."""
    print(f"dbo: {text}", file=sys.stderr, flush=True)


def cached(
    name: str, version: str, sources: Callable[[], Iterable[Path]], make: Callable[[], dict[str, Array]]
) -> dict[str, Array]:
    """The arrays that `make` gives, from the cache if they were made before from the same sources.

    `sources` is asked again after `make`, which may have downloaded them.
    """
    before = _place(name, version, sources())
    found = _read(before)
    if found is not None:
        return found
    arrays = make()
    _write(_place(name, version, sources()), arrays)
    return arrays


def _place(name: str, version: str, sources: Iterable[Path]) -> Path:
    contents = {}
    for source in sources:
        with open(source, "rb") as file:
            contents[source.name] = file_digest(file, "sha256").hexdigest()
    key = sha256(json.dumps([name, version, contents], sort_keys=True).encode()).hexdigest()
    return cache_home() / "data" / f"{name}-{key[:24]}.npz"


def _read(file: Path) -> dict[str, Array] | None:
    """The arrays in the file; None if there is none, or a damaged one."""
    if not file.exists():
        return None
    try:
        with np.load(file, allow_pickle=False) as stored:
            arrays = dict(stored)
        if str(arrays.pop(_CHECKSUM)) == _checksum(arrays):
            return arrays
        reason = "its checksum is wrong"
    except Exception as error:    # a damaged archive fails in a dozen ways, and all mean the same
        reason = f"{type(error).__name__}: {error}"
    say(f"made anew: {file} is damaged ({reason})")
    return None


def _write(file: Path, arrays: Mapping[str, Array]) -> None:
    """Written aside, flushed to the disk, renamed. Who cannot write works without a cache."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=file.parent, prefix=f".{file.stem}-", suffix=".new")
        try:
            with open(handle, "wb") as opened:
                np.savez(opened, allow_pickle=False, **{_CHECKSUM: np.array(_checksum(arrays))}, **arrays)
                opened.flush()
                os.fsync(opened.fileno())
            os.replace(aside, file)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(aside)
    except OSError as error:
        say(f"not cached, the next start will be as slow: {error.filename or file.parent}: {error.strerror or error}")


def _checksum(arrays: Mapping[str, Array]) -> str:
    names = sorted(arrays)
    return sha256(json.dumps([names, digest(arrays[name] for name in names)]).encode()).hexdigest()
