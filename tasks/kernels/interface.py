"""The operations on samples that have an implementation for NumPy arrays and one for torch tensors.

`sparse_matrix` chooses its implementation itself. tests/tasks/kernels/test_twins.py compares the implementations, and
fails for an operation that has one only.
"""

from typing import Any, Protocol

import numpy as np

from dbo.tasks.arrays import Array


class DocumentKernels(Protocol):
    """The loops of the sparse linear classifier, for one node; `bag_of_words` documents them."""

    def scores(self, indptr: Any, indices: Any, data: Any, w: Any, out: Any) -> None: ...
    def residual_in_place(self, s: Any, labels: Any, weight: float) -> None: ...
    def curvature_in_place(self, s: Any, v: Any, weight: float) -> None: ...
    def sum_losses(self, s: Any, labels: Any) -> Any: ...
    def gradient(self, indptr: Any, indices: Any, data: Any, r: Any, out: Any) -> None: ...
    def ridge_gradient(
        self, indptr: Any, indices: Any, data: Any, r: Any, ridge: Any, w: Any, out: Any) -> None: ...
    def weighted_gradient(
        self, indptr: Any, indices: Any, data: Any, r: Any, ridge: Any, w: Any,
        indptr2: Any, indices2: Any, data2: Any, r2: Any, out: Any) -> None: ...
    def row_products(self, w: Any, v: Any, factor: Any, out: Any) -> None: ...


class ProductKernels(Protocol):
    """The layers of a perceptron on mini-batches; `gathered_products` documents them."""

    def multiply(
        self, rows: Any, at: Any, x: Any, first: int, least: float, out: Any, to: Any, start: int, stop: int
    ) -> None: ...
    def multiply_back(self, d: Any, at: Any, x: Any, first: int, out: Any, start: int, stop: int) -> None: ...
    def multiply_transposed(
        self, rows: Any, at: Any, d: Any, out: Any, first: int, start: int, stop: int) -> None: ...
    def drop_inactive(self, d: Any, activations: Any, out: Any) -> None: ...


def documents_of(array: Array) -> DocumentKernels:
    """Return the implementation for arrays of this type; numba or torch is imported when needed, which is slow."""
    if isinstance(array, np.ndarray):
        from dbo.tasks.kernels import bag_of_words

        return bag_of_words
    from dbo.tasks.kernels import torch_bag_of_words

    return torch_bag_of_words


def products_of(array: Array) -> ProductKernels:
    """Return the implementation for arrays of this type; numba or torch is imported when needed, which is slow.

    That of NumPy is for some widths and processors: ask its `suits`, and call `compile_products` first.
    """
    if isinstance(array, np.ndarray):
        from dbo.tasks.kernels import gathered_products

        return gathered_products
    from dbo.tasks.kernels import torch_gathered_products

    return torch_gathered_products
