"""Splits: the same share of every class."""

import numpy as np

from dbo.tasks.api import Part
from dbo.tasks.datasets.splits import split_stratified, subsample


def test_stratified_takes_the_share_of_every_class() -> None:
    """The share of each class is rounded to the nearest sample; no sample is lost or taken twice."""
    labels = np.repeat([0, 1, 2, 5], [10, 7, 1, 100])
    rest, taken = split_stratified(labels, 0.3, np.random.default_rng(0))
    np.testing.assert_array_equal(np.sort(np.concatenate([rest, taken])), np.arange(len(labels)))
    np.testing.assert_array_equal(np.bincount(labels[taken], minlength=6), [3, 2, 0, 0, 0, 30])


def test_subsample_takes_the_share_of_every_class_or_everything() -> None:
    """A share of 1 or more returns the part itself."""
    part = Part(np.arange(40.0)[:, None], np.repeat([0, 1], [30, 10]))
    assert np.bincount(subsample(part, 0.5, 0, "some").labels).tolist() == [15, 5]
    assert subsample(part, 1.0, 0, "some") is part
