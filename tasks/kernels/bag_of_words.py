"""Loops of the sparse linear classifier, compiled by numba: one node at a time, each array of parameters read once.

A node's documents touch a part of the words only. Scores read just the rows of these words; gradients are built word by
word, so that the regulariser, which touches every word, and what the documents add are written in the same pass.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from dbo.tasks.api import Array


def _compiled(function: Callable[..., Any]) -> Any:
    """Cached on disk: beside this file, in the user's cache where that cannot be written, or else not at all."""
    try:
        return numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:
        return numba.njit(nogil=True, error_model="numpy")(function)


@_compiled
def scores(indptr: Array, indices: Array, data: Array, w: Array, out: Array) -> None:
    """out = A w, for A (documents, words) in CSR form and w (words, classes)."""
    for i in range(out.shape[0]):
        row = out[i]
        row[:] = 0
        for k in range(indptr[i], indptr[i + 1]):
            a, weights = data[k], w[indices[k]]
            for c in range(row.size):
                row[c] += a * weights[c]


@_compiled
def residual(s: Array, labels: Array, weight: float) -> None:
    """Scores become weight · (softmax − label)."""
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


@_compiled
def curvature(s: Array, v: Array, weight: float) -> None:
    """With p = softmax of the scores s, v becomes weight · p ∘ (v − ⟨p, v⟩)."""
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


@_compiled
def losses(s: Array, labels: Array) -> float:
    """The sum of the documents' cross-entropies."""
    total = 0.0
    for i in range(s.shape[0]):
        row = s[i]
        top = row.max()
        inner = row.dtype.type(0)
        for c in range(row.size):
            inner += np.exp(row[c] - top)
        total += np.log(inner) + top - row[labels[i]]
    return total


@_compiled
def pulled(indptr: Array, indices: Array, data: Array, r: Array, out: Array) -> None:
    """out = Aᵀ r, for Aᵀ (words, documents) in CSR form and r (documents, classes)."""
    for p in range(out.shape[0]):
        row = out[p]
        row[:] = 0
        for k in range(indptr[p], indptr[p + 1]):
            a, pull = data[k], r[indices[k]]
            for c in range(row.size):
                row[c] += a * pull[c]


@_compiled
def pulled_ridge(
    indptr: Array, indices: Array, data: Array, r: Array, ridge: Array, w: Array, out: Array
) -> None:
    """out = ridge ∘ w + Aᵀ r."""
    for p in range(out.shape[0]):
        row, own, factor = out[p], w[p], ridge[p]
        for c in range(row.size):
            row[c] = factor * own[c]
        for k in range(indptr[p], indptr[p + 1]):
            a, pull = data[k], r[indices[k]]
            for c in range(row.size):
                row[c] += a * pull[c]


@_compiled
def pulled_both(
    indptr: Array, indices: Array, data: Array, r: Array, ridge: Array, w: Array,
    indptr2: Array, indices2: Array, data2: Array, r2: Array, out: Array,
) -> None:
    """out = ridge ∘ w + Aᵀ r + Bᵀ r2."""
    for p in range(out.shape[0]):
        row, own, factor = out[p], w[p], ridge[p]
        for c in range(row.size):
            row[c] = factor * own[c]
        for k in range(indptr[p], indptr[p + 1]):
            a, pull = data[k], r[indices[k]]
            for c in range(row.size):
                row[c] += a * pull[c]
        for k in range(indptr2[p], indptr2[p + 1]):
            a, pull = data2[k], r2[indices2[k]]
            for c in range(row.size):
                row[c] += a * pull[c]


@_compiled
def products(w: Array, v: Array, factor: Array, out: Array) -> None:
    """out_p = factor_p Σ_c w_pc v_pc."""
    for p in range(out.size):
        a, b = w[p], v[p]
        total = out.dtype.type(0)
        for c in range(a.size):
            total += a[c] * b[c]
        out[p] = factor[p] * total
