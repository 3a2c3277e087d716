"""SLDBO, D-SOBA and the directions that they share; DSGDA-GT, which is tracked in the same way."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dbo.algorithms.parts.ball import project
from dbo.algorithms.parts.soba import directions, first_order_directions


@given(arrays(np.float64, (3, 4), elements=st.floats(-1e3, 1e3)), st.floats(0.1, 100))
def test_projection_is_the_nearest_point_of_the_ball(v: Any, radius: float) -> None:
    """Rows inside the ball stay to the bit, rows outside land on its surface in their own direction."""
    found = project(v, radius)
    for row, out in zip(v, found, strict=True):
        norm = np.linalg.norm(row)
        if norm <= radius * (1 - 1e-12):
            np.testing.assert_array_equal(out, row)
        else:
            np.testing.assert_allclose(out, row * radius / norm, rtol=1e-12, atol=1e-300)      # subnormal entries round


def test_projection_keeps_v_in_the_ball(lab: Any) -> None:
    """SLDBO: no node's v leaves the ball, even where the solution lies outside of it."""
    engine = lab.engine("sldbo", lab.config("sldbo", radius=0.05))
    norms = []
    for round_ in range(1, 60):
        engine.advance(round_)
        norms.append(np.linalg.norm(engine.local_blocks[0].state.v, axis=1).max())
    assert max(norms) <= 0.05 * (1 + 1e-12)
    assert norms[-1] > 0.049


@pytest.mark.parametrize("name", ["sldbo", "dsgda_gt"])
@pytest.mark.parametrize("topology", ["ring", "two_hop", "erdos_renyi"])
def test_tracker_means_are_the_directions_means(lab: Any, name: str, topology: str) -> None:
    """The mean of each tracker is the mean of the local directions at every round's end, projection or not."""
    changes = {"radius": 0.05} if name == "sldbo" else {}
    engine = lab.engine(name, lab.config(name, **changes), topology=topology)
    for round_ in range(1, 8):
        engine.advance(round_)
        state = engine.local_blocks[0].state
        for part in ("x", "y", "v" if name == "sldbo" else "z"):
            tracked, local = getattr(state.track, part), getattr(state.local, part)
            np.testing.assert_allclose(tracked.mean(0), local.mean(0), rtol=0, atol=1e-12)
            if round_ == 7:
                assert np.abs(tracked - local).max() > 1e-6    # control: the trackers are not the directions themselves


def test_directions_vanish_at_the_solution(lab: Any) -> None:
    """At x*, y*(x*) and v = H̄⁻¹ mean ∇_y f_i the means of all three directions are 0, the local ones are not."""
    problem = lab.quadratic()
    x = problem.solution()
    y = problem.y_star(x)
    v = np.linalg.solve(problem.hessians.mean(0), y - problem.t.mean(0))
    d = directions(problem.shard(range(6)), *(np.tile(part, (6, 1)) for part in (x, y, v)))
    for part in (d.x, d.y, d.v):
        np.testing.assert_allclose(part.mean(0), 0, atol=1e-12)
        assert np.abs(part).max() > 1e-2


@pytest.mark.parametrize("task", ["quadratic", "coefficient_tuning"])
def test_differences_of_gradients_stand_for_the_products(lab: Any, task: str) -> None:
    """D-SOBA-FO's directions equal D-SOBA-SO's: exactly on the quadratic, to O(δ²) where g is not quadratic."""
    problem = lab.quadratic() if task == "quadratic" else lab.learning(task, "digits")
    shard = problem.shard(range(problem.nodes))
    rng = np.random.default_rng(3)
    x, y, v = (rng.standard_normal((problem.nodes, dim)) for dim in (problem.dim_x, problem.dim_y, problem.dim_y))
    exact, found = directions(shard, x, y, v), first_order_directions(shard, x, y, v, 1e-3)
    for part in ("x", "y", "v"):
        a, b = getattr(exact, part), getattr(found, part)
        assert np.abs(a - b).max() < (1e-10 if task == "quadratic" else 1e-5) * np.abs(a).max()


def test_d_soba_variants_make_the_same_iterates(lab: Any) -> None:
    """On the quadratic the two kinds of derivatives are the same numbers, so the trajectories agree."""
    second, first = (
        lab.engine("d_soba", lab.config("d_soba", derivatives=kind), rounds=30).rows("x")
        for kind in ("second_order", "first_order")
    )
    np.testing.assert_allclose(first, second, rtol=0, atol=1e-9)


def test_d_soba_mixes_after_the_step(lab: Any) -> None:
    """x ← W (x − α h), y ← W (y − β D_y), v ← W (v − γ D_v), h ← (1 − θ) h + θ D_x, all from the same point."""
    engine = lab.engine("d_soba", rounds=3)
    block, w = engine.local_blocks[0], lab.network().weights
    before, cfg = block.state, block.config
    d = directions(block.shard, before.x, before.y, before.v)
    engine.advance(4)
    after = block.state
    np.testing.assert_allclose(after.x, w @ (before.x - cfg.eta_x * before.h), rtol=0, atol=1e-13)
    np.testing.assert_allclose(after.y, w @ (before.y - cfg.eta_y * d.y), rtol=0, atol=1e-13)
    np.testing.assert_allclose(after.v, w @ (before.v - cfg.eta_v * d.v), rtol=0, atol=1e-13)
    np.testing.assert_allclose(after.h, (1 - cfg.theta) * before.h + cfg.theta * d.x, rtol=0, atol=1e-13)
