"""Documents that look like text to a linear model: Zipf-distributed words, planted topics, any size.

Every class has a topic: a set of words that its documents use more often. A document draws each word from its topic
with a probability of its own and from the whole vocabulary otherwise; a part of its topical words comes from another
class. So some documents say little about their class, or something wrong, and no model is right about all of them.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt, Le, Lt
from scipy import sparse
from typing_extensions import Doc

from dbo.tasks.api import Array, Part, Samples, generator
from dbo.tasks.datasets.splits import three_ways

_ZIPF_SHIFT = 2.7    # Mandelbrot's: keeps the most frequent word from being half of the text


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticText:
    """Generated sparse documents with Zipf-distributed words and planted topics; rows have unit length."""

    documents: Annotated[int, Ge(10), Le(1_000_000), Doc("documents in all three parts together")] = 2_000
    features: Annotated[int, Ge(10), Le(1_000_000), Doc("size of the vocabulary")] = 5_000
    classes: Annotated[int, Ge(2), Le(1_000), Doc("number of topics to tell apart")] = 20
    words: Annotated[int, Ge(1), Le(10_000), Doc("mean number of words per document, repetitions counted")] = 120
    topic_share: Annotated[float, Ge(0), Le(1), Doc("mean share of topical words; 0 makes labels unlearnable")] = 0.35
    zipf: Annotated[float, Gt(0), Le(3), Doc("exponent of the word frequencies")] = 1.1
    test_fraction: Annotated[float, Gt(0), Lt(1), Doc("share of all documents kept for testing")] = 0.4
    val_fraction: Annotated[float, Gt(0), Lt(1), Doc("share of the remaining documents for the upper level")] = 0.5

    def load(self, seed: int, data_dir: str | None) -> Samples:
        if self.documents < 5 * self.classes:
            raise ValueError(
                f"task.documents: {self.documents} documents are too few for classes={self.classes}; "
                f"use at least {5 * self.classes}"
            )
        rng = generator(seed, "synthetic_text")
        labels = rng.permutation(np.arange(self.documents, dtype=np.int64) % self.classes)
        return three_ways(
            Part(self._matrix(labels, rng), labels), self.classes, self.test_fraction, self.val_fraction, seed
        )

    def _matrix(self, labels: Array, rng: np.random.Generator) -> sparse.csr_array:
        """(documents, features) word counts, each row divided by its length."""
        lengths = 1 + rng.poisson((self.words - 1) * rng.gamma(4.0, 0.25, self.documents))
        document = np.repeat(np.arange(self.documents), lengths)
        word = _zipf(self.features, self.zipf, len(document), rng)

        share = self.topic_share
        certain = share in (0, 1)
        own_share = np.full(len(labels), share) if certain else rng.beta(2 * share, 2 * (1 - share), self.documents)
        topical = np.flatnonzero(rng.random(len(document)) < own_share[document])
        other = rng.integers(self.classes, size=self.documents)
        strays = rng.random(len(topical)) < 0.3
        about = np.where(strays, other[document[topical]], labels[document[topical]])
        word[topical] = self._topics(rng)[about, _zipf(self._topic_size, self.zipf, len(topical), rng)]

        cells, counts = np.unique(document * self.features + word, return_counts=True)
        rows, columns = np.divmod(cells, self.features)
        values = counts / np.sqrt(np.bincount(rows, counts.astype(np.float64) ** 2))[rows]
        starts = np.searchsorted(rows, np.arange(self.documents + 1)).astype(np.int32)
        return sparse.csr_array((values, columns.astype(np.int32), starts), shape=(self.documents, self.features))

    @property
    def _topic_size(self) -> int:
        return max(2, min(self.features // 4, 2 * self.features // self.classes, 1_000))

    def _topics(self, rng: np.random.Generator) -> Array:
        """(classes, topic size) word numbers; topics may overlap, and their order is by frequency within the topic."""
        return np.stack([rng.choice(self.features, self._topic_size, replace=False) for _ in range(self.classes)])


def _zipf(size: int, exponent: float, draws: int, rng: np.random.Generator) -> Array:
    """Numbers in 0 … size−1 with frequencies ∝ (rank + shift)^−exponent."""
    cumulative = np.cumsum((np.arange(1, size + 1) + _ZIPF_SHIFT) ** -exponent)
    return np.searchsorted(cumulative / cumulative[-1], rng.random(draws), side="right")
