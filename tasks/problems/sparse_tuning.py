"""Coefficient tuning on sparse data with many parameters: the same oracles, node by node, in compiled loops.

coefficient_tuning.py has the formulas. Here a node's documents are two sparse matrices, by document and by word, and a
result is written once: with the 2.03 million entries of 20 Newsgroups an oracle takes little longer than that write.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
from scipy import sparse

from dbo.tasks.api import Array, Part, Shard, WeightedGradient
from dbo.tasks.kernels import bag_of_words
from dbo.tasks.kernels.compiling import is_cached
from dbo.tasks.kernels.interface import DocumentKernels
from dbo.tasks.kernels.threads import map_rows
from dbo.tasks.notices import print_notice


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """One node's samples of one level, by document and by word."""

    features: sparse.csr_array      # (documents, words)
    words: sparse.csr_array         # (words, documents)
    labels: Array

    def scores(self, w: Array) -> Array:
        """Return (documents, classes) scores for w (words, classes)."""
        a = self.features
        scores = np.empty((a.shape[0], w.shape[1]), dtype=w.dtype)
        bag_of_words.scores(a.indptr, a.indices, a.data, w, scores)
        return scores

    def residual(self, w: Array, weight: float = 1.0) -> Array:
        """Return `weight` times the derivative of the mean cross-entropy with respect to the scores."""
        scores = self.scores(w)
        bag_of_words.residual_in_place(scores, self.labels, w.dtype.type(weight / len(self.labels)))
        return scores

    def curvature(self, w: Array, v: Array) -> Array:
        """Return the second derivative of the mean cross-entropy, times the scores of v."""
        along = self.scores(v)
        bag_of_words.curvature_in_place(self.scores(w), along, w.dtype.type(1 / len(self.labels)))
        return along

    def loss(self, w: Array) -> float:
        return float(bag_of_words.sum_losses(self.scores(w), self.labels)) / len(self.labels)

    def take(self, numbers: Array) -> "Documents":
        """Return the documents with these numbers."""
        chosen = sparse.csr_array(self.features[numbers])
        return Documents(chosen, sparse.csr_array(chosen.T), self.labels[numbers])

    @property
    def by_word(self) -> tuple[Array, Array, Array]:
        return self.words.indptr, self.words.indices, self.words.data


def index_parts(parts: Sequence[Part], dtype: str) -> tuple[Documents, ...]:
    """Index the samples of each node by document and by word."""
    matrices = [sparse.csr_array(part.features.astype(dtype)) for part in parts]
    return tuple(
        Documents(a, sparse.csr_array(a.T), np.asarray(part.labels, dtype=np.int64))
        for a, part in zip(matrices, parts, strict=True)
    )


