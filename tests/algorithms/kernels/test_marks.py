"""Marks: the sums of gaps that give the length of a code."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.kernels import marks


def count_gaps(marked: Any, shift: int) -> int:
    """Return Σ (g >> shift), by the definition of a gap."""
    return int((np.diff(np.flatnonzero(marked), prepend=-1) - 1 >> shift).sum())


def pack(marked: Any) -> Any:
    return np.packbits(marked, bitorder="little").view(np.uint64)


def usable_kernels() -> list[Callable[[Any, int], int]]:
    def by_word(words: Any, shift: int) -> int:
        return int(marks._make_sum_gaps(shift)(words))

    every = [marks.sum_gaps, marks._sum_gaps_one_by_one]
    return [*every, by_word] if marks._can_extract() else every


@pytest.mark.parametrize("kernel", usable_kernels(), ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize("shift", range(7))
@pytest.mark.parametrize("density", [0.001, 0.02, 0.2, 0.5, 0.98])
def test_gaps_are_summed_exactly(kernel: Callable[[Any, int], int], shift: int, density: float) -> None:
    marked = np.random.default_rng(7).random(64 * 301) < density
    assert kernel(pack(marked), shift) == count_gaps(marked, shift)


@pytest.mark.parametrize("kernel", usable_kernels(), ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize("shift", range(7))
@pytest.mark.parametrize("places", [
    [], [0], [63], [64], [127], [0, 127], [62, 63, 64, 65], [1, 191], [*range(64)], [*range(64, 128)], [*range(192)],
])
def test_gaps_across_words(kernel: Callable[[Any, int], int], shift: int, places: list[int]) -> None:
    marked = np.zeros(192, dtype=np.bool_)
    marked[places] = True
    assert kernel(pack(marked), shift) == count_gaps(marked, shift)


def test_large_parameters_are_summed_one_by_one() -> None:
    marked = np.zeros(64 * 1000, dtype=np.bool_)
    marked[[5, 40_000, 63_999]] = True
    assert [marks.sum_gaps(pack(marked), shift) for shift in (7, 12)] == [count_gaps(marked, s) for s in (7, 12)]


@pytest.mark.parametrize(("processor", "features", "fast"), [
    ("znver4", {"+bmi2"}, True), ("znver2", {"+bmi2"}, False), ("nehalem", {"+sse2"}, False),
])
def test_bits_are_extracted_where_that_is_fast(
    processor: str, features: set[str], fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "find_processor", lambda: (processor, frozenset(features)))
    assert marks._can_extract.__wrapped__() is fast
