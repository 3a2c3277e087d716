"""Blocks accept only the packets that belong to their step, and packing changes no result."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.api import Algorithm, Message, algorithms, mix
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.arrangement import arrange
from dbo.platform.engine.block import Block, Progress, ProtocolError
from dbo.platform.engine.local import LocalEngine
from dbo.platform.engine.state_tree import Flat
from dbo.platform.network import packet as wire
from dbo.platform.runs.runner import prepare

Tiny = Callable[..., Experiment]
NETWORKED = [name for name, kind in algorithms().items() if kind.network != "single"]


@dataclass(frozen=True, kw_only=True)
class Config:
    pass


@dataclass(frozen=True)
class State:
    x: Any
    y: Any

    @property
    def direction(self) -> Any:
        return self.x


def _init(shard: Any, cfg: Any) -> State:
    return State(shard.x0 + shard.ids[:, None], shard.y0)


def toy(round_: Any, packets: int | None = 1) -> Algorithm:
    """An algorithm that is not registered."""
    return Algorithm(name="toy", summary="Toy.", config=Config, state=State, init=_init, round=round_,
                     packets=None if packets is None else lambda cfg: packets)


async def averaging(st: State, shard: Any, cfg: Any) -> State:
    x, y = await mix(x=st.x, y=st.y)
    return State(x, y)


def toy_blocks(tiny: Tiny, round_: Any = averaging, *ids: list[int], packets: int | None = 1) -> list[Block]:
    setup, algorithm = prepare(tiny()), toy(round_, packets)
    return [Block(algorithm, Config(), setup.problem, setup.network, nodes) for nodes in ids or ([0, 1], [2, 3])]


def toy_engine(tiny: Tiny, round_: Any, *ids: list[int], packets: int | None = None) -> LocalEngine:
    setup = prepare(tiny())
    return LocalEngine(toy(round_, packets), Config(), setup.problem, setup.network, ids or ([0, 1], [2, 3]))


def start(experiment: Experiment, *ids: list[int]) -> LocalEngine:
    setup, parts = prepare(experiment), experiment.parts
    problem, network = setup.problem, setup.network
    if parts.algorithm.network == "star":
        problem, network = arrange(parts.algorithm, problem, network)
        ids = (*ids, [experiment.nodes]) if ids else ()
    return LocalEngine(parts.algorithm, parts.config, problem, network, ids or [range(network.nodes)])


# ---- the protocol ----------------------------------------------------------------------------------------------------


def test_two_blocks_average(tiny: Tiny) -> None:
    """Control: with the right packets a step gives Σ_j w_ij x_j over the ring, 1/3 each."""
    first, second = toy_blocks(tiny)
    packets = (first.begin(1) or {}) | (second.begin(1) or {})
    assert sorted(packets) == [0, 1, 2, 3]
    assert first.step(packets) is None
    np.testing.assert_allclose(first.state.x[:, 0], [(3 + 0 + 1) / 3, (0 + 1 + 2) / 3], rtol=1e-15)


@pytest.mark.parametrize("missing", [2, 3])
def test_missing_packet_is_refused(tiny: Tiny, missing: int) -> None:
    """A step without a neighbour's packet is refused; the error names the node."""
    first, second = toy_blocks(tiny)
    first.begin(1)
    packets = second.begin(1) or {}
    with pytest.raises(ProtocolError, match=f"no packet from node {missing}"):
        first.step({node: data for node, data in packets.items() if node != missing})


@pytest.mark.parametrize(
    ("change", "channels"),
    [
        ({"epoch": 1}, ("x", "y")), ({"round": 2}, ("x", "y")), ({"round": 0}, ("x", "y")), ({"step": 1}, ("x", "y")),
        ({"sender": 3}, ("x", "y")), ({}, ("y", "x")), ({}, ("x",)), ({}, ("x", "y", "z")), ({}, ("x", "q")),
    ],
)
def test_packet_of_another_step_is_refused(tiny: Tiny, change: dict[str, int], channels: tuple[str, ...]) -> None:
    """Another epoch, round, step or sender, other channels or another order: refused, even if all else fits."""
    first, second = toy_blocks(tiny)
    first.begin(1)
    packets = second.begin(1) or {}
    header = replace(wire.Header(sender=2, epoch=0, round=1, step=0), **change)
    widths = {"x": 4, "y": 8}
    messages = mix(**{name: np.zeros((1, widths.get(name, 4))) for name in channels}).channels
    with pytest.raises(ProtocolError, match="expected packet"):
        first.step({**packets, 2: wire.encode(header, messages, 0)})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"y": np.zeros((1, 5))}, "channel 'y': expected 8 entries of float64, got 5 entries of float64"),
        ({"x": np.zeros((1, 6))}, "channel 'x': expected 4 entries of float64, got 6 entries of float64"),
        ({"y": np.zeros((1, 8), np.float32)}, "channel 'y': expected 8 entries of float64, got 8 entries of float32"),
        ({"y": Message(np.eye(1, 1 << 20), "sparse")}, "channel 'y': expected 8 entries of float64, got 1048576 "),
    ],
)
def test_rows_unlike_the_own_ones_are_refused(tiny: Tiny, rows: dict[str, Any], message: str) -> None:
    """Another width or dtype than the receiver's own rows: the error names sender, channel, expected and got."""
    first, second = toy_blocks(tiny)
    first.begin(1)
    packets = second.begin(1) or {}
    messages = mix(**{"x": np.zeros((1, 4)), "y": np.zeros((1, 8)), **rows}).channels
    data = wire.encode(wire.Header(sender=2, epoch=0, round=1, step=0), messages, 0)
    with pytest.raises(ProtocolError, match=f"^round 1, step 0: packet of node 2: {message}"):
        first.step({**packets, 2: data})


