"""`TorchTask`: derivatives, grouping by size, representations, modules, data, mistakes."""

import random
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from dbo.components import as_dataclass
from dbo.tasks.api import Part, Setup, Split, TorchTask
from dbo.tasks.partitions import ByClass, Iid
from dbo.tasks.problems.hyper_representation import HyperRepresentation
from dbo.tasks.torch_problem import TorchProblem, read_split
from dbo.tasks.torch_shard import TorchShard

ORACLES = ("f_x", "f_y", "g_x", "g_y", "g_yy", "g_xy")


def make_data(seed: int, sizes: tuple[int, int, int] = (40, 30, 20)) -> Split:
    rng = np.random.default_rng(seed)
    parts = [Part(rng.standard_normal((n, 6)), rng.integers(0, 3, n)) for n in sizes]
    return Split(*parts, classes=3)     # type: ignore[call-arg]


@as_dataclass
class Net(TorchTask):
    """Two layers (upper level) and a head (lower level); x also enters the lower loss directly."""

    ridge: float = 0.1

    def data(self, seed: int) -> Split:
        return make_data(seed)

    def init(self, generator: torch.Generator) -> tuple[Any, Any]:
        x = {"w": torch.randn(6, 4, generator=generator), "b": [torch.zeros(4)]}
        return x, (0.1 * torch.randn(4, 3, generator=generator),)

    def hidden(self, x: Any, inputs: Any) -> Any:
        return torch.tanh(inputs @ x["w"] + x["b"][0])

    def lower(self, x: Any, y: Any, batch: Any) -> Any:
        own = cross_entropy(self.hidden(x, batch.inputs) @ y[0], batch.labels)
        return own + self.ridge * (1 + x["b"][0].square().sum()) * y[0].square().sum()

    def upper(self, x: Any, y: Any, batch: Any) -> Any:
        return cross_entropy(self.hidden(x, batch.inputs) @ y[0], batch.labels) + 0.01 * x["w"].square().sum()

    def metrics(self, x: Any, y: Any, test: Any) -> Any:
        scores = self.hidden(x, test.inputs) @ y[0]
        return {"test_accuracy": (scores.argmax(1) == test.labels).float().mean()}


@as_dataclass
class WithRepresentation(Net):
    """The same with the hidden layer as a representation."""

    def representation(self, x: Any, inputs: Any) -> Any:
        return self.hidden(x, inputs)

    def lower(self, x: Any, y: Any, batch: Any) -> Any:
        own = cross_entropy(batch.representation @ y[0], batch.labels)
        return own + self.ridge * (1 + x["b"][0].square().sum()) * y[0].square().sum()

    def upper(self, x: Any, y: Any, batch: Any) -> Any:
        return cross_entropy(batch.representation @ y[0], batch.labels) + 0.01 * x["w"].square().sum()


@as_dataclass
class OneByOne(WithRepresentation):
    """The same without vmap."""

    vectorize = False


def build(task: TorchTask, partition: Any = None, dtype: str = "float64", seed: int = 0) -> TorchProblem:
    return task.build(Setup(nodes=4, seed=seed, dtype=dtype, partition=partition or ByClass(h=0.6)))


