"""Gossip-DSBO in vector form: what the gossiped averages are averages of."""

from typing import Any

import numpy as np

from dbo.algorithms.parts.neumann import truncated_inverse


def test_averages_follow_the_mean_gradients(lab: Any) -> None:
    """mean(A) ← (1 − θ) mean(A) + θ mean(gradient): gossip spreads the averages and does not change their mean."""
    engine = lab.engine("gossip_dsbo", topology="erdos_renyi")
    theta = engine.local_blocks[0].config.theta
    for round_ in range(1, 8):
        before = engine.local_blocks[0].state
        engine.advance(round_)
        state, shard = engine.local_blocks[0].state, engine.local_blocks[0].shard
        for part, gradient in (("a_x", shard.f_x), ("a_y", shard.f_y)):
            expected = (1 - theta) * getattr(before, part).mean(0) + theta * gradient(state.x, state.y).mean(0)
            np.testing.assert_allclose(getattr(state, part).mean(0), expected, rtol=0, atol=1e-12)


def test_direction_uses_own_matrices_and_shared_averages(lab: Any) -> None:
    """u_i = A_x − J_i P_i A_y, with the node's own Jacobian and Neumann inverse at its own point."""
    engine = lab.engine("gossip_dsbo", rounds=4)
    state, shard, cfg = engine.local_blocks[0].state, engine.local_blocks[0].shard, engine.local_blocks[0].config
    p = truncated_inverse(lambda j: shard, state.x, state.y, state.a_y, cfg.neumann_terms, cfg.lipschitz)
    np.testing.assert_allclose(state.u, state.a_x - shard.g_xy(state.x, state.y, p), rtol=0, atol=1e-13)
    assert np.abs(state.a_y - shard.f_y(state.x, state.y)).max() > 1e-2


def test_averages_are_nearer_to_agreement_than_gradients(lab: Any) -> None:
    """The smaller θ, the closer the nodes' averages of ∇_y f are to one another: that is what they are gossiped for."""
    spread = []
    for theta in (1.0, 0.3, 0.05):
        state = lab.engine("gossip_dsbo", lab.config("gossip_dsbo", theta=theta), rounds=200).local_blocks[0].state
        spread.append(np.linalg.norm(state.a_y - state.a_y.mean(0)))
    assert spread[0] > 1.5 * spread[1] > 3 * spread[2]
