"""The ledger: traffic is counted once per broadcast, once per link, and by the paper's convention."""

from collections.abc import Sequence

import numpy as np
import pytest

from dbo.algorithms.compression.compressors import TopK
from dbo.algorithms.gossip import Message, dense
from dbo.algorithms.rng import Key
from dbo.platform.network import codecs
from dbo.platform.network import packet as wire
from dbo.platform.network.ledger import Ledger
from dbo.platform.network.topology import Star, build_network

MEBIBYTE = 1 << 20
STAR = build_network(Star().graph(4, 0))


def messages_of(ids: Sequence[int], round_: int = 0) -> dict[str, Message]:
    """Return the messages of these nodes: every row has its own values, which do not depend on the block."""
    rows = np.stack([np.random.default_rng([node, round_]).standard_normal(300) for node in ids])
    rows[np.array(ids) == 2, 20:] = 0       # node 2 has fewer than k nonzero entries
    return {
        "x": dense(rows[:, :7].astype(np.float32)),
        "y": TopK(ratio=0.2)(rows.astype(np.float32), Key(0, np.array(ids), round_), "y"),
    }


def ledger_of(ids: Sequence[int], rounds: int = 3) -> Ledger:
    ledger = Ledger(ids, STAR.degree[list(ids)])
    for round_ in range(rounds):
        messages = messages_of(ids, round_)
        ledger.record(messages, wire.measure(messages))
    return ledger


def lengths(rounds: int = 3) -> list[int]:
    """Return the encoded lengths of the four nodes' packets."""
    header = wire.Header(sender=0, epoch=0, round=0, step=0)
    return [sum(len(wire.encode(header, messages_of(range(4), r), node)) for r in range(rounds)) for node in range(4)]


def test_bytes_are_those_of_encoded_packets() -> None:
    """bytes_broadcast is the sum of all packets' lengths, bytes_links weights each with its sender's degree."""
    ledger, real = ledger_of(range(4)), lengths()
    assert ledger.bytes_by_node().tolist() == real
    assert ledger.bytes_broadcast == sum(real)
    assert ledger.bytes_links == 3 * real[0] + sum(real[1:])
    assert ledger.packets.tolist() == [3, 3, 3, 3]


def test_channels_and_header_add_up() -> None:
    """Each channel has its own bytes, those outside of bodies are "header", and together they are all."""
    ledger = ledger_of(range(4))
    by_channel = ledger.bytes_by_channel()
    assert list(by_channel) == ["header", "x", "y"]
    assert ledger.channels == ("x", "y")
    np.testing.assert_array_equal(sum(by_channel.values()), ledger.bytes_by_node())
    assert by_channel["x"].tolist() == [3 * 28] * 4
    assert by_channel["y"][2] < by_channel["y"][1]
    assert ledger.values_by_channel()["x"].tolist() == [21] * 4
    assert ledger.values_by_channel()["y"].tolist() == [180, 180, 60, 180]


def test_links_are_directed() -> None:
    """(i, j) carries what i broadcasts, for each neighbour j; all links together are bytes_links."""
    ledger, real = ledger_of(range(4)), lengths()
    links = ledger.links(STAR.neighbours)
    assert links == {
        (0, 1): real[0], (0, 2): real[0], (0, 3): real[0], (1, 0): real[1], (2, 0): real[2], (3, 0): real[3],
    }
    assert sum(links.values()) == ledger.bytes_links


def test_four_totals() -> None:
    """{values only, values + indices} × {per broadcast, per link}, no headers."""
    ledger = ledger_of(range(4))
    values = np.array([3 * 28 + 4 * n for n in (180, 180, 60, 180)])
    bodies = ledger.bytes_by_node() - ledger.header
    assert ledger.totals() == {
        "values_broadcast": values.sum(),
        "values_links": values @ [3, 1, 1, 1],
        "values_indices_broadcast": bodies.sum(),
        "values_indices_links": bodies @ [3, 1, 1, 1],
    }
    assert ledger.totals()["values_indices_broadcast"] > ledger.totals()["values_broadcast"]