def point(shard: TorchShard, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = shard.x0 + 0.3 * rng.standard_normal(shard.x0.shape)
    y = shard.y0 + 0.3 * rng.standard_normal(shard.y0.shape)
    return x, y, rng.standard_normal(y.shape)


def call(shard: Any, name: str, x: Any, y: Any, v: Any) -> np.ndarray:
    rows: np.ndarray = getattr(shard, name)(x, y, v) if name in ("g_yy", "g_xy") else getattr(shard, name)(x, y)
    return rows


def differences(function: Callable[[np.ndarray], np.ndarray], at: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Return (nodes, dim) central differences of a (nodes,) function of rows."""
    columns = []
    for k in range(at.shape[1]):
        e = np.zeros_like(at)
        e[:, k] = step
        columns.append((function(at + e) - function(at - e)) / (2 * step))
    return np.stack(columns, axis=1)


@pytest.mark.parametrize("task", [Net(), WithRepresentation(), OneByOne()], ids=lambda task: type(task).__name__)
def test_derivatives_are_those_of_the_losses(task: TorchTask) -> None:
    """All six against central differences, on nodes of different sizes, x in the loss directly and through layers."""
    shard = build(task).shard(range(4))
    assert len(shard.lower.groups) > 1
    x, y, v = point(shard)
    for name, function, at in (
        ("f_x", lambda p: shard.f(p, y), x), ("f_y", lambda p: shard.f(x, p), y),
        ("g_x", lambda p: shard.g(p, y), x), ("g_y", lambda p: shard.g(x, p), y),
        ("g_yy", lambda p: (shard.g_y(x, p) * v).sum(1), y), ("g_xy", lambda p: (shard.g_y(p, y) * v).sum(1), x),
    ):
        np.testing.assert_allclose(call(shard, name, x, y, v), differences(function, at), rtol=1e-5, atol=1e-8)


def test_a_representation_changes_no_value() -> None:
    """It only spares work."""
    plain, split = build(Net()).shard(range(4)), build(WithRepresentation()).shard(range(4))
    x, y, v = point(plain)
    for name in ("f", "g", *ORACLES):
        np.testing.assert_allclose(call(split, name, x, y, v), call(plain, name, x, y, v), rtol=1e-12, atol=1e-14)


def test_a_representation_is_computed_once_per_x() -> None:
    """An inner loop moves y only; an array that is written into counts as another x."""
    shard = build(WithRepresentation()).shard(range(4))
    x, y, v = point(shard)
    for _ in range(3):
        shard.g_y(x, y)
        shard.g_yy(x, y, v)
        shard.g_x(x, y)
        y = y + 1.0
    assert shard.lower.cache.passes == 1
    before = shard.g_y(x, y)
    x += 0.1
    assert (shard.g_y(x, y) != before).any()
    assert shard.lower.cache.passes == 2


@pytest.mark.parametrize("name", ORACLES)
def test_rows_do_not_depend_on_each_other(name: str) -> None:
    """The rows of a node are the same alone and among others, to rounding."""
    problem = build(WithRepresentation())
    whole = problem.shard(range(4))
    x, y, v = point(whole)
    together = call(whole, name, x, y, v)
    for node in range(4):
        rows = slice(node, node + 1)
        alone = call(problem.shard([node]), name, x[rows], y[rows], v[rows])
        np.testing.assert_allclose(alone, together[rows], rtol=1e-12, atol=1e-14)


def test_batches_are_the_samples_with_their_numbers() -> None:
    """A batch of all samples in another order is the full batch; half batches average to it; `index` is global."""
    problem = build(WithRepresentation(), partition=Iid())
    shard = problem.shard(range(4))
    x, y, v = point(shard)
    order = np.stack([np.random.default_rng(node).permutation(10) for node in range(4)])
    for name in ("g_x", "g_y", "g_yy", "g_xy"):
        whole = call(shard, name, x, y, v)
        np.testing.assert_allclose(call(shard.subset(order, None), name, x, y, v), whole, rtol=1e-10, atol=1e-13)
        halves = [call(shard.subset(order[:, part], None), name, x, y, v) for part in (slice(5), slice(5, None))]
        np.testing.assert_allclose(sum(halves) / 2, whole, rtol=1e-10, atol=1e-13)
        assert abs(halves[0] - whole).max() > 1e-6
    batch = shard.subset(order, None).lower.groups[0]
    for node in range(4):
        np.testing.assert_array_equal(batch.index[node].numpy(), problem.train[node][order[node]])
        np.testing.assert_array_equal(batch.inputs[node].numpy(), problem.split.train.features[batch.index[node]])


def test_float32_stays_float32() -> None:
    shard = build(WithRepresentation(), dtype="float32").shard(range(4))
    x, y, v = (a.astype(np.float32) for a in point(shard))
    assert {call(shard, name, x, y, v).dtype for name in ("f", "g", *ORACLES)} == {np.dtype("float32")}


def test_tensors_in_tensors_out() -> None:
    """On a device rows are tensors; the values are those of NumPy rows."""
    shard = build(WithRepresentation()).shard(range(4))
    on_device = shard.to(torch.asarray)
    rows = point(shard)
    for name in ("f", "g", *ORACLES):
        out = call(on_device, name, *map(torch.asarray, rows))
        assert isinstance(out, torch.Tensor)
        np.testing.assert_allclose(out.numpy(), call(shard, name, *rows), rtol=1e-12)


def test_a_task_equals_its_hand_derived_twin() -> None:
    """Hyper-representation on the digits, written in torch, has the oracles of the built-in task."""

    @as_dataclass
    class Twin(TorchTask):
        """The same in torch."""

        def data(self, seed: int) -> Split:
            return builtin.samples

        def init(self, generator: torch.Generator) -> tuple[Any, Any]:
            x = [torch.zeros(64, 8), torch.zeros(8), torch.zeros(8, 4), torch.zeros(4)]
            return x, torch.zeros(4, 10)

        def representation(self, x: Any, inputs: Any) -> Any:
            return torch.tanh(torch.tanh(inputs @ x[0] + x[1]) @ x[2] + x[3])

        def lower(self, x: Any, y: Any, batch: Any) -> Any:
            return cross_entropy(batch.representation @ y, batch.labels) + 0.005 * y.square().sum()

        def upper(self, x: Any, y: Any, batch: Any) -> Any:
            return cross_entropy(batch.representation @ y, batch.labels)

        def metrics(self, x: Any, y: Any, test: Any) -> Any:
            scores = test.representation @ y
            accuracy = (scores.argmax(1) == test.labels).to(scores.dtype).mean()
            return {"test_accuracy": accuracy, "test_loss": cross_entropy(scores, test.labels)}

    from dbo.tasks.datasets.digits import Digits

    setup = Setup(nodes=3, seed=0, dtype="float64", partition=ByClass(h=0.6), data=Digits())
    builtin = HyperRepresentation(hidden=(8, 4), activation="tanh").build(setup)
    twin = Twin().build(replace(setup, data=None))
    a, b = builtin.shard(range(3)), twin.shard(range(3))
    rng = np.random.default_rng(0)
    x, y, v = (0.3 * rng.standard_normal(s) for s in (a.x0.shape, a.y0.shape, a.y0.shape))
    for name in ("f", "g", *ORACLES):
        np.testing.assert_allclose(call(b, name, x, y, v), call(a, name, x, y, v), rtol=1e-10, atol=1e-13)
    for name, values in builtin.evaluate(x, y).items():
        np.testing.assert_allclose(twin.evaluate(x, y)[name], values, rtol=1e-10)


# ---- modules ---------------------------------------------------------------------------------------------------------


@as_dataclass
class Modules(Net):
    """x is a module, y a dictionary with a module."""

    def init(self, generator: torch.Generator) -> tuple[Any, Any]:
        return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh()), {"head": torch.nn.Linear(4, 3, bias=False)}

    def lower(self, x: Any, y: Any, batch: Any) -> Any:
        ridge = sum(p.square().sum() for p in y["head"].parameters())
        return cross_entropy(y["head"](x(batch.inputs)), batch.labels) + 0.1 * ridge

    def upper(self, x: Any, y: Any, batch: Any) -> Any:
        return cross_entropy(x(batch.inputs) @ y["head"].weight.T, batch.labels)

    def metrics(self, x: Any, y: Any, test: Any) -> Any:
        return {"test_accuracy": (y["head"](x(test.inputs)).argmax(1) == test.labels).float().mean()}


def test_modules_arrive_as_functions_and_return_as_modules() -> None:
    """Losses call them; `build_model` fills the user's own classes with the entries of a row."""
    task = Modules()
    problem = build(task)
    shard = problem.shard(range(4))
    assert shard.dim_x == 6 * 4 + 4
    x, y, _ = point(shard)
    gradient = differences(lambda p: shard.g(p, y), x)
    np.testing.assert_allclose(shard.g_x(x, y), gradient, rtol=1e-5, atol=1e-8)
    made_x, made_y = task.build_model(0, x[0], y[0])
    assert isinstance(made_x, torch.nn.Sequential)
    inputs = torch.from_numpy(problem.split.test.features)
    expected = problem.evaluate(x[:1], y[:1])["test_accuracy"][0]
    found = (made_y["head"](made_x(inputs)).argmax(1).numpy() == problem.split.test.labels).mean()
    assert found == pytest.approx(expected)


def test_buffers_are_constants_in_the_experiments_dtype() -> None:
    """A module's buffer takes part in its forward pass, and moves and casts with the shard."""

    class Shift(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 24).reshape(6, 4))
            self.register_buffer("shift", torch.full((4,), 0.5))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs @ self.weight + self.shift

    task = variant(
        init=lambda self, g: (Shift(), (torch.zeros(4, 3),)), hidden=lambda self, x, inputs: x(inputs),
        lower=lambda self, x, y, b: cross_entropy(x(b.inputs) @ y[0], b.labels) + y[0].square().sum(),
        upper=lambda self, x, y, b: cross_entropy(x(b.inputs) @ y[0], b.labels),
    )
    shard = build(task).shard(range(4))
    assert shard.dim_x == 24
    x, y, _ = point(shard)
    np.testing.assert_allclose(shard.g_y(x, y), differences(lambda p: shard.g(x, p), y), rtol=1e-5, atol=1e-8)
    on_device = shard.to(torch.asarray)
    assert on_device.spec_x.template.module.shift.dtype == torch.float64


def test_the_start_depends_on_the_seed_alone() -> None:
    """Modules draw from the global generator: its state before and after does not matter."""
    torch.manual_seed(5)
    first = build(Modules()).start_x
    torch.manual_seed(6)
    state = torch.random.get_rng_state()
    np.testing.assert_array_equal(build(Modules()).start_x, first)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (build(Modules(), seed=1).start_x != first).any()


# ---- mistakes --------------------------------------------------------------------------------------------------------


def variant(**methods: Any) -> TorchTask:
    task: TorchTask = as_dataclass(type("Mine", (Net,), {"__doc__": "A variant.", **methods}))()
    return task


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"lower": lambda self, x, y, b: b.inputs.sum(1)}, r"lower\(x, y, batch\) returns a tensor of shape \(\d+,\)"),
        ({"upper": lambda self, x, y, b: 3.0}, "upper.* returns a float; must be a scalar tensor"),
        ({"lower": lambda self, x, y, b: y[0].sum() / 0}, "lower.* returns (nan|inf|-inf) at the start"),
        ({"lower": lambda self, x, y, b: x["nope"]}, "lower.* fails with KeyError: 'nope'"),
        ({"init": lambda self, g: torch.zeros(3)}, "init returns a Tensor; must be a pair"),
        ({"init": lambda self, g: ({"w": torch.zeros(3, dtype=torch.int64)}, torch.zeros(2))},
         "init: x.w has dtype int64; must be floating-point"),
        ({"init": lambda self, g: ({}, torch.zeros(2))}, "init: x has no tensors"),
        ({"init": lambda self, g: ([1.0], torch.zeros(2))}, "init: x.0 is a float; must be a tensor"),
        ({"init": lambda self, g: (torch.nn.Sequential(torch.nn.Dropout(0.5)), torch.zeros(2))},
         "x.0: Dropout draws random numbers"),
        ({"init": lambda self, g: (torch.nn.BatchNorm1d(3), torch.zeros(2))}, "x: BatchNorm1d changes its running"),
        ({"data": lambda self, seed: None}, "data returns None; must be a dbo.Split"),
        ({"data": lambda self, seed: Split((1, 2, 3), (1, 2), (1, 2))}, "data.train is a tuple; must be a pair"),
        ({"data": lambda self, seed: replace(make_data(0), val=(np.ones((3, 6)), np.ones(2)))},
         "3 inputs and 2 labels"),
        ({"data": lambda self, seed: replace(make_data(0), train=(np.ones((8, 6)), np.full(8, np.nan)))},
         "data.train: labels contain NaN"),
        ({"metrics": lambda self, x, y, t: {"score": 1.0}}, "metrics has 'score' without a direction"),
        ({"metrics": lambda self, x, y, t: 1.0}, "metrics returns a float; must be a dict"),
        ({"metrics": lambda self, x, y, t: {"test_loss": torch.ones(2)}}, r"test_loss has shape \(2,\)"),
        ({"lower": lambda self, x, y, b: y[0].sum() * float(b.labels.sum().item())}, "vectorize = False"),
    ],
)
def test_mistakes_are_one_line(methods: dict[str, Any], message: str) -> None:
    """Before the run starts, with the method, what it does and what it must do."""
    with pytest.raises(ValueError, match=message) as caught:
        build(variant(**methods))
    assert "\n" not in str(caught.value)


