"""Evaluate linear combinations of rows that are torch tensors: in float64, rounded once, the same on every device.

A range of columns at a time: their float64 sums stay in the device's cache, so each operand is read from memory once.
A result never replaces an operand: torch does not tell whether another tensor or a NumPy array shares its storage. The
memory of operands that nothing refers to any more returns to torch's allocator after each sum.
"""

from collections.abc import Sequence
from typing import Any

import torch

_COLUMNS = 1 << 16


def evaluate(shape: tuple[int, int], dtype: Any, terms: Sequence[tuple[float, Any]]) -> Any:
    """Return Σ c a over the terms (c, a), one at least, as a new tensor."""
    out = torch.empty(shape, dtype=dtype, device=terms[0][1].device)
    for start in range(0, shape[1], _COLUMNS):
        at = slice(start, start + _COLUMNS)
        total = torch.zeros_like(out[:, at], dtype=torch.float64)
        for c, a in terms:
            total.add_(a[:, at], alpha=c)
        out[:, at] = total
    return out


def all_finite(rows: Any) -> Any:
    """Decide whether rows hold neither NaN nor inf; the answer is a tensor, which nobody need wait for."""
    return rows.isfinite().all()
