"""Plan who sends to whom in one step, and with which weights a block sums what it receives.

Gossip has one route, along the edges. A star has two, which depend on the clients of the round. Up: the server sums the
clients' rows with equal weights. Down: every client takes the server's row.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from dbo.platform.engine.device import Device, Mixing
from dbo.platform.network.topology import Network


@dataclass(frozen=True, slots=True, eq=False)
class RoutePlan:
    """One step of a block."""

    remote: tuple[int, ...]             # nodes of other blocks whose packets are needed, sorted
    senders: Mapping[int, int]          # node → row of those whose packets leave the block: only these are encoded
    receivers: NDArray[np.int64]        # (rows,) nodes that receive the row's packet
    sends: NDArray[np.bool_]            # (rows,) whether the row sends a packet
    weights: "csr_array[Any]"           # (rows, own and remote nodes in node order)
    own_at: NDArray[np.intp]            # columns of the own rows, and of the remote ones
    remote_at: NDArray[np.intp]
    apply_weights: Mixing


def plan_gossip(network: Network, ids: Sequence[int], device: Device) -> RoutePlan:
    """Plan a step along the edges: every row goes to all neighbours, weights are those of the network."""
    own = set(ids)
    remote = {j for i in ids for j in network.neighbours[i]} - own
    senders = {node: row for row, node in enumerate(ids) if any(j not in own for j in network.neighbours[node])}
    return _plan(network.weights, ids, remote, senders, network.degree[list(ids)], np.ones(len(ids), bool), device)


def plan_uplink(network: Network, ids: Sequence[int], present: NDArray[np.bool_], remote: set[int], device: Device,
                number: int) -> RoutePlan:
    """Plan a step from the clients that are present to the server, which averages `number` rows."""
    server = _server(network)
    columns = sorted({node for node, here in zip(ids, present, strict=True) if here} | remote)
    weights = _matrix(network.nodes, [server] * len(columns), columns, 1 / number)
    hosts_server = server in ids
    senders = {} if hosts_server else {node: row for row, node in enumerate(ids) if present[row]}
    return _plan(weights, ids, remote if hosts_server else (), senders, present.astype(np.int64), present, device)


def plan_downlink(network: Network, ids: Sequence[int], present: NDArray[np.bool_], remote: set[int], device: Device,
                  number: int) -> RoutePlan:
    """Plan a step from the server to the clients that are present; all other rows keep their own."""
    server = _server(network)
    sources = [server if here else node for node, here in zip(ids, present, strict=True)]
    weights = _matrix(network.nodes, ids, sources, 1.0)
    at = {node: row for row, node in enumerate(ids)}
    receivers = np.array([number if node == server else 0 for node in ids], dtype=np.int64)
    senders = {server: at[server]} if server in at and remote else {}
    needed = {server} if server not in at and present.any() else set()
    return _plan(weights, ids, needed, senders, receivers, receivers > 0, device)


def _server(network: Network) -> int:
    assert network.server is not None, "routes up and down need a server"
    return network.server


def _matrix(nodes: int, rows: Sequence[int], columns: Sequence[int], value: float) -> "csr_array[Any]":
    return csr_array((np.full(len(columns), value), (list(rows), list(columns))), shape=(nodes, nodes))


def _plan(
    weights: "csr_array[Any]", ids: Sequence[int], remote: Iterable[int], senders: Mapping[int, int],
    receivers: NDArray[np.int64], sends: NDArray[np.bool_], device: Device,
) -> RoutePlan:
    others = tuple(sorted(remote))
    order = sorted({*ids, *others})
    own_at, remote_at = np.searchsorted(order, ids), np.searchsorted(order, others)
    part = weights[list(ids)][:, order].tocsr()
    part.sort_indices()                  # sums run in node order, whatever the packing
    return RoutePlan(
        others, senders, receivers, sends, part, own_at, remote_at, device.mixing(part, own_at, remote_at))
