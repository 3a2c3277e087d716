"""Coefficient tuning: the regulariser's forms, the start, and the recorded facts."""

import json

import numpy as np
import pytest

from dbo.tasks.api import Setup
from dbo.tasks.datasets.digits import Digits
from dbo.tasks.datasets.synthetic_text import SyntheticText
from dbo.tasks.partitions import ByClass
from dbo.tasks.problems.coefficient_tuning import CoefficientTuning

SETUP = Setup(nodes=4, seed=0, dtype="float64", partition=ByClass(), data=Digits())


def test_regulariser_forms_by_hand() -> None:
    """sum is Σ exp(x_p) y_pc²; mean divides it by the number of entries of y; half_mean is half of that."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((1, 64)), rng.standard_normal((1, 64, 10))
    by_hand = np.sum(np.exp(x)[:, :, None] * w**2)
    y = w.reshape(1, 640)
    bare = None
    for form, factor in (("sum", 1.0), ("mean", 1 / 640), ("half_mean", 0.5 / 640)):
        shard = CoefficientTuning(reg_form=form).build(SETUP).shard([2])    # type: ignore[arg-type]
        loss = shard.g(x, y)[0] - factor * by_hand
        assert bare is None or loss == pytest.approx(bare, rel=1e-10)
        bare = loss


def test_losses_by_hand() -> None:
    """f is the mean cross-entropy of a node's own validation samples, g that of its training samples at y's scale."""
    problem = CoefficientTuning().build(SETUP)
    w = np.random.default_rng(0).standard_normal((64, 10))
    part = problem.samples.val.take(problem.val[1])
    scores = part.features @ w
    p = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    by_hand = -np.mean(np.log(p[np.arange(len(part)), part.labels]))
    assert problem.shard([1]).f(np.zeros((1, 64)), w.reshape(1, -1))[0] == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("data", [Digits(), SyntheticText(documents=200, features=50, classes=4)])
def test_start_and_description(data: Digits | SyntheticText) -> None:
    """x and y start at zero, where every class is equally likely; the description is JSON and complete."""
    problem = CoefficientTuning().build(Setup(nodes=4, seed=0, dtype="float32", partition=ByClass(), data=data))
    shard = problem.shard(range(4))
    assert not shard.x0.any()
    assert not shard.y0.any()
    facts = json.loads(json.dumps(problem.describe()))
    np.testing.assert_allclose(shard.f(shard.x0, shard.y0), np.log(facts["classes"]), rtol=1e-5)
    assert len(facts["train_sizes"]) == len(facts["val_sizes"]) == 4
    assert facts["dim_y"] == facts["dim_x"] * facts["classes"] == problem.dim_y
    assert len(facts["data_sha256"]) == 64


def test_descent_learns_digits() -> None:
    """Gradient steps on the mean lower level take the common model from chance to over 90 %."""
    problem = CoefficientTuning().build(SETUP)
    shard = problem.shard(range(4))
    x, y = shard.x0, shard.y0
    for _ in range(100):
        y = y - 1.0 * shard.g_y(x, y).mean(axis=0)
    assert problem.evaluate(shard.x0[:1], shard.y0[:1])["test_accuracy"][0] < 0.2
    assert problem.evaluate(x[:1], y[:1])["test_accuracy"][0] > 0.9


def test_missing_data_set_is_a_one_line_error() -> None:
    """The error names the field."""
    with pytest.raises(ValueError, match=r"task\.dataset: this task learns from data"):
        CoefficientTuning().build(Setup(nodes=4, seed=0, dtype="float64", partition=ByClass()))
