"""Generate documents that look like text to a linear model: Zipf-distributed words, planted topics, any size.

Every class has a topic: a set of words that its documents use more often. A document samples each word from its topic
with its own probability, otherwise from the whole vocabulary. Some of its topical words come from another class. So
some documents carry little or wrong information about their class, and no model classifies all of them correctly.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy import sparse

from dbo.tasks.api import Array, DataSize, Part, Split, dataset, generator, param
from dbo.tasks.datasets.splits import split_three_ways

_ZIPF_SHIFT = 2.7    # Mandelbrot's: without it the most frequent word would be half of the text


@dataset("synthetic_text")
@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticText:
    """Generated sparse documents with Zipf-distributed words and planted topics; rows have unit length."""

    sparse_features: ClassVar[bool] = True

    documents: int = param(2_000, ge=10, le=1_000_000, help="documents in all three parts together")
    features: int = param(5_000, ge=10, le=1_000_000, help="size of the vocabulary")
    classes: int = param(20, ge=2, le=1_000, help="number of classes, each with its own topic")
    words: int = param(120, ge=1, le=10_000, help="mean number of words per document, repetitions counted")
    topic_share: float = param(0.35, ge=0, le=1, help="mean share of topical words; 0 makes labels unlearnable")
    zipf: float = param(1.1, gt=0, le=3, help="exponent of the word frequencies")
    test_fraction: float = param(0.4, gt=0, lt=1, help="share of all documents kept for testing")
    val_fraction: float = param(0.5, gt=0, lt=1, help="share of the remaining documents for the upper level")

    def size(self) -> DataSize:
        return DataSize(self.documents, self.features, self.classes, nonzeros=min(self.words, self.features))

    def load(self, seed: int, data_dir: str | None) -> Split:
        if self.documents < 5 * self.classes:
            raise ValueError(
                f"task.documents: {self.documents} documents are too few for classes={self.classes}; "
                f"use at least {5 * self.classes}"
            )
        rng = generator(seed, "synthetic_text")
        labels = rng.permutation(np.arange(self.documents, dtype=np.int64) % self.classes)
        return split_three_ways(
            Part(self._sample_matrix(labels, rng), labels), self.classes, self.test_fraction, self.val_fraction, seed
        )

    def _sample_matrix(self, labels: Array, rng: np.random.Generator) -> sparse.csr_array:
        """Return (documents, features) word counts, each row divided by its length."""
        lengths = 1 + rng.poisson((self.words - 1) * rng.gamma(4.0, 0.25, self.documents))
        document = np.repeat(np.arange(self.documents), lengths)
        word = _sample_zipf(self.features, self.zipf, len(document), rng)

        share = self.topic_share
        constant = share in (0, 1)
        own_share = np.full(len(labels), share) if constant else rng.beta(2 * share, 2 * (1 - share), self.documents)
        topical = np.flatnonzero(rng.random(len(document)) < own_share[document])
        other = rng.integers(self.classes, size=self.documents)
        foreign = rng.random(len(topical)) < 0.3
        about = np.where(foreign, other[document[topical]], labels[document[topical]])
        word[topical] = self._sample_topics(rng)[about, _sample_zipf(self._topic_size, self.zipf, len(topical), rng)]

        cells, counts = np.unique(document * self.features + word, return_counts=True)
        rows, columns = np.divmod(cells, self.features)
        values = counts / np.sqrt(np.bincount(rows, counts.astype(np.float64) ** 2))[rows]
        starts = np.searchsorted(rows, np.arange(self.documents + 1)).astype(np.int32)
        return sparse.csr_array((values, columns.astype(np.int32), starts), shape=(self.documents, self.features))

    @property
    def _topic_size(self) -> int:
        return max(2, min(self.features // 4, 2 * self.features // self.classes, 1_000))

    def _sample_topics(self, rng: np.random.Generator) -> Array:
        """Return (classes, topic size) word numbers, the most frequent first; topics may overlap."""
        return np.stack([rng.choice(self.features, self._topic_size, replace=False) for _ in range(self.classes)])


def _sample_zipf(size: int, exponent: float, count: int, rng: np.random.Generator) -> Array:
    """Return numbers in 0 … size−1 with frequencies ∝ (rank + shift)^−exponent."""
    cumulative = np.cumsum((np.arange(1, size + 1) + _ZIPF_SHIFT) ** -exponent)
    return np.searchsorted(cumulative / cumulative[-1], rng.random(count), side="right")
