"""Compute how long recorded traffic takes on a given network.

A synchronous run has the same trajectory on every network, so the time of each exchange follows from a recursion over
sums and maxima. Node i is ready to compute at r_i, and its uplink is free from u_i on. In one exchange

    done_i   = r_i + compute_i
    start_i  = max(done_i, u_i)
    sent_ij  = start_i + Σ_{k ≤ j} size_i / rate_ik          over its neighbours in node order
    u_i      ← sent_ij of its last neighbour
    r_i      ← max(done_i, max_j (sent_ji + latency_ji))

A node sends while it waits and computes. Packets of one evaluation interval have the same size and the same computing
time before them. Receiving takes no time of its own.

In a star (`replay_star`) exchanges down and up alternate. Down, the server s computes and sends to one client after
another; up, each client computes and sends, and the server waits for all of them:

    down:  done_s = r_s + compute_s,  start_s = max(done_s, u_s),  r_j ← max(r_j, sent_sj + latency_sj)
    up:    done_i = r_i + compute_i,  start_i = max(done_i, u_i),  r_s ← max(r_s, max_i (sent_is + latency_is))

The clients that take part in an exchange are those of `_spread`; the others wait.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from dbo.parameters import param

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_DRAWS = 1 << 22         # random numbers in memory at a time
_MBIT = 1e6 / 8          # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """From this time on, a link (or all links of a node, or all) has this latency and bandwidth."""

    seconds: float
    sender: int | None              # None: any
    receiver: int | None
    latency_ms: float
    bandwidth_mbit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A network: latency and bandwidth of its links, speed of its nodes."""

    latency_ms: float = param(0.1, ge=0, help="one-way latency of a link")
    bandwidth_mbit: float = param(1000.0, gt=0, help="uplink of a node in 10⁶ bits per second, shared by its sends")
    regions: tuple[str, ...] = param((), help="names; node i is in region i mod their number")
    region_latency_ms: tuple[float, ...] = param((), ge=0, help="latency between regions, row by row")
    compute: float | tuple[float, ...] = param(
        1.0, ge=0, help="computing time of a node as a multiple of the measured one; a list repeats over the nodes")
    stragglers: float = param(0.0, ge=0, le=1, help="share of the nodes that are slow, drawn by `seed`")
    slowdown: float = param(5.0, ge=1, help="computing time of a slow node as a multiple of the others'")
    compute_noise: float = param(0.0, ge=0, help="σ of a log-normal factor on each computing time")
    latency_noise: float = param(0.0, ge=0, help="σ of a log-normal factor on each latency")
    seed: int = param(0, ge=0, help="of stragglers and noise")
    trace: tuple[TraceRow, ...] = ()

    def __post_init__(self) -> None:
        if self.compute == ():
            raise ValueError("compute: [] is not allowed; must be a number, or a list with one number or more")
        if len(self.region_latency_ms) != len(self.regions) ** 2:
            raise ValueError(
                f"region_latency_ms: {len(self.region_latency_ms)} values for {len(self.regions)} regions; "
                f"must be {len(self.regions)} × {len(self.regions)}"
            )

    @property
    def has_noise(self) -> bool:
        return self.compute_noise > 0 or self.latency_noise > 0


@dataclass(frozen=True, slots=True, eq=False)
class Interval:
    """Traffic between two evaluations: what every node sent and computed in so many exchanges."""

    exchanges: int
    bytes: Floats            # (nodes,) of each node's packets, each counted once
    compute: Floats          # (nodes,) seconds


@dataclass(frozen=True, slots=True, eq=False)
class StarInterval:
    """Traffic of a star between two evaluations. The server is the last node; only it sends down.

    Who took part in which exchange is not recorded. A client takes part in as many exchanges up as it sent packets.
    """

    up: int                  # exchanges in which clients send
    packets: Integers        # (nodes,) of each client, at most `up`; of the server: exchanges down
    copies: int              # of the server's packets, one per client that receives one
    bytes: Floats            # (nodes,) of each node's packets, each counted once
    compute: Floats          # (nodes,) seconds

    @property
    def exchanges(self) -> int:
        return self.up + int(self.packets[-1])


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """The directed links of a graph, by sender and then receiver, and how latency and rate change with time."""

    offsets: Integers        # (nodes + 1,) of each sender's links
    receivers: Integers      # (links,)
    times: Floats            # (segments,) from when a segment holds; the first is 0
    latency: Floats          # (segments, links) seconds
    rate: Floats             # (segments, links) bytes per second


