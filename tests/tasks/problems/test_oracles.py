"""Oracles of every task: derivatives against finite differences, independent rows, dtypes and devices."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from dbo.tasks.api import Array, Batches, Part, Problem, Setup, Shard, Split
from dbo.tasks.datasets.digits import Digits
from dbo.tasks.datasets.synthetic_text import SyntheticText
from dbo.tasks.partitions import ByClass, Dirichlet, Iid
from dbo.tasks.problems.coefficient_tuning import CoefficientTuning
from dbo.tasks.problems.hyper_cleaning import HyperCleaning
from dbo.tasks.problems.hyper_representation import HyperRepresentation
from dbo.tasks.problems.logistic_synthetic import LogisticSynthetic
from dbo.tasks.problems.policy_evaluation import PolicyEvaluation
from dbo.tasks.problems.quadratic import Quadratic
from dbo.tasks.problems.stacking import DenseRows


@dataclass(frozen=True)
class Ragged:
    """One node has nearly all samples: padding all nodes to its size would multiply the work."""

    def assign(self, labels: Array, nodes: int, rng: np.random.Generator) -> list[Array]:
        sizes = np.array([2, 1, 9, 3, 1, 5])[: nodes - 1]
        cuts = np.cumsum(sizes)
        small = rng.permutation(len(labels))[: cuts[-1]]
        large = np.setdiff1d(np.arange(len(labels)), small)
        return [*np.split(small, cuts[:-1])[:2], large, *np.split(small, cuts[:-1])[2:]]


FEW = Digits(test_fraction=0.95)
TEXT = SyntheticText(documents=120, features=40, classes=4, words=15)

CASES: dict[str, tuple[Any, Any, Any, int]] = {
    "quadratic": (Quadratic(dim_x=4, dim_y=7), Iid(), None, 4),
    "quadratic-noise": (Quadratic(dim_x=4, dim_y=7, noise=0.1, samples=8), Iid(), None, 4),
    "quadratic-more-x-than-y": (Quadratic(dim_x=5, dim_y=3, mu=0.0, condition=3.0, heterogeneity=0.0), Iid(), None, 3),
    "tuning-half_mean": (CoefficientTuning(), ByClass(), FEW, 5),
    "tuning-mean": (CoefficientTuning(reg_form="mean"), Dirichlet(alpha=0.4), FEW, 4),
    "tuning-sum": (CoefficientTuning(reg_form="sum"), Iid(), FEW, 3),
    "tuning-ragged": (CoefficientTuning(), Ragged(), FEW, 7),
    "tuning-sparse": (CoefficientTuning(dataset="synthetic_text", reg_form="sum"), ByClass(), TEXT, 4),
    "tuning-sparse-ragged": (CoefficientTuning(dataset="synthetic_text"), Ragged(), TEXT, 7),
    "backbone-relu": (HyperRepresentation(hidden=(5, 4)), ByClass(), FEW, 4),
    "backbone-tanh": (HyperRepresentation(hidden=(5, 4), activation="tanh"), Iid(), FEW, 3),
    "backbone-one-layer": (HyperRepresentation(hidden=(6,), activation="tanh", mu=0.5), Iid(), FEW, 3),
    "backbone-three-layers": (HyperRepresentation(hidden=(4, 3, 5), activation="tanh"), Dirichlet(), FEW, 3),
    "policy": (PolicyEvaluation(states=9, dim_x=4, transitions=3, successors=3), Iid(), None, 4),
    "policy-identical": (PolicyEvaluation(states=6, dim_x=6, heterogeneity=0.0, discount=0.5), Iid(), None, 3),
    "logistic": (LogisticSynthetic(dim=8, train_samples=12, val_samples=9, test_samples=5), Iid(), None, 4),
    "cleaning": (HyperCleaning(random_features=30, components=8), ByClass(), FEW, 4),
    "cleaning-inputs": (HyperCleaning(random_features=0, components=6, mu=0.5), Iid(), FEW, 3),
    "cleaning-ragged": (HyperCleaning(random_features=0, components=6), Ragged(), FEW, 7),
    "backbone-ragged": (HyperRepresentation(hidden=(4, 3), activation="tanh"), Ragged(), FEW, 7),
}
every_case = pytest.mark.parametrize("case", CASES)


@cache
def problem(case: str, dtype: str = "float64") -> Problem:
    task, partition, data, nodes = CASES[case]
    built: Problem = task.build(Setup(nodes=nodes, seed=3, dtype=dtype, partition=partition, data=data))
    return built


def point(shard: Shard, seed: int = 0) -> tuple[Array, Array, Array]:
    """Return random read-only rows x, y, v."""
    rng = np.random.default_rng(seed)
    x = shard.x0 + 0.3 * rng.standard_normal(shard.x0.shape).astype(shard.x0.dtype)
    y, v = (0.7 * rng.standard_normal(shard.y0.shape).astype(shard.y0.dtype) for _ in range(2))
    for rows in (x, y, v):
        rows.flags.writeable = False
    return x, y, v


def evaluate_oracles(shard: Shard, x: Any, y: Any, v: Any) -> dict[str, Any]:
    found: dict[str, Any] = {name: getattr(shard, name)(x, y) for name in ("f", "g", "f_x", "f_y", "g_x", "g_y")}
    return found | {name: getattr(shard, name)(x, y, v) for name in ("g_yy", "g_xy")}


def differences(value: Callable[[Array], Array], at: Array, smooth: bool) -> Array:
    """Return the (rows, dim) derivative of (rows,) values by central differences; all rows are shifted at once."""
    columns = []
    for k in range(at.shape[1]):
        def shifted(by: float, k: int = k) -> Array:
            point = at.copy()
            point[:, k] += by
            return value(point)
        if smooth:
            h = 1e-3
            columns.append((8 * (shifted(h) - shifted(-h)) - (shifted(2 * h) - shifted(-2 * h))) / (12 * h))
        else:    # a larger stencil would step over kinks
            h = 1e-7
            columns.append((shifted(h) - shifted(-h)) / (2 * h))
    return np.stack(columns, axis=1)


def assert_close(found: Array, expected: Array, tolerance: float) -> None:
    error = np.linalg.norm(found - expected, axis=-1)
    assert np.all(error <= tolerance * np.linalg.norm(expected, axis=-1)), (error, np.linalg.norm(expected, axis=-1))


@every_case
@pytest.mark.parametrize("name", ["f_x", "f_y", "g_x", "g_y"])
def test_gradient_is_the_derivative_of_the_value(case: str, name: str) -> None:
    """∇_x f, ∇_y f, ∇_x g, ∇_y g equal central differences of f and g to 1e-6 relative, on every node."""
    shard = problem(case).shard(range(problem(case).nodes))
    x, y, _ = point(shard)
    value = getattr(shard, name[0])
    smooth = "relu" not in case
    if name[2] == "x":
        numeric = differences(lambda point: value(point, y), x, smooth)
    else:
        numeric = differences(lambda point: value(x, point), y, smooth)
    assert_close(numeric, getattr(shard, name)(x, y), 1e-6)


@every_case
def test_hessian_product_is_the_derivative_of_the_gradient(case: str) -> None:
    """∇²_yy g v equals the central difference of ∇_y g along v, and so the gradient of ⟨∇_y g, v⟩."""
    shard = problem(case).shard(range(problem(case).nodes))
    x, y, v = point(shard)
    h = 1e-3
    along = [shard.g_y(x, y + k * h * v) for k in (-2, -1, 1, 2)]
    numeric = (8 * (along[2] - along[1]) - (along[3] - along[0])) / (12 * h)
    assert_close(numeric, shard.g_yy(x, y, v), 1e-6)


@every_case
def test_jacobian_product_is_the_derivative_of_the_gradient(case: str) -> None:
    """∇²_xy g v equals central differences in x of ⟨∇_y g, v⟩."""
    shard = problem(case).shard(range(problem(case).nodes))
    x, y, v = point(shard)
    numeric = differences(lambda point: np.sum(shard.g_y(point, y) * v, axis=1), x, "relu" not in case)
    assert_close(numeric, shard.g_xy(x, y, v), 1e-6)


@every_case
def test_rows_do_not_influence_each_other(case: str) -> None:
    """Changing one row's x, y and v leaves the results of all other rows bit-identical."""
    shard = problem(case).shard(range(problem(case).nodes))
    x, y, v = point(shard)
    before = evaluate_oracles(shard, x, y, v)
    x2, y2, v2 = (rows.copy() for rows in (x, y, v))
    for rows in (x2, y2, v2):
        rows[1] *= -3.0
    after = evaluate_oracles(shard, x2, y2, v2)
    others = np.arange(shard.nodes) != 1
    for name, rows in before.items():
        np.testing.assert_array_equal(after[name][others], rows[others], err_msg=name)
    assert not np.array_equal(after["g_y"][1], before["g_y"][1])


