"""MA-DSBO and its tracked variant: what HIGP computes and sends, and what the moving average contains."""

from typing import Any

import numpy as np
import pytest

from dbo.algorithms.methods import madsbo
from dbo.algorithms.rng import counter, round_key
from dbo.platform.engine.shard_wrappers import CountingShard

Array = Any


def drive_higp(
    lab: Any, steps: int, topology: str = "erdos_renyi", **changes: Any
) -> tuple[Array, list[dict[str, Array]], Any]:
    """Run HIGP at a random common (x, y); return its result, all that it sent, and the problem."""
    problem = lab.quadratic()
    shard, weights = CountingShard(problem.shard(range(6))), lab.network(topology).weights
    rng = np.random.default_rng(1)
    x, y = (np.tile(rng.standard_normal(dim), (6, 1)) for dim in (3, 5))
    cfg = lab.config("madsbo", higp_steps=steps, eta_z=0.1, **changes)
    coroutine, sent, sums = madsbo.higp(shard, cfg, x, y, round_key(shard, counter(shard))), [], None
    try:
        while True:
            packet = {name: message.values for name, message in coroutine.send(sums).channels.items()}
            sent.append({"b": shard.f_y(x, y), **packet})
            sums = tuple(weights @ rows for rows in packet.values())
    except StopIteration as end:
        return end.value, sent, problem


@pytest.mark.parametrize("gam", [1.0, 0.4])
def test_higp_tracker_mean_is_the_residuals_mean(lab: Any, gam: float) -> None:
    """mean(q) = mean(S) = mean(∇²_yy g_i z_i − ∇_y f_i) in every packet of HIGP, with and without a mixing step."""
    _, sent, problem = drive_higp(lab, steps=12, gam=gam)
    assert len(sent) == 12
    for packet in sent:
        z, q = packet.get("z", 0 * packet["b"]), packet["q" if "z" in packet else "q0"]
        residuals = (problem.hessians @ z[:, :, None])[:, :, 0] - packet["b"]
        np.testing.assert_allclose(q.mean(0), residuals.mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("topology", ["ring", "two_hop", "erdos_renyi"])
def test_higp_solves_the_mean_system(lab: Any, topology: str) -> None:
    """z → (mean ∇²_yy g_i)⁻¹ mean ∇_y f_i on every node: the inverse of the mean, not the mean of inverses."""
    z, sent, problem = drive_higp(lab, steps=1500, topology=topology)
    expected = np.linalg.solve(problem.hessians.mean(0), sent[0]["b"].mean(0))
    local = np.linalg.solve(problem.hessians, sent[0]["b"][:, :, None])[:, :, 0].mean(0)
    np.testing.assert_allclose(z, np.tile(expected, (6, 1)), rtol=0, atol=1e-9)
    assert np.linalg.norm(local - expected) > 1e-2


def test_zero_is_not_sent(lab: Any) -> None:
    """HIGP's first packet contains the tracker only: z is 0 there on every node."""
    _, sent, _ = drive_higp(lab, steps=3)
    assert [sorted(packet) for packet in sent] == [["b", "q0"], ["b", "q", "z"], ["b", "q", "z"]]


@pytest.mark.parametrize(("name", "y_vectors"), [("madsbo", 45), ("madsbo_gt", 45 + 15)])
def test_table_1_convention(lab: Any, name: str, y_vectors: int) -> None:
    """At T = N = 15 a round counts 45 d_y + 2 d_x values in Table 1, z = 0 of HIGP's step 0 among them."""
    config = lab.config(name, inner_steps=15, higp_steps=15)
    counted = lab.engine(name, config, rounds=4).ledger().paper_megabytes(lab.algorithm(name).paper_counts)
    assert counted * 2**20 / 4 == pytest.approx(4 * (y_vectors * 5 + 2 * 3))


def test_moving_average(lab: Any) -> None:
    """r is the average of the local hypergradients with weights θ (1 − θ)^k, and x steps along last round's r."""
    engine = lab.engine("madsbo", lab.config("madsbo", theta=0.25, higp_steps=1, inner_steps=1), rounds=3)
    block = engine.local_blocks[0]
    before = block.state
    engine.advance(4)
    after, shard, cfg = block.state, block.shard, block.config
    z = cfg.eta_z * shard.f_y(before.x, after.y)     # HIGP's first step from z = 0
    u = shard.f_x(before.x, after.y) - shard.g_xy(before.x, after.y, z)
    np.testing.assert_allclose(after.r, 0.75 * before.r + 0.25 * u, rtol=0, atol=1e-13)
    np.testing.assert_allclose(after.x, lab.network().weights @ before.x - cfg.eta_x * before.r, rtol=0, atol=1e-13)


def test_tracked_y_follows_the_mean_gradient(lab: Any) -> None:
    """MA-DSBO-GT: mean(s) = mean(∇_y g_i) at every round's end, although x has moved in between."""
    engine = lab.engine("madsbo_gt")
    for round_ in range(1, 8):
        x = engine.rows("x")
        engine.advance(round_)
        state, shard = engine.local_blocks[0].state, engine.local_blocks[0].shard
        np.testing.assert_allclose(state.s.mean(0), shard.g_y(x, state.y).mean(0), rtol=0, atol=1e-12)


def test_tracking_in_y_reaches_the_lower_solution(lab: Any) -> None:
    """With x held still, y of MA-DSBO-GT is y*(x) on every node; plain gossip stops short of it."""
    problem = lab.quadratic()
    errors = {}
    for name in ("madsbo", "madsbo_gt"):
        config = lab.config(name, eta_x=1e-300, eta_y=0.1, inner_steps=10, higp_steps=1)
        y = lab.engine(name, config, problem, rounds=100).rows("y")
        errors[name] = np.abs(y - problem.y_star(np.zeros(3))).max()
    assert errors["madsbo_gt"] < 1e-9 < 1e-2 < errors["madsbo"]
