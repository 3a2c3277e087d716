"""Sparse matrices on a torch device equal those of scipy, bit for bit where only entries are moved."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from dbo.tasks.arrays import convert_arrays
from dbo.tasks.kernels import sparse_matrix

torch = pytest.importorskip("torch")


def make_matrix(rows: int = 30, columns: int = 50, seed: int = 0) -> sparse.csr_array:
    """Return a matrix with empty rows and empty columns."""
    dense = np.random.default_rng(seed).standard_normal((rows, columns))
    dense[np.abs(dense) < 1.5] = 0
    dense[3] = dense[:, 7] = 0
    return sparse.csr_array(dense)


def to_torch(matrix: sparse.csr_array) -> Any:
    return sparse_matrix.to_device(matrix, torch.asarray)


def to_dense(matrix: Any) -> Any:
    return (matrix @ torch.eye(matrix.shape[1], dtype=torch.float64)).numpy()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_product_is_that_of_scipy(dtype: str) -> None:
    """A @ w for a contiguous w and for a transposed view; empty rows give zeros."""
    a = make_matrix().astype(dtype)
    w = np.random.default_rng(1).standard_normal((50, 4)).astype(dtype)
    views = (torch.asarray(w), torch.asarray(np.ascontiguousarray(w.T)).T)
    for view in views:
        product = (to_torch(a) @ view).numpy()
        assert product.dtype == dtype
        np.testing.assert_allclose(product, a @ w, rtol=1e-5 if dtype == "float32" else 1e-13, atol=1e-6)
        assert not product[3].any()


def test_transposed_matrix_has_the_entries_of_scipy() -> None:
    """Same positions and values in the same order as scipy's conversion."""
    a = make_matrix()
    ours, theirs = sparse_matrix.transpose(to_torch(a)), sparse_matrix.transpose(a)
    for name in ("indptr", "indices", "data"):
        np.testing.assert_array_equal(getattr(ours, name).numpy(), getattr(theirs, name), err_msg=name)
    assert ours.shape == theirs.shape


@pytest.mark.parametrize("rows", [[0], [3], [5, 3, 5, 29], list(range(30)), []])
def test_taken_rows_are_those_of_scipy(rows: list[int]) -> None:
    """Any rows in any order, repeated and empty ones too; rows can be taken from the result again."""
    a, index = make_matrix(), np.array(rows, dtype=np.int64)
    taken = sparse_matrix.take_rows(to_torch(a), index)
    np.testing.assert_array_equal(to_dense(taken), a.toarray()[index])
    again = sparse_matrix.take_rows(taken, np.arange(len(rows))[::-1])
    np.testing.assert_array_equal(to_dense(again), a.toarray()[index[::-1]])


def test_transposed_batch_gives_the_gradient_of_the_batch() -> None:
    """The transposed matrix of some rows, as a mini-batch needs it."""
    a, index = make_matrix(), np.array([4, 9, 2])
    batch = sparse_matrix.transpose(sparse_matrix.take_rows(to_torch(a), index))
    np.testing.assert_array_equal(to_dense(batch), a.toarray()[index].T)


def test_transposed_matrix_refuses_to_be_cut() -> None:
    """Its row lengths are on the device only: reading them would make the host wait."""
    with pytest.raises(ValueError, match="does not know the lengths"):
        sparse_matrix.take_rows(sparse_matrix.transpose(to_torch(make_matrix())), np.array([0]))


def test_segment_sums_are_those_of_numpy() -> None:
    """Segments of different sizes, the last one up to the end."""
    v, starts = np.arange(10.0), np.array([0, 1, 5, 9])
    sums = sparse_matrix.sum_segments(v, starts)
    np.testing.assert_array_equal(sums, [0, 10, 26, 9])
    np.testing.assert_array_equal(sparse_matrix.sum_segments(torch.asarray(v), starts).numpy(), sums)


def test_unknown_class_with_a_sparse_matrix_is_refused() -> None:
    """A dataclass that holds a sparse matrix must define its own conversion: the error says so."""
    @dataclass(frozen=True)
    class Holds:
        features: Any

    with pytest.raises(ValueError, match="must define `to`"):
        convert_arrays(Holds(make_matrix()), torch.asarray)