def build_links(profile: Profile, neighbours: Sequence[Sequence[int]]) -> Links:
    """Return the links of a graph with the profile's latencies and rates."""
    counts = [len(near) for near in neighbours]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    receivers = np.array([j for near in neighbours for j in sorted(near)], dtype=np.int64)
    senders = np.repeat(np.arange(len(neighbours)), counts)
    latency = np.full(receivers.size, profile.latency_ms * 1e-3)
    if profile.regions:
        count = len(profile.regions)
        latency += np.reshape(profile.region_latency_ms, (count, count))[senders % count, receivers % count] * 1e-3
    rate = np.full(receivers.size, profile.bandwidth_mbit * _MBIT)
    times, latencies, rates = [0.0], [latency], [rate]
    for row in sorted(profile.trace, key=lambda row: row.seconds):
        if row.seconds > times[-1]:
            times.append(row.seconds)
            latencies.append(latencies[-1].copy())
            rates.append(rates[-1].copy())
        chosen = np.ones(receivers.size, dtype=bool)
        if row.sender is not None:
            chosen &= senders == row.sender
        if row.receiver is not None:
            chosen &= receivers == row.receiver
        latencies[-1][chosen], rates[-1][chosen] = row.latency_ms * 1e-3, row.bandwidth_mbit * _MBIT
    return Links(offsets, receivers, np.array(times), np.stack(latencies), np.stack(rates))


def replay(profile: Profile, neighbours: Sequence[Sequence[int]], intervals: Sequence[Interval]) -> Floats:
    """Return the time at which the last node reaches the end of each interval, in seconds."""
    nodes = len(neighbours)
    links = build_links(profile, neighbours)
    speed = _find_speeds(profile, nodes) * _slow_down(profile, nodes)
    ready, free, times = np.zeros(nodes), np.zeros(nodes), np.empty(len(intervals))
    draws = _Draws(profile, nodes, links.receivers.size)
    for number, interval in enumerate(intervals):
        if interval.exchanges == 0:
            ready += speed * interval.compute
        else:
            compute = speed * interval.compute / interval.exchanges
            size = interval.bytes / interval.exchanges
            for factors in draws.draw(interval.exchanges):
                _kernel()(
                    ready, free, compute, size, links.offsets, links.receivers, links.times, links.latency, links.rate,
                    *factors,
                )
        times[number] = ready.max()
    return times


def replay_star(profile: Profile, clients: int, intervals: Sequence[StarInterval]) -> Floats:
    """Return the time at which the last node of a star reaches the end of each interval, in seconds."""
    server = clients
    links = build_links(profile, ((server,),) * clients + (tuple(range(clients)),))
    speed = _find_speeds(profile, clients + 1) * np.append(_slow_down(profile, clients), 1.0)      # no slow server
    ready, free, times = np.zeros(clients + 1), np.zeros(clients + 1), np.empty(len(intervals))
    draws = _Draws(profile, clients + 1, links.receivers.size)
    for number, interval in enumerate(intervals):
        down = int(interval.packets[server])
        seconds = speed * interval.compute
        turns = np.append(np.full(clients, interval.up), down)         # of computing; a client computes in its own ones
        ready += np.where(turns == 0, seconds, 0.0)
        compute = seconds / np.maximum(turns, 1)
        size = interval.bytes / np.maximum(interval.packets, 1)
        sends, receives = _spread_interval(interval)
        clock = np.array([interval.up if down else 0, 0, 0], dtype=np.int64)
        for factors in draws.draw(interval.exchanges):
            _star_kernel()(
                ready, free, compute, size, interval.up, down, *sends, *receives, clock,
                links.times, links.latency, links.rate, *factors,
            )
        times[number] = ready.max()
    return times


def _spread_interval(interval: StarInterval) -> tuple[tuple[Integers, Integers], tuple[Integers, Integers]]:
    """Return (count, first) of the exchanges up, and of those down, in which each client takes part.

    The clients of an exchange down are those of the next one up if the numbers allow it, as in all methods here.
    """
    sent, down = interval.packets[:-1], int(interval.packets[-1])
    sends = _spread(sent, interval.up)
    if down == interval.up and interval.copies == sent.sum():
        return sends, sends
    each, rest = divmod(interval.copies, max(sent.size, 1))
    received = np.minimum(each + (np.arange(sent.size) < rest), down)
    return sends, _spread(received, down)


def _spread(counts: Integers, exchanges: int) -> tuple[Integers, Integers]:
    """Spread the packets of clients evenly over exchanges: client i takes part in count_i of them, from first_i on.

    The packets of all clients, one after the other, are dealt to the exchanges in turn. So every exchange has the mean
    number of clients, rounded up or down, and no client is twice in one.
    """
    counts = counts.astype(np.int64)
    return counts, (np.cumsum(counts) - counts) % max(exchanges, 1)


def _find_speeds(profile: Profile, nodes: int) -> Floats:
    """Return (nodes,) multiples of the measured computing times; a list repeats over the nodes."""
    return np.resize(np.asarray(profile.compute, dtype=np.float64), nodes)


def _slow_down(profile: Profile, nodes: int) -> Floats:
    """Return (nodes,) factors on computing times: slow nodes are drawn by the seed."""
    factors = np.ones(nodes)
    slow = round(profile.stragglers * nodes)
    order = np.random.default_rng([profile.seed, crc32(b"stragglers")]).permutation(nodes)
    factors[order[:slow]] = profile.slowdown
    return factors


