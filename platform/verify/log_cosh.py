"""A small problem whose derivatives, second ones included, depend on the point: comparisons see every argument."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np

from dbo.algorithms.api import Array
from dbo.tasks.api import Problem, Shard

NODES, DIM_X, DIM_Y = 6, 3, 7


@dataclass(frozen=True, eq=False)
class LogCoshShard(Shard):
    """g_i = Σ log cosh(C_i y − B_i x − c_i) + μ/2 ‖y‖²,   f_i = Σ log cosh(y − T_i x − t_i) + ρ/2 ‖x‖²."""

    cy: Array
    b: Array
    c: Array
    tx: Array
    t: Array
    mu: ClassVar[float] = 0.4
    rho: ClassVar[float] = 0.3

    def _inside(self, x: Array, y: Array) -> tuple[Array, Array]:
        return _multiply(self.cy, y) - _multiply(self.b, x) - self.c, y - _multiply(self.tx, x) - self.t

    def f(self, x: Array, y: Array) -> Array:
        value: Array = np.log(np.cosh(self._inside(x, y)[1])).sum(1) + 0.5 * self.rho * (x * x).sum(1)
        return value

    def g(self, x: Array, y: Array) -> Array:
        value: Array = np.log(np.cosh(self._inside(x, y)[0])).sum(1) + 0.5 * self.mu * (y * y).sum(1)
        return value

    def f_x(self, x: Array, y: Array) -> Array:
        return self.rho * x - _multiply(_transpose(self.tx), np.tanh(self._inside(x, y)[1]))

    def f_y(self, x: Array, y: Array) -> Array:
        return np.tanh(self._inside(x, y)[1])

    def g_x(self, x: Array, y: Array) -> Array:
        return -_multiply(_transpose(self.b), np.tanh(self._inside(x, y)[0]))

    def g_y(self, x: Array, y: Array) -> Array:
        return _multiply(_transpose(self.cy), np.tanh(self._inside(x, y)[0])) + self.mu * y

    def g_yy(self, x: Array, y: Array, v: Array) -> Array:
        return _multiply(_transpose(self.cy), _multiply(self.cy, v) / np.cosh(self._inside(x, y)[0]) ** 2) + self.mu * v

    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        return -_multiply(_transpose(self.b), _multiply(self.cy, v) / np.cosh(self._inside(x, y)[0]) ** 2)


def _multiply(matrices: Array, rows: Array) -> Array:
    return (matrices @ rows[:, :, None])[:, :, 0]


def _transpose(matrices: Array) -> Array:
    return np.swapaxes(matrices, 1, 2)


def build_problem() -> Problem:
    """Return the problem; it has oracles alone, no metrics."""
    return cast(Problem, LogCosh())


class LogCosh:
    """Nodes that differ in everything, and a common start away from 0."""

    nodes, dim_x, dim_y = NODES, DIM_X, DIM_Y

    def __init__(self) -> None:
        draw = np.random.default_rng(11).standard_normal
        self.x0, self.y0 = 0.5 * draw(DIM_X), 0.5 * draw(DIM_Y)
        self.parts = {
            "cy": np.eye(DIM_Y) + 0.2 * draw((NODES, DIM_Y, DIM_Y)), "b": 0.6 * draw((NODES, DIM_Y, DIM_X)),
            "c": draw((NODES, DIM_Y)), "tx": 0.4 * draw((NODES, DIM_Y, DIM_X)), "t": draw((NODES, DIM_Y)),
        }
        # No engine evaluates this problem.
        self.evaluate = self.task_metrics = self.penalty_solution = self.describe = None
        self.sample_sizes = self.tune_losses = self.tune_accuracies = self.evaluate_nodes = None

    def shard(self, ids: Sequence[int]) -> LogCoshShard:
        rows = np.asarray(ids, dtype=np.int64)
        return LogCoshShard(
            ids=rows, seed=5, x0=np.tile(self.x0, (len(rows), 1)), y0=np.tile(self.y0, (len(rows), 1)),
            **{name: part[rows] for name, part in self.parts.items()},
        )
