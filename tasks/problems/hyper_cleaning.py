"""Hyper-cleaning: every training sample has a weight, learned from clean validation data, because labels may be wrong.

    g_i(x, y) = mean_j∈train_i σ(x_j) cross-entropy_j(y) + μ/2 ‖y‖²        f_i(x, y) = cross-entropy(val_i; y)

A label of the train part is replaced, with probability p, by another class. x has a logit for each training sample of
all nodes and starts at 0, where all weights are 1/2; node i's f_i and g_i touch the logits of its own samples alone. y
is a linear classifier on a fixed representation φ (random_features.py), flattened row by row; it starts at 0. f does
not depend on x, so ∇_x f = 0. With losses ℓ_j and residuals R_j, both scaled by 1/n on a node of n samples:

    ∂g/∂x_j = σ'(x_j) ℓ_j        ∂/∂x_j ⟨∇_y g, v⟩ = σ'(x_j) ⟨R_j, φ_j v⟩

These derivatives are of size 1/n: step sizes of x are of the order of n.

`corruption_f1` is the F1 score of finding the replaced labels: a sample is found if x_j < 0, which means a weight below
that of the start.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from array_api_compat import array_namespace, device

from dbo.tasks.api import Array, DataSize, Direction, Part, Setup, Shard, Split, Task, Work, generator, param, task
from dbo.tasks.partitions import assign_samples
from dbo.tasks.problems.classification import LinearScores
from dbo.tasks.problems.random_features import RandomFeatures
from dbo.tasks.problems.stacking import Level, stack_level


@task("hyper_cleaning")
@dataclass(frozen=True, slots=True, kw_only=True)
class HyperCleaning(Task):
    """Weights of training samples with partly wrong labels (upper level) for a linear classifier (lower level)."""

    datasets: ClassVar[tuple[str, ...]] = ("digits", "mnist", "fashion_mnist")
    dataset_defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        name: {"random_features": 1_000, "components": 400, "images": 10_000} for name in ("mnist", "fashion_mnist")
    }
    strongly_convex: ClassVar[bool] = True
    directions: ClassVar[Mapping[str, Direction]] = {
        "test_accuracy": "max", "test_loss": "min", "corruption_f1": "max",
    }

    dataset: str = param("digits", help="where the samples come from; dense features only")
    corruption: float = param(0.3, gt=0, lt=1, help="p, the probability that a training label is replaced")
    mu: float = param(0.01, gt=0, help="ridge on y: makes the lower level strongly convex")
    random_features: int = param(200, ge=0, help="relu features that inputs are mapped to; 0: none; 1,000 for mnist")
    components: int = param(60, ge=1, help="whitened principal components that y sees; 400 for mnist")

    def estimate_work(self, nodes: int, data: DataSize | None) -> Work | None:
        if data is None:
            return None
        features = self.components if self.random_features else data.features
        return Work(data.samples * features * data.classes, data.samples + features * data.classes)

    def build(self, setup: Setup) -> "HyperCleaningProblem":
        samples = setup.load_samples(needs_classes=True)
        if not isinstance(samples.train.features, np.ndarray):
            raise ValueError(
                f"task.dataset: hyper_cleaning needs dense features, {self.dataset} has sparse ones; set dense: true"
            )
        # By the true labels: which samples a node has does not depend on their errors.
        train, val = assign_samples(samples, setup.nodes, setup.seed, setup.partition)
        labels, corrupted = corrupt_labels(samples.train.labels, samples.classes, self.corruption, setup.seed)
        known = np.concatenate([samples.train.features, samples.val.features])
        phi = RandomFeatures.fit(
            known, self.random_features, self.components, generator(setup.seed, "hyper_cleaning.features")
        )

        def represent(part: Part) -> Part:
            return Part(phi(np.asarray(part.features)), part.labels)

        mapped = Split(
            represent(Part(samples.train.features, labels)), represent(samples.val), represent(samples.test),
            samples.classes, None if samples.tune is None else represent(samples.tune),
        )
        return HyperCleaningProblem(mapped, train, val, setup.seed, setup.dtype, corrupted, self.mu)


def corrupt_labels(labels: Array, classes: int, probability: float, seed: int) -> tuple[Array, Array]:
    """Return labels of which some are replaced by another class, and (samples,) whether each is."""
    rng = generator(seed, "hyper_cleaning.corruption")
    corrupted = rng.random(len(labels)) < probability
    shift = rng.integers(1, classes, size=len(labels))
    return np.where(corrupted, (labels + shift) % classes, labels), corrupted


@dataclass(frozen=True, eq=False)
class HyperCleaningProblem(LinearScores):
    """The samples of all nodes, and which training labels are wrong."""

    task: ClassVar[str] = "hyper_cleaning"

    corrupted: Array    # (training samples,)
    mu: float

    @property
    def dim_x(self) -> int:
        return len(self.samples.train)

    @property
    def dim_y(self) -> int:
        return int(self.samples.train.features.shape[1]) * self.samples.classes

    def shard(self, ids: Sequence[int]) -> "HyperCleaningShard":
        train, val = (stack_level(parts, self.samples.classes, self.dtype) for parts in self.node_parts(ids))
        positions = np.concatenate([
            start + np.arange(size) for start, size in zip(train.starts, train.sizes, strict=True)
        ])
        cells = np.zeros(len(train.labels), dtype=np.int64)
        cells[positions] = np.concatenate([row * self.dim_x + self.train[i] for row, i in enumerate(ids)])
        return HyperCleaningShard(
            ids=np.asarray(ids, dtype=np.int64), seed=self.seed,
            x0=np.zeros((len(ids), self.dim_x), dtype=self.dtype),
            y0=np.zeros((len(ids), self.dim_y), dtype=self.dtype),
            train=train, val=val, cells=cells, positions=positions, classes=self.samples.classes, mu=self.mu,
        )

    def evaluate(self, x: Array, y: Array) -> dict[str, Array]:
        return {**super().evaluate(x, y), "corruption_f1": self._find_f1(x)}

    def evaluate_nodes(self, x: Array, y: Array) -> dict[str, Array]:
        return {**super().evaluate_nodes(x, y), "corruption_f1": self._find_f1(x)}

    def _find_f1(self, x: Array) -> Array:
        return np.array([find_f1(row < 0, self.corrupted) for row in np.asarray(x)])


    def shape(self) -> dict[str, Any]:
        return {**super().shape(), "corrupted": int(self.corrupted.sum())}


def find_f1(found: Array, corrupted: Array) -> float:
    """Return the F1 score of detecting corrupted samples: 2 · hits / (found + corrupted)."""
    total = int(found.sum()) + int(corrupted.sum())
    return 2.0 * int((found & corrupted).sum()) / total if total else 1.0


@dataclass(frozen=True, eq=False)
class HyperCleaningShard(Shard):
    """Closed-form oracles over stacked nodes."""

    train: Level
    val: Level
    cells: Array        # (samples,) of the stacked train samples: position of the logit in the flattened rows of x
    positions: Array    # positions of the samples in the stack; the others are padding
    classes: int
    mu: float

    @property
    def sizes(self) -> tuple[Array, Array]:
        return self.train.sizes, self.val.sizes

    def subset(self, lower: Array | None, upper: Array | None) -> "HyperCleaningShard":
        shard = self
        if lower is not None:
            at = (self.train.starts[:, None] + lower).reshape(-1)
            shard = replace(shard, train=self.train.take(lower), cells=self.cells[at], positions=np.arange(len(at)))
        return shard if upper is None else replace(shard, val=self.val.take(upper))

    def f(self, x: Array, y: Array) -> Array:
        rows, loss = self.val.rows, self.val.loss
        return rows.sum_samples(loss.loss(rows.scores(self._matrix(y))))

    def g(self, x: Array, y: Array) -> Array:
        rows, loss = self.train.rows, self.train.loss
        weighted = self._weights(x) * loss.loss(rows.scores(self._matrix(y)))
        ridge: Array = (0.5 * self.mu) * array_namespace(y).sum(y * y, axis=1)
        return rows.sum_samples(weighted) + ridge

    def f_x(self, x: Array, y: Array) -> Array:
        zero: Array = array_namespace(x).zeros_like(x)
        return zero

    def f_y(self, x: Array, y: Array) -> Array:
        rows, loss = self.val.rows, self.val.loss
        return rows.matmul_transposed(loss.residual(rows.scores(self._matrix(y)))).reshape(y.shape)

    def g_x(self, x: Array, y: Array) -> Array:
        rows, loss = self.train.rows, self.train.loss
        return self._scatter(x, loss.loss(rows.scores(self._matrix(y))))

    def g_y(self, x: Array, y: Array) -> Array:
        rows, loss = self.train.rows, self.train.loss
        residual = self._weights(x)[:, None] * loss.residual(rows.scores(self._matrix(y)))
        gradient = rows.matmul_transposed(residual).reshape(y.shape)
        gradient += self.mu * y
        return gradient

    def g_yy(self, x: Array, y: Array, v: Array) -> Array:
        rows, loss = self.train.rows, self.train.loss
        curvature = loss.curvature(rows.scores(self._matrix(y)), rows.scores(self._matrix(v)))
        product = rows.matmul_transposed(self._weights(x)[:, None] * curvature).reshape(y.shape)
        product += self.mu * v
        return product

    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        rows, loss = self.train.rows, self.train.loss
        residual = loss.residual(rows.scores(self._matrix(y)))
        along: Array = array_namespace(x).sum(residual * rows.scores(self._matrix(v)), axis=1)
        return self._scatter(x, along)

    def _weights(self, x: Array) -> Array:
        """Return (samples,) σ(x_j) of the stacked samples; that of padding has no effect."""
        xp = array_namespace(x)
        weights: Array = 0.5 + 0.5 * xp.tanh(0.5 * x.reshape(-1)[_index(self.cells, x)])    # σ without overflow
        return weights

    def _scatter(self, x: Array, values: Array) -> Array:
        """Return (nodes, dim_x) rows with σ'(x_j) times the values (samples,) at the samples' logits, 0 elsewhere."""
        xp = array_namespace(x)
        weights = self._weights(x)
        out = xp.zeros_like(x).reshape(-1)
        at = _index(self.positions, x)
        out[_index(self.cells[self.positions], x)] = (weights * (1.0 - weights) * values)[at]
        rows: Array = out.reshape(x.shape)
        return rows

    def _matrix(self, y: Array) -> Array:
        return y.reshape(y.shape[0], -1, self.classes)


def _index(numbers: Array, x: Array) -> Any:
    """Return positions as an index of arrays like x."""
    return array_namespace(x).asarray(numbers, device=device(x))
