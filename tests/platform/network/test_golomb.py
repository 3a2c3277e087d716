"""Codes of wide quantized rows: Exp-Golomb codes of gaps, and numbers of sets. Lengths, round trips, damage."""

from math import comb
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.platform.network.rows import cluster_rows

from dbo.algorithms.api import PackedRow
from dbo.platform.network import enumeration, golomb
from dbo.platform.network.row_format import ORDERS, CorruptError

DIM = 70_001
SETS = st.sets(st.integers(0, DIM - 1) | st.integers(0, 300), min_size=1, max_size=300)


def pack(chosen: Any, dim: int = DIM) -> PackedRow:
    row = np.zeros(dim, np.float32)
    row[np.array(sorted(chosen))] = 1
    return PackedRow.of(row)


def write_code(gaps: Any, order: int) -> bytes:
    """Write the code bit by bit, as its definition says."""
    digits = [((int(gap) >> order) + 1).bit_length() - 1 for gap in gaps]
    unary = [bit for n in digits for bit in [0] * n + [1]]
    lowest = [
        (int(gap) - ((1 << n) - 1 << order)) >> bit & 1
        for gap, n in zip(gaps, digits, strict=True) for bit in range(n + order)
    ]
    return b"".join(np.packbits(np.array(bits, bool), bitorder="little").tobytes() for bits in (unary, lowest))


@settings(max_examples=60, deadline=None)
@given(SETS, st.integers(0, ORDERS - 1))
def test_the_code_is_the_defined_one_and_is_decoded(chosen: set[int], order: int) -> None:
    """Bytes are those of the definition; decoding gives the marks back, also with other bytes behind the code."""
    row = pack(chosen)
    expected = write_code(np.diff(np.array(sorted(chosen)), prepend=-1) - 1, order)
    code = b"".join(golomb.encode_golomb(row.words, row.entries.size, order, len(expected)))
    assert code == expected
    assert sum(golomb.golomb_parts(memoryview(code), len(chosen), order)) == len(code)
    words, length = golomb.decode_golomb(memoryview(code + b"xyz"), len(chosen), DIM, order)
    assert length == len(code)
    np.testing.assert_array_equal(words, row.words)


@pytest.mark.parametrize("count", [1, 30, 2000, 60_000])
def test_the_measured_order_is_the_best_one(count: int) -> None:
    """The length is known without encoding, and no other order gives a shorter code, with short and with long gaps."""
    values = cluster_rows(1, DIM, seed=count)[0]
    row = pack(np.argsort(-np.abs(values))[:count])
    lengths = [
        len(b"".join(golomb.encode_golomb(row.words, count, order, 20 * count + 64))) for order in range(ORDERS)
    ]
    assert golomb.measure_golomb(row) == (min(lengths), int(np.argmin(lengths)))


def test_clusters_are_shorter_than_independent_positions() -> None:
    """Where values cluster the code takes less than log₂ C(d, k) bits, which is the bound for positions anywhere."""
    values = cluster_rows(1, DIM)[0]
    row = pack(np.argsort(-np.abs(values))[:3500])
    assert golomb.measure_golomb(row)[0] < 0.9 * comb(DIM, 3500).bit_length() / 8


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.integers(1, 400), st.integers(0, ORDERS - 1), st.integers(65_536, 2**24))
def test_fuzz_any_bytes(data: bytes, count: int, order: int, dim: int) -> None:
    """Any bytes: as many ascending marks below dim as announced, or CorruptError."""
    try:
        if sum(golomb.golomb_parts(memoryview(data), count, order)) > len(data):
            return
        at = golomb.decode_golomb_positions(memoryview(data), count, dim, order)
    except CorruptError:
        return
    assert len(at) == count
    assert np.all(np.diff(at) > 0)
    assert at[0] >= 0
    assert at[-1] < dim


@settings(max_examples=100, deadline=None)
@given(st.integers(1, enumeration.MAX_DIM).flatmap(lambda dim: st.tuples(
    st.just(dim), st.sets(st.integers(0, dim - 1) | st.just(dim - 1), min_size=1, max_size=enumeration.MAX_COUNT))))
def test_numbers_of_sets_are_decoded(case: tuple[int, set[int]]) -> None:
    """Any set of positions has a number of the announced length."""
    dim, chosen = case
    at = np.array(sorted(chosen))
    code = enumeration.encode_enumerated(at, dim)
    assert len(code) == enumeration.enumerated_length(len(at), dim)
    np.testing.assert_array_equal(enumeration.decode_enumerated(memoryview(code + b"z"), len(at), dim), at)


@pytest.mark.parametrize(("count", "dim"), [(1, 1), (2, 5), (3, 9), (9, 9)])
def test_every_number_is_a_set(count: int, dim: int) -> None:
    """The numbers below C(d, k) are all sets; the next one is refused."""
    found = set()
    length = enumeration.enumerated_length(count, dim)
    for number in range(comb(dim, count)):
        body = memoryview(number.to_bytes(length, "little"))
        at = enumeration.decode_enumerated(body, count, dim)
        assert enumeration.encode_enumerated(at, dim) == bytes(body)
        found.add(tuple(at.tolist()))
    assert len(found) == comb(dim, count)
    with pytest.raises(CorruptError, match="have this number"):
        enumeration.decode_enumerated(memoryview(comb(dim, count).to_bytes(length, "little")), count, dim)


@pytest.mark.parametrize(("count", "dim"), [(0, 10), (257, 100_000), (2**32 - 1, 2**32 - 1), (3, 2**24 + 1)])
def test_many_positions_are_not_enumerated(count: int, dim: int) -> None:
    """Their numbers would take long: a forged record cannot request one."""
    assert enumeration.enumerated_length(count, dim) == 0
