"""Arrange a problem and its network as an algorithm needs them: as given, with a server, or pooled on one machine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from array_api_compat import array_namespace

from dbo.algorithms.api import Algorithm, Array
from dbo.platform.engine.shard_wrappers import WrappedProblem, pool_nodes
from dbo.platform.network.topology import Network, server_network, single_node
from dbo.tasks.api import Batches, Problem
from dbo.tasks.api import Shard as TaskShard


def arrange(algorithm: Algorithm, problem: Problem, network: Network) -> tuple[Problem, Network]:
    """Return the problem and the network on which an algorithm runs, given those of the experiment."""
    if algorithm.network == "single":
        return pool_nodes(problem), single_node()
    if algorithm.network == "star":
        return add_server(problem), server_network(problem.nodes)
    return problem, network


def add_server(problem: Problem) -> Problem:
    """Return the same problem with one more node, the last one: a server without data."""
    return _StarProblem(problem, nodes=problem.nodes + 1)


class _StarProblem(WrappedProblem):
    def shard(self, ids: Sequence[int]) -> TaskShard:
        server = self.problem.nodes
        own = [node for node in ids if node != server]
        inner = self.problem.shard(own or [0])      # the server needs the common start alone
        names = dict(zip(own, inner.ids.tolist(), strict=False)) | {server: server}
        rows = np.zeros(len(ids), dtype=np.int64)
        return StarShard(
            np.array([names[node] for node in ids], dtype=np.int64), inner.seed, inner.x0[rows], inner.y0[rows],
            inner if own else None, server, tuple(node != server for node in ids),
        )


@dataclass(frozen=True, eq=False)
class StarShard(TaskShard):
    """Rows of clients, and of the server: its f and g are 0, and so are their derivatives."""

    shard: TaskShard | None         # of the clients; None: the block hosts the server alone
    number: int                     # of clients in the whole network
    is_client: tuple[bool, ...]     # by row

    @property
    def clients(self) -> int:
        return self.number

    @property
    def sizes(self) -> tuple[Array, Array]:
        lower, upper = np.zeros((2, self.nodes), dtype=np.int64)
        if self.shard is not None:
            lower[list(self.is_client)], upper[list(self.is_client)] = self.shard.sizes
        return lower, upper

    def draw_batch(self, batches: Batches, round_: int, step: int) -> TaskShard:
        return self if self.shard is None else replace(self, shard=self.shard.draw_batch(batches, round_, step))

    def _call(self, oracle: str, like: Array, *rows: Array) -> Array:
        """Return the clients' rows of an oracle, and zeros in the shape of `like` for the server."""
        if self.shard is None:
            return 0 * like
        call: Callable[..., Array] = getattr(self.shard, oracle)
        if all(self.is_client):
            return call(*rows)
        if self.is_client[-1]:          # the server is not the last row of the block
            return self._call_unordered(call, like, *rows)
        of_clients = call(*(row[:-1] for row in rows))
        whole: Array = array_namespace(like).concat([of_clients, 0 * like[-1:]])
        return whole

    def _call_unordered(self, call: Callable[..., Array], like: Array, *rows: Array) -> Array:
        at = self.is_client.index(False)
        xp = array_namespace(like)
        of_clients = call(*(xp.concat([row[:at], row[at + 1 :]]) for row in rows))
        whole: Array = xp.concat([of_clients[:at], 0 * like[at : at + 1], of_clients[at:]])
        return whole

    def f(self, x: Array, y: Array) -> Array:
        return self._call("f", x[:, 0], x, y)

    def g(self, x: Array, y: Array) -> Array:
        return self._call("g", x[:, 0], x, y)

    def f_x(self, x: Array, y: Array) -> Array:
        return self._call("f_x", x, x, y)

    def f_y(self, x: Array, y: Array) -> Array:
        return self._call("f_y", y, x, y)

    def g_x(self, x: Array, y: Array) -> Array:
        return self._call("g_x", x, x, y)

    def g_y(self, x: Array, y: Array) -> Array:
        return self._call("g_y", y, x, y)

    def g_yy(self, x: Array, y: Array, v: Array) -> Array:
        return self._call("g_yy", y, x, y, v)

    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        return self._call("g_xy", x, x, y, v)
