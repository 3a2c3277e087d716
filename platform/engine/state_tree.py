"""Flatten an algorithm's state into named arrays and rebuild it: the content of checkpoints and state files."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeAlias, TypeVar, get_type_hints

from array_api_compat import array_namespace
from numpy.typing import NDArray

from dbo.algorithms.api import Outgoing
from dbo.algorithms.kernels import fused
from dbo.algorithms.kernels.lazy import unwrap, unwrap_rows, wrap

S = TypeVar("S")
Flat: TypeAlias = dict[str, NDArray[Any]]

_CHUNK = 1 << 26      # bytes; the memory that a checkpoint needs in addition to the state


def flatten(state: Any, prefix: str = "") -> Flat:
    """Return {"x": …, "loop_y.d": …}; every leaf is an array with the rows first."""
    flat: Flat = {}
    for field in fields(state):
        value = getattr(state, field.name)
        if is_dataclass(value) and not isinstance(value, Outgoing):
            flat |= flatten(value, f"{prefix}{field.name}.")
        else:
            flat[prefix + field.name] = value
    return flat


def unflatten(kind: type, flat: Flat, prefix: str = "") -> Any:
    """Build the state of class `kind` from the arrays of `flatten`."""
    hints = get_type_hints(kind)
    return kind(**{
        field.name: unflatten(hints[field.name], flat, f"{prefix}{field.name}.")
        if is_dataclass(hints[field.name])
        else flat[prefix + field.name]
        for field in fields(kind)
    })


def wrap_state(state: S) -> S:
    """Return the state with lazy arithmetic for its wide rows."""
    return _map_arrays(state, wrap)


def unwrap_state(state: S) -> S:
    """Return the state with arrays; what is pending is evaluated together."""
    unwrap_rows([*flatten(state).values()])
    return _map_arrays(state, unwrap)


def _map_arrays(state: S, function: Callable[[Any], Any]) -> S:
    """Return the state with every array replaced; the same one if nothing changes."""
    changed = {}
    for field in fields(state):      # type: ignore[arg-type]
        value = getattr(state, field.name)
        is_nested = is_dataclass(value) and not isinstance(value, Outgoing)
        new = _map_arrays(value, function) if is_nested else function(value)
        if new is not value:
            changed[field.name] = new
    return replace(state, **changed) if changed else state      # type: ignore[type-var]


def first_nonfinite(flat: Flat) -> str | None:
    """Return the name of the first array that contains NaN or inf; None if there is none."""
    for name, array in flat.items():
        if not (fused.all_finite(array) if fused.can_fuse(array) else array_namespace(array).isfinite(array).all()):
            return name
    return None


def chunk_names(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Group the names of arrays into chunks, each of one array or of at most 64 MiB."""
    chunk: list[str] = []
    free = _CHUNK
    for name, size in sizes.items():
        if chunk and size > free:
            yield chunk
            chunk, free = [], _CHUNK
        chunk.append(name)
        free -= size
    yield chunk
