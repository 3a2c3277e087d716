"""Hyper-representation: a backbone learned on the upper level feeds a linear head learned on the lower level.

    g_i(x, y) = cross-entropy(train_i; φ_x · y) + μ/2 ‖y‖²        f_i(x, y) = cross-entropy(val_i; φ_x · y)

φ_x is a multilayer perceptron; x holds weights (inputs × outputs, row by row) and bias of each hidden layer in turn, y
the head without bias. x starts at one random point common to all nodes (He's scale for relu, Glorot's for tanh, biases
zero). y starts at zero: the lower level is strongly convex, so no symmetry needs breaking there, and its first step
moves y. Until then ∇_x f = ∇_x g = 0, as in coefficient tuning.

All derivatives are closed forms. With scores S = φ y, residual R = ∂loss/∂S and curvature C[·] = ∂²loss/∂S²[·], the
three upper derivatives differ only in what reaches the backbone's output, and one `backward` serves them all:

    ∇_x f, ∇_x g:   R yᵀ                    ∇²_xy g v:   R vᵀ + C[φ v] yᵀ
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Gt, MinLen
from array_api_compat import array_namespace
from typing_extensions import Doc

from dbo.tasks.api import Array, Samples, Setup, Shard, generator, stacked
from dbo.tasks.partitions import deal
from dbo.tasks.problems.softmax import CrossEntropy, accuracy_and_loss
from dbo.tasks.problems.stacking import DenseRows, Layout, layout, level

Activation = Literal["relu", "tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperRepresentation:
    """Linear head (lower level) on the features of a multilayer perceptron that is learned on the upper level."""

    datasets: ClassVar[tuple[str, ...]] = ("digits", "mnist")
    usual: ClassVar[Mapping[str, Mapping[str, Any]]] = {"mnist": {"hidden": (96, 64)}}

    dataset: Annotated[str, Doc("where the samples come from; dense features only")] = "digits"
    hidden: Annotated[
        tuple[Annotated[int, Ge(1)], ...], MinLen(1),
        Doc("sizes of the hidden layers, the last one feeds the head; (96, 64) for mnist"),
    ] = (32, 16)
    activation: Annotated[Activation, Doc("nonlinearity after every hidden layer")] = "relu"
    mu: Annotated[float, Gt(0), Doc("ridge on the head: makes the lower level strongly convex")] = 0.01

    def build(self, setup: Setup) -> "HyperRepresentationProblem":
        samples = setup.samples()
        if not isinstance(samples.train.features, np.ndarray):
            raise ValueError(f"task.dataset: hyper_representation needs dense features, {self.dataset} has sparse ones")
        train, val = deal(samples, setup.nodes, setup.seed, setup.partition)
        backbone = Backbone((samples.train.features.shape[1], *self.hidden), self.activation)
        return HyperRepresentationProblem(samples, train, val, backbone, self.mu, setup.seed, setup.dtype)


@dataclass(frozen=True, slots=True)
class Backbone:
    """The perceptron φ_x over stacked nodes: every node has weights of its own, row i of x."""

    widths: tuple[int, ...]    # inputs, then the hidden layers
    activation: Activation

    @property
    def dim(self) -> int:
        return sum((a + 1) * b for a, b in pairwise(self.widths))

    def start(self, rng: np.random.Generator) -> Array:
        """(dim,) random weights, zero biases."""
        parts = []
        for a, b in pairwise(self.widths):
            variance = 2.0 / a if self.activation == "relu" else 2.0 / (a + b)
            parts += [np.sqrt(variance) * rng.standard_normal(a * b), np.zeros(b)]
        return np.concatenate(parts)

    def layers(self, x: Array) -> list[tuple[Array, Array]]:
        """Views of x: (nodes, inputs, outputs) weights and (nodes, 1, outputs) biases of each layer."""
        found, at = [], 0
        for a, b in pairwise(self.widths):
            weights, bias = x[:, at : at + a * b], x[:, at + a * b : at + (a + 1) * b]
            found.append((weights.reshape(-1, a, b), bias.reshape(-1, 1, b)))
            at += (a + 1) * b
        return found

    def forward(self, where: Layout, features: Array, x: Array) -> list[Array]:
        """The input and what each layer makes of it, (samples, width) each; the last is φ_x."""
        xp = array_namespace(x)
        steps = [features]
        for weights, bias in self.layers(x):
            z = where.plus(where.times(steps[-1], weights), bias)
            steps.append(xp.tanh(z) if self.activation == "tanh" else xp.where(z > 0, z, xp.zeros_like(z)))
        return steps

    def backward(self, where: Layout, steps: list[Array], x: Array, d: Array) -> Array:
        """(nodes, dim) gradient in x of a function whose gradient in φ_x is d, (samples, last width)."""
        xp = array_namespace(x)
        layers = self.layers(x)
        parts: list[Array] = []
        for k in reversed(range(len(layers))):
            out = steps[k + 1]
            d = d * (1.0 - out * out) if self.activation == "tanh" else xp.where(out > 0, d, xp.zeros_like(d))
            parts = [where.pull(steps[k], d).reshape(x.shape[0], -1), where.total(d), *parts]
            if k > 0:
                d = where.times(d, layers[k][0].swapaxes(1, 2))
        gradient: Array = xp.concat(parts, axis=1)
        return gradient


@dataclass(frozen=True, eq=False)
class HyperRepresentationProblem:
    """The samples, who holds which, and the shape of the backbone."""

    samples: Samples
    train: list[Array]    # sample numbers per node
    val: list[Array]
    backbone: Backbone
    mu: float
    seed: int
    dtype: str

    @property
    def nodes(self) -> int:
        return len(self.train)

    @property
    def dim_x(self) -> int:
        return self.backbone.dim

    @property
    def dim_y(self) -> int:
        return self.backbone.widths[-1] * self.samples.classes

    def shard(self, ids: Sequence[int]) -> "HyperRepresentationShard":
        classes = self.samples.classes
        levels = []
        for part, owned in ((self.samples.train, self.train), (self.samples.val, self.val)):
            data = level([part.take(owned[i]) for i in ids], classes, self.dtype)
            assert isinstance(data.rows, DenseRows)    # `build` has refused sparse features
            levels.append(BackboneLevel(data.rows, data.loss, self.backbone))
        start = self.backbone.start(generator(self.seed, "hyper_representation.start"))
        return HyperRepresentationShard(
            ids=np.asarray(ids, dtype=np.int64), seed=self.seed,
            x0=stacked(start.astype(self.dtype), len(ids)),
            y0=np.zeros((len(ids), self.dim_y), dtype=self.dtype),
            train=levels[0], val=levels[1], classes=classes, mu=self.mu,
        )

    def evaluate(self, x: Array, y: Array) -> dict[str, Array]:
        features, labels = self._test_features, self.samples.test.labels
        where = layout([len(labels)])
        found = []
        for row, head in zip(np.asarray(x), np.asarray(y), strict=True):
            phi = self.backbone.forward(where, features, row[None])[-1]
            found.append(accuracy_and_loss(phi @ head.reshape(-1, self.samples.classes), labels))
        accuracy, loss = np.array(found).reshape(-1, 2).T
        return {"test_accuracy": accuracy, "test_loss": loss}

    @cached_property
    def _test_features(self) -> Any:
        return self.samples.test.features.astype(self.dtype)

    def extra(self, x_mean: Array, y_mean: Array, lam: float | None) -> dict[str, float]:
        return {}

    def describe(self) -> dict[str, Any]:
        return {
            "task": "hyper_representation", "nodes": self.nodes, "dim_x": self.dim_x, "dim_y": self.dim_y,
            "widths": list(self.backbone.widths),
            "train_sizes": [len(part) for part in self.train], "val_sizes": [len(part) for part in self.val],
            **self.samples.describe(),
        }


@dataclass(slots=True)
class Remembered:
    """The last forward pass: an inner loop asks for the same φ_x K times. Forgotten when a shard is copied or moved."""

    x: Any = None
    steps: list[Array] = field(default_factory=list)
    passes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class BackboneLevel:
    """One level's samples, seen through the backbone."""

    rows: DenseRows
    loss: CrossEntropy
    backbone: Backbone
    remembered: Remembered = field(default_factory=Remembered, init=False)

    def steps(self, x: Array) -> list[Array]:
        """The forward pass at x. The key is x's content, not its identity: a caller may reuse a buffer."""
        memory = self.remembered
        if memory.x is None or memory.x.shape != x.shape or not bool((memory.x == x).all()):
            memory.steps = self.backbone.forward(self.rows.layout, self.rows.features, x)
            memory.x = array_namespace(x).asarray(x, copy=True)
            memory.passes += 1
        return memory.steps

    def phi(self, x: Array) -> Array:
        """(samples, last width) the features that the head sees."""
        return self.steps(x)[-1]

    def backward(self, x: Array, d: Array) -> Array:
        return self.backbone.backward(self.rows.layout, self.steps(x), x, d)

    # ---- the loss as a function of (x, w), where w is the head as (nodes, width, classes) ----------------------------

    def value(self, x: Array, w: Array) -> Array:
        where = self.rows.layout
        return where.total(self.loss.loss(where.times(self.phi(x), w)))

    def residual(self, x: Array, w: Array) -> Array:
        return self.loss.residual(self.rows.layout.times(self.phi(x), w))

    def in_x(self, x: Array, w: Array) -> Array:
        return self.backward(x, self.rows.layout.times(self.residual(x, w), w.swapaxes(1, 2)))

    def in_w(self, x: Array, w: Array) -> Array:
        return self.rows.layout.pull(self.phi(x), self.residual(x, w))


