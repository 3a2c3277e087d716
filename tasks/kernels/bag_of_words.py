"""Compile the loops of the sparse linear classifier with numba: one node at a time, each parameter array read once.

A node's documents contain a part of the words only. Scores read just the rows of these words. Gradients are built word
by word, so that one pass writes both the regulariser, which covers every word, and the contribution of the documents.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from dbo.tasks.arrays import Array


def _compile(function: Callable[..., Any]) -> Any:
    """Compile with a cache on disk, in the user's cache folder if this one is read-only, else without a cache."""
    try:
        return numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:
        return numba.njit(nogil=True, error_model="numpy")(function)


@_compile
def scores(indptr: Array, indices: Array, data: Array, w: Array, out: Array) -> None:
    """out = A w, for A (documents, words) in CSR form and w (words, classes)."""
    for i in range(out.shape[0]):
        row = out[i]
        row[:] = 0
        for k in range(indptr[i], indptr[i + 1]):
            a, weights = data[k], w[indices[k]]
            for c in range(row.size):
                row[c] += a * weights[c]


@_compile
def residual_in_place(s: Array, labels: Array, weight: float) -> None:
    """Replace scores by weight · (softmax − label)."""
    for i in range(s.shape[0]):
        row = s[i]
        top = row.max()
        total = row.dtype.type(0)
        for c in range(row.size):
            row[c] = np.exp(row[c] - top)
            total += row[c]
        factor = weight / total
        for c in range(row.size):
            row[c] *= factor
        row[labels[i]] -= weight


@_compile
def curvature_in_place(s: Array, v: Array, weight: float) -> None:
    """Replace v by weight · p ∘ (v − ⟨p, v⟩), p the softmax of the scores s; s is overwritten."""
    for i in range(s.shape[0]):
        row, u = s[i], v[i]
        top = row.max()
        total, inner = row.dtype.type(0), row.dtype.type(0)
        for c in range(row.size):
            row[c] = np.exp(row[c] - top)
            total += row[c]
            inner += row[c] * u[c]
        inner /= total
        factor = weight / total
        for c in range(row.size):
            u[c] = factor * row[c] * (u[c] - inner)


@_compile
def sum_losses(s: Array, labels: Array) -> float:
    """Return the sum of the documents' cross-entropies."""
    total = 0.0
    for i in range(s.shape[0]):
        row = s[i]
        top = row.max()
        inner = row.dtype.type(0)
        for c in range(row.size):
            inner += np.exp(row[c] - top)
        total += np.log(inner) + top - row[labels[i]]
    return total


@_compile
def gradient(indptr: Array, indices: Array, data: Array, r: Array, out: Array) -> None:
    """out = Aᵀ r, for Aᵀ (words, documents) in CSR form and r (documents, classes)."""
    for p in range(out.shape[0]):
        row = out[p]
        row[:] = 0
        for k in range(indptr[p], indptr[p + 1]):
            a, residual = data[k], r[indices[k]]
            for c in range(row.size):
                row[c] += a * residual[c]


@_compile
def ridge_gradient(
    indptr: Array, indices: Array, data: Array, r: Array, ridge: Array, w: Array, out: Array
) -> None:
    """out = ridge ∘ w + Aᵀ r."""
    for p in range(out.shape[0]):
        row, own, factor = out[p], w[p], ridge[p]
        for c in range(row.size):
            row[c] = factor * own[c]
        for k in range(indptr[p], indptr[p + 1]):
            a, residual = data[k], r[indices[k]]
            for c in range(row.size):
                row[c] += a * residual[c]


@_compile
def weighted_gradient(
    indptr: Array, indices: Array, data: Array, r: Array, ridge: Array, w: Array,
    indptr2: Array, indices2: Array, data2: Array, r2: Array, out: Array,
) -> None:
    """out = ridge ∘ w + Aᵀ r + Bᵀ r2."""
    for p in range(out.shape[0]):
        row, own, factor = out[p], w[p], ridge[p]
        for c in range(row.size):
            row[c] = factor * own[c]
        for k in range(indptr[p], indptr[p + 1]):
            a, residual = data[k], r[indices[k]]
            for c in range(row.size):
                row[c] += a * residual[c]
        for k in range(indptr2[p], indptr2[p + 1]):
            a, residual = data2[k], r2[indices2[k]]
            for c in range(row.size):
                row[c] += a * residual[c]


@_compile
def row_products(w: Array, v: Array, factor: Array, out: Array) -> None:
    """out_p = factor_p Σ_c w_pc v_pc."""
    for p in range(out.size):
        a, b = w[p], v[p]
        total = out.dtype.type(0)
        for c in range(a.size):
            total += a[c] * b[c]
        out[p] = factor[p] * total