def test_blocks_that_disagree_about_a_width_are_an_error(tiny: Tiny) -> None:
    """An algorithm whose rows have another width on some nodes: the error names sender, channel and both widths."""
    async def uneven(st: State, shard: Any, cfg: Any) -> State:
        (x,) = await mix(x=st.x[:, :3] if 3 in shard.ids else st.x)
        return State(x, st.y)

    with pytest.raises(
        ProtocolError, match=r"packet of node 2: channel 'x': expected 4 entries of float64, got 3 entries of float64"
    ):
        toy_engine(tiny, uneven).advance(1)


def test_blocks_that_disagree_about_a_number_of_rows_are_an_error(tiny: Tiny) -> None:
    """A block that sends a row too few, in values or in levels: the error names nodes, channel and both shapes."""
    async def too_few(st: State, shard: Any, cfg: Any) -> State:
        (x,) = await mix(x=st.x[:1] if 3 in shard.ids else st.x)
        return State(x, st.y)

    async def too_few_levels(st: State, shard: Any, cfg: Any) -> State:
        levels = np.ones((1 if 3 in shard.ids else 2, 4), np.int64)
        (x,) = await mix(x=Message(st.x, "levels", 4, levels, np.ones(2), 4))
        return State(x, st.y)

    with pytest.raises(ProtocolError, match=r"sends x of shape \(1, 4\); must be .* = \(2, …\) for nodes \[2, 3\]"):
        toy_engine(tiny, too_few).advance(1)
    with pytest.raises(ProtocolError, match=r"from node 2: channel 'x': expected levels .*\(2, 4\).*, got \(\(1, 4\)"):
        toy_engine(tiny, too_few_levels).advance(1)


def test_hand_made_packet_is_accepted(tiny: Tiny) -> None:
    """Negative control of the test above: with nothing changed the same packet is accepted."""
    first, second = toy_blocks(tiny)
    first.begin(1)
    packets = second.begin(1) or {}
    messages = mix(x=np.zeros((1, 4)), y=np.zeros((1, 8))).channels
    assert first.step({**packets, 2: wire.encode(wire.Header(sender=2, epoch=0, round=1, step=0), messages, 0)}) is None


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: b"", lambda d: b"x" * len(d), lambda d: d + b"\0"])
def test_damaged_packet_is_refused(tiny: Tiny, damage: Callable[[bytes], bytes]) -> None:
    """A packet that cannot be decoded is refused; the error names the node."""
    first, second = toy_blocks(tiny)
    first.begin(1)
    packets = second.begin(1) or {}
    with pytest.raises(ProtocolError, match="packet of node 2"):
        first.step({**packets, 2: damage(packets[2])})


def test_steps_need_an_open_round_and_rounds_do_not_overlap(tiny: Tiny) -> None:
    """No step before `begin`, no second `begin` before the end."""
    block, _ = toy_blocks(tiny)
    with pytest.raises(ProtocolError, match="without a round"):
        block.step({})
    block.begin(1)
    with pytest.raises(ProtocolError, match="round 1 is open"):
        block.begin(2)


@pytest.mark.parametrize("declared", [0, 2])
def test_declared_packets_are_the_sent_ones(tiny: Tiny, declared: int) -> None:
    """If an algorithm declares another number of packets than it sends, the error names both numbers."""
    (block,) = toy_blocks(tiny, averaging, [0, 1, 2, 3], packets=declared)
    block.begin(1)
    with pytest.raises(ProtocolError, match=f"toy declares {declared} packets per round and sent 1"):
        block.step({})


