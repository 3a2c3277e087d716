"""Rice codes of positions: exact lengths, the same bytes from both implementations, and damage that is found."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo.algorithms.api import MANY_WORDS, PackedRow
from dbo.platform.network import positions as coder
from dbo.platform.network.row_format import CorruptError

POSITIONS = st.integers(1, 3000).flatmap(
    lambda dim: st.tuples(st.just(dim), st.sets(st.integers(0, dim - 1), max_size=min(dim, 200)))
)


def expected_bits(count: int, dim: int, shift: int) -> float:
    """Return the expected length of the code of a random gap."""
    return shift + 1 / (1 - (1 - count / dim) ** (2**shift))


@given(POSITIONS)
def test_decoding_reverses_encoding(case: tuple[int, set[int]]) -> None:
    """Any positions; the length is known before."""
    dim, chosen = case
    at = np.array(sorted(chosen), dtype=np.int64)
    code = coder.encode_positions(at, dim)
    first, second = coder.code_length(memoryview(code), at.size, dim)
    assert first == coder.unary_bytes(at, dim)
    assert first + second == len(code)
    np.testing.assert_array_equal(coder.decode_positions(memoryview(code + b"xyz"), at.size, dim), at)


@pytest.mark.parametrize("dim", [10, 1000, 2_032_620])
def test_the_parameter_is_the_best(dim: int) -> None:
    """No other parameter gives a shorter expected code."""
    for count in {max(1, int(dim * share)) for share in (1e-5, 1e-3, 0.01, 0.05, 0.2, 0.38, 0.39, 0.6)}:
        lengths = [expected_bits(count, dim, shift) for shift in range(24)]
        assert lengths[coder.rice_parameter(count, dim)] == pytest.approx(min(lengths), rel=1e-6)


@pytest.mark.parametrize("count", [0, 1, 7, 2000, 20_000, 70_000])
def test_kernels_write_the_same_bytes(count: int) -> None:
    """Wide rows of marks: lengths, bytes and positions are those of the NumPy form."""
    dim = 64 * MANY_WORDS + 5
    row = np.zeros(dim)
    row[np.random.default_rng(count).permutation(dim)[:count]] = 1
    packed, at = PackedRow.of(row), np.flatnonzero(row)
    np.testing.assert_array_equal(packed.positions(dim), at)
    code = coder.encode_positions(at, dim)
    unary = coder.unary_bytes_packed(packed, dim)
    assert unary == coder.unary_bytes(at, dim)
    assert b"".join(coder.encode_packed(packed, dim, unary)) == code
    if count:
        np.testing.assert_array_equal(coder.decode_words(memoryview(code), len(at), dim)[0], packed.words)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40), st.integers(0, 2**32 - 1) | st.integers(0, 60), st.integers(1, 2**32 - 1))
def test_fuzz_any_bytes(data: bytes, count: int, dim: int) -> None:
    """Any bytes, count and dimension: positions that ascend below dim, or CorruptError."""
    count = min(count, dim)
    if coder.rice_parameter(count, dim) * count > 8 * len(data) + 8:      # `body_length` refuses it before
        return
    try:
        first, second = coder.code_length(memoryview(data), count, dim)
        if first + second > len(data):
            return
        at: Any = coder.decode_positions(memoryview(data), count, dim)
    except CorruptError:
        return
    assert len(at) == count
    assert np.all(np.diff(at) > 0)
    assert count == 0 or (at[0] >= 0 and at[-1] < dim)
