"""The references on one machine: F2BA, the centralised C²DFB, BOME, SOBA and stocBiO."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.compression.compressors import Identity
from dbo.algorithms.methods import bome, soba, stocbio
from dbo.algorithms.registry import algorithms
from dbo.algorithms.rng import counter
from dbo.platform.engine.shard_wrappers import CountingShard, pool_nodes
from dbo.platform.verify.certificates import verify


@pytest.mark.parametrize("task", ["quadratic", "coefficient_tuning"])
def test_f2ba_is_c2dfb_on_a_single_node(lab: Any, task: str) -> None:
    """Without neighbours and without compression, C²DFB has F2BA's iterates."""
    problem = pool_nodes(lab.quadratic() if task == "quadratic" else lab.learning(task, "digits"))
    steps = {"inner_steps": 5, "eta_in": 0.5, "eta_out": 0.5, "lam": 10.0}
    alone = lab.engine("f2ba", lab.algorithm("f2ba").config(**steps), problem, rounds=10)
    network = lab.engine("c2dfb", lab.algorithm("c2dfb").config(**steps, compressor=Identity()), problem, rounds=10)
    for name in ("x", "y", "z", "direction"):
        np.testing.assert_allclose(network.rows(name), alone.rows(name), rtol=0, atol=1e-11)
    assert np.abs(alone.rows("x")).max() > 0


def test_restarting_z_costs_the_exact_solution(lab: Any) -> None:
    """`z_start: y`, the authors' code: K steps from y are not enough for z, and the penalty solution is missed."""
    problem = lab.quadratic()
    target = problem.penalty_solution(10.0)
    errors = {}
    for start in ("last", "y"):
        engine = lab.engine("f2ba", lab.config("f2ba", inner_steps=3, z_start=start), problem, rounds=400)
        errors[start] = float(np.linalg.norm(engine.rows("x")[0] - target))
    assert errors["last"] < 1e-9 < 1e-3 < errors["y"]


def random_point(lab: Any, scale: float = 1.0) -> tuple[Any, Any, Any]:
    problem = pool_nodes(lab.quadratic())
    rng = np.random.default_rng(4)
    return CountingShard(problem.shard([0])), scale * rng.standard_normal((1, 3)), scale * rng.standard_normal((1, 5))


def gradient_of_q(shard: Any, cfg: Any, x: Any, y: Any) -> tuple[Any, Any, float]:
    y_hat = y
    for _ in range(cfg.inner_steps):
        y_hat = y_hat - cfg.eta_in * shard.g_y(x, y_hat)
    return shard.g_x(x, y) - shard.g_x(x, y_hat), shard.g_y(x, y), float((shard.g(x, y) - shard.g(x, y_hat))[0])


@pytest.mark.parametrize("phi", ["value", "gradient"])
@pytest.mark.parametrize("rate", [0.01, 1.0])
@pytest.mark.parametrize("scale", [0.03, 1.0])
def test_bome_makes_q_decrease_at_the_required_rate(lab: Any, phi: str, rate: float, scale: float) -> None:
    """⟨∇q, ∇f + μ∇q⟩ ≥ φ with the least μ ≥ 0: equality, unless ∇f alone does it, and then μ = 0."""
    cfg = lab.config("bome", phi=phi, rate=rate, floor=1e-30)
    shard, x, y = random_point(lab, scale)
    d_x, d_y = bome.directions(shard, cfg, x, y, counter(shard))
    q_x, q_y, q = gradient_of_q(shard, cfg, x, y)
    required = rate * (q if phi == "value" else float((q_x**2).sum() + (q_y**2).sum()))
    decrease = float((q_x * d_x).sum() + (q_y * d_y).sum())
    f_x, f_y = shard.f_x(x, y), shard.f_y(x, y)
    alone = float((q_x * f_x).sum() + (q_y * f_y).sum())
    if alone >= required:
        np.testing.assert_array_equal(d_x, f_x)
        np.testing.assert_array_equal(d_y, f_y)
    else:
        assert decrease == pytest.approx(required, rel=1e-9)
        mu = (d_y - f_y) / q_y
        np.testing.assert_allclose(mu, mu[0, 0], rtol=1e-9)
        assert mu[0, 0] > 0


