"""C²DFB and C²DFB(nc): the twelve invariants, the λ-bias law, and controls that show the checks can fail."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.compression.compressors import Identity, TopK
from dbo.algorithms.gossip import Message
from dbo.algorithms.kernels import fused
from dbo.algorithms.methods import c2dfb, c2dfb_nc
from dbo.algorithms.registry import Algorithm, algorithms
from dbo.algorithms.rng import Key
from dbo.platform.engine.block import Block
from dbo.platform.engine.local import LocalEngine
from dbo.platform.engine.shard_wrappers import pool_nodes
from dbo.platform.network import packet as wire
from dbo.platform.network.topology import TOPOLOGIES, Network, build_network
from dbo.platform.verify.certificates import verify
from dbo.tasks.api import Setup
from dbo.tasks.partitions import Iid
from dbo.tasks.problems.quadratic import Quadratic, QuadraticProblem

STEPS = {"inner_steps": 5, "lam": 10.0, "eta_in": 0.5, "eta_out": 0.05, "gamma_in": 0.3, "gamma_out": 0.5}
LOOPS = ("loop_y", "loop_z")


def quadratic(nodes: int = 6, **parameters: Any) -> QuadraticProblem:
    task = Quadratic(**{"dim_x": 4, "dim_y": 12, **parameters})
    return task.build(Setup(nodes=nodes, seed=1, dtype="float64", partition=Iid()))


def graph(name: str, nodes: int) -> Network:
    return build_network(TOPOLOGIES[name]().graph(nodes, 0))


def engine(
    algorithm: Algorithm, config: Any, problem: Any, net: Network, rounds: int = 0, blocks: Any = None
) -> LocalEngine:
    made = LocalEngine(algorithm, config, problem, net, blocks or [range(net.nodes)])
    for round_ in range(1, rounds + 1):
        made.advance(round_)
    return made


def c2dfb_engine(rounds: int = 0, nodes: int = 6, topology: str = "ring", **changes: Any) -> LocalEngine:
    config = c2dfb.Config(**{**STEPS, "compressor": TopK(ratio=0.25), **changes})
    return engine(algorithms()["c2dfb"], config, quadratic(nodes), graph(topology, nodes), rounds)


Step = tuple[str, c2dfb.Inner, c2dfb.Inner]


@pytest.fixture
def inner_steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Every inner step that is taken: (loop, before, after the local part)."""
    steps: list[Step] = []
    original = c2dfb.inner_step

    def spy(v: c2dfb.Inner, gradient: Any, step: Any, key: Key, channel: str) -> Any:
        new, q_d, q_s = original(v, gradient, step, key, channel)
        steps.append((channel, v, new))
        return new, q_d, q_s

    monkeypatch.setattr(c2dfb, "inner_step", spy)
    return steps