RANDOM: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda values: torch.nn.functional.dropout(values, 0.5),
    "noise": lambda values: values + torch.randn_like(values),
    "bernoulli": lambda values: values * torch.bernoulli(torch.full_like(values, 0.5)),
    "subset": lambda values: values[torch.randperm(len(values))[:2]],
}


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("kind", RANDOM)
def test_a_loss_must_not_draw_random_numbers(kind: str, vectorize: bool) -> None:
    """With and without vmap: the reason, and no advice that leads to the other form."""
    def lower(self: Any, x: Any, y: Any, batch: Any) -> Any:
        return RANDOM[kind](y[0]).square().sum()

    with pytest.raises(ValueError, match=r"task: lower\(x, y, batch\) draws random numbers \(\w+\), which") as caught:
        build(variant(lower=lower, vectorize=vectorize))
    assert "vectorize" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_loss_that_begins_to_draw_later_is_found() -> None:
    """Node by node, the oracles look at every operation, not only at those of the start."""
    def lower(self: Any, x: Any, y: Any, batch: Any) -> Any:
        is_far = bool((y[0].abs() > 100).any())
        return (torch.nn.functional.dropout(y[0], 0.5) if is_far else y[0]).square().sum()

    shard = build(variant(lower=lower, vectorize=False)).shard(range(4))
    x, y, _ = point(shard)
    shard.g_y(x, y)
    with pytest.raises(ValueError, match="draws random numbers"):
        shard.g_y(x, 1000 * y)


