"""Layouts: products over stacked nodes equal the products of each node, for all sizes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dbo.tasks.problems.stacking import PADDING_LIMIT, Layout


@given(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=15), seed=st.integers(0, 9))
def test_stacked_products_equal_the_nodes_own(sizes: list[int], seed: int) -> None:
    """Every product equals a loop over nodes; padding at most triples the storage."""
    layout = Layout.from_sizes(sizes)
    assert layout.samples <= PADDING_LIMIT * sum(sizes)
    rng = np.random.default_rng(seed)
    samples = {}
    for group in layout.groups:
        for k, node in enumerate(group.rows):
            samples[node] = slice(group.start + k * group.size, group.start + (k + 1) * group.size)
    assert sorted(samples) == list(range(len(sizes)))
    assert all(samples[node].stop - samples[node].start >= size for node, size in enumerate(sizes))
    left, right = rng.standard_normal((layout.samples, 3)), rng.standard_normal((layout.samples, 2))
    w, row = rng.standard_normal((len(sizes), 3, 2)), rng.standard_normal((len(sizes), 1, 3))
    product, transposed = layout.matmul(left, w), layout.matmul_transposed(left, right)
    shifted, sums = left.copy(), layout.sum_samples(right)
    layout.add_rows_to(shifted, row)
    written = np.full((len(sizes), 9), np.nan)[:, 1:7].reshape(-1, 3, 2)      # as a part of a longer row
    layout.matmul_transposed(left, right, out=written)
    np.testing.assert_array_equal(written, transposed)
    for node, here in samples.items():
        np.testing.assert_allclose(product[here], left[here] @ w[node], atol=1e-12)
        np.testing.assert_allclose(transposed[node], left[here].T @ right[here], atol=1e-11)
        np.testing.assert_allclose(shifted[here], left[here] + row[node], atol=1e-12)
        np.testing.assert_allclose(sums[node], right[here].sum(axis=0), atol=1e-11)
