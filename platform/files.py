"""Files that are either as they were or as they should be, never half of each."""

import os
from pathlib import Path


def write_atomically(path: Path, data: bytes | str) -> None:
    """Written aside, flushed to the disk, renamed."""
    raw = data.encode() if isinstance(data, str) else data
    aside = path.with_name(f".{path.name}.new")
    with open(aside, "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
