"""The operations of `bag_of_words` on a torch device: one node at a time, with the same arguments.

No result depends on the order in which threads finish: one thread adds the terms of an entry, in the order of storage.
Nothing is read back to the host.
"""

from typing import Any

import torch

from dbo.tasks.kernels.torch_sparse import multiply


def scores(indptr: Any, indices: Any, data: Any, w: Any, out: Any) -> None:
    """out = A w, for A (documents, words) in CSR form and w (words, classes)."""
    out.copy_(multiply(indptr, indices, data, w))


def residual_in_place(s: Any, labels: Any, weight: float) -> None:
    """Replace scores by weight · (softmax − label)."""
    total = _exponentials_in_place(s)
    s.mul_(weight / total)
    s.sub_(_is_label(s, labels).to(s.dtype), alpha=weight)


def curvature_in_place(s: Any, v: Any, weight: float) -> None:
    """Replace v by weight · p ∘ (v − ⟨p, v⟩), p the softmax of the scores s; s is overwritten."""
    total = _exponentials_in_place(s)
    v.sub_((s * v).sum(dim=1, keepdim=True) / total)
    v.mul_(s).mul_(weight / total)


def sum_losses(s: Any, labels: Any) -> Any:
    """Return the sum of the documents' cross-entropies, a tensor of one number in float64."""
    top = s.amax(dim=1)
    at_label = torch.where(_is_label(s, labels), s, 0.0).sum(dim=1)
    losses = (s - top[:, None]).exp().sum(dim=1).log() + top - at_label
    return losses.sum(dtype=torch.float64)


def gradient(indptr: Any, indices: Any, data: Any, r: Any, out: Any) -> None:
    """out = Aᵀ r, for Aᵀ (words, documents) in CSR form and r (documents, classes)."""
    out.copy_(multiply(indptr, indices, data, r))


def ridge_gradient(indptr: Any, indices: Any, data: Any, r: Any, ridge: Any, w: Any, out: Any) -> None:
    """out = ridge ∘ w + Aᵀ r."""
    torch.mul(ridge[:, None], w, out=out)
    out.add_(multiply(indptr, indices, data, r))


def weighted_gradient(
    indptr: Any, indices: Any, data: Any, r: Any, ridge: Any, w: Any,
    indptr2: Any, indices2: Any, data2: Any, r2: Any, out: Any,
) -> None:
    """out = ridge ∘ w + Aᵀ r + Bᵀ r2."""
    ridge_gradient(indptr, indices, data, r, ridge, w, out)
    out.add_(multiply(indptr2, indices2, data2, r2))


def row_products(w: Any, v: Any, factor: Any, out: Any) -> None:
    """out_p = factor_p Σ_c w_pc v_pc."""
    torch.mul(factor, (w * v).sum(dim=1), out=out)


def _exponentials_in_place(s: Any) -> Any:
    """Replace scores by numbers proportional to their softmax; return the sums, (documents, 1)."""
    s.sub_(s.amax(dim=1, keepdim=True)).exp_()
    return s.sum(dim=1, keepdim=True)


def _is_label(s: Any, labels: Any) -> Any:
    return labels[:, None] == torch.arange(s.shape[1], device=s.device)
