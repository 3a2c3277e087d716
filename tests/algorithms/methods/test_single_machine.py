"""The references on one machine: F2BA, the centralised C²DFB, and BOME."""

from typing import Any

import numpy as np
import pytest

from dbo.algorithms.compression.compressors import Identity
from dbo.algorithms.methods import bome
from dbo.algorithms.rng import counter
from dbo.platform.engine.shard_wrappers import CountingShard, pool_nodes


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
