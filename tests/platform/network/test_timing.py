"""Compute the clock of recorded traffic: closed forms, and a discrete-event simulation of single packets."""

import heapq
import math
from collections.abc import Sequence
from typing import Any

import networkx as nx
import numpy as np
import pytest

from dbo.platform.network import timing
from dbo.platform.network.timing import Interval, Profile, StarInterval, TraceRow, replay, replay_star

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


def test_computing_times_repeat_over_the_nodes() -> None:
    """Of five nodes the second and the fourth are slow; in a star the server is the last one. Control: one number."""
    profile = Profile(latency_ms=0, compute=(1, 3), stragglers=1, slowdown=2)
    traffic = Interval(0, np.zeros(5), np.array([1.0, 0.1, 1.5, 1.2, 0.0]))
    assert replay(profile, RING, [traffic]) == pytest.approx([2 * 3 * 1.2])
    assert replay(Profile(compute=3), RING, [traffic]) == pytest.approx([3 * 1.5])
    star = StarInterval(1, np.ones(4, dtype=np.int64), 3, np.zeros(4), np.array([1.0, 0.5, 1.0, 0.25]))
    assert replay_star(Profile(latency_ms=0, compute=(1, 3)), 3, [star]) == pytest.approx([3 * 0.25 + 3 * 0.5])


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


# ---- stars -----------------------------------------------------------------------------------------------------------


