"""Exchange rows with a server: average, broadcast and aggregate, the clients of a round, bytes up and down."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.api import (
    Algorithm,
    NotRowsError,
    aggregate,
    algorithm,
    average,
    broadcast,
    counter,
    mix,
    sample_clients,
)
from dbo.algorithms.registry import algorithms
from dbo.components import forget
from dbo.platform.engine.arrangement import arrange
from dbo.platform.engine.block import ProtocolError
from dbo.platform.engine.local import LocalEngine

Array = Any
STAR = [name for name, made in algorithms().items() if made.network == "star"]
EXCHANGES = {"average": average, "broadcast": broadcast, "aggregate": aggregate}


@dataclass(frozen=True, kw_only=True)
class Config:
    exchange: str = "average"
    participation: float = 1.0


@dataclass(frozen=True)
class State:
    t: Array
    x: Array
    y: Array

    @property
    def direction(self) -> Array:
        return self.x


def register(network: Any = "star") -> Algorithm:
    """Register a method whose round is one exchange of x, and remove it again."""

    def init(shard: Any, cfg: Config) -> State:
        return State(counter(shard), 0 * shard.x0 + (1.0 + shard.ids[:, None]), shard.y0)

    async def one_exchange(st: State, shard: Any, cfg: Config) -> State:
        """Exchange x once."""
        if cfg.exchange == "mix":
            x = await mix(st.x)
        else:
            x = await EXCHANGES[cfg.exchange](sample_clients(shard, cfg.participation, st.t), st.x)
        return State(st.t + 1, x, st.y)

    try:
        return algorithm("one_exchange", config=Config, state=State, init=init, network=network)(one_exchange)
    finally:
        forget(__name__)


def start(lab: Any, exchange: str, blocks: Any = None, **options: Any) -> LocalEngine:
    made = register()
    problem, network = arrange(made, lab.quadratic(), lab.network())
    return LocalEngine(made, Config(exchange=exchange, **options), problem, network, blocks or [range(7)])


@pytest.mark.parametrize("blocks", [None, [[i] for i in range(7)], [[6, 0], [3, 1, 2], [5, 4]]])
@pytest.mark.parametrize(("exchange", "expected"), [
    ("average", [0, 0, 0, 0, 0, 0, 3.5]), ("broadcast", [7] * 7), ("aggregate", [3.5] * 7),
])
def test_rows_meet_at_the_server(lab: Any, exchange: str, expected: list[float], blocks: Any) -> None:
    """Clients hold 1 … 6, the server 7: the mean goes up, the server's row goes down, in every packing."""
    engine = start(lab, exchange, blocks)
    engine.advance(1)
    np.testing.assert_allclose(engine.rows("x")[:, 0], expected, rtol=1e-14)


@pytest.mark.parametrize("blocks", [None, [[i] for i in range(7)]])
def test_absent_clients_neither_send_nor_receive(lab: Any, blocks: Any) -> None:
    """Half of the clients: the mean is theirs alone, the others keep their row."""
    engine = start(lab, "aggregate", blocks, participation=0.5)
    before = engine.rows("x")[:, 0].copy()
    present = engine.ledger().packets
    engine.advance(1)
    after, present = engine.rows("x")[:, 0], engine.ledger().packets[:-1] > 0
    assert present.sum() == 3
    np.testing.assert_allclose(after[:-1][present], before[:-1][present].mean())
    np.testing.assert_array_equal(after[:-1][~present], 0)         # the average gives a client 0, and nobody sends more
    assert after[-1] == after[:-1][present][0]


def test_clients_are_keyed_by_seed_and_round(lab: Any) -> None:
    """Every block draws the same clients; other rounds draw others; all of them come up."""
    problem, _ = arrange(register(), lab.quadratic(), lab.network())
    whole, one = problem.shard(range(7)), problem.shard([6])
    chosen = [sample_clients(whole, 0.5, np.full((7, 1), t)).participants for t in range(12)]
    assert chosen == [sample_clients(one, 0.5, np.full((1, 1), t)).participants for t in range(12)]
    assert {len(clients) for clients in chosen} == {3}
    assert len(set(chosen)) > 3
    assert frozenset().union(*chosen) == frozenset(range(6))
    assert sample_clients(whole, 0.01, np.zeros((7, 1))).participants.__len__() == 1


