"""Coefficient tuning on sparse data with many parameters: the same oracles, node by node, in compiled loops.

`coefficient_tuning.py` has the formulas. Here a node's documents are two small matrices, by document and by word, and
an answer is written once: with the 2.03 million entries of 20 Newsgroups that takes little longer than writing does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from dbo.tasks.api import Array, Part, Shard
from dbo.tasks.datasets.cache import say
from dbo.tasks.kernels.threads import each

WIDE = 1 << 16    # parameters of a node from which compiled loops outweigh their calls
@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """One node's samples of one level, by document and by word."""

    features: sparse.csr_array      # (documents, words)
    words: sparse.csr_array         # (words, documents)
    labels: Array

    def scores(self, w: Array) -> Array:
        """(words, classes) -> (documents, classes)."""
        from dbo.tasks.kernels import bag_of_words

        a = self.features
        found = np.empty((a.shape[0], w.shape[1]), dtype=w.dtype)
        bag_of_words.scores(a.indptr, a.indices, a.data, w, found)
        return found

    def residual(self, w: Array, weight: float = 1.0) -> Array:
        """weight times the derivative of the mean cross-entropy with respect to the scores."""
        from dbo.tasks.kernels import bag_of_words

        found = self.scores(w)
        bag_of_words.residual(found, self.labels, w.dtype.type(weight / len(self.labels)))
        return found

    def curvature(self, w: Array, v: Array) -> Array:
        """The second derivative of the mean cross-entropy, times the scores of v."""
        from dbo.tasks.kernels import bag_of_words

        along = self.scores(v)
        bag_of_words.curvature(self.scores(w), along, w.dtype.type(1 / len(self.labels)))
        return along

    def loss(self, w: Array) -> float:
        from dbo.tasks.kernels import bag_of_words

        return float(bag_of_words.losses(self.scores(w), self.labels)) / len(self.labels)

    @property
    def by_word(self) -> tuple[Array, Array, Array]:
        return self.words.indptr, self.words.indices, self.words.data


def documents(part: Part, dtype: str) -> Documents:
    """A node's samples in the form of this file."""
    a = sparse.csr_array(part.features.astype(dtype))
    return Documents(a, sparse.csr_array(a.T), np.asarray(part.labels, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class WideTuningShard(Shard):
    """Closed-form oracles, a node at a time."""

    train: tuple[Documents, ...]
    val: tuple[Documents, ...]
    classes: int
    scale: float

    def f(self, x: Array, y: Array) -> Array:
        return np.array(each(lambda i: self.val[i].loss(self._matrix(y, i)), len(y)), dtype=y.dtype)

    def g(self, x: Array, y: Array) -> Array:
        ridge = self.g_x(x, y).sum(axis=1, dtype=np.float64)
        return np.array(each(lambda i: self.train[i].loss(self._matrix(y, i)) + ridge[i], len(y)), dtype=y.dtype)

    def f_x(self, x: Array, y: Array) -> Array:
        return np.zeros_like(x)

    def f_y(self, x: Array, y: Array) -> Array:
        from dbo.tasks.kernels import bag_of_words

        def node(i: int, out: Array) -> None:
            here = self.val[i]
            bag_of_words.pulled(*here.by_word, here.residual(self._matrix(y, i)), out)

        return self._filled(y, node)

    def g_x(self, x: Array, y: Array) -> Array:
        return self._products(self.scale, x, y, y)

    def g_y(self, x: Array, y: Array) -> Array:
        return self.h_y(x, y, 0.0, 1.0)

    def h_y(self, x: Array, y: Array, f_weight: float, g_weight: float) -> Array:
        """f_weight ∇_y f + g_weight ∇_y g in one pass."""
        from dbo.tasks.kernels import bag_of_words

        def node(i: int, out: Array) -> None:
            train, val, w = self.train[i], self.val[i], self._matrix(y, i)
            pull, ridge = train.residual(w, g_weight), self._ridge(x[i], g_weight)
            if f_weight:
                bag_of_words.pulled_both(
                    *train.by_word, pull, ridge, w, *val.by_word, val.residual(w, f_weight), out
                )
            else:
                bag_of_words.pulled_ridge(*train.by_word, pull, ridge, w, out)

        return self._filled(y, node)

    def g_yy(self, x: Array, y: Array, v: Array) -> Array:
        from dbo.tasks.kernels import bag_of_words

        def node(i: int, out: Array) -> None:
            here, u = self.train[i], self._matrix(v, i)
            bag_of_words.pulled_ridge(*here.by_word, here.curvature(self._matrix(y, i), u), self._ridge(x[i]), u, out)

        return self._filled(y, node)

    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        return self._products(2.0 * self.scale, x, y, v)

    def _filled(self, y: Array, node: Callable[[int, Array], None]) -> Array:
        out = np.empty(y.shape, dtype=y.dtype)
        each(lambda i: node(i, self._matrix(out, i)), len(out))
        return out

    def _products(self, factor: float, x: Array, y: Array, v: Array) -> Array:
        from dbo.tasks.kernels import bag_of_words

        out = np.empty(x.shape, dtype=x.dtype)
        scale = x.dtype.type(factor)

        def node(i: int) -> None:
            bag_of_words.products(self._matrix(y, i), self._matrix(v, i), scale * np.exp(x[i]), out[i])

        each(node, len(out))
        return out

    def _matrix(self, y: Array, i: int) -> Array:
        matrix: Array = y[i].reshape(-1, self.classes)
        return matrix

    def _ridge(self, x: Array, weight: float = 1.0) -> Array:
        """(words,) the regulariser's curvature, which is the same for every class."""
        ridge: Array = x.dtype.type(2.0 * self.scale * weight) * np.exp(x)
        return ridge


@cache
def warm(dtype: str) -> None:
    """Compiles every loop for one kind of numbers, or takes it from the cache: not in the middle of a measurement."""
    from dbo.tasks.kernels import bag_of_words

    if not _compiled_earlier(bag_of_words.pulled_ridge):
        say("compiling kernels for sparse gradients, once")
    part = Part(sparse.csr_array(np.eye(2, 3, dtype=dtype)), np.array([0, 1]))
    here = (documents(part, dtype),)
    x, y = np.zeros((1, 3), dtype=dtype), np.zeros((1, 6), dtype=dtype)
    tiny = WideTuningShard(
        ids=np.zeros(1, dtype=np.int64), seed=0, x0=x, y0=y, train=here, val=here, classes=2, scale=1.0
    )
    for oracle in (tiny.f, tiny.g, tiny.f_y, tiny.g_y, tiny.g_x):
        oracle(x, y)
    tiny.h_y(x, y, 1.0, 1.0)
    tiny.g_yy(x, y, y)


def _compiled_earlier(kernel: Any) -> bool:
    """Whether numba has this kernel on disk."""
    place = kernel.stats.cache_path
    return place is not None and any(Path(place).glob(f"kernels.{kernel.py_func.__name__}-*.nbc"))
