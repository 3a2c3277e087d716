"""Hyper-representation: a backbone learned on the upper level feeds a linear head learned on the lower level.

    g_i(x, y) = cross-entropy(train_i; φ_x · y) + μ/2 ‖y‖²        f_i(x, y) = cross-entropy(val_i; φ_x · y)

φ_x is a multilayer perceptron; x has weights (inputs × outputs, row by row) and bias of each hidden layer in turn, y is
the head without bias. x starts at one random point common to all nodes (He's scale for relu, Glorot's for tanh, biases
zero). y starts at zero: the lower level is strongly convex, so no symmetry needs breaking there. Until the first step
changes y, ∇_x f = ∇_x g = 0, as in coefficient tuning.

All derivatives are closed forms. With scores S = φ y, residual R = ∂loss/∂S and curvature C[·] = ∂²loss/∂S²[·], the
three upper derivatives differ only in the gradient at the backbone's output, and one `backward` serves them all:

    ∇_x f, ∇_x g:   R yᵀ                    ∇²_xy g v:   R vᵀ + C[φ v] yᵀ
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
from array_api_compat import array_namespace

from dbo.tasks.api import Array, DataSize, Direction, Part, Setup, Shard, Task, Work, generator, param, task
from dbo.tasks.kernels.memory import Memory, remember
from dbo.tasks.partitions import assign_samples
from dbo.tasks.problems.classification import ClassificationProblem
from dbo.tasks.problems.softmax import CrossEntropy
from dbo.tasks.problems.stacking import DenseRows, Layout, Level, stack_level


@task("hyper_representation")
@dataclass(frozen=True, slots=True, kw_only=True)
class HyperRepresentation(Task):
    """Linear head (lower level) on the features of a multilayer perceptron that is learned on the upper level."""

    datasets: ClassVar[tuple[str, ...]] = ("digits", "mnist")
    dataset_defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {"mnist": {"hidden": (96, 64)}}
    directions: ClassVar[Mapping[str, Direction]] = {"test_accuracy": "max", "test_loss": "min"}
    strongly_convex: ClassVar[bool] = True

    dataset: str = param("digits", help="where the samples come from; dense features only")
    hidden: tuple[int, ...] = param(
        (32, 16), ge=1, help="sizes of the hidden layers, the last one feeds the head; (96, 64) for mnist"
    )
    activation: Literal["relu", "tanh"] = param("relu", help="nonlinearity after every hidden layer")
    mu: float = param(0.01, gt=0, help="ridge on the head: makes the lower level strongly convex")

    def __post_init__(self) -> None:
        if not self.hidden:
            raise ValueError("hidden: [] is not allowed; must have at least one layer")

    def estimate_work(self, nodes: int, data: DataSize | None) -> Work | None:
        if data is None:
            return None
        sizes = (data.features, *self.hidden, data.classes)
        weights = sum(before * after for before, after in pairwise(sizes))
        return Work(3 * data.samples * weights, weights)      # forward, and backward to both factors

    def build(self, setup: Setup) -> "HyperRepresentationProblem":
        samples = setup.load_samples()
        if not isinstance(samples.train.features, np.ndarray):
            raise ValueError(
                f"task.dataset: hyper_representation needs dense features, {self.dataset} has sparse ones; "
                f"set dense: true"
            )
        train, val = assign_samples(samples, setup.nodes, setup.seed, setup.partition)
        backbone = Backbone((samples.train.features.shape[1], *self.hidden), self.activation)
        return HyperRepresentationProblem(samples, train, val, setup.seed, setup.dtype, backbone, self.mu)


@dataclass(frozen=True, slots=True)
class Backbone:
    """The perceptron φ_x over stacked nodes: every node has its own weights, row i of x."""

    widths: tuple[int, ...]    # inputs, then the hidden layers
    activation: Literal["relu", "tanh"]

    @property
    def dim(self) -> int:
        return sum((a + 1) * b for a, b in pairwise(self.widths))

    def init(self, rng: np.random.Generator) -> Array:
        """Return (dim,) random weights, zero biases."""
        parts = []
        for a, b in pairwise(self.widths):
            variance = 2.0 / a if self.activation == "relu" else 2.0 / (a + b)
            parts += [np.sqrt(variance) * rng.standard_normal(a * b), np.zeros(b)]
        return np.concatenate(parts)

    def layers(self, x: Array) -> list[tuple[Array, Array]]:
        """Return views of x: (nodes, inputs, outputs) weights and (nodes, 1, outputs) biases of each layer."""
        layers, at = [], 0
        for a, b in pairwise(self.widths):
            weights, bias = x[:, at : at + a * b], x[:, at + a * b : at + (a + 1) * b]
            layers.append((weights.reshape(-1, a, b), bias.reshape(-1, 1, b)))
            at += (a + 1) * b
        return layers

    def forward(self, layout: Layout, features: Array, x: Array) -> list[Array]:
        """Return the input and the activations of each layer, (samples, width) each; the last are φ_x."""
        xp = array_namespace(x)
        activations = [features]
        for weights, bias in self.layers(x):
            z = layout.matmul(activations[-1], weights)
            layout.add_rows_to(z, bias)
            if self.activation == "tanh":
                activations.append(xp.tanh(z))
            else:
                activations.append(np.maximum(z, 0, out=z) if isinstance(z, np.ndarray) else xp.clip(z, 0))
        return activations

    def backward(self, layout: Layout, activations: list[Array], x: Array, d: Array) -> Array:
        """Return the (nodes, dim) gradient in x of a function whose gradient in φ_x is d, (samples, last width)."""
        xp = array_namespace(x)
        layers = self.layers(x)
        gradient: Array = xp.empty_like(x)
        for k, (of_weights, of_bias) in reversed(list(enumerate(self.layers(gradient)))):
            out = activations[k + 1]
            d = d * (1.0 - out * out) if self.activation == "tanh" else xp.where(out > 0, d, 0.0)
            if isinstance(x, np.ndarray):
                layout.matmul_transposed(activations[k], d, out=of_weights)
            else:
                of_weights[:] = layout.matmul_transposed(activations[k], d)
            of_bias[:, 0] = layout.sum_samples(d)
            if k > 0:
                d = layout.matmul(d, layers[k][0].swapaxes(1, 2))
        return gradient


@dataclass(frozen=True, eq=False)
class HyperRepresentationProblem(ClassificationProblem):
    """The samples of all nodes, and the shape of the backbone."""

    task: ClassVar[str] = "hyper_representation"

    backbone: Backbone
    mu: float

    @property
    def dim_x(self) -> int:
        return self.backbone.dim

    @property
    def dim_y(self) -> int:
        return self.backbone.widths[-1] * self.samples.classes

    def shard(self, ids: Sequence[int]) -> "HyperRepresentationShard":
        train, val = (self._stack_level(parts) for parts in self.node_parts(ids))
        x0 = self.backbone.init(generator(self.seed, "hyper_representation.start")).astype(self.dtype)
        return HyperRepresentationShard(
            ids=np.asarray(ids, dtype=np.int64), seed=self.seed,
            x0=np.tile(x0, (len(ids), 1)), y0=np.zeros((len(ids), self.dim_y), dtype=self.dtype),
            train=train, val=val, classes=self.samples.classes, mu=self.mu,
        )

    def _stack_level(self, parts: Sequence[Part]) -> "BackboneLevel":
        return BackboneLevel(stack_level(parts, self.samples.classes, self.dtype), self.backbone)

    def scores(self, x: Array, y: Array, features: Array) -> Array:
        phi = self.backbone.forward(Layout.from_sizes([len(features)]), features, x[None])[-1]
        return phi @ y.reshape(-1, self.samples.classes)

    def shape(self) -> dict[str, Any]:
        return {**super().shape(), "widths": list(self.backbone.widths)}


@dataclass(slots=True)
class ForwardCache:
    """The last forward pass: an inner loop needs the same φ_x K times. A copied or converted shard starts empty.

    A caller of the whole shard may reuse the buffer of x. A batch lives for a few steps in which nobody writes into x.
    """

    x: Memory | None = None
    is_batch: bool = False
    activations: list[Array] = field(default_factory=list)
    passes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class BackboneLevel:
    """One level's samples, and the backbone that is applied to them."""

    level: Level
    backbone: Backbone
    cache: ForwardCache = field(default_factory=ForwardCache, init=False)

    @property
    def rows(self) -> DenseRows:
        assert isinstance(self.level.rows, DenseRows)    # `build` refuses sparse features
        return self.level.rows

    @property
    def loss(self) -> CrossEntropy:
        return self.level.loss

    def take(self, numbers: Array) -> "BackboneLevel":
        """Return the samples with these numbers, (nodes, batch), among each node's own."""
        batch = BackboneLevel(self.level.take(numbers), self.backbone)
        batch.cache.is_batch = True
        return batch

    def forward(self, x: Array) -> list[Array]:
        """Return the activations at x, computed once per x."""
        cache = self.cache
        if cache.x is None or not cache.x.matches(x):
            cache.activations = self.backbone.forward(self.rows.layout, self.rows.features, x)
            cache.x = remember(x, is_kept=cache.is_batch)
            cache.passes += 1
        return cache.activations

    def phi(self, x: Array) -> Array:
        """Return (samples, last width) the inputs of the head."""
        return self.forward(x)[-1]

    def backward(self, x: Array, d: Array) -> Array:
        return self.backbone.backward(self.rows.layout, self.forward(x), x, d)

    # ---- the loss as a function of (x, w), where w is the head as (nodes, width, classes) ----------------------------

    def value(self, x: Array, w: Array) -> Array:
        layout = self.rows.layout
        return layout.sum_samples(self.loss.loss(layout.matmul(self.phi(x), w)))

    def residual(self, x: Array, w: Array) -> Array:
        return self.loss.residual(self.rows.layout.matmul(self.phi(x), w))

    def gradient_x(self, x: Array, w: Array) -> Array:
        return self.backward(x, self.rows.layout.matmul(self.residual(x, w), w.swapaxes(1, 2)))

    def gradient_w(self, x: Array, w: Array) -> Array:
        return self.rows.layout.matmul_transposed(self.phi(x), self.residual(x, w))


