"""Compute the clock of recorded traffic: closed forms, and a discrete-event simulation of single packets."""

import heapq
from collections.abc import Sequence
from typing import Any

import networkx as nx
import numpy as np
import pytest

from dbo.platform.network import timing
from dbo.platform.network.timing import Interval, Profile, TraceRow, replay

PAIR = ((1,), (0,))
RING = tuple(tuple(sorted(((i - 1) % 5, (i + 1) % 5))) for i in range(5))


def interval(exchanges: int, size: Any, compute: Any, nodes: int) -> Interval:
    """So many exchanges, with packets of `size` bytes and `compute` seconds before each."""
    return Interval(exchanges, np.full(nodes, 1.0) * size * exchanges, np.full(nodes, 1.0) * compute * exchanges)


def simulate(
    neighbours: Sequence[Sequence[int]], sizes: Any, compute: Any, exchanges: int, latency: Any, rate: Any
) -> float:
    """Return the end of the last exchange: an event per computation, per transmission and per arrival."""
    nodes = len(neighbours)
    exchange, missing = [0] * nodes, [[len(near) for _ in range(exchanges)] for near in neighbours]
    computed, waiting, is_sending = [-1.0] * nodes, [[] for _ in range(nodes)], [False] * nodes
    events: list[tuple[float, int, str, int, Any]] = []
    count, ends = 0, [0.0] * nodes

    def schedule(at: float, kind: str, node: int, about: Any = None) -> None:
        nonlocal count
        count += 1
        heapq.heappush(events, (at, count, kind, node, about))

    def send_next(now: float, i: int) -> None:
        if is_sending[i] or not waiting[i]:
            return
        is_sending[i] = True
        j, number = waiting[i].pop(0)
        schedule(now + sizes[i] / rate(i, j, now), "sent", i, (j, number, latency(i, j, now)))

    def finish(now: float, i: int) -> None:
        """Begin the next exchange if this one's packets are here and the own computation is done."""
        number = exchange[i]
        if number < exchanges and computed[i] >= 0 and missing[i][number] == 0:
            exchange[i], computed[i], ends[i] = number + 1, -1.0, now
            if number + 1 < exchanges:
                schedule(now + compute[i], "computed", i, number + 1)

    for i in range(nodes):
        schedule(compute[i], "computed", i, 0)
    while events:
        now, _, kind, i, about = heapq.heappop(events)
        if kind == "computed":
            computed[i] = now
            waiting[i] += [(j, about) for j in sorted(neighbours[i])]
            send_next(now, i)
            finish(now, i)
        elif kind == "sent":
            j, number, delay = about
            schedule(now + delay, "arrived", j, number)
            is_sending[i] = False
            send_next(now, i)
        else:
            missing[i][about] -= 1
            finish(now, i)
    return max(ends)


def test_two_nodes_take_compute_plus_transmission_plus_latency() -> None:
    """1 Mbit/s is 125,000 bytes per second."""
    profile = Profile(latency_ms=20, bandwidth_mbit=1)
    times = replay(profile, PAIR, [interval(3, 12_500, 0.5, 2), interval(1, 0, 0.25, 2)])
    assert times == pytest.approx([3 * (0.5 + 0.1 + 0.02), 3 * 0.62 + 0.25 + 0.02])


def test_sends_of_a_node_share_its_uplink() -> None:
    """The second neighbour's packet leaves after the first one's."""
    path = ((1,), (0, 2), (1,))
    times = replay(Profile(latency_ms=0, bandwidth_mbit=8), path, [Interval(1, np.array([0, 1e6, 0]), np.zeros(3))])
    assert times == pytest.approx([2.0])


def test_uplink_that_is_still_busy_delays_the_next_packet() -> None:
    """Node 1 receives at once and computes in no time, but sends for two seconds in every exchange."""
    path = ((1,), (0, 2), (1,))
    sizes = Interval(3, np.array([0, 3e6, 0]), np.zeros(3))
    assert replay(Profile(latency_ms=0, bandwidth_mbit=8), path, [sizes]) == pytest.approx([6.0])


def test_without_packets_the_clock_is_the_computing_time() -> None:
    times = replay(Profile(compute=2), ((),), [Interval(0, np.zeros(1), np.array([1.5]))])
    assert times == pytest.approx([3.0])


