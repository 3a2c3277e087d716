"""Cache prepared arrays in files that are found by what they were built from, and verified when read.

The files are in $XDG_CACHE_HOME/dbo (or ~/.cache/dbo), contain plain arrays (never pickles), and may be deleted at any
time. A file's name is a hash of the data set, of the version of its preparation and of the source files' contents: new
sources or a new preparation never find old arrays. Splits and scaling are not cached: they are quick, and every seed
would need its own files.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from hashlib import file_digest, sha256
from pathlib import Path

import numpy as np

from dbo.tasks.arrays import Array, hash_arrays
from dbo.tasks.notices import print_notice

_CHECKSUM = "sha256"


def find_cache_folder() -> Path:
    """Return the folder of our caches; by the XDG standard a relative $XDG_CACHE_HOME is ignored."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path("~/.cache").expanduser()) / "dbo"


def load_or_build(
    name: str, version: str, sources: Callable[[], Iterable[Path]], build: Callable[[], dict[str, Array]]
) -> dict[str, Array]:
    """Return the arrays that `build` returns, from the cache if they were built before from the same sources.

    `sources` is called again after `build`, which may have downloaded them.
    """
    cached = _read(_cache_file(name, version, sources()))
    if cached is not None:
        return cached
    arrays = build()
    _write(_cache_file(name, version, sources()), arrays)
    return arrays


def _cache_file(name: str, version: str, sources: Iterable[Path]) -> Path:
    contents = {}
    for source in sources:
        with open(source, "rb") as file:
            contents[source.name] = file_digest(file, "sha256").hexdigest()
    key = sha256(json.dumps([name, version, contents], sort_keys=True).encode()).hexdigest()
    return find_cache_folder() / "data" / f"{name}-{key[:24]}.npz"


def _read(file: Path) -> dict[str, Array] | None:
    """Return the arrays in the file; None if it is missing or damaged."""
    if not file.exists():
        return None
    try:
        with np.load(file, allow_pickle=False) as stored:
            arrays = dict(stored)
        if str(arrays.pop(_CHECKSUM)) == _checksum(arrays):
            return arrays
        reason = "its checksum is wrong"
    except Exception as error:    # a damaged archive fails in many ways that all mean the same
        reason = f"{type(error).__name__}: {error}"
    print_notice(f"rebuilding the cache: {file} is damaged ({reason})")
    return None


def _write(file: Path, arrays: Mapping[str, Array]) -> None:
    """Write the file atomically; if it cannot be written, continue without a cache."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.stem}-", suffix=".new")
        try:
            with open(handle, "wb") as stream:
                np.savez(stream, allow_pickle=False, **{_CHECKSUM: np.array(_checksum(arrays))}, **arrays)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, file)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
    except OSError as error:
        reason = f"{error.filename or file.parent}: {error.strerror or error}"
        print_notice(f"not cached, the next start will be as slow: {reason}")


def _checksum(arrays: Mapping[str, Array]) -> str:
    names = sorted(arrays)
    return sha256(json.dumps([names, hash_arrays(arrays[name] for name in names)]).encode()).hexdigest()
