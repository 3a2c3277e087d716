"""MDBO, VRDBO and the Neumann series that they share with Gossip-DSBO."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.methods import mdbo, vrdbo
from dbo.algorithms.parts.neumann import hypergradient, sample_lengths, sampled_inverse, truncated_inverse
from dbo.algorithms.rng import Key, round_key

Array = Any


def powers(hessians: Array, b: Array, terms: int, lipschitz: float) -> list[Array]:
    """(I − H_i/L)^j b_i for j = 0 … terms − 1, with matrices."""
    factor = np.eye(b.shape[1]) - hessians / lipschitz
    found = [b]
    for _ in range(terms - 1):
        found.append((factor @ found[-1][:, :, None])[:, :, 0])
    return found


def always(shard: Any) -> Callable[[int], Any]:
    """Every step sees all samples."""
    return lambda step: shard


@pytest.fixture
def point(lab: Any) -> tuple[Any, Any, Array, Array, Array]:
    problem = lab.quadratic()
    rng = np.random.default_rng(2)
    x, y, b = (rng.standard_normal((6, dim)) for dim in (3, 5, 5))
    return problem, problem.shard(range(6)), x, y, b


@pytest.mark.parametrize("terms", [1, 2, 7])
def test_truncated_inverse_is_the_matrix_polynomial(point: Any, terms: int) -> None:
    """p = (1/L) Σ_{j<J} (I − H_i/L)^j b_i, each node with its own Hessian."""
    problem, shard, x, y, b = point
    expected = sum(powers(problem.hessians, b, terms, 1.3)) / 1.3
    np.testing.assert_allclose(truncated_inverse(always(shard), x, y, b, terms, 1.3), expected, rtol=1e-12)


def test_truncated_inverse_tends_to_the_inverse(point: Any) -> None:
    """With L above the largest eigenvalue the series converges to H_i⁻¹ b_i."""
    problem, shard, x, y, b = point
    expected = np.linalg.solve(problem.hessians, b[:, :, None])[:, :, 0]
    np.testing.assert_allclose(truncated_inverse(always(shard), x, y, b, 300, 1.2), expected, rtol=1e-10)


def test_sampled_inverse_is_one_term_per_row(point: Any) -> None:
    """Row i gets (J/L) (I − H_i/L)^{J_i} b_i for its own J_i, 0 included."""
    problem, shard, x, y, b = point
    lengths = np.array([0, 4, 1, 3, 0, 2])
    terms = powers(problem.hessians, b, 5, 1.3)
    expected = np.stack([terms[length][row] for row, length in enumerate(lengths)]) * 5 / 1.3
    np.testing.assert_allclose(sampled_inverse(always(shard), x, y, b, lengths, 5, 1.3), expected, rtol=1e-12)


def test_sampled_inverse_is_right_on_average(point: Any) -> None:
    """The mean over J_i = 0 … J − 1 is the truncated series: sampling from {0 … J} with factor J would not be."""
    _, shard, x, y, b = point
    mean = sum(sampled_inverse(always(shard), x, y, b, np.full(6, length), 5, 1.3) for length in range(5)) / 5
    np.testing.assert_allclose(mean, truncated_inverse(always(shard), x, y, b, 5, 1.3), rtol=1e-12)


def test_lengths_depend_on_node_and_round_only() -> None:
    """J_i lies in {0 … J − 1}, takes every value, differs between nodes and rounds, and not with packing."""
    sampled = np.array([sample_lengths(Key(7, np.arange(6), round_), 5) for round_ in range(50)])
    assert set(sampled.ravel()) == set(range(5))
    assert len({tuple(row) for row in sampled}) > 40
    alone = [sample_lengths(Key(7, np.array([3]), round_), 5)[0] for round_ in range(50)]
    np.testing.assert_array_equal(sampled[:, 3], alone)


@pytest.mark.parametrize("name", ["mdbo", "vrdbo"])
@pytest.mark.parametrize("neumann", ["deterministic", "sampled"])
def test_tracker_means_are_the_estimates_means(lab: Any, name: str, neumann: str) -> None:
    """mean(ZF) = mean(U) and mean(ZG) = mean(V) at every round's end."""
    engine = lab.engine(name, lab.config(name, neumann=neumann), topology="erdos_renyi")
    for round_ in range(1, 8):
        engine.advance(round_)
        state = engine.local_blocks[0].state
        np.testing.assert_allclose(state.zf.mean(0), state.u.mean(0), rtol=0, atol=1e-12)
        np.testing.assert_allclose(state.zg.mean(0), state.v.mean(0), rtol=0, atol=1e-12)


def local_hypergradient(engine: Any) -> Array:
    """From the present (x, y), deterministic series."""
    state, cfg, shard = engine.local_blocks[0].state, engine.local_blocks[0].config, engine.local_blocks[0].shard
    key = Key(0, np.arange(6), 0)
    return hypergradient(
        always(shard), state.x, state.y, key, neumann="deterministic", terms=cfg.neumann_terms, lipschitz=cfg.lipschitz
    )


