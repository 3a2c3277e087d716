"""Synthetic logistic regression: the regularisation of every feature is tuned, and node i's features have variance i².

    g_i(x, y) = mean_j log(1 + exp(−b_j a_jᵀ y)) + s/2 Σ_k exp(x_k) y_k²        f_i(x, y) = the same mean over val_i

Node i = 1 … m has features a ~ N(0, i² I) and labels b = sign(aᵀ w + noise), with w and the noise normal. s is one over
the number of a node's training samples, so that s = 1 where losses are summed over samples. x and y start at 0. f does
not depend on x, so ∇_x f = 0. The setting is that of the synthetic experiment of MA-DSBO (X. Chen et al., ICML 2023)
in our reading; sizes and noise are ours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from array_api_compat import array_namespace

from dbo.tasks.api import Array, DataSize, Direction, Problem, Setup, Shard, Task, Work, generator, param, task
from dbo.tasks.arrays import as_index, hash_arrays


@task("logistic_synthetic")
@dataclass(frozen=True, slots=True, kw_only=True)
class LogisticSynthetic(Task):
    """Logistic regression (lower level) with tuned regularisation; node i's features are i times as large."""

    strongly_convex: ClassVar[bool] = True
    directions: ClassVar[Mapping[str, Direction]] = {"test_accuracy": "max", "test_loss": "min"}

    dim: int = param(200, ge=1, le=100_000, help="p, the features: entries of x and of y")
    train_samples: int = param(500, ge=2, help="samples per node for the lower level")
    val_samples: int = param(500, ge=2, help="samples per node for the upper level")
    test_samples: int = param(500, ge=2, help="samples per node for testing")
    label_noise: float = param(0.1, ge=0, help="deviation of the noise in labels, relative to that of aᵀ w on node 1")
    sparsity: float = param(0.5, ge=0, lt=1, help="share of the features that have no effect")

    def estimate_work(self, nodes: int, data: DataSize | None) -> Work | None:
        return Work(nodes * (self.train_samples + self.val_samples) * self.dim, 2 * self.dim)

    def build(self, setup: Setup) -> "LogisticProblem":
        """Generate the samples; those of node i do not depend on the number of nodes."""
        rng = generator(setup.seed, "logistic_synthetic.weights")
        weights = rng.standard_normal(self.dim) * (rng.random(self.dim) >= self.sparsity)
        weights /= max(float(np.linalg.norm(weights)), 1.0)

        def sample(part: str, node: int, count: int) -> tuple[Array, Array]:
            rng = generator(setup.seed, f"logistic_synthetic.{part}", node)
            inputs = (node + 1) * rng.standard_normal((count, self.dim))
            noisy = inputs @ weights + self.label_noise * rng.standard_normal(count)
            return inputs, np.where(noisy >= 0, 1.0, -1.0)

        def stack(part: str, count: int) -> Samples:
            samples = [sample(part, node, count) for node in range(setup.nodes)]
            return Samples(np.stack([a for a, _ in samples]), np.stack([b for _, b in samples]))

        return LogisticProblem(
            train=stack("train", self.train_samples), val=stack("val", self.val_samples),
            test=stack("test", self.test_samples), seed=setup.seed, dtype=setup.dtype,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Samples of some nodes, equally many of each."""

    inputs: Array    # (nodes, samples, features)
    labels: Array    # (nodes, samples), −1 or 1

    def take(self, numbers: Array) -> "Samples":
        """Return the samples with these numbers, (nodes, batch), among each node's own."""
        rows, index = np.arange(len(numbers))[:, None], as_index(numbers, self.inputs)
        return Samples(self.inputs[rows, index], self.labels[rows, index])

    def margins(self, y: Array) -> Array:
        """Return (nodes, samples) b aᵀ y."""
        margins: Array = self.labels * (self.inputs @ y[:, :, None])[:, :, 0]
        return margins

    def value(self, y: Array) -> Array:
        """Return the (nodes,) mean losses."""
        xp = array_namespace(y)
        mean: Array = xp.mean(_log_one_plus_exp(-self.margins(y)), axis=1)
        return mean

    def gradient(self, y: Array) -> Array:
        """Return the (nodes, features) gradients of the mean losses: −mean σ(−b aᵀ y) b a."""
        return self._combine(-_sigmoid(-self.margins(y)) * self.labels)

    def product(self, y: Array, v: Array) -> Array:
        """Return the (nodes, features) Hessian-vector products: mean σ' a aᵀ v."""
        p = _sigmoid(self.margins(y))
        return self._combine(p * (1.0 - p) * (self.inputs @ v[:, :, None])[:, :, 0])

    def _combine(self, coefficients: Array) -> Array:
        combined: Array = (coefficients[:, None, :] @ self.inputs)[:, 0, :] / self.labels.shape[1]
        return combined


def _sigmoid(margins: Array) -> Array:
    value: Array = 0.5 + 0.5 * array_namespace(margins).tanh(0.5 * margins)    # without overflow
    return value


def _log_one_plus_exp(a: Array) -> Array:
    xp = array_namespace(a)
    value: Array = xp.where(a > 0, a, xp.zeros_like(a)) + xp.log1p(xp.exp(-xp.abs(a)))
    return value


@dataclass(frozen=True, eq=False)
class LogisticProblem(Problem):
    """The samples of all nodes in float64, and shards in the experiment's dtype."""

    train: Samples
    val: Samples
    test: Samples
    seed: int
    dtype: str

    @property
    def nodes(self) -> int:
        return len(self.train.labels)

    @property
    def dim_x(self) -> int:
        return int(self.train.inputs.shape[2])

    @property
    def dim_y(self) -> int:
        return self.dim_x

    def sample_sizes(self) -> tuple[list[int], list[int]]:
        return [self.train.labels.shape[1]] * self.nodes, [self.val.labels.shape[1]] * self.nodes

    def shard(self, ids: Sequence[int]) -> "LogisticShard":
        rows = np.asarray(ids, dtype=np.int64)

        def cut(samples: Samples) -> Samples:
            return Samples(samples.inputs[rows].astype(self.dtype), samples.labels[rows].astype(self.dtype))

        zeros = np.zeros((len(rows), self.dim_x), dtype=self.dtype)
        return LogisticShard(
            ids=rows, seed=self.seed, x0=zeros, y0=zeros.copy(), train=cut(self.train), val=cut(self.val),
            scale=1.0 / self.train.labels.shape[1],
        )

    def evaluate(self, x: Array, y: Array) -> dict[str, Array]:
        """Return accuracy and loss on the test samples of all nodes."""
        inputs, labels = self._pooled_test
        margins = labels * (np.asarray(y, dtype=np.float64) @ inputs.T)
        losses = _log_one_plus_exp(-margins)
        return {"test_accuracy": np.mean(margins > 0, axis=1), "test_loss": np.mean(losses, axis=1)}

    @cached_property
    def _pooled_test(self) -> tuple[Array, Array]:
        return self.test.inputs.reshape(-1, self.dim_x), self.test.labels.reshape(-1)

    def task_metrics(self, x_mean: Array, y_mean: Array) -> dict[str, float]:
        """Return the distance of x from its start at zero: near 0, a curve shows progress of the lower level alone."""
        return {"x_moved": float(np.linalg.norm(x_mean))}

    def describe(self) -> dict[str, Any]:
        parts = (self.train, self.val, self.test)
        return {
            "task": "logistic_synthetic", "nodes": self.nodes, "dim_x": self.dim_x, "dim_y": self.dim_y,
            **dict(zip(("train_sizes", "val_sizes"), self.sample_sizes(), strict=True)),
            "test_size": self.test.labels.size,
            "data_sha256": hash_arrays(array for part in parts for array in (part.inputs, part.labels)),
        }


@dataclass(frozen=True, eq=False)
class LogisticShard(Shard):
    """Closed-form oracles over stacked nodes."""

    train: Samples
    val: Samples
    scale: float      # s

    @property
    def sizes(self) -> tuple[Array, Array]:
        lower, upper = (
            np.full(self.nodes, level.labels.shape[1], dtype=np.int64) for level in (self.train, self.val)
        )
        return lower, upper

    def subset(self, lower: Array | None, upper: Array | None) -> "LogisticShard":
        return replace(
            self, train=self.train if lower is None else self.train.take(lower),
            val=self.val if upper is None else self.val.take(upper),
        )

    def f(self, x: Array, y: Array) -> Array:
        return self.val.value(y)

    def g(self, x: Array, y: Array) -> Array:
        xp = array_namespace(x)
        value: Array = self.train.value(y) + 0.5 * self.scale * xp.sum(xp.exp(x) * y * y, axis=1)
        return value

    def f_x(self, x: Array, y: Array) -> Array:
        zero: Array = array_namespace(x).zeros_like(x)
        return zero

    def f_y(self, x: Array, y: Array) -> Array:
        return self.val.gradient(y)

    def g_x(self, x: Array, y: Array) -> Array:
        gradient: Array = 0.5 * self.scale * array_namespace(x).exp(x) * y * y
        return gradient

    def g_y(self, x: Array, y: Array) -> Array:
        gradient: Array = self.train.gradient(y) + self.scale * array_namespace(x).exp(x) * y
        return gradient

    def g_yy(self, x: Array, y: Array, v: Array) -> Array:
        product: Array = self.train.product(y, v) + self.scale * array_namespace(x).exp(x) * v
        return product

    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        product: Array = self.scale * array_namespace(x).exp(x) * y * v
        return product