def star_interval(
    rounds: int, clients: int, size: float = 0.0, compute: float = 0.0, taking_part: int | None = None
) -> StarInterval:
    """Rounds of an exchange down and one up: packets of `size` bytes, `compute` seconds of a client before each."""
    number = clients if taking_part is None else taking_part
    packets = np.array([rounds * number // clients] * clients + [rounds])
    return StarInterval(
        rounds, packets, rounds * number, size * packets, np.append(np.full(clients, rounds * compute), 0.0))


def deal(counts: Sequence[int], exchanges: int) -> list[set[int]]:
    """Return the clients of each exchange: the packets of all, one after the other, are dealt in turn."""
    packets = [client for client, count in enumerate(counts) for _ in range(count)]
    return [set(packets[first::exchanges]) for first in range(exchanges)]


def simulate_star(
    down: Sequence[set[int]], up: Sequence[set[int]], sizes: Any, compute: Any, latency: Any, rate: Any
) -> float:
    """Return the end of the last exchange; the clients of each exchange down and of the one up after it are given."""
    server = len(sizes) - 1
    missing, has_computed = [len(senders) for senders in up], [False] * len(down)
    waiting: list[list[Any]] = [[] for _ in sizes]
    is_sending = [False] * len(sizes)
    events: list[tuple[float, int, str, int, Any]] = []
    count, end = 0, 0.0

    def schedule(at: float, kind: str, node: int, about: Any) -> None:
        nonlocal count
        count += 1
        heapq.heappush(events, (at, count, kind, node, about))

    def send_next(now: float, i: int) -> None:
        if not is_sending[i] and waiting[i]:
            is_sending[i] = True
            j, number = waiting[i].pop(0)
            schedule(now + sizes[i] / rate(i, j, now), "sent", i, (j, number, latency(i, j, now)))

    def begin_next(now: float, number: int) -> None:
        if has_computed[number] and missing[number] == 0 and number + 1 < len(down):
            schedule(now + compute[server], "computed", server, number + 1)

    schedule(compute[server], "computed", server, 0)
    while events:
        now, _, kind, i, about = heapq.heappop(events)
        if kind == "sent":
            j, number, delay = about
            schedule(now + delay, "arrived", j, number)
            is_sending[i] = False
            send_next(now, i)
            continue
        end = now
        if kind == "computed":
            waiting[i] += [(j, about) for j in sorted(down[about])] if i == server else [(server, about)]
            send_next(now, i)
            if i == server:
                has_computed[about] = True
                begin_next(now, about)
        elif i == server:
            missing[about] -= 1
            begin_next(now, about)
        elif i in up[about]:
            schedule(now + compute[i], "computed", i, about)
    return end


def test_a_round_of_a_star_takes_the_latency_twice() -> None:
    """20 rounds of ten clients at 1 s: 40 s, also if two of ten take part; and the intervals may be split."""
    profile = Profile(latency_ms=1000, bandwidth_mbit=math.inf)
    for taking_part in (10, 2):
        times = replay_star(profile, 10, [star_interval(5, 10, 1e6, 0, taking_part)] * 4)
        assert times == pytest.approx([10.0, 20.0, 30.0, 40.0])


def test_a_servers_uplink_sends_to_one_client_after_another() -> None:
    """1 MB takes 1 s. The last of four clients receives after 4 s and answers until 5 s; of two, until 3 s."""
    profile = Profile(latency_ms=0, bandwidth_mbit=8)
    assert replay_star(profile, 4, [star_interval(10, 4, 1e6)]) == pytest.approx([50.0])
    assert replay_star(profile, 4, [star_interval(10, 4, 1e6, 0, 2)]) == pytest.approx([30.0])


@pytest.mark.parametrize("taking_part", ["all", "some", "some answer"])
@pytest.mark.parametrize("seed", range(6))
def test_star_equals_a_discrete_event_simulation(taking_part: str, seed: int) -> None:
    """Random sizes and speeds; latency and rate of every link differ and change at 0.4 and 1.1 seconds.

    Clients take part in all exchanges, or each in a number of its own, or receive all packets and answer some.
    """
    draw = np.random.default_rng(seed)
    clients, rounds = int(draw.integers(2, 9)), 25
    trace = tuple(
        TraceRow(seconds=at, sender=i, receiver=j, latency_ms=draw.uniform(0, 80), bandwidth_mbit=draw.uniform(0.5, 20))
        for at in (0.0, 0.4, 1.1) for k in range(clients) for i, j in ((k, clients), (clients, k))
    )
    table = {(row.seconds, row.sender, row.receiver): row for row in trace}

    def segment(now: float) -> float:
        return max(at for at in (0.0, 0.4, 1.1) if at <= now)

    sizes, compute = draw.uniform(100, 1e5, clients + 1), draw.uniform(0, 0.1, clients + 1)
    counts = np.full(clients, rounds) if taking_part == "all" else draw.integers(1, rounds, clients)
    up = deal(counts.tolist(), rounds)
    down = up if taking_part != "some answer" else [set(range(clients))] * rounds
    expected = simulate_star(
        down, up, sizes, compute,
        latency=lambda i, j, now: table[segment(now), i, j].latency_ms / 1000,
        rate=lambda i, j, now: table[segment(now), i, j].bandwidth_mbit * 125_000,
    )
    packets = np.append(counts, rounds)
    found = replay_star(Profile(trace=trace), clients, [
        StarInterval(rounds, packets, sum(map(len, down)), sizes * packets, compute * rounds)])
    assert found[-1] == pytest.approx(expected, rel=1e-12)


def test_which_clients_take_part_does_not_matter_if_they_are_alike() -> None:
    """Sampled anew in every round, as methods do. Control: with another number of clients the time differs."""
    draw, sizes, compute = np.random.default_rng(0), np.full(11, 1e5), np.append(np.full(10, 0.02), 0.01)
    sampled = [set(draw.choice(10, 3, replace=False).tolist()) for _ in range(50)]
    packets = np.array([sum(client in some for some in sampled) for client in range(10)] + [50])
    expected = simulate_star(sampled, sampled, sizes, compute, lambda i, j, now: 0.03, lambda i, j, now: 1e6)
    profile = Profile(latency_ms=30, bandwidth_mbit=8)
    interval = StarInterval(50, packets, 150, sizes * packets, compute * 50)
    assert replay_star(profile, 10, [interval])[-1] == pytest.approx(expected, rel=1e-12)
    more = [some | {next(iter(set(range(10)) - some))} for some in sampled]
    assert simulate_star(more, more, sizes, compute, lambda i, j, now: 0.03, lambda i, j, now: 1e6) > 1.2 * expected


def test_simulation_of_a_star_that_sends_at_once_differs() -> None:
    """The comparison can fail: a server that serves all clients at once is faster, and so is a star as a graph."""
    sizes, compute = np.full(6, 1e5), np.zeros(6)
    everybody = [set(range(5))] * 4
    serial = simulate_star(everybody, everybody, sizes, compute, lambda i, j, now: 0.01, lambda i, j, now: 1e6)
    at_once = simulate_star(
        everybody, everybody, sizes, compute, lambda i, j, now: 0.01, lambda i, j, now: 5e6 if i == 5 else 1e6)
    profile = Profile(latency_ms=10, bandwidth_mbit=8)
    found = replay_star(profile, 5, [star_interval(4, 5, 1e5)])[-1]
    assert found == pytest.approx(serial)
    assert found > 1.5 * at_once
    graph = ((5,),) * 5 + (tuple(range(5)),)
    assert found > 1.1 * replay(profile, graph, [interval(4, 1e5, 0, 6)])[-1]


@pytest.mark.parametrize(("up", "down", "seconds"), [(6, 6, 12), (6, 3, 6), (3, 6, 7), (6, 0, 1), (0, 6, 1)])
def test_exchanges_down_and_up_alternate(up: int, down: int, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All take place, in turn: 1 s each. Further ones in one direction do not wait for an answer."""
    clocks = []

    def run(*arguments: Any) -> None:
        timing._run_star(*arguments)
        clocks.append(arguments[10][1:].tolist())

    monkeypatch.setattr(timing, "_star_kernel", lambda: run)
    monkeypatch.setattr(timing, "_DRAWS", 12)                 # two exchanges at a time
    interval = StarInterval(up, np.array([up, up, up, down]), 3 * down, np.zeros(4), np.zeros(4))
    profile = Profile(latency_ms=1000, bandwidth_mbit=math.inf, latency_noise=1e-12)
    assert replay_star(profile, 3, [interval]) == pytest.approx([seconds])
    assert clocks[-1] == [up, down]
    assert all(abs(ups * down - downs * up) <= 2 * max(up, down) for ups, downs in clocks)


def test_noise_of_a_star_does_not_depend_on_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing a few exchanges at a time gives the same numbers, and the same clients."""
    profile = Profile(compute_noise=0.4, latency_noise=0.3)
    traffic = [star_interval(30, 5, 5e4, 0.02, 2)]
    at_once = replay_star(profile, 5, traffic)
    assert at_once != pytest.approx(replay_star(Profile(), 5, traffic))
    monkeypatch.setattr(timing, "_DRAWS", 70)
    assert replay_star(profile, 5, traffic) == pytest.approx(at_once, rel=1e-12)


def test_the_server_is_no_straggler() -> None:
    """Slow nodes are drawn among the clients, the same ones as on a graph."""
    alone = StarInterval(10, np.full(6, 10), 50, np.zeros(6), np.append(np.zeros(5), 1.0))
    for seed in range(6):
        profile = Profile(latency_ms=0, stragglers=0.8, slowdown=9, seed=seed)
        assert replay_star(profile, 5, [alone]) == pytest.approx([1.0])


def test_computing_of_a_client_counts_where_it_takes_part() -> None:
    """Two of ten clients in each round, 0.5 s before a packet; who sends nothing computes at the start."""
    profile = Profile(latency_ms=0)
    assert replay_star(profile, 10, [star_interval(10, 10, 0, 0.5, 2)]) == pytest.approx([5.0])
    nothing = StarInterval(0, np.zeros(3, dtype=np.int64), 0, np.zeros(3), np.array([1.0, 2.0, 0.0]))
    assert replay_star(profile, 2, [nothing]) == pytest.approx([2.0])
