"""Apply a multilayer perceptron to the samples of stacked nodes, forward and backward, to all samples or to batches.

What depends on x alone is computed once per x: an inner loop needs the same φ_x K times. With a fresh batch in each
step it needs K batches at one x. Then the passes of the next batches are computed ahead, together: the weights of a
node, which fill most of the cache, are loaded once for several batches. The products of batches are compiled loops
where those are faster than BLAS.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any, Literal
from weakref import ref

import numpy as np
from array_api_compat import array_namespace, device

from dbo.tasks.api import Array
from dbo.tasks.kernels.interface import ProductKernels, products_of
from dbo.tasks.kernels.memory import Memory, remember
from dbo.tasks.kernels.threads import map_ranges
from dbo.tasks.notices import print_notice
from dbo.tasks.problems.softmax import CrossEntropy
from dbo.tasks.problems.stacking import DenseRows, Layout, Level, equal_layout, take_features

_ROWS = 256              # samples of a node that are multiplied at once: they stay in the cache with its weights
_MAX_BYTES = 1 << 25     # of activations that are computed ahead
_FEWEST = 1 << 18        # multiplications of a node's batch, in the first layer, from which the import of numba pays


@dataclass(frozen=True, slots=True, eq=False)
class GatheredRows:
    """Samples of a batch, as numbers of rows in the features of a level, where the products read them."""

    features: Array
    at: Array          # (nodes, size)
    products: ProductKernels


@cache
def _import_products(widths: tuple[int, ...], dtype: np.dtype[Any]) -> ProductKernels | None:
    """Return the compiled products if they suit these layers; None: use NumPy. Imports numba, which is slow."""
    from dbo.tasks.kernels import compiling, gathered_products

    if not gathered_products.suits(widths, dtype):
        return None
    if not compiling.is_cached(gathered_products.multiply_transposed):
        print_notice("compiling products of mini-batches, once")
    gathered_products.compile_products(dtype.name)
    return gathered_products


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

    def forward_common(self, features: Array, x: Array) -> Array:
        """Return φ_x of the same samples on every node, (nodes, samples, last width), for NumPy arrays."""
        z = features
        for weights, bias in self.layers(x):
            z = np.matmul(z, weights)
            z += bias
            np.tanh(z, out=z) if self.activation == "tanh" else np.maximum(z, 0, out=z)
        return z

    def backward(self, layout: Layout, activations: list[Any], x: Array, d: Array) -> Array:
        """Return the (nodes, dim) gradient in x of a function whose gradient in φ_x is d, (samples, last width).

        `activations` are those of `forward`; the inputs may be `GatheredRows`.
        """
        if isinstance(activations[0], GatheredRows):
            return self._backward_gathered(activations, x, d)
        xp = array_namespace(x)
        layers = self.layers(x)
        gradient: Array = xp.empty_like(x)
        for k, (of_weights, of_bias) in reversed(list(enumerate(self.layers(gradient)))):
            out = activations[k + 1]
            d = d * (1.0 - out * out) if self.activation == "tanh" else d * (out > 0)      # `where` branches: slow
            if isinstance(x, np.ndarray):
                layout.matmul_transposed(activations[k], d, out=of_weights)
            else:
                of_weights[:] = layout.matmul_transposed(activations[k], d)
            of_bias[:, 0] = layout.sum_samples(d)
            if k > 0:
                d = layout.matmul(d, layers[k][0].swapaxes(1, 2))
        return gradient

    def find_products(self, features: Array, size: int) -> ProductKernels | None:
        """Return the products for batches of this size, compiled ones or those of a device; None: use NumPy.

        The choice changes bits, so it depends on nothing that differs between blocks.
        """
        if not isinstance(features, np.ndarray):
            return products_of(features)
        if size * self.widths[0] * self.widths[1] < _FEWEST:
            return None
        return _import_products(self.widths[1:], features.dtype)

    def forward_batches(self, features: Array, at: Array, x: Array) -> list[Array]:
        """Return the activations of each layer, (batches, samples, width), for batches of positions.

        `at` are positions among the features, (batches, nodes, size).
        """
        products = self.find_products(features, at.shape[2])
        if products is not None:
            return self._forward_gathered(products, features, at, x)
        batches, nodes, size = at.shape
        dtype, layers = features.dtype, self.layers(x)
        results = [np.empty((batches, nodes, size, width), dtype) for width in self.widths[1:]]
        step = max(1, _ROWS // size)
        inputs, *buffers = (np.empty((step * size, width), dtype) for width in self.widths)
        for node in range(nodes):
            for first in range(0, batches, step):
                chosen = at[first : first + step, node]
                z = inputs[: chosen.size]
                features.take(chosen.reshape(-1), axis=0, out=z, mode="clip")      # positions are valid: no copy
                for (weights, bias), buffer, result in zip(layers, buffers, results, strict=True):
                    z = np.matmul(z, weights[node], out=buffer[: chosen.size])
                    z += bias[node]
                    np.tanh(z, out=z) if self.activation == "tanh" else np.maximum(z, 0, out=z)
                    result[first : first + step, node] = z.reshape(*chosen.shape, -1)
        return [result.reshape(batches, nodes * size, -1) for result in results]

    def _forward_gathered(self, products: ProductKernels, features: Array, at: Array, x: Array) -> list[Array]:
        """`forward_batches` without copies of the features."""
        xp, count = array_namespace(x), math.prod(at.shape)
        batches, nodes, size = at.shape
        x, least = _contiguous(x), 0.0 if self.activation == "relu" else -math.inf
        if isinstance(features, np.ndarray):
            least = features.dtype.type(least)      # the loops are compiled for numbers of this type
        # Node by node: the batches of a node follow each other, so that they share its weights.
        source, target = (
            _contiguous(xp.permute_dims(each, (1, 0, 2))).reshape(nodes, -1)
            for each in (at, _number_rows(x, at.shape)))
        results, first = [], 0
        for a, b in pairwise(self.widths):
            out = xp.empty((count, b), dtype=features.dtype, device=device(features))
            _run(products.multiply, nodes, features, source, x, first, least, out, target)
            if self.activation == "tanh":
                xp.tanh(out, out=out)
            results.append(out.reshape(batches, nodes * size, b))
            features, source, first = out, target, first + (a + 1) * b
        return results

    def _backward_gathered(self, activations: list[Any], x: Array, d: Array) -> Array:
        """`backward` with the products that read rows where they are."""
        inputs, *layers = activations
        xp, products, nodes = array_namespace(x), inputs.products, len(inputs.at)
        everything = _number_rows(x, inputs.at.shape)
        x, first = _contiguous(x), x.shape[1]
        gradient: Array = xp.empty_like(x)
        for k in reversed(range(len(layers))):
            out, width = layers[k], self.widths[k + 1]
            first -= (self.widths[k] + 1) * width
            if self.activation == "tanh":
                d = d * (1.0 - out * out)
            else:
                active = xp.empty_like(out)
                products.drop_inactive(_contiguous(d), out, active)
                d = active
            rows, at = (layers[k - 1], everything) if k else (inputs.features, inputs.at)
            _run(products.multiply_transposed, nodes, rows, at, d, gradient, first)
            if k > 0:
                before = xp.empty((len(d), self.widths[k]), dtype=d.dtype, device=device(d))
                _run(products.multiply_back, nodes, d, everything, x, first, before)
                d = before
        return gradient


def _run(kernel: Any, nodes: int, rows: Array, *arguments: Any) -> None:
    """Call a product for all nodes, on the threads of the host."""
    if isinstance(rows, np.ndarray):
        map_ranges(lambda start, stop: kernel(rows, *arguments, start, stop), nodes)
    else:
        kernel(rows, *arguments, 0, nodes)


def _contiguous(array: Array) -> Array:
    return np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array.contiguous()


def _number_rows(like: Array, shape: tuple[int, ...]) -> Array:
    """Return 0, 1, 2, … in this shape, on the device of an array."""
    numbers: Array = array_namespace(like).arange(math.prod(shape), device=device(like)).reshape(shape)
    return numbers


class BackboneSamples(ABC):
    """Samples of one level, and the loss as a function of (x, w), where w is the head as (nodes, width, classes)."""

    __slots__ = ()

    @property
    @abstractmethod
    def layout(self) -> Layout: ...
    @property
    @abstractmethod
    def loss(self) -> CrossEntropy: ...
    @property
    @abstractmethod
    def sizes(self) -> Array:
        """(nodes,) numbers of samples."""

    @abstractmethod
    def phi(self, x: Array) -> Array:
        """Return (samples, last width) the inputs of the head."""

    @abstractmethod
    def backward(self, x: Array, d: Array) -> Array:
        """Return the (nodes, dim) gradient in x of a function whose gradient in φ_x is d."""

    def value(self, x: Array, w: Array) -> Array:
        return self.layout.sum_samples(self.loss.loss(self.layout.matmul(self.phi(x), w)))

    def residual(self, x: Array, w: Array) -> Array:
        return self.loss.residual(self.layout.matmul(self.phi(x), w))

    def gradient_x(self, x: Array, w: Array) -> Array:
        return self.backward(x, self.layout.matmul(self.residual(x, w), w.swapaxes(1, 2)))

    def gradient_w(self, x: Array, w: Array) -> Array:
        return self.layout.matmul_transposed(self.phi(x), self.residual(x, w))


@dataclass(slots=True)
class ForwardCache:
    """The last forward pass. A copied or converted shard starts empty."""

    x: Memory | None = None
    activations: list[Array] = field(default_factory=list)
    passes: int = 0
    ahead: "ref[LookAhead] | None" = None      # of the open round, as long as one of its batches is in use


@dataclass(frozen=True, slots=True, eq=False)
class BackboneLevel(BackboneSamples):
    """All samples of one level, and the backbone that is applied to them. A caller may reuse the buffer of x."""

    level: Level
    backbone: Backbone
    cache: ForwardCache = field(default_factory=ForwardCache, init=False)

    @property
    def features(self) -> Array:
        assert isinstance(self.level.rows, DenseRows)    # `build` refuses sparse features
        return self.level.rows.features

    @property
    def layout(self) -> Layout:
        assert isinstance(self.level.rows, DenseRows)
        return self.level.rows.layout

    @property
    def loss(self) -> CrossEntropy:
        return self.level.loss

    @property
    def sizes(self) -> Array:
        return self.level.sizes

    def forward(self, x: Array) -> list[Array]:
        """Return the activations at x, computed once per x."""
        cache = self.cache
        if cache.x is None or not cache.x.matches(x):
            cache.activations = self.backbone.forward(self.layout, self.features, x)
            cache.x = remember(x)
            cache.passes += 1
        return cache.activations

    def phi(self, x: Array) -> Array:
        return self.forward(x)[-1]

    def backward(self, x: Array, d: Array) -> Array:
        return self.backbone.backward(self.layout, self.forward(x), x, d)

    def take(self, numbers: Array) -> "BackboneBatch":
        """Return the samples with these numbers, (nodes, batch), among each node's own."""
        return BackboneBatch(self, numbers)

    def take_step(self, draw: Callable[[int], Array], round_: int, step: int, steps: int) -> "BackboneBatch":
        """Return the batch of a step; `draw` gives the numbers of each of the round's steps, as many as `steps`."""
        if not isinstance(self.features, np.ndarray):
            return self.take(draw(step))
        ahead = None if self.cache.ahead is None else self.cache.ahead()
        if ahead is None or ahead.round != round_:
            ahead = LookAhead(self, round_, steps)
            self.cache.ahead = ref(ahead)
        ahead.draw = draw
        return BackboneBatch(self, draw(step), ahead, step)