def test_both_cases_of_the_multiplier_occur(lab: Any) -> None:
    """Control of the test above: among its points are some with μ = 0 and some with μ > 0."""
    active = set()
    for rate in (0.01, 1.0):
        for scale in (0.03, 1.0):
            cfg = lab.config("bome", rate=rate)
            shard, x, y = random_point(lab, scale)
            active.add(bool(np.abs(bome.directions(shard, cfg, x, y, counter(shard))[1] - shard.f_y(x, y)).max() > 0))
    assert active == {True, False}


@pytest.mark.parametrize("task", ["quadratic", "coefficient_tuning"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("sldbo", {"radius": 1e6}),
        ("sparkle", {"theta": 1.0}),
        ("sparkle", {"theta": 1.0, "rule_x": "extra", "rule_y": "gt", "rule_v": "extra"}),
    ],
)
def test_soba_is_its_networked_form_on_a_single_node(lab: Any, task: str, name: str, changes: dict[str, Any]) -> None:
    """Without neighbours SLDBO and SPARKLE, with each of its rules, have SOBA's iterates."""
    problem = pool_nodes(lab.quadratic(start=0.5) if task == "quadratic" else lab.learning(task, "digits"))
    steps = {"eta_x": 0.2, "eta_y": 0.4, "eta_v": 0.3}
    alone = lab.engine("soba", lab.config("soba", **steps), problem, rounds=10)
    network = lab.engine(name, lab.config(name, **steps, **changes), problem, rounds=10)
    for rows in ("x", "y", "direction"):
        np.testing.assert_allclose(network.rows(rows), alone.rows(rows), rtol=0, atol=1e-12)
    assert np.abs(alone.rows("x") - problem.shard([0]).x0).max() > 0


def test_the_bias_of_stocbio_falls_with_each_term_of_the_series(lab: Any) -> None:
    """Where it ends is off ψ's minimiser by at most (1 − η μ)^J, relative to the zero without the series."""
    problem = lab.quadratic()
    least, largest = np.linalg.eigvalsh(problem.hessians.mean(0))[[0, -1]]
    solution, eta = problem.solution(), 0.9 / largest
    without = np.linalg.norm(problem.find_zero(lambda x: problem.rho * x) - solution)
    distances = []
    for terms in (1, 4, 16, 64):
        config = lab.config("stocbio", neumann_terms=terms, eta_v=eta, eta_x=0.3)
        engine = lab.engine("stocbio", config, problem, rounds=400)
        limit = problem.find_zero(lambda x, j=terms: problem.truncated_inverse_hypergradient(x, j, 1 / eta))
        np.testing.assert_allclose(engine.rows("x")[0], limit, rtol=0, atol=1e-8)
        distances.append(float(np.linalg.norm(limit - solution)))
        assert distances[-1] <= 3 * (1 - eta * least) ** terms * without
    assert distances == sorted(distances, reverse=True)


def test_a_series_that_forgets_a_term_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of stocBiO: J − 1 terms in its hypergradient are not the J that it claims."""
    original = stocbio.hypergradient

    def shorter(shard: Any, cfg: Any, x: Any, y: Any, t: Any) -> Any:
        return original(shard, replace(cfg, neumann_terms=cfg.neumann_terms - 1), x, y, t)

    monkeypatch.setattr(stocbio, "hypergradient", shorter)
    failures = verify(algorithms()["stocbio"]).failures
    assert any("hypergradient is" in failure for failure in failures)
    assert any("end is" in failure for failure in failures)


def test_soba_with_the_wrong_sign_of_v_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of SOBA: the authors' v has the other sign, and both signs must agree."""
    original = soba.directions
    monkeypatch.setattr(soba, "directions", lambda shard, x, y, v: replace(original(shard, x, y, v), x=original(
        shard, x, y, -v).x))
    assert any("end is" in failure for failure in verify(algorithms()["soba"]).failures)
