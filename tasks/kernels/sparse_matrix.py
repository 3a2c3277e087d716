"""Sparse matrices in CSR form, on the host (scipy) and on a torch device: the products and cuts that oracles need.

Both support `matrix @ dense`. The functions below choose the implementation by the type of their argument.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from scipy import sparse

from dbo.tasks.arrays import Array, DoubleCast

if TYPE_CHECKING:
    from dbo.tasks.kernels.torch_sparse import TorchMatrix

SparseMatrix: TypeAlias = "sparse.csr_array | TorchMatrix"


def to_device(matrix: SparseMatrix, asarray: Callable[[Array], Any]) -> SparseMatrix:
    """Copy a matrix to the torch device that `asarray` copies arrays to, or to float64 on the host.

    One that is on a device stays there.
    """
    if not isinstance(matrix, sparse.csr_array):
        return matrix
    if isinstance(asarray, DoubleCast):
        return sparse.csr_array((asarray(matrix.data), matrix.indices, matrix.indptr), shape=matrix.shape)
    from dbo.tasks.kernels.torch_sparse import TorchMatrix  # imports torch, which is slow

    indptr = matrix.indptr.astype(np.int64)
    return TorchMatrix(
        indptr=asarray(indptr), indices=asarray(matrix.indices.astype(np.int64)), data=asarray(matrix.data),
        shape=(int(matrix.shape[0]), int(matrix.shape[1])), host_indptr=indptr,
    )


def take_rows(matrix: SparseMatrix, rows: Array) -> SparseMatrix:
    """Return the rows with these numbers (an array of the host), in this order."""
    return sparse.csr_array(matrix[rows]) if isinstance(matrix, sparse.csr_array) else matrix.take_rows(rows)


def transpose(matrix: SparseMatrix) -> SparseMatrix:
    """Return the transposed matrix, in CSR form too: its products then write their rows in order."""
    return sparse.csr_array(matrix.T) if isinstance(matrix, sparse.csr_array) else matrix.transpose()


def sum_segments(v: Array, starts: Array) -> Array:
    """Return the sums of v[starts[0]:starts[1]], …, v[starts[-1]:]; `starts` (on the host) ascends and begins at 0."""
    if isinstance(v, np.ndarray):
        sums: Array = np.add.reduceat(v, starts)
        return sums
    from dbo.tasks.kernels import torch_sparse

    summed: Array = torch_sparse.sum_segments(v, np.diff(starts, append=len(v)).tolist())
    return summed
