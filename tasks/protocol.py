"""Define what tasks, data sets and partitions implement, and the oracles of a problem.

A data set loads a `Split`. A partition assigns them to the nodes. A `Task` builds a `Problem` from both, and
`Problem.shard(ids)` returns the rows that one block hosts. Row i of every array belongs to node `ids[i]`, and no row
depends on another.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias
from zlib import crc32

import numpy as np
from scipy import sparse

from dbo.components import name_method
from dbo.tasks.arrays import Array, DoubleCast, convert_fields, hash_arrays
from dbo.tasks.sampling import Batches

Features: TypeAlias = Array | sparse.csr_array
Direction: TypeAlias = Literal["max", "min"]    # which values of a metric are better
# (x, y, f_weight, g_weight) → (nodes, dim_y) rows ∇_y (f_weight f_i + g_weight g_i), computed in one pass over the data
WeightedGradient: TypeAlias = Callable[[Array, Array, float, float], Array]


# ---- data ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Samples with their labels: a row of `features` and an entry of `labels` each."""

    features: Features
    labels: Array

    def __len__(self) -> int:
        return len(self.labels)

    def arrays(self) -> tuple[Array, ...]:
        """Return the plain arrays that the part consists of."""
        a = self.features
        return (a.data, a.indices, a.indptr, self.labels) if isinstance(a, sparse.csr_array) else (a, self.labels)

    def take(self, index: Array) -> "Part":
        """Return the samples with these numbers, in this order."""
        return Part(self.features[index], self.labels[index])


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """A prepared data set: `train` is for the lower level, `val` for the upper level, `test` for evaluation alone.

    `tune` is held out for the choice of step sizes: neither level nor the test metrics see it. A `TorchTask` may also
    give each part as a pair (inputs, labels) of arrays or tensors, or as a torch data set.
    """

    train: Part
    val: Part
    test: Part
    classes: int = 0      # 0: unknown, or the labels are not classes
    tune: Part | None = None

    @property
    def parts(self) -> tuple[Part, Part, Part]:
        return self.train, self.val, self.test

    def hold_out(self, fraction: float, seed: int) -> "Split":
        """Return the same samples with a share of `val` as `tune`, unless the data set has such a part already."""
        if not fraction or self.tune is not None:
            return self
        rest, taken = _take_evenly(self.val.labels, fraction, generator(seed, "split.tune"))
        if not len(rest) or not len(taken):
            raise ValueError(
                f"tune_fraction: {fraction:g} of {len(self.val)} validation samples leaves a part empty; "
                f"choose another fraction or more samples"
            )
        return replace(self, val=self.val.take(rest), tune=self.val.take(taken))

    def digest(self) -> str:
        """Return the SHA-256 of all parts."""
        held_out = () if self.tune is None else (self.tune,)
        return hash_arrays(array for part in (*self.parts, *held_out) for array in part.arrays())

    def describe(self) -> dict[str, Any]:
        """Return the facts that a run records."""
        return {"classes": self.classes, "test_size": len(self.test), "data_sha256": self.digest()}