def papers_ledger(rounds: int, inner_steps: int, nodes: int = 10) -> Ledger:
    """Return the ledger of C²DFB on 20 Newsgroups: d_y = 2 032 620, d_x = 101 631, 20 % kept, float32, a ring."""
    dim_y, dim_x = 2_032_620, 101_631
    k = TopK(ratio=0.2).contraction(dim_y) * dim_y
    nothing = np.broadcast_to(np.float32(0), (nodes, 1))
    sparse = Message(nothing, form="sparse", kept=round(k))
    upper = dict.fromkeys(("x", "sx"), Message(nothing, kept=dim_x))
    lower = dict.fromkeys(("y.d", "y.s", "z.d", "z.s"), sparse)
    head = np.zeros(nodes, dtype=np.int64)
    upper_sizes = wire.PacketSizes(head, dict.fromkeys(upper, codecs.measure_dense(nodes, dim_x, 4)))
    rows = (codecs.Counted(round(k), 1 << 20),) * nodes      # positions for which a bitmap is shorter than a Rice code
    lower_sizes = wire.PacketSizes(head, dict.fromkeys(lower, codecs.measure_sparse(rows, dim_y, 4)))
    ledger = Ledger(range(nodes), [2] * nodes)
    for _ in range(rounds):
        ledger.record(upper, upper_sizes)
        for _ in range(inner_steps):
            ledger.record(lower, lower_sizes)
    return ledger


def test_the_papers_table_is_reproduced() -> None:
    """Table 1 prints 378.20 for 8 rounds with K = 15: one node, values only, trackers not counted."""
    ledger = papers_ledger(rounds=8, inner_steps=15)
    assert ledger.paper_megabytes({"y.s": 0.0, "z.s": 0.0}) == pytest.approx(378.20, rel=1e-3)
    assert papers_ledger(7, 15).paper_megabytes({"y.s": 0.0, "z.s": 0.0}) == pytest.approx(330.93, rel=1e-3)


def test_the_real_cost_of_the_papers_run() -> None:
    """The same 8 rounds cost a node 750.6 MiB of values, 866.9 with bitmaps, twice that on a ring's links."""
    ledger = papers_ledger(rounds=8, inner_steps=15)
    per_node = {name: total / 10 / MEBIBYTE for name, total in ledger.totals().items()}
    assert per_node["values_broadcast"] == pytest.approx(750.6, abs=0.05)
    assert per_node["values_indices_broadcast"] == pytest.approx(866.9, abs=0.05)
    assert per_node["values_links"] == pytest.approx(2 * 750.6, abs=0.1)
    assert ledger.paper_megabytes() == pytest.approx(750.6, abs=0.05)
    assert ledger.packets.tolist() == [8 * 16] * 10


def test_the_papers_count_is_nominal() -> None:
    """The paper counts k float32 values per message, whatever its values and its dtype are."""
    messages = {"y": TopK(ratio=0.5)(np.zeros((2, 8)), Key(0, np.arange(2), 0), "y")}
    ledger = Ledger(range(2), [1, 1])
    ledger.record(messages, wire.measure(messages))
    assert ledger.paper_megabytes() == 4 * 4 / MEBIBYTE
    assert ledger.paper_megabytes({"y": 0.5}) == 2 * 4 / MEBIBYTE
    assert ledger.totals()["values_broadcast"] == 0


@pytest.mark.parametrize("blocks", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[3, 1], [2, 0]]])
def test_blocks_merge_to_the_whole(blocks: list[list[int]]) -> None:
    """However the rows are packed, the merged ledger is that of one block."""
    merged, whole = Ledger.merge(ledger_of(ids) for ids in blocks), ledger_of(range(4))
    assert merged.totals() == whole.totals()
    assert merged.links(STAR.neighbours) == whole.links(STAR.neighbours)
    assert merged.paper_megabytes() == whole.paper_megabytes()
    exported, expected = merged.export(), whole.export()
    assert exported.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(exported[name], expected[name])


def test_restored_ledgers_continue_counting() -> None:
    """Two rounds, export, restore into a fresh ledger, one more round: the same as three in a row."""
    half = ledger_of([1, 2], rounds=2).export()
    resumed = Ledger([1, 2], STAR.degree[[1, 2]])
    resumed.restore(half)
    messages = messages_of([1, 2], 2)
    resumed.record(messages, wire.measure(messages))
    straight = ledger_of([1, 2], rounds=3)
    for name, array in straight.export().items():
        np.testing.assert_array_equal(resumed.export()[name], array)