@dataclass(frozen=True, eq=False)
class SparseTuningShard(Shard):
    """Closed-form oracles, a node at a time."""

    train: tuple[Documents, ...]
    val: tuple[Documents, ...]
    classes: int
    scale: float
    kernels: ClassVar[DocumentKernels] = bag_of_words

    @property
    def sizes(self) -> tuple[Array, Array]:
        lower, upper = (np.array([len(d.labels) for d in level], dtype=np.int64) for level in (self.train, self.val))
        return lower, upper

    def subset(self, lower: Array | None, upper: Array | None) -> "SparseTuningShard":
        def take(level: tuple[Documents, ...], numbers: Array | None) -> tuple[Documents, ...]:
            return level if numbers is None else tuple(map_rows(lambda i: level[i].take(numbers[i]), len(level)))

        return replace(self, train=take(self.train, lower), val=take(self.val, upper))

    def to(self, asarray: Callable[[Array], Any]) -> Shard:
        """Return the same oracles on a torch device."""
        from dbo.tasks.problems.torch_sparse_tuning import copy_to_device  # imports torch, which is slow

        return copy_to_device(self, asarray)

    def in_double(self, max_bytes: int) -> "SparseTuningShard | None":
        size = sum(2 * len(documents.features.data) * 8 for level in (self.train, self.val) for documents in level)
        if size > max_bytes:
            return None

        def cast(level: tuple[Documents, ...]) -> tuple[Documents, ...]:
            return tuple(
                Documents(d.features.astype(np.float64), d.words.astype(np.float64), d.labels) for d in level)

        compile_kernels("float64")
        x0, y0 = (np.broadcast_to(start[0].astype(np.float64), start.shape) for start in (self.x0, self.y0))
        return replace(self, x0=x0, y0=y0, train=cast(self.train), val=cast(self.val))

    def f(self, x: Array, y: Array) -> Array:
        return np.array(map_rows(lambda i: self.val[i].loss(self._matrix(y, i)), len(y)), dtype=y.dtype)

    def g(self, x: Array, y: Array) -> Array:
        ridge = self.g_x(x, y).sum(axis=1, dtype=np.float64)
        return np.array(map_rows(lambda i: self.train[i].loss(self._matrix(y, i)) + ridge[i], len(y)), dtype=y.dtype)

    def f_x(self, x: Array, y: Array) -> Array:
        return np.zeros_like(x)

    def f_y(self, x: Array, y: Array) -> Array:
        def write(i: int, out: Array) -> None:
            val = self.val[i]
            self.kernels.gradient(*val.by_word, val.residual(self._matrix(y, i)), out)

        return self._fill_rows(y, write)

    def g_x(self, x: Array, y: Array) -> Array:
        return self._row_products(self.scale, x, y, y)

    def g_y(self, x: Array, y: Array) -> Array:
        return self._weighted_gradient(x, y, 0.0, 1.0)

    @property
    def h_y(self) -> WeightedGradient:
        return self._weighted_gradient

    def _weighted_gradient(self, x: Array, y: Array, f_weight: float, g_weight: float) -> Array:
        """Return f_weight ∇_y f + g_weight ∇_y g, computed in one pass."""
        def write(i: int, out: Array) -> None:
            train, val, w = self.train[i], self.val[i], self._matrix(y, i)
            residual, ridge = train.residual(w, g_weight), self._ridge(x[i], g_weight)
            if f_weight:
                self.kernels.weighted_gradient(
                    *train.by_word, residual, ridge, w, *val.by_word, val.residual(w, f_weight), out
                )
            else:
                self.kernels.ridge_gradient(*train.by_word, residual, ridge, w, out)

        return self._fill_rows(y, write)

    def g_yy(self, x: Array, y: Array, v: Array) -> Array:
        def write(i: int, out: Array) -> None:
            train, u = self.train[i], self._matrix(v, i)
            curvature = train.curvature(self._matrix(y, i), u)
            self.kernels.ridge_gradient(*train.by_word, curvature, self._ridge(x[i]), u, out)

        return self._fill_rows(y, write)

    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        return self._row_products(2.0 * self.scale, x, y, v)

    def _fill_rows(self, y: Array, write: Callable[[int, Array], None]) -> Array:
        out = np.empty(y.shape, dtype=y.dtype)
        map_rows(lambda i: write(i, self._matrix(out, i)), len(out))
        return out

    def _row_products(self, factor: float, x: Array, y: Array, v: Array) -> Array:
        out = np.empty(x.shape, dtype=x.dtype)
        scale = x.dtype.type(factor)

        def write(i: int) -> None:
            self.kernels.row_products(self._matrix(y, i), self._matrix(v, i), scale * np.exp(x[i]), out[i])

        map_rows(write, len(out))
        return out

    def _matrix(self, y: Array, i: int) -> Array:
        matrix: Array = y[i].reshape(-1, self.classes)
        return matrix

    def _ridge(self, x: Array, weight: float = 1.0) -> Array:
        """Return (words,) the curvature of the regulariser, which is the same for every class."""
        ridge: Array = np.exp(x)
        ridge *= x.dtype.type(2.0 * self.scale * weight)
        return ridge


@cache
def compile_kernels(dtype: str) -> None:
    """Compile every kernel for one dtype, or load it from numba's cache, so that no measurement includes it."""
    if not is_cached(bag_of_words.ridge_gradient):
        print_notice("compiling kernels for sparse gradients, once")
    part = Part(sparse.csr_array(np.eye(2, 3, dtype=dtype)), np.array([0, 1]))
    documents = index_parts([part], dtype)
    x, y = np.zeros((1, 3), dtype=dtype), np.zeros((1, 6), dtype=dtype)
    tiny = SparseTuningShard(
        ids=np.zeros(1, dtype=np.int64), seed=0, x0=x, y0=y, train=documents, val=documents, classes=2, scale=1.0
    )
    for oracle in (tiny.f, tiny.g, tiny.f_y, tiny.g_y, tiny.g_x):
        oracle(x, y)
    tiny.h_y(x, y, 1.0, 1.0)
    tiny.g_yy(x, y, y)