def _take_evenly(labels: Array, fraction: float, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return sample numbers (rest, taken), both sorted; the taken ones are spread evenly over the labels' values."""
    order = rng.permutation(len(labels))
    if labels.ndim == 1:
        order = order[np.argsort(labels[order], kind="stable")]
    taken = np.diff(np.floor(fraction * np.arange(len(labels) + 1) + 0.5)) > 0
    return np.sort(order[~taken]), np.sort(order[taken])


class DataSize(NamedTuple):
    """How large a data set is, as far as its parameters tell."""

    samples: int
    features: int
    classes: int
    nonzeros: int | None = None      # of a sample; None: all its features


class Work(NamedTuple):
    """How much a task computes: what the choice of an engine depends on."""

    operations: float                # multiplications of one oracle call, over all nodes
    entries: int                     # of x and y of one node


class DataSet(Protocol):
    """A source of samples: a frozen dataclass of its parameters. It may have a method `size() -> DataSize`.

    A class attribute `sparse_features = True` marks sparse features: only tasks that accept these can use them.
    """

    def load(self, seed: int, data_dir: str | None) -> Split:
        """Load the samples; `data_dir` is a folder with existing files, None means the loader's own cache."""


class Partition(Protocol):
    """A rule that assigns every sample to exactly one node and at least one sample to every node."""

    def assign(self, labels: Array, nodes: int, rng: np.random.Generator) -> list[Array]:
        """Return the sample numbers of each node."""


# ---- problems --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setup:
    """What an experiment sets besides the task's own parameters."""

    nodes: int
    seed: int
    dtype: str
    partition: Partition
    data: DataSet | None = None
    data_dir: str | None = None
    tune_fraction: float = 0.0      # share of the validation samples that neither level sees

    def load_samples(self, needs_classes: bool = False) -> Split:
        """Load the samples of the data set, for tasks that need one; those that classify need classes."""
        if self.data is None:
            raise ValueError("task.dataset: this task learns from data, but no data set was given")
        split: Any = self.data.load(self.seed, self.data_dir)
        if not isinstance(split, Split) or not all(isinstance(part, Part) for part in split.parts):
            found = type(split).__name__ if not isinstance(split, Split) else "dbo.Split of other parts"
            raise ValueError(
                f"task.dataset: {name_method(self.data, 'load')} returned a {found}; must be a dbo.Split of dbo.Part")
        for name, part in zip(("train", "val", "test"), split.parts, strict=True):
            if mistake := _find_mistake(part, name, split.classes):
                raise ValueError(f"task.dataset: {name_method(self.data, 'load')} returned {mistake}")
        if needs_classes and split.classes < 2:
            raise ValueError(
                f"task.dataset: {name_method(self.data, 'load')} returned a dbo.Split with classes={split.classes}; "
                f"must be at least 2, because this task classifies")
        return split.hold_out(self.tune_fraction, self.seed)


def _find_mistake(part: Part, name: str, classes: int) -> str | None:
    """Return what is wrong with samples that a plugin has returned; None: nothing."""
    features, labels = part.features, part.labels
    values = features.data if isinstance(features, sparse.csr_array) else features
    if not isinstance(values, np.ndarray) or not isinstance(labels, np.ndarray):
        kinds = f"a {type(values).__name__} of features and a {type(labels).__name__} of labels"
        return f"{kinds} in {name}; must be NumPy arrays, or a csr_array of features"
    if features.shape[0] != len(part) or not len(part):
        return f"{features.shape[0]} rows of features and {len(part)} labels in {name}; must be as many, at least 1"
    if values.dtype.kind not in "fiub" or labels.dtype.kind not in "fiub":
        return f"features of {values.dtype} and labels of {labels.dtype} in {name}; must be numbers"
    for what, array in (("features", values), ("labels", labels)):
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            return f"{what} with NaN or inf in {name}; must be finite"
    if classes and (labels.ndim != 1 or labels.dtype.kind == "f" or not 0 <= labels.min() <= labels.max() < classes):
        return f"labels in {name} that are not the numbers 0 to {classes - 1} of its {classes} classes"
    return None


@dataclass(frozen=True, eq=False)
class Shard(ABC):
    """The rows of a problem that one block hosts: its oracles take stacked rows and return stacked rows.

    `sizes` and `subset` serve mini-batches. A task without samples leaves them out.
    """

    ids: Array    # (nodes,) network-wide numbers of these rows
    seed: int
    x0: Array     # (nodes, dim_x) the common start
    y0: Array     # (nodes, dim_y) the common start

    @property
    def nodes(self) -> int:
        return len(self.ids)

    @property
    def clients(self) -> int:
        """The clients of the whole network, if it has a server; otherwise 0."""
        return 0

    @property
    def dim_x(self) -> int:
        return int(self.x0.shape[1])

    @property
    def dim_y(self) -> int:
        return int(self.y0.shape[1])

    @abstractmethod
    def f(self, x: Array, y: Array) -> Array:
        """Return the (nodes,) upper-level values f_i(x_i, y_i)."""

    @abstractmethod
    def g(self, x: Array, y: Array) -> Array:
        """Return the (nodes,) lower-level values g_i(x_i, y_i)."""

    @abstractmethod
    def f_x(self, x: Array, y: Array) -> Array: ...
    @abstractmethod
    def f_y(self, x: Array, y: Array) -> Array: ...
    @abstractmethod
    def g_x(self, x: Array, y: Array) -> Array: ...
    @abstractmethod
    def g_y(self, x: Array, y: Array) -> Array: ...

    @abstractmethod
    def g_yy(self, x: Array, y: Array, v: Array) -> Array:
        """Return the (nodes, dim_y) Hessian-vector products ∇²_yy g_i v_i."""

    @abstractmethod
    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        """Return the (nodes, dim_x) Jacobian-vector products ∇²_xy g_i v_i = ∂/∂x ⟨∇_y g_i, v_i⟩."""

    @property
    def h_y(self) -> WeightedGradient | None:
        """The fused form of a weighted sum of f_y and g_y; None: the shard has none, add the two."""
        return None

    @property
    def sizes(self) -> tuple[Array, Array]:
        """The (nodes,) numbers of samples on the lower and on the upper level; 0: the level has no samples."""
        none = np.zeros(self.nodes, dtype=np.int64)
        return none, none

    def subset(self, lower: Array | None, upper: Array | None) -> "Shard":
        """Return the same rows on some samples: (nodes, batch) numbers among each node's own; None: all samples."""
        raise ValueError("batch_size: this task has no samples; must be null")

    def draw_batch(self, batches: Batches, round_: int, step: int) -> "Shard":
        """Return the same rows on the samples that are drawn for a step."""
        lower, upper = self.sizes
        return self.subset(
            batches.draw("lower", self.seed, self.ids, lower, round_, step),
            batches.draw("upper", self.seed, self.ids, upper, round_, step),
        )

    def to(self, asarray: Callable[[Array], Any]) -> "Shard":
        """Return the same oracles with every floating array passed through `asarray`, e.g. `torch.asarray`."""
        converted: Shard = convert_fields(self, asarray)
        return converted

    def in_double(self, max_bytes: int) -> "Shard | None":
        """Return the same oracles in float64; None if the data take more than `max_bytes`, or cannot be converted."""
        try:
            converted: Shard = convert_fields(self, DoubleCast(max_bytes))
        except ValueError:
            return None
        return converted


class Problem(Protocol):
    """The problem of all nodes, before it is cut into blocks."""

    @property
    def nodes(self) -> int: ...
    @property
    def dim_x(self) -> int: ...
    @property
    def dim_y(self) -> int: ...

    def shard(self, ids: Sequence[int]) -> Shard:
        """Return the rows of these nodes, in this order."""

    def evaluate(self, x: Array, y: Array) -> dict[str, Array]:
        """Return the test metrics of any number of models, one model per row; each metric is (rows,)."""

    def evaluate_nodes(self, x: Array, y: Array) -> dict[str, Array]:
        """Return what is reported of the nodes' own models: the metrics of `evaluate`, perhaps without `test_loss`."""
        return self.evaluate(x, y)

    def task_metrics(self, x_mean: Array, y_mean: Array) -> dict[str, float]:
        """Return the task's own metrics of the mean model (1-d arrays)."""
        return {}

    def tune_losses(self, x: Array, y: Array) -> Array | None:
        """Return the (rows,) upper losses of models on the samples held out for tuning; None: there are none."""
        return None

    def tune_accuracies(self, x: Array, y: Array) -> Array | None:
        """Return the (rows,) accuracies of models on the samples held out for tuning; None: there are none."""
        return None

    def sample_sizes(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return the numbers of samples per node on the lower and on the upper level; 0: none to draw from."""
        return [0] * self.nodes, [0] * self.nodes

    def penalty_solution(self, lam: float) -> Array | None:
        """Return the x where min_y (f + λg) − λ min_z g is stationary; None if no closed form is known."""
        return None

    def describe(self) -> dict[str, Any]:
        """Return JSON-able facts: dimensions, samples per node, a hash of the data."""


class Task(ABC):
    """A task: a frozen dataclass of its parameters that builds a `Problem`."""

    datasets: ClassVar[tuple[str, ...]] = ()                            # the default first; (): it needs no data set
    accepts_sparse: ClassVar[bool] = False                              # also accepts data sets with sparse features
    dataset_defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {}    # data set → parameters with another default
    directions: ClassVar[Mapping[str, Direction]]                          # metric → which values are better
    strongly_convex: ClassVar[bool] = False                             # g in y: needed where y*(x) is computed

    @abstractmethod
    def build(self, setup: Setup) -> Problem: ...

    def estimate_work(self, nodes: int, data: DataSize | None) -> Work | None:
        """Return how much the task computes, from its parameters and the size of its data; None: not known."""
        return None

    def build_model(self, seed: int, x: Array, y: Array) -> tuple[Any, Any]:
        """Return x and y, given as (dim,) rows, in the structure that the task's author uses for them."""
        return x, y

    def read_model(self, seed: int, arrays: Mapping[str, Array]) -> tuple[Array, Array]:
        """Return x and y as (dim,) rows in float64, from the arrays of a file; ValueError says what it lacks.

        The file has the rows of one or several nodes, of which the mean is taken.
        """
        if missing := {"x", "y"} - arrays.keys():
            raise ValueError(f"has no {', '.join(sorted(missing))}; must have the arrays x and y")
        return average_rows(arrays["x"]), average_rows(arrays["y"])


def average_rows(rows: Array) -> Array:
    """Return the mean of one or several rows, in float64."""
    mean: Array = np.atleast_2d(rows).mean(axis=0, dtype=np.float64)
    return mean


def generator(seed: int, purpose: str, *more: int) -> np.random.Generator:
    """Return the random generator of one purpose, keyed by the seed, the purpose and the numbers after it alone."""
    return np.random.default_rng([seed, crc32(purpose.encode()), *more])