def test_up_and_down_are_counted_apart(lab: Any) -> None:
    """A client's packet has one receiver, the server's has as many as there are clients in the round."""
    engine = start(lab, "aggregate", participation=0.5)
    engine.advance(1)
    ledger = engine.ledger()
    size = 36 + 12 + len("value") + 3 * 8
    assert ledger.packets[-1] == 1
    assert ledger.received[-1, 0] == 3 * size
    assert sorted(ledger.received[:-1, 0].tolist()) == [0, 0, 0, size, size, size]
    assert ledger.bytes_links == 6 * size
    assert ledger.bytes_broadcast == 4 * size


def test_oracle_calls_count_for_participants(lab: Any) -> None:
    """Neither an absent client nor the server makes a call; the server's derivatives are 0."""
    engine = lab.engine("simfbo", lab.config("simfbo", participation=0.5), rounds=1)
    calls = engine.local_blocks[0].shard.calls[0]
    assert calls[-1] == 0
    assert sorted(set(calls.tolist())) == [0, 6]
    shard = engine.local_blocks[0].shard
    assert not shard.g_y(shard.x0 + 1, shard.y0 + 1)[-1].any()
    assert shard.g_y(shard.x0 + 1, shard.y0 + 1)[:-1].any()


def test_a_star_method_must_not_gossip(lab: Any) -> None:
    """`mix` in a method with a server is refused with what is allowed."""
    with pytest.raises(ProtocolError, match=r"one_exchange declares network='star'; only average\(...\), broadcast"):
        start(lab, "mix").advance(1)


def test_a_gossip_method_has_no_clients(lab: Any) -> None:
    """`sample_clients` without a server: the error names the declaration that is missing."""
    engine = LocalEngine(register("gossip"), Config(), lab.quadratic(), lab.network(), [range(6)])
    with pytest.raises(ValueError, match='declare network="star"'):
        engine.advance(1)


def test_several_arrays_need_names(lab: Any) -> None:
    """As for `mix`, the error shows both ways to write it."""
    problem, _ = arrange(register(), lab.quadratic(), lab.network())
    clients = sample_clients(problem.shard(range(7)), 1.0, np.zeros((7, 1)))
    with pytest.raises(NotRowsError, match=r"average\(...\) got 2 arrays without a name"):
        average(clients, np.zeros((7, 3)), np.zeros((7, 3)))       # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["simfbo", "fedbioacc"])
def test_the_bias_of_local_steps_shrinks_with_them(lab: Any, name: str) -> None:
    """More than one local step: a floor under heterogeneity that halves with the local steps; none with one step."""
    problem = lab.quadratic()
    local = ("local_x", "local_y", "local_v") if name == "simfbo" else ("eta_x", "eta_y", "eta_v")
    solution = problem.solution()

    def distance(steps: int, scale: float) -> float:
        base = lab.config(name, local_steps=steps)
        config = lab.config(name, local_steps=steps, **{key: scale * getattr(base, key) for key in local})
        engine = lab.engine(name, config, problem, rounds=round((400 if steps > 1 else 1600) / scale))
        return float(np.linalg.norm(lab.model(engine, "x") - solution) / np.linalg.norm(solution))

    far, near = distance(3, 1.0), distance(3, 0.5)
    assert far > 1e-3
    assert 0.35 < near / far < 0.65
    assert distance(1, 1.0) < 1e-6


@pytest.mark.parametrize("name", STAR)
def test_half_of_the_clients_still_converges_near(lab: Any, name: str) -> None:
    """Sampling clients adds noise, not a wrong limit: on identical nodes half of them do what all do."""
    problem = lab.quadratic(heterogeneity=0.0)
    whole, half = (
        lab.engine(name, lab.config(name, participation=share), problem, rounds=60) for share in (1.0, 0.5)
    )
    if name != "ef_soba":               # its memories are the clients' own: absent ones stay behind
        np.testing.assert_allclose(lab.model(half, "x"), lab.model(whole, "x"), rtol=1e-9)
    assert half.ledger().bytes_links < 0.6 * whole.ledger().bytes_links
