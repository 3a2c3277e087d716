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
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
from array_api_compat import array_namespace

from dbo.tasks.api import Array, Batches, DataSize, Direction, Part, Setup, Shard, Task, Work, generator, param, task
from dbo.tasks.partitions import assign_samples
from dbo.tasks.problems.backbone import Backbone, BackboneLevel, BackboneSamples
from dbo.tasks.problems.classification import ClassificationProblem
from dbo.tasks.problems.stacking import Layout, stack_level


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
        samples = setup.load_samples(needs_classes=True)
        if not isinstance(samples.train.features, np.ndarray):
            raise ValueError(
                f"task.dataset: hyper_representation needs dense features, {self.dataset} has sparse ones; "
                f"set dense: true"
            )
        train, val = assign_samples(samples, setup.nodes, setup.seed, setup.partition)
        backbone = Backbone((samples.train.features.shape[1], *self.hidden), self.activation)
        return HyperRepresentationProblem(samples, train, val, setup.seed, setup.dtype, backbone, self.mu)


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

    def score_models(self, x: Array, y: Array, features: Any) -> Array:
        phi = self.backbone.forward_common(features, x)
        head = y.reshape(len(y), -1, self.samples.classes)
        scores: Array = np.matmul(head.swapaxes(1, 2), phi.swapaxes(1, 2))
        return scores.transpose(1, 2, 0)

    def count_entries(self, samples: int) -> int:
        return max(self.dim_x + self.dim_y, samples * max(*self.backbone.widths[1:], self.samples.classes))

    def shape(self) -> dict[str, Any]:
        return {**super().shape(), "widths": list(self.backbone.widths)}


@dataclass(frozen=True, eq=False)
class HyperRepresentationShard(Shard):
    """Closed-form oracles over stacked nodes."""

    train: BackboneSamples
    val: BackboneSamples
    classes: int
    mu: float

    @property
    def sizes(self) -> tuple[Array, Array]:
        return self.train.sizes, self.val.sizes

    def subset(self, lower: Array | None, upper: Array | None) -> "HyperRepresentationShard":
        assert isinstance(self.train, BackboneLevel)      # a batch of a batch is never drawn
        assert isinstance(self.val, BackboneLevel)
        return replace(
            self, train=self.train if lower is None else self.train.take(lower),
            val=self.val if upper is None else self.val.take(upper),
        )

    def draw_batch(self, batches: Batches, round_: int, step: int) -> "HyperRepresentationShard":
        return replace(
            self, train=self._draw_level("lower", self.train, batches, round_, step),
            val=self._draw_level("upper", self.val, batches, round_, step),
        )

    def _draw_level(
        self, name: Literal["lower", "upper"], level: BackboneSamples, batches: Batches, round_: int, step: int
    ) -> BackboneSamples:
        """Return the batch of one level, which computes the next ones of its round ahead if x does not move."""
        assert isinstance(level, BackboneLevel)

        def draw(at: int) -> Array:
            numbers = batches.draw(name, self.seed, self.ids, level.sizes, round_, at)
            assert numbers is not None
            return numbers

        if (batches.lower if name == "lower" else batches.upper) is None:
            return level
        return level.take_step(draw, round_, step, 1 if batches.per == "round" else batches.per_round)

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
        layout, phi = self.train.layout, self.train.phi(x)
        curvature = self.train.loss.curvature(
            layout.matmul(phi, self._matrix(y)), layout.matmul(phi, self._matrix(v))
        )
        product = layout.matmul_transposed(phi, curvature).reshape(y.shape)
        product += self.mu * v
        return product

    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        layout, phi, loss = self.train.layout, self.train.phi(x), self.train.loss
        w, u = self._matrix(y), self._matrix(v)
        scores = layout.matmul(phi, w)
        curvature = loss.curvature(scores, layout.matmul(phi, u))
        d = layout.matmul(loss.residual(scores), u.swapaxes(1, 2)) + layout.matmul(curvature, w.swapaxes(1, 2))
        return self.train.backward(x, d)

    def _matrix(self, y: Array) -> Array:
        return y.reshape(y.shape[0], -1, self.classes)