@pytest.mark.parametrize("topology", ["ring", "two_hop", "erdos_renyi"])
def test_mean_moves_by_the_mean_tracker(inner_steps: list[Step], topology: str) -> None:
    """Invariant 1: mean(d) moves by exactly −η_in · mean(s) in every inner step, whatever Q does."""
    c2dfb_engine(rounds=4, topology=topology)
    assert len(inner_steps) == 4 * 5 * 2
    for _, before, after in inner_steps:
        np.testing.assert_allclose(after.d.mean(0), before.d.mean(0) - 0.5 * before.s.mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("topology", ["ring", "two_hop", "erdos_renyi"])
@pytest.mark.parametrize("name", ["c2dfb", "c2dfb_nc"])
def test_tracker_mean_equals_gradient_mean(name: str, topology: str) -> None:
    """Invariant 2: mean(s) = mean(∇r_i) after every round on both loops, and mean(s_x) = mean(u) above."""
    module = {"c2dfb": c2dfb, "c2dfb_nc": c2dfb_nc}[name]
    config = module.Config(**STEPS, compressor=TopK(ratio=0.25))
    made = engine(algorithms()[name], config, quadratic(), graph(topology, 6))
    for round_ in range(1, 8):
        made.advance(round_)
        state, shard = made.local_blocks[0].state, made.local_blocks[0].shard.shard
        x, y, z = state.x, state.y, state.z
        trackers = {
            "y": (state.loop_y.s, shard.f_y(x, y) / 10.0 + shard.g_y(x, y)),
            "z": (state.loop_z.s, shard.g_y(x, z)),
        }
        for tracker, gradient in trackers.values():
            tracked = tracker if isinstance(tracker, np.ndarray) else tracker.v
            np.testing.assert_allclose(tracked.mean(0), gradient.mean(0), rtol=0, atol=1e-12)
        np.testing.assert_allclose(state.s.mean(0), state.u.mean(0), rtol=0, atol=1e-12)
        u = shard.f_x(x, y) + 10.0 * (shard.g_x(x, y) - shard.g_x(x, z))
        np.testing.assert_allclose(state.u, u, rtol=0, atol=1e-12)


def test_tracker_mean_holds_at_every_inner_step(inner_steps: list[Step]) -> None:
    """Invariant 2, inside a round: mean(s) = mean of the cached local gradients after each tracker update."""
    c2dfb_engine(rounds=4)
    for _, _, after in inner_steps:
        np.testing.assert_allclose(after.s.mean(0), after.grad.mean(0), rtol=0, atol=1e-12)


def test_without_the_refresh_the_tracker_drifts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control for 2: the literal reading (∇r^0 re-evaluated at the new x, tracker carried over) loses the mean."""
    monkeypatch.setattr(c2dfb, "refresh", lambda v, gradient: replace(v, grad=gradient(v.d)))
    state = c2dfb_engine(rounds=20).local_blocks[0].state
    drift = np.abs(state.loop_z.s.mean(0) - state.loop_z.grad.mean(0)).max()
    assert drift > 1e-3


def references(drop: int | None = None) -> tuple[list[Block], dict[str, dict[int, Any]], Network]:
    """Run three rounds of one-node blocks, and rebuild every sender's references from the packets alone.

    `drop` names a node whose compressed residuals are lost on the way (they arrive as zeros).
    """
    net = graph("ring", 6)
    config = c2dfb.Config(**STEPS, compressor=TopK(ratio=0.25))
    blocks = [Block(algorithms()["c2dfb"], config, quadratic(), net, [i]) for i in range(6)]
    rebuilt: dict[str, dict[int, Any]] = {}
    for round_ in range(1, 4):
        packets_out = [block.begin(round_) for block in blocks]
        while packets_out[0] is not None:
            posted: dict[int, bytes] = {}
            for packets in packets_out:
                posted |= packets or {}
            for sender, data in posted.items():
                for channel, row in wire.decode(data).channels.items():
                    known = rebuilt.setdefault(channel, {})
                    known[sender] = known.get(sender, 0.0) + row
            if drop is not None:
                posted[drop] = zero_residuals(posted[drop])
            packets_out = [block.step(posted) for block in blocks]
    return blocks, rebuilt, net


def zero_residuals(data: bytes) -> bytes:
    """Return the same packet with zeros in all compressed channels."""
    packet = wire.decode(data)
    header = packet.header
    rows = {
        name: Message(row[None] * (0.0 if "_" in name else 1.0), form="sparse" if "_" in name else "dense")
        for name, row in packet.channels.items()
    }
    return wire.encode(header, rows, 0)


def test_references_rebuilt_from_messages_are_the_senders_own() -> None:
    """Invariant 3: d̂_j, ŝ_j added up from encoded messages equal the sender's bit for bit; the sums agree."""
    blocks, rebuilt, net = references()
    for loop, channel in zip(LOOPS, "yz", strict=True):
        for part in "ds":
            sent = np.stack([rebuilt[f"{channel}_{part}"][i] for i in range(6)])
            own = np.concatenate([getattr(getattr(b.state, loop), f"{part}_hat") for b in blocks])
            gaps = np.concatenate([getattr(getattr(b.state, loop), f"gap_{part}") for b in blocks])
            np.testing.assert_array_equal(sent, own)
            np.testing.assert_allclose(gaps, net.weights @ own - own, rtol=0, atol=1e-12)


def test_a_lost_message_breaks_the_references() -> None:
    """Invariant 12, the control of 3: with one node's residuals lost, the sum is no longer what it should be."""
    blocks, _, net = references(drop=2)
    own = np.concatenate([b.state.loop_y.d_hat for b in blocks])
    gaps = np.concatenate([b.state.loop_y.gap_d for b in blocks])
    assert np.abs(gaps - (net.weights @ own - own)).max() > 1e-3


def test_sums_of_the_loops_use_the_memory_of_what_they_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sum of wide rows is written over one of its terms: the loops need no new memory."""
    monkeypatch.setattr(fused, "MIN_ENTRIES", 5)      # y and z are wide, x is not
    made = c2dfb_engine(rounds=1, tracker="cached")
    original, fresh = fused.evaluate, []

    def spy(sums: Any, visit: Any = None) -> Any:
        for out, terms in sums:
            if not any(out is array for _, array in terms):
                fresh.append(out)
        return original(sums, visit)

    monkeypatch.setattr(fused, "evaluate", spy)
    made.advance(2)
    assert len(fresh) == 0
    monkeypatch.setattr(c2dfb, "inner_step", lambda v, *others, step=c2dfb.inner_step: (v, step(v, *others))[1])
    made.advance(3)
    assert len(fresh) > 0, "a name that refers to the old loop costs memory"


def test_reference_comes_closer_by_the_contraction_factor(inner_steps: list[Step]) -> None:
    """Invariant 4: ‖d − d̂‖ after the update ≤ √(1 − k/d) ‖d_new − d̂_old‖ for top-k, on every node; so for s."""
    c2dfb_engine(rounds=4)
    factor = np.sqrt(1 - 3 / 12)
    for _, before, after in inner_steps:
        for part in "ds":
            new, old_hat, new_hat = getattr(after, part), getattr(before, f"{part}_hat"), getattr(after, f"{part}_hat")
            left, was = np.linalg.norm(new - new_hat, axis=1), np.linalg.norm(new - old_hat, axis=1)
            assert (left <= factor * was + 1e-15).all()


def test_without_compression_it_is_gradient_tracking(inner_steps: list[Step]) -> None:
    """Invariant 5: Q = identity ⇒ d̂ = d, ŝ = s, and the loop is d ← d + γ(W−I)d − ηs, s ← s + γ(W−I)s + Δ∇r."""
    made = c2dfb_engine(rounds=3, compressor=Identity())
    weights = graph("ring", 6).weights
    for loop in LOOPS:
        inner = getattr(made.local_blocks[0].state, loop)
        np.testing.assert_allclose(inner.d_hat, inner.d, atol=1e-13)
        np.testing.assert_allclose(inner.s_hat, inner.s, atol=1e-13)
    for number, (_, before, after) in enumerate(inner_steps):
        if number % 10 < 2:
            continue     # at a round's first step the references do not hold the refreshed tracker yet
        d = before.d + 0.3 * (weights @ before.d - before.d) - 0.5 * before.s
        s = before.s + 0.3 * (weights @ before.s - before.s) + after.grad - before.grad
        np.testing.assert_allclose(after.d, d, atol=1e-12)
        np.testing.assert_allclose(after.s, s, atol=1e-12)


def centralised(problem: Any, rounds: int) -> tuple[Any, Any, Any]:
    """F2BA by hand: gradient descent on h/λ and g, then on x along last round's gradient, as Algorithm 1 orders it."""
    shard = problem.shard([0])
    x, y, z = shard.x0, shard.y0, shard.y0
    u = shard.f_x(x, y)
    for _ in range(rounds):
        x = x - 0.05 * u
        for _ in range(5):
            y = y - 0.5 * (shard.f_y(x, y) / 10.0 + shard.g_y(x, y))
            z = z - 0.5 * shard.g_y(x, z)
        u = shard.f_x(x, y) + 10.0 * (shard.g_x(x, y) - shard.g_x(x, z))
    return x, y, z


@pytest.mark.parametrize("name", ["c2dfb", "c2dfb_nc"])
def test_a_single_node_does_gradient_descent(name: str) -> None:
    """Invariant 5, m = 1: plain gradient descent, the centralised method, whatever Q does."""
    module = {"c2dfb": c2dfb, "c2dfb_nc": c2dfb_nc}[name]
    problem = quadratic(1)
    config = module.Config(**STEPS, compressor=TopK(ratio=0.25))
    state = engine(algorithms()[name], config, problem, graph("ring", 1), rounds=6).local_blocks[0].state
    for got, expected in zip((state.x, state.y, state.z), centralised(problem, 6), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-12)


def test_complete_graph_follows_the_centralised_path() -> None:
    """Invariant 6: W = 11ᵀ/m, γ = 1, Q = identity, common start ⇒ x̄ follows the centralised method on the mean data.

    With heterogeneous quadratics the mean of the local gradients is the gradient of the mean at a common point only, so
    nodes that stay identical (homogeneous data) are compared, and they must stay identical.
    """
    problem = quadratic(6, heterogeneity=0.0)
    config = c2dfb.Config(**{**STEPS, "gamma_in": 1.0, "gamma_out": 1.0}, compressor=Identity())
    state = engine(algorithms()["c2dfb"], config, problem, graph("complete", 6), rounds=6).local_blocks[0].state
    x, y, z = centralised(pool_nodes(problem), 6)
    for got, expected in ((state.x, x), (state.y, y), (state.z, z)):
        np.testing.assert_allclose(got, np.broadcast_to(expected, got.shape), atol=1e-12)


@pytest.mark.parametrize("name", ["c2dfb", "c2dfb_nc"])
def test_first_round_leaves_x_where_f_has_no_x(name: str) -> None:
    """Invariant 7: y⁰ = z⁰, so the λ term is 0; where ∇_x f = 0 the first round does not move x."""
    module = {"c2dfb": c2dfb, "c2dfb_nc": c2dfb_nc}[name]
    problem = quadratic()     # ρx = 0 at x⁰ = 0
    made = engine(algorithms()[name], module.Config(**STEPS), problem, graph("ring", 6), rounds=1)
    np.testing.assert_array_equal(made.rows("x"), 0.0)
    made.advance(2)
    assert np.abs(made.rows("x")).max() > 0


def at_rest(problem: QuadraticProblem, net: Network, lam: float) -> LocalEngine:
    """C²DFB with every node at the λ-solution, trackers at the (zero) mean gradients, references equal to them."""
    made = engine(algorithms()["c2dfb"], c2dfb.Config(**{**STEPS, "lam": lam}), problem, net)
    block = made.local_blocks[0]
    shard = block.shard.shard
    x, y, z = (np.tile(v, (net.nodes, 1)) for v in problem.penalty_minimisers(lam))
    zero_x, zero = 0 * x, 0 * y

    def loop(d: Any, grad: Any) -> c2dfb.Inner:
        return c2dfb.Inner(d=d, s=zero, grad=grad, d_hat=d, s_hat=zero, gap_d=zero, gap_s=zero)

    block.state = c2dfb.State(
        t=block.state.t, x=x, s=zero_x, u=shard.f_x(x, y) + lam * (shard.g_x(x, y) - shard.g_x(x, z)),
        loop_y=loop(y, shard.f_y(x, y) / lam + shard.g_y(x, y)), loop_z=loop(z, shard.g_y(x, z)),
        outer=c2dfb.start_outer(x[:, :0]),
    )
    return made


@pytest.mark.parametrize("topology", ["ring", "two_hop", "erdos_renyi"])
def test_the_penalty_solution_is_a_fixed_point(topology: str) -> None:
    """Invariant 8: consensus at the λ-solution with s_i = 0 is preserved, heterogeneous local gradients or not."""
    problem = quadratic()
    made = at_rest(problem, graph(topology, 6), 10.0)
    for round_ in range(1, 6):
        made.advance(round_)
    np.testing.assert_allclose(made.rows("x"), np.tile(problem.penalty_solution(10.0), (6, 1)), atol=1e-11)


def test_a_wrong_sign_in_the_hypergradient_is_not_a_fixed_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control for 8: with λ(∇_x g(x, z) − ∇_x g(x, y)) the network leaves the λ-solution."""
    problem = quadratic()
    made = at_rest(problem, graph("ring", 6), 10.0)
    monkeypatch.setattr(
        c2dfb, "upper_gradient", lambda s, lam, x, y, z: s.f_x(x, y) - lam * (s.g_x(x, y) - s.g_x(x, z))
    )
    for round_ in range(1, 6):
        made.advance(round_)
    assert np.abs(made.rows("x") - problem.penalty_solution(10.0)).max() > 1e-2


@pytest.mark.parametrize("name", ["c2dfb", "c2dfb_nc"])
def test_ledger_counts_what_the_algorithm_must_send(name: str) -> None:
    """Invariant 9: per round and node 2 d_x + 4 K k values in K + 1 packets; 3(K + 1) + 3 partial gradients."""
    module = {"c2dfb": c2dfb, "c2dfb_nc": c2dfb_nc}[name]
    config = module.Config(**STEPS, compressor=TopK(ratio=0.25))
    made = engine(algorithms()[name], config, quadratic(), graph("ring", 6))
    start = made.counters()["gradient_calls"]
    for round_ in range(1, 4):
        made.advance(round_)
    ledger = made.ledger()
    assert (ledger.packets == 3 * 6).all()
    assert (sum(ledger.values_by_channel().values()) == 3 * (2 * 4 + 4 * 5 * 3)).all()
    assert made.counters()["gradient_calls"] - start == 3 * (3 * 6 + 3)
    assert made.counters()["hvp_calls"] == made.counters()["jvp_calls"] == 0


@pytest.mark.parametrize(("lam", "inner_steps"), [(10.0, 10), (100.0, 10), (1000.0, 50)])
def test_it_reaches_the_penalty_solution(lam: float, inner_steps: int) -> None:
    """From the start C²DFB arrives at the λ-solution itself, so what is left is the λ bias alone.

    What the inner loops leave open is multiplied by λ in the upper gradient: a large λ needs a larger K to be stable.
    """
    problem = quadratic(mu=0.5, condition=3.0)
    config = c2dfb.Config(
        inner_steps=inner_steps, lam=lam, eta_in=0.5, eta_out=0.3, gamma_in=0.4, gamma_out=0.6,
        compressor=TopK(ratio=0.25),
    )
    made = engine(algorithms()["c2dfb"], config, problem, graph("ring", 6), rounds=400)
    target = problem.penalty_solution(lam)
    x = made.rows("x")
    assert x is not None
    assert np.linalg.norm(x.mean(0) - target) < 1e-6 * np.linalg.norm(target)
    assert np.abs(x - x.mean(0)).max() < 1e-6


def test_bias_falls_like_one_over_lambda() -> None:
    """Invariant 11: the distance between the λ-solution and ψ's minimiser is proportional to 1/λ."""
    problem = quadratic()
    bias = {lam: np.linalg.norm(problem.penalty_solution(lam) - problem.solution()) for lam in (1e2, 1e3, 1e4)}
    assert bias[1e2] / bias[1e3] == pytest.approx(10, rel=0.15)
    assert bias[1e3] / bias[1e4] == pytest.approx(10, rel=0.02)


def test_naive_compression_keeps_its_error() -> None:
    """The ablation's point: with the same steps, error feedback without reference points ends far from consensus."""
    problem, net = quadratic(mu=0.5, condition=3.0), graph("ring", 6)
    steps = {"inner_steps": 10, "lam": 10.0, "eta_in": 0.3, "eta_out": 0.2, "gamma_in": 0.3, "gamma_out": 0.5}
    ends = {}
    for name, module in (("c2dfb", c2dfb), ("c2dfb_nc", c2dfb_nc)):
        config = module.Config(**steps, compressor=TopK(ratio=0.25))
        x = engine(algorithms()[name], config, problem, net, rounds=300).rows("x")
        assert x is not None
        ends[name] = np.linalg.norm(x - problem.penalty_solution(10.0))
    assert ends["c2dfb_nc"] > 10 * ends["c2dfb"]


def test_own_mixing_loses_the_mean() -> None:
    """`mixing: own` (M_j − d_i) does not keep invariant 2; `messages` does. Both are offered, one is the default."""
    drifts = {}
    for mixing in ("messages", "own"):
        config = c2dfb_nc.Config(**STEPS, compressor=TopK(ratio=0.25), mixing=mixing)
        state = engine(algorithms()["c2dfb_nc"], config, quadratic(), graph("ring", 6), rounds=5).local_blocks[0].state
        drifts[mixing] = np.abs(state.loop_z.s.v.mean(0) - state.loop_z.grad.mean(0)).max()
    assert drifts["messages"] < 1e-12 < 1e-3 < drifts["own"]


def test_cached_tracker_reaches_the_same_point() -> None:
    """`tracker: cached` is one x stale at k = 0 and right from k = 1 on: the same limit."""
    problem = quadratic(mu=0.5, condition=3.0)
    config = c2dfb.Config(
        inner_steps=10, lam=10.0, eta_in=0.5, eta_out=0.3, gamma_in=0.4, gamma_out=0.6, tracker="cached",
        compressor=TopK(ratio=0.25),
    )
    made = engine(algorithms()["c2dfb"], config, problem, graph("ring", 6), rounds=400)
    x = made.rows("x")
    assert x is not None
    np.testing.assert_allclose(x.mean(0), problem.penalty_solution(10.0), rtol=1e-6)


def test_unscaled_h_is_the_same_objective_with_a_longer_step() -> None:
    """`y_objective: h` with η = `h_over_lambda` with λη for the y loop: one y step from the start agrees."""
    runs = {
        objective: c2dfb_engine(rounds=1, inner_steps=1, y_objective=objective, eta_in=eta).local_blocks[0].state
        for objective, eta in (("h", 0.02), ("h_over_lambda", 0.2))
    }
    np.testing.assert_allclose(runs["h"].y, runs["h_over_lambda"].y, atol=1e-13)


def test_what_a_naive_message_leaves_out_is_sent_later() -> None:
    """M = Q(v + E), and E is the rest of it, to the bit: nothing is lost, nothing is sent twice."""
    v, error, old = np.random.default_rng(0).standard_normal((3, 2, 40))
    config = c2dfb_nc.Config(compressor=TopK(ratio=0.25))
    due = v + error
    before = c2dfb_nc.ErrorFeedback(old, error, old, old)
    after, message = c2dfb_nc.compress(before, v, config, Key(0, np.arange(2), 0), "y_d")
    np.testing.assert_array_equal(after.sent, message.values)
    np.testing.assert_array_equal((after.sent != 0).sum(1), 10)
    np.testing.assert_array_equal(after.sent + after.error, due)
    np.testing.assert_array_equal(after.v, v)


@pytest.mark.parametrize("name", ["c2dfb", "c2dfb_nc"])
def test_table_1_convention(lab: Any, name: str) -> None:
    """Table 1 counts 2 d_x + 2 K k values of a round: of each loop the iterate's residuals, not the tracker's."""
    problem, config = lab.quadratic(dim_x=4, dim_y=10), lab.config(name, inner_steps=3)
    counted = lab.engine(name, config, problem, rounds=4).ledger().paper_megabytes(lab.algorithm(name).paper_counts)
    assert counted * 2**20 / 4 == pytest.approx(4 * (2 * 4 + 2 * 3 * 2))


def tracker_error(rounds: int, reset_every: int) -> float:
    """Return the distance of mean(s) from mean(∇_y g) in float32, the larger of both loops."""
    problem = Quadratic(dim_x=4, dim_y=12).build(Setup(nodes=6, seed=1, dtype="float32", partition=Iid()))
    config = c2dfb.Config(**{**STEPS, "compressor": TopK(ratio=0.25), "reset_every": reset_every})
    state = engine(algorithms()["c2dfb"], config, problem, graph("ring", 6), rounds).local_blocks[0].state
    return max(
        float(np.abs(loop.s.astype(float).mean(0) - loop.grad.astype(float).mean(0)).max())
        for loop in (state.loop_y, state.loop_z)
    )


@pytest.mark.parametrize("rows", ["narrow", "wide"])
def test_rounding_errors_do_not_accumulate(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 the trackers' error stops growing with `reset_every`; without it, it grows with every round.

    Wide rows too: their sums run in float64, but what is stored is rounded.
    """
    passes, evaluate = [], fused.evaluate
    monkeypatch.setattr(fused, "evaluate", lambda *sums: passes.append(1) or evaluate(*sums))
    if rows == "wide":
        monkeypatch.setattr(fused, "MIN_ENTRIES", 1)      # every row
    kept = [tracker_error(rounds, reset_every=50) for rounds in (200, 800)]
    never = [tracker_error(rounds, reset_every=0) for rounds in (200, 800)]
    assert never[1] > 2.5 * never[0]
    assert kept[1] < 1.5 * kept[0]
    assert kept[1] < 0.25 * never[1]
    assert bool(passes) == (rows == "wide")


SWITCHES: dict[str, dict[str, Any]] = {
    "own steps": {"eta_y": 0.3, "eta_z": 0.2},
    "h with own steps": {"y_objective": "h", "eta_y": 0.03, "eta_z": 0.3},
    "x compressed": {"compressor_x": TopK(ratio=0.5)},
    "x coded": {"compressor_x": TopK(ratio=0.5, bits=4)},
}


@pytest.mark.parametrize("label", SWITCHES)
def test_the_switches_keep_the_claim(label: str) -> None:
    """With steps of their own, or x compressed, the loops reach ψ_λ's minimiser, and all identities hold."""
    made = algorithms()["c2dfb"]
    assert made.claim is not None
    found = verify(replace(made, claim=replace(made.claim, steps={**made.claim.steps, **SWITCHES[label]})))
    assert found.failures == ()
    assert len(found.end.residuals) == (10 if label.startswith("x") else 8)


def test_one_step_size_on_h_is_unstable() -> None:
    """Control: with one η_in small enough for h, z lags by a factor λ, and λ times its gap drives x away."""
    made = algorithms()["c2dfb"]
    assert made.claim is not None
    steps = {**made.claim.steps, "y_objective": "h", "eta_in": 0.03}
    found = verify(replace(made, claim=replace(made.claim, steps=steps)))
    assert any(failure.startswith("end is") for failure in found.failures)


def test_identity_on_x_is_the_uncompressed_path() -> None:
    """Residuals that arrive whole make the reference points x and s themselves."""
    problem, net = quadratic(), graph("ring", 6)
    plain, other = (
        engine(algorithms()["c2dfb"], c2dfb.Config(**STEPS, compressor_x=q), problem, net) for q in (None, Identity())
    )
    for round_ in range(1, 8):
        plain.advance(round_)
        other.advance(round_)
    np.testing.assert_allclose(other.rows("x"), plain.rows("x"), rtol=0, atol=1e-13)
    assert np.abs(other.local_blocks[0].state.outer.x_hat).max() > 0


def test_compressed_x_sends_fewer_values() -> None:
    """A round sends 2 k_x values of x and its tracker instead of 2 d_x."""
    problem, net = quadratic(), graph("ring", 6)
    sent = {}
    for label, q in (("whole", None), ("compressed", TopK(ratio=0.5))):
        made = engine(algorithms()["c2dfb"], c2dfb.Config(**STEPS, compressor_x=q), problem, net)
        for round_ in (1, 2, 3):        # x and its tracker start at 0
            made.advance(round_)
        before = {name: values.copy() for name, values in made.ledger().values_by_channel().items()}
        made.advance(4)
        after = made.ledger().values_by_channel()
        sent[label] = int(sum(after[name][0] - before[name][0] for name in ("x", "s")))
    assert sent == {"whole": 2 * problem.dim_x, "compressed": 2 * (problem.dim_x // 2)}
