"""Hash arrays, and convert every array inside nested dataclasses."""

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, replace
from hashlib import sha256
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from array_api_compat import array_namespace, device, is_numpy_array
from numpy.typing import NDArray
from scipy import sparse

# A numpy array on the CPU, a torch tensor on a GPU: oracles find their functions by `array_namespace`.
Array: TypeAlias = NDArray[Any]


def hash_arrays(arrays: Iterable[Array]) -> str:
    """Return the sha256 of the arrays: two runs with the same hash used the same data in the same split."""
    state = sha256()
    for array in arrays:
        state.update(f"{array.dtype}{array.shape}".encode())
        state.update(np.ascontiguousarray(array).data)
    return state.hexdigest()


def as_index(numbers: Array, like: Array) -> Array:
    """Return drawn sample numbers as an index of `like`: NumPy indexes with them as they are.

    They are read-only, because steps share them. A tensor on a device gets a copy there: without one torch would warn.
    """
    if is_numpy_array(like):
        return numbers
    index: Array = array_namespace(like).asarray(numbers, device=device(like), copy=True)
    return index


@runtime_checkable
class Convertible(Protocol):
    """A dataclass with a conversion of its own: it may hold something else on a device than on the host."""

    def to(self, asarray: Callable[[Array], Any]) -> Any: ...


def convert_arrays(value: Any, asarray: Callable[[Array], Any]) -> Any:
    """Return a copy of `value` with `asarray` applied to every floating array in its dataclasses and tuples.

    Integers stay on the host: they number nodes and samples.
    """
    if isinstance(value, np.ndarray):
        return asarray(value) if value.dtype.kind == "f" else value
    if isinstance(value, tuple):
        return tuple(convert_arrays(item, asarray) for item in value)
    if sparse.issparse(value):
        raise ValueError("a sparse matrix cannot be converted here: the dataclass that holds it must define `to`")
    if is_dataclass(value) and not isinstance(value, type):
        return value.to(asarray) if isinstance(value, Convertible) else convert_fields(value, asarray)
    return value


class DoubleCast:
    """Copy arrays to float64, up to a number of bytes; more of them raise ValueError."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes

    def __call__(self, array: Any) -> Any:
        """Convert a floating array or tensor; return anything else as it is."""
        if isinstance(array, np.ndarray):
            double = array.astype(np.float64) if array.dtype.kind == "f" else array
        else:
            double = array.double() if array.is_floating_point() else array
        self._left -= double.nbytes
        if self._left < 0:
            raise ValueError("the data are too large for a copy in float64")
        return double


def convert_fields(value: Any, asarray: Callable[[Array], Any]) -> Any:
    """Return a copy of a dataclass with `convert_arrays` applied to each of its fields."""
    names = [field.name for field in fields(value) if field.init]
    return replace(value, **{name: convert_arrays(getattr(value, name), asarray) for name in names})
