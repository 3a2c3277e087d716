"""Exchange rows with a server: `average`, `broadcast` and `aggregate`, beside `mix`, for methods with `network="star"`.

The server is a node without data: the last row of the network. Its oracles return zeros, so a line of an algorithm
holds for clients and server alike. `clients = sample_clients(shard, cfg.participation, st.t)` chooses who takes part in
a round; all others neither send nor receive.

    d = await average(clients, d)         # up: the server gets the mean over the clients, a client gets 0
    x = await broadcast(clients, x)       # down: a client gets the server's row; who receives nothing keeps its own
    q = await aggregate(clients, q)       # both: the mean, at the server and at the clients
"""

from collections.abc import Awaitable, Generator
from dataclasses import dataclass
from typing import Any, overload
from zlib import crc32

import array_api_compat
import numpy as np

from dbo.algorithms.gossip import Message, Mixed, Outgoing, Packed, make_outgoing
from dbo.algorithms.protocol import Array, CountsRows, Shard

Rows = Array | Message | Packed


@dataclass(frozen=True, slots=True)
class Clients:
    """The clients that take part in a round."""

    shard: Shard                    # the block's oracles; calls count for the rows that take part
    present: Array                  # (nodes, 1) True: the row is a client that takes part
    participants: frozenset[int]    # their numbers, of the whole network

    def keep(self, new: Array, old: Array) -> Array:
        """Return the new rows of clients that take part, the old rows of all others."""
        xp = array_api_compat.array_namespace(new)
        kept: Array = xp.where(xp.asarray(self.present, device=array_api_compat.device(new)), new, old)
        return kept

    def at_server(self, rows: Array) -> Array:
        """Return the server's row; zeros at all others."""
        xp = array_api_compat.array_namespace(rows)
        is_server = np.asarray(self.shard.ids)[:, None] == self.shard.clients
        there: Array = xp.where(xp.asarray(is_server, device=array_api_compat.device(rows)), rows, 0 * rows)
        return there


def sample_clients(shard: Shard, participation: float, rounds_done: Array) -> Clients:
    """Return the clients of the coming round: a share of all, the same ones in every block.

    The draw is keyed by the seed and the round, whatever the packing; `rounds_done` is the (nodes, 1) counter.
    """
    count = shard.clients
    if not count:
        raise ValueError('sample_clients(...) needs a server: declare network="star" in @algorithm(...)')
    number = max(1, round(participation * count))
    chosen = range(count)
    if number < count:
        round_ = int(rounds_done[0, 0]) if len(rounds_done) else 0
        generator = np.random.default_rng([shard.seed, crc32(b"participation"), round_])
        chosen = generator.choice(count, size=number, replace=False).tolist()
    participants = frozenset(chosen)
    present = np.array([int(node) in participants for node in shard.ids], dtype=bool)
    counted = shard.only(present) if isinstance(shard, CountsRows) else shard
    return Clients(counted, present[:, None], participants)


@overload
def average(clients: Clients, rows: Rows, /) -> Awaitable[Array]: ...
@overload
def average(clients: Clients, /, **channels: Rows) -> Awaitable[Mixed]: ...
def average(clients: Clients, /, *rows: Rows, **channels: Rows) -> Outgoing:
    """Send the clients' rows up in one packet each; awaiting it gives the server their mean, and a client 0."""
    return make_outgoing("average", rows, channels, route="up", participants=clients.participants)


@overload
def broadcast(clients: Clients, rows: Rows, /) -> Awaitable[Array]: ...
@overload
def broadcast(clients: Clients, /, **channels: Rows) -> Awaitable[Mixed]: ...
def broadcast(clients: Clients, /, *rows: Rows, **channels: Rows) -> Outgoing:
    """Send the server's rows down in one packet; awaiting it gives them to the clients, others keep their own."""
    return make_outgoing("broadcast", rows, channels, route="down", participants=clients.participants)


@dataclass(frozen=True, slots=True)
class _RoundTrip:
    """An average, then a broadcast of it: two packets."""

    clients: Clients
    up: Outgoing

    def __await__(self) -> Generator[Outgoing, tuple[Array, ...], Any]:
        mean = yield from self.up.__await__()
        if self.up.single:
            return (yield from broadcast(self.clients, mean).__await__())
        named = dict(zip(self.up.channels, mean, strict=True))
        return (yield from broadcast(self.clients, **named).__await__())


@overload
def aggregate(clients: Clients, rows: Rows, /) -> Awaitable[Array]: ...
@overload
def aggregate(clients: Clients, /, **channels: Rows) -> Awaitable[Mixed]: ...
def aggregate(clients: Clients, /, *rows: Rows, **channels: Rows) -> Any:
    """Send rows up and their mean down again; awaiting it gives the mean to the server and to the clients."""
    return _RoundTrip(clients, make_outgoing("aggregate", rows, channels, "up", clients.participants))


def server_row(rows: Array) -> Array:
    """Return the server's row, for claims: all nodes are in one block there, the server last."""
    row: Array = rows[-1]
    return row


def mean_of_clients(rows: Array) -> Array:
    """Return the mean over the clients, for claims: all rows but the last."""
    average_row: Array = rows[:-1].mean(0)
    return average_row