def test_dropout_that_is_off_is_accepted() -> None:
    """`training=False` draws nothing."""
    def lower(self: Any, x: Any, y: Any, batch: Any) -> Any:
        return torch.nn.functional.dropout(y[0], 0.5, training=False).square().sum()

    shard = build(variant(lower=lower, vectorize=False)).shard(range(4))
    x, y, _ = point(shard)
    np.testing.assert_allclose(shard.g_y(x, y), 2 * y, rtol=1e-12)


def test_a_loss_that_cannot_be_vectorised_runs_node_by_node() -> None:
    """`vectorize = False` accepts any Python in a loss."""
    def lower(self: Any, x: Any, y: Any, b: Any) -> Any:
        return y[0].square().sum() * float(b.labels.sum().item())

    shard = build(variant(lower=lower, vectorize=False)).shard(range(4))
    x, y, _ = point(shard)
    level = shard.lower
    sums = [float(level.labels[a : a + n].sum()) for a, n in zip(level.starts, level.sizes, strict=True)]
    np.testing.assert_allclose(shard.g_y(x, y), 2 * y * np.array(sums)[:, None], rtol=1e-12)


# ---- data ------------------------------------------------------------------------------------------------------------


def test_parts_may_be_tensors_pairs_or_torch_datasets() -> None:
    """All give the same problem."""
    raw = make_data(0)

    def as_pair(part: Part) -> Any:
        return torch.from_numpy(part.features), torch.from_numpy(part.labels)

    def as_dataset(part: Part) -> Any:
        return torch.utils.data.TensorDataset(*as_pair(part))

    problems = [
        build(variant(data=lambda self, seed, c=change: Split(*(c(part) for part in raw.parts))))
        for change in (lambda part: part, as_pair, as_dataset)
    ]
    hashes = {problem.describe()["data_sha256"] for problem in problems}
    assert len(hashes) == 1


