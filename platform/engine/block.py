"""A block of nodes in one process: their rows, their state, and the round that is under way.

A plain class without a transport: an engine calls `begin`, then `step` with the packets of the neighbours that live
elsewhere, until a step answers None. Neighbours in the same block exchange without encoding, but are counted alike.
"""

from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from dbo.algorithms.gossip import Answer, Message, NotRows, Outgoing, Packed, PackedRow, Sum
from dbo.algorithms.kernels.fused import is_wide, summed, warm
from dbo.algorithms.protocol import Array, Shard
from dbo.algorithms.registry import Algorithm
from dbo.platform.config.plugins import position
from dbo.platform.engine.device import Cpu, Device, on_host
from dbo.platform.engine.shard_wrappers import Counted
from dbo.platform.engine.state_tree import Flat, finite, flatten, rebuild
from dbo.platform.errors import InputError, RunError
from dbo.platform.network import wire
from dbo.platform.network.ledger import Ledger
from dbo.platform.network.topology import Network
from dbo.tasks.api import Problem

Packets = dict[int, bytes]                              # sender → its encoded packet
Heard = Mapping[int, bytes | memoryview]                # the same, wherever its memory lies

EVALUATED = ("x", "y", "direction")


class ProtocolError(RunError):
    """A packet that does not belong to this step: wrong sender, epoch, round, step or channels."""


@dataclass(frozen=True, slots=True)
class View:
    """A block at a round's end, as an evaluation sees it."""

    rows: dict[str, Array]          # of EVALUATED
    sick: str | None
    counters: dict[str, int]
    ledger: Flat


@dataclass(slots=True)
class _Under:
    """The round under way."""

    round: int
    coroutine: Coroutine[Outgoing, tuple[Array, ...], Any]
    spoken: Outgoing
    step: int = 0

    @property
    def packed(self) -> set[str]:
        """The channels on which rows are too wide to be unpacked."""
        return {name for name, message in self.spoken.channels.items() if isinstance(message, Packed)}


