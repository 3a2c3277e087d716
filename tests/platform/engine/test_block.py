"""A block of nodes: it takes only the packets that belong to its step, and its packing changes nothing."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.gossip import mix
from dbo.algorithms.registry import Algorithm, algorithms
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.block import Host, ProtocolError
from dbo.platform.engine.local import LocalEngine
from dbo.platform.engine.state_tree import Flat
from dbo.platform.network import wire
from dbo.platform.runs.runner import prepare

Tiny = Callable[..., Experiment]
NETWORKED = [name for name, kind in algorithms().items() if not kind.single_machine]


@dataclass(frozen=True, kw_only=True)
class Config:
    packets: int = 1


@dataclass(frozen=True)
class State:
    x: Any
    y: Any

    @property
    def direction(self) -> Any:
        return self.x


def _init(shard: Any, cfg: Any) -> State:
    return State(shard.x0 + shard.ids[:, None], shard.y0)


def toy(round_: Any) -> Algorithm:
    """An algorithm that need not be registered."""
    return Algorithm(name="toy", summary="Toy.", config=Config, state=State, init=_init, round=round_,
                     packets=lambda cfg: cfg.packets)


async def averaging(st: State, shard: Any, cfg: Any) -> State:
    x, y = await mix(x=st.x, y=st.y)
    return State(x, y)


def hosts(tiny: Tiny, round_: Any = averaging, *blocks: list[int], epoch: int = 0, packets: int = 1) -> list[Host]:
    made = prepare(tiny())
    config = Config(packets=packets)
    return [Host(toy(round_), config, made.problem, made.network, ids, epoch) for ids in blocks or ([0, 1], [2, 3])]


def engine(experiment: Experiment, *blocks: list[int]) -> LocalEngine:
    made = prepare(experiment)
    parts = experiment.parts
    return LocalEngine(parts.algorithm, parts.config, made.problem, made.network, blocks or [range(experiment.nodes)])


# ---- the protocol ----------------------------------------------------------------------------------------------------


def test_two_blocks_average(tiny: Tiny) -> None:
    """Control: with the right packets a step gives Σ_j w_ij x_j over the ring, 1/3 each."""
    first, second = hosts(tiny)
    said = (first.begin(1) or {}) | (second.begin(1) or {})
    assert sorted(said) == [0, 1, 2, 3]
    assert first.step(said) is None
    np.testing.assert_allclose(first.state.x[:, 0], [(3 + 0 + 1) / 3, (0 + 1 + 2) / 3], rtol=1e-15)


@pytest.mark.parametrize("missing", [2, 3])
def test_missing_packet(tiny: Tiny, missing: int) -> None:
    """A step without a neighbour's packet is refused and names the node."""
    first, second = hosts(tiny)
    first.begin(1)
    said = second.begin(1) or {}
    with pytest.raises(ProtocolError, match=f"no packet from node {missing}"):
        first.step({node: data for node, data in said.items() if node != missing})


@pytest.mark.parametrize(
    ("change", "channels"),
    [
        ({"epoch": 1}, ("x", "y")), ({"round": 2}, ("x", "y")), ({"round": 0}, ("x", "y")), ({"step": 1}, ("x", "y")),
        ({"sender": 3}, ("x", "y")), ({}, ("y", "x")), ({}, ("x",)), ({}, ("x", "y", "z")), ({}, ("x", "q")),
    ],
)
def test_packet_of_another_moment(tiny: Tiny, change: dict[str, int], channels: tuple[str, ...]) -> None:
    """Another epoch, round, step, sender, or other channels in another order: refused, whatever else fits."""
    first, second = hosts(tiny)
    first.begin(1)
    said = second.begin(1) or {}
    header = replace(wire.Header(sender=2, epoch=0, round=1, step=0), **change)
    widths = {"x": 4, "y": 8}
    messages = mix(**{name: np.zeros((1, widths.get(name, 4))) for name in channels}).channels
    with pytest.raises(ProtocolError, match="expected packet"):
        first.step({**said, 2: wire.encode(header, messages, 0)})


def test_right_packet_made_by_hand_is_taken(tiny: Tiny) -> None:
    """Negative control of the test above: with nothing changed the same packet is accepted."""
    first, second = hosts(tiny)
    first.begin(1)
    said = second.begin(1) or {}
    messages = mix(x=np.zeros((1, 4)), y=np.zeros((1, 8))).channels
    assert first.step({**said, 2: wire.encode(wire.Header(sender=2, epoch=0, round=1, step=0), messages, 0)}) is None


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: b"", lambda d: b"x" * len(d), lambda d: d + b"\0"])
def test_damaged_packet(tiny: Tiny, damage: Callable[[bytes], bytes]) -> None:
    """What cannot be decoded is refused and names the node."""
    first, second = hosts(tiny)
    first.begin(1)
    said = second.begin(1) or {}
    with pytest.raises(ProtocolError, match="packet of node 2"):
        first.step({**said, 2: damage(said[2])})


