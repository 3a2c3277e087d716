"""An algorithm's state as a flat dict of arrays and back: what checkpoints and state files hold."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from array_api_compat import array_namespace
from numpy.typing import NDArray

from dbo.algorithms.gossip import Outgoing
from dbo.algorithms.kernels import fused

Flat = dict[str, NDArray[Any]]

_PART = 1 << 26      # bytes; what a checkpoint needs in memory beside the state itself


def flatten(state: Any, prefix: str = "") -> Flat:
    """{"x": …, "loop_y.d": …}; every leaf is an array with the rows first."""
    flat: Flat = {}
    for field in fields(state):
        value = getattr(state, field.name)
        if is_dataclass(value) and not isinstance(value, Outgoing):
            flat |= flatten(value, f"{prefix}{field.name}.")
        else:
            flat[prefix + field.name] = value
    return flat


def rebuild(kind: type, flat: Flat, prefix: str = "") -> Any:
    """The state of class `kind` that `flatten` took apart."""
    hints = get_type_hints(kind)
    return kind(**{
        field.name: rebuild(hints[field.name], flat, f"{prefix}{field.name}.")
        if is_dataclass(hints[field.name])
        else flat[prefix + field.name]
        for field in fields(kind)
    })


def finite(flat: Flat) -> str | None:
    """The name of the first array that holds NaN or inf, None if all is well."""
    for name, array in flat.items():
        if not (fused.finite(array) if fused.is_wide(array) else array_namespace(array).isfinite(array).all()):
            return name
    return None


def parts(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """The names in groups, each of one array or of at most `_PART` bytes."""
    group: list[str] = []
    room = _PART
    for name, size in sizes.items():
        if group and size > room:
            yield group
            group, room = [], _PART
        group.append(name)
        room -= size
    yield group
