"""Evaluate a block's oracles at one common point of all nodes, in float64: what a solve of the lower level needs.

The task's rows are cut anew on the host and converted to float64, whatever the dtype and the device of the run. So the
algorithm's counters, batches and caches are not involved. A block with more data than
`MAX_BYTES` keeps the run's dtype. Wide rows are evaluated a few at a time: all results together would take as much
memory as the run itself.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dbo.algorithms.api import Array
from dbo.tasks.api import Problem
from dbo.tasks.api import Shard as TaskShard

Oracle: TypeAlias = Literal["f", "g", "f_x", "f_y", "g_y", "g_yy", "g_xy"]
Floats: TypeAlias = NDArray[np.float64]

MAX_BYTES = 1 << 30     # of the rows' data in float64
MAX_ENTRIES = 1 << 22   # of y of the rows that are evaluated at once


class CommonPoint:
    """The oracles of some rows of a problem, summed over these rows."""

    def __init__(self, problem: Problem, ids: Sequence[int]) -> None:
        step = max(1, MAX_ENTRIES // max(1, problem.dim_y))
        parts = [ids[start : start + step] for start in range(0, len(ids), step)]
        self._shards = _convert(problem, parts) or [problem.shard(part) for part in parts]
        self._dtype = self._shards[0].y0.dtype
        self._x: tuple[Array, list[Array]] | None = None      # the last x, and its repetition per row, of each shard

    def sum_oracle(self, oracle: Oracle, x: Array, y: Array, v: Array | None = None) -> Floats:
        """Return the sum over the rows of an oracle at (x, y), for products times v; all are (dim,)."""
        others = [row.astype(self._dtype, copy=False) for row in ((y,) if v is None else (y, v))]
        parts = (
            np.asarray(getattr(shard, oracle)(repeated, *(_repeat(row, shard.nodes) for row in others)))
            for shard, repeated in zip(self._shards, self._repeat_x(x), strict=True)
        )
        # In the order in which NumPy adds all rows: a solve that ends before it has converged depends on every bit.
        if oracle in ("f", "g"):
            return np.asarray(np.concatenate([*parts]).sum(dtype=np.float64))
        total: Floats = next(parts).sum(axis=0, dtype=np.float64)
        for row in chain.from_iterable(parts):
            total += row
        return total

    def _repeat_x(self, x: Array) -> list[Array]:
        """Repeat x, as the same arrays for the same values: tasks keep what depends on x alone for the last array."""
        if self._x is None or not np.array_equal(self._x[0], x):
            row = x.astype(self._dtype)
            self._x = x, [_repeat(row, shard.nodes) for shard in self._shards]
        return self._x[1]


def _convert(problem: Problem, parts: Sequence[Sequence[int]]) -> list[TaskShard] | None:
    """Return the shards in float64; None if one of them has more than its share of `MAX_BYTES`."""
    shards = []
    for part in parts:
        shard = problem.shard(part).in_double(MAX_BYTES // len(parts))
        if shard is None:
            return None
        shards.append(shard)
    return shards


def _repeat(row: Array, rows: int) -> Array:
    """Return rows that share their memory; nobody writes into them."""
    return np.broadcast_to(row, (rows, row.size))