def test_labels_that_are_no_classes_need_the_iid_partition() -> None:
    """A regression has floating labels."""
    def data(self: Any, seed: int) -> Split:
        raw = make_data(0)
        return Split(*((part.features, part.labels + 0.5) for part in raw.parts))     # type: ignore[arg-type]

    def loss(self: Any, x: Any, y: Any, b: Any) -> Any:
        return (self.hidden(x, b.inputs) @ y[0][:, 0] - b.labels).square().mean()

    task = variant(
        data=data, lower=loss, upper=loss, metrics=lambda self, x, y, t: {"test_loss": loss(self, x, y, t)})
    with pytest.raises(ValueError, match="by_class needs class numbers"):
        build(task)
    assert build(task, partition=Iid()).nodes == 4


# ---- what a task must not do, and what its modules may be ------------------------------------------------------------


class Counter(torch.nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 24).reshape(6, 4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Any) -> Any:
        self.calls.add_(1)    # type: ignore[operator]
        return inputs @ self.weight * (1 + 0.1 * self.calls)


def scale_inputs(self: Any, x: Any, y: Any, batch: Any) -> Any:
    return batch.inputs.mul_(2).mean() + y[0].square().sum()


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"lower": scale_inputs}, r"lower\(x, y, batch\) writes into its arguments"),
        ({"upper": lambda self, x, y, b: y[0].mul_(2).sum()}, r"upper\(x, y, batch\) writes into its arguments"),
        ({"metrics": lambda self, x, y, t: {"test_loss": t.inputs.add_(1).mean()}}, r"metrics\(x, y, test\) writes"),
        ({"lower": lambda self, x, y, b: y[0].sum() * np.random.default_rng().random()}, "gives another value when"),
        ({"init": lambda self, g: (Counter(), torch.eye(4, 3)),
          "lower": lambda self, x, y, b: cross_entropy(x(b.inputs) @ y, b.labels)}, "gives another value when it is"),
        ({"metrics": lambda self, x, y, t: {"test_loss": "low"}}, "metrics: test_loss is a str; must be one number"),
        ({"init": lambda self, g: ([w := torch.zeros(3), w], torch.zeros(2))}, "x.0 and x.1 are the same tensor"),
        ({"init": lambda self, g: ({"a.b": torch.zeros(3), "a": {"b": torch.ones(3)}}, torch.zeros(2))},
         "two entries have the path x.a.b"),
        ({"init": lambda self, g: (torch.zeros(3, device="meta"), torch.zeros(2))}, "x has dtype meta"),
        ({"data": lambda self, seed: replace(make_data(0), train=(torch.eye(6).to_sparse(), torch.zeros(6)))},
         "data.train.inputs is a sparse tensor"),
    ],
)
def test_what_would_not_be_repeated_is_refused(methods: dict[str, Any], message: str) -> None:
    """In-place operations, state between calls, entries that are one: before the run starts, in one line."""
    with pytest.raises(ValueError, match=message) as caught:
        build(variant(**methods))
    assert "\n" not in str(caught.value)