def test_a_step_needs_a_round_and_a_round_an_end(tiny: Tiny) -> None:
    """No step before `begin`, no second `begin` before the end."""
    host, _ = hosts(tiny)
    with pytest.raises(ProtocolError, match="without a round"):
        host.step({})
    host.begin(1)
    with pytest.raises(ProtocolError, match="round 1 is under way"):
        host.begin(2)


@pytest.mark.parametrize("declared", [0, 2])
def test_declared_packets_are_the_sent_ones(tiny: Tiny, declared: int) -> None:
    """The engines submit rounds ahead by the declared number: another number is an error, and told with both."""
    (host,) = hosts(tiny, averaging, [0, 1, 2, 3], packets=declared)
    host.begin(1)
    with pytest.raises(ProtocolError, match=f"toy declares {declared} packets per round and sent 1"):
        host.step({})


def test_silent_round_must_be_declared(tiny: Tiny) -> None:
    """A round that says nothing ends with `begin`, if zero packets are declared."""
    async def silent(st: State, shard: Any, cfg: Any) -> State:
        return State(st.x + 1, st.y)

    (host,) = hosts(tiny, silent, [0, 1, 2, 3], packets=0)
    assert host.begin(1) is None
    (host,) = hosts(tiny, silent, [0, 1, 2, 3], packets=1)
    with pytest.raises(ProtocolError, match="sent 0"):
        host.begin(1)


class _Sleep:
    def __await__(self) -> Any:
        yield 0.1


async def _sleeps(st: State, shard: Any, cfg: Any) -> State:
    await _Sleep()
    return st


async def _returns_nothing(st: State, shard: Any, cfg: Any) -> None:
    await mix(x=st.x)


async def _sends_a_vector(st: State, shard: Any, cfg: Any) -> State:
    await mix(x=st.x[0])
    return st


async def _sends_too_few_rows(st: State, shard: Any, cfg: Any) -> State:
    await mix(x=st.x[:1])
    return st


@pytest.mark.parametrize(
    ("round_", "said"),
    [
        (_sleeps, r"toy awaits a float; only mix"),
        (_returns_nothing, "toy must return a State, got a NoneType"),
        (_sends_a_vector, r"toy sends x of shape \(4,\); must be \(nodes, entries\)"),
        (_sends_too_few_rows, r"toy sends x of shape \(1, 4\); must be \(nodes, entries\) = \(4, …\)"),
    ],
)
def test_beginners_mistakes_are_told(tiny: Tiny, round_: Any, said: str) -> None:
    """Awaiting something else, forgetting to return, sending what is no rows: one line that names the algorithm."""
    (host,) = hosts(tiny, round_, [0, 1, 2, 3])
    with pytest.raises(ProtocolError, match=said):
        _drive(host)


def _drive(host: Host) -> None:
    said = host.begin(1)
    while said is not None:
        said = host.step(said)


# ---- the state -------------------------------------------------------------------------------------------------------


def test_abandon_leaves_the_state(tiny: Tiny) -> None:
    """A round that is dropped half way never happened: the state is the old one, and the round can be done again."""
    first, second = hosts(tiny)
    before = first.state
    for _ in range(2):
        first.begin(1)
        first.abandon()
        assert first.state is before
    said = (first.begin(1) or {}) | (second.begin(1) or {})
    assert first.step(said) is None
    assert first.state is not before
    first.abandon()


def test_failed_step_leaves_the_state(tiny: Tiny) -> None:
    """An exception in the middle of a round changes no state; restoring starts afresh, with nothing counted twice."""
    first, second = hosts(tiny)
    snapshot, before = first.snapshot(), first.state
    first.begin(1)
    with pytest.raises(ProtocolError):
        first.step({})
    assert first.state is before
    first.restore(snapshot, epoch=1)
    second.restore(second.snapshot(), epoch=1)
    said = (first.begin(1) or {}) | (second.begin(1) or {})
    assert first.step(said) is None
    assert first.ledger.packets.tolist() == [1, 1]


def test_packets_of_the_old_epoch_cannot_land_in_the_new_one(tiny: Tiny) -> None:
    """After a rollback a late packet of the same round and step is refused."""
    first, second = hosts(tiny)
    first.begin(1)
    late = second.begin(1) or {}
    first.restore(first.snapshot(), epoch=1)
    first.begin(1)
    with pytest.raises(ProtocolError, match="expected packet"):
        first.step(late)


