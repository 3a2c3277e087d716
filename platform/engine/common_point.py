"""Evaluate a block's oracles at one common point of all nodes, in float64: what a solve of the lower level needs.

The task's rows are cut anew on the host and converted to float64, whatever the dtype and the device of the run. So the
algorithm's counters, batches and caches are not involved. A block with more data than
`MAX_BYTES` keeps the run's dtype.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dbo.algorithms.api import Array
from dbo.tasks.api import Problem
from dbo.tasks.api import Shard as TaskShard

Oracle: TypeAlias = Literal["f", "g", "f_x", "f_y", "g_y", "g_yy", "g_xy"]
Floats: TypeAlias = NDArray[np.float64]

MAX_BYTES = 1 << 30     # of the rows' data in float64


class CommonPoint:
    """The oracles of some rows of a problem, summed over these rows."""

    def __init__(self, problem: Problem, ids: Sequence[int]) -> None:
        shard = problem.shard(ids)
        self._shard: TaskShard = shard.in_double(MAX_BYTES) or shard
        self._nodes = len(ids)
        self._x: tuple[Array, Array] | None = None      # the last x, and its repetition per row

    def sum_oracle(self, oracle: Oracle, x: Array, y: Array, v: Array | None = None) -> Floats:
        """Return the sum over the rows of an oracle at (x, y), for products times v; all are (dim,)."""
        others = (y,) if v is None else (y, v)
        values: Array = getattr(self._shard, oracle)(self._repeat_x(x), *map(self._repeat, others))
        total: Floats = np.asarray(np.asarray(values).sum(axis=0, dtype=np.float64))
        return total

    def _repeat_x(self, x: Array) -> Array:
        """Repeat x, as the same array for the same values: tasks keep what depends on x alone for the last array."""
        if self._x is None or not np.array_equal(self._x[0], x):
            self._x = x, self._repeat(x)
        return self._x[1]

    def _repeat(self, row: Array) -> Array:
        return np.tile(row.astype(self._shard.y0.dtype), (self._nodes, 1))
