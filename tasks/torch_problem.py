"""Build the problem of a `TorchTask`: its samples, their assignment to nodes, the start, and the test metrics."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from dbo.tasks.arrays import Array
from dbo.tasks.partitions import assign_samples
from dbo.tasks.protocol import Part, Problem, Setup, Split, average_rows, generator
from dbo.tasks.torch_randomness import RandomLossError, refuse_random_numbers
from dbo.tasks.torch_shard import LevelData, TorchShard
from dbo.tasks.torch_task import Batch, TorchTask
from dbo.tasks.trees import TreeSpec, flatten

_PARTS = ("train", "val", "test")
_CHUNK = 1 << 18      # entries of models, or of their inputs, whose losses are computed together


@dataclass(frozen=True, eq=False)
class TorchProblem(Problem):
    """The samples of all nodes as NumPy arrays, which processes of one machine share, and the start as rows."""

    task: TorchTask
    split: Split
    train: list[Array]          # sample numbers per node
    val: list[Array]
    seed: int
    dtype: str
    spec_x: TreeSpec
    spec_y: TreeSpec
    start_x: Array              # (dim_x,)
    start_y: Array              # (dim_y,)

    @property
    def nodes(self) -> int:
        return len(self.train)

    @property
    def dim_x(self) -> int:
        return len(self.start_x)

    @property
    def dim_y(self) -> int:
        return len(self.start_y)

    def shard(self, ids: Sequence[int]) -> TorchShard:
        return TorchShard(
            ids=np.asarray(ids, dtype=np.int64), seed=self.seed,
            x0=np.tile(self.start_x, (len(ids), 1)), y0=np.tile(self.start_y, (len(ids), 1)),
            task=self.task, spec_x=self.spec_x, spec_y=self.spec_y,
            lower=self._stack(self.split.train, [self.train[i] for i in ids]),
            upper=self._stack(self.split.val, [self.val[i] for i in ids]),
        )

    def _stack(self, part: Part, numbers: list[Array]) -> LevelData:
        return LevelData.stack(part.features, part.labels, numbers, getattr(torch, self.dtype))    # type: ignore[arg-type]

    def evaluate(self, x: Array, y: Array) -> dict[str, Array]:
        rows = [self._measure(*row) for row in zip(np.asarray(x), np.asarray(y), strict=True)]
        return {name: np.array([row[name] for row in rows]) for name in rows[0]}

    def tune_losses(self, x: Array, y: Array) -> Array | None:
        shard = self._tune_shard
        if shard is None:
            return None
        entries = max(shard.upper.inputs.numel(), self.dim_x + self.dim_y)
        step = max(1, _CHUNK // max(1, entries)) if self.task.vectorize else 1
        chunks = [(x[first : first + step], y[first : first + step]) for first in range(0, len(x), step)]
        return np.concatenate([
            replace(shard, upper=shard.upper.repeat(len(rows[0]))).f(*rows) for rows in chunks
        ])

    @cached_property
    def _tune_shard(self) -> TorchShard | None:
        """One row whose upper samples are the tune part: the loss on it is computed by the code of f."""
        if self.split.tune is None:
            return None
        upper = replace(self.split, val=self.split.tune)
        return replace(self, split=upper, train=self.train[:1], val=[np.arange(len(upper.val))]).shard([0])

    def _measure(self, x: Array, y: Array) -> dict[str, float]:
        with torch.no_grad():
            x_tree, y_tree = self.spec_x.unflatten(_as_row(x)), self.spec_y.unflatten(_as_row(y))
            found = self.task.metrics(x_tree, y_tree, self._test_batch(x_tree))
        return _check_metrics(self.task, found)

    def _test_batch(self, x: Any) -> Batch:
        inputs, labels, index = self._test
        task = self.task
        compute = cache(lambda: task.representation(x, inputs)) if task.has_representation else None
        return Batch(inputs, labels, index, compute)

    @cached_property
    def _test(self) -> tuple[Tensor, Tensor, Tensor]:
        part, dtype = self.split.test, getattr(torch, self.dtype)
        level = LevelData.stack(part.features, part.labels, [np.arange(len(part))], dtype)    # type: ignore[arg-type]
        return level.inputs, level.labels, level.index

    def sample_sizes(self) -> tuple[list[int], list[int]]:
        return [len(index) for index in self.train], [len(index) for index in self.val]

    def describe(self) -> dict[str, Any]:
        return {
            "task": type(self.task).__name__, "nodes": self.nodes, "dim_x": self.dim_x, "dim_y": self.dim_y,
            **dict(zip(("train_sizes", "val_sizes"), self.sample_sizes(), strict=True)),
            "test_size": len(self.split.test), "data_sha256": self.split.digest(),
        }


def build_problem(task: TorchTask, setup: Setup) -> TorchProblem:
    """Load the data, assign it to the nodes, and try the losses and metrics once: mistakes show before the run."""
    split = read_split(_load(task, setup)).hold_out(setup.tune_fraction, setup.seed)
    train, val = assign_samples(split, setup.nodes, setup.seed, setup.partition)
    (spec_x, x), (spec_y, y) = flatten_start(task, setup.seed)
    spec_x, spec_y = (spec.to("cpu", getattr(torch, setup.dtype)) for spec in (spec_x, spec_y))
    problem = TorchProblem(
        task=task, split=split, train=train, val=val, seed=setup.seed, dtype=setup.dtype, spec_x=spec_x, spec_y=spec_y,
        start_x=x.numpy().astype(setup.dtype), start_y=y.numpy().astype(setup.dtype),
    )
    _try_losses(problem)
    return problem


def _load(task: TorchTask, setup: Setup) -> Any:
    """Return the samples of the data set that the experiment names, or else the task's own."""
    return setup.load_samples() if setup.data is not None else _call("data(seed)", task.data, setup.seed)


