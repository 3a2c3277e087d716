"""Compute the oracles of a `TorchTask` for stacked rows: losses under `torch.vmap`, derivatives by autograd.

Nodes with equal numbers of samples are computed together, the others one group after the other; nothing is padded,
because padding would change a mean inside of a user's loss. Rows are independent, so one backward pass through the sum
over the nodes gives the gradient of every node.

What depends on x alone (`TorchTask.representation`) is computed once per x and batch, with its graph: derivatives in y
reuse its value, derivatives in x continue through the graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dbo.tasks.arrays import Array, DoubleCast
from dbo.tasks.kernels.memory import Memory, remember
from dbo.tasks.protocol import Shard
from dbo.tasks.torch_randomness import refuse_random_numbers
from dbo.tasks.torch_task import Batch, TorchTask
from dbo.tasks.trees import TreeSpec

Name = Literal["lower", "upper"]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Rows of a block with equal numbers of samples, stacked: (rows, samples, …)."""

    rows: Tensor | None         # None: all rows of the block, in order
    inputs: Tensor
    labels: Tensor
    index: Tensor

    def take(self, stacked: Tensor) -> Tensor:
        """Return this group's rows of an array with all rows."""
        return stacked if self.rows is None else stacked[self.rows]


@dataclass(slots=True, eq=False)
class RepresentationCache:
    """The representations at the last x, one per group, and the x that they are functions of."""

    x: Memory | None = None
    is_batch: bool = False      # lives for a few steps in which nobody writes into x
    leaf: Tensor | None = None
    values: list[Any] = field(default_factory=list)
    passes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class LevelData:
    """The samples of one level: all nodes' samples in one flat axis, and groups of nodes as views of it."""

    inputs: Tensor
    labels: Tensor
    index: Tensor               # numbers in the whole train or val part
    starts: Array               # (nodes,) where the samples of each row begin
    sizes: Array                # (nodes,)
    groups: tuple[Group, ...]
    cache: RepresentationCache = field(default_factory=RepresentationCache, init=False)

    @staticmethod
    def stack(inputs: Array, labels: Array, numbers: Sequence[Array], dtype: torch.dtype) -> "LevelData":
        """Stack the samples with the given numbers for each row; rows of equal size follow each other."""
        sizes = np.array([len(index) for index in numbers], dtype=np.int64)
        order = np.argsort(sizes, kind="stable")
        flat = np.concatenate([numbers[row] for row in order])
        starts = np.empty(len(sizes), dtype=np.int64)
        starts[order] = np.concatenate([[0], np.cumsum(sizes[order])[:-1]])
        data = (_tensor(inputs[flat], dtype), _tensor(labels[flat], dtype), torch.from_numpy(flat.astype(np.int64)))
        return LevelData(*data, starts, sizes, _make_groups(data, starts, sizes, order))

    def take(self, numbers: Array) -> "LevelData":
        """Return the samples with these numbers, (nodes, batch), among each row's own."""
        at = torch.as_tensor((self.starts[:, None] + numbers).reshape(-1), device=self.inputs.device)
        nodes, size = numbers.shape
        data = self.inputs[at], self.labels[at], self.index[at]
        sizes = np.full(nodes, size, dtype=np.int64)
        stacked = (tensor.reshape(nodes, size, *tensor.shape[1:]) for tensor in data)
        batch = LevelData(*data, np.arange(nodes) * size, sizes, (Group(None, *stacked),))
        batch.cache.is_batch = True
        return batch

    def repeat(self, rows: int) -> "LevelData":
        """Return the samples of the only row for several rows, without a copy."""
        assert len(self.sizes) == 1
        data = self.inputs, self.labels, self.index
        group = Group(None, *(tensor.expand(rows, *tensor.shape) for tensor in data))
        return LevelData(*data, np.zeros(rows, dtype=np.int64), np.repeat(self.sizes, rows), (group,))

    def to(self, asarray: Callable[[Any], Any]) -> "LevelData":
        data = asarray(self.inputs), asarray(self.labels), asarray(self.index)
        order = np.argsort(self.starts, kind="stable")
        return LevelData(*data, self.starts, self.sizes, _make_groups(data, self.starts, self.sizes, order))


