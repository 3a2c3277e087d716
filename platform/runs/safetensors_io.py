"""Serialize arrays in the safetensors format piece by piece; `safetensors.numpy.save` holds them in memory twice more.

That library reads the files like any other.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_KINDS = {"f": "F", "i": "I", "u": "U"}


def serialize(arrays: Mapping[str, NDArray[Any]]) -> Iterator[bytes | memoryview]:
    """Yield the length of the header, the header, and the arrays without copying them."""
    flat = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    order = sorted(flat, key=lambda name: (-flat[name].itemsize, name))      # so that all are aligned
    header, end = {}, 0
    for name in order:
        start, end = end, end + flat[name].nbytes
        header[name] = {"dtype": _format_dtype(flat[name].dtype), "shape": flat[name].shape,
                        "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in order:
        yield flat[name].reshape(-1).view(np.uint8).data


def _format_dtype(dtype: "np.dtype[Any]") -> str:
    if dtype.kind == "b":
        return "BOOL"
    if dtype.kind not in _KINDS or dtype.byteorder == ">":
        raise TypeError(f"{dtype} cannot be written; must be numbers in the machine's byte order")
    return f"{_KINDS[dtype.kind]}{8 * dtype.itemsize}"