def flatten_start(task: TorchTask, seed: int) -> tuple[tuple[TreeSpec, Tensor], tuple[TreeSpec, Tensor]]:
    """Return structure and entries of the task's start, which depend on the seed alone."""
    number = int(generator(seed, "torch.start").integers(2**63 - 1))
    with torch.random.fork_rng(devices=[]):      # modules draw their parameters from the global generator
        torch.manual_seed(number)
        start = _call("init(generator)", task.init, torch.Generator().manual_seed(number))
    if not isinstance(start, tuple | list) or len(start) != 2:
        raise ValueError(f"task: init returns {_describe(start)}; must be a pair: the start of x and of y")
    try:
        return flatten(start[0], "x"), flatten(start[1], "y")
    except ValueError as error:
        raise ValueError(f"task: init: {error}") from None


def unflatten_model(task: TorchTask, seed: int, x: Array, y: Array) -> tuple[Any, Any]:
    """Return the user's own trees or modules with the entries of two rows."""
    (spec_x, _), (spec_y, _) = flatten_start(task, seed)
    return spec_x.rebuild(_as_row(x)), spec_y.rebuild(_as_row(y))


def flatten_model(task: TorchTask, seed: int, arrays: Mapping[str, Array]) -> tuple[Array, Array]:
    """Return the rows of a model whose arrays are rows of nodes, or the tensors of a `state_dict`."""
    specs = {name: spec for name, (spec, _) in zip("xy", flatten_start(task, seed), strict=True)}
    x, y = (
        average_rows(arrays[name]) if name in arrays and arrays[name].shape[-1:] == (spec.dim,)
        else spec.join({key: value for key, value in arrays.items() if key.partition(".")[0] == name}, name)
        for name, spec in specs.items()
    )
    return x, y


def read_split(split: Any) -> Split:
    """Return the parts of a split as NumPy arrays: from arrays, tensors, pairs of them, or torch data sets."""
    if not isinstance(split, Split):
        raise ValueError(f"task: data returns {_describe(split)}; must be a dbo.Split(train, val, test)")
    train, val, test = (_read_part(getattr(split, name), name) for name in _PARTS)
    return Split(train, val, test, split.classes, None if split.tune is None else _read_part(split.tune, "tune"))


def _read_part(part: Any, name: str) -> Part:
    inputs: Any
    labels: Any
    if isinstance(part, Part):
        inputs, labels = part.features, part.labels
    elif isinstance(part, tuple | list) and len(part) == 2:
        inputs, labels = part
    elif isinstance(part, torch.utils.data.Dataset):
        inputs, labels = _read_dataset(part, name)
    else:
        raise ValueError(f"task: data.{name} is {_describe(part)}; must be a pair (inputs, labels) or a torch Dataset")
    inputs, labels = _as_array(inputs, f"{name}.inputs"), _as_array(labels, f"{name}.labels")
    if len(inputs) != len(labels):
        raise ValueError(f"task: data.{name} has {len(inputs)} inputs and {len(labels)} labels; must be as many")
    if len(labels) == 0:
        raise ValueError(f"task: data.{name} has no samples; must have at least one")
    for what, array in (("inputs", inputs), ("labels", labels)):
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"task: data.{name}: {what} contain NaN or inf; must be finite")
    return Part(inputs, labels)


def _read_dataset(data: Any, name: str) -> tuple[Tensor, Tensor]:
    """Read a torch data set once; random transforms are drawn from a fixed seed and stay as they are drawn."""
    with _fixed_seeds(crc32(name.encode())):
        items = _call(f"data.{name}", lambda: [data[i] for i in range(len(data))])
    try:
        inputs, labels = (torch.stack([torch.as_tensor(item[part]) for item in items]) for part in (0, 1))
        return inputs, labels
    except (TypeError, IndexError, KeyError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"task: data.{name}: its items cannot be stacked as (input, label) pairs: {reason}") from None