def _make_groups(data: tuple[Tensor, ...], starts: Array, sizes: Array, order: Array) -> tuple[Group, ...]:
    groups = []
    for size in np.unique(sizes):
        rows = order[sizes[order] == size]
        first, last = int(starts[rows[0]]), int(starts[rows[-1]] + size)
        stacked = [tensor[first:last].reshape(len(rows), int(size), *tensor.shape[1:]) for tensor in data]
        is_all = len(rows) == len(sizes) and bool((rows == np.arange(len(sizes))).all())
        groups.append(Group(None if is_all else torch.as_tensor(rows, device=data[0].device), *stacked))
    return tuple(groups)


@dataclass(frozen=True, eq=False)
class TorchShard(Shard):
    """The rows of a `TorchTask`'s problem. Takes and returns NumPy arrays or tensors, whichever it is given."""

    task: TorchTask
    spec_x: TreeSpec
    spec_y: TreeSpec
    lower: LevelData
    upper: LevelData

    @property
    def sizes(self) -> tuple[Array, Array]:
        return self.lower.sizes, self.upper.sizes

    def subset(self, lower: Array | None, upper: Array | None) -> "TorchShard":
        return replace(
            self, lower=self.lower if lower is None else self.lower.take(lower),
            upper=self.upper if upper is None else self.upper.take(upper),
        )

    def to(self, asarray: Callable[[Array], Any]) -> "TorchShard":
        x0: Any = asarray(self.x0)
        spec_x, spec_y = (spec.to(x0.device, x0.dtype) for spec in (self.spec_x, self.spec_y))
        return replace(
            self, x0=x0, y0=asarray(self.y0), lower=self.lower.to(asarray), upper=self.upper.to(asarray),
            spec_x=spec_x, spec_y=spec_y,
        )

    def in_double(self, max_bytes: int) -> "TorchShard | None":
        """Return the oracles in float64; a task whose methods create float32 tensors cannot be converted."""
        cast = DoubleCast(max_bytes)
        spec_x, spec_y = (spec.to("cpu", torch.float64) for spec in (self.spec_x, self.spec_y))
        try:
            converted = replace(
                self, x0=cast(self.x0), y0=cast(self.y0), lower=self.lower.to(cast), upper=self.upper.to(cast),
                spec_x=spec_x, spec_y=spec_y,
            )
            for oracle in (converted.f, converted.g):
                oracle(converted.x0, converted.y0)
        except (ValueError, RuntimeError):
            return None
        return converted

    def f(self, x: Array, y: Array) -> Array:
        return self._value("upper", x, y)

    def g(self, x: Array, y: Array) -> Array:
        return self._value("lower", x, y)

    def f_x(self, x: Array, y: Array) -> Array:
        return self._gradient_x("upper", x, y)

    def f_y(self, x: Array, y: Array) -> Array:
        return self._gradient_y("upper", x, y)

    def g_x(self, x: Array, y: Array) -> Array:
        return self._gradient_x("lower", x, y)

    def g_y(self, x: Array, y: Array) -> Array:
        return self._gradient_y("lower", x, y)

    def g_yy(self, x: Array, y: Array, v: Array) -> Array:
        def product(loss: "_Loss", y_: Tensor, v_: Tensor) -> Tensor:
            y_ = y_.detach().requires_grad_()
            (gradient,) = _grad(loss(y_).sum(), (y_,), create_graph=True)
            if not gradient.requires_grad:
                return torch.zeros_like(v_)
            (result,) = _grad(gradient, (y_,), outputs=v_)
            return result

        return self._per_group("lower", x, (y, v), product)

    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        def product(loss: "_Loss", y_: Tensor, v_: Tensor) -> Tensor:
            y_ = y_.detach().requires_grad_()
            loss = loss.with_graph()
            (gradient,) = _grad(loss(y_).sum(), (y_,), create_graph=True)
            return loss.backward((gradient * v_).sum()) if gradient.requires_grad else torch.zeros_like(loss.x)

        return self._per_group("lower", x, (y, v), product)

    def _value(self, level: Name, x: Array, y: Array) -> Array:
        with torch.no_grad():
            return self._per_group(level, x, (y,), lambda loss, y_: loss(y_))

    def _gradient_y(self, level: Name, x: Array, y: Array) -> Array:
        def gradient(loss: "_Loss", y_: Tensor) -> Tensor:
            y_ = y_.detach().requires_grad_()
            (result,) = _grad(loss(y_).sum(), (y_,))
            return result

        return self._per_group(level, x, (y,), gradient)

    def _gradient_x(self, level: Name, x: Array, y: Array) -> Array:
        def gradient(loss: "_Loss", y_: Tensor) -> Tensor:
            loss = loss.with_graph()
            return loss.backward(loss(y_).sum())

        return self._per_group(level, x, (y,), gradient)

    def _per_group(
        self, level: Name, x: Array, others: tuple[Array, ...], work: Callable[..., Tensor]
    ) -> Array:
        """Return the rows that `work` computes for each group, in the order and with the type of `x`."""
        data = self.lower if level == "lower" else self.upper
        rows = _tensor(x), *(_tensor(other) for other in others)
        results = []
        for number, group in enumerate(data.groups):
            loss = _Loss(self, level, data, number, rows[0], x)
            results.append(work(loss, *(group.take(other) for other in rows[1:])).detach())
        if len(results) == 1 and data.groups[0].rows is None:
            stacked = results[0]
        else:
            stacked = results[0].new_empty((len(x), *results[0].shape[1:]))
            for group, result in zip(data.groups, results, strict=True):
                stacked[slice(None) if group.rows is None else group.rows] = result
        output: Any = stacked.numpy() if isinstance(x, np.ndarray) else stacked
        return output      # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, eq=False)