def test_round_without_packets_ends_with_begin(tiny: Tiny) -> None:
    """A round that sends nothing ends with `begin`, if zero packets are declared or none are."""
    async def silent(st: State, shard: Any, cfg: Any) -> State:
        return State(st.x + 1, st.y)

    for packets in (0, None):
        (block,) = toy_blocks(tiny, silent, [0, 1, 2, 3], packets=packets)
        assert block.begin(1) is None
        assert block.progress() == Progress(0, is_open=False)
    (block,) = toy_blocks(tiny, silent, [0, 1, 2, 3], packets=1)
    with pytest.raises(ProtocolError, match="sent 0"):
        block.begin(1)


async def alternating(st: State, shard: Any, cfg: Any) -> State:
    """One packet in odd rounds, three in even ones; y counts the rounds."""
    x = st.x
    for _ in range(1 if st.y[0, 0] % 2 == 0 else 3):
        x = await mix(x)
    return State(x, st.y + 1)


def test_number_of_packets_may_vary_by_round(tiny: Tiny) -> None:
    """Without a declaration every round sends what it needs; one block and several blocks agree."""
    whole, split = toy_engine(tiny, alternating, [0, 1, 2, 3]), toy_engine(tiny, alternating)
    for round_, total in ((1, 1), (2, 4), (3, 5)):
        for engine in (whole, split):
            engine.advance(round_)
            assert engine.ledger().packets.tolist() == [total] * 4
    np.testing.assert_allclose(split.rows("x"), whole.rows("x"), rtol=1e-14)


@pytest.mark.parametrize(
    ("longer", "finished", "others"), [(0, r"\[2, 3\]", r"\[0, 1\]"), (3, r"\[0, 1\]", r"\[2, 3\]")]
)
def test_blocks_that_disagree_about_packets_are_an_error(tiny: Tiny, longer: int, finished: str, others: str) -> None:
    """A block that awaits mix(...) once more than its neighbours: the error names the blocks and the number."""
    async def uneven(st: State, shard: Any, cfg: Any) -> State:
        x = await mix(st.x)
        if longer in shard.ids:
            x = await mix(x)
        return State(x, st.y)

    with pytest.raises(ProtocolError, match=f"blocks {finished} finished after 1 packets, blocks {others} did not"):
        toy_engine(tiny, uneven).advance(1)


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
    ("round_", "message"),
    [
        (_sleeps, r"toy awaits a float; only mix"),
        (_returns_nothing, "toy must return a State, got a NoneType"),
        (_sends_a_vector, r"toy sends x of shape \(4,\); must be \(nodes, entries\)"),
        (_sends_too_few_rows, r"toy sends x of shape \(1, 4\); must be \(nodes, entries\) = \(4, …\)"),
    ],
)
def test_common_mistakes_are_reported(tiny: Tiny, round_: Any, message: str) -> None:
    """Awaiting something else, returning nothing, sending something else than rows: one line names the algorithm."""
    with pytest.raises(ProtocolError, match=message):
        toy_engine(tiny, round_, [0, 1, 2, 3], packets=1).advance(1)


# ---- the state -------------------------------------------------------------------------------------------------------


def test_abandon_keeps_the_state(tiny: Tiny) -> None:
    """A round that is abandoned changes no state, and can be run again."""
    first, second = toy_blocks(tiny)
    before = first.state
    for _ in range(2):
        first.begin(1)
        first.abandon()
        assert first.state is before
    packets = (first.begin(1) or {}) | (second.begin(1) or {})
    assert first.step(packets) is None
    assert first.state is not before
    first.abandon()


def test_failed_step_keeps_the_state(tiny: Tiny) -> None:
    """An exception in the middle of a round changes no state; after a restore nothing is counted twice."""
    first, second = toy_blocks(tiny)
    snapshot, before = first.snapshot(), first.state
    first.begin(1)
    with pytest.raises(ProtocolError):
        first.step({})
    assert first.state is before
    first.restore(snapshot, epoch=1)
    second.restore(second.snapshot(), epoch=1)
    packets = (first.begin(1) or {}) | (second.begin(1) or {})
    assert first.step(packets) is None
    assert first.ledger.packets.tolist() == [1, 1]


def test_packet_of_an_old_epoch_is_refused(tiny: Tiny) -> None:
    """After a rollback a late packet of the same round and step is refused."""
    first, second = toy_blocks(tiny)
    first.begin(1)
    late = second.begin(1) or {}
    first.restore(first.snapshot(), epoch=1)
    first.begin(1)
    with pytest.raises(ProtocolError, match="expected packet"):
        first.step(late)