def test_tied_modules_are_refused() -> None:
    """Rows have one entry per parameter: two modules of a tree cannot share one."""
    one, other = torch.nn.Linear(6, 4), torch.nn.Linear(6, 4)
    other.weight = one.weight
    with pytest.raises(ValueError, match=r"x\.a\.weight and x\.b\.weight are the same tensor"):
        build(variant(init=lambda self, g: ({"a": one, "b": other}, torch.zeros(2))))


@as_dataclass
class Frozen(Modules):
    """The first layer is frozen: a constant, not a part of x."""

    def init(self, generator: torch.Generator) -> tuple[Any, Any]:
        layers = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5).eval(), torch.nn.Linear(5, 4))
        layers[0].requires_grad_(False)
        layers[1].requires_grad_(False)
        return layers, {"head": torch.nn.Linear(4, 3, bias=False)}


def test_frozen_parameters_are_constants() -> None:
    """They are no entries of a row, take part in the losses, and come back as they were."""
    task = Frozen()
    problem = build(task)
    shard = problem.shard(range(4))
    assert shard.dim_x == 5 * 4 + 4
    x, y, _ = point(shard)
    np.testing.assert_allclose(shard.g_x(x, y), differences(lambda p: shard.g(p, y), x), rtol=1e-5, atol=1e-8)
    model, head = task.build_model(0, x[0], y[0])
    before, _ = task.build_model(0, x[1], y[1])
    assert torch.equal(model[0].weight, before[0].weight)
    assert not model[0].weight.requires_grad
    assert not torch.equal(model[2].weight, before[2].weight)
    state = {f"x.{name}": value.detach().numpy() for name, value in model.state_dict().items()}
    state["y.head.weight"] = head["head"].weight.detach().numpy()
    np.testing.assert_array_equal(task.read_model(0, state)[0], x[0])
    state["x.0.weight"] = state["x.0.weight"] + 1
    with pytest.raises(ValueError, match=r"has a constant x\.0\.weight"):
        task.read_model(0, state)


