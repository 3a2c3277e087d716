"""Run all blocks in this process, in lockstep and without a transport.

Experiments use one block of all nodes: rows are stacked, nothing is encoded, every byte is counted. With several blocks
the packets between them are encoded and decoded; tests compare the two.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from threadpoolctl import ThreadpoolController

from dbo.algorithms.api import Algorithm, Array
from dbo.platform.config.schedules import Schedules
from dbo.platform.config.validation import DataclassInstance
from dbo.platform.engine.base import Blocks, gather_rows, max_counts, mean_of_sums
from dbo.platform.engine.block import Block, Packets, is_round_open
from dbo.platform.engine.common_point import Floats, Oracle
from dbo.platform.engine.device import numeric_context, open_device
from dbo.platform.engine.error_terms import merge_errors
from dbo.platform.engine.state_tree import Flat, chunk_names
from dbo.platform.network.ledger import Ledger
from dbo.platform.network.topology import Network
from dbo.tasks.api import Batches, Problem


class LocalEngine:
    """Drive blocks in lockstep; `Engine` documents the methods."""

    def __init__(
        self,
        algorithm: Algorithm,
        config: DataclassInstance,
        problem: Problem,
        network: Network,
        blocks: Blocks,
        threads: int = 1,
        device: str = "cpu",
        batches: Batches | None = None,
        schedules: Schedules | None = None,
    ) -> None:
        opened = open_device(device)
        self._threads, self._pools = threads, ThreadpoolController()
        with numeric_context(self._pools, self._threads):
            self.local_blocks = [
                Block(
                    algorithm, config, problem, network, ids, device=opened, batches=batches, schedules=schedules)
                for ids in blocks
            ]
        self.blocks: Blocks = [list(ids) for ids in blocks]

    def advance(self, first: int, last: int | None = None) -> None:
        for round_ in range(first, (last or first) + 1):
            self.run_round(round_)

    def run_round(self, round_: int) -> None:
        with numeric_context(self._pools, self._threads):
            outgoing = [block.begin(round_) for block in self.local_blocks]
            while is_round_open(self.blocks, [block.progress() for block in self.local_blocks]):
                packets: Packets = {}
                for sent in outgoing:
                    packets |= sent or {}
                outgoing = [block.step(packets) for block in self.local_blocks]

    def rows(self, name: str) -> Array | None:
        if not self.local_blocks[0].has_rows(name):
            return None
        if len(self.local_blocks) == 1:
            return self.local_blocks[0].rows(name)
        return gather_rows(self.blocks, (block.rows(name) for block in self.local_blocks))

    def losses(self, x: Array, y: Array) -> tuple[Array, Array]:
        with numeric_context(self._pools, self._threads):
            f, g = zip(*(block.losses(x, y) for block in self.local_blocks), strict=True)
        return gather_rows(self.blocks, f), gather_rows(self.blocks, g)

    def mean_oracle(self, oracle: Oracle, x: Array, y: Array, v: Array | None = None) -> Floats:
        with numeric_context(self._pools, self._threads):
            return mean_of_sums(self.blocks, [block.sum_oracle(oracle, x, y, v) for block in self.local_blocks])

    def errors(self) -> dict[str, float]:
        return merge_errors([block.errors() for block in self.local_blocks])

    def first_nonfinite(self) -> str | None:
        return next((name for block in self.local_blocks if (name := block.first_nonfinite())), None)

    def counters(self) -> Mapping[str, int]:
        return max_counts(block.shard.counters() for block in self.local_blocks)

    def count_hosts(self) -> int:
        return 1

    def compute_seconds(self) -> list[float]:
        return [block.seconds for block in self.local_blocks]

    def ledger(self) -> Ledger:
        return Ledger.merge([block.ledger for block in self.local_blocks])

    def snapshot(self) -> Iterator[Iterator[Flat]]:
        for block in self.local_blocks:
            yield map(block.snapshot, chunk_names(block.sizes()))

    def restore(self, blocks: list[Flat] | None) -> None:
        flats = blocks if blocks is not None else [None] * len(self.local_blocks)
        for block, flat in zip(self.local_blocks, flats, strict=True):
            block.restore(flat)

    def replace_lost(self) -> None:
        """Do nothing: blocks in this process die only with it."""

    def export_metrics(self, record: Mapping[str, Any]) -> None:
        """Do nothing: there is no metrics agent."""

    def close(self) -> None:
        for block in self.local_blocks:
            block.abandon()
