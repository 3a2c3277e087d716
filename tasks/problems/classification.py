"""Share what all classification problems have: samples, the nodes' samples, and test metrics."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from scipy import sparse
from threadpoolctl import threadpool_limits

from dbo.tasks.api import Array, Part, Problem, Shard, Split

_MIN_MODELS = 4                        # fewer models are evaluated one by one
_MAX_ENTRIES = 1 << 16                 # of models that are evaluated together
_CHUNK = _MIN_MODELS * _MAX_ENTRIES    # entries of models, or of their activations, that are computed together
_MODELS, _SAMPLES = 128, 256           # of a chunk: its scores fit into the cache


@dataclass(frozen=True, eq=False)
class ClassificationProblem(Problem, ABC):
    """The samples, and the numbers of the samples that each node has."""

    task: ClassVar[str]

    samples: Split
    train: list[Array]    # sample numbers per node
    val: list[Array]
    seed: int
    dtype: str

    @property
    def nodes(self) -> int:
        return len(self.train)

    @abstractmethod
    def scores(self, x: Array, y: Array, features: Array) -> Array:
        """Return the (samples, classes) scores of one model, given as 1-d arrays."""

    @abstractmethod
    def score_models(self, x: Array, y: Array, features: Any) -> Array:
        """Return the (classes, samples, models) scores of several models, one per row."""

    @abstractmethod
    def count_entries(self, samples: int) -> int:
        """Return how many entries of memory `score_models` needs for each model."""

    def node_parts(self, ids: Sequence[int]) -> tuple[list[Part], list[Part]]:
        """Return the train and the validation samples of these nodes."""
        return [self.samples.train.take(self.train[i]) for i in ids], [self.samples.val.take(self.val[i]) for i in ids]

    def evaluate(self, x: Array, y: Array) -> dict[str, Array]:
        labels = self.samples.test.labels
        found = [
            accuracy_and_loss(self.scores(x_row, y_row, self._test_features), labels)
            for x_row, y_row in zip(np.asarray(x), np.asarray(y), strict=True)
        ]
        accuracy, loss = np.array(found).reshape(-1, 2).T
        return {"test_accuracy": accuracy, "test_loss": loss}

    def evaluate_nodes(self, x: Array, y: Array) -> dict[str, Array]:
        return {"test_accuracy": self.node_accuracy(x, y)}

    def node_accuracy(self, x: Array, y: Array) -> Array:
        """Return the (models,) shares of correct predictions on the test samples."""
        x, y = np.asarray(x), np.asarray(y)
        labels, features = self.samples.test.labels, self._test_features
        step = self._models_at_once(len(y), len(labels))
        if not step:
            return np.array([
                np.mean(np.argmax(self.scores(x_row, y_row, features), axis=1) == labels)
                for x_row, y_row in zip(x, y, strict=True)
            ])

        def count_hits(first: int) -> Array:
            rows = slice(first, first + step)
            is_hit = np.argmax(self.score_models(x[rows], y[rows], features), axis=0) == labels[:, None]
            hits: Array = np.count_nonzero(is_hit, axis=0)
            return hits

        return _map_chunks(count_hits, len(y), step) / len(labels)

    def tune_losses(self, x: Array, y: Array) -> Array | None:
        tune = self._tune_problem
        if tune is None:
            return None
        labels, features = tune.samples.test.labels, tune._test_features
        step = self._models_at_once(len(y), len(labels))
        if not step:
            shard = self._tune_shard
            assert shard is not None
            return np.array([shard.f(x[i : i + 1], y[i : i + 1])[0] for i in range(len(x))])

        def compute_losses(first: int) -> Array:
            rows = slice(first, first + step)
            return mean_losses(self.score_models(x[rows], y[rows], features), labels)

        return _map_chunks(compute_losses, len(y), step)

    def _models_at_once(self, models: int, samples: int) -> int:
        """Return how many models to compute together; 0: compute them one by one."""
        step = min(_MODELS, _CHUNK // self.count_entries(samples))
        return 0 if min(models, step) < _MIN_MODELS else step

    def tune_accuracies(self, x: Array, y: Array) -> Array | None:
        tune = self._tune_problem
        return None if tune is None else tune.node_accuracy(x, y)

    @cached_property
    def _tune_problem(self) -> "ClassificationProblem | None":
        """The problem with the tune part as its test part: the accuracy on it is computed by the same code."""
        tune = self.samples.tune
        return None if tune is None else replace(self, samples=replace(self.samples, test=tune))

    @cached_property
    def _tune_shard(self) -> Shard | None:
        """One row whose upper samples are the tune part: the loss on it is computed by the code of f."""
        samples = self.samples
        if samples.tune is None:
            return None
        upper = replace(samples, val=samples.tune)
        return replace(self, samples=upper, train=self.train[:1], val=[np.arange(len(upper.val))]).shard([0])

    @cached_property
    def _test_features(self) -> Any:
        return self.samples.test.features.astype(self.dtype)

    def sample_sizes(self) -> tuple[list[int], list[int]]:
        return [len(index) for index in self.train], [len(index) for index in self.val]

    def shape(self) -> dict[str, Any]:
        """Return the facts about the model that `describe` records."""
        return {"dim_x": self.dim_x, "dim_y": self.dim_y}

    def describe(self) -> dict[str, Any]:
        return {
            "task": self.task, "nodes": self.nodes, **self.shape(),
            **dict(zip(("train_sizes", "val_sizes"), self.sample_sizes(), strict=True)),
            **self.samples.describe(),
        }


class LinearScores(ClassificationProblem, ABC):
    """Problems whose scores are features · y: one product gives those of many models."""

    def scores(self, x: Array, y: Array, features: Array) -> Array:
        scores: Array = features @ y.reshape(-1, self.samples.classes)
        return scores

    def score_models(self, x: Array, y: Array, features: Any) -> Array:
        w = _join_columns(y, self.samples.classes)
        scores: Array = (features @ w).reshape(features.shape[0], self.samples.classes, len(y))
        return scores.transpose(1, 0, 2)

    def count_entries(self, samples: int) -> int:
        return max(self.dim_y, samples * self.samples.classes)

    def node_accuracy(self, x: Array, y: Array) -> Array:
        if len(y) < _MIN_MODELS or y.shape[1] > _MAX_ENTRIES:
            return super().node_accuracy(x, y)
        return linear_accuracy(self._sorted_test, np.asarray(y), self.samples.classes)

    @cached_property
    def _sorted_test(self) -> list[Array]:
        """The features of the test samples of each class, dense."""
        features, labels = self._test_features, self.samples.test.labels
        parts = (features[labels == label] for label in range(self.samples.classes))
        return [part.toarray() if isinstance(part, sparse.csr_array) else part for part in parts]


def linear_accuracy(parts: Sequence[Array], y: Array, classes: int) -> Array:
    """Return the (models,) accuracies of linear models, with the samples of each class in `parts`.

    Models near their mean predict what it predicts, unless a sample is near the boundary of two classes: scores change
    by at most |features| · |y_k − ȳ_k|. Only such samples are multiplied by all models, in chunks that fit into the
    cache. Threads share the chunks; counts are whole numbers, so their order does not matter.
    """
    if (y == y[0]).all() and len(y) > 1:
        return np.repeat(linear_accuracy(parts, y[:1], classes), len(y))
    mean = np.mean(y, axis=0, dtype=np.float64).astype(y.dtype)
    total, levels = sum(map(len, parts)), [_Margins.find(part, mean, label) for label, part in enumerate(parts)]

    def count_hits(first: int) -> Array:
        chunk = y[first : first + _MODELS]
        apart = np.linalg.norm((chunk - mean).reshape(len(chunk), -1, classes), axis=1).max()
        w = _join_columns(chunk, classes)
        hits = np.zeros(len(chunk), dtype=np.int64)
        for label, level in enumerate(levels):
            near = level.count_near(float(apart))
            hits += level.hits_beyond[near]
            for start in range(0, near, _SAMPLES):
                part = level.features[start : min(near, start + _SAMPLES)]
                hits += _count_hits((part @ w).reshape(len(part), classes, -1), label)
        return hits

    return _map_chunks(count_hits, len(y), _MODELS) / total


def _join_columns(y: Array, classes: int) -> Array:
    """Return (features, classes · models): the columns of all models, those of the first class first."""
    return y.reshape(len(y), -1, classes).transpose(1, 2, 0).reshape(-1, classes * len(y))


def _map_chunks(function: Callable[[int], Array], models: int, step: int) -> Array:
    """Return what `function` gives for the first model of each chunk, joined; threads share many chunks."""
    firsts = range(0, models, step)
    if len(firsts) < 4:
        return np.concatenate([function(first) for first in firsts])
    with threadpool_limits(1), ThreadPoolExecutor(count_cores()) as pool:
        return np.concatenate(list(pool.map(function, firsts)))


@dataclass(frozen=True, slots=True)
class _Margins:
    """The test samples of one class, those nearest to a boundary of the mean model first."""

    features: Array
    margins: Array          # distance of the two largest scores relative to |features|, increasing
    hits_beyond: Array      # number of right predictions of the mean model from each position on
    slack: float            # rounding of the scores, relative to |features|

    @classmethod
    def find(cls, features: Array, mean: Array, label: int) -> "_Margins":
        w = mean.reshape(features.shape[1], -1)
        scores = features @ w
        largest = np.sort(scores, axis=1)
        norms = np.maximum(np.linalg.norm(features, axis=1), np.finfo(features.dtype).tiny)
        margins = (largest[:, -1] - largest[:, -2]) / norms
        order = np.argsort(margins, kind="stable")
        is_hit = np.argmax(scores, axis=1)[order] == label
        beyond = np.append(np.cumsum(is_hit[::-1])[::-1], 0)
        slack = 1e-5 * float(np.linalg.norm(w, axis=0).max(initial=0.0))
        return cls(features[order], margins[order], beyond, slack)

    def count_near(self, apart: float) -> int:
        """Return how many samples a model may predict otherwise whose columns are so far from the mean's."""
        return int(np.searchsorted(self.margins, 2.0001 * apart + self.slack, side="right"))


