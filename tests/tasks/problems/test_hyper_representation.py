"""Hyper-representation: one forward pass per upper point, one start for all nodes, and a backbone that learns."""

from typing import Any

import numpy as np
import pytest

from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.tasks.api import Setup
from dbo.tasks.datasets.digits import Digits
from dbo.tasks.datasets.synthetic_text import SyntheticText
from dbo.tasks.partitions import ByClass
from dbo.tasks.problems.hyper_representation import Backbone, HyperRepresentation, HyperRepresentationProblem

SETUP = Setup(nodes=4, seed=0, dtype="float64", partition=ByClass(), data=Digits())


@pytest.fixture(scope="module")
def problem() -> HyperRepresentationProblem:
    return HyperRepresentation().build(SETUP)


def test_inner_loop_costs_one_forward_pass(problem: HyperRepresentationProblem) -> None:
    """K gradient steps in y, the Hessian and the upper derivatives at one x share one forward pass per level."""
    shard = problem.shard(range(4))
    x, y = shard.x0, shard.y0
    for _ in range(7):
        y = y - 0.1 * (shard.g_y(x, y) + shard.f_y(x, y))
    for name in ("f", "g", "f_x", "g_x"):
        getattr(shard, name)(x, y)
    shard.g_yy(x, y, y)
    shard.g_xy(x, y, y)
    assert (shard.train.cache.passes, shard.val.cache.passes) == (1, 1)
    shard.g_y(x + 1e-9, y)
    assert (shard.train.cache.passes, shard.val.cache.passes) == (2, 1)


def test_inner_loop_on_torch_costs_one_forward_pass(problem: HyperRepresentationProblem) -> None:
    """The same on tensors, where x is recognised without reading it; a tensor that was written into is another x."""
    torch = pytest.importorskip("torch")
    shard: Any = problem.shard(range(4)).to(lambda array: torch.asarray(array.copy()))
    x, y = shard.x0, shard.y0
    for _ in range(7):
        y = y - 0.1 * shard.g_y(x, y)
    assert shard.train.cache.passes == 1
    before = shard.g_y(x, y)
    x.mul_(1.5)
    assert not torch.allclose(before, shard.g_y(x, y))
    assert shard.train.cache.passes == 2


def test_reused_buffer_is_detected(problem: HyperRepresentationProblem) -> None:
    """New values in the same array give new results: the cache is keyed by content, not identity."""
    shard = problem.shard([0, 1])
    x, y = shard.x0.copy(), np.ones_like(shard.y0)
    before = shard.g_y(x, y)
    x *= 1.5
    np.testing.assert_array_equal(shard.g_y(x, y), problem.shard([0, 1]).g_y(x, y))
    assert not np.allclose(before, shard.g_y(x, y))


def test_start_is_common_random_and_keyed_by_the_seed(problem: HyperRepresentationProblem) -> None:
    """All nodes start at one x0 that depends on the seed only; y0 is zero, where the upper derivatives vanish."""
    shard = problem.shard(range(4))
    assert np.all(shard.x0 == shard.x0[0])
    assert np.std(shard.x0) > 0.01
    again = HyperRepresentation().build(Setup(nodes=2, seed=0, dtype="float64", partition=ByClass(), data=Digits()))
    other = HyperRepresentation().build(Setup(nodes=2, seed=1, dtype="float64", partition=ByClass(), data=Digits()))
    np.testing.assert_array_equal(again.shard([1]).x0[0], shard.x0[0])
    assert not np.array_equal(other.shard([1]).x0[0], shard.x0[0])
    assert np.all(shard.f_x(shard.x0, shard.y0) == 0)
    assert np.any(shard.g_y(shard.x0, shard.y0) != 0)


def test_sizes_are_those_of_the_perceptron() -> None:
    """Weights and biases of the hidden layers above, a head without bias below; 784-96-64-10 has 81,568 and 640."""
    problem = HyperRepresentation(hidden=(32, 16)).build(SETUP)
    assert problem.dim_x == 64 * 32 + 32 + 32 * 16 + 16
    assert problem.dim_y == 16 * 10
    assert Backbone((784, 96, 64), "relu").dim == 81_568


def test_descent_learns(problem: HyperRepresentationProblem) -> None:
    """Lower steps on the head and upper steps on the backbone take the common model from chance to over 80 %."""
    shard = problem.shard(range(4))
    x, y = shard.x0, shard.y0
    chance = problem.evaluate(x[:1], y[:1])["test_accuracy"][0]
    for _ in range(60):
        for _ in range(5):
            y = y - 0.5 * shard.g_y(x, y).mean(axis=0)
        x = x - 0.2 * shard.f_x(x, y).mean(axis=0)
    assert chance < 0.2
    assert problem.evaluate(x[:1], y[:1])["test_accuracy"][0] > 0.8


@pytest.mark.parametrize(("hidden", "message"), [
    ([16, 0], r"^task\.hidden\.1: 0 is not allowed; must be ≥ 1$"),
    ([], r"^task\.hidden: \[\] is not allowed; must have at least one layer$"),
])
def test_layers_without_units_are_refused(hidden: list[int], message: str) -> None:
    """The error names the layer, or the empty list."""
    with pytest.raises(InputError, match=message):
        Experiment(task={"name": "hyper_representation", "hidden": hidden})


def test_sparse_data_is_refused() -> None:
    """The error names the field and the reason."""
    setup = Setup(nodes=2, seed=0, dtype="float64", partition=ByClass(), data=SyntheticText(documents=200, features=50))
    with pytest.raises(ValueError, match=r"task.dataset: hyper_representation needs dense features"):
        HyperRepresentation(dataset="synthetic_text").build(setup)
