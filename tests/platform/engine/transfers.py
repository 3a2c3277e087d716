"""Watch what crosses between a torch device and the host, also where the device is the CPU.

`no_host_reads` raises `HostRead` where the content of a tensor would become visible to the host, or where a GPU would
make the host wait for a size. Inside of it `torch_codecs.fetch` alone may read. What it reads and what is uploaded is
counted. `no_content` is for tensors that have no content at all: whoever tries to read them fails by itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dbo.platform.network import torch_codecs

# Methods that show content to Python, and copies to the host; on tensors of the CPU the dispatcher sees few of them.
READS = frozenset({
    "cpu", "numpy", "item", "tolist", "__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__",
    "__dlpack__", "__repr__", "__format__", "__contains__", "__reduce_ex__", "storage", "untyped_storage", "equal",
    "allclose", "is_nonzero", "nonzero", "argwhere", "unique", "unique_consecutive", "bincount",
})
UPLOADS = frozenset({"tensor", "as_tensor", "asarray", "from_numpy", "frombuffer"})
WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::_unique2", "aten::equal")


class HostRead(AssertionError):
    """Content of a tensor was read outside of the encoder."""


class Transfers:
    """Bytes that crossed, call by call."""

    def __init__(self) -> None:
        self.fetched: list[int] = []
        self.uploaded: list[int] = []
        self.is_fetching = False


class _Calls(TorchFunctionMode):
    def __init__(self, transfers: Transfers) -> None:
        super().__init__()
        self.transfers = transfers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_upload = name in UPLOADS and bool(args)
        moves = (name == "to" and ("device" in kwargs or any(isinstance(a, str | torch.device) for a in args[1:]))) or (
            is_upload and isinstance(args[0], torch.Tensor) and "device" in kwargs)
        if not self.transfers.is_fetching and (name in READS or moves):
            raise HostRead(f"{name} outside of the encoder")
        if is_upload and isinstance(args[0], np.ndarray):
            self.transfers.uploaded.append(args[0].nbytes)
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        is_mask = name.startswith("aten::index.Tensor") and any(
            index is not None and index.dtype == torch.bool for index in args[1])
        if name in WAITS or is_mask:
            raise HostRead(f"{name} makes the host wait for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_reads() -> Iterator[Transfers]:
    """Allow nothing but `torch_codecs.fetch` to read from the device."""
    transfers, original = Transfers(), torch_codecs.fetch

    def fetch(tensor: Any) -> Any:
        transfers.fetched.append(tensor.nbytes)
        transfers.is_fetching = True
        try:
            return original(tensor)
        finally:
            transfers.is_fetching = False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_codecs, "fetch", fetch)
        with _Calls(transfers), _Operations():
            yield transfers


@contextmanager
def no_content() -> Iterator[None]:
    """For tensors of the device "meta", which have shapes but no content: `fetch` gives zeros, all else must fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_codecs, "fetch", lambda tensor: np.zeros(
            tensor.shape, dtype=str(tensor.dtype).removeprefix("torch.")))
        yield
