"""Read the start of a run from a file: the state of a finished run, or a model that was saved."""

import hashlib
from typing import Any

from numpy.typing import NDArray

from dbo.platform.config.paths import expand_user
from dbo.platform.errors import InputError


def load_start(file: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file: x and y, as the rows of nodes, or x.… and y.…, the tensors of a model."""
    return parse_start(_read(file), file)


def parse_start(content: bytes, file: str) -> dict[str, NDArray[Any]]:
    """Return what `load_start` returns, from the content of a file."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    if content[:2] in (b"PK", b"\x80\x02"):        # an archive, or the old format of torch.save
        raise InputError(
            f"start: {file} is a file of torch.save or np.savez, which is not read; write it with "
            f"safetensors.torch.save_file(model.state_dict(), FILE), names x.… and y.…"
        )
    try:
        arrays = load(content)
    except (SafetensorError, ValueError) as error:
        raise InputError(f"start: {file} is not a safetensors file: {str(error).partition(chr(10))[0]}") from None
    except KeyError as error:                       # a type that NumPy does not have
        raise InputError(f"start: {file} has numbers of type {error.args[0]}; must be float16, 32 or 64") from None
    if missing := {"x", "y"} - {name.partition(".")[0] for name in arrays}:
        raise InputError(
            f"start: {file} has no {', '.join(sorted(missing))}; must have the arrays x and y, or x.… and y.…")
    return arrays


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
