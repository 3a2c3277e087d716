"""Place a block's arrays: NumPy on the CPU, torch tensors on a GPU. No other module depends on the device.

A message leaves the device once, as a whole; received rows are decoded on the host and copied to the device once.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, Protocol, TypeAlias

import numpy as np
from scipy import sparse
from threadpoolctl import ThreadpoolController

from dbo.algorithms.api import Array, Message, Packed
from dbo.algorithms.kernels import fused
from dbo.platform.errors import RunError
from dbo.tasks.api import Shard as TaskShard
from dbo.tasks.kernels.threads import set_threads as set_task_threads

Mixing: TypeAlias = Callable[[Array], Array]


class Device(Protocol):
    """Hold the arrays of a block."""

    def place(self, shard: TaskShard) -> TaskShard:
        """Return the shard with its arrays on this device."""

    def load(self, array: Array) -> Array:
        """Copy a host array to this device; integers (counters) stay on the host."""

    def fetch(self, array: Array) -> Array:
        """Copy an array of this device to the host."""

    def stack(self, own: Array, own_at: Array, remote: list[Array], remote_at: Array) -> Array:
        """Stack own rows and decoded remote rows, each at its position in node order."""

    def mixing(self, weights: sparse.csr_array) -> Mixing:
        """Return the function rows → W @ rows for this block's part of W, in the dtype of the rows."""


class Cpu:
    """Hold NumPy arrays."""

    def __init__(self) -> None:
        _keep_memory()

    def place(self, shard: TaskShard) -> TaskShard:
        return shard

    def load(self, array: Array) -> Array:
        # Arrays from Ray's object store are read-only, and rounds may write into the state.
        return array if array.flags.writeable else array.copy()

    def fetch(self, array: Array) -> Array:
        return np.asarray(array)

    def stack(self, own: Array, own_at: Array, remote: list[Array], remote_at: Array) -> Array:
        stacked = np.empty((len(own) + len(remote), own.shape[1]), dtype=own.dtype)
        stacked[own_at] = own
        stacked[remote_at] = remote
        return stacked

    def mixing(self, weights: sparse.csr_array) -> Mixing:
        cast: dict[Any, sparse.csr_array] = {}

        def mix(rows: Array) -> Array:
            if rows.dtype not in cast:
                cast[rows.dtype] = weights.astype(rows.dtype)
            mixed: Array = cast[rows.dtype] @ rows
            return mixed

        return mix


class Torch:
    """Hold torch tensors on a device such as cuda; on cpu for tests."""

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

    def place(self, shard: TaskShard) -> TaskShard:
        return shard.to(partial(self._torch.asarray, device=self.name))

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

    def mixing(self, weights: sparse.csr_array) -> Mixing:
        # Dense: the block's part of W is small, and unlike sparse products this one is deterministic on a GPU.
        whole, cast = weights.toarray(), {}

        def mix(rows: Array) -> Array:
            if rows.dtype not in cast:
                cast[rows.dtype] = self._torch.as_tensor(whole, dtype=rows.dtype, device=self.name)
            mixed: Array = cast[rows.dtype] @ rows
            return mixed

        return mix


@contextmanager
def numeric_context(pools: ThreadpoolController, threads: int) -> Iterator[None]:
    """Fix the thread count, and silence overflow warnings: the run checks for divergence itself."""
    fused.set_threads(threads)
    set_task_threads(threads)
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    with pools.limit(limits=threads), np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        yield


@cache
def _keep_memory() -> None:
    """Make the C library reuse the memory of large arrays; glibc only, and unless the user has configured malloc.

    By default glibc maps an array above 32 MB anew each time, and the kernel zeroes its pages: more than half of a
    round with millions of parameters. The cost: the process keeps its peak memory until `trim_memory`.
    """
    mallopt = _c_function("mallopt")
    if mallopt is not None:
        trim_threshold, mmap_max = -1, -4      # M_… of malloc.h
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, -1)            # never


def trim_memory() -> None:
    """Return unused memory that `_keep_memory` keeps: once, before another process needs much of it."""
    trim = _c_function("malloc_trim")
    if trim is not None:
        trim(0)


def _c_function(name: str) -> Any:
    """Return a function of the C library; None if it has none, or if the user has configured malloc."""
    configured = any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ
    return None if configured or sys.platform != "linux" else getattr(ctypes.CDLL(None), name, None)


def copy_to_host(device: Device, message: Message | Packed) -> Message | Packed:
    """Return the message in host memory, copied in one piece."""
    if isinstance(message, Packed) or isinstance(message.values, np.ndarray):
        return message
    return replace(
        message, values=device.fetch(message.values),
        levels=None if message.levels is None else device.fetch(message.levels),
        unit=None if message.unit is None else device.fetch(message.unit),
    )


def select_device(gpus: float) -> Device:
    """Return the GPU (share) that this process has, or the CPU if `gpus` is 0."""
    if not gpus:
        return Cpu()
    import torch

    if not torch.cuda.is_available():
        raise RunError("engine.gpus_per_node > 0, but torch finds no GPU in this process")
    return Torch("cuda")