@pytest.mark.parametrize("seed", range(12))
def test_recursion_equals_a_discrete_event_simulation(seed: int) -> None:
    """Random graphs, sizes and speeds; latency and rate of every link differ and change at 0.4 and 1.1 seconds."""
    draw = np.random.default_rng(seed)
    nodes = int(draw.integers(2, 9))
    graph: Any = nx.connected_watts_strogatz_graph(nodes, 2, 0.5, seed=seed) if nodes > 3 else nx.path_graph(nodes)
    neighbours = tuple(tuple(sorted(graph.neighbors(i))) for i in range(nodes))
    trace = tuple(
        TraceRow(seconds=at, sender=i, receiver=j, latency_ms=draw.uniform(0, 80), bandwidth_mbit=draw.uniform(0.5, 20))
        for at in (0.0, 0.4, 1.1) for i in range(nodes) for j in neighbours[i]
    )
    table = {(row.seconds, row.sender, row.receiver): row for row in trace}

    def segment(now: float) -> float:
        return max(at for at in (0.0, 0.4, 1.1) if at <= now)

    sizes, compute, exchanges = draw.uniform(100, 1e5, nodes), draw.uniform(0, 0.1, nodes), 25
    expected = simulate(
        neighbours, sizes, compute, exchanges,
        latency=lambda i, j, now: table[segment(now), i, j].latency_ms / 1000,
        rate=lambda i, j, now: table[segment(now), i, j].bandwidth_mbit * 125_000,
    )
    found = replay(Profile(trace=trace), neighbours, [Interval(exchanges, sizes * exchanges, compute * exchanges)])
    assert found[-1] == pytest.approx(expected, rel=1e-12)


def test_simulation_without_the_shared_uplink_differs() -> None:
    """The comparison can fail: a simulation that sends to all neighbours at once is faster."""
    sizes, compute = np.full(5, 1e5), np.zeros(5)
    serial = simulate(RING, sizes, compute, 4, lambda i, j, now: 0.01, lambda i, j, now: 1e6)
    parallel = simulate(RING, sizes / 2, compute, 4, lambda i, j, now: 0.01, lambda i, j, now: 1e6)
    found = replay(Profile(latency_ms=10, bandwidth_mbit=8), RING, [interval(4, 1e5, 0, 5)])[-1]
    assert found == pytest.approx(serial)
    assert found > 1.5 * parallel


def test_intervals_can_be_split() -> None:
    profile = Profile(latency_ms=5, bandwidth_mbit=2, compute_noise=0.4, latency_noise=0.3, seed=3)
    whole = replay(profile, RING, [interval(10, 5e4, 0.02, 5)])
    parts = replay(profile, RING, [interval(4, 5e4, 0.02, 5), interval(6, 5e4, 0.02, 5)])
    assert parts[-1] == pytest.approx(whole[-1], rel=1e-12)


def test_noise_does_not_depend_on_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing a few exchanges at a time gives the same numbers."""
    profile = Profile(compute_noise=0.4, latency_noise=0.3)
    at_once = replay(profile, RING, [interval(30, 5e4, 0.02, 5)])
    monkeypatch.setattr(timing, "_DRAWS", 40)
    assert replay(profile, RING, [interval(30, 5e4, 0.02, 5)]) == pytest.approx(at_once, rel=1e-12)


def test_seed_decides_noise_and_stragglers() -> None:
    def clock(seed: int) -> float:
        profile = Profile(compute_noise=0.5, stragglers=0.2, slowdown=3, seed=seed)
        return float(replay(profile, RING, [interval(5, 100, 0.1, 5)])[-1])

    assert clock(0) == clock(0)
    assert clock(0) != clock(1)


def test_one_straggler_slows_everybody_down() -> None:
    fast = replay(Profile(latency_ms=0), RING, [interval(10, 0, 0.1, 5)])[-1]
    slow = replay(Profile(latency_ms=0, stragglers=0.2, slowdown=4), RING, [interval(10, 0, 0.1, 5)])[-1]
    assert slow == pytest.approx(4 * fast)


def test_regions_repeat_over_the_nodes() -> None:
    profile = Profile(latency_ms=1, regions=("a", "b"), region_latency_ms=(0.0, 50.0, 50.0, 0.0))
    links = timing.build_links(profile, RING)
    between = {(i, j): links.latency[0, k] for i in range(5) for k in range(links.offsets[i], links.offsets[i + 1])
               for j in [int(links.receivers[k])]}
    assert between[0, 1] == pytest.approx(0.051)
    assert between[0, 4] == pytest.approx(0.001)


def test_region_table_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="region_latency_ms: 3 values for 2 regions; must be 2 × 2"):
        Profile(regions=("a", "b"), region_latency_ms=(0.0, 1.0, 2.0))
