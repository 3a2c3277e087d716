"""Sparse matrices on a torch device. No result depends on the order in which threads finish.

The product is torch's `embedding_bag`: one thread adds the terms of an entry, in the order of storage. The products of
`torch.sparse` promise no order on a GPU, and `index_add` sorts the indices each time. Nothing here waits for the
device: all sizes are known from `host_indptr`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import embedding_bag

from dbo.tasks.arrays import Array


def multiply(indptr: Any, indices: Any, data: Any, dense: Any) -> Any:
    """Return (rows, k), the product of a matrix in CSR form and a dense (columns, k)."""
    return embedding_bag(
        indices, dense.contiguous(), indptr, mode="sum", per_sample_weights=data, include_last_offset=True)


@dataclass(frozen=True, slots=True, eq=False)
class TorchMatrix:
    """A matrix in CSR form, with the names of scipy."""

    indptr: Any                 # (rows + 1,) int64
    indices: Any                # (entries,) int64
    data: Any                   # (entries,)
    shape: tuple[int, int]
    host_indptr: Array | None = None    # `indptr` in the memory of the host; None: unknown, then `take_rows` is refused

    def __matmul__(self, dense: Any) -> Any:
        """Return (rows, k) for a dense (columns, k)."""
        return multiply(self.indptr, self.indices, self.data, dense)

    def take_rows(self, rows: Array) -> "TorchMatrix":
        """Return the rows with these numbers, in this order."""
        if self.host_indptr is None:
            raise ValueError("a transposed matrix cannot be cut: the host does not know the lengths of its rows")
        first = self.host_indptr[rows]
        indptr = np.concatenate([[0], np.cumsum(self.host_indptr[rows + 1] - first)])
        entries, device = int(indptr[-1]), self.data.device
        # Entry e of the result is entry e + shift of this matrix, with one shift per row.
        shift = torch.as_tensor(first - indptr[:-1], device=device)
        lengths = torch.as_tensor(np.diff(indptr), device=device)
        at = torch.arange(entries, device=device) + shift.repeat_interleave(lengths, output_size=entries)
        return TorchMatrix(
            torch.as_tensor(indptr, device=device), self.indices[at], self.data[at],
            (len(rows), self.shape[1]), indptr,
        )

    def transpose(self) -> "TorchMatrix":
        """Return the transposed matrix; the order of the entries in a row is that of this matrix's rows."""
        rows, columns = self.shape
        device = self.data.device
        column, order = self.indices.sort(stable=True)
        row = torch.arange(rows, device=device).repeat_interleave(self.indptr.diff(), output_size=len(order))
        indptr = torch.searchsorted(column, torch.arange(columns + 1, device=device))
        return TorchMatrix(indptr, row[order], self.data[order], (columns, rows))


def sum_segments(v: Any, sizes: Sequence[int]) -> Any:
    """Return the sums of consecutive segments of these sizes."""
    return torch.stack([segment.sum(dim=0) for segment in v.split(sizes)])
