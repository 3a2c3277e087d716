"""Quadratic: closed forms against independent minimisation and finite differences."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dbo.platform.config.experiment import Experiment
from dbo.platform.runs.runner import run
from dbo.tasks.api import Array, Setup
from dbo.tasks.partitions import Iid
from dbo.tasks.problems.quadratic import Quadratic, QuadraticProblem

SETUP = Setup(nodes=5, seed=1, dtype="float64", partition=Iid())


@pytest.fixture(params=[Quadratic(dim_x=4, dim_y=7), Quadratic(dim_x=6, dim_y=3, mu=0.0, rho=0.5, heterogeneity=2.0)])
def problem(request: pytest.FixtureRequest) -> QuadraticProblem:
    task: Quadratic = request.param
    return task.build(SETUP)


def mean_rows(problem: QuadraticProblem, name: str, x: Array, y: Array) -> Array:
    """Return (1/m) Σ_i of an oracle at one common (x, y), through the shard only."""
    shard = problem.shard(range(problem.nodes))
    rows = [np.tile(v, (problem.nodes, 1)) for v in (x, y)]
    mean: Array = getattr(shard, name)(*rows).mean(axis=0)
    return mean


def minimise(gradient: object, start: Array, step: float, steps: int = 20_000) -> Array:
    v = start
    for _ in range(steps):
        v = v - step * gradient(v)    # type: ignore[operator]
    return v


def test_y_star_minimises_the_lower_level(problem: QuadraticProblem) -> None:
    """Gradient descent on (1/m) Σ g_i(x, ·) by the shard's ∇_y g arrives at y*(x)."""
    x = np.linspace(-1, 2, problem.dim_x)
    found = minimise(lambda y: mean_rows(problem, "g_y", x, y), np.ones(problem.dim_y), 0.8, 1500)
    np.testing.assert_allclose(problem.y_star(x), found, rtol=1e-9, atol=1e-11)


def test_psi_is_the_upper_value_at_y_star(problem: QuadraticProblem) -> None:
    """ψ(x) = (1/m) Σ f_i(x, y*(x)), as the shard's f gives it; `evaluate` agrees for any y."""
    x = np.linspace(-1, 2, problem.dim_x)
    y = problem.y_star(x)
    assert problem.psi(x) == pytest.approx(float(mean_rows(problem, "f", x, y)), rel=1e-12)
    loss = problem.evaluate(np.stack([x, -x]), np.stack([y, 2 * y]))["test_loss"]
    assert loss[1] == pytest.approx(float(mean_rows(problem, "f", -x, 2 * y)), rel=1e-12)


def test_hypergradient_is_the_derivative_of_psi(problem: QuadraticProblem) -> None:
    """∇ψ equals central differences of ψ."""
    x, h = np.linspace(-1, 2, problem.dim_x), 1e-4
    numeric = [(problem.psi(x + h * e) - problem.psi(x - h * e)) / (2 * h) for e in np.eye(problem.dim_x)]
    np.testing.assert_allclose(problem.hypergradient(x), numeric, rtol=1e-6, atol=1e-9)


def test_solution_minimises_psi(problem: QuadraticProblem) -> None:
    """∇ψ(x*) = 0, and ψ is larger all around."""
    x = problem.solution()
    assert np.linalg.norm(problem.hypergradient(x)) <= 1e-12 * np.linalg.norm(problem.hypergradient(0 * x))
    rng = np.random.default_rng(0)
    assert all(problem.psi(x + 0.1 * rng.standard_normal(x.shape)) > problem.psi(x) for _ in range(20))


@pytest.mark.parametrize("lam", [1.0, 10.0, 300.0])
def test_penalty_solution_is_stationary(problem: QuadraticProblem, lam: float) -> None:
    """The mean oracles vanish at (x, y, z): ∇_y f + λ∇_y g at y, ∇_y g at z, ∇_x f + λ(∇_x g(y) − ∇_x g(z))."""
    x, y, z = problem.penalty_minimisers(lam)
    upper = mean_rows(problem, "f_x", x, y)
    upper = upper + lam * (mean_rows(problem, "g_x", x, y) - mean_rows(problem, "g_x", x, z))
    np.testing.assert_allclose(mean_rows(problem, "f_y", x, y) + lam * mean_rows(problem, "g_y", x, y), 0, atol=1e-11)
    np.testing.assert_allclose(mean_rows(problem, "g_y", x, z), 0, atol=1e-12)
    np.testing.assert_allclose(upper, 0, atol=1e-10)