def _count_hits(scores: Array, label: int) -> Array:
    """Return the (models,) right predictions for scores (samples, classes, models).

    A prediction is the first class of the largest score: that of the label must exceed those before it, and not be
    below those after it.
    """
    own = scores[:, label]
    is_hit = np.ones(own.shape, dtype=bool)
    if label > 0:
        is_hit &= own > np.max(scores[:, :label], axis=1)
    if label < scores.shape[1] - 1:
        is_hit &= own >= np.max(scores[:, label + 1 :], axis=1)
    hits: Array = np.count_nonzero(is_hit, axis=0)
    return hits


def count_cores() -> int:
    """Return the cores that this process may use; OMP_NUM_THREADS limits them, as it does for linear algebra."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(allowed, int(limit)) if limit.isdigit() and int(limit) else allowed


def mean_losses(scores: Array, labels: Array) -> Array:
    """Return the (models,) mean cross-entropies for scores (classes, samples, models); means in float64."""
    top = np.max(scores, axis=0)
    losses: Array = np.log(np.sum(np.exp(scores - top), axis=0))
    losses += top
    losses -= scores[labels, np.arange(len(labels))]
    return np.asarray(np.mean(losses, axis=0, dtype=np.float64))


def accuracy_and_loss(scores: Array, labels: Array) -> tuple[float, float]:
    """Return the share of correct predictions and the mean cross-entropy of one model, computed in float64."""
    scores = np.asarray(scores, dtype=np.float64)
    top = np.max(scores, axis=1)
    log_sum = np.log(np.sum(np.exp(scores - top[:, None]), axis=1)) + top
    at_label = scores[np.arange(len(labels)), labels]
    return float(np.mean(np.argmax(scores, axis=1) == labels)), float(np.mean(log_sum - at_label))
