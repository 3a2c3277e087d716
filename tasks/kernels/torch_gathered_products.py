"""The operations of `gathered_products` on a torch device, with the same arguments: the rows of all nodes at once.

Positions are unique, so no result depends on the order in which threads finish. Nothing is read back to the host.
"""

from typing import Any

import torch


def multiply(rows: Any, at: Any, x: Any, first: int, least: float, out: Any, to: Any, start: int, stop: int) -> None:
    """Write a layer of a perceptron, max(rows[at[i]] · W_i + b_i, least), to out[to[i]], for nodes start ≤ i < stop."""
    weights = _weights(x, first, rows.shape[1], out.shape[1], start, stop)
    end = first + rows.shape[1] * out.shape[1]
    bias = x[start:stop, end : end + out.shape[1]].unsqueeze(1)
    out[to[start:stop]] = torch.baddbmm(bias, rows[at[start:stop]], weights).clamp(min=least)


def multiply_back(d: Any, at: Any, x: Any, first: int, out: Any, start: int, stop: int) -> None:
    """Write d[at[i]] W_iᵀ to out[at[i]], for nodes start ≤ i < stop; W_i is in x[i] from `first` on."""
    weights = _weights(x, first, out.shape[1], d.shape[1], start, stop)
    out[at[start:stop]] = d[at[start:stop]] @ weights.transpose(1, 2)


def multiply_transposed(rows: Any, at: Any, d: Any, out: Any, first: int, start: int, stop: int) -> None:
    """Write the gradient of a layer to out[i] from `first` on, for start ≤ i < stop: rows[at[i]]ᵀ d_i, then Σ d_i."""
    nodes, size = at.shape
    own, end = d.reshape(nodes, size, -1)[start:stop], first + rows.shape[1] * d.shape[1]
    out[start:stop, first:end] = (rows[at[start:stop]].transpose(1, 2) @ own).flatten(1)
    out[start:stop, end : end + d.shape[1]] = own.sum(dim=1)


def drop_inactive(d: Any, activations: Any, out: Any) -> None:
    """Write d where activations are positive, 0 elsewhere: the derivative of relu."""
    torch.mul(d, activations > 0, out=out)      # NaN stays


def _weights(x: Any, first: int, inputs: int, width: int, start: int, stop: int) -> Any:
    """Return W_i, (nodes, inputs, width), of the nodes in the range."""
    return x[start:stop, first : first + inputs * width].unflatten(1, (inputs, width))
