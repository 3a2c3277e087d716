"""SLAM: duals of the edges, the personalised problem that it solves, and negative controls."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.claims import LOCAL_INVERSE, MINIMISER, Limit
from dbo.algorithms.methods import slam
from dbo.algorithms.registry import algorithms
from dbo.platform.verify.certificates import verify


def personalised_point(problem: Any) -> Any:
    return problem.find_zero(lambda x: problem.personalised_hypergradient(x, 200, 1.2))


def test_the_personalised_point_minimises_the_personalised_objective(lab: Any) -> None:
    """The closed form is the gradient of (1/m) Σ f_i(x, y_i*(x)), by central differences, y_i* from each node's g_i."""
    problem = lab.quadratic()
    shard = problem.shard(range(6))

    def value(x: Any) -> float:
        rows = np.tile(x, (6, 1))
        own = np.linalg.solve(problem.hessians, -shard.g_y(rows, np.zeros((6, 5)))[:, :, None])[:, :, 0]
        np.testing.assert_allclose(shard.g_y(rows, own), 0, atol=1e-12)
        return float(shard.f(rows, own).mean())

    x, delta = np.array([0.3, -0.2, 0.5]), 1e-5
    slopes = [(value(x + delta * e) - value(x - delta * e)) / (2 * delta) for e in np.eye(3)]
    np.testing.assert_allclose(problem.personalised_hypergradient(x, 400, 1.2), slopes, rtol=1e-6)


def test_it_solves_another_problem(lab: Any) -> None:
    """On heterogeneous nodes its point is not ψ's minimiser, on identical ones it is."""
    differing, alike = lab.quadratic(), lab.quadratic(heterogeneity=0.0)
    away = np.linalg.norm(personalised_point(differing) - differing.solution()) / np.linalg.norm(differing.solution())
    assert away > 0.05
    np.testing.assert_allclose(personalised_point(alike), alike.solution(), rtol=0, atol=1e-8)


@pytest.mark.parametrize("limit", [MINIMISER, LOCAL_INVERSE], ids=["ψ", "common y*"])
def test_the_claim_of_a_common_lower_level_fails(limit: Limit) -> None:
    """The negative control of the label: the limits of methods with one y*(x) are not reached."""
    made = algorithms()["slam"]
    assert made.claim is not None
    failures = verify(replace(made, claim=replace(made.claim, limit=limit))).failures
    assert any(failure.startswith("end is") for failure in failures)


def test_lower_levels_stay_apart(lab: Any) -> None:
    """x is in consensus, y_i is at the minimiser of the node's own g_i."""
    problem = lab.quadratic()
    engine = lab.engine("slam", problem=problem, rounds=300)
    x, y = engine.rows("x"), engine.rows("y")
    assert np.abs(x - x.mean(0)).max() < 1e-9
    np.testing.assert_allclose(problem.shard(range(6)).g_y(x, y), 0, atol=1e-9)
    assert np.abs(y - y.mean(0)).max() > 0.01


def test_half_a_consensus_step_is_extra(lab: Any) -> None:
    """γ = 1/2: x⁺⁺ = W̃ (2 x⁺ − x) − α (d⁺ − d), the two-term recursion of EXTRA."""
    engine = lab.engine("slam", lab.config("slam", gamma=0.5))
    half = 0.5 * (np.eye(6) + lab.network().weights.toarray())
    seen = []
    for round_ in range(1, 7):
        seen.append((engine.rows("x"), engine.rows("direction")))
        engine.advance(round_)
    seen.append((engine.rows("x"), engine.rows("direction")))
    for (x, d), (x_1, d_1), (x_2, _) in zip(seen, seen[1:], seen[2:], strict=False):
        np.testing.assert_allclose(x_2, half @ (2 * x_1 - x) - 0.3 * (d_1 - d), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("no duals", lambda st: replace(st, p=0 * st.p)), ("wrong sign", lambda st: replace(st, p=-st.p))],
)
def test_wrong_duals_fail(name: str, wrong: Any) -> None:
    """The negative control: without its dual variables the nodes stop apart from each other, or diverge."""

    async def round_(st: Any, shard: Any, cfg: Any) -> Any:
        return await slam.slam.round(wrong(st), shard, cfg)

    failures = verify(replace(algorithms()["slam"], round=round_)).failures
    assert any(failure.startswith("end is") for failure in failures), name