class _Draws:
    """Noise on computing times and latencies: two streams, read in the order of exchanges and then of nodes or links.

    The numbers depend on the seed and the graph alone, so all algorithms meet the same noise.
    """

    def __init__(self, profile: Profile, nodes: int, links: int) -> None:
        self._parts = [
            (np.random.default_rng([profile.seed, crc32(purpose)]), sigma, width)
            for purpose, sigma, width in (
                (b"compute", profile.compute_noise, nodes), (b"latency", profile.latency_noise, links)
            )
        ]
        self._at_once = max(1, _DRAWS // max(nodes, links, 1)) if profile.has_noise else 0

    def draw(self, exchanges: int) -> Iterator[tuple[int, Floats, Floats]]:
        """Yield (exchanges, factors of computing times, factors of latencies); a part without noise is empty."""
        if not self._at_once:
            yield exchanges, np.empty((0, 0)), np.empty((0, 0))
            return
        for start in range(0, exchanges, self._at_once):
            count = min(self._at_once, exchanges - start)
            compute, latency = (
                np.exp(sigma * generator.standard_normal((count, width))) if sigma else np.empty((0, 0))
                for generator, sigma, width in self._parts
            )
            yield count, compute, latency


@cache
def _kernel() -> Any:
    return _compile(_run_exchanges)


@cache
def _star_kernel() -> Any:
    return _compile(_run_star)


def _compile(function: Callable[..., None]) -> Any:
    """Compile a recursion, with a cache on disk where that is possible; numba is imported when it is needed."""
    import numba

    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:
        return numba.njit(nogil=True)(function)


def _run_exchanges(
    ready: Floats, free: Floats, compute: Floats, size: Floats,
    offsets: Integers, receivers: Integers, times: Floats, latency: Floats, rate: Floats,
    exchanges: int, compute_factor: Floats, latency_factor: Floats,
) -> None:
    """Run exchanges; `ready` and `free` are updated."""
    nodes, segments = ready.size, times.size
    arrived = np.empty(nodes)
    for exchange in range(exchanges):
        for i in range(nodes):
            seconds = compute[i]
            if compute_factor.size:
                seconds *= compute_factor[exchange, i]
            ready[i] += seconds                                   # done_i
            arrived[i] = ready[i]
        for i in range(nodes):
            at = max(ready[i], free[i])                           # start_i
            for link in range(offsets[i], offsets[i + 1]):
                segment = np.searchsorted(times, at, side="right") - 1 if segments > 1 else 0
                delay = latency[segment, link]
                if latency_factor.size:
                    delay *= latency_factor[exchange, link]
                at += size[i] / rate[segment, link]               # sent_ij
                j = receivers[link]
                arrived[j] = max(arrived[j], at + delay)
            free[i] = at
        for i in range(nodes):
            ready[i] = arrived[i]


def _run_star(
    ready: Floats, free: Floats, compute: Floats, size: Floats, up: int, down: int,
    sends: Integers, first_sent: Integers, receives: Integers, first_received: Integers, clock: Integers,
    times: Floats, latency: Floats, rate: Floats, exchanges: int, compute_factor: Floats, latency_factor: Floats,
) -> None:
    """Run exchanges of a star; `ready`, `free` and `clock` are updated.

    The links are those of the clients to the server, then those of the server, in the order of the clients. `clock` is
    (balance, exchanges up, exchanges down): balance spreads the exchanges down evenly among all, the first one down.
    """
    server, segments = ready.size - 1, times.size
    for exchange in range(exchanges):
        clock[0] += down
        is_down = clock[0] >= up + down
        if is_down:
            clock[0] -= up + down
            seconds = compute[server]
            if compute_factor.size:
                seconds *= compute_factor[exchange, server]
            ready[server] += seconds                                  # done_s
            free[server] = max(ready[server], free[server])           # start_s
        for i in range(server):
            if is_down and (clock[2] - first_received[i]) % down >= receives[i]:
                continue
            if not is_down and (clock[1] - first_sent[i]) % up >= sends[i]:
                continue
            sender, link = (server, server + i) if is_down else (i, i)
            if not is_down:
                seconds = compute[i]
                if compute_factor.size:
                    seconds *= compute_factor[exchange, i]
                ready[i] += seconds                                   # done_i
                free[i] = max(ready[i], free[i])                      # start_i
            segment = np.searchsorted(times, free[sender], side="right") - 1 if segments > 1 else 0
            delay = latency[segment, link]
            if latency_factor.size:
                delay *= latency_factor[exchange, link]
            free[sender] += size[sender] / rate[segment, link]        # sent_si or sent_is
            receiver = i if is_down else server
            ready[receiver] = max(ready[receiver], free[sender] + delay)
        clock[2 if is_down else 1] += 1
