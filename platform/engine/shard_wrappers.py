"""Wrap shards and problems: count oracle calls, pool the data of all nodes, keep x at its start."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from dbo.algorithms.api import Array, Shard, WeightedGradient
from dbo.tasks.api import Problem
from dbo.tasks.api import Shard as TaskShard

COUNTERS = ("gradient_calls", "hvp_calls", "jvp_calls")
_GRADIENTS, _HVPS, _JVPS = range(len(COUNTERS))


class CountingShard:
    """Count the oracle calls of each row: partial gradients, Hessian- and Jacobian-vector products."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.nodes, self.dim_x, self.dim_y = shard.nodes, shard.dim_x, shard.dim_y
        self.ids, self.seed, self.x0, self.y0 = shard.ids, shard.seed, shard.x0, shard.y0
        self.f, self.g = shard.f, shard.g
        self.h_y = None if shard.h_y is None else self._count_weighted_gradients(shard.h_y)
        self.calls: NDArray[np.int64] = np.zeros((len(COUNTERS), shard.nodes), dtype=np.int64)

    def __getattr__(self, name: str) -> NoReturn:
        known = "nodes, dim_x, dim_y, ids, seed, x0, y0, f, g, f_x, f_y, g_x, g_y, g_yy, g_xy, h_y"
        raise AttributeError(f"a shard has no {name!r}; it has {known}", name=name, obj=self)

    def counters(self) -> dict[str, int]:
        """Return the maximum over the rows; they differ only where an algorithm samples its number of calls."""
        return {name: int(calls.max()) for name, calls in zip(COUNTERS, self.calls, strict=True)}

    def _count_weighted_gradients(self, h_y: WeightedGradient) -> WeightedGradient:
        def counted(x: Array, y: Array, f_weight: float, g_weight: float) -> Array:
            self.calls[_GRADIENTS] += 2      # ∇_y f and ∇_y g
            return h_y(x, y, f_weight, g_weight)

        return counted

    def f_x(self, x: Array, y: Array) -> Array:
        self.calls[_GRADIENTS] += 1
        return self.shard.f_x(x, y)

    def f_y(self, x: Array, y: Array) -> Array:
        self.calls[_GRADIENTS] += 1
        return self.shard.f_y(x, y)

    def g_x(self, x: Array, y: Array) -> Array:
        self.calls[_GRADIENTS] += 1
        return self.shard.g_x(x, y)

    def g_y(self, x: Array, y: Array) -> Array:
        self.calls[_GRADIENTS] += 1
        return self.shard.g_y(x, y)

    def g_yy(self, x: Array, y: Array, v: Array) -> Array:
        self.calls[_HVPS] += 1
        return self.shard.g_yy(x, y, v)

    def g_yy_of(self, rows: NDArray[np.bool_], x: Array, y: Array, v: Array) -> Array:
        """Return ∇²_yy g v of all rows, but count it for `rows` only: the algorithm uses no others."""
        self.calls[_HVPS, rows] += 1
        return self.shard.g_yy(x, y, v)

    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        self.calls[_JVPS] += 1
        return self.shard.g_xy(x, y, v)


@dataclass(frozen=True, eq=False)
class _WrappedShard(TaskShard):
    """Pass every oracle call through `_call`."""

    shard: TaskShard

    @abstractmethod
    def _call(self, oracle: Callable[..., Array], x: Array, *rows: Array) -> Array: ...

    def f(self, x: Array, y: Array) -> Array:
        return self._call(self.shard.f, x, y)

    def g(self, x: Array, y: Array) -> Array:
        return self._call(self.shard.g, x, y)

    def f_x(self, x: Array, y: Array) -> Array:
        return self._call(self.shard.f_x, x, y)

    def f_y(self, x: Array, y: Array) -> Array:
        return self._call(self.shard.f_y, x, y)

    def g_x(self, x: Array, y: Array) -> Array:
        return self._call(self.shard.g_x, x, y)

    def g_y(self, x: Array, y: Array) -> Array:
        return self._call(self.shard.g_y, x, y)

    def g_yy(self, x: Array, y: Array, v: Array) -> Array:
        return self._call(self.shard.g_yy, x, y, v)

    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        return self._call(self.shard.g_xy, x, y, v)


class PooledShard(_WrappedShard):
    """A single row whose f and g are the means over all nodes."""

    def _call(self, oracle: Callable[..., Array], x: Array, *rows: Array) -> Array:
        xp = array_namespace(x)
        repeated = (xp.broadcast_to(row, (self.shard.nodes, row.shape[1])) for row in (x, *rows))
        mean: Array = xp.mean(oracle(*repeated), axis=0, keepdims=True)
        return mean


class FixedXShard(_WrappedShard):
    """Evaluate every oracle at x0, whatever x the algorithm passes."""

    def _call(self, oracle: Callable[..., Array], x: Array, *rows: Array) -> Array:
        return oracle(self.x0, *rows)


def pool_shard(shard: TaskShard) -> PooledShard:
    """Return the mean of all rows of a shard as a single row."""
    return PooledShard(np.zeros(1, dtype=np.int64), shard.seed, shard.x0[:1], shard.y0[:1], shard)


class _WrappedProblem:
    """A problem with other shards; data and metrics stay the same."""

    def __init__(self, problem: Problem, nodes: int) -> None:
        self.problem = problem
        self.nodes, self.dim_x, self.dim_y = nodes, problem.dim_x, problem.dim_y
        self.evaluate, self.describe = problem.evaluate, problem.describe
        self.task_metrics, self.penalty_solution = problem.task_metrics, problem.penalty_solution


class _PooledProblem(_WrappedProblem):
    def shard(self, ids: Sequence[int]) -> TaskShard:
        if list(ids) != [0]:
            raise ValueError(f"a pooled problem has the single row 0, not {list(ids)}")
        return pool_shard(self.problem.shard(range(self.problem.nodes)))


class _FixedXProblem(_WrappedProblem):
    def shard(self, ids: Sequence[int]) -> TaskShard:
        shard = self.problem.shard(ids)
        return FixedXShard(shard.ids, shard.seed, shard.x0, shard.y0, shard)


def pool_nodes(problem: Problem) -> Problem:
    """Return the same problem for an algorithm that runs on one machine with the data of all nodes."""
    return _PooledProblem(problem, nodes=1)


def hold_x(problem: Problem) -> Problem:
    """Return the same problem with x fixed at its start: the algorithm's direction is then its hypergradient there."""
    return _FixedXProblem(problem, nodes=problem.nodes)
