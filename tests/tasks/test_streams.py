"""Numbers of many generators at once are those of NumPy's generators."""

import numpy as np
import pytest

from dbo.tasks import streams


@pytest.mark.parametrize("words", [1, 4, 5, 7])
def test_numbers_are_those_of_default_rng(words: int) -> None:
    """Keys of any length, zeros among them; sizes from 2 up to thousands."""
    rng = np.random.default_rng(words)
    keys = rng.integers(0, 1 << 32, (40, words), dtype=np.uint32)
    keys[0], keys[1, 0] = 0, 0
    high = rng.integers(2, 5000, 40)
    numbers, is_rejected = streams.draw_integers(keys, high, 33)
    assert not is_rejected.any()
    for key, limit, row in zip(keys, high, numbers, strict=True):
        np.testing.assert_array_equal(row, np.random.default_rng(key).integers(limit, size=66))


def test_a_rejected_number_is_reported() -> None:
    """Where NumPy rejects a number, and draws another, the row is marked; all others agree."""
    rng = np.random.default_rng(0)
    keys, high = rng.integers(0, 1 << 32, (200, 5), dtype=np.uint32), rng.integers(1 << 24, 1 << 31, 200)
    numbers, is_rejected = streams.draw_integers(keys, high, 8)
    expected = np.stack([np.random.default_rng(k).integers(h, size=16) for k, h in zip(keys, high, strict=True)])
    np.testing.assert_array_equal((numbers == expected).all(axis=1), ~is_rejected)
    assert 20 < is_rejected.sum() < 180
