"""Policy evaluation: Bellman operators, closed-form solution, batches of transitions and states."""

from functools import cache

import numpy as np
import pytest

from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.runs.runner import run
from dbo.tasks.api import Setup
from dbo.tasks.partitions import Iid
from dbo.tasks.problems.policy_evaluation import PolicyEvaluation, PolicyEvaluationProblem


@cache
def build(nodes: int = 4, heterogeneity: float = 1.0, transitions: int = 6) -> PolicyEvaluationProblem:
    task = PolicyEvaluation(states=12, dim_x=5, transitions=transitions, heterogeneity=heterogeneity, successors=3)
    return task.build(Setup(nodes=nodes, seed=1, dtype="float64", partition=Iid()))


def test_the_lower_level_is_the_mean_bellman_operator() -> None:
    """The gradient in y is zero at the mean over nodes and transitions of r + γ V(s')."""
    problem = build()
    shard = problem.shard(range(4))
    x = np.random.default_rng(0).standard_normal(5)
    values = problem.phi @ x
    y = np.zeros(12)
    for node in range(4):
        for s, after in zip(problem.start, problem.end[node], strict=True):
            y[s] += (problem.rewards[node, s, after] + 0.9 * values[after]) / (4 * 6)
    rows = shard.g_y(np.tile(x, (4, 1)), np.tile(y, (4, 1)))
    np.testing.assert_allclose(rows.mean(axis=0), 0, atol=1e-12)
    assert np.abs(rows).max() > 1e-3


def test_values_are_sums_over_transitions() -> None:
    """f and g equal their definitions, computed sample by sample."""
    problem = build()
    shard = problem.shard([2])
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal(5), rng.standard_normal(12)
    after = problem.end[2]
    residual = y[problem.start] - problem.rewards[2, problem.start, after] - 0.9 * problem.phi[after] @ x
    np.testing.assert_allclose(shard.g(x[None], y[None]), 12 / 2 * np.mean(residual**2))
    np.testing.assert_allclose(shard.f(x[None], y[None]), 0.5 * np.mean((problem.phi @ x - y) ** 2))


def test_hypergradient_is_zero_at_the_solution() -> None:
    """∇ψ = ∇_x f − ∇²_xy g (∇²_yy g)⁻¹ ∇_y f with ∇²_yy g = I; nowhere else it is zero."""
    problem = build()
    shard = problem.shard(range(4))

    def hypergradient(x: np.ndarray) -> np.ndarray:
        rows = np.tile(x, (4, 1))
        y = np.tile(-shard.g_y(rows, np.zeros((4, 12))).mean(axis=0), (4, 1))
        v = np.tile(shard.f_y(rows, y).mean(axis=0), (4, 1))
        return (shard.f_x(rows, y) - shard.g_xy(rows, y, v)).mean(axis=0)

    np.testing.assert_allclose(hypergradient(problem.solution()), 0, atol=1e-12)
    assert np.linalg.norm(hypergradient(problem.solution() + 1)) > 1e-3


def test_many_transitions_approach_the_true_process() -> None:
    """The minimiser on samples has nearly the smallest true Bellman residual; on few samples a larger one."""
    few, many = build(transitions=1), build(transitions=2_000)
    losses = [many.evaluate(p.solution()[None], np.zeros((1, 12)))["test_loss"][0] for p in (few, many)]
    chances, rewards = many._mean_mdp
    best = np.linalg.lstsq(many.phi - 0.9 * chances @ many.phi, rewards)[0]
    least = many.evaluate(best[None], np.zeros((1, 12)))["test_loss"][0]
    assert least <= losses[1] < 1.01 * least
    assert losses[0] > losses[1]


def test_nodes_differ_by_heterogeneity() -> None:
    """0: all nodes have one MDP; 1: each has its own, which does not depend on the number of nodes."""
    same = build(heterogeneity=0.0)
    np.testing.assert_array_equal(same.chances[0], same.chances[3])
    assert np.abs(build().chances[0] - build().chances[3]).max() > 0.1
    np.testing.assert_array_equal(build(nodes=2).end, build().end[:2])
    np.testing.assert_allclose(build().chances.sum(axis=2), 1)


@pytest.mark.parametrize("name", ["g_x", "g_y", "f_x", "f_y"])
def test_batches_are_unbiased(name: str) -> None:
    """The mean over batches that contain every sample equally often is the gradient on all samples."""
    shard = build().shard([0, 3])
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal(shard.x0.shape), rng.standard_normal(shard.y0.shape)
    have = int(shard.sizes[0 if name[0] == "g" else 1][0])
    batches = [np.stack([(np.arange(4) + first) % have, (np.arange(4) + 2 * first) % have]) for first in range(have)]
    rows = [getattr(shard.subset(b, None) if name[0] == "g" else shard.subset(None, b), name)(x, y) for b in batches]
    np.testing.assert_allclose(np.mean(rows, axis=0), getattr(shard, name)(x, y), rtol=1e-9, atol=1e-12)
    assert not np.allclose(rows[0], rows[1])


def test_more_features_than_states_are_refused() -> None:
    """The minimiser would not be unique."""
    with pytest.raises(InputError, match=r"^task\.dim_x: 200 is not allowed; must be ≤ states = 100$"):
        Experiment(task={"name": "policy_evaluation", "dim_x": 200})


def test_a_run_approaches_the_solution(tmp_path: object) -> None:
    """C²DFB on full batches moves x nearly to the minimiser of ψ."""
    result = run(Experiment(
        nodes=4, rounds=300, eval_every=100, dtype="float64", engine={"name": "local"}, tracking={"uri": "off"},
        task={"name": "policy_evaluation", "states": 12, "dim_x": 3, "discount": 0.5},
        algorithm={
            "name": "c2dfb", "inner_steps": 10, "eta_in": 0.5, "eta_out": 0.3, "lam": 10.0,
            "compressor": {"name": "identity"},
        },
    ), f"{tmp_path}/run")
    assert result.history["solution_error"].iloc[0] == 1.0
    assert result.history["solution_error"].iloc[-1] < 0.05
