"""Define what a run needs of an engine, and the helpers that all engines share."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, TypeAlias

import numpy as np

from dbo.algorithms.api import Algorithm, Array
from dbo.platform.config.plugins import Shipped
from dbo.platform.config.schedules import Schedules
from dbo.platform.config.validation import DataclassInstance
from dbo.platform.engine.common_point import Floats, Oracle
from dbo.platform.engine.state_tree import Flat
from dbo.platform.network.ledger import Ledger
from dbo.platform.network.topology import Network
from dbo.tasks.api import Batches, Problem

Blocks: TypeAlias = Sequence[Sequence[int]]      # the nodes of each block
Record: TypeAlias = dict[str, Any]               # the metrics of one evaluation, ready for JSON
Notify: TypeAlias = Callable[[str], None]        # shows the user a line, such as what the program waits for


def show_nothing(text: str) -> None:
    """Notify nobody."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Everything that an engine needs to start a run."""

    algorithm: Algorithm
    config: DataclassInstance           # of class `algorithm.config`
    problem: Problem
    network: Network
    experiment: dict[str, Any]          # resolved; Ray actors build the algorithm and its configuration from it
    blocks: Blocks | None = None        # the packing of the run that is resumed; None: the engine chooses one
    batches: Batches = field(default_factory=Batches)
    schedules: Schedules = field(default_factory=Schedules)
    plugins: tuple[Shipped, ...] = ()   # that other processes load before they unpickle the problem
    notify: Notify = show_nothing


def gather_rows(blocks: Blocks, parts: Iterable[Array]) -> Array:
    """Copy the rows of each block into one array, in node order."""
    parts = iter(parts)
    first = next(parts)
    rows: Array = np.empty((sum(map(len, blocks)), *first.shape[1:]), dtype=first.dtype)
    for ids, part in zip(blocks, chain([first], parts), strict=True):
        rows[list(ids)] = part
    return rows


def mean_of_sums(blocks: Blocks, sums: Iterable[Floats]) -> Floats:
    """Return the mean over all nodes from the blocks' sums over their own."""
    total: Floats | None = None
    for part in sums:
        total = np.array(part, dtype=np.float64) if total is None else np.add(total, part, out=total)
    assert total is not None, "there is at least one block"
    return np.divide(total, sum(map(len, blocks)), out=total)


def max_counts(blocks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the maximum of each count over all blocks."""
    counts = list(blocks)
    return {name: max(block[name] for block in counts) for name in counts[0]}


class Engine(Protocol):
    """Run all blocks of a network, in synchronous rounds.

    Every method may raise `BlocksLost` if processes have died. Then call `replace_lost`, `restore`, and continue.
    """

    blocks: Blocks

    def advance(self, first: int, last: int | None = None) -> None:
        """Run rounds `first` (1, 2, …) to `last` on every block; None: only the first."""

    def rows(self, name: str) -> Array | None:
        """Return x, y, z, direction or public copies of all nodes in node order; None if there are no such rows."""

    def losses(self, x: Array, y: Array) -> tuple[Array, Array]:
        """Return (nodes,) f_i and g_i of all nodes at one common point."""

    def mean_oracle(self, oracle: Oracle, x: Array, y: Array, v: Array | None = None) -> Floats:
        """Return the mean over nodes of an oracle at a common point (x, y), in float64; v: the factor of a product.

        The arrays x and y must not be changed while they are in use: an engine may send the same one only once.
        """

    def errors(self) -> dict[str, float]:
        """Return the errors that the algorithm's analysis bounds: root mean squares over the nodes."""

    def first_nonfinite(self) -> str | None:
        """Return the name of the first state array that contains NaN or inf; None if there is none."""

    def counters(self) -> Mapping[str, int]:
        """Return the oracle calls per node since the start, the maximum over nodes."""

    def count_hosts(self) -> int:
        """Return the number of machines that host blocks."""

    def compute_seconds(self) -> list[float]:
        """Return the computing time of each block since the start or the last `restore`."""

    def ledger(self) -> Ledger:
        """Return bytes, values and packets of all nodes since the start."""

    def snapshot(self) -> Iterator[Iterator[Flat]]:
        """Yield every block's state, ledger and counters, in chunks: never all of it is in memory twice."""

    def restore(self, blocks: list[Flat] | None) -> None:
        """Restore every block from a snapshot; None: reset all blocks to the start."""

    def replace_lost(self) -> None:
        """Replace processes that have died; the new ones have no state until `restore`."""

    def export_metrics(self, record: Mapping[str, Any]) -> None:
        """Export an evaluation to the monitoring system, if there is one."""

    def close(self) -> None:
        """Release everything that the engine has started."""
