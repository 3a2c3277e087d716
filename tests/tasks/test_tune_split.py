"""Samples held out for tuning are in neither f, g nor test, and score a model by the code of the upper loss."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from dbo.tasks import torch_problem
from dbo.tasks.api import Part, Setup, Split, TorchTask
from dbo.tasks.datasets.digits import Digits
from dbo.tasks.datasets.synthetic_text import SyntheticText
from dbo.tasks.partitions import Iid
from dbo.tasks.problems import classification
from dbo.tasks.problems.coefficient_tuning import CoefficientTuning
from dbo.tasks.problems.hyper_cleaning import HyperCleaning
from dbo.tasks.problems.hyper_representation import HyperRepresentation
from dbo.tasks.problems.quadratic import Quadratic
from dbo.tasks.torch_shard import TorchShard


@dataclass(frozen=True, kw_only=True, eq=False)
class Linear(TorchTask):
    """A linear model with a bias on the upper level."""

    def init(self, generator: torch.Generator) -> Any:
        return torch.zeros(10), torch.zeros(64, 10)

    def lower(self, x: Any, y: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(batch.inputs @ y + x, batch.labels) + y.square().sum()

    def upper(self, x: Any, y: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(batch.inputs @ y + x, batch.labels)

    def metrics(self, x: Any, y: Any, test: Any) -> Any:
        return {"test_loss": self.upper(x, y, test)}


class SparseTuning(CoefficientTuning):
    """Coefficient tuning on sparse features, whatever the data set."""

    def build(self, setup: Setup) -> Any:
        return CoefficientTuning.build(self, replace(setup, data=SyntheticText(features=40, classes=4, documents=900)))


TASKS = [CoefficientTuning(), HyperRepresentation(), Linear()]


def make_setup(fraction: float) -> Setup:
    return Setup(nodes=3, seed=4, dtype="float64", partition=Iid(), data=Digits(), tune_fraction=fraction)


def test_parts_are_disjoint_and_complete() -> None:
    """The tune part comes from the validation samples, class by class; train and test stay as they are."""
    whole, cut = Digits().load(4, None), make_setup(0.25).load_samples()
    assert cut.tune is not None
    assert [len(cut.train), len(cut.test)] == [len(whole.train), len(whole.test)]
    together = np.concatenate([cut.val.features, cut.tune.features])
    np.testing.assert_array_equal(np.sort(together, axis=0), np.sort(whole.val.features, axis=0))
    assert len(cut.tune) == round(0.25 * len(whole.val))
    counts = np.bincount(cut.tune.labels), 0.25 * np.bincount(whole.val.labels)
    assert np.abs(counts[0] - counts[1]).max() <= 1


def test_labels_need_not_be_classes() -> None:
    """Of targets and of rows of labels a share is taken too, the same for the same seed."""
    rng = np.random.default_rng(0)
    for labels in (rng.standard_normal(20), rng.standard_normal((20, 2))):
        part = Part(rng.standard_normal((20, 3)), labels)
        split = Split(part, part, part)
        one, other = split.hold_out(0.3, 1), split.hold_out(0.3, 1)
        assert one.tune is not None
        assert other.tune is not None
        assert (len(one.tune), len(one.val)) == (6, 14)
        np.testing.assert_array_equal(one.tune.labels, other.tune.labels)


def test_without_a_fraction_nothing_changes() -> None:
    """The default leaves data and digest as they are; a part that the data set gives itself is kept."""
    split = Digits().load(4, None)
    assert split.hold_out(0.0, 4) is split
    given = Split(split.train, split.val, split.test, 10, tune=split.test)
    assert given.hold_out(0.5, 4) is given
    assert given.digest() != split.digest()


def test_empty_part_is_refused() -> None:
    """One line that names the field."""
    part = Part(np.zeros((3, 1)), np.zeros(3, dtype=np.int64))
    with pytest.raises(ValueError, match=r"tune_fraction: 0\.01 of 3"):
        Split(part, part, part).hold_out(0.01, 0)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_tune_loss_is_the_upper_loss_on_the_tune_part(task: Any) -> None:
    """Of a problem whose only validation samples are the tune part, f is the same."""
    problem = task.build(make_setup(0.25))
    rng = np.random.default_rng(1)
    shard = problem.shard([0, 1, 2])
    x = shard.x0 + 0.1 * rng.standard_normal(shard.x0.shape)
    y = shard.y0 + 0.1 * rng.standard_normal(shard.y0.shape)
    losses = problem.tune_losses(x, y)

    class TuneAsVal:
        def load(self, seed: int, data_dir: str | None) -> Split:
            split = make_setup(0.25).load_samples()
            assert split.tune is not None
            return Split(split.train, split.tune, split.test, split.classes)

    for row in range(3):
        alone = task.build(Setup(nodes=1, seed=4, dtype="float64", partition=Iid(), data=TuneAsVal()))
        expected = alone.shard([0]).f(x[row : row + 1], y[row : row + 1])
        np.testing.assert_allclose(losses[row : row + 1], expected, rtol=1e-12)
    assert not np.allclose(losses, problem.shard([0, 1, 2]).f(x, y))


CLASSIFICATION = [CoefficientTuning(), HyperRepresentation()]


@pytest.mark.parametrize("task", CLASSIFICATION, ids=lambda task: type(task).__name__)
def test_tune_accuracy_is_the_accuracy_on_the_tune_part(task: Any) -> None:
    """It is the test accuracy of a problem whose test samples are the tune part; without one there is none."""
    problem, whole = task.build(make_setup(0.25)), task.build(make_setup(0.0))
    rng = np.random.default_rng(2)
    shard = problem.shard([0, 1, 2])
    x = shard.x0 + 0.1 * rng.standard_normal(shard.x0.shape)
    y = shard.y0 + 0.1 * rng.standard_normal(shard.y0.shape)

    class TuneAsTest:
        def load(self, seed: int, data_dir: str | None) -> Split:
            split = make_setup(0.25).load_samples()
            assert split.tune is not None
            return Split(split.train, split.val, split.tune, split.classes)

    other = task.build(Setup(nodes=3, seed=4, dtype="float64", partition=Iid(), data=TuneAsTest()))
    found = problem.tune_accuracies(x, y)
    np.testing.assert_allclose(found, other.evaluate(x, y)["test_accuracy"], rtol=1e-12)
    assert not np.allclose(found, problem.evaluate(x, y)["test_accuracy"])
    assert whole.tune_accuracies(x, y) is None


def make_models(problem: Any, count: int, dtype: Any = np.float64) -> tuple[Any, Any]:
    """Return models around the start, one per row."""
    rng, shard = np.random.default_rng(3), problem.shard([0])
    x, y = (start + 0.1 * rng.standard_normal((count, start.shape[1])) for start in (shard.x0, shard.y0))
    return x.astype(dtype), y.astype(dtype)


MANY = [*TASKS, HyperRepresentation(activation="tanh"), HyperCleaning(), SparseTuning()]


@pytest.mark.parametrize(("dtype", "close"), [("float64", 1e-12), ("float32", 1e-6)])
@pytest.mark.parametrize("task", MANY, ids=lambda task: type(task).__name__)
def test_many_models_have_the_values_of_single_ones(task: Any, dtype: Any, close: float) -> None:
    """Losses and accuracies on the tune part: 400 models, more than one chunk, against one after the other."""
    problem = task.build(replace(make_setup(0.25), dtype=dtype))
    x, y = make_models(problem, 400, dtype)
    single = [problem._tune_shard.f(x[i : i + 1], y[i : i + 1])[0] for i in range(len(x))]
    np.testing.assert_allclose(problem.tune_losses(x, y), single, rtol=close)
    if isinstance(task, TorchTask):
        return
    parts = [problem.tune_accuracies(x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
    np.testing.assert_array_equal(problem.tune_accuracies(x, y), np.concatenate(parts))
    tests = [problem.evaluate(x[i : i + 1], y[i : i + 1])["test_accuracy"] for i in range(len(x))]
    np.testing.assert_array_equal(problem.evaluate_nodes(x, y)["test_accuracy"], np.concatenate(tests))


@pytest.mark.parametrize("task", MANY, ids=lambda task: type(task).__name__)
def test_models_of_a_chunk_are_scored_by_one_call(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of calls is that of chunks, whose memory is bounded, not that of models."""
    problem = task.build(make_setup(0.25))
    calls: list[int] = []
    kind, name = (TorchShard, "f") if isinstance(task, TorchTask) else (type(problem), "score_models")
    original = getattr(kind, name)
    monkeypatch.setattr(kind, name, lambda self, x, y, *more: calls.append(len(x)) or original(self, x, y, *more))
    problem.tune_losses(*make_models(problem, 20))
    assert calls == [20]
    calls.clear()
    problem.tune_losses(*make_models(problem, 1_000))
    assert sum(calls) == 1_000
    assert len(calls) <= 50


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_large_models_are_computed_one_by_one(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded: a chunk of models that are too large has one."""
    monkeypatch.setattr(classification, "_CHUNK", 1)
    monkeypatch.setattr(torch_problem, "_CHUNK", 1)
    problem, counts = task.build(make_setup(0.25)), []
    kind = type(problem._tune_shard)
    original = kind.f
    monkeypatch.setattr(kind, "f", lambda self, x, y: counts.append(len(x)) or original(self, x, y))
    problem.tune_losses(*make_models(problem, 6))
    assert counts == [1] * 6


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_tune_samples_are_not_in_f(task: Any) -> None:
    """The validation samples of the nodes are fewer by the tune part; without one there is no tune loss."""
    whole, cut = (task.build(make_setup(fraction)) for fraction in (0.0, 0.25))
    assert sum(cut.sample_sizes()[1]) == sum(whole.sample_sizes()[1]) - round(0.25 * sum(whole.sample_sizes()[1]))
    assert cut.sample_sizes()[0] == whole.sample_sizes()[0]
    shard = whole.shard([0])
    assert whole.tune_losses(shard.x0, shard.y0) is None
    assert whole.describe()["data_sha256"] != cut.describe()["data_sha256"]


def test_task_without_samples_has_no_tune_loss() -> None:
    """The quadratic task ignores the fraction."""
    problem = Quadratic().build(make_setup(0.25))
    shard = problem.shard([0])
    assert problem.tune_losses(shard.x0, shard.y0) is None
