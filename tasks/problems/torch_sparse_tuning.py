"""Coefficient tuning on sparse data with many parameters, on a torch device: the oracles of sparse_tuning.py."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from dbo.tasks.api import Array, Shard
from dbo.tasks.kernels import torch_bag_of_words
from dbo.tasks.kernels.interface import DocumentKernels
from dbo.tasks.kernels.sparse_matrix import to_device
from dbo.tasks.kernels.torch_sparse import TorchMatrix
from dbo.tasks.problems.sparse_tuning import Documents, SparseTuningShard


@dataclass(frozen=True, slots=True, eq=False)
class TorchDocuments:
    """One node's samples of one level, by document and by word; the methods are those of `Documents`."""

    features: TorchMatrix       # (documents, words)
    words: TorchMatrix          # (words, documents)
    labels: Array               # on the host: `take` chooses among them
    on_device: Any              # the labels

    @staticmethod
    def copy(documents: Documents, asarray: Callable[[Array], Any]) -> "TorchDocuments":
        features, words = (to_device(matrix, asarray) for matrix in (documents.features, documents.words))
        assert isinstance(features, TorchMatrix)
        assert isinstance(words, TorchMatrix)
        return TorchDocuments(features, words, documents.labels, asarray(documents.labels))

    def to(self, asarray: Callable[[Array], Any]) -> "TorchDocuments":
        features, words = (replace(matrix, data=asarray(matrix.data)) for matrix in (self.features, self.words))
        return replace(self, features=features, words=words)

    def scores(self, w: Any) -> Any:
        """Return (documents, classes) scores for w (words, classes)."""
        scores, a = w.new_empty((self.features.shape[0], w.shape[1])), self.features
        torch_bag_of_words.scores(a.indptr, a.indices, a.data, w, scores)
        return scores

    def residual(self, w: Any, weight: float = 1.0) -> Any:
        """Return `weight` times the derivative of the mean cross-entropy with respect to the scores."""
        scores = self.scores(w)
        torch_bag_of_words.residual_in_place(scores, self.on_device, weight / len(self.labels))
        return scores

    def curvature(self, w: Any, v: Any) -> Any:
        """Return the second derivative of the mean cross-entropy, times the scores of v."""
        along = self.scores(v)
        torch_bag_of_words.curvature_in_place(self.scores(w), along, 1 / len(self.labels))
        return along

    def loss(self, w: Any) -> Any:
        return torch_bag_of_words.sum_losses(self.scores(w), self.on_device) / len(self.labels)

    def take(self, numbers: Array) -> "TorchDocuments":
        """Return the documents with these numbers."""
        chosen, labels = self.features.take_rows(numbers), self.labels[numbers]
        on_device = torch.as_tensor(labels, device=self.on_device.device)
        return TorchDocuments(chosen, chosen.transpose(), labels, on_device)

    @property
    def by_word(self) -> tuple[Any, Any, Any]:
        return self.words.indptr, self.words.indices, self.words.data


class TorchSparseTuningShard(SparseTuningShard):
    """Closed-form oracles, a node at a time; `train` and `val` are `TorchDocuments`."""

    kernels: ClassVar[DocumentKernels] = torch_bag_of_words

    def to(self, asarray: Callable[[Array], Any]) -> Shard:
        return Shard.to(self, asarray)

    def in_double(self, max_bytes: int) -> Any:
        return Shard.in_double(self, max_bytes)

    def f(self, x: Any, y: Any) -> Any:
        return self._losses(self.val, y).to(y.dtype)

    def g(self, x: Any, y: Any) -> Any:
        ridge: Any = self.g_x(x, y)
        return (self._losses(self.train, y) + ridge.sum(dim=1, dtype=torch.float64)).to(y.dtype)

    def _losses(self, level: Any, y: Any) -> Any:
        return torch.stack([level[i].loss(self._matrix(y, i)) for i in range(len(y))])

    def f_x(self, x: Any, y: Any) -> Any:
        return torch.zeros_like(x)

    def _fill_rows(self, y: Any, write: Callable[[int, Any], None]) -> Any:
        out: Any = torch.empty_like(y)
        for i in range(len(out)):
            write(i, self._matrix(out, i))
        return out

    def _row_products(self, factor: float, x: Any, y: Any, v: Any) -> Any:
        out = torch.empty_like(x)
        for i in range(len(out)):
            self.kernels.row_products(self._matrix(y, i), self._matrix(v, i), factor * x[i].exp(), out[i])
        return out

    def _ridge(self, x: Any, weight: float = 1.0) -> Any:
        """Return (words,) the curvature of the regulariser, which is the same for every class."""
        return (2.0 * self.scale * weight) * x.exp()


def copy_to_device(shard: SparseTuningShard, asarray: Callable[[Array], Any]) -> TorchSparseTuningShard:
    """Return the oracles of a shard of the host on the device that `asarray` copies arrays to."""
    train: Any = tuple(TorchDocuments.copy(node, asarray) for node in shard.train)
    val: Any = tuple(TorchDocuments.copy(node, asarray) for node in shard.val)
    return TorchSparseTuningShard(
        shard.ids, shard.seed, asarray(shard.x0), asarray(shard.y0), train, val, shard.classes, shard.scale)