def test_full_batch_vrdbo_estimates_are_exact(lab: Any) -> None:
    """With full batches and the whole series nothing is left to correct: U is the hypergradient, V is ∇_y g_i."""
    engine = lab.engine("vrdbo")
    for round_ in range(1, 8):
        engine.advance(round_)
        state, shard = engine.local_blocks[0].state, engine.local_blocks[0].shard
        np.testing.assert_allclose(state.u, local_hypergradient(engine), rtol=0, atol=1e-12)
        np.testing.assert_allclose(state.v, shard.g_y(state.x, state.y), rtol=0, atol=1e-12)


def test_mdbo_estimates_lag_behind(lab: Any) -> None:
    """Momentum: U moves by the share α η from its last value to the new hypergradient."""
    config = lab.config("mdbo", eta=0.3, alpha_x=0.5)
    engine = lab.engine("mdbo", config, rounds=3)
    before = engine.local_blocks[0].state.u
    engine.advance(4)
    new = local_hypergradient(engine)
    np.testing.assert_allclose(engine.local_blocks[0].state.u, 0.85 * before + 0.15 * new, rtol=0, atol=1e-12)
    assert np.abs(new - before).max() > 1e-3


def test_vrdbo_uses_the_same_samples_at_both_points(lab: Any) -> None:
    """With one J_i at the new and at the old point, U − U_before is the exact difference where the correction is weak.

    With two samples it would change by the difference of two random terms, even between points that are the same.
    """
    config = lab.config("vrdbo", neumann="sampled", beta_x=1e-9, beta_y=1e-9, alpha_x=1e-9)
    engine = lab.engine("vrdbo", config)
    before = engine.local_blocks[0].state.u
    engine.advance(1)
    np.testing.assert_allclose(engine.local_blocks[0].state.u, before, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("name", "twice"), [("mdbo", 1), ("vrdbo", 2)])
@pytest.mark.parametrize("blocks", [[[0, 1, 2, 3, 4, 5]], [[i] for i in range(6)], [[3], [0, 1, 2], [4, 5]]], ids=len)
def test_oracle_counts_are_the_sampled_lengths(lab: Any, name: str, twice: int, blocks: list[list[int]]) -> None:
    """J_i (VRDBO: at two points) per node and round, however nodes are packed; the maximum over nodes is reported."""
    config = lab.config(name, neumann="sampled")
    engine = lab.engine(name, config, blocks=blocks, rounds=20)
    shard = lab.quadratic().shard(range(6))
    sampled = np.zeros(6, dtype=np.int64)
    for round_ in range(21):
        times = twice if round_ else 1                     # the start has one point
        sampled += times * sample_lengths(round_key(shard, np.full((6, 1), round_)), config.neumann_terms)
    assert len(set(sampled)) > 1
    assert engine.counters()["hvp_calls"] == sampled.max()
    assert engine.counters()["jvp_calls"] == 20 * twice + 1
    counted = {i: int(n) for block in engine.local_blocks for i, n in zip(block.ids, block.shard.calls[1], strict=True)}
    assert [counted[i] for i in range(6)] == sampled.tolist()


def test_table_1_convention(lab: Any) -> None:
    """Table 1 counts d_y + 2 d_x per iteration of MDBO: y's tracker is left out."""
    counted = lab.engine("mdbo", rounds=4).ledger().paper_megabytes(lab.algorithm("mdbo").paper_counts)
    assert counted * 2**20 / 4 == pytest.approx(4 * (5 + 2 * 3))


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (mdbo.Config, {"alpha_x": 5.0, "eta": 0.3}, "alpha_x, eta: alpha_x * eta must be below 1, got 5.0 * 0.3"),
        (mdbo.Config, {"alpha_y": 10.0, "eta": 0.1}, "alpha_y, eta: alpha_y * eta must be below 1, got 10.0 * 0.1"),
        (vrdbo.Config, {"alpha_x": 5.0, "eta": 0.5}, "alpha_x, eta: alpha_x * eta² must be below 1, got 5.0 * 0.5²"),
        (vrdbo.Config, {"alpha_y": 9.5, "eta": 0.4}, "alpha_y, eta: alpha_y * eta² must be below 1, got 9.5 * 0.4²"),
    ],
)
def test_weights_outside_the_theory_are_refused(config: Any, values: dict[str, float], message: str) -> None:
    """α η < 1 for MDBO and α η² < 1 for VRDBO: the message names fields, values and what is allowed."""
    with pytest.raises(ValueError, match="must be below 1") as error:
        config(**values)
    assert str(error.value) == message


def test_vrdbo_allows_what_mdbo_does_not() -> None:
    """VRDBO's own constraint is on η², not on η: its paper's α = 5, η = 0.33 is allowed."""
    vrdbo.Config(alpha_x=5.0, alpha_y=5.0, eta=0.33)
    with pytest.raises(ValueError, match="alpha_x"):
        mdbo.Config(alpha_x=5.0, alpha_y=1.0, eta=0.33)
