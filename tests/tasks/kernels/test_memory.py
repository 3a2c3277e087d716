"""A remembered array is recognised while its content is the same, and never afterwards."""

import numpy as np
import pytest

from dbo.tasks.kernels.memory import remember

torch = pytest.importorskip("torch")


def test_written_buffer_is_another_content() -> None:
    """Writing into the array, or into the memory that a view shares, is noticed: NumPy and torch."""
    x = np.zeros((2, 3))
    kept = remember(x)
    assert kept.matches(np.zeros((2, 3)))
    x += 1
    assert not kept.matches(x)
    t = torch.zeros(2, 3)
    kept = remember(t)
    assert kept.matches(t)
    t[0].add_(1)
    assert not kept.matches(t)


def test_views_of_one_tensor_are_recognised() -> None:
    """A row that is broadcast anew for each oracle call is the same content, until the row changes."""
    row = torch.ones(1, 3)
    kept = remember(row.expand(4, 3))
    assert kept.matches(row.expand(4, 3))
    assert not kept.matches(row.expand(5, 3))
    row.mul_(2)
    assert not kept.matches(row.expand(4, 3))


def test_freed_memory_is_not_mistaken() -> None:
    """A new tensor never has the memory of the remembered one, which is kept alive."""
    kept = remember(torch.ones(1000))
    assert not any(kept.matches(torch.ones(1000)) for _ in range(100))
