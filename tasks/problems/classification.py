"""Share what all classification problems have: samples, the nodes' samples, and test metrics."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from dbo.tasks.api import Array, Part, Problem, Shard, Split


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

    def tune_losses(self, x: Array, y: Array) -> Array | None:
        shard = self._tune_shard
        if shard is None:
            return None
        return np.array([shard.f(x[i : i + 1], y[i : i + 1])[0] for i in range(len(x))])

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


def accuracy_and_loss(scores: Array, labels: Array) -> tuple[float, float]:
    """Return the share of correct predictions and the mean cross-entropy of one model, computed in float64."""
    scores = np.asarray(scores, dtype=np.float64)
    top = np.max(scores, axis=1)
    log_sum = np.log(np.sum(np.exp(scores - top[:, None]), axis=1)) + top
    at_label = scores[np.arange(len(labels)), labels]
    return float(np.mean(np.argmax(scores, axis=1) == labels)), float(np.mean(log_sum - at_label))
