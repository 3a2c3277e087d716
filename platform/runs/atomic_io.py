"""Write files that are either as they were or as they should be, never half of each."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path


def write_atomically(path: Path, data: bytes | str | Iterable[bytes | memoryview]) -> None:
    """Write aside, flush to the disk, rename."""
    raw = data.encode() if isinstance(data, str) else data
    aside = path.with_name(f".{path.name}.new")
    write_durably(aside, [raw] if isinstance(raw, bytes) else raw)
    os.replace(aside, path)
    sync_folder(path.parent)


def write_durably(path: Path, pieces: Iterable[bytes | memoryview]) -> str:
    """Write to the disk before returning; return the SHA-256 of the data."""
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
