"""Compare a float32 run on wide rows, which fused kernels evaluate, with plain NumPy in float32 and in float64.

Small problems never reach the kernels: rows are wide from 65,536 entries on. The problem is separable, so that every
oracle is a few passes over memory.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from dbo.algorithms.api import Algorithm, Array, TopK
from dbo.algorithms.kernels import fused
from dbo.platform.engine.arrangement import arrange
from dbo.platform.engine.local import LocalEngine
from dbo.platform.network.topology import TOPOLOGIES, build_network
from dbo.platform.verify.switches import list_compressors, shorten
from dbo.tasks.api import Problem, Shard

NODES, ROUNDS = 3, 2
FEW = 2                     # of inner steps and the like
TOLERANCE = 1e-3            # relative, per row. float32 gives 1e-7, a top-k tie that is broken otherwise up to 1e-4.


@dataclass(frozen=True, eq=False)
class _SeparableShard(Shard):
    """g_i = Σ h/2 (y − b x − c)² + ¼ y²,   f_i = Σ ½ (y − t)² + ½ x²; all vectors of a node, h in [0.5, 1]."""

    h: Array
    b: Array
    c: Array
    t: Array

    def f(self, x: Array, y: Array) -> Array:
        return _sum(0.5 * (y - self.t) ** 2 + 0.5 * x**2)

    def g(self, x: Array, y: Array) -> Array:
        return _sum(0.5 * self.h * (y - self.b * x - self.c) ** 2 + 0.25 * y**2)

    def f_x(self, x: Array, y: Array) -> Array:
        return x + 0

    def f_y(self, x: Array, y: Array) -> Array:
        return y - self.t

    def g_x(self, x: Array, y: Array) -> Array:
        return _rows(-self.b * self.h * (y - self.b * x - self.c))

    def g_y(self, x: Array, y: Array) -> Array:
        return _rows(self.h * (y - self.b * x - self.c) + 0.5 * y)

    def g_yy(self, x: Array, y: Array, v: Array) -> Array:
        return _rows((self.h + 0.5) * v)

    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        return _rows(-self.b * self.h * v)


def _rows(value: Any) -> Array:
    rows: Array = value
    return rows


def _sum(value: Any) -> Array:
    return _rows(value.sum(1))


class _Separable:
    """Nodes with different vectors; dim_x = dim_y = the width from which rows are wide."""

    nodes = NODES

    def __init__(self, dim: int, dtype: str) -> None:
        rng = np.random.default_rng(4)
        self.dim_x = self.dim_y = dim
        vectors = {
            "h": rng.uniform(0.5, 1.0, (NODES, dim)), "b": rng.uniform(-0.5, 0.5, (NODES, dim)),
            "c": 0.2 * rng.standard_normal((NODES, dim)), "t": 0.2 * rng.standard_normal((NODES, dim)),
        }
        self.vectors = {name: rows.astype(np.float32).astype(dtype) for name, rows in vectors.items()}
        start = 0.2 * rng.standard_normal((2, dim))
        self.x0, self.y0 = start.astype(np.float32).astype(dtype)
        # No engine evaluates this problem.
        self.evaluate = self.task_metrics = self.penalty_solution = self.describe = None
        self.sample_sizes = self.tune_losses = self.tune_accuracies = self.evaluate_nodes = None

    def shard(self, ids: Sequence[int]) -> _SeparableShard:
        rows = np.asarray(ids, dtype=np.int64)
        return _SeparableShard(
            ids=rows, seed=5, x0=np.tile(self.x0, (len(rows), 1)), y0=np.tile(self.y0, (len(rows), 1)),
            **{name: each[rows] for name, each in self.vectors.items()},
        )


def measure_errors(algorithm: Algorithm, config: Any) -> tuple[float, float]:
    """Return how far a run through the kernels ends from plain arithmetic in float32, and from that in float64.

    The second one replaces compressors by top-k of floats: levels and random numbers depend on the dtype.
    """
    config, dim = shorten(config, FEW), fused.MIN_ENTRIES
    floats = replace(config, **dict.fromkeys(list_compressors(config), TopK()))
    fast = [_run(algorithm, each, dim, "float32") for each in (config, floats)]
    with _plain_arithmetic():
        single, double = _run(algorithm, config, dim, "float32"), _run(algorithm, floats, dim, "float64")
    return _measure_distance(fast[0], single), _measure_distance(fast[1], double)


def _measure_distance(found: dict[str, Array], expected: dict[str, Array]) -> float:
    """Return the largest distance of a node's x, y and direction, relative to the largest row."""
    errors = [
        float(np.linalg.norm(found[name] - rows, axis=1).max() / max(np.linalg.norm(rows, axis=1).max(), 1e-3))
        for name, rows in expected.items()
    ]
    return max(errors) if np.isfinite(errors).all() else np.inf


def _run(algorithm: Algorithm, config: Any, dim: int, dtype: str) -> dict[str, Array]:
    ring = build_network(TOPOLOGIES["ring"]().graph(NODES, 0))
    problem, network = arrange(algorithm, cast(Problem, _Separable(dim, dtype)), ring)
    engine = LocalEngine(algorithm, config, problem, network, [range(network.nodes)])
    engine.advance(1, ROUNDS)
    return {name: engine.local_blocks[0].rows(name).astype(np.float64) for name in ("x", "y", "direction")}


@contextmanager
def _plain_arithmetic() -> Iterator[None]:
    """Let no row count as wide."""
    threshold = fused.MIN_ENTRIES
    fused.MIN_ENTRIES = sys.maxsize
    try:
        yield
    finally:
        fused.MIN_ENTRIES = threshold
