"""STORM-PL, SUN-DSBO-GT and F²SA: what they become in special cases, their closed forms, and negative controls."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.methods import f2sa, storm_pl, sun_dsbo
from dbo.algorithms.registry import algorithms
from dbo.platform.engine.local import LocalEngine
from dbo.platform.network.topology import TOPOLOGIES, build_network, single_node
from dbo.platform.verify.certificates import verify
from dbo.platform.verify.stochastic import SIGMA, build_problem, measure_spread, scale_steps
from dbo.tasks.api import Shard

Array = Any


def test_storm_pl_on_full_batches_is_dsgda_gt(lab: Any) -> None:
    """Estimates are exact, so steps β η make the iterates of DSGDA-GT with the same steps; mini-batches do not."""
    steps = {"eta": 0.3, "beta_x": 0.1, "beta_y": 0.4, "beta_z": 0.3}
    one = lab.engine("storm_pl", lab.config("storm_pl", **steps), rounds=30)
    other = lab.engine("dsgda_gt", lab.config("dsgda_gt", eta_x=0.03, eta_y=0.12, eta_z=0.09), rounds=30)
    for name in ("x", "y", "z", "direction"):
        np.testing.assert_allclose(one.rows(name), other.rows(name), rtol=0, atol=1e-11)


def test_errors_of_the_estimates_decay() -> None:
    """Errors of all estimates shrink by 1 − α η² in a round, and that is all that happens to them."""
    made = algorithms()["storm_pl"]
    assert made.claim is not None
    config = made.config(**{**made.claim.steps, "alpha": 3.0})
    problem = build_problem(SIGMA, 1.0)
    network = build_network(TOPOLOGIES["ring"]().graph(problem.nodes, 0))
    engine = LocalEngine(made, config, problem, network, [range(problem.nodes)])
    block, draw = engine.local_blocks[0], np.random.default_rng(3).standard_normal
    start = block.state.estimate
    off = {part: draw(getattr(start, part).shape) for part in ("x", "y", "z")}
    block.state = replace(
        block.state, estimate=replace(start, **{part: getattr(start, part) + off[part] for part in off})
    )
    engine.advance(1)
    after = block.state
    exact = storm_pl.directions(block.shard, config.lam, after.x, after.y, after.z)
    for part, error in off.items():
        found = getattr(after.estimate, part) - getattr(exact, part)
        np.testing.assert_allclose(found, (1 - 3.0 * config.eta**2) * error, rtol=0, atol=1e-12)


def test_other_samples_at_the_old_point_break_storm_pl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: with a fresh batch at one of its two points V is above that of DSGDA-GT, not below."""
    made = algorithms()["storm_pl"]
    assert made.claim is not None
    problem, setting = build_problem(SIGMA, 1.0), replace(scale_steps(made.claim, 1.0), rounds=200)
    plain = measure_spread(algorithms()["dsgda_gt"], setting, problem).variance
    same = measure_spread(made, setting, problem).variance
    original = storm_pl.directions
    full = {"calls": 0}

    def other_samples(shard: Any, lam: float, x: Array, y: Array, z: Array) -> Any:
        """Evaluate every second call, that at the old point, on all samples: another batch than the first call's."""
        full["calls"] += 1
        return original(problem.shard(range(problem.nodes)) if full["calls"] % 2 else shard, lam, x, y, z)

    monkeypatch.setattr(storm_pl, "directions", other_samples)
    other = measure_spread(made, setting, problem).variance
    assert same < 0.6 * plain < plain < 0.5 * other


@pytest.mark.parametrize("prox", [1e6, 1e9])
def test_sun_dsbo_with_a_large_gamma_is_dsgda_gt(lab: Any, prox: float) -> None:
    """γ → ∞: the envelope is the minimum of g, θ is z and c is λ; differences are O(1/γ)."""
    steps = {"eta_x": 0.03, "eta_y": 0.12}
    one = lab.engine("sun_dsbo", lab.config("sun_dsbo", c=10.0, prox=prox, **steps, eta_theta=0.1), rounds=30)
    other = lab.engine("dsgda_gt", lab.config("dsgda_gt", lam=10.0, **steps, eta_z=0.1), rounds=30)
    for name in ("x", "y", "direction"):
        np.testing.assert_allclose(one.rows(name), other.rows(name), rtol=0, atol=20 / prox)


def test_the_closed_form_of_the_envelope_has_both_limits(lab: Any) -> None:
    """Its bias falls like 1/c at any γ; for γ → ∞ it is the penalty solution of λ = c."""
    problem = lab.quadratic()
    solution = problem.solution()

    def bias(c: float, gamma: float) -> float:
        return float(np.linalg.norm(problem.find_zero(lambda x: problem.moreau_hypergradient(x, c, gamma)) - solution))

    for gamma in (0.5, 2.0):
        assert bias(1000.0, gamma) / bias(100.0, gamma) == pytest.approx(0.1, rel=0.1)
    limit = problem.find_zero(lambda x: problem.moreau_hypergradient(x, 10.0, 1e9))
    np.testing.assert_allclose(limit, problem.penalty_solution(10.0), rtol=0, atol=1e-6)
    assert bias(10.0, 0.5) > 1.2 * bias(10.0, 1e9)