@every_case
def test_any_packing_gives_the_same_rows(case: str) -> None:
    """shard([a, b]) and shard([a]) return rows a and b of the whole: padding and grouping change nothing."""
    whole = problem(case).shard(range(problem(case).nodes))
    x, y, v = point(whole)
    expected = evaluate_oracles(whole, x, y, v)
    for ids in ([2, 0], [1], [problem(case).nodes - 1]):
        shard = problem(case).shard(ids)
        assert shard.nodes == len(ids)
        assert shard.ids.tolist() == ids
        assert (shard.dim_x, shard.dim_y) == (problem(case).dim_x, problem(case).dim_y)
        np.testing.assert_array_equal(shard.x0, whole.x0[ids])
        np.testing.assert_array_equal(shard.y0, whole.y0[ids])
        for name, rows in evaluate_oracles(shard, x[ids], y[ids], v[ids]).items():
            np.testing.assert_allclose(rows, expected[name][ids], rtol=1e-10, atol=1e-13, err_msg=name)


@every_case
def test_results_are_fresh_arrays(case: str) -> None:
    """Writing into a result changes neither the shard nor the next result."""
    shard = problem(case).shard([0, 1])
    x, y, v = point(shard)
    first = evaluate_oracles(shard, x, y, v)
    kept = {name: rows.copy() for name, rows in first.items()}
    for rows in first.values():
        rows[...] = np.nan
    for name, rows in evaluate_oracles(shard, x, y, v).items():
        np.testing.assert_array_equal(rows, kept[name], err_msg=name)