def test_named_tuples_and_lists_of_modules_keep_their_kind() -> None:
    """A loss sees a named tuple, iterates over layers, and finds None where a layer has no bias."""
    Layers = namedtuple("Layers", ["all", "scale"])

    def init(self: Any, generator: Any) -> Any:
        act = torch.nn.Tanh()
        layers = torch.nn.Sequential(torch.nn.Linear(6, 4, bias=False), act, torch.nn.Linear(4, 4), act)
        return Layers(layers, torch.ones(())), (torch.zeros(4, 3),)

    def hidden(self: Any, x: Any, inputs: Any) -> Any:
        assert x.all[0].bias is None
        assert len(x.all) == 4
        for layer in x.all:
            inputs = layer(inputs)
        return x.scale * inputs

    task = variant(
        init=init, hidden=hidden, lower=lambda self, x, y, b: cross_entropy(
            self.hidden(x, b.inputs) @ y[0], b.labels) + y[0].square().sum(),
        upper=lambda self, x, y, b: cross_entropy(self.hidden(x, b.inputs) @ y[0], b.labels),
    )
    shard = build(task).shard(range(4))
    assert shard.dim_x == 24 + 20 + 1
    x, y, _ = point(shard)
    np.testing.assert_allclose(shard.f_x(x, y), differences(lambda p: shard.f(p, y), x), rtol=1e-5, atol=1e-8)
    assert task.build_model(0, x[0], y[0])[0].scale.shape == ()


@pytest.mark.parametrize("vectorize", [True, False])
def test_attention_without_dropout_is_accepted(vectorize: bool) -> None:
    """Its operation may draw random numbers, but does not."""
    def lower(self: Any, x: Any, y: Any, batch: Any) -> Any:
        rows = (batch.inputs @ x["w"])[None]
        mixed = torch.nn.functional.scaled_dot_product_attention(rows, rows, rows)
        return (mixed[0] @ y[0]).square().mean() + y[0].square().sum()

    shard = build(variant(lower=lower, vectorize=vectorize)).shard(range(4))
    x, y, _ = point(shard)
    np.testing.assert_allclose(shard.g_y(x, y), differences(lambda p: shard.g(x, p), y), rtol=1e-5, atol=1e-8)


def test_random_transforms_of_a_dataset_have_a_fixed_seed() -> None:
    """Those of NumPy and Python too; labels may be vectors; the generators go on as before."""
    class Noisy(torch.utils.data.Dataset):    # type: ignore[type-arg]
        def __len__(self) -> int:
            return 24

        def __getitem__(self, i: int) -> Any:
            noise = np.random.rand(6) + random.random()    # noqa: NPY002
            return torch.from_numpy(noise), torch.tensor([i % 3, 0])

    before = np.random.get_state()[1].copy(), random.getstate()    # noqa: NPY002
    first, second = (read_split(Split(Noisy(), Noisy(), Noisy())) for _ in range(2))
    np.testing.assert_array_equal(first.train.features, second.train.features)
    assert first.train.labels.shape == (24, 2)
    assert np.array_equal(np.random.get_state()[1], before[0])    # noqa: NPY002
    assert random.getstate() == before[1]