def blocks(made: LocalEngine) -> list[Flat]:
    """An engine's snapshot, every block whole."""
    return [{name: array for part in parts for name, array in part.items()} for parts in made.snapshot()]


@pytest.mark.parametrize("name", algorithms())
def test_snapshot_and_restore_are_inverse(tiny: Tiny, name: str) -> None:
    """Every algorithm: from a snapshot the rounds are repeated to the last bit, counters and ledger included."""
    experiment = tiny(algorithm={"name": name}, nodes=1 if algorithms()[name].single_machine else 4)
    made = engine(experiment)
    with np.errstate(all="ignore"):
        made.advance(1)
        snapshot = blocks(made)
        made.advance(2)
        expected = blocks(made)
        made.restore(snapshot)
        made.advance(2)
        for mine, theirs in zip(blocks(made), expected, strict=True):
            assert mine.keys() == theirs.keys()
            for key in mine:
                np.testing.assert_array_equal(mine[key], theirs[key])


# ---- packing ---------------------------------------------------------------------------------------------------------

PACKINGS = [[[0], [1], [2], [3]], [[0, 1], [2, 3]], [[3, 1], [0], [2]], [[0, 1, 2], [3]]]


@pytest.mark.parametrize("name", NETWORKED)
def test_packing_changes_nothing(tiny: Tiny, name: str) -> None:
    """One block = several blocks: x and y to float tolerance, bytes, packets and oracle calls exactly."""
    sizes = dict.fromkeys(("eta_in", "eta_out", "eta_x", "eta_y", "eta_z", "eta_v", "eta"), 0.001)
    known = algorithms()[name].config.__dataclass_fields__
    experiment = tiny(algorithm={"name": name, **{key: value for key, value in sizes.items() if key in known}})
    whole = engine(experiment)
    apart = [engine(experiment, *packing) for packing in PACKINGS]
    for round_ in (1, 2, 3):
        for made in (whole, *apart):
            made.advance(round_)
    for made in apart:
        for rows in ("x", "y", "direction"):
            mine, theirs = made.rows(rows), whole.rows(rows)
            assert mine is not None
            assert theirs is not None
            np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-13)
        assert made.counters() == whole.counters()
        one, other = made.ledger(), whole.ledger()
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_array_equal(one.packets, other.packets)
        np.testing.assert_array_equal(one.bytes_by_node(), other.bytes_by_node())
        assert one.bytes_links == other.bytes_links
        assert one.totals() == other.totals()


@pytest.mark.parametrize("compressor", ["identity", "top_k", "rand_k", "qsgd"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_counted_bytes_are_the_encoded_ones(tiny: Tiny, compressor: str, dtype: str) -> None:
    """In process nothing is encoded, and yet every byte is counted as the encoder would have written it."""
    section = {"name": "c2dfb", "inner_steps": 2, "eta_in": 0.1, "eta_out": 0.1, "compressor": {"name": compressor}}
    experiment = tiny(algorithm=section, dtype=dtype)
    whole, apart = engine(experiment), engine(experiment, [0], [1], [2], [3])
    lengths = np.zeros(4, dtype=np.int64)
    for round_ in (1, 2):
        whole.advance(round_)
        said: list[Any] = [host.begin(round_) for host in apart.hosts]
        while all(packets is not None for packets in said):
            posted = {node: data for packets in said for node, data in packets.items()}
            for node, data in posted.items():
                lengths[node] += len(data)
            said = [host.step(posted) for host in apart.hosts]
    np.testing.assert_array_equal(apart.ledger().bytes_by_node(), lengths)
    if compressor == "identity":      # others may round a last bit apart and keep another entry
        np.testing.assert_array_equal(whole.ledger().bytes_by_node(), lengths)


def test_evaluation_is_not_counted(tiny: Tiny) -> None:
    """Losses that are measured cost the algorithm no oracle call."""
    made = engine(tiny())
    before = dict(made.counters())
    made.losses(np.zeros((1, 4)), np.zeros((1, 8)))
    assert made.counters() == before


def test_a_sick_row_is_found(tiny: Tiny) -> None:
    """One NaN in one array of one block is named."""
    made = engine(tiny(), [0, 1], [2, 3])
    assert made.sick() is None
    host = made.hosts[1]
    host.state = replace(host.state, u=np.where(np.arange(4) == 2, np.nan, host.state.u))
    assert made.sick() == "u"


def test_no_event_loop_is_imported() -> None:
    """Rounds are driven by hand."""
    assert "asyncio" not in vars(sys.modules["dbo.platform.engine.block"])
