"""The operations on rows that have an implementation for NumPy arrays and one for torch tensors.

A family is a protocol and two modules, of which a function below chooses one by the type of an array. An operation that
is added to a protocol needs both implementations. tests/algorithms/kernels/test_twins.py compares them, and fails for
an operation that has one only.
"""

from typing import Any, Protocol

import numpy as np

from dbo.algorithms.protocol import Array


class SelectionKernels(Protocol):
    """Choose and quantize the entries of a message."""

    def keep_largest(self, rows: Any, k: int) -> Any:
        """Keep each row's k largest entries by magnitude, NaN first, the first of equal ones; set the others to 0.0."""

    def quantize_rows(self, rows: Any, bits: int, log: bool) -> tuple[Any, Any, Any]:
        """Return the nonzero entries of each row at their levels, with scales and spans."""

    def round_scale(self, largest: Any, kept_bits: int) -> Any:
        """Round magnitudes up to floats whose bits after the first ones are 0; NaN where one is not finite."""

    def level_tables(self, scale: Any, span: Any, bits: int, log: bool) -> Any:
        """Return (rows, 2^(bits−1)) magnitudes that the levels of each row stand for, ascending, in float64."""


class SumKernels(Protocol):
    """Evaluate sums of wide rows."""

    def evaluate(self, shape: tuple[int, int], dtype: Any, terms: Any) -> Any:
        """Return Σ c a over the terms (c, a), in float64 and rounded once."""

    def all_finite(self, rows: Any) -> Any:
        """Decide whether rows hold neither NaN nor inf; on a device the answer stays there."""


class MarkKernels(Protocol):
    """Work on marks, 64 to a word: where the values of a sparse row are."""

    def find_positions(self, words: Any, out: Any) -> None:
        """Write the positions of the marks to `out`."""

    def sum_gaps(self, words: Any, shift: int) -> Any:
        """Return Σ (g >> shift) over the gaps in front of the marks."""

    def encode_gaps(self, words: Any, shift: int, unary: Any, lowest: Any) -> None:
        """Write the two streams of the Rice code into words of zeros."""

    def decode_gaps(self, unary: Any, lowest: Any, shift: int, dim: int, words: Any) -> Any:
        """Set the marks that the two streams describe; return their number, or −1 if one is not below dim."""


def selection_of(array: Array) -> SelectionKernels:
    """Return the implementation for arrays of this type; torch is imported when needed, which is slow."""
    if isinstance(array, np.ndarray):
        from dbo.algorithms.kernels import host_selection

        return host_selection
    from dbo.algorithms.kernels import torch_selection

    return torch_selection


def sums_of(array: Array) -> SumKernels:
    """Return the implementation for arrays of this type; numba or torch is imported when needed, which is slow."""
    if isinstance(array, np.ndarray):
        from dbo.algorithms.kernels import host_sums

        return host_sums
    from dbo.algorithms.kernels import torch_sums

    return torch_sums


def marks_of(words: Array) -> MarkKernels:
    """Return the implementation for arrays of this type; numba or torch is imported when needed, which is slow."""
    if isinstance(words, np.ndarray):
        from dbo.algorithms.kernels import marks

        return marks
    from dbo.algorithms.kernels import torch_marks

    return torch_marks
