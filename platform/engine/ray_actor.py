"""A block of nodes as a Ray actor: `Host` behind a door that Ray can knock at.

Nothing here waits: a step takes the packets of the neighbouring blocks as arguments, which Ray fetches before the
call, and returns the block's own packets into the object store. The driver only ever handles references to them.
"""

import os
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from dbo.algorithms.kernels.fused import is_wide
from dbo.algorithms.protocol import Array
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.block import Host, View
from dbo.platform.engine.device import arithmetic, choose, give_back
from dbo.platform.engine.state_tree import Flat
from dbo.platform.errors import NodeFailure
from dbo.platform.network.topology import Network
from dbo.tasks.api import Problem

# All packets of a block: their number, senders and lengths as int64, then one after the other. Ray hands `bytes` over
# without pickling, which counts for small ones; an array it shares between processes of a machine without copying it.
Payload = bytes | NDArray[np.uint8]
_SMALL = 1 << 16
T = TypeVar("T")


def pack(packets: dict[int, bytes]) -> Payload:
    """One buffer per block."""
    table = np.array([len(packets), *packets, *map(len, packets.values())], dtype=np.int64)
    whole = b"".join([table.tobytes(), *packets.values()])
    return whole if len(whole) < _SMALL else np.frombuffer(whole, dtype=np.uint8)


def unpack(payloads: Sequence[Payload]) -> dict[int, memoryview]:
    """Sender → its packet, without copying."""
    found: dict[int, memoryview] = {}
    for payload in payloads:
        view = payload.data if isinstance(payload, np.ndarray) else memoryview(payload)
        count = int(np.frombuffer(view, np.int64, count=1)[0])
        table = np.frombuffer(view, np.int64, count=2 * count, offset=8).tolist()
        start = 8 * (1 + 2 * count)
        for sender, length in zip(table[:count], table[count:], strict=True):
            found[sender] = view[start : start + length]
            start += length
    return found


class Block:
    """The actor: empty at first, then one block after another. What goes wrong is a `NodeFailure` that says where."""

    def __init__(self) -> None:
        self._ids: tuple[int, ...] = ()
        self._epoch = self._round = 0
        self._threads, self._pools = 1, ThreadpoolController()
        self._failure: NodeFailure | None = None

    def assign(
        self,
        problem: Problem,
        experiment: dict[str, Any],
        network: Network,
        ids: Sequence[int],
        epoch: int,
        threads: int,
        gpus: float,
    ) -> None:
        """Takes over the rows `ids` of a problem, at the start of a run."""
        self._ids, self._epoch, self._round, self._threads = tuple(ids), epoch, 0, threads
        self._failure = None

        def start() -> Host:
            parts = Experiment(**experiment).parts
            return Host(parts.algorithm, parts.config, problem, network, ids, epoch, choose(gpus))

        self._host = self._told("start", start)

    def ready(self) -> int:
        """The process that this block lives in."""
        return os.getpid()

    def idle(self) -> None:
        """Lets go of rows, state and data; the process waits for the next block."""
        if hasattr(self, "_host"):
            self._host.abandon()
            del self._host

    def begin(self, epoch: int, round_: int) -> Payload | None:
        """Starts a round; the first packets."""
        self._fence(epoch)
        self._round = round_
        return self._told("step 0", lambda: _packed(self._host.begin(round_)))

    def step(self, epoch: int, number: int, *payloads: Payload) -> Payload | None:
        """The next packets, or None when the round is over."""
        self._fence(epoch)
        return self._told(f"step {number}", lambda: _packed(self._host.step(unpack(payloads))))

    def rows(self, name: str) -> Array | None:
        known = hasattr(self._host.state, name)
        return self._told(f"gathering {name}", lambda: self._host.rows(name) if known else None)

    def losses(self, x: Array, y: Array) -> tuple[Array, Array]:
        return self._told("losses", lambda: self._host.losses(x, y))

    def view(self) -> View:
        self._rest()
        return self._told("evaluation", self._host.view)

    def sizes(self) -> dict[str, int]:
        self._rest()
        return self._told("snapshot", self._host.sizes)

    def snapshot(self, names: Sequence[str] | None = None) -> Flat:
        """All that is to be kept at a round's end, or the part of it with these names."""
        return self._told("snapshot", lambda: self._host.snapshot(names))

    def restore(self, flat: Flat | None, epoch: int) -> None:
        """Back to a snapshot, or to the start; from here on only packets of `epoch` are taken."""
        self._epoch, self._failure = epoch, None
        self._told("restore", lambda: self._host.restore(flat, epoch))

    def _fence(self, epoch: int) -> None:
        """A late call of an earlier epoch must not touch the state of this one."""
        if epoch != self._epoch:
            raise RuntimeError(f"a call of epoch {epoch} reached a block of epoch {self._epoch}")

    def _told(self, phase: str, work: Callable[[], T]) -> T:
        if self._failure is not None:
            raise self._failure     # later steps were submitted before this one failed: the first error counts
        try:
            with self._arithmetic():
                return work()
        except Exception as error:
            self._failure = NodeFailure(
                self._ids, self._round, phase, f"{type(error).__name__}: {error}", traceback.format_exc()
            )
            raise self._failure from None

    def _rest(self) -> None:
        """Packets of wide rows take much memory; so do evaluations and snapshots, but not at the same time."""
        if is_wide(getattr(self._host.state, "y", None)):
            give_back()

    def _arithmetic(self) -> AbstractContextManager[None]:
        return arithmetic(self._pools, self._threads)


def _packed(packets: dict[int, bytes] | None) -> Payload | None:
    return None if packets is None else pack(packets)