def test_penalty_solution_approaches_the_solution_like_one_over_lambda(problem: QuadraticProblem) -> None:
    """Ten times the penalty, a tenth of the distance."""
    target = problem.solution()
    near, nearer = (np.linalg.norm(problem.penalty_solution(lam) - target) for lam in (1e3, 1e4))
    assert nearer / near == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("lam", [1.0, 10.0, 300.0])
def test_penalty_hypergradient_vanishes_at_the_penalty_solution(problem: QuadraticProblem, lam: float) -> None:
    """∇ψ_λ(x) is 0 exactly where the stationary (x, y, z) is."""
    found = problem.find_zero(lambda x: problem.penalty_hypergradient(x, lam))
    np.testing.assert_allclose(found, problem.penalty_solution(lam), rtol=1e-9)


@pytest.mark.parametrize("lam", [4.0, 10.0, 300.0])
def test_central_hypergradient_is_that_of_the_oracles(problem: QuadraticProblem, lam: float) -> None:
    """At the y₊, y₋ where ∇_y (g ± f/λ) vanish it is ½(∇_x f(y₊) + ∇_x f(y₋)) + λ/2 (∇_x g(y₊) − ∇_x g(y₋))."""
    x = np.linspace(-1, 2, problem.dim_x)
    zero = np.zeros(problem.dim_y)

    def minimise(sign: float) -> Array:
        def gradient(y: Array) -> Array:
            return mean_rows(problem, "g_y", x, y) + sign / lam * mean_rows(problem, "f_y", x, y)

        hessian = np.stack([gradient(unit) - gradient(zero) for unit in np.eye(problem.dim_y)], axis=1)
        return np.linalg.solve(hessian, -gradient(zero))

    plus, minus = minimise(1.0), minimise(-1.0)
    expected = 0.5 * (mean_rows(problem, "f_x", x, plus) + mean_rows(problem, "f_x", x, minus))
    expected = expected + lam / 2 * (mean_rows(problem, "g_x", x, plus) - mean_rows(problem, "g_x", x, minus))
    np.testing.assert_allclose(problem.central_hypergradient(x, lam), expected, rtol=1e-9, atol=1e-11)


def test_central_bias_falls_like_one_over_lambda_squared(problem: QuadraticProblem) -> None:
    """Twice λ, a quarter of the distance to ψ's minimiser; the forward difference keeps a half."""
    target = problem.solution()

    def distance(hypergradient: Callable[[Array, float], Array], lam: float) -> float:
        return float(np.linalg.norm(problem.find_zero(lambda x: hypergradient(x, lam)) - target))

    central, forward = problem.central_hypergradient, problem.penalty_hypergradient
    assert distance(central, 200.0) / distance(central, 100.0) == pytest.approx(0.25, rel=0.02)
    assert distance(forward, 200.0) / distance(forward, 100.0) == pytest.approx(0.5, rel=0.05)
    assert distance(central, 100.0) < 0.1 * distance(forward, 100.0)


def test_local_inverse_hypergradients_are_those_of_the_oracles(problem: QuadraticProblem) -> None:
    """mean_i [∇_x f_i − ∇²_xy g_i P_i ∇_y f_i](x, y*(x)) by the shard; averaged: of mean(∇_y f_i)."""
    x, nodes = np.linspace(-1, 2, problem.dim_x), problem.nodes
    shard = problem.shard(range(nodes))
    x_rows, y_rows = (np.tile(v, (nodes, 1)) for v in (x, problem.y_star(x)))
    f_y = shard.f_y(x_rows, y_rows)
    for b, found in (
        (f_y, problem.local_inverse_hypergradient(x, 4, 1.3)),
        (np.tile(f_y.mean(0), (nodes, 1)), problem.averaged_inverse_hypergradient(x, 4, 1.3)),
    ):
        p = b
        for _ in range(3):
            p = p - shard.g_yy(x_rows, y_rows, p) / 1.3 + b
        direction = shard.f_x(x_rows, y_rows) - shard.g_xy(x_rows, y_rows, p / 1.3)
        np.testing.assert_allclose(found, direction.mean(0), rtol=1e-10, atol=1e-12)


