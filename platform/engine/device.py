"""Place a block's arrays: NumPy on the CPU, torch tensors on a GPU.

Data, state, gradients, mixing and compression stay on the device. In a round only encoded bytes cross. A step's packets
are encoded on the device and fetched once; received bodies are copied to it once and expanded there. `fetch` is for
evaluations and checkpoints.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Protocol, TypeAlias

import numpy as np
from scipy import sparse
from threadpoolctl import ThreadpoolController

from dbo.algorithms.api import Array
from dbo.algorithms.kernels import fused, short
from dbo.platform.errors import RunError
from dbo.platform.network.decoding import EncodedRow
from dbo.tasks.api import Shard as TaskShard
from dbo.tasks.kernels.threads import set_threads as set_task_threads

# (own rows, remote rows in the order of `remote_at`) → W @ rows in their dtype
Mixing: TypeAlias = Callable[[Array, Sequence[Array] | Array], Array]


_CACHED_BYTES = 4 << 20        # of the columns that a product of many rows reads at once


class Device(Protocol):
    """Hold the arrays of a block."""

    expands_rows: bool      # received rows stay encoded until `expand`

    def place(self, shard: TaskShard) -> TaskShard:
        """Return the shard with its arrays on this device."""

    def load(self, array: Array) -> Array:
        """Copy a host array to this device; integers (counters) stay on the host."""

    def fetch(self, array: Array) -> Array:
        """Copy an array of this device to the host."""

    def expand(self, channels: Mapping[str, Sequence[Any]]) -> Mapping[str, Sequence[Any] | Array]:
        """Return the received rows of each channel on this device; encoded ones if `expands_rows`."""

    def mixing(self, weights: sparse.csr_array, own_at: Array, remote_at: Array) -> Mixing:
        """Return the function that sums a block's own and remote rows, whose columns in W are these."""


class Cpu:
    """Hold NumPy arrays."""

    expands_rows = False

    def __init__(self) -> None:
        _keep_memory()

    def place(self, shard: TaskShard) -> TaskShard:
        return shard

    def load(self, array: Array) -> Array:
        # Arrays from Ray's object store are read-only, which compiled kernels take for another type.
        return array if array.flags.writeable else array.copy()

    def fetch(self, array: Array) -> Array:
        return np.asarray(array)

    def expand(self, channels: Mapping[str, Sequence[Any]]) -> Mapping[str, Sequence[Any] | Array]:
        return channels

    def mixing(self, weights: sparse.csr_array, own_at: Array, remote_at: Array) -> Mixing:
        cast: dict[Any, sparse.csr_array] = {}
        is_sorted = bool((np.diff(own_at) > 0).all())

        def mix(own: Array, remote: Sequence[Array] | Array) -> Array:
            rows = own
            if len(remote) or not is_sorted:
                rows = np.empty((len(own) + len(remote), own.shape[1]), dtype=own.dtype)
                rows[own_at] = own
                if len(remote):
                    rows[remote_at] = remote
            if rows.dtype not in cast:
                cast[rows.dtype] = weights.astype(rows.dtype)
            return _multiply(cast[rows.dtype], rows)

        return mix


def _multiply(weights: sparse.csr_array, rows: Array) -> Array:
    """Return W @ rows. Of many rows, a few columns at a time: those of all neighbours then stay in the cache.

    Columns do not influence each other, so the bits are the same.
    """
    loops = short.imported_loops(rows) if _rounds_products() else None
    if loops is not None:
        return short.multiply_sparse(loops, weights, rows)
    step = max(16, _CACHED_BYTES // max(1, len(rows) * rows.itemsize))
    if step >= rows.shape[1]:
        whole: Array = weights @ rows
        return whole
    mixed: Array = np.empty((weights.shape[0], rows.shape[1]), dtype=rows.dtype)
    for start in range(0, rows.shape[1], step):
        mixed[:, start : start + step] = weights @ np.ascontiguousarray(rows[:, start : start + step])
    return mixed


@cache
def _rounds_products() -> bool:
    """Decide whether SciPy rounds a product before it adds it, as the compiled loops do: on ARM it may not."""
    rows = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    total = np.zeros_like(rows)
    for k, row in enumerate(rows):
        total += rows[:, k : k + 1] * row
    return bool(np.array_equal(sparse.csr_array(rows) @ rows, total))


class Torch:
    """Hold torch tensors on a device such as cuda; on cpu for tests."""

    expands_rows = True

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

    def expand(self, channels: Mapping[str, Sequence[EncodedRow]]) -> Mapping[str, Sequence[Any] | Array]:
        from dbo.platform.network import torch_codecs

        return torch_codecs.decode_rows(channels, self.name)

    def mixing(self, weights: sparse.csr_array, own_at: Array, remote_at: Array) -> Mixing:
        # Dense: the block's part of W is small, and unlike sparse products this one is deterministic on a GPU.
        whole = weights.toarray()
        cast: dict[Any, tuple[Any, Any]] = {}

        def mix(own: Array, remote: Sequence[Array] | Array) -> Array:
            if own.dtype not in cast:
                load = partial(self._torch.as_tensor, dtype=own.dtype, device=self.name)
                cast[own.dtype] = load(whole[:, own_at]), load(whole[:, remote_at])
            of_own, of_remote = cast[own.dtype]
            mixed: Array = of_own @ own
            return mixed + of_remote @ remote if len(remote) else mixed

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
        trim_threshold, mmap_max, arena_max = -1, -4, -8      # M_… of malloc.h
        mallopt(mmap_max, 0)
        mallopt(arena_max, 1)                  # packed rows are made by one thread and freed by another
        mallopt(trim_threshold, -1)            # never


def trim_memory() -> None:
    """Return unused memory that `_keep_memory` keeps: when something else needs much of it, and after a run."""
    trim = _c_function("malloc_trim")
    if trim is not None:
        trim(0)


def _c_function(name: str) -> Any:
    """Return a function of the C library; None if it has none, or if the user has configured malloc."""
    configured = any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ
    return None if configured or sys.platform != "linux" else getattr(ctypes.CDLL(None), name, None)


def open_device(name: str) -> Device:
    """Return the device of `engine.device`: cpu, cuda, or torch_cpu."""
    if name == "cpu":
        return Cpu()
    if name == "torch_cpu":
        return Torch("cpu")
    import torch

    if not torch.cuda.is_available():
        raise RunError("a GPU is requested, but torch finds no GPU in this process")
    return Torch("cuda")


def select_device(gpus: float) -> Device:
    """Return the GPU (share) that this process has, or the CPU if `gpus` is 0."""
    return open_device("cuda" if gpus else "cpu")