class Host:
    """Runs one algorithm for the rows `ids` of a problem."""

    def __init__(
        self,
        algorithm: Algorithm,
        config: Any,
        problem: Problem,
        network: Network,
        ids: Sequence[int],
        epoch: int = 0,
        device: Device | None = None,
    ) -> None:
        self.algorithm, self.config, self.ids, self.epoch = algorithm, config, tuple(ids), epoch
        self.device = device or Cpu()
        self.shard = Counted(self.device.place(problem.shard(self.ids)))
        own = set(self.ids)
        self.remote = tuple(sorted({j for i in self.ids for j in network.neighbours[i]} - own))
        self.talkers = tuple(i for i in self.ids if any(j not in own for j in network.neighbours[i]))
        order = sorted(own | set(self.remote))
        self._own_at = np.searchsorted(order, self.ids)
        self._remote_at = np.searchsorted(order, self.remote)
        weights = network.weights[list(self.ids)][:, order].tocsr()
        weights.sort_indices()               # neighbour sums run in node order, whatever the packing
        self._weights, self._weighted = weights, self.device.mixing(weights)
        self._degree = network.degree[list(self.ids)]
        self._under: _Under | None = None
        self._start()

    def _start(self) -> None:
        self.shard.calls[:] = 0
        self.ledger = Ledger(self.ids, self._degree)
        if is_wide(self.shard.y0):
            warm(self.shard.y0.dtype.name)
        self.state: Any = begun(self.algorithm, self.shard, self.config)
        self._shapes = {name: (tuple(a.shape), a.dtype) for name, a in flatten(self.state).items()}

    def begin(self, round_: int) -> Packets | None:
        """Starts a round; the first packets to the outside, or None if the algorithm says nothing at all."""
        if self._under is not None:
            raise ProtocolError(f"round {round_} cannot begin: round {self._under.round} is under way")
        coroutine = self.algorithm.round(self.state, self.shard, self.config)
        if not hasattr(coroutine, "send"):
            raise ProtocolError(f"{self.algorithm.name}: its round gives {_a(coroutine)}; must be an `async def`")
        try:
            spoken = coroutine.send(None)    # type: ignore[arg-type]
        except StopIteration as end:
            self._finish(end.value, packets=0)
            return None
        except NotRows as error:
            raise self._misused(error) from error
        self._under = _Under(round_, coroutine, spoken)
        return self._speak()

    def step(self, heard: Heard) -> Packets | None:
        """Hands the neighbours' packets to the round; the next packets, or None when the round is over."""
        under = self._under
        if under is None:
            raise ProtocolError("a step without a round")
        answer = self._mix(under, heard)
        try:
            under.spoken = under.coroutine.send(answer)    # type: ignore[arg-type]
        except StopIteration as end:
            self._finish(end.value, packets=under.step + 1)
            return None
        except NotRows as error:
            raise self._misused(error) from error
        under.step += 1
        return self._speak()

    def abandon(self) -> None:
        """Drops a round half way. The state of the last round's end stays, but wide rows of it may have been written
        over (`algorithms/wide.py`): after that, `restore` comes before another round."""
        if self._under is not None:
            self._under.coroutine.close()
            self._under = None

    def _speak(self) -> Packets:
        under = self._under
        assert under is not None
        if not isinstance(under.spoken, Outgoing):
            raise ProtocolError(f"{self.algorithm.name} awaits a {type(under.spoken).__name__}; only mix(...) can be")
        channels = under.spoken.channels
        for name, message in channels.items():
            if len(message.shape) != 2 or message.shape[0] != len(self.ids):
                raise ProtocolError(
                    f"{self.algorithm.name} sends {name} of shape {message.shape}; "
                    f"must be (nodes, entries) = ({len(self.ids)}, …)"
                )
        sizes = wire.sizes(channels)
        self.ledger.record(channels, sizes)
        if not self.talkers:
            return {}
        at = {node: row for row, node in enumerate(self.ids)}
        spoken = {name: on_host(self.device, message) for name, message in channels.items()}
        return {
            node: wire.encode(
                wire.Header(sender=node, epoch=self.epoch, round=under.round, step=under.step), spoken, at[node]
            )
            for node in self.talkers
        }

    def _mix(self, under: _Under, heard: Heard) -> tuple[Array | Sum, ...]:
        packets = [self._open(under, node, heard) for node in self.remote]
        return tuple(
            self._sum(message, [packet.channels[name] for packet in packets])
            for name, message in under.spoken.channels.items()
        )

    def _open(self, under: _Under, node: int, heard: Heard) -> wire.Packet:
        if node not in heard:
            raise ProtocolError(f"round {under.round}, step {under.step}: no packet from node {node}")
        try:
            packet = wire.decode(heard[node], packed=under.packed)
        except wire.WireError as error:
            raise ProtocolError(f"round {under.round}, step {under.step}: packet of node {node}: {error}") from error
        expected = (node, self.epoch, under.round, under.step, list(under.spoken.channels))
        got = (packet.sender, packet.epoch, packet.round, packet.step, list(packet.channels))
        if got != expected:
            raise ProtocolError(f"expected packet (sender, epoch, round, step, channels) {expected}, got {got}")
        return packet

    def _sum(self, message: Message | Packed, remote: list[Any]) -> Array | Sum:
        if isinstance(message, Packed):
            return self._sum_of_packed(message, self._in_order(message.rows, remote))
        rows = message.values
        if is_wide(rows):
            return summed(self._weights, self._in_order(list(rows), remote))
        if remote:
            rows = self.device.stack(rows, self._own_at, remote, self._remote_at)
        return self._weighted(rows)

    def _in_order(self, own: Sequence[Any], remote: Sequence[Any]) -> list[Any]:
        """Own rows and those of neighbours, each at its place in node order."""
        rows: list[Any] = [None] * (len(own) + len(remote))
        for at, row in chain(zip(self._own_at, own, strict=True), zip(self._remote_at, remote, strict=True)):
            rows[at] = row
        return rows

    def _sum_of_packed(self, message: Packed, rows: list[PackedRow]) -> Sum:
        w = self._weights
        return Sum(
            tuple(
                tuple((float(w.data[k]), rows[w.indices[k]]) for k in range(w.indptr[i], w.indptr[i + 1]))
                for i in range(len(self.ids))
            ),
            message.dim,
        )

    def _misused(self, error: NotRows) -> ProtocolError:
        """What was done with messages or answers that cannot be, and where in a plugin."""
        at = position(error)
        return ProtocolError(f"{self.algorithm.name}: {error}" + (f" ({at})" if at else ""))

    def _finish(self, state: Any, packets: int) -> None:
        if not isinstance(state, self.algorithm.state):
            expected = self.algorithm.state.__name__
            raise ProtocolError(f"{self.algorithm.name} must return a {expected}, got a {type(state).__name__}")
        flat = flatten(state)
        for name, array in flat.items():
            if not hasattr(array, "shape"):
                hint = f"; {array.meant}" if isinstance(array, Outgoing | Answer) else ""
                told = f"state.{name} is {_a(array)} after the round; must be an array{hint}"
                raise ProtocolError(f"{self.algorithm.name}: {told}")
        declared = self.algorithm.packets(self.config)
        if packets != declared:
            raise ProtocolError(f"{self.algorithm.name} declares {declared} packets per round and sent {packets}")
        for name, array in flat.items():
            if (tuple(array.shape), array.dtype) != self._shapes[name]:
                shape, dtype = self._shapes[name]
                raise ProtocolError(
                    f"{self.algorithm.name}: state.{name} is {array.dtype} {tuple(array.shape)} after the round; "
                    f"init made it {dtype} {shape}"
                )
        self.state, self._under = state, None

    def counters(self) -> dict[str, int]:
        """Oracle calls of a node since the start."""
        return self.shard.counters()

    def rows(self, name: str) -> Array:
        """x, y, z or direction of this block's nodes, as they are until the next round begins."""
        return self.device.fetch(getattr(self.state, name))

    def losses(self, x: Array, y: Array) -> tuple[Array, Array]:
        """f_i and g_i of this block's nodes at one common (x, y); not counted as oracle calls."""
        xs, ys = (self.device.load(np.repeat(v.reshape(1, -1), len(self.ids), axis=0)) for v in (x, y))
        return self.device.fetch(self.shard.shard.f(xs, ys)), self.device.fetch(self.shard.shard.g(xs, ys))

    def sick(self) -> str | None:
        """The first state array with NaN or inf in it, None if there is none."""
        return finite(flatten(self.state))

    def view(self) -> View:
        """What an evaluation asks of a block, in one piece."""
        rows = {name: self.rows(name) for name in EVALUATED}
        return View(rows, self.sick(), self.counters(), self.ledger.export())

    def snapshot(self, names: Collection[str] | None = None) -> Flat:
        """All that `restore` needs, at a round's end, or the part of it with these names."""
        kept = self._kept()
        return {name: self.device.fetch(array) for name, array in kept.items() if names is None or name in names}

    def sizes(self) -> dict[str, int]:
        """Bytes of the arrays of a snapshot."""
        return {name: int(array.nbytes) for name, array in self._kept().items()}

    def _kept(self) -> dict[str, Array]:
        kept = {f"state.{name}": array for name, array in flatten(self.state).items()}
        kept |= {f"ledger.{name}": array for name, array in self.ledger.export().items()}
        return kept | {"oracles": self.shard.calls.copy()}

    def restore(self, flat: Flat | None, epoch: int = 0) -> None:
        """Back to the round's end that `snapshot` was taken at, or to the start; a round under way is dropped.

        The arrays become the state's own: rounds may write into them.
        """
        self.abandon()
        self.epoch = epoch
        if flat is None:
            self._start()
            return
        loaded = {name: self.device.load(array) for name, array in _under_prefix(flat, "state.").items()}
        self.state = rebuild(self.algorithm.state, loaded)
        self.ledger.restore(_under_prefix(flat, "ledger."))
        self.shard.calls[:] = flat["oracles"]