def test_long_series_is_the_inverse(problem: QuadraticProblem) -> None:
    """With many terms the pooled truncated hypergradient is ∇ψ; with few it is not."""
    x = np.linspace(-1, 2, problem.dim_x)
    np.testing.assert_allclose(
        problem.truncated_inverse_hypergradient(x, 600, 1.2), problem.hypergradient(x), rtol=1e-9, atol=1e-11
    )
    assert np.linalg.norm(problem.truncated_inverse_hypergradient(x, 2, 1.2) - problem.hypergradient(x)) > 1e-3


def test_local_inverses_are_right_only_without_heterogeneity() -> None:
    """Each node's own inverse gives ψ's minimiser on identical nodes and another point on different ones."""
    for heterogeneity, is_exact in ((0.0, True), (1.0, False)):
        problem = Quadratic(heterogeneity=heterogeneity).build(SETUP)
        for hypergradient in (problem.local_inverse_hypergradient, problem.averaged_inverse_hypergradient):
            x = problem.find_zero(lambda x, hypergradient=hypergradient: hypergradient(x, 300, 1.2))
            error = problem.task_metrics(x, problem.y_star(x))["solution_error"]
            assert (error < 1e-10) if is_exact else (error > 0.1)


def test_condition_heterogeneity_and_scale_are_as_requested() -> None:
    """Every H_i has eigenvalues from 1/condition to 1; heterogeneity 0 makes nodes equal; more nodes change none."""
    problem = Quadratic(condition=50.0, heterogeneity=0.7).build(SETUP)
    eigenvalues = np.linalg.eigvalsh(problem.h)
    np.testing.assert_allclose(eigenvalues[:, 0], 1 / 50, rtol=1e-9)
    np.testing.assert_allclose(eigenvalues[:, -1], 1.0, rtol=1e-9)
    same = Quadratic(heterogeneity=0.0).build(SETUP)
    for stack in (same.h, same.b, same.c, same.t):
        np.testing.assert_array_equal(stack, np.broadcast_to(stack[0], stack.shape))
    fewer = Quadratic(condition=50.0, heterogeneity=0.7).build(Setup(nodes=2, seed=1, dtype="float64", partition=Iid()))
    np.testing.assert_allclose(fewer.h, problem.h[:2], rtol=1e-12, atol=1e-15)


def test_task_metrics_are_distances_to_known_points(problem: QuadraticProblem) -> None:
    """Zero at the solution, one at zero, in between at the solution of a penalty method."""
    x = problem.solution()
    y = problem.y_star(x)
    assert set(problem.task_metrics(x, y)) == {"solution_error", "hypergradient_error"}
    assert problem.task_metrics(x, y)["solution_error"] == 0.0
    assert problem.task_metrics(0 * x, y)["solution_error"] == pytest.approx(1.0)
    assert problem.task_metrics(0 * x, y)["hypergradient_error"] == pytest.approx(1.0)
    penalised = problem.penalty_solution(10.0)
    assert problem.task_metrics(penalised, y)["solution_error"] > 1e-3


def test_penalty_error_is_the_distance_to_the_penalty_solution(tmp_path: Path) -> None:
    """Evaluations of a penalty method report ‖x̄ − x_λ‖ / ‖x_λ‖; those of other methods have no such metric."""
    penalised, other = (
        run(Experiment(
            algorithm={"name": name}, task={"name": "quadratic"}, nodes=4, rounds=2, dtype="float64",
            engine={"name": "local"}, tracking={"uri": "off"},
        ), tmp_path / name)
        for name in ("c2dfb", "d_soba")
    )
    problem = Quadratic().build(Setup(nodes=4, seed=0, dtype="float64", partition=Iid()))
    target = problem.penalty_solution(penalised.experiment.algorithm["lam"])
    expected = np.linalg.norm(penalised.state["x"].mean(axis=0) - target) / np.linalg.norm(target)
    assert penalised.history["penalty_error"].iloc[-1] == pytest.approx(expected, rel=1e-12)
    columns = [name for name in penalised.history if name.endswith("_error")]
    assert columns == ["solution_error", "hypergradient_error", "penalty_error"]
    assert "penalty_error" not in other.history
    assert "solution_error" in other.history
