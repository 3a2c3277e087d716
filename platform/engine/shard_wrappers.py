"""Wrap shards and problems: count oracle calls, draw batches, pool the data of all nodes, replace the start."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from dbo.algorithms.api import Array, Key, NetworkFacts, WeightedGradient
from dbo.algorithms.kernels.lazy import unwrap, wrap
from dbo.tasks.api import Batches, Problem
from dbo.tasks.api import Shard as TaskShard

COUNTERS = ("gradient_calls", "hvp_calls", "jvp_calls", "samples")
_GRADIENTS, _HVPS, _JVPS, _SAMPLES = range(len(COUNTERS))


class CountingShard:
    """Count the oracle calls of each row, and the samples that they see; draw batches.

    Tasks see arrays; results of many entries get lazy arithmetic.

    Partial gradients, Hessian- and Jacobian-vector products are counted apart. A batch adds to the counts of the shard
    that it was drawn from.
    """

    def __init__(
        self,
        shard: TaskShard,
        batches: Batches | None = None,
        calls: NDArray[np.int64] | None = None,
        network: NetworkFacts | None = None,
    ) -> None:
        self.shard = shard
        self.network = network or NetworkFacts()
        self.nodes, self.dim_x, self.dim_y = shard.nodes, shard.dim_x, shard.dim_y
        self.ids, self.seed, self.x0, self.y0 = shard.ids, shard.seed, shard.x0, shard.y0
        self.clients = shard.clients
        self.h_y = None if shard.h_y is None else self._count_weighted_gradients(shard.h_y)
        new = np.zeros((len(COUNTERS), shard.nodes), dtype=np.int64)
        self.calls: NDArray[np.int64] = new if calls is None else calls
        self._rows = list(self.calls)      # views of its rows
        self._lower, self._upper = shard.sizes
        self._batches = Batches() if batches is None else batches
        self._last: tuple[tuple[int, int], CountingShard] | None = None
        self._counted: slice | NDArray[np.bool_] = slice(None)      # rows whose calls count

    def sample(self, key: Key) -> "CountingShard":
        """Return the same oracles on the samples drawn for this key; with full batches, the shard itself."""
        if self._batches.is_full:
            return self
        at = (key.round, 0 if self._batches.per == "round" else key.step)
        if self._last is None or self._last[0] != at:
            batch = self.shard.draw_batch(self._batches, *at)
            self._last = at, CountingShard(batch, calls=self.calls, network=self.network)
            self._last[1]._counted = self._counted
        return self._last[1]

    def only(self, rows: NDArray[np.bool_]) -> "CountingShard":
        """Return the same oracles, counted for `rows` alone: the algorithm uses no others."""
        counted = copy(self)
        counted._counted, counted._last = rows, None
        if self.shard.h_y is not None:
            counted.h_y = counted._count_weighted_gradients(self.shard.h_y)
        return counted

    def forget_batch(self) -> None:
        """Drop the last batch and what it has cached."""
        self._last = None

    def __getattr__(self, name: str) -> NoReturn:
        known = (
            "nodes, dim_x, dim_y, ids, seed, network, clients, x0, y0, f, g, f_x, f_y, g_x, g_y, g_yy, g_xy, h_y, "
            "sample"
        )
        raise AttributeError(f"a shard has no {name!r}; it has {known}", name=name, obj=self)

    def counters(self) -> dict[str, int]:
        """Return the maximum over the rows; they differ only where an algorithm samples its number of calls."""
        return {name: int(calls.max()) for name, calls in zip(COUNTERS, self.calls, strict=True)}

    def _count(self, kind: int, samples: Array, calls: int = 1) -> None:
        """Count oracle calls of one kind, and the samples that they see."""
        if isinstance(self._counted, slice):      # every row: a batch's gradient takes little longer than more indexing
            of_kind, of_samples = self._rows[kind], self._rows[_SAMPLES]
            of_kind += calls
            of_samples += samples
            return
        self.calls[kind, self._counted] += calls
        self.calls[_SAMPLES, self._counted] += samples[self._counted]

    def _count_weighted_gradients(self, h_y: WeightedGradient) -> WeightedGradient:
        def counted(x: Array, y: Array, f_weight: float, g_weight: float) -> Array:
            self._count(_GRADIENTS, self._lower + self._upper, calls=2)      # ∇_y f and ∇_y g
            rows: Array = wrap(h_y(unwrap(x), unwrap(y), f_weight, g_weight))
            return rows

        return counted

    def f(self, x: Array, y: Array) -> Array:
        return self.shard.f(unwrap(x), unwrap(y))

    def g(self, x: Array, y: Array) -> Array:
        return self.shard.g(unwrap(x), unwrap(y))

    def f_x(self, x: Array, y: Array) -> Array:
        return self._gradient(self.shard.f_x, self._upper, x, y)

    def f_y(self, x: Array, y: Array) -> Array:
        return self._gradient(self.shard.f_y, self._upper, x, y)

    def g_x(self, x: Array, y: Array) -> Array:
        return self._gradient(self.shard.g_x, self._lower, x, y)

    def g_y(self, x: Array, y: Array) -> Array:
        return self._gradient(self.shard.g_y, self._lower, x, y)

    def _gradient(self, oracle: Callable[[Array, Array], Array], samples: Array, x: Array, y: Array) -> Array:
        self._count(_GRADIENTS, samples)
        rows: Array = wrap(oracle(unwrap(x), unwrap(y)))
        return rows

    def g_yy(self, x: Array, y: Array, v: Array) -> Array:
        self._count(_HVPS, self._lower)
        rows: Array = wrap(self.shard.g_yy(unwrap(x), unwrap(y), unwrap(v)))
        return rows

    def g_yy_of(self, rows: NDArray[np.bool_], x: Array, y: Array, v: Array) -> Array:
        """Return ∇²_yy g v of all rows, but count it for `rows` only: the algorithm uses no others."""
        return self.only(rows if isinstance(self._counted, slice) else rows & self._counted).g_yy(x, y, v)

    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        self._count(_JVPS, self._lower)
        rows: Array = wrap(self.shard.g_xy(unwrap(x), unwrap(y), unwrap(v)))
        return rows


@dataclass(frozen=True, eq=False)
class _WrappedShard(TaskShard):
    """Pass every oracle call through `_call`."""

    shard: TaskShard

    @abstractmethod
    def _call(self, oracle: Callable[..., Array], x: Array, *rows: Array) -> Array: ...

    def in_double(self, max_bytes: int) -> "_WrappedShard | None":
        shard = self.shard.in_double(max_bytes)
        return None if shard is None else replace(
            self, x0=self.x0.astype(np.float64), y0=self.y0.astype(np.float64), shard=shard)

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
    """A single row whose f and g are the means over all nodes. Its batch is a batch of every node."""

    @property
    def sizes(self) -> tuple[Array, Array]:
        lower, upper = self.shard.sizes
        return lower.sum(keepdims=True), upper.sum(keepdims=True)

    def draw_batch(self, batches: Batches, round_: int, step: int) -> "PooledShard":
        return pool_shard(self.shard.draw_batch(batches, round_, step))

    def _call(self, oracle: Callable[..., Array], x: Array, *rows: Array) -> Array:
        xp = array_namespace(x)
        repeated = (xp.broadcast_to(row, (self.shard.nodes, row.shape[1])) for row in (x, *rows))
        mean: Array = xp.mean(oracle(*repeated), axis=0, keepdims=True)
        return mean


class FixedXShard(_WrappedShard):
    """Evaluate every oracle at x0, whatever x the algorithm passes."""

    @property
    def sizes(self) -> tuple[Array, Array]:
        return self.shard.sizes

    def draw_batch(self, batches: Batches, round_: int, step: int) -> "FixedXShard":
        return replace(self, shard=self.shard.draw_batch(batches, round_, step))

    def _call(self, oracle: Callable[..., Array], x: Array, *rows: Array) -> Array:
        return oracle(self.x0, *rows)


def pool_shard(shard: TaskShard) -> PooledShard:
    """Return the mean of all rows of a shard as a single row."""
    return PooledShard(np.zeros(1, dtype=np.int64), shard.seed, shard.x0[:1], shard.y0[:1], shard)


class WrappedProblem:
    """A problem with other shards; data and metrics stay the same."""

    def __init__(self, problem: Problem, nodes: int) -> None:
        self.problem = problem
        self.nodes, self.dim_x, self.dim_y = nodes, problem.dim_x, problem.dim_y
        self.evaluate, self.evaluate_nodes, self.describe = problem.evaluate, problem.evaluate_nodes, problem.describe
        self.sample_sizes = problem.sample_sizes
        self.tune_losses, self.tune_accuracies = problem.tune_losses, problem.tune_accuracies
        self.task_metrics, self.penalty_solution = problem.task_metrics, problem.penalty_solution


class _PooledProblem(WrappedProblem):
    def shard(self, ids: Sequence[int]) -> TaskShard:
        if list(ids) != [0]:
            raise ValueError(f"a pooled problem has the single row 0, not {list(ids)}")
        return pool_shard(self.problem.shard(range(self.problem.nodes)))


class _FixedXProblem(WrappedProblem):
    def shard(self, ids: Sequence[int]) -> TaskShard:
        shard = self.problem.shard(ids)
        return FixedXShard(shard.ids, shard.seed, shard.x0, shard.y0, shard)


class _StartedProblem(WrappedProblem):
    def __init__(self, problem: Problem, x: Array, y: Array) -> None:
        super().__init__(problem, nodes=problem.nodes)
        self._start = x, y

    def shard(self, ids: Sequence[int]) -> TaskShard:
        shard = self.problem.shard(ids)
        x0, y0 = (
            np.tile(row.astype(old.dtype), (len(ids), 1))
            for row, old in zip(self._start, (shard.x0, shard.y0), strict=True)
        )
        return replace(shard, x0=x0, y0=y0)


class _NodeProblem(WrappedProblem):
    def __init__(self, problem: Problem, node: int) -> None:
        super().__init__(problem, nodes=1)
        self._node = node

    def shard(self, ids: Sequence[int]) -> TaskShard:
        return replace(self.problem.shard([self._node]), ids=np.array(ids, dtype=np.int64))


def select_node(problem: Problem, node: int) -> Problem:
    """Return the problem of one node, as node 0 of a network of its own."""
    return _NodeProblem(problem, node)


def pool_nodes(problem: Problem) -> Problem:
    """Return the same problem for an algorithm that runs on one machine with the data of all nodes."""
    return _PooledProblem(problem, nodes=1)


def hold_x(problem: Problem) -> Problem:
    """Return the same problem with x fixed at its start: the algorithm's direction is then its hypergradient there."""
    return _FixedXProblem(problem, nodes=problem.nodes)


def start_at(problem: Problem, x: Array, y: Array) -> Problem:
    """Return the same problem with another common start of x and y, given as (dim,) rows."""
    for name, row, dim in (("x", x, problem.dim_x), ("y", y, problem.dim_y)):
        if row.shape != (dim,):
            raise ValueError(f"start: {name} has {row.size} entries; this task has {dim}")
        if not np.isfinite(row).all():
            raise ValueError(f"start: {name} contains NaN or inf; must be finite")
    return _StartedProblem(problem, x, y)