def snapshots(engine: LocalEngine) -> list[Flat]:
    """An engine's snapshot, all chunks of each block in one dict."""
    return [{name: array for chunk in chunks for name, array in chunk.items()} for chunks in engine.snapshot()]


@pytest.mark.parametrize("name", algorithms())
def test_snapshot_and_restore_are_inverse(tiny: Tiny, name: str) -> None:
    """Every algorithm: rounds after a restore are bit-identical, counters and ledger included."""
    experiment = tiny(algorithm={"name": name}, nodes=1 if algorithms()[name].network == "single" else 4)
    engine = start(experiment)
    with np.errstate(all="ignore"):
        engine.advance(1)
        saved = snapshots(engine)
        engine.advance(2)
        expected = snapshots(engine)
        engine.restore(saved)
        engine.advance(2)
        for repeated, straight in zip(snapshots(engine), expected, strict=True):
            assert repeated.keys() == straight.keys()
            for key in repeated:
                np.testing.assert_array_equal(repeated[key], straight[key])


# ---- packing ---------------------------------------------------------------------------------------------------------

PACKINGS = [[[0], [1], [2], [3]], [[0, 1], [2, 3]], [[3, 1], [0], [2]], [[0, 1, 2], [3]]]


@pytest.mark.parametrize("name", NETWORKED)
def test_packing_changes_nothing(tiny: Tiny, name: str) -> None:
    """One block = several blocks: x and y to float tolerance, bytes, packets and oracle calls exactly."""
    sizes = dict.fromkeys(("eta_in", "eta_out", "eta_x", "eta_y", "eta_z", "eta_v", "eta"), 0.001)
    known = algorithms()[name].config.__dataclass_fields__
    experiment = tiny(algorithm={"name": name, **{key: value for key, value in sizes.items() if key in known}})
    whole = start(experiment)
    split = [start(experiment, *packing) for packing in PACKINGS]
    for round_ in (1, 2, 3):
        for engine in (whole, *split):
            engine.advance(round_)
    for engine in split:
        for rows in ("x", "y", "direction"):
            found, expected = engine.rows(rows), whole.rows(rows)
            assert found is not None
            assert expected is not None
            np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-13)
        assert engine.counters() == whole.counters()
        one, other = engine.ledger(), whole.ledger()
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_array_equal(one.packets, other.packets)
        np.testing.assert_array_equal(one.bytes_by_node(), other.bytes_by_node())
        assert one.bytes_links == other.bytes_links
        assert one.totals() == other.totals()


@pytest.mark.parametrize("compressor", ["identity", "top_k", "rand_k", "qsgd"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_counted_bytes_are_the_encoded_ones(tiny: Tiny, compressor: str, dtype: str) -> None:
    """The local engine encodes nothing, and still counts exactly the bytes that the encoder would write."""
    section = {"name": "c2dfb", "inner_steps": 2, "eta_in": 0.1, "eta_out": 0.1, "compressor": {"name": compressor}}
    experiment = tiny(algorithm=section, dtype=dtype)
    whole, split = start(experiment), start(experiment, [0], [1], [2], [3])
    lengths = np.zeros(4, dtype=np.int64)
    for round_ in (1, 2):
        whole.advance(round_)
        outgoing: list[Any] = [block.begin(round_) for block in split.local_blocks]
        while all(sent is not None for sent in outgoing):
            packets = {node: data for sent in outgoing for node, data in sent.items()}
            for node, data in packets.items():
                lengths[node] += len(data)
            outgoing = [block.step(packets) for block in split.local_blocks]
    np.testing.assert_array_equal(split.ledger().bytes_by_node(), lengths)
    if compressor == "identity":      # others may differ in a last bit and select another entry
        np.testing.assert_array_equal(whole.ledger().bytes_by_node(), lengths)


def test_evaluation_is_not_counted(tiny: Tiny) -> None:
    """Evaluating the losses does not count as oracle calls of the algorithm."""
    engine = start(tiny())
    before = dict(engine.counters())
    engine.losses(np.zeros((1, 4)), np.zeros((1, 8)))
    assert engine.counters() == before


def test_nonfinite_row_is_found(tiny: Tiny) -> None:
    """One NaN in one array of one block: the array is named."""
    engine = start(tiny(), [0, 1], [2, 3])
    assert engine.first_nonfinite() is None
    block = engine.local_blocks[1]
    block.state = replace(block.state, u=np.where(np.arange(4) == 2, np.nan, block.state.u))
    assert engine.first_nonfinite() == "u"


def test_no_event_loop_is_imported() -> None:
    """The engine drives coroutines with `.send()`."""
    assert "asyncio" not in vars(sys.modules["dbo.platform.engine.block"])
