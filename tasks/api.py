"""What a task is to the rest of the house: a problem, cut into shards of rows that answer with f, g and derivatives.

The room's purpose is data and oracles. The way through it: a data set loads `Samples`, a partition deals them to the
nodes, a task builds a `Problem` from both, `Problem.shard(ids)` gives the rows that one process hosts. Row i of every
array belongs to node `ids[i]`, and no row ever influences another.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from hashlib import sha256
from typing import Any, Protocol, Self, TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

# A numpy array on the CPU, a torch tensor on a GPU: the oracles find their functions by `array_namespace`.
Array: TypeAlias = NDArray[Any]
Features: TypeAlias = NDArray[Any] | sparse.csr_array


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Samples with their labels: a row of `features` and a number in `labels` each."""

    features: Features
    labels: Array

    def __len__(self) -> int:
        return len(self.labels)

    def arrays(self) -> tuple[Array, ...]:
        """All that the part consists of."""
        a = self.features
        return (a.data, a.indices, a.indptr, self.labels) if isinstance(a, sparse.csr_array) else (a, self.labels)

    def take(self, index: Array) -> "Part":
        """The samples with these numbers, in this order."""
        return Part(self.features[index], self.labels[index])


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """A prepared data set: the lower level learns on `train`, the upper level on `val`, nobody on `test`."""

    train: Part
    val: Part
    test: Part
    classes: int

    @property
    def parts(self) -> tuple[Part, Part, Part]:
        return self.train, self.val, self.test

    def describe(self) -> dict[str, Any]:
        """Facts for the record."""
        arrays = (array for part in self.parts for array in part.arrays())
        return {"classes": self.classes, "test_size": len(self.test), "data_sha256": digest(arrays)}


class Partition(Protocol):
    """Deals samples to nodes: every sample to exactly one node, at least one sample to every node."""

    def assign(self, labels: Array, nodes: int, rng: np.random.Generator) -> list[Array]: ...


class DataSet(Protocol):
    """Where samples come from; `data_dir` is where files lie already, None means the loader's own place."""

    def load(self, seed: int, data_dir: str | None) -> Samples: ...


@dataclass(frozen=True, slots=True)
class Setup:
    """What an experiment says besides the task's own parameters."""

    nodes: int
    seed: int
    dtype: str
    partition: Partition
    data: DataSet | None = None
    data_dir: str | None = None

    def samples(self) -> Samples:
        """The data set's samples, for tasks that need one."""
        if self.data is None:
            raise ValueError("task.dataset: this task learns from data, but no data set was given")
        return self.data.load(self.seed, self.data_dir)


@dataclass(frozen=True, eq=False)
class Shard(ABC):
    """The rows of a problem that one block holds: stacked rows in, stacked rows out."""

    ids: Array    # (nodes,) network-wide numbers of these rows
    seed: int
    x0: Array     # (nodes, dim_x) the common start
    y0: Array     # (nodes, dim_y) the common start

    @property
    def nodes(self) -> int:
        return len(self.ids)

    @property
    def dim_x(self) -> int:
        return int(self.x0.shape[1])

    @property
    def dim_y(self) -> int:
        return int(self.y0.shape[1])

    @abstractmethod
    def f(self, x: Array, y: Array) -> Array:
        """(nodes,) upper-level values."""

    @abstractmethod
    def g(self, x: Array, y: Array) -> Array:
        """(nodes,) lower-level values."""

    @abstractmethod
    def f_x(self, x: Array, y: Array) -> Array: ...
    @abstractmethod
    def f_y(self, x: Array, y: Array) -> Array: ...
    @abstractmethod
    def g_x(self, x: Array, y: Array) -> Array: ...
    @abstractmethod
    def g_y(self, x: Array, y: Array) -> Array: ...

    @abstractmethod
    def g_yy(self, x: Array, y: Array, v: Array) -> Array:
        """(nodes, dim_y) ∇²_yy g_i v_i."""

    @abstractmethod
    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        """(nodes, dim_x) ∇²_xy g_i v_i = ∂/∂x ⟨∇_y g_i, v_i⟩."""

    def to(self, asarray: Callable[[Array], Any]) -> Self:
        """The same shard with every floating array passed through `asarray`, e.g. `torch.asarray`."""
        moved: Self = _moved(self, asarray)
        return moved


def _moved(thing: Any, asarray: Callable[[Array], Any]) -> Any:
    if isinstance(thing, np.ndarray):
        return asarray(thing) if thing.dtype.kind == "f" else thing
    if isinstance(thing, tuple):
        return tuple(_moved(part, asarray) for part in thing)
    if sparse.issparse(thing):
        raise ValueError("sparse features stay on the CPU: only dense data can move to another device")
    if is_dataclass(thing) and not isinstance(thing, type):
        return replace(thing, **{f.name: _moved(getattr(thing, f.name), asarray) for f in fields(thing) if f.init})
    return thing


class Problem(Protocol):
    """All of a problem, before it is cut into blocks."""

    @property
    def nodes(self) -> int: ...
    @property
    def dim_x(self) -> int: ...
    @property
    def dim_y(self) -> int: ...

    def shard(self, ids: Sequence[int]) -> Shard:
        """The rows of these nodes, in this order."""

    def evaluate(self, x: Array, y: Array) -> dict[str, Array]:
        """Test metrics of any number of models, one per row; each answer is (rows,)."""

    def extra(self, x_mean: Array, y_mean: Array, lam: float | None) -> dict[str, float]:
        """The task's own metrics of the mean model (1-d arrays); `lam` is the penalty of the method, if it has one."""

    def describe(self) -> dict[str, Any]:
        """JSON-able facts: dimensions, sizes per node, a digest of the data."""


def generator(seed: int, purpose: str, *more: int) -> np.random.Generator:
    """The random numbers of one purpose: they depend on nothing but the seed, the purpose and the numbers after it."""
    return np.random.default_rng([seed, crc32(purpose.encode()), *more])


def stacked(row: Array, nodes: int) -> Array:
    """A common start: the same row for every node, each with memory of its own."""
    return np.tile(row, (nodes, 1))


def digest(arrays: Iterable[Array]) -> str:
    """sha256 of the prepared arrays: two runs with the same digest saw the same data in the same split."""
    state = sha256()
    for array in arrays:
        state.update(f"{array.dtype}{array.shape}".encode())
        state.update(np.ascontiguousarray(array).data)
    return state.hexdigest()
