"""Compute the errors that an algorithm's analysis bounds, block by block: consensus and compression errors.

A block reports the mean of its rows and their squared distances to it; both merge exactly, so no row leaves its block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbo.algorithms.api import Array, ErrorTerms

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BlockErrors:
    """The error terms of one block."""

    rows: int
    means: dict[str, Floats]            # consensus: the mean of the block's rows …
    spreads: dict[str, float]           # … and the sum of their squared distances to it
    residuals: dict[str, float]         # compression: the sum of squares


NO_ERRORS = BlockErrors(0, {}, {}, {})


def measure_errors(terms: ErrorTerms, state: Any, rows: int, fetch: Callable[[Array], Array]) -> BlockErrors:
    """Return the error terms of a block's state."""
    means, spreads = {}, {}
    for name, array in terms.consensus(state).items():
        values = fetch(array)
        means[name] = values.mean(axis=0, dtype=np.float64)
        spreads[name] = _sum_squares(values, [means[name]] * rows)
    residuals = {
        name: _sum_squares(fetch(array), fetch(copy)) for name, (array, copy) in terms.compression(state).items()
    }
    return BlockErrors(rows, means, spreads, residuals)


def merge_errors(blocks: Sequence[BlockErrors]) -> dict[str, float]:
    """Return each error as a metric: the root mean square over all nodes."""
    nodes = sum(block.rows for block in blocks)
    sums = {f"consensus_{name}": _merge_spread(blocks, name) for name in blocks[0].means}
    sums |= {f"compression_{name}": sum(block.residuals[name] for block in blocks) for name in blocks[0].residuals}
    return {name: float(np.sqrt(total / nodes)) for name, total in sums.items()}


def _merge_spread(blocks: Sequence[BlockErrors], name: str) -> float:
    """Return the sum of squared distances to the mean over all nodes (Chan, Golub, LeVeque 1983)."""
    weights = [float(block.rows) for block in blocks]
    means = [block.means[name] for block in blocks]
    mean = np.average(np.stack(means), axis=0, weights=weights) if len(means) > 1 else means[0]
    between = sum(w * float(np.sum((own - mean) ** 2)) for w, own in zip(weights, means, strict=True))
    return between + sum(block.spreads[name] for block in blocks)


def _sum_squares(rows: Array, others: Sequence[Array] | Array) -> float:
    """Return Σ_i ‖rows_i − others_i‖² in float64, a row at a time, since rows can be long."""
    return sum(
        float(np.sum((row.astype(np.float64) - other) ** 2)) for row, other in zip(rows, others, strict=True)
    )