@dataclass(slots=True, eq=False, weakref_slot=True)
class LookAhead:
    """Forward passes of a round's next batches at the same x, computed together before they are asked for.

    As many are computed ahead as have been asked for at this x in a row: an x that moves after every batch costs
    nothing, and one that moves later at most as much again. What is computed depends on the round alone, so a resumed
    run has the same bits.
    """

    level: BackboneLevel
    round: int
    steps: int                               # batches of the round
    draw: Callable[[int], Array] | None = None
    x: Any = None                            # nobody writes into it during the round
    count: int = 0                           # batches that have been computed at this x
    ready: dict[int, list[Array]] = field(default_factory=dict)

    def find(self, step: int, x: Array) -> list[Array] | None:
        """Return the activations of a step's batch at x, without the features; None: compute this one alone."""
        if self.x is not x:
            self.x, self.count, self.ready = x, 0, {}
        if step not in self.ready:
            if not self.count or step + 1 >= self.steps:
                self.count += 1
                return None
            self._compute(step)
        return self.ready.pop(step)

    def _compute(self, step: int) -> None:
        assert self.draw is not None
        backbone, starts = self.level.backbone, self.level.level.starts
        numbers = self.draw(step)
        most = _MAX_BYTES // (numbers.size * sum(backbone.widths[1:]) * self.x.itemsize)
        steps = range(step, min(step + 1 + min(self.count, most), self.steps))
        at = np.stack([starts[:, None] + self.draw(each) for each in steps])
        layers = backbone.forward_batches(self.level.features, at, self.x)
        self.count += len(steps)
        for k, each in enumerate(steps):
            self.ready[each] = [layer[k] for layer in layers]


