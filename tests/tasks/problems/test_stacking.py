"""Layouts: products over stacked nodes are the nodes' own products, whatever their sizes are."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dbo.tasks.problems.stacking import PADDING_LIMIT, layout


@given(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=15), seed=st.integers(0, 9))
def test_stacked_products_equal_the_nodes_own(sizes: list[int], seed: int) -> None:
    """times, pull, plus and total equal a loop over nodes; storage is at most three times what exists."""
    where = layout(sizes)
    assert where.samples <= PADDING_LIMIT * sum(sizes)
    rng = np.random.default_rng(seed)
    place = {}
    for group in where.groups:
        for k, node in enumerate(group.rows):
            place[node] = slice(group.start + k * group.size, group.start + (k + 1) * group.size)
    assert sorted(place) == list(range(len(sizes)))
    assert all(place[node].stop - place[node].start >= size for node, size in enumerate(sizes))
    left, right = rng.standard_normal((where.samples, 3)), rng.standard_normal((where.samples, 2))
    w, row = rng.standard_normal((len(sizes), 3, 2)), rng.standard_normal((len(sizes), 1, 3))
    times, pull, plus = where.times(left, w), where.pull(left, right), where.plus(left, row)
    total = where.total(right)
    for node, here in place.items():
        np.testing.assert_allclose(times[here], left[here] @ w[node], atol=1e-12)
        np.testing.assert_allclose(pull[node], left[here].T @ right[here], atol=1e-11)
        np.testing.assert_allclose(plus[here], left[here] + row[node], atol=1e-12)
        np.testing.assert_allclose(total[node], right[here].sum(axis=0), atol=1e-11)