@dataclass(frozen=True, eq=False)
class HyperRepresentationShard(Shard):
    """Closed-form oracles over stacked nodes."""

    train: BackboneLevel
    val: BackboneLevel
    classes: int
    mu: float

    @property
    def sizes(self) -> tuple[Array, Array]:
        return self.train.level.sizes, self.val.level.sizes

    def subset(self, lower: Array | None, upper: Array | None) -> "HyperRepresentationShard":
        return replace(
            self, train=self.train if lower is None else self.train.take(lower),
            val=self.val if upper is None else self.val.take(upper),
        )

    def f(self, x: Array, y: Array) -> Array:
        return self.val.value(x, self._matrix(y))

    def g(self, x: Array, y: Array) -> Array:
        ridge: Array = (0.5 * self.mu) * array_namespace(y).sum(y * y, axis=1)
        return self.train.value(x, self._matrix(y)) + ridge

    def f_x(self, x: Array, y: Array) -> Array:
        return self.val.gradient_x(x, self._matrix(y))

    def f_y(self, x: Array, y: Array) -> Array:
        return self.val.gradient_w(x, self._matrix(y)).reshape(y.shape)

    def g_x(self, x: Array, y: Array) -> Array:
        return self.train.gradient_x(x, self._matrix(y))

    def g_y(self, x: Array, y: Array) -> Array:
        gradient = self.train.gradient_w(x, self._matrix(y)).reshape(y.shape)
        gradient += self.mu * y
        return gradient

    def g_yy(self, x: Array, y: Array, v: Array) -> Array:
        layout, phi = self.train.rows.layout, self.train.phi(x)
        curvature = self.train.loss.curvature(
            layout.matmul(phi, self._matrix(y)), layout.matmul(phi, self._matrix(v))
        )
        product = layout.matmul_transposed(phi, curvature).reshape(y.shape)
        product += self.mu * v
        return product

    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        layout, phi, loss = self.train.rows.layout, self.train.phi(x), self.train.loss
        w, u = self._matrix(y), self._matrix(v)
        scores = layout.matmul(phi, w)
        curvature = loss.curvature(scores, layout.matmul(phi, u))
        d = layout.matmul(loss.residual(scores), u.swapaxes(1, 2)) + layout.matmul(curvature, w.swapaxes(1, 2))
        return self.train.backward(x, d)

    def _matrix(self, y: Array) -> Array:
        return y.reshape(y.shape[0], -1, self.classes)