class BackboneBatch(BackboneSamples):
    """Some samples of each node, for a few steps in which nobody writes into x."""

    __slots__ = ("_activations", "_ahead", "_at", "_layout", "_loss", "_source", "_step", "_x")

    def __init__(
        self, source: BackboneLevel, numbers: Array, ahead: LookAhead | None = None, step: int = 0
    ) -> None:
        self._source, self._ahead, self._step = source, ahead, step
        self._at, self._loss = source.level.locate(numbers)
        self._layout = equal_layout(*numbers.shape)
        self._x: Any = None
        self._activations: list[Any] = []        # of the layers, after the features if those were needed

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def loss(self) -> CrossEntropy:
        return self._loss

    @property
    def sizes(self) -> Array:
        return np.full(self._layout.nodes, self._layout.samples // self._layout.nodes, dtype=np.int64)

    def phi(self, x: Array) -> Array:
        if self._x is not x:
            found = None if self._ahead is None else self._ahead.find(self._step, x)
            self._x, self._activations = x, self._forward(x) if found is None else found
        phi: Array = self._activations[-1]
        return phi

    def residual(self, x: Array, w: Array) -> Array:
        if not isinstance(w, np.ndarray):
            return super().residual(x, w)
        return self._loss.residual(self._layout.matmul_by_column(self.phi(x), w))      # it needs no copy of these

    def backward(self, x: Array, d: Array) -> Array:
        self.phi(x)
        backbone = self._source.backbone
        if len(self._activations) < len(backbone.widths):
            self._activations = [self._gather(), *self._activations]
        return backbone.backward(self._layout, self._activations, x, d)

    def _forward(self, x: Array) -> list[Any]:
        backbone, inputs = self._source.backbone, self._gather()
        if isinstance(inputs, GatheredRows):
            layers = backbone.forward_batches(inputs.features, inputs.at[None], x)
            return [inputs, *(layer[0] for layer in layers)]
        return backbone.forward(self._layout, inputs, x)

    def _gather(self) -> Any:
        """Return the inputs, or where they are."""
        features, nodes = self._source.features, self._layout.nodes
        products = self._source.backbone.find_products(features, len(self._at) // nodes)
        if products is not None:
            at = array_namespace(features).asarray(self._at.reshape(nodes, -1), device=device(features))
            return GatheredRows(features, at, products)
        return take_features(features, self._at)
