"""Many nodes' samples in one product: the layout of stacked rows, dense or sparse.

Samples of all nodes follow each other in one flat axis. `scores(w)` multiplies each node's samples by its own matrix,
`pull(r)` is the transposed way back, `total(v)` sums each node's samples. Dense nodes are padded to a common size, so
that a product over all nodes is one batched matmul without a copy; sparse nodes sit in one block-diagonal matrix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from array_api_compat import array_namespace
from scipy import sparse

from dbo.tasks.api import Array, Part
from dbo.tasks.problems.softmax import CrossEntropy, cross_entropy

PADDING_LIMIT = 3    # one batch of all nodes may cost this many times the work of the samples that exist


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes of similar size, padded to the largest of them: samples start … stop of the flat axis."""

    rows: tuple[int, ...]
    size: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where each node's samples lie in the flat axis, and the products over them. Usually there is one group."""

    nodes: int
    groups: tuple[Group, ...]
    back: Array    # position of each node in the order of the groups

    @property
    def samples(self) -> int:
        return self.groups[-1].stop

    def times(self, left: Array, w: Array) -> Array:
        """(samples, j) and (nodes, j, k) -> (samples, k)."""
        if len(self.groups) == 1:
            return (self._batch(left, self.groups[0]) @ w).reshape(left.shape[0], -1)
        parts = [(self._batch(left, g) @ w[list(g.rows)]).reshape(g.stop - g.start, -1) for g in self.groups]
        return _joined(parts)

    def pull(self, left: Array, right: Array) -> Array:
        """(samples, j) and (samples, k) -> (nodes, j, k): leftᵀ right of each node."""
        return self._in_order([self._batch(left, g).swapaxes(1, 2) @ self._batch(right, g) for g in self.groups])

    def plus(self, left: Array, row: Array) -> Array:
        """(samples, k) and (nodes, 1, k) -> (samples, k): each node's row added to its samples."""
        parts = [
            (self._batch(left, g) + (row if len(self.groups) == 1 else row[list(g.rows)])).reshape(-1, left.shape[1])
            for g in self.groups
        ]
        return _joined(parts)

    def total(self, v: Array) -> Array:
        """(samples, ...) -> (nodes, ...) sums."""
        xp = array_namespace(v)
        return self._in_order([xp.sum(self._batch(v, g), axis=1) for g in self.groups])

    def _batch(self, flat: Array, g: Group) -> Array:
        part = flat if len(self.groups) == 1 else flat[g.start : g.stop]
        return part.reshape(len(g.rows), g.size, *flat.shape[1:])

    def _in_order(self, parts: list[Array]) -> Array:
        return parts[0] if len(parts) == 1 else _joined(parts)[self.back]


def _joined(parts: list[Array]) -> Array:
    if len(parts) == 1:
        return parts[0]
    joined: Array = array_namespace(parts[0]).concat(parts, axis=0)
    return joined


def layout(sizes: Sequence[int]) -> Layout:
    """One group if padding is affordable, otherwise groups whose sizes differ by less than a factor of two."""
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


@dataclass(frozen=True, slots=True, eq=False)
class DenseRows:
    """Dense features, padded with zeros."""

    layout: Layout
    features: Array    # (samples, features)

    def scores(self, w: Array) -> Array:
        """(nodes, features, k) matrices -> (samples, k)."""
        return self.layout.times(self.features, w)

    def pull(self, r: Array) -> Array:
        """(samples, k) -> (nodes, features, k): each node's featuresᵀ r."""
        return self.layout.pull(self.features, r)

    def total(self, v: Array) -> Array:
        """(samples,) -> (nodes,) sums."""
        return self.layout.total(v)


@dataclass(frozen=True, slots=True, eq=False)
class SparseRows:
    """Sparse features: node i's matrix is the i-th block of one block-diagonal matrix, so nothing is padded."""

    features: sparse.csr_array      # (samples, nodes · features)
    transposed: sparse.csr_array    # the same, rows and columns exchanged: `pull` then writes in order
    starts: Array                   # (nodes,) first sample of each node
    shape: tuple[int, int]          # (nodes, features)

    def scores(self, w: Array) -> Array:
        product: Array = self.features @ w.reshape(-1, w.shape[-1])
        return product

    def pull(self, r: Array) -> Array:
        product: Array = self.transposed @ r
        return product.reshape(*self.shape, r.shape[-1])

    def total(self, v: Array) -> Array:
        sums: Array = np.add.reduceat(v, self.starts)
        return sums


Rows: TypeAlias = DenseRows | SparseRows    # the two know the same three products


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """One level's samples of a block: features in rows, labels in the loss; every node's weights sum to one."""

    rows: Rows
    loss: CrossEntropy


def level(parts: Sequence[Part], classes: int, dtype: str) -> Level:
    """Stacks the nodes' samples, one part per node."""
    if isinstance(parts[0].features, sparse.csr_array):
        return _sparse_level(parts, classes, dtype)
    where = layout([len(part) for part in parts])
    features = np.zeros((where.samples, parts[0].features.shape[1]), dtype=dtype)
    labels = np.zeros(where.samples, dtype=np.int64)
    weight = np.zeros(where.samples)
    for group in where.groups:
        for k, node in enumerate(group.rows):
            first = group.start + k * group.size
            here = slice(first, first + len(parts[node]))
            features[here] = parts[node].features
            labels[here] = parts[node].labels
            weight[here] = 1.0 / len(parts[node])
    return Level(DenseRows(where, features), cross_entropy(labels, weight, classes, dtype))


def _sparse_level(parts: Sequence[Part], classes: int, dtype: str) -> Level:
    features = sparse.block_diag([part.features.astype(dtype) for part in parts], format="csr")
    sizes = np.array([len(part) for part in parts])
    rows = SparseRows(
        features=sparse.csr_array(features),
        transposed=sparse.csr_array(features.T),
        starts=np.cumsum(sizes) - sizes,
        shape=(len(parts), parts[0].features.shape[1]),
    )
    labels = np.concatenate([part.labels for part in parts])
    return Level(rows, cross_entropy(labels, np.repeat(1.0 / sizes, sizes), classes, dtype))
