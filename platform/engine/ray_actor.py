"""Host a block of nodes in a Ray actor: `BlockActor` wraps `Block`.

Packets travel in one of two ways (`engine.transport`). Through the object store: a step takes the packets of the
neighbouring blocks as arguments, which Ray fetches before the call, and returns the block's own packets. The driver
handles references to them only, and no method waits. Through sockets (`peer_sockets.py`): one call runs many rounds.
"""

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from dbo.algorithms.api import Array
from dbo.algorithms.kernels.fused import can_fuse
from dbo.platform.config.engines import RaySettings
from dbo.platform.config.experiment import Experiment
from dbo.platform.config.plugins import Shipped, receive
from dbo.platform.engine.block import Block, BlockView, Packets, Progress
from dbo.platform.engine.common_point import Floats, Oracle
from dbo.platform.engine.device import numeric_context, select_device, trim_memory
from dbo.platform.engine.heartbeat import Place
from dbo.platform.engine.peer_sockets import NeighbourLost, PeerSockets
from dbo.platform.engine.state_tree import Flat
from dbo.platform.errors import NodeFailure
from dbo.platform.network.topology import Network
from dbo.tasks.api import Problem

# All packets of a block: their number, senders and lengths as int64, then one after the other. Ray passes `bytes`
# without pickling, which matters for small ones; processes of one machine share an array without copying it.
Payload: TypeAlias = bytes | NDArray[np.uint8]
_SMALL = 1 << 16
T = TypeVar("T")


def pack(packets: Packets) -> Payload:
    """Join the packets of a block in one buffer."""
    joined = pack_bytes(packets)
    return joined if len(joined) < _SMALL else np.frombuffer(joined, dtype=np.uint8)


def pack_bytes(packets: Packets) -> bytes:
    """Join packets in one buffer, wherever it travels."""
    table = np.array([len(packets), *packets, *map(len, packets.values())], dtype=np.int64)
    return b"".join([table.tobytes(), *packets.values()])


def unpack(payloads: Sequence[Payload]) -> dict[int, memoryview]:
    """Return sender → its packet, without copying."""
    packets: dict[int, memoryview] = {}
    for payload in payloads:
        view = payload.data if isinstance(payload, np.ndarray) else memoryview(payload)
        count = int(np.frombuffer(view, np.int64, count=1)[0])
        table = np.frombuffer(view, np.int64, count=2 * count, offset=8).tolist()
        start = 8 * (1 + 2 * count)
        for sender, length in zip(table[:count], table[count:], strict=True):
            packets[sender] = view[start : start + length]
            start += length
    return packets


@dataclass(frozen=True, slots=True)
class Reached:
    """How far a block has come in a call of `run_rounds`."""

    round: int                      # that it has begun last
    progress: Progress              # in that round
    before: int                     # packets of the last round that has ended


