"""Shards seen through glasses: one counts oracle calls, one pools all nodes, one holds x at the start."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from dbo.algorithms.protocol import Array, Shard
from dbo.tasks.api import Problem

COUNTERS = ("gradient_calls", "hvp_calls", "jvp_calls")
_GRADIENTS, _HVPS, _JVPS = range(len(COUNTERS))


class Counted:
    """A shard that counts what is asked of it, row by row: partial gradients, Hessian- and Jacobian-vector products."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.nodes, self.dim_x, self.dim_y = shard.nodes, shard.dim_x, shard.dim_y
        self.ids, self.seed, self.x0, self.y0 = shard.ids, shard.seed, shard.x0, shard.y0
        self.f, self.g = shard.f, shard.g
        self.calls: NDArray[np.int64] = np.zeros((len(COUNTERS), shard.nodes), dtype=np.int64)
        if hasattr(shard, "h_y"):
            self.h_y = self._h_y

    def __getattr__(self, name: str) -> NoReturn:
        known = "nodes, dim_x, dim_y, ids, seed, x0, y0, f, g, f_x, f_y, g_x, g_y, g_yy, g_xy"
        raise AttributeError(f"a shard has no {name!r}; it has {known}", name=name, obj=self)

    def counters(self) -> dict[str, int]:
        """Calls of the node that was asked most; unless numbers of calls are drawn, all nodes have the same."""
        return {name: int(calls.max()) for name, calls in zip(COUNTERS, self.calls, strict=True)}

    def _h_y(self, x: Array, y: Array, f_weight: float, g_weight: float) -> Array:
        """f_weight ∇_y f + g_weight ∇_y g, two gradients of a shard that forms both in one pass."""
        self.calls[_GRADIENTS] += 2
        return self.shard.h_y(x, y, f_weight, g_weight)    # type: ignore[attr-defined, no-any-return]

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
        """∇²_yy g v for an algorithm that wants it of these rows only; what the others get is not counted."""
        self.calls[_HVPS, rows] += 1
        return self.shard.g_yy(x, y, v)

    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        self.calls[_JVPS] += 1
        return self.shard.g_xy(x, y, v)


class PooledShard:
    """All nodes' data on one machine: a single row whose f and g are the means over the nodes."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.nodes, self.dim_x, self.dim_y = 1, shard.dim_x, shard.dim_y
        self.ids, self.seed = np.zeros(1, dtype=np.int64), shard.seed
        self.x0, self.y0 = shard.x0[:1], shard.y0[:1]

    def to(self, asarray: Callable[[Array], Any]) -> "PooledShard":
        """As of the shards it is made of."""
        return PooledShard(self.shard.to(asarray))    # type: ignore[attr-defined]

    def _mean(self, oracle: Callable[..., Array], *rows: Array) -> Array:
        xp = array_namespace(*rows)
        spread = (xp.broadcast_to(row, (self.shard.nodes, row.shape[1])) for row in rows)
        mean: Array = xp.mean(oracle(*spread), axis=0, keepdims=True)
        return mean

    def f(self, x: Array, y: Array) -> Array:
        return self._mean(self.shard.f, x, y)

    def g(self, x: Array, y: Array) -> Array:
        return self._mean(self.shard.g, x, y)

    def f_x(self, x: Array, y: Array) -> Array:
        return self._mean(self.shard.f_x, x, y)

    def f_y(self, x: Array, y: Array) -> Array:
        return self._mean(self.shard.f_y, x, y)

    def g_x(self, x: Array, y: Array) -> Array:
        return self._mean(self.shard.g_x, x, y)

    def g_y(self, x: Array, y: Array) -> Array:
        return self._mean(self.shard.g_y, x, y)

    def g_yy(self, x: Array, y: Array, v: Array) -> Array:
        return self._mean(self.shard.g_yy, x, y, v)

    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        return self._mean(self.shard.g_xy, x, y, v)


class PooledProblem:
    """The same problem for an algorithm that runs on one machine and sees all data."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.nodes, self.dim_x, self.dim_y = 1, problem.dim_x, problem.dim_y
        self.evaluate, self.extra, self.describe = problem.evaluate, problem.extra, problem.describe

    def shard(self, ids: Sequence[int]) -> PooledShard:
        if list(ids) != [0]:
            raise ValueError(f"a pooled problem has the single row 0, not {list(ids)}")
        return PooledShard(self.problem.shard(range(self.problem.nodes)))


class HeldShard:
    """Oracles that answer as if x were still at its start, wherever the algorithm takes it."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.nodes, self.dim_x, self.dim_y = shard.nodes, shard.dim_x, shard.dim_y
        self.ids, self.seed, self.x0, self.y0 = shard.ids, shard.seed, shard.x0, shard.y0

    def f(self, x: Array, y: Array) -> Array:
        return self.shard.f(self.x0, y)

    def g(self, x: Array, y: Array) -> Array:
        return self.shard.g(self.x0, y)

    def f_x(self, x: Array, y: Array) -> Array:
        return self.shard.f_x(self.x0, y)

    def f_y(self, x: Array, y: Array) -> Array:
        return self.shard.f_y(self.x0, y)

    def g_x(self, x: Array, y: Array) -> Array:
        return self.shard.g_x(self.x0, y)

    def g_y(self, x: Array, y: Array) -> Array:
        return self.shard.g_y(self.x0, y)

    def g_yy(self, x: Array, y: Array, v: Array) -> Array:
        return self.shard.g_yy(self.x0, y, v)

    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        return self.shard.g_xy(self.x0, y, v)


class HeldProblem:
    """The same problem with x held at the start: what an algorithm then moves along is its hypergradient there."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.nodes, self.dim_x, self.dim_y = problem.nodes, problem.dim_x, problem.dim_y
        self.evaluate, self.extra, self.describe = problem.evaluate, problem.extra, problem.describe

    def shard(self, ids: Sequence[int]) -> HeldShard:
        return HeldShard(self.problem.shard(ids))


def held(problem: Problem) -> Any:
    """`problem` with x held at the start."""
    return HeldProblem(problem)


def pooled(problem: Problem) -> Any:
    """`problem` as one machine sees it."""
    return PooledProblem(problem)
