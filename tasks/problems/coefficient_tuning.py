"""Coefficient tuning: every feature of a linear classifier has its own regularisation coefficient.

    g_i(x, y) = cross-entropy(train_i; y) + s Σ_pc exp(x_p) y_pc²        f_i(x, y) = cross-entropy(val_i; y)

y is a features × classes matrix without bias, flattened row by row; x has one entry per feature; both start at zero.
s is 1/2 per entry of y (`half_mean`, as in public code), 1 per entry (`mean`), or 1 (`sum`, as in the paper). With
`sum` the Hessian 2I at x = 0 dominates the loss and makes unit steps unstable. f does not depend on x, so ∇_x f = 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from array_api_compat import array_namespace
from scipy import sparse

from dbo.tasks.api import Array, DataSize, Direction, Setup, Shard, Task, Work, param, task
from dbo.tasks.partitions import assign_samples
from dbo.tasks.problems.classification import LinearScores
from dbo.tasks.problems.stacking import Level, stack_level

FUSED_MIN_ENTRIES = 1 << 16    # sparse data with at least this many entries of y per node use compiled loops


@task("coefficient_tuning")
@dataclass(frozen=True, slots=True, kw_only=True)
class CoefficientTuning(Task):
    """Linear classifier (lower level) whose per-feature regularisation is tuned on validation data (upper level)."""

    datasets: ClassVar[tuple[str, ...]] = ("digits", "newsgroups", "synthetic_text")
    accepts_sparse: ClassVar[bool] = True
    directions: ClassVar[Mapping[str, Direction]] = {"test_accuracy": "max", "test_loss": "min"}
    strongly_convex: ClassVar[bool] = True

    dataset: str = param("digits", help="where the samples come from")
    reg_form: Literal["half_mean", "mean", "sum"] = param(
        "half_mean", help="scale of the regulariser: 1/2 or 1 per entry of y, or the plain sum"
    )

    def estimate_work(self, nodes: int, data: DataSize | None) -> Work | None:
        if data is None:
            return None
        return Work(data.samples * (data.nonzeros or data.features) * data.classes, data.features * (data.classes + 1))

    def build(self, setup: Setup) -> "CoefficientTuningProblem":
        samples = setup.load_samples(needs_classes=True)
        train, val = assign_samples(samples, setup.nodes, setup.seed, setup.partition)
        entries = samples.train.features.shape[1] * samples.classes
        scale = {"half_mean": 0.5 / entries, "mean": 1.0 / entries, "sum": 1.0}[self.reg_form]
        return CoefficientTuningProblem(samples, train, val, setup.seed, setup.dtype, scale)


@dataclass(frozen=True, eq=False)
class CoefficientTuningProblem(LinearScores):
    """The samples of all nodes, and the scale of the regulariser."""

    task: ClassVar[str] = "coefficient_tuning"

    scale: float

    @property
    def dim_x(self) -> int:
        return int(self.samples.train.features.shape[1])

    @property
    def dim_y(self) -> int:
        return self.dim_x * self.samples.classes

    def shard(self, ids: Sequence[int]) -> Shard:
        classes = self.samples.classes
        common: dict[str, Any] = {
            "ids": np.asarray(ids, dtype=np.int64), "seed": self.seed, "classes": classes, "scale": self.scale,
            "x0": np.zeros((len(ids), self.dim_x), dtype=self.dtype),
            "y0": np.zeros((len(ids), self.dim_y), dtype=self.dtype),
        }
        train, val = self.node_parts(ids)
        if sparse.issparse(self.samples.train.features) and self.dim_y >= FUSED_MIN_ENTRIES:
            from dbo.tasks.problems import sparse_tuning  # imports numba, which is slow

            sparse_tuning.compile_kernels(self.dtype)
            return sparse_tuning.SparseTuningShard(
                **common, train=sparse_tuning.index_parts(train, self.dtype),
                val=sparse_tuning.index_parts(val, self.dtype),
            )
        return CoefficientTuningShard(
            **common, train=stack_level(train, classes, self.dtype), val=stack_level(val, classes, self.dtype)
        )

    def task_metrics(self, x_mean: Array, y_mean: Array) -> dict[str, float]:
        """Return the distance of x from its start at zero: near 0, a curve shows progress of the lower level alone."""
        return {"x_moved": float(np.linalg.norm(x_mean))}


@dataclass(frozen=True, eq=False)
class CoefficientTuningShard(Shard):
    """Closed-form oracles over stacked nodes."""

    train: Level
    val: Level
    classes: int
    scale: float

    @property
    def sizes(self) -> tuple[Array, Array]:
        return self.train.sizes, self.val.sizes

    def subset(self, lower: Array | None, upper: Array | None) -> "CoefficientTuningShard":
        return replace(
            self, train=self.train if lower is None else self.train.take(lower),
            val=self.val if upper is None else self.val.take(upper),
        )

    def f(self, x: Array, y: Array) -> Array:
        rows, loss = self.val.rows, self.val.loss
        return rows.sum_samples(loss.loss(rows.scores(self._matrix(y))))

    def g(self, x: Array, y: Array) -> Array:
        xp = array_namespace(x)
        rows, loss = self.train.rows, self.train.loss
        value: Array = rows.sum_samples(loss.loss(rows.scores(self._matrix(y)))) + xp.sum(self.g_x(x, y), axis=1)
        return value

    def f_x(self, x: Array, y: Array) -> Array:
        zero: Array = array_namespace(x).zeros_like(x)
        return zero

    def f_y(self, x: Array, y: Array) -> Array:
        rows, loss = self.val.rows, self.val.loss
        return rows.matmul_transposed(loss.residual(rows.scores(self._matrix(y)))).reshape(y.shape)

    def g_x(self, x: Array, y: Array) -> Array:
        xp = array_namespace(x)
        w = self._matrix(y)
        gradient: Array = self.scale * xp.exp(x) * xp.sum(w * w, axis=2)
        return gradient

    def g_y(self, x: Array, y: Array) -> Array:
        rows, loss = self.train.rows, self.train.loss
        w = self._matrix(y)
        gradient = rows.matmul_transposed(loss.residual(rows.scores(w)))
        gradient += self._ridge(x) * w
        return gradient.reshape(y.shape)

    def g_yy(self, x: Array, y: Array, v: Array) -> Array:
        rows, loss = self.train.rows, self.train.loss
        u = self._matrix(v)
        product = rows.matmul_transposed(loss.curvature(rows.scores(self._matrix(y)), rows.scores(u)))
        product += self._ridge(x) * u
        return product.reshape(y.shape)

    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        xp = array_namespace(x)
        product: Array = 2.0 * self.scale * xp.exp(x) * xp.sum(self._matrix(y) * self._matrix(v), axis=2)
        return product

    def _matrix(self, y: Array) -> Array:
        return y.reshape(y.shape[0], -1, self.classes)

    def _ridge(self, x: Array) -> Array:
        """Return (nodes, features, 1) the curvature of the regulariser, which is the same for every class."""
        ridge: Array = ((2.0 * self.scale) * array_namespace(x).exp(x))[:, :, None]
        return ridge
