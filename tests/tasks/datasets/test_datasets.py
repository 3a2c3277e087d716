"""Data sets: reproducible splits, balanced classes, documents that can be learned but not perfectly."""

import time
from dataclasses import fields

import numpy as np
import pytest
from scipy import sparse
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from dbo.tasks.api import Array, Samples
from dbo.tasks.datasets import digits
from dbo.tasks.datasets.digits import DATASETS, Digits
from dbo.tasks.datasets.splits import stratified
from dbo.tasks.datasets.synthetic_text import SyntheticText
from dbo.tasks.registry import TASKS


def columns(samples: Samples) -> list[Array]:
    return [array for part in samples.parts for array in part.arrays()]


@pytest.mark.parametrize("name", ["digits", "synthetic_text"])    # the others need files: their own tests hold this
def test_same_seed_same_data_other_seed_other_data(name: str) -> None:
    """Equal seeds give equal arrays and digests; another seed gives another split."""
    data = DATASETS[name]()
    first, again, other = data.load(0, None), data.load(0, None), data.load(1, None)
    for a, b in zip(columns(first), columns(again), strict=True):
        np.testing.assert_array_equal(a, b)
    assert first.describe()["data_sha256"] == again.describe()["data_sha256"] != other.describe()["data_sha256"]


@pytest.mark.parametrize("name", DATASETS)
def test_no_field_of_a_data_set_is_also_a_field_of_a_task(name: str) -> None:
    """Both kinds of parameters sit side by side in an experiment file, so their names must differ."""
    own = {f.name for f in fields(DATASETS[name])}    # type: ignore[arg-type]
    for task in TASKS.values():
        assert not own & {f.name for f in fields(task)}    # type: ignore[arg-type]


def test_tasks_accept_data_sets_that_exist() -> None:
    """Every name in a task's `datasets` is in DATASETS, and its default is among them."""
    for task in TASKS.values():
        assert set(task.datasets) <= set(DATASETS)
        if task.datasets:
            assert task().dataset in task.datasets    # type: ignore[attr-defined]


def test_digits_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from its file, and by its loader where the file is not: the same numbers."""
    pixels, labels = load_digits(return_X_y=True)
    for _ in range(2):
        for mine, theirs in zip(digits.digits_table(), (pixels, labels), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        monkeypatch.setattr(digits, "find_spec", lambda name: None)


def test_digits_sizes_and_range() -> None:
    """1,797 digits: 359 for testing, the rest halved, pixels in [0, 1], every class on every side in proportion."""
    samples = Digits().load(0, None)
    sizes = [len(part) for part in samples.parts]
    assert sum(sizes) == 1797
    assert abs(sizes[2] - 0.2 * 1797) <= 5
    assert abs(sizes[0] - sizes[1]) <= 10
    for part in samples.parts:
        assert isinstance(part.features, np.ndarray)
        assert part.features.min() == 0.0
        assert part.features.max() == 1.0
        assert np.bincount(part.labels, minlength=10).min() > 0.08 * len(part)


def test_stratified_takes_the_share_of_every_class() -> None:
    """Of each class the share is taken to the nearest sample, nothing twice, nothing lost."""
    labels = np.repeat([0, 1, 2, 5], [10, 7, 1, 100])
    rest, taken = stratified(labels, 0.3, np.random.default_rng(0))
    np.testing.assert_array_equal(np.sort(np.concatenate([rest, taken])), np.arange(len(labels)))
    np.testing.assert_array_equal(np.bincount(labels[taken], minlength=6), [3, 2, 0, 0, 0, 30])


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
