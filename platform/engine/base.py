"""What a run needs of an engine, whatever carries the messages."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np

from dbo.algorithms.protocol import Array
from dbo.algorithms.registry import Algorithm
from dbo.platform.engine.state_tree import Flat
from dbo.platform.network.ledger import Ledger
from dbo.platform.network.topology import Network
from dbo.tasks.api import Problem

Blocks = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Work:
    """What an engine is to run."""

    algorithm: Algorithm
    config: Any
    problem: Problem
    network: Network
    settings: dict[str, Any]            # the resolved experiment, for processes that build their part of it anew
    blocks: Blocks | None = None        # which nodes share a process, if an earlier run has settled it


def in_node_order(blocks: Blocks, parts: Iterable[Array]) -> Array:
    """The rows of all nodes, copied from those of each block."""
    parts = iter(parts)
    first = next(parts)
    whole: Array = np.empty((sum(map(len, blocks)), *first.shape[1:]), dtype=first.dtype)
    for ids, part in zip(blocks, chain([first], parts), strict=True):
        whole[list(ids)] = part
    return whole


def most(blocks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The largest count of all blocks."""
    counts = list(blocks)
    return {name: max(block[name] for block in counts) for name in counts[0]}


class Engine(Protocol):
    """Rows in blocks, blocks in processes, one synchronous round at a time.

    Every method may raise `BlocksLost` when processes have died: `revive`, then `restore`, and the run goes on.
    """

    blocks: Blocks

    def advance(self, round_: int) -> None:
        """Runs round `round_` (1, 2, …) on every block."""

    def rows(self, name: str) -> Array | None:
        """x, y, z or direction of all nodes in node order; None where the algorithm has no such rows."""

    def losses(self, x: Array, y: Array) -> tuple[Array, Array]:
        """(nodes,) f_i and g_i of all nodes at one common point."""

    def sick(self) -> str | None:
        """The first state array with NaN or inf in it."""

    def counters(self) -> Mapping[str, int]:
        """Oracle calls of a node since the start; where they are drawn, of the one that was asked most."""

    def ledger(self) -> Ledger:
        """Bytes, values and packets of all nodes since the start."""

    def snapshot(self) -> Iterator[Iterator[Flat]]:
        """Every block's state, ledger and counters, each in parts: not all of it is in memory twice at once."""

    def restore(self, blocks: list[Flat] | None) -> None:
        """Back to a snapshot, or to the start."""

    def revive(self) -> None:
        """Replaces processes that have died; their state is not there until `restore`."""

    def observe(self, record: Mapping[str, Any]) -> None:
        """Is shown every evaluation, for operators to see."""

    def close(self) -> None:
        """Ends all that the engine started."""