def begun(algorithm: Algorithm, shard: Shard, config: Any) -> Any:
    """The state at the start; one that is not as the platform needs it is an input error: nothing has been run yet."""
    state = algorithm.init(shard, config)
    if not isinstance(state, algorithm.state):
        raise InputError(f"algorithm {algorithm.name!r}: init gives {_a(state)}; must be a {algorithm.state.__name__}")
    flat = flatten(state)
    for name, value in flat.items():
        _check_rows(algorithm, name, value, shard, None)
        if "float" in str(value.dtype) and value.dtype != shard.x0.dtype:      # its messages would have other sizes
            told = f"init gives state.{name} in {value.dtype}; must be {shard.x0.dtype}, the experiment's dtype"
            raise InputError(f"algorithm {algorithm.name!r}: {told}")
    for name, dim in (("x", "dim_x"), ("y", "dim_y"), ("direction", "dim_x")):
        _check_rows(algorithm, name, getattr(state, name), shard, dim)
    try:
        rebuild(algorithm.state, flat)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        raise InputError(
            f"algorithm {algorithm.name!r}: {algorithm.state.__name__} cannot be put together again from its arrays, "
            f"as going on with a run needs: {told}; every field must have a type that can be seen when it runs"
        ) from error
    return state


def _check_rows(algorithm: Algorithm, name: str, value: Any, shard: Shard, dim: str | None) -> None:
    about = f"algorithm {algorithm.name!r}: init gives"
    shape = getattr(value, "shape", None)
    if shape is None:
        raise InputError(f"{about} {_a(value)} as state.{name}; must be an array, rows first")
    width = tuple(shape[1:]) if dim is None else (getattr(shard, dim),)
    if tuple(shape) != (shard.nodes, *width):
        wanted = f"({shard.nodes}, …), rows first" if dim is None else f"(nodes, {dim}) = ({shard.nodes}, {width[0]})"
        raise InputError(f"{about} state.{name} the shape {tuple(shape)} for {shard.nodes} nodes; must be {wanted}")


def _a(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _under_prefix(flat: Flat, prefix: str) -> Flat:
    return {name.removeprefix(prefix): array for name, array in flat.items() if name.startswith(prefix)}
