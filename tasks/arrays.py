"""Hash arrays, and convert every array inside nested dataclasses."""

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, replace
from hashlib import sha256
from typing import Any, TypeAlias

import numpy as np
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


def convert_arrays(value: Any, asarray: Callable[[Array], Any]) -> Any:
    """Return a copy of `value` with `asarray` applied to every floating array in its dataclasses and tuples."""
    if isinstance(value, np.ndarray):
        return asarray(value) if value.dtype.kind == "f" else value
    if isinstance(value, tuple):
        return tuple(convert_arrays(item, asarray) for item in value)
    if sparse.issparse(value):
        raise ValueError("sparse features stay on the CPU: only dense data can move to another device")
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.init]
        return replace(value, **{name: convert_arrays(getattr(value, name), asarray) for name in names})
    return value
