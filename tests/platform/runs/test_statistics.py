"""Means over seeds and their bootstrap intervals."""

import itertools

import numpy as np
import pytest

from dbo.platform.runs.statistics import MeanEstimate, estimate_mean, mean_interval


@pytest.mark.parametrize("count", [20, 30])
def test_interval_covers_the_mean_of_normal_samples(count: int) -> None:
    """The intervals of 200 samples hold the true mean in about 95 % of cases."""
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        found = estimate_mean(rng.normal(3.0, 1.0, count).tolist())
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        assert found.low <= found.mean <= found.high
        covered += found.low <= 3.0 <= found.high
    assert 0.88 <= covered / 200 <= 0.99


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_interval_of_few_values_is_exact(count: int) -> None:
    """The ends are quantiles of the means of all equally likely resamples, written out."""
    values = np.random.default_rng(count).normal(size=count)
    means = np.sort([np.mean(resample) for resample in itertools.product(values, repeat=count)])
    found = estimate_mean(values)
    assert found is not None
    ends = [means[int(np.ceil(level * len(means))) - 1] for level in (0.025, 0.975)]
    np.testing.assert_allclose([found.low, found.high], ends, rtol=1e-12)


def test_interval_of_three_values_spans_all_of_them() -> None:
    """The resample of all-smallest has probability 1/27 > 2.5 %."""
    assert estimate_mean([1.0, 2.0, 6.0]) == MeanEstimate(3.0, 1.0, 6.0, 3)


@pytest.mark.parametrize("count", [2, 3, 7, 10])
def test_identical_values_have_no_width(count: int) -> None:
    """Rounding does not leave the value, which no sum of thirds equals."""
    assert estimate_mean([0.1] * count) == MeanEstimate(0.1, 0.1, 0.1, count)


def test_one_value_has_no_interval_and_none_has_no_mean() -> None:
    """Missing values and those that are not finite do not count."""
    assert estimate_mean([None, 2.0, float("nan"), float("inf")]) == MeanEstimate(2.0, None, None, 1)
    assert estimate_mean([None, float("nan")]) is None


@pytest.mark.parametrize("count", [5, 12])
def test_equal_values_give_equal_intervals(count: int) -> None:
    """In every call, in a table and along a curve."""
    rows = np.random.default_rng(0).normal(size=(count, 4))
    low, high = mean_interval(rows)
    for column in range(4):
        found = estimate_mean(rows[:, column])
        assert found is not None
        assert found == estimate_mean(rows[:, column])
        np.testing.assert_allclose([found.low, found.high], [low[column], high[column]], rtol=1e-12)