@contextmanager
def _fixed_seeds(seed: int) -> Iterator[None]:
    """Seed the global generators of torch, NumPy and Python, and restore them afterwards."""
    before = np.random.get_state(), random.getstate()      # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            np.random.seed(seed)                           # noqa: NPY002
            random.seed(seed)
            yield
    finally:
        np.random.set_state(before[0])                     # noqa: NPY002
        random.setstate(before[1])


def _as_array(value: Any, name: str) -> Array:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise ValueError(f"task: data.{name} is a sparse tensor; must be dense")
        value = value.detach().cpu()
        value = (value.float() if value.dtype is torch.bfloat16 else value).numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "fiub" or array.ndim == 0:
        raise ValueError(f"task: data.{name} is an array of {array.dtype}; must be numbers, samples first")
    return array.astype(np.int64) if array.dtype.kind == "u" and array.dtype.itemsize > 1 else array


def _as_row(row: Array) -> Tensor:
    return torch.from_numpy(np.array(row))


def _try_losses(problem: TorchProblem) -> None:
    """Call the losses with samples of node 0 and the metrics once; raise ValueError with one line about a mistake."""
    task, shard = problem.task, problem.shard([0])
    rows = [_as_row(shard.x0[0]), _as_row(shard.y0[0])]
    x, y = (spec.unflatten(row) for spec, row in zip((problem.spec_x, problem.spec_y), rows, strict=True))
    for name, level, loss in (("lower", shard.lower, task.lower), ("upper", shard.upper, task.upper)):
        group = level.groups[0]
        inputs, what = group.inputs[0], f"{name}(x, y, batch)"
        compute = (lambda i=inputs: task.representation(x, i)) if task.has_representation else None
        given = x, y, Batch(inputs, group.labels[0], group.index[0], compute)
        value = _call_twice(what, loss, given, [*rows, level.inputs, level.labels])
        if not isinstance(value, Tensor) or value.ndim != 0:
            shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else _describe(value)
            raise ValueError(f"task: {what} returns {shown}; must be a scalar tensor, e.g. a mean")
        if not value.is_floating_point() or not bool(torch.isfinite(value)):
            raise ValueError(f"task: {what} returns {value.item()} at the start; must be a finite float")
    test = problem._test_batch(x)
    found = _call_twice("metrics(x, y, test)", task.metrics, (x, y, test), [*rows, test.inputs, test.labels])
    _check_metrics(task, found)
    shard = problem.shard(range(min(2, problem.nodes)))
    for values in (shard.f, shard.g):
        _call("a loss under torch.vmap", values, shard.x0, shard.y0)


def _call_twice(what: str, function: Callable[..., Any], given: tuple[Any, ...], tensors: list[Tensor]) -> Any:
    """Call a user's function; it must not write into its arguments, and give the same value again."""
    versions = [tensor._version for tensor in tensors]
    with refuse_random_numbers():
        first, second = (_call(what, function, *given) for _ in range(2))
    if [tensor._version for tensor in tensors] != versions:
        raise ValueError(f"task: {what} writes into its arguments (an in-place operation); write x + 1, not x.add_(1)")
    if not _is_equal(first, second):
        raise ValueError(
            f"task: {what} gives another value when it is called again; draw random numbers in data or init, and keep "
            f"no state between calls")
    return first


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_equal(one[key], other[key]) for key in one)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
    is_number = isinstance(one, int | float) and isinstance(other, int | float)
    return not is_number or one == other or (one != one and other != other)


def _call(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a user's function; an exception becomes a ValueError that names the function."""
    try:
        return function(*arguments)
    except NotImplementedError as error:
        if error.args:
            raise ValueError(f"task: {what} fails: {error}") from error
        raise ValueError(f"task: the method {what} is missing") from error
    except RandomLossError as error:
        raise ValueError(f"task: {what} {error}") from error
    except Exception as error:
        hint = "; if it cannot be vectorised, set vectorize = False in the class" if "vmap" in what else ""
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"task: {what} fails with {type(error).__name__}: {reason}{hint}") from error


def _check_metrics(task: TorchTask, found: Any) -> dict[str, float]:
    """Return a model's metrics as numbers; each must have a declared direction."""
    if not isinstance(found, Mapping):
        raise ValueError(f"task: metrics returns {_describe(found)}; must be a dict of metric → value")
    values: dict[str, float] = {}
    for name, value in found.items():
        if name not in task.directions:
            declared = f'directions = {{**dbo.TorchTask.directions, "{name}": "max"}}'
            raise ValueError(f"task: metrics has {name!r} without a direction; write {declared} (or min) in the class")
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"task: metrics: {name} has shape {tuple(value.shape)}; must be one number")
        try:
            values[str(name)] = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"task: metrics: {name} is {_describe(value)}; must be one number") from None
    return values


def _describe(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
