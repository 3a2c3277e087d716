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
"""

from collections.abc import Iterator, Sequence
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
    compute: float = param(1.0, ge=0, help="computing time of a node as a multiple of the measured one")
    stragglers: float = param(0.0, ge=0, le=1, help="share of the nodes that are slow, drawn by `seed`")
    slowdown: float = param(5.0, ge=1, help="computing time of a slow node as a multiple of the others'")
    compute_noise: float = param(0.0, ge=0, help="σ of a log-normal factor on each computing time")
    latency_noise: float = param(0.0, ge=0, help="σ of a log-normal factor on each latency")
    seed: int = param(0, ge=0, help="of stragglers and noise")
    trace: tuple[TraceRow, ...] = ()

    def __post_init__(self) -> None:
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
    speed = profile.compute * _slow_down(profile, nodes)
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
    """Compile the recursion, with a cache on disk where that is possible; numba is imported when it is needed."""
    import numba

    try:
        return numba.njit(nogil=True, cache=True)(_run_exchanges)
    except RuntimeError:
        return numba.njit(nogil=True)(_run_exchanges)


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
