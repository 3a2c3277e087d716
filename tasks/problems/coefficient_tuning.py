"""Coefficient tuning: every feature of a linear classifier gets a regularisation coefficient of its own.

    g_i(x, y) = cross-entropy(train_i; y) + s Σ_pc exp(x_p) y_pc²        f_i(x, y) = cross-entropy(val_i; y)

y is a features × classes matrix without bias, flattened row by row; x has one entry per feature; both start at zero.
s is 1/2 per entry of y (`half_mean`, what public code does), 1 per entry (`mean`), or 1 (`sum`, the paper's text: its
Hessian 2I at x = 0 crushes y and makes unit steps unstable). f does not depend on x, so ∇_x f = 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from array_api_compat import array_namespace
from scipy import sparse
from typing_extensions import Doc

from dbo.tasks.api import Array, Samples, Setup, Shard
from dbo.tasks.partitions import deal
from dbo.tasks.problems.softmax import accuracy_and_loss
from dbo.tasks.problems.stacking import Level, level
from dbo.tasks.problems.wide_tuning import WIDE, WideTuningShard, documents, warm


@dataclass(frozen=True, slots=True, kw_only=True)
class CoefficientTuning:
    """Linear classifier (lower level) whose per-feature regularisation is tuned on validation data (upper level)."""

    datasets: ClassVar[tuple[str, ...]] = ("digits", "newsgroups", "synthetic_text")
    usual: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    dataset: Annotated[str, Doc("where the samples come from")] = "digits"
    reg_form: Annotated[
        Literal["half_mean", "mean", "sum"], Doc("scale of the regulariser: 1/2 or 1 per entry of y, or the plain sum")
    ] = "half_mean"

    def build(self, setup: Setup) -> "CoefficientTuningProblem":
        samples = setup.samples()
        train, val = deal(samples, setup.nodes, setup.seed, setup.partition)
        entries = samples.train.features.shape[1] * samples.classes
        scale = {"half_mean": 0.5 / entries, "mean": 1.0 / entries, "sum": 1.0}[self.reg_form]
        return CoefficientTuningProblem(samples, train, val, scale, setup.seed, setup.dtype)


@dataclass(frozen=True, eq=False)
class CoefficientTuningProblem:
    """The samples, and who holds which."""

    samples: Samples
    train: list[Array]    # sample numbers per node
    val: list[Array]
    scale: float
    seed: int
    dtype: str

    @property
    def nodes(self) -> int:
        return len(self.train)

    @property
    def dim_x(self) -> int:
        return int(self.samples.train.features.shape[1])

    @property
    def dim_y(self) -> int:
        return self.dim_x * self.samples.classes

    def shard(self, ids: Sequence[int]) -> "CoefficientTuningShard | WideTuningShard":
        classes = self.samples.classes
        common: dict[str, Any] = {
            "ids": np.asarray(ids, dtype=np.int64), "seed": self.seed, "classes": classes, "scale": self.scale,
            "x0": np.zeros((len(ids), self.dim_x), dtype=self.dtype),
            "y0": np.zeros((len(ids), self.dim_y), dtype=self.dtype),
        }
        train = [self.samples.train.take(self.train[i]) for i in ids]
        val = [self.samples.val.take(self.val[i]) for i in ids]
        if sparse.issparse(self.samples.train.features) and self.dim_y >= WIDE:
            warm(self.dtype)
            return WideTuningShard(
                **common, train=tuple(documents(part, self.dtype) for part in train),
                val=tuple(documents(part, self.dtype) for part in val),
            )
        return CoefficientTuningShard(
            **common, train=level(train, classes, self.dtype), val=level(val, classes, self.dtype)
        )

    def evaluate(self, x: Array, y: Array) -> dict[str, Array]:
        test = self._test_features
        found = [
            accuracy_and_loss(test @ row.reshape(self.dim_x, -1), self.samples.test.labels) for row in np.asarray(y)
        ]
        accuracy, loss = np.array(found).reshape(-1, 2).T
        return {"test_accuracy": accuracy, "test_loss": loss}

    @cached_property
    def _test_features(self) -> Any:
        return self.samples.test.features.astype(self.dtype)

    def extra(self, x_mean: Array, y_mean: Array, lam: float | None) -> dict[str, float]:
        """How far the coefficients have moved from their start at zero: near 0, a curve shows the inner loop alone."""
        return {"x_moved": float(np.linalg.norm(x_mean))}

    def describe(self) -> dict[str, Any]:
        return {
            "task": "coefficient_tuning", "nodes": self.nodes, "dim_x": self.dim_x, "dim_y": self.dim_y,
            "train_sizes": [len(part) for part in self.train], "val_sizes": [len(part) for part in self.val],
            **self.samples.describe(),
        }


@dataclass(frozen=True, eq=False)
class CoefficientTuningShard(Shard):
    """Closed-form oracles over stacked nodes."""

    train: Level
    val: Level
    classes: int
    scale: float

    def f(self, x: Array, y: Array) -> Array:
        rows, loss = self.val.rows, self.val.loss
        return rows.total(loss.loss(rows.scores(self._matrix(y))))

    def g(self, x: Array, y: Array) -> Array:
        xp = array_namespace(x)
        rows, loss = self.train.rows, self.train.loss
        value: Array = rows.total(loss.loss(rows.scores(self._matrix(y)))) + xp.sum(self.g_x(x, y), axis=1)
        return value

    def f_x(self, x: Array, y: Array) -> Array:
        zero: Array = array_namespace(x).zeros_like(x)
        return zero

    def f_y(self, x: Array, y: Array) -> Array:
        rows, loss = self.val.rows, self.val.loss
        return rows.pull(loss.residual(rows.scores(self._matrix(y)))).reshape(y.shape)

    def g_x(self, x: Array, y: Array) -> Array:
        xp = array_namespace(x)
        w = self._matrix(y)
        gradient: Array = self.scale * xp.exp(x) * xp.sum(w * w, axis=2)
        return gradient

    def g_y(self, x: Array, y: Array) -> Array:
        rows, loss = self.train.rows, self.train.loss
        w = self._matrix(y)
        gradient = rows.pull(loss.residual(rows.scores(w)))
        gradient += self._ridge(x) * w
        return gradient.reshape(y.shape)

    def g_yy(self, x: Array, y: Array, v: Array) -> Array:
        rows, loss = self.train.rows, self.train.loss
        u = self._matrix(v)
        product = rows.pull(loss.curvature(rows.scores(self._matrix(y)), rows.scores(u)))
        product += self._ridge(x) * u
        return product.reshape(y.shape)

    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        xp = array_namespace(x)
        product: Array = 2.0 * self.scale * xp.exp(x) * xp.sum(self._matrix(y) * self._matrix(v), axis=2)
        return product

    def _matrix(self, y: Array) -> Array:
        return y.reshape(y.shape[0], -1, self.classes)

    def _ridge(self, x: Array) -> Array:
        """(nodes, features, 1) the regulariser's curvature, which is the same for every class."""
        ridge: Array = ((2.0 * self.scale) * array_namespace(x).exp(x))[:, :, None]
        return ridge