def test_reading_between_packets_changes_nothing() -> None:
    """Counts are right whenever they are read: after every packet, or at the end of a run only."""
    often, once = Ledger(range(4), STAR.degree), Ledger(range(4), STAR.degree)
    some = np.array([True, False, True, True])
    for step in range(40):
        messages = messages_of(range(4), step)
        if step % 3 == 0:
            del messages["x"]                               # another packet
        sends = some if step % 7 == 5 else None
        receivers = STAR.degree if step % 5 else np.full(4, step)      # a new array: in a star they change
        for ledger in (often, once):
            ledger.record(messages, wire.measure(messages), sends, receivers)
        assert often.packets[0] == step + 1
    exported = once.export()
    assert exported["packets"].tolist() == [40, 40 - 5, 40, 40]
    for name, array in often.export().items():
        np.testing.assert_array_equal(exported[name], array, err_msg=name)
    assert often.channels == once.channels == ("y", "x")


def test_restoring_discards_later_counts() -> None:
    """Counts since the export are discarded, new channels included."""
    ledger = Ledger([0], [3])
    empty = ledger.export()
    messages = messages_of([0])
    ledger.record(messages, wire.measure(messages))
    ledger.restore(empty)
    assert (ledger.bytes_broadcast, ledger.channels, ledger.packets.tolist()) == (0, (), [0])


def test_an_export_does_not_change() -> None:
    """A checkpoint keeps its counts while the run continues, before and after a restore."""
    ledger, messages = ledger_of([1, 2], rounds=2), messages_of([1, 2])
    kept, expected = ledger.export(), ledger_of([1, 2], rounds=2).export()
    for _ in range(2):
        ledger.record(messages, wire.measure(messages))
        for name, array in expected.items():
            np.testing.assert_array_equal(kept[name], array)
        ledger.restore(kept)


def test_another_packing_can_restore() -> None:
    """Exports of two blocks restore a block of other rows, each found by its node."""
    parts = [ledger_of(ids).export() for ids in ([0, 2], [1, 3])]
    other = Ledger([3, 2], STAR.degree[[3, 2]])
    other.restore(*parts)
    assert other.bytes_by_node().tolist() == [lengths()[3], lengths()[2]]


def test_wrong_parts_are_refused() -> None:
    """A node that is missing, or in two parts, or twice in a ledger, is an error and not a wrong total."""
    with pytest.raises(ValueError, match=r"no counts for nodes \[1\]"):
        Ledger([0, 1], [1, 1]).restore(ledger_of([0]).export())
    with pytest.raises(ValueError, match="more than one export"):
        Ledger.merge([ledger_of([0, 1]), ledger_of([1, 2])])
    with pytest.raises(ValueError, match="distinct nodes"):
        Ledger([1, 1], [1, 1])
    with pytest.raises(ValueError, match="a degree for each"):
        Ledger([0, 1], [1])


def test_the_order_of_channels_changes_no_bit() -> None:
    """A restored ledger has its channels in the order of a file; a sum of floats depends on the order."""
    exported = ledger_of([1, 2], rounds=2).export()
    table = next(table for name, table in exported.items() if name.startswith("channel."))
    plain = {name: value for name, value in exported.items() if not name.startswith("channel.")}
    counted = []
    for names in ("abc", "cba"):
        ledger = Ledger([1, 2], STAR.degree[[1, 2]])
        ledger.restore(plain | {f"channel.{name}": table for name in names})
        counted.append(ledger.paper_megabytes({"a": 0.1, "b": 1e9, "c": -1e9}))
    assert counted[0] == counted[1]


def test_a_new_ledger_is_empty() -> None:
    """Before the first packet every total is zero."""
    ledger = Ledger(range(3), [2, 2, 2])
    assert (ledger.bytes_broadcast, ledger.bytes_links, ledger.paper_megabytes()) == (0, 0, 0.0)
    assert set(ledger.totals().values()) == {0}