class _Loss:
    """The losses of one group's rows as a function of y, at one x."""

    shard: TorchShard
    level: Name
    data: LevelData
    number: int
    all_x: Tensor
    given_x: Any                         # as the caller passed it
    graph: bool = False                  # x and the representation keep their graphs
    leaf: Tensor | None = None           # x of this group, a leaf of the graph
    phi: Any = None                      # the representation, a leaf of the loss's own graph

    @property
    def group(self) -> Group:
        return self.data.groups[self.number]

    @property
    def x(self) -> Tensor:
        return self.group.take(self.all_x)

    def with_graph(self) -> "_Loss":
        """Return the same losses, for derivatives in x."""
        leaf = self.x.detach().requires_grad_()
        phi = None
        if self.shard.task.has_representation:
            phi = _map_tensors(self._representation(), lambda t: t.detach().requires_grad_(t.is_floating_point()))
        return replace(self, graph=True, leaf=leaf, phi=phi)

    def backward(self, total: Tensor) -> Tensor:
        """Return the gradient in x of a sum of losses, through x itself and through the representation."""
        assert self.leaf is not None
        phis = [t for t in _tensors(self.phi) if t.requires_grad]
        direct, *through = _grad(total, (self.leaf, *phis))
        if not phis:
            return direct
        cached_x, cached = self._representation_leaf(), _tensors(self._representation())
        outputs = [t for t in cached if t.requires_grad]
        if cached_x is None or not outputs:
            return direct
        (indirect,) = torch.autograd.grad(outputs, (cached_x,), through, retain_graph=True, allow_unused=True)
        return direct if indirect is None else direct + self.group.take(indirect)

    def __call__(self, y: Tensor) -> Tensor:
        """Return the (rows,) losses."""
        task, shard, group = self.shard.task, self.shard, self.group
        function = task.lower if self.level == "lower" else task.upper
        phi = self.phi if self.graph else None
        if task.has_representation and phi is None:
            phi = _map_tensors(self._representation(), Tensor.detach)
        x = self.leaf if self.leaf is not None else self.x.detach()

        def loss(x_row: Tensor, y_row: Tensor, inputs: Tensor, labels: Tensor, index: Tensor, own: Any) -> Tensor:
            batch = Batch(inputs, labels, index, None if own is None else lambda: own)
            return function(shard.spec_x.unflatten(x_row), shard.spec_y.unflatten(y_row), batch)

        losses: Tensor = _map_rows(task, loss, x, y, group.inputs, group.labels, group.index, phi)
        return losses

    def _representation(self) -> Any:
        """Return the representation of the group's samples at x, with its graph; computed once per x and batch."""
        self._fill_cache()
        return self.data.cache.values[self.number]

    def _representation_leaf(self) -> Tensor | None:
        return self.data.cache.leaf

    def _fill_cache(self) -> None:
        cache, x = self.data.cache, self.all_x
        if cache.x is not None and cache.x.matches(self.given_x):
            return
        shard, task = self.shard, self.shard.task
        with torch.enable_grad():
            leaf = x.detach().clone().requires_grad_()

            def compute(x_row: Tensor, inputs: Tensor) -> Any:
                return task.representation(shard.spec_x.unflatten(x_row), inputs)

            values = [_map_rows(task, compute, group.take(leaf), group.inputs) for group in self.data.groups]
        cache.leaf, cache.values, cache.passes = leaf, values, cache.passes + 1
        cache.x = remember(self.given_x, is_kept=cache.is_batch)