@dataclass(frozen=True, eq=False)
class HyperRepresentationShard(Shard):
    """Closed-form oracles over stacked nodes."""

    train: BackboneLevel
    val: BackboneLevel
    classes: int
    mu: float

    def f(self, x: Array, y: Array) -> Array:
        return self.val.value(x, self._matrix(y))

    def g(self, x: Array, y: Array) -> Array:
        ridge: Array = (0.5 * self.mu) * array_namespace(y).sum(y * y, axis=1)
        return self.train.value(x, self._matrix(y)) + ridge

    def f_x(self, x: Array, y: Array) -> Array:
        return self.val.in_x(x, self._matrix(y))

    def f_y(self, x: Array, y: Array) -> Array:
        return self.val.in_w(x, self._matrix(y)).reshape(y.shape)

    def g_x(self, x: Array, y: Array) -> Array:
        return self.train.in_x(x, self._matrix(y))

    def g_y(self, x: Array, y: Array) -> Array:
        gradient = self.train.in_w(x, self._matrix(y)).reshape(y.shape)
        gradient += self.mu * y
        return gradient

    def g_yy(self, x: Array, y: Array, v: Array) -> Array:
        where, phi = self.train.rows.layout, self.train.phi(x)
        bent = self.train.loss.curvature(where.times(phi, self._matrix(y)), where.times(phi, self._matrix(v)))
        product = where.pull(phi, bent).reshape(y.shape)
        product += self.mu * v
        return product

    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        where, phi, loss = self.train.rows.layout, self.train.phi(x), self.train.loss
        w, u = self._matrix(y), self._matrix(v)
        scores = where.times(phi, w)
        bent = loss.curvature(scores, where.times(phi, u))
        d = where.times(loss.residual(scores), u.swapaxes(1, 2)) + where.times(bent, w.swapaxes(1, 2))
        return self.train.backward(x, d)

    def _matrix(self, y: Array) -> Array:
        return y.reshape(y.shape[0], -1, self.classes)
