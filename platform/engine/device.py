"""Where a block's arrays live: NumPy on the CPU, torch tensors on a GPU. Chosen here and nowhere else.

What is sent leaves the device once, as a whole message; what arrives is decoded on the host and moved there once.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, Protocol

import numpy as np
from scipy import sparse
from threadpoolctl import ThreadpoolController

from dbo.algorithms.gossip import Message, Packed
from dbo.algorithms.kernels.fused import use as use_threads
from dbo.algorithms.protocol import Array, Shard
from dbo.platform.errors import RunError
from dbo.tasks.kernels.threads import use as use_threads_of_tasks

Mixing = Callable[[Array], Array]


class Device(Protocol):
    """A place for arrays."""

    def place(self, shard: Any) -> Shard:
        """The shard with its arrays on this device."""

    def load(self, array: Array) -> Array:
        """A host array, here; whole numbers (counters) stay on the host."""

    def fetch(self, array: Array) -> Array:
        """An array of this device, on the host."""

    def stack(self, own: Array, own_at: Array, remote: list[Array], remote_at: Array) -> Array:
        """Own rows and decoded remote rows, each at its place in node order."""

    def mixing(self, weights: Any) -> Mixing:
        """W @ rows for this block's part of W, in the dtype of the rows."""


class Cpu:
    """NumPy arrays."""

    def __init__(self) -> None:
        _keep_memory()

    def place(self, shard: Any) -> Shard:
        placed: Shard = shard
        return placed

    def load(self, array: Array) -> Array:
        # What came through Ray's object store is read-only, and rounds may write into the state.
        return array if array.flags.writeable else array.copy()

    def fetch(self, array: Array) -> Array:
        return np.asarray(array)

    def stack(self, own: Array, own_at: Array, remote: list[Array], remote_at: Array) -> Array:
        stacked = np.empty((len(own) + len(remote), own.shape[1]), dtype=own.dtype)
        stacked[own_at] = own
        stacked[remote_at] = remote
        return stacked

    def mixing(self, weights: Any) -> Mixing:
        cast: dict[Any, sparse.csr_array] = {}

        def mix(rows: Array) -> Array:
            if rows.dtype not in cast:
                cast[rows.dtype] = weights.astype(rows.dtype)
            mixed: Array = cast[rows.dtype] @ rows
            return mixed

        return mix


class Torch:
    """Torch tensors on a device such as cuda; on cpu for tests."""

    def __init__(self, name: str) -> None:
        # cuBLAS is deterministic only with a fixed workspace, which it reads before its first call.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        import torch

        self._torch: Any = torch
        self.name = name
        torch.use_deterministic_algorithms(True)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False

    def place(self, shard: Any) -> Shard:
        placed: Shard = shard.to(partial(self._torch.asarray, device=self.name))
        return placed

    def load(self, array: Array) -> Array:
        if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
            return array
        loaded: Array = self._torch.tensor(array, device=self.name)
        return loaded

    def fetch(self, array: Array) -> Array:
        return array if isinstance(array, np.ndarray) else np.asarray(array.detach().cpu().numpy())

    def stack(self, own: Array, own_at: Array, remote: list[Array], remote_at: Array) -> Array:
        stacked = self._torch.empty((len(own) + len(remote), own.shape[1]), dtype=own.dtype, device=self.name)
        stacked[own_at] = own
        stacked[remote_at] = self._torch.as_tensor(np.stack(remote), device=self.name)
        rows: Array = stacked
        return rows

    def mixing(self, weights: Any) -> Mixing:
        # Dense: the block's part of W is small, and unlike sparse products this one is deterministic on a GPU.
        whole, cast = weights.toarray(), {}

        def mix(rows: Array) -> Array:
            if rows.dtype not in cast:
                cast[rows.dtype] = self._torch.as_tensor(whole, dtype=rows.dtype, device=self.name)
            mixed: Array = cast[rows.dtype] @ rows
            return mixed

        return mix


@contextmanager
def arithmetic(pools: ThreadpoolController, threads: int) -> Iterator[None]:
    """A fixed thread count, and no warnings about overflow: divergence is looked for elsewhere."""
    use_threads(threads)
    use_threads_of_tasks(threads)
    with pools.limit(limits=threads), np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        yield


@cache
def _keep_memory() -> None:
    """Makes the C library keep the memory of large arrays for the next ones; glibc only, and unless the user decided.

    By default an array above 32 MB is mapped anew each time, and the kernel has to zero its pages: with millions of
    parameters more than half of a round. The price: what a run needed at its peak stays with the process, until
    `give_back`.
    """
    mallopt = _of_the_c_library("mallopt")
    if mallopt is not None:
        trim_threshold, mmap_max = -1, -4      # M_… of malloc.h
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, -1)            # never


def give_back() -> None:
    """Returns what `_keep_memory` keeps and nothing uses: once, before others on the machine need much of it."""
    trim = _of_the_c_library("malloc_trim")
    if trim is not None:
        trim(0)


def _of_the_c_library(name: str) -> Any:
    decided = any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ
    return None if decided or sys.platform != "linux" else getattr(ctypes.CDLL(None), name, None)


def on_host(device: Device, message: Message | Packed) -> Message | Packed:
    """The message in this machine's memory, moved there in one piece."""
    if isinstance(message, Packed) or isinstance(message.values, np.ndarray):
        return message
    return replace(
        message, values=device.fetch(message.values),
        levels=None if message.levels is None else device.fetch(message.levels),
        unit=None if message.unit is None else device.fetch(message.unit),
    )


def choose(gpus: float) -> Device:
    """The CPU, or the GPU (share) that this process was given."""
    if not gpus:
        return Cpu()
    try:
        import torch
    except ImportError:
        raise RunError("engine.gpus_per_node > 0 needs torch: pip install 'dbo[gpu]'") from None
    if not torch.cuda.is_available():
        raise RunError("engine.gpus_per_node > 0, but torch sees no GPU in this process")
    return Torch("cuda")
