"""The in-process engine: all blocks in this process, in lockstep, without any transport.

One block of all nodes is what experiments use: rows are stacked, nothing is encoded, every byte counted. With several
blocks the packets are really encoded and decoded between them; tests hold the two against each other.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from threadpoolctl import ThreadpoolController

from dbo.algorithms.protocol import Array
from dbo.algorithms.registry import Algorithm
from dbo.platform.engine.base import Blocks, in_node_order, most
from dbo.platform.engine.block import Host, Packets
from dbo.platform.engine.device import arithmetic
from dbo.platform.engine.state_tree import Flat, parts
from dbo.platform.network.ledger import Ledger
from dbo.platform.network.topology import Network
from dbo.tasks.api import Problem


class LocalEngine:
    """Drives hosts in lockstep."""

    def __init__(
        self,
        algorithm: Algorithm,
        config: Any,
        problem: Problem,
        network: Network,
        blocks: Blocks,
        threads: int = 1,
    ) -> None:
        self._threads, self._pools = threads, ThreadpoolController()
        with self._arithmetic():
            self.hosts = [Host(algorithm, config, problem, network, ids) for ids in blocks]
        self.blocks: Blocks = [list(ids) for ids in blocks]

    def _arithmetic(self) -> AbstractContextManager[None]:
        return arithmetic(self._pools, self._threads)

    def advance(self, round_: int) -> None:
        with self._arithmetic():
            said = [host.begin(round_) for host in self.hosts]
            while any(packets is not None for packets in said):
                posted: Packets = {}
                for packets in said:
                    posted |= packets or {}
                said = [host.step(posted) for host in self.hosts]

    def rows(self, name: str) -> Array | None:
        if not hasattr(self.hosts[0].algorithm.state, name) and not hasattr(self.hosts[0].state, name):
            return None
        if len(self.hosts) == 1:
            return self.hosts[0].rows(name)
        return in_node_order(self.blocks, (host.rows(name) for host in self.hosts))

    def losses(self, x: Array, y: Array) -> tuple[Array, Array]:
        with self._arithmetic():
            f, g = zip(*(host.losses(x, y) for host in self.hosts), strict=True)
        return in_node_order(self.blocks, f), in_node_order(self.blocks, g)

    def sick(self) -> str | None:
        return next((name for host in self.hosts if (name := host.sick())), None)

    def counters(self) -> Mapping[str, int]:
        return most(host.counters() for host in self.hosts)

    def ledger(self) -> Ledger:
        return Ledger.merge([host.ledger for host in self.hosts])

    def snapshot(self) -> Iterator[Iterator[Flat]]:
        for host in self.hosts:
            yield map(host.snapshot, parts(host.sizes()))

    def restore(self, blocks: list[Flat] | None) -> None:
        flats = blocks if blocks is not None else [None] * len(self.hosts)
        for host, flat in zip(self.hosts, flats, strict=True):
            host.restore(flat)

    def revive(self) -> None:
        """Nothing to do: blocks in this process die only with it."""

    def observe(self, record: Mapping[str, Any]) -> None:
        """Nobody watches a process from outside."""

    def close(self) -> None:
        for host in self.hosts:
            host.abandon()
