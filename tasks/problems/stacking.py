"""Stack the samples of many nodes, dense or sparse, so that one product computes all of them.

The samples of all nodes follow each other in one flat axis. `scores(w)` multiplies each node's samples by its own
matrix, `matmul_transposed(r)` is the transposed product, `sum_samples(v)` sums over each node's samples. Dense nodes
are padded to a common size, so that a product over all nodes is one batched matmul without a copy; sparse nodes are
blocks of one block-diagonal matrix.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from array_api_compat import array_namespace
from scipy import sparse

from dbo.tasks.api import Array, Part
from dbo.tasks.kernels.sparse_matrix import SparseMatrix, sum_segments, take_rows, to_device, transpose
from dbo.tasks.problems.softmax import CrossEntropy

PADDING_LIMIT = 3    # padding may multiply the work by this factor at most


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes of similar size, padded to the largest of them: samples start … stop of the flat axis."""

    rows: tuple[int, ...]
    size: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The positions of each node's samples in the flat axis, and the products over them. Usually there is one group."""

    nodes: int
    groups: tuple[Group, ...]
    order: Array    # position of each node in the order of the groups

    @staticmethod
    def from_sizes(sizes: Sequence[int]) -> "Layout":
        """Plan one group if padding is affordable, otherwise groups whose sizes differ by less than a factor of two."""
        largest = max(sizes)
        if len(sizes) * largest <= PADDING_LIMIT * sum(sizes):
            chosen = [list(range(len(sizes)))]
        else:
            by_size: dict[int, list[int]] = {}
            for node, size in enumerate(sizes):
                by_size.setdefault((largest // size).bit_length(), []).append(node)
            chosen = [by_size[key] for key in sorted(by_size)]
        groups: list[Group] = []
        start = 0
        for rows in chosen:
            size = max(sizes[node] for node in rows)
            stop = start + size * len(rows)
            groups.append(Group(tuple(rows), size, start, stop))
            start = stop
        return Layout(len(sizes), tuple(groups), np.argsort(np.concatenate(chosen)))

    @property
    def samples(self) -> int:
        return self.groups[-1].stop

    def matmul(self, left: Array, w: Array) -> Array:
        """Return (samples, k), each node's rows of `left` (samples, j) times its matrix in `w` (nodes, j, k)."""
        if len(self.groups) == 1:      # the calls for a batch take as long as its products: no lists, no loops
            return (left.reshape(self.nodes, -1, left.shape[1]) @ w).reshape(-1, w.shape[2])
        return _concatenate(
            [(self._batch(left, g) @ self._rows(w, g)).reshape(g.stop - g.start, -1) for g in self.groups]
        )

    def matmul_by_column(self, left: Array, w: Array) -> Array:
        """`matmul` of NumPy arrays, with one group; the result lies in memory column by column."""
        columns = np.empty((w.shape[2], self.nodes, self.samples // self.nodes), dtype=left.dtype)
        stacked = left.reshape(self.nodes, -1, left.shape[1])
        np.matmul(w.swapaxes(1, 2), stacked.swapaxes(1, 2), out=columns.swapaxes(0, 1))
        return columns.reshape(len(columns), -1).T

    def matmul_transposed(self, left: Array, right: Array, out: Array | None = None) -> Array:
        """Return (nodes, j, k), leftᵀ right of each node, for `left` (samples, j) and `right` (samples, k).

        NumPy writes it into `out` if that is given.
        """
        if len(self.groups) == 1:
            stacked = left.reshape(self.nodes, -1, left.shape[1]).swapaxes(1, 2)
            other = right.reshape(self.nodes, -1, right.shape[1])
            product: Array = stacked @ other if out is None else np.matmul(stacked, other, out=out)
            return product
        product = self._in_order([self._batch(left, g).swapaxes(1, 2) @ self._batch(right, g) for g in self.groups])
        if out is not None:
            out[:] = product
        return product

    def add_rows_to(self, left: Array, row: Array) -> None:
        """Add each node's row of `row` (nodes, 1, k) to its samples in `left`, contiguous (samples, k)."""
        for g in self.groups:
            stacked = self._batch(left, g)
            stacked += self._rows(row, g)

    def sum_samples(self, v: Array) -> Array:
        """Return (nodes, ...) sums of (samples, ...)."""
        if isinstance(v, np.ndarray):
            return self._in_order([np.add.reduce(self._batch(v, g), axis=1) for g in self.groups])
        xp = array_namespace(v)
        return self._in_order([xp.sum(self._batch(v, g), axis=1) for g in self.groups])

    def _batch(self, flat: Array, g: Group) -> Array:
        part = flat if len(self.groups) == 1 else flat[g.start : g.stop]
        return part.reshape(len(g.rows), g.size, *flat.shape[1:])

    def _rows(self, nodes: Array, g: Group) -> Array:
        return nodes if len(self.groups) == 1 else nodes[list(g.rows)]

    def _in_order(self, parts: list[Array]) -> Array:
        return parts[0] if len(parts) == 1 else _concatenate(parts)[self.order]


@lru_cache(maxsize=16)
def equal_layout(nodes: int, size: int) -> Layout:
    """Return the layout of batches: equally many samples of each node."""
    return Layout.from_sizes([size] * nodes)


def _concatenate(parts: list[Array]) -> Array:
    if len(parts) == 1:
        return parts[0]
    whole: Array = array_namespace(parts[0]).concat(parts, axis=0)
    return whole


def take_features(features: Array, at: Array) -> Array:
    """Return the dense rows at these positions."""
    return features.take(at, axis=0) if isinstance(features, np.ndarray) else features[at]


@dataclass(frozen=True, slots=True, eq=False)
class DenseRows:
    """Dense features, padded with zeros."""

    layout: Layout
    features: Array    # (samples, features)

    def scores(self, w: Array) -> Array:
        """Return (samples, k) for (nodes, features, k) matrices."""
        return self.layout.matmul(self.features, w)

    def matmul_transposed(self, r: Array) -> Array:
        """Return (nodes, features, k), each node's featuresᵀ r, for r (samples, k)."""
        return self.layout.matmul_transposed(self.features, r)

    def sum_samples(self, v: Array) -> Array:
        """Return the (nodes,) sums of (samples,)."""
        return self.layout.sum_samples(v)

    def take(self, at: Array, nodes: int) -> "DenseRows":
        """Return the samples at these positions, equally many for each node."""
        return DenseRows(equal_layout(nodes, len(at) // nodes), take_features(self.features, at))


@dataclass(frozen=True, slots=True, eq=False)
class SparseRows:
    """Sparse features: node i's matrix is the i-th block of one block-diagonal matrix, so nothing is padded."""

    features: SparseMatrix          # (samples, nodes · features)
    transposed: SparseMatrix        # (nodes · features, samples): the transposed product then writes in order
    starts: Array                   # (nodes,) first sample of each node
    shape: tuple[int, int]          # (nodes, features)

    def to(self, asarray: Callable[[Array], Any]) -> "SparseRows":
        """Return the same matrices on the device that `asarray` copies arrays to."""
        features, transposed = (to_device(matrix, asarray) for matrix in (self.features, self.transposed))
        return replace(self, features=features, transposed=transposed)

    def scores(self, w: Array) -> Array:
        product: Array = self.features @ w.reshape(-1, w.shape[-1])
        return product

    def matmul_transposed(self, r: Array) -> Array:
        product: Array = self.transposed @ r
        return product.reshape(*self.shape, r.shape[-1])

    def sum_samples(self, v: Array) -> Array:
        return sum_segments(v, self.starts)

    def take(self, at: Array, nodes: int) -> "SparseRows":
        features = take_rows(self.features, at)
        return SparseRows(features, transpose(features), np.arange(nodes) * (len(at) // nodes), self.shape)


Rows: TypeAlias = DenseRows | SparseRows    # both have the same three products


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """One level's samples of a block: features in `rows`, labels in `loss`; the weights of a node sum to one."""

    rows: Rows
    loss: CrossEntropy
    labels: Array      # (samples,) on the host, 0 for padding
    starts: Array      # (nodes,) position of each node's first sample
    sizes: Array       # (nodes,) numbers of samples

    def take(self, numbers: Array) -> "Level":
        """Return the samples with these numbers, (nodes, batch), among each node's own."""
        nodes, size = numbers.shape
        at, loss = self.locate(numbers)
        return Level(
            self.rows.take(at, nodes), loss, self.labels[at], np.arange(nodes) * size,
            np.full(nodes, size, dtype=np.int64),
        )

    def locate(self, numbers: Array) -> tuple[Array, CrossEntropy]:
        """Return the positions of the samples with these numbers, (nodes, batch), and the mean loss over them."""
        at: Array = (self.starts[:, None] + numbers).reshape(-1)
        return at, self.loss.with_labels(self.labels[at], 1.0 / numbers.shape[1])


def stack_level(parts: Sequence[Part], classes: int, dtype: str) -> Level:
    """Stack the samples of the nodes, one part per node."""
    if isinstance(parts[0].features, sparse.csr_array):
        return _stack_sparse(parts, classes, dtype)
    layout = Layout.from_sizes([len(part) for part in parts])
    features = np.zeros((layout.samples, parts[0].features.shape[1]), dtype=dtype)
    labels = np.zeros(layout.samples, dtype=np.int64)
    weight = np.zeros(layout.samples)
    starts = np.zeros(len(parts), dtype=np.int64)
    for group in layout.groups:
        for k, node in enumerate(group.rows):
            starts[node] = first = group.start + k * group.size
            here = slice(first, first + len(parts[node]))
            features[here] = parts[node].features
            labels[here] = parts[node].labels
            weight[here] = 1.0 / len(parts[node])
    return Level(
        DenseRows(layout, features), CrossEntropy.from_labels(labels, weight, classes, dtype), labels, starts,
        np.array([len(part) for part in parts], dtype=np.int64),
    )


def _stack_sparse(parts: Sequence[Part], classes: int, dtype: str) -> Level:
    features = sparse.block_diag([part.features.astype(dtype) for part in parts], format="csr")
    sizes = np.array([len(part) for part in parts])
    rows = SparseRows(
        features=sparse.csr_array(features),
        transposed=sparse.csr_array(features.T),
        starts=np.cumsum(sizes) - sizes,
        shape=(len(parts), parts[0].features.shape[1]),
    )
    labels = np.concatenate([part.labels for part in parts])
    loss = CrossEntropy.from_labels(labels, np.repeat(1.0 / sizes, sizes), classes, dtype)
    return Level(rows, loss, labels, rows.starts, sizes)