@every_case
def test_float32_stays_float32(case: str) -> None:
    """A float32 experiment computes in float32 throughout and agrees with float64 to float32's precision."""
    single = problem(case, "float32").shard([0, 1, 2])
    double = problem(case).shard([0, 1, 2])
    x, y, v = point(single)
    expected = evaluate_oracles(double, *(rows.astype(np.float64) for rows in (x, y, v)))
    assert single.x0.dtype == single.y0.dtype == np.float32
    for name, rows in evaluate_oracles(single, x, y, v).items():
        assert rows.dtype == np.float32, name
        scale = np.max(np.abs(expected[name]))
        np.testing.assert_allclose(rows, expected[name], rtol=1e-3, atol=1e-4 * scale, err_msg=name)


@every_case
def test_torch_tensors_give_the_same_numbers(case: str) -> None:
    """A shard converted by `to(torch.asarray)` returns torch tensors of the same values."""
    torch = pytest.importorskip("torch")
    shard = problem(case).shard(range(problem(case).nodes))
    converted = shard.to(lambda a: torch.asarray(a.copy()))
    x, y, v = point(shard)
    expected = evaluate_oracles(shard, x, y, v)
    assert isinstance(converted.x0, torch.Tensor)
    for name, rows in evaluate_oracles(converted, *(torch.asarray(rows.copy()) for rows in (x, y, v))).items():
        assert isinstance(rows, torch.Tensor), name
        np.testing.assert_allclose(rows.numpy(), expected[name], rtol=1e-10, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("case", [
    "quadratic-noise", "tuning-half_mean", "backbone-relu", "policy", "logistic", "cleaning",
])
@pytest.mark.filterwarnings("error")
def test_batches_of_tensors_give_the_same_numbers(case: str) -> None:
    """Drawn sample numbers are read-only: torch takes them without a warning, on both levels."""
    torch = pytest.importorskip("torch")
    shard = problem(case).shard([0, 1, 2])
    converted = shard.to(lambda a: torch.asarray(a.copy()))
    x, y, v = point(shard)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)                  # torch warns once per process otherwise
    try:
        for step in range(2):
            here, there = (each.draw_batch(Batches(lower=2, upper=3), 1, step) for each in (shard, converted))
            expected = evaluate_oracles(here, x, y, v)
            for name, rows in evaluate_oracles(there, *(torch.asarray(rows.copy()) for rows in (x, y, v))).items():
                np.testing.assert_allclose(rows.numpy(), expected[name], rtol=1e-10, atol=1e-13, err_msg=name)
    finally:
        torch.set_warn_always(always)


def test_sparse_and_dense_features_agree() -> None:
    """The same documents as CSR and as a plain matrix give the same results."""

    class Dense:
        def load(self, seed: int, data_dir: str | None) -> Split:
            s = TEXT.load(seed, data_dir)
            train, val, test = (Part(sparse.csr_array(p.features).toarray(), p.labels) for p in s.parts)
            return Split(train, val, test, s.classes)

    task = CoefficientTuning(dataset="synthetic_text", reg_form="sum")
    dense = task.build(Setup(nodes=4, seed=3, dtype="float64", partition=ByClass(), data=Dense()))
    shards = dense.shard(range(4)), problem("tuning-sparse").shard(range(4))
    x, y, v = point(shards[0])
    expected = evaluate_oracles(shards[0], x, y, v)
    for name, rows in evaluate_oracles(shards[1], x, y, v).items():
        np.testing.assert_allclose(rows, expected[name], rtol=1e-10, atol=1e-13, err_msg=name)
    for name, rows in problem("tuning-sparse").evaluate(x, y).items():
        np.testing.assert_allclose(rows, dense.evaluate(x, y)[name], rtol=1e-12)


def test_ragged_nodes_are_not_padded_to_the_largest() -> None:
    """Very unequal nodes are batched in groups: padding at most triples the number of rows."""
    built = problem("tuning-ragged")
    shard = built.shard(range(built.nodes))
    rows = shard.train.rows    # type: ignore[attr-defined]
    assert isinstance(rows, DenseRows)
    assert len(rows.layout.groups) > 1
    assert len(rows.features) <= 3 * sum(built.describe()["train_sizes"])
    assert built.nodes * max(built.describe()["train_sizes"]) > 3 * sum(built.describe()["train_sizes"])


@every_case
def test_evaluate_takes_any_number_of_rows(case: str) -> None:
    """Each metric has one finite value per row, and a row's value does not depend on the others."""
    built = problem(case)
    x, y, _ = point(built.shard([0, 1, 2]))
    together = built.evaluate(x, y)
    assert "test_loss" in together
    for name, values in together.items():
        assert values.shape == (3,)
        assert np.all(np.isfinite(values))
        np.testing.assert_allclose(built.evaluate(x[1:2], y[1:2])[name], values[1:2], rtol=1e-12)