class BlockActor:
    """Host one block after another. Every error is a `NodeFailure` with nodes, round and phase."""

    def __init__(self) -> None:
        self._block: Block | None = None
        self._ids: tuple[int, ...] = ()
        self._epoch = self._round = self._step = 0
        self._threads, self._pools = 1, ThreadpoolController()
        self._failure: NodeFailure | None = None
        self._peers: PeerSockets | None = None
        self._links: dict[int, frozenset[int]] = {}       # neighbouring block → the nodes whose packets it needs

    def load_plugins(self, plugins: tuple[Shipped, ...]) -> None:
        """Load the plugins of an experiment: `assign` is called after it and unpickles objects of their classes."""
        self._failure, self._ids = None, ()
        self._guard("loading plugins", lambda: receive(plugins))

    def assign(
        self,
        problem: Problem,
        experiment: dict[str, Any],
        network: Network,
        ids: Sequence[int],
        epoch: int,
        settings: RaySettings,
    ) -> None:
        """Create the block of the rows `ids`, at the start of a run.

        The algorithm and its configuration are built from the experiment: classes of plugins cannot be unpickled
        before the plugins are loaded.
        """
        self._ids, self._epoch, self._round, self._threads = tuple(ids), epoch, 0, settings.threads
        self._failure = None

        def start() -> Block:
            parts = Experiment(**experiment).parts
            device = select_device(settings.gpus_per_node)
            return Block(
                parts.algorithm, parts.config, problem, network, ids, epoch, device, parts.batches, parts.schedules)

        self._block = self._guard("start", start)

    @property
    def block(self) -> Block:
        assert self._block is not None, "no block is assigned"
        return self._block

    def ready(self) -> int:
        """Return the id of this process."""
        return os.getpid()

    def locate(self) -> Place:
        """Return the machine and the id of this process."""
        import ray

        return Place(ray.get_runtime_context().get_node_id(), os.getpid())

    def idle(self) -> None:
        """Release rows, state and data; the process waits for the next block."""
        self._disconnect()
        if self._block is not None:
            self._block.abandon()
            self._block = None

    def step(self, epoch: int, round_: int, number: int, *payloads: Payload | None) -> Payload | None:
        """Run one step of a round, which step 0 begins; return the next packets, or None when the round has ended.

        The driver submits steps before it knows whether the round needs them. A step after the end of the round does
        nothing. A step that misses packets because a neighbour's round has ended does nothing either: the driver sees
        in the blocks' progress that they disagree.
        """
        self._check_epoch(epoch)
        self._round = round_

        def run() -> Packets | None:
            if number == 0:
                return self.block.begin(round_)
            received = [payload for payload in payloads if payload is not None]
            if len(received) < len(payloads) or not self.block.progress().is_open:
                return None
            return self.block.step(unpack(received))

        packets = self._guard(f"step {number}", run)
        return None if packets is None else pack(packets)

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:      # a late call must not change the state of this epoch
            raise RuntimeError(f"a call of epoch {epoch} reached a block of epoch {self._epoch}")

    def report_step(
        self, epoch: int, round_: int, number: int, *payloads: Payload | None
    ) -> tuple[Payload | None, Progress]:
        """Run one step as `step` does; return its packets, and how far the block is, as two objects."""
        return self.step(epoch, round_, number, *payloads), self.block.progress()

    # ---- sockets ---------------------------------------------------------------------------------------------------

    def listen(self, epoch: int, number: int, links: Mapping[int, Sequence[int]], timeout: float) -> str | None:
        """Open a socket for the neighbouring blocks; return its path, or None if this machine does not allow it.

        `links` are the nodes whose packets each neighbouring block needs.
        """
        self._disconnect()
        self._links = {peer: frozenset(nodes) for peer, nodes in links.items()}
        try:
            self._peers = PeerSockets(number, epoch, timeout)
            return self._peers.listen(len(links))
        except OSError:                    # a path that is too long, say
            self._disconnect()
            return None

    def connect(self, paths: Mapping[int, str]) -> bool:
        """Connect to the neighbours of smaller numbers; return whether that is possible."""
        return self._try_peers(lambda peers: peers.connect({j: path for j, path in paths.items() if j < peers.number}))

    def accept(self) -> bool:
        """Accept the neighbours of larger numbers; return whether all have connected."""
        return self._try_peers(lambda peers: peers.accept(j for j in self._links if j > peers.number))

    def _try_peers(self, work: Callable[[PeerSockets], None]) -> bool:
        try:
            assert self._peers is not None, "the socket is not open"
            work(self._peers)
        except OSError:
            self._disconnect()
            return False
        return True

    def _disconnect(self) -> None:
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def run_rounds(self, epoch: int, first: int, last: int) -> Reached:
        """Run rounds `first` to `last`, exchanging packets with the neighbours through sockets.

        The block stops earlier if it disagrees with a neighbour about the number of packets.
        """
        self._check_epoch(epoch)
        try:
            self._guard(lambda: f"step {self._step}", lambda: self._run_rounds(first, last))
        except BaseException:
            self._disconnect()             # neighbours wait for this block's packets
            raise
        return Reached(self._round, self.block.progress(), self.block.packets_before)

    def _run_rounds(self, first: int, last: int) -> None:
        block, peers = self.block, self._peers
        assert peers is not None, "the sockets are not connected"
        for self._round in range(first, last + 1):
            self._step = 0
            packets = block.begin(self._round)
            while packets is not None:
                received = peers.exchange(self._round, self._step, {
                    peer: pack_bytes({node: packets[node] for node in nodes if node in packets})    # in a star few send
                    for peer, nodes in self._links.items()
                })
                if received is None:
                    peers.end_round(self._round, self._step, is_stalled=True)
                    return
                self._step += 1
                packets = block.step(unpack(received))
        peers.end_round(last, self._step, is_stalled=False)

    # ---- evaluations and checkpoints -------------------------------------------------------------------------------

    def rows(self, name: str) -> Array | None:
        """Return x, y, z, direction or public copies; None if there are no such rows."""
        return self._guard(
            f"gathering {name}", lambda: self.block.rows(name) if self.block.has_rows(name) else None
        )

    def losses(self, x: Array, y: Array) -> tuple[Array, Array]:
        """Return f_i and g_i of the block's nodes at one common point."""
        return self._guard("losses", lambda: self.block.losses(x, y))

    def sum_oracle(self, oracle: Oracle, x: Array, y: Array, v: Array | None = None) -> Floats:
        """Return the sum over the block's nodes of an oracle at one common point."""
        return self._guard("evaluation", lambda: self.block.sum_oracle(oracle, x, y, v))

    def view(self) -> BlockView:
        """Return everything that an evaluation needs of the block."""
        self._trim_memory()
        return self._guard("evaluation", self.block.view)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each array of a snapshot."""
        self._trim_memory()
        return self._guard("snapshot", self.block.sizes)

    def snapshot(self, names: Sequence[str] | None = None) -> Flat:
        """Return all arrays of a checkpoint, or only those with these names."""
        return self._guard("snapshot", lambda: self.block.snapshot(names))

    def restore(self, flat: Flat | None, epoch: int) -> None:
        """Restore a snapshot, or the start if it is None; from now on only calls of `epoch` are accepted."""
        self._epoch, self._failure = epoch, None
        self._guard("restore", lambda: self.block.restore(flat, epoch))

    def _guard(self, phase: str | Callable[[], str], work: Callable[[], T]) -> T:
        """Run `work` with fixed threads; turn an exception into a `NodeFailure`."""
        if self._failure is not None:
            raise self._failure     # later steps were submitted before this one failed: the first error counts
        try:
            with numeric_context(self._pools, self._threads):
                return work()
        except NeighbourLost:
            raise
        except Exception as error:
            at = phase if isinstance(phase, str) else phase()
            self._failure = NodeFailure(
                self._ids, self._round, at, f"{type(error).__name__}: {error}", traceback.format_exc()
            )
            raise self._failure from None

    def _trim_memory(self) -> None:
        """Packets of wide rows take much memory, and so do evaluations and snapshots, but not at the same time."""
        if can_fuse(self.block.state.y):
            trim_memory()
