"""Digits: the numbers of scikit-learn, split in proportion."""

import numpy as np
import pytest
from sklearn.datasets import load_digits

from dbo.tasks.datasets import digits
from dbo.tasks.datasets.digits import Digits


def test_digits_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file and, if that is missing, its loader give the same numbers."""
    pixels, labels = load_digits(return_X_y=True)
    for _ in range(2):
        for mine, theirs in zip(digits.read_digits(), (pixels, labels), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        monkeypatch.setattr(digits, "find_spec", lambda name: None)


def test_digits_sizes_and_range() -> None:
    """1,797 digits: 359 for testing, the rest halved, pixels in [0, 1], every class in every part in proportion."""
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
