"""Synthetic text: unit rows with Zipf-distributed words, learnable but not perfectly, at any size."""

import time

import numpy as np
import pytest
from scipy import sparse
from sklearn.linear_model import LogisticRegression

from dbo.tasks.datasets.synthetic_text import SyntheticText


def test_documents_are_unit_rows_with_zipf_words() -> None:
    """Every row has length one and sorted columns; frequent words are far more frequent than rare ones."""
    samples = SyntheticText(documents=1000, features=2000, classes=5).load(0, None)
    for part in samples.parts:
        a = part.features
        assert isinstance(a, sparse.csr_array)
        assert a.has_canonical_format
        np.testing.assert_allclose(np.sqrt((a * a).sum(axis=1)), 1.0, rtol=1e-12)
    used = np.sort(np.bincount(sparse.csr_array(samples.train.features).indices, minlength=2000))[::-1]
    assert used[:20].mean() > 20 * used[1000:].mean()


@pytest.mark.parametrize("data", [SyntheticText(), SyntheticText(documents=600, features=300, classes=4)])
def test_documents_are_learnable_but_not_perfectly(data: SyntheticText) -> None:
    """A linear model is right far more often than chance, and not always."""
    samples = data.load(0, None)
    model = LogisticRegression(C=30, max_iter=200).fit(samples.train.features, samples.train.labels)
    score = model.score(samples.test.features, samples.test.labels)
    assert max(0.5, 2 / data.classes) < score < 0.95


def test_documents_without_topics_cannot_be_learned() -> None:
    """Negative control: with topic_share=0 the same model is at chance."""
    samples = SyntheticText(classes=5, topic_share=0.0).load(0, None)
    model = LogisticRegression(C=30, max_iter=50, tol=1e-2).fit(samples.train.features, samples.train.labels)
    assert model.score(samples.test.features, samples.test.labels) < 0.3


def test_full_size_takes_seconds() -> None:
    """18,846 documents × 101,631 words are generated in seconds, with as many nonzeros as the real data has."""
    start = time.perf_counter()
    samples = SyntheticText(documents=18_846, features=101_631).load(0, None)
    assert time.perf_counter() - start < 30
    assert samples.train.features.shape == (pytest.approx(5657, abs=30), 101_631)
    assert 50 < sparse.csr_array(samples.train.features).nnz / len(samples.train) < 150


def test_too_few_documents_are_refused() -> None:
    """One line with the field, the value and what is needed."""
    with pytest.raises(ValueError, match=r"task.documents: 40 documents are too few for classes=20; use at least 100"):
        SyntheticText(documents=40).load(0, None)