def _map_rows(task: TorchTask, function: Callable[..., Any], *rows: Any) -> Any:
    """Return the function of every row: under `torch.vmap`, or one by one if the task asks for that.

    Neither lets a loss draw random numbers.
    """
    dims = tuple(None if part is None else 0 for part in rows)
    if task.vectorize:
        return torch.vmap(function, in_dims=dims, randomness="error")(*rows)
    count = len(_tensors(rows[0])[0])
    with refuse_random_numbers():
        results = [function(*(_map_tensors(part, lambda t, i=i: t[i]) for part in rows)) for i in range(count)]  # type: ignore[misc]
    return _stack(results)


def _grad(
    total: Tensor, inputs: tuple[Tensor, ...], outputs: Tensor | None = None, create_graph: bool = False
) -> tuple[Tensor, ...]:
    """Return the derivatives of a sum; zeros where it does not depend on an input."""
    if not total.requires_grad:
        return tuple(torch.zeros_like(value) for value in inputs)
    found = torch.autograd.grad(total, inputs, outputs, create_graph=create_graph, allow_unused=True)
    return tuple(torch.zeros_like(v) if d is None else d for v, d in zip(inputs, found, strict=True))


def _map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if value is None or isinstance(value, Tensor):
        return None if value is None else function(value)
    if isinstance(value, dict):
        return {key: _map_tensors(item, function) for key, item in value.items()}
    return type(value)([_map_tensors(item, function) for item in value])


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _map_tensors(value, lambda t: found.append(t) or t)    # type: ignore[func-returns-value]
    return found


def _stack(results: list[Any]) -> Any:
    if isinstance(results[0], Tensor):
        return torch.stack(results)
    if isinstance(results[0], dict):
        return {key: _stack([result[key] for result in results]) for key in results[0]}
    return type(results[0])([_stack(list(items)) for items in zip(*results, strict=True)])


def _tensor(array: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return an array as a tensor, without a copy where that is possible; floating ones in `dtype`."""
    if isinstance(array, np.ndarray):
        array = torch.from_numpy(array if array.flags.writeable else array.copy())
    tensor: Tensor = array
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
