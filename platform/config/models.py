"""Read the start of a run from a file: the state of a finished run, or a model that was saved."""

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbo.platform.config.paths import expand_user
from dbo.platform.errors import InputError


def load_start(file: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return x and y of a file as (dim,) rows; of the rows of several nodes, their mean."""
    return parse_start(_read(file), file)


def parse_start(content: bytes, file: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return what `load_start` returns, from the content of a file."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(content)
    except (SafetensorError, ValueError) as error:
        raise InputError(f"start: {file} is not a safetensors file: {str(error).partition(chr(10))[0]}") from None
    if missing := {"x", "y"} - arrays.keys():
        raise InputError(f"start: {file} has no {', '.join(sorted(missing))}; must have the arrays x and y")
    x, y = (np.atleast_2d(arrays[name]).mean(axis=0, dtype=np.float64) for name in ("x", "y"))
    return np.asarray(x), np.asarray(y)


def hash_start(file: str) -> str:
    """Return the SHA-256 of a file's content: part of the run key."""
    return hash_file("start", file)


def hash_file(key: str, file: str) -> str:
    """Return the SHA-256 of the content of a file that `key` names."""
    return hashlib.sha256(_read(file, key)).hexdigest()


def check_regular(key: str, file: str) -> None:
    """Refuse a pipe or a device, which may never end; what is missing or a folder fails when it is read."""
    path = expand_user(file)
    try:
        is_endless = path.exists() and not path.is_file() and not path.is_dir()
    except OSError as error:
        raise InputError(f"{key}: {file} cannot be read: {error.strerror}") from None
    if is_endless:
        raise InputError(f"{key}: {file} is not a regular file")


def _read(file: str, key: str = "start") -> bytes:
    path = expand_user(file)
    if path.is_dir():
        hint = "; of a run, name its state.safetensors" if key == "start" else ""
        raise InputError(f"{key}: {file} is a folder; must be a file{hint}")
    check_regular(key, file)
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{key}: {file} cannot be read: {error.strerror}") from None