class Wavy(Shard):
    """g = ½ (y − x)² + 0.4 cos(3 y), not convex in y: ∇²_yy g is between −2.6 and 4.6; f = ½ (y − 2)² + ½ x²."""

    def f(self, x: Array, y: Array) -> Array:
        return (0.5 * (y - 2) ** 2 + 0.5 * x**2).sum(1)

    def g(self, x: Array, y: Array) -> Array:
        return (0.5 * (y - x) ** 2 + 0.4 * np.cos(3 * y)).sum(1)

    def f_x(self, x: Array, y: Array) -> Array:
        return x

    def f_y(self, x: Array, y: Array) -> Array:
        return y - 2

    def g_x(self, x: Array, y: Array) -> Array:
        return x - y

    def g_y(self, x: Array, y: Array) -> Array:
        return y - x - 1.2 * np.sin(3 * y)

    def g_yy(self, x: Array, y: Array, v: Array) -> Array:
        return (1 - 3.6 * np.cos(3 * y)) * v

    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        return -v


class WavyProblem:
    """One node with a nonconvex lower level."""

    nodes = dim_x = dim_y = 1

    def __init__(self) -> None:
        self.evaluate = self.task_metrics = self.penalty_solution = self.describe = None      # not needed
        self.sample_sizes = self.tune_losses = self.tune_accuracies = None

    def shard(self, ids: Any) -> Wavy:
        return Wavy(ids=np.asarray(ids), seed=0, x0=np.full((1, 1), 0.3), y0=np.full((1, 1), 0.2))


def test_sun_dsbo_ends_at_a_stationary_point_of_a_nonconvex_lower_level() -> None:
    """It starts where g is concave in y. It ends where all three directions are 0, g is convex and ∇_y g is O(1/c)."""
    config = algorithms()["sun_dsbo"].config(c=50.0, prox=0.3, eta_x=0.01, eta_y=0.15, eta_theta=0.15)
    engine = LocalEngine(algorithms()["sun_dsbo"], config, WavyProblem(), single_node(), [[0]])
    block, shard = engine.local_blocks[0], WavyProblem().shard([0])
    assert float(1 - 3.6 * np.cos(3 * shard.y0[0, 0])) < 0
    for round_ in range(1, 4001):
        engine.advance(round_)
    end = block.state
    for part in ("x", "y", "theta"):
        assert abs(float(getattr(end.local, part)[0, 0])) < 1e-8
    assert abs(float(shard.g_y(end.x, end.y)[0, 0])) < 5 / config.c
    assert float(1 - 3.6 * np.cos(3 * end.y[0, 0])) > 0


def test_sun_dsbo_with_the_wrong_sign_of_the_envelope_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: y pulled towards θ instead of away from it ends elsewhere."""
    original = sun_dsbo.directions

    def wrong(shard: Any, cfg: Any, x: Array, y: Array, theta: Array) -> Any:
        d = original(shard, cfg, x, y, theta)
        return replace(d, y=d.y + 2 * (y - theta) / cfg.prox)

    monkeypatch.setattr(sun_dsbo, "directions", wrong)
    assert any("end is" in failure for failure in verify(algorithms()["sun_dsbo"]).failures)


def test_f2sa_with_a_constant_penalty_is_f2ba(lab: Any) -> None:
    """Where λ does not grow, both have the same iterates."""
    steps = {"inner_steps": 5, "lam_start": 10.0, "lam_rounds": 1e15, "eta_z": 0.7, "eta_y": 0.7, "eta_x": 0.3}
    one = lab.engine("f2sa", lab.config("f2sa", **steps), rounds=20)
    other = lab.engine("f2ba", lab.config("f2ba", inner_steps=5, lam=10.0, eta_in=0.7, eta_out=0.3), rounds=20)
    for name in ("x", "y", "z", "direction"):
        np.testing.assert_allclose(one.rows(name), other.rows(name), rtol=0, atol=1e-10)


@pytest.mark.parametrize("power", [1 / 7, 1 / 3, 1 / 2])
def test_f2sa_follows_the_solution_of_its_growing_penalty(lab: Any, power: float) -> None:
    """x is near the closed-form solution of the present λ, and that solution nears ψ's minimiser like 1/λ."""
    problem = lab.quadratic()
    config = lab.config("f2sa", lam_start=10.0, lam_rounds=5.0, lam_power=power, eta_x=0.5)
    engine = lab.engine("f2sa", config, problem, rounds=400)
    lam = 10.0 * (1 + 400 / 5.0) ** power
    target, solution = problem.penalty_solution(lam), problem.solution()
    bias = np.linalg.norm(target - solution)
    assert np.linalg.norm(engine.rows("x")[0] - target) < 0.2 * bias
    assert np.linalg.norm(problem.penalty_solution(2 * lam) - solution) == pytest.approx(bias / 2, rel=0.1)


@pytest.mark.parametrize(
    "wrong", [lambda cfg, t: cfg.lam_start, lambda cfg, t: cfg.lam_start * (1 + int(t[0, 0]) / cfg.lam_rounds)],
    ids=["constant", "too fast"],
)
def test_a_penalty_that_grows_otherwise_fails(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    """The negative control: the distance falls at another rate than the claimed one."""
    monkeypatch.setattr(f2sa, "penalty", wrong)
    failures = verify(algorithms()["f2sa"]).failures
    assert any("end is" in failure and "falls like rounds^" in failure for failure in failures), failures
