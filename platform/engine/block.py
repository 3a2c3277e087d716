"""Run one block of nodes in this process: their rows, their state, and the open round.

`Block` is a plain class without a transport. An engine calls `begin`, then `step` with the packets of the neighbours in
other blocks, until a step returns None. Neighbours in the same block exchange rows without encoding, but their packets
are counted alike.
"""

import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from array_api_compat import array_namespace, device, is_array_api_obj

from dbo.algorithms.api import (
    Algorithm,
    Array,
    Compressor,
    Message,
    Mixed,
    Neighbours,
    NetworkFacts,
    NotRowsError,
    Outgoing,
    Packed,
    PackedRow,
    Shard,
    State,
    short_loops,
)
from dbo.algorithms.kernels.fused import can_fuse, compile_kernels, is_large
from dbo.algorithms.kernels.lazy import RowSum, unwrap, wrap, wrap_sum
from dbo.platform.config.plugins import locate_error
from dbo.platform.config.schedules import Schedules
from dbo.platform.config.validation import DataclassInstance
from dbo.platform.engine.base import Blocks
from dbo.platform.engine.common_point import CommonPoint, Floats, Oracle
from dbo.platform.engine.device import Cpu, Device
from dbo.platform.engine.error_terms import NO_ERRORS, BlockErrors, measure_errors
from dbo.platform.engine.routes import RoutePlan, plan_downlink, plan_gossip, plan_uplink
from dbo.platform.engine.shard_wrappers import CountingShard
from dbo.platform.engine.state_tree import Flat, first_nonfinite, flatten, unflatten, unwrap_state, wrap_state
from dbo.platform.errors import InputError, RunError
from dbo.platform.network.codecs import EncodedRows, encode_on_device
from dbo.platform.network.ledger import Ledger
from dbo.platform.network.packet import Header, Packet, decode, encode, expect_rows, measure
from dbo.platform.network.row_format import RowType, WireError
from dbo.platform.network.topology import Network
from dbo.tasks.api import Batches, Problem

Packets: TypeAlias = dict[int, bytes]                           # sender → its encoded packet
Received: TypeAlias = Mapping[int, bytes | memoryview]          # the same, in any memory

_MAX_PLANS = 8          # of the clients of a round and of the next ones

EVALUATED = ("x", "y", "direction")
PUBLIC = "public"       # rows: the copies of y that the neighbours have, as the algorithm declares them


class ProtocolError(RunError):
    """A packet or a step that does not belong to the round, or a round that breaks the contract of an algorithm."""


@dataclass(frozen=True, slots=True)
class BlockView:
    """What an evaluation needs of a block at the end of a round."""

    rows: dict[str, Array]          # of EVALUATED; empty if rows are wide, to be fetched one by one
    first_nonfinite: str | None
    counters: dict[str, int]
    ledger: Flat
    errors: BlockErrors
    seconds: float                  # of computing since the start or the last `restore`

    def without_rows(self) -> "BlockView":
        """Return the counts alone, in memory of their own: an array from the object store keeps all that came with it.
        """
        return replace(
            self, rows={}, errors=NO_ERRORS, ledger={name: array.copy() for name, array in self.ledger.items()})


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a block is in its round."""

    packets: int                    # that each node has sent in this round
    is_open: bool


def is_round_open(blocks: Blocks, progress: Sequence[Progress]) -> bool:
    """Decide whether the blocks need another step; raise `ProtocolError` if only some of them do."""
    if len(set(progress)) == 1:
        return progress[0].is_open
    packets = min(each.packets for each in progress if not each.is_open)
    ended = Progress(packets, is_open=False)
    finished, others = (
        [list(ids) for ids, each in zip(blocks, progress, strict=True) if (each == ended) is wanted]
        for wanted in (True, False)
    )
    raise ProtocolError(
        f"blocks {_format_blocks(finished)} finished after {packets} packets, blocks {_format_blocks(others)} did not; "
        f"every node must await mix(...), or average(...) and the like, the same number of times"
    )


def _format_blocks(blocks: list[list[int]]) -> str:
    """Return the nodes of each block, abbreviated."""
    shown = [str(ids) if len(ids) <= 4 else f"[{ids[0]}, {ids[1]}, …, {ids[-1]}]" for ids in blocks[:4]]
    return ", ".join(shown) + (", …" if len(blocks) > 4 else "")


@dataclass(slots=True)
class _Round:
    """An open round."""

    number: int
    coroutine: Coroutine[Outgoing, tuple[Array, ...], Any]
    step: int = -1                  # of the packet that was sent last
    outgoing: Outgoing | None = None
    expected: dict[str, RowType] = field(default_factory=dict)      # of every neighbour, in the step of `outgoing`

    @property
    def channels(self) -> dict[str, Message | Packed]:
        assert self.outgoing is not None
        return self.outgoing.channels


class Block:
    """Run one algorithm for the rows `ids` of a problem."""

    def __init__(
        self,
        algorithm: Algorithm,
        config: DataclassInstance,
        problem: Problem,
        network: Network,
        ids: Sequence[int],
        epoch: int = 0,
        device: Device | None = None,
        batches: Batches | None = None,
        schedules: Schedules | None = None,
    ) -> None:
        self.algorithm, self.config, self.ids, self.epoch = algorithm, config, tuple(ids), epoch
        self.device = device or Cpu()
        placed = self.device.place(problem.shard(self.ids))
        self.shard = CountingShard(placed, batches, network=describe_network(network))
        facts = self.shard.network
        self._schedules = (schedules or Schedules()).resolve(config, facts, problem.dim_x, problem.dim_y)
        self._network = network
        self._plans = {("edges", frozenset[int]()): plan_gossip(network, self.ids, self.device)}
        self._places = _list_places(network, self.ids)
        self._declared = None if algorithm.packets is None else algorithm.packets(config)
        self._round: _Round | None = None
        self._problem = problem
        self._common: CommonPoint | None = None
        # Processor time: other processes may use the cores meanwhile. A GPU works beside the processor.
        self._clock = time.process_time if isinstance(self.device, Cpu) else time.perf_counter
        self._start()

    def _start(self) -> None:
        self.seconds = 0.0
        self.shard.calls[:] = 0
        self.ledger = Ledger(self.ids, self._network.degree[list(self.ids)])
        if can_fuse(self.shard.y0):
            compile_kernels(self.shard.y0.dtype.name)
        elif isinstance(self.shard.y0, np.ndarray) and _compresses(self.config):
            short_loops(self.shard.y0)       # compiles them: not in the middle of a measurement
        self.state: Any = init_state(self.algorithm, self.shard, self._schedules.apply(self.config, 0))
        flat = flatten(self.state)
        self._shapes = {name: (tuple(a.shape), a.dtype) for name, a in flat.items()}
        self._has_large_rows = any(map(is_large, flat.values()))
        self.packets_before = 0              # packets of the last round that has ended

    # ---- rounds ----------------------------------------------------------------------------------------------------

    def begin(self, round_: int) -> Packets | None:
        """Start a round; return the first packets to other blocks, or None if the algorithm sends nothing at all."""
        if self._round is not None:
            raise ProtocolError(f"round {round_} cannot begin: round {self._round.number} is open")
        self._common = None                  # it may take as much memory as the data
        config = self._schedules.apply(self.config, round_)
        if self.state is None:
            raise ProtocolError(f"round {round_} cannot begin: the last one was abandoned, and nothing was restored")
        coroutine = self.algorithm.round(wrap_state(self.state), self.shard, config)
        if not isinstance(coroutine, Coroutine):
            raise ProtocolError(f"{self.algorithm.name}: its round is {_describe(coroutine)}; must be an `async def`")
        if self._has_large_rows:
            self.state = None      # the round's alone: its arrays are freed as they are replaced
        with self._measure():
            return self._run(_Round(round_, coroutine), None)

    def step(self, received: Received) -> Packets | None:
        """Mix the neighbours' packets; return the next packets, or None when the round has ended."""
        if self._round is None:
            raise ProtocolError("a step without a round")
        with self._measure():
            return self._run(self._round, self._mix(self._round, received))

    @contextmanager
    def _measure(self) -> Iterator[None]:
        """Add the time of what is inside to the computing time."""
        start = self._clock()
        try:
            yield
        finally:
            self.seconds += self._clock() - start

    def _run(self, current: _Round, mixed: tuple[Array | Neighbours, ...] | None) -> Packets | None:
        """Run the coroutine up to its next packet, or to its end."""
        try:
            current.outgoing = current.coroutine.send(mixed)    # type: ignore[arg-type]  # None starts a coroutine
        except StopIteration as end:
            self._finish(end.value, packets=current.step + 1)
            return None
        except NotRowsError as error:
            at = locate_error(error)
            raise ProtocolError(f"{self.algorithm.name}: {error}" + (f" ({at})" if at else "")) from error
        current.step += 1
        self._round = current
        return self._send(current)

    def progress(self) -> Progress:
        """Return the number of packets sent in this round, and whether the round is open."""
        if self._round is None:
            return Progress(self.packets_before, is_open=False)
        return Progress(self._round.step + 1, is_open=True)

    def abandon(self) -> None:
        """Drop an open round. The state stays that of the last round's end.

        A state with wide rows belongs to its round and is dropped with it: call `restore` before the next round.
        """
        if self._round is not None:
            self._round.coroutine.close()
            self._round = None

    def _send(self, current: _Round) -> Packets:
        """Count the packets of all rows; encode those that leave the block."""
        if not isinstance(current.outgoing, Outgoing):
            kind = type(current.outgoing).__name__
            raise ProtocolError(f"{self.algorithm.name} awaits a {kind}; only {self._allowed} is allowed")
        if (current.outgoing.route == "edges") != (self._network.server is None):
            raise ProtocolError(
                f"{self.algorithm.name} declares network={self.algorithm.network!r}; only {self._allowed} is allowed")
        channels = current.channels
        for name, message in channels.items():
            if len(message.shape) != 2 or message.shape[0] != len(self.ids):
                raise ProtocolError(
                    f"{self.algorithm.name} sends {name} of shape {message.shape}; "
                    f"must be (nodes, entries) = ({len(self.ids)}, …) for nodes {_format_blocks([[*self.ids]])}"
                )
        plan, sizes = self._plan(current.outgoing), measure(channels)
        self.ledger.record(channels, sizes, plan.sends, plan.receivers)
        if not plan.senders:
            return {}
        try:
            messages = encode_on_device(channels, plan.senders.values(), sizes.tables)
        except WireError as error:
            raise ProtocolError(f"{self.algorithm.name} sends: {error}") from error
        return {node: self._encode(current, node, messages, row) for node, row in plan.senders.items()}

    @property
    def _allowed(self) -> str:
        gossip, star = "mix(...) or exchange(...)", "average(...), broadcast(...) or aggregate(...)"
        return gossip if self._network.server is None else star

    def _plan(self, outgoing: Outgoing) -> RoutePlan:
        """Return who sends to whom in this step; clients that take part may change from round to round."""
        key = outgoing.route, outgoing.participants
        if key not in self._plans:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            names = self.shard.ids.tolist()     # participants are named as their random numbers are
            present = np.array([name in outgoing.participants for name in names], dtype=bool)
            make = plan_uplink if outgoing.route == "up" else plan_downlink
            remote = set(outgoing.participants) - set(names)
            self._plans[key] = make(
                self._network, self.ids, present, remote, self.device, len(outgoing.participants))
        return self._plans[key]

    def _encode(
        self, current: _Round, node: int, messages: dict[str, Message | Packed | EncodedRows], row: int
    ) -> bytes:
        try:
            return encode(self._header(current, node), messages, row)
        except WireError as error:
            raise ProtocolError(f"{self.algorithm.name} sends from node {node}: {error}") from error

    def _header(self, current: _Round, sender: int) -> Header:
        return Header(sender=sender, epoch=self.epoch, round=current.number, step=current.step)

    def _mix(self, current: _Round, received: Received) -> tuple[Array | Neighbours, ...]:
        assert current.outgoing is not None
        plan = self._plan(current.outgoing)
        if plan.remote:
            current.expected = expect_rows(current.channels)
        packets = [self._decode(current, node, received) for node in plan.remote]
        rows: Mapping[str, Any] = {name: [packet.channels[name] for packet in packets] for name in current.channels}
        if packets:
            rows = self.device.expand(rows)
        if current.outgoing.separate:
            return tuple(self._separate(plan, message, rows[name]) for name, message in current.channels.items())
        return tuple(_sum(plan, message, rows[name]) for name, message in current.channels.items())

    def _decode(self, current: _Round, node: int, received: Received) -> Packet:
        """Decode a neighbour's packet, which must belong to this step and have rows like the own ones."""
        where = f"round {current.number}, step {current.step}"
        if node not in received:
            raise ProtocolError(f"{where}: no packet from node {node}")
        packed = {name for name, message in current.channels.items() if isinstance(message, Packed)}
        try:
            return decode(
                received[node], packed, header=self._header(current, node), expected=current.expected,
                expand=not self.device.expands_rows,
            )
        except WireError as error:
            raise ProtocolError(f"{where}: packet of node {node}: {error}") from error

    def _separate(self, plan: RoutePlan, message: Message | Packed, remote: Any) -> Neighbours:
        """Return every neighbour's row of one channel, with its weight."""
        values: Any = unwrap(message.values)
        xp = array_namespace(values)
        received = [row.dense(message.shape[1]) if isinstance(row, PackedRow) else row for row in remote]
        rows = _in_node_order(plan, list(values), received)
        nothing = xp.zeros_like(values[0])
        at, weights, own = self._places
        picked = [xp.stack([nothing if k < 0 else rows[k] for k in places]) for places in at] if at.shape[1] else []
        empty = xp.zeros((len(self.ids), 0, message.shape[1]), dtype=values.dtype, device=device(values))
        return Neighbours(
            xp.stack(picked) if picked else empty,
            xp.asarray(weights, dtype=values.dtype, device=device(values)),
            xp.asarray(own, dtype=values.dtype, device=device(values)),
        )

    def _finish(self, state: Any, packets: int) -> None:
        """Check the state that a round has returned, and keep it."""
        name = self.algorithm.name
        if not isinstance(state, self.algorithm.state):
            expected = self.algorithm.state.__name__
            raise ProtocolError(f"{name} must return a {expected}, got a {type(state).__name__}")
        flat = flatten(state := unwrap_state(state))
        for path, array in flat.items():
            if not isinstance(array, np.ndarray) and not is_array_api_obj(array):      # asks for every library
                hint = f"; {array.hint}" if isinstance(array, Outgoing | Mixed) else ""
                raise ProtocolError(
                    f"{name}: state.{path} is {_describe(array)} after the round; must be an array{hint}"
                )
        if self._declared is not None and packets != self._declared:
            raise ProtocolError(f"{name} declares {self._declared} packets per round and sent {packets}")
        for path, array in flat.items():
            if (tuple(array.shape), array.dtype) != self._shapes[path]:
                shape, dtype = self._shapes[path]
                raise ProtocolError(
                    f"{name}: state.{path} is {array.dtype} {tuple(array.shape)} after the round; "
                    f"init made it {dtype} {shape}"
                )
        self.state, self._round, self.packets_before = state, None, packets
        self.shard.forget_batch()

    # ---- evaluation and checkpoints --------------------------------------------------------------------------------

    def has_rows(self, name: str) -> bool:
        """Decide whether the state has rows of this name; z and `public_y` are optional, and so are public copies."""
        return self.algorithm.public is not None if name == PUBLIC else hasattr(self.state, name)

    def rows(self, name: str) -> Array:
        """Return x, y, z, direction or public copies of this block's nodes; valid until the next round begins."""
        if name == PUBLIC:
            assert self.algorithm.public is not None
            return self.device.fetch(self.algorithm.public(self.state))
        return self.device.fetch(getattr(self.state, name))

    def losses(self, x: Array, y: Array) -> tuple[Array, Array]:
        """Return f_i and g_i of this block's nodes at one common (x, y); not counted as oracle calls."""
        xs, ys = (self.device.load(np.repeat(v.reshape(1, -1), len(self.ids), axis=0)) for v in (x, y))
        return self.device.fetch(self.shard.shard.f(xs, ys)), self.device.fetch(self.shard.shard.g(xs, ys))

    def sum_oracle(self, oracle: Oracle, x: Array, y: Array, v: Array | None = None) -> Floats:
        """Return the sum over this block's nodes of an oracle at a common point; not counted as oracle calls."""
        if self._common is None:
            self._common = CommonPoint(self._problem, self.ids)
        return self._common.sum_oracle(oracle, x, y, v)

    def errors(self) -> BlockErrors:
        """Return the errors that the algorithm's analysis bounds."""
        return measure_errors(self.algorithm.errors, self.state, len(self.ids), self.device.fetch)

    def view(self) -> BlockView:
        """Return everything that an evaluation needs of this block."""
        rows = {} if self._has_large_rows else {name: self.rows(name) for name in EVALUATED}
        return BlockView(
            rows, self.first_nonfinite(), self.shard.counters(), self.ledger.export(), self.errors(), self.seconds)

    def first_nonfinite(self) -> str | None:
        """Return the name of the first state array that contains NaN or inf; None if there is none."""
        return first_nonfinite(flatten(self.state))

    def snapshot(self, names: Collection[str] | None = None) -> Flat:
        """Return all arrays that `restore` needs, at the end of a round, or only those with these names."""
        arrays = self._arrays()
        return {name: self.device.fetch(array) for name, array in arrays.items() if names is None or name in names}

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each array of a snapshot."""
        return {name: int(array.nbytes) for name, array in self._arrays().items()}

    def _arrays(self) -> Flat:
        state = {f"state.{name}": array for name, array in flatten(self.state).items()}
        ledger = {f"ledger.{name}": array for name, array in self.ledger.export().items()}
        return state | ledger | {"oracles": self.shard.calls.copy()}

    def restore(self, flat: Flat | None, epoch: int = 0) -> None:
        """Restore a snapshot, or the start if it is None; drop an open round. The block keeps the arrays themselves."""
        self.abandon()
        self.epoch, self.seconds = epoch, 0.0
        if flat is None:
            self._start()
            return
        loaded = {name: self.device.load(array) for name, array in _select_prefix(flat, "state.").items()}
        self.state = unflatten(self.algorithm.state, loaded)
        self.ledger.restore(_select_prefix(flat, "ledger."))
        self.shard.calls[:] = flat["oracles"]


def _compresses(config: DataclassInstance) -> bool:
    return any(isinstance(getattr(config, each.name), Compressor) for each in fields(config))


def describe_network(network: Network) -> NetworkFacts:
    """Return what an algorithm may know of the network."""
    return NetworkFacts(network.nodes, int(network.degree.max(initial=0)), network.spectral_gap)


def _list_places(network: Network, ids: Sequence[int]) -> tuple[Array, Array, Array]:
    """Return (nodes, places) positions of neighbours among the rows in node order, −1 for none; their weights; w_ii."""
    places = int(network.degree.max(initial=0))
    order = sorted({*ids, *(j for i in ids for j in network.neighbours[i])})
    at, weights = np.full((len(ids), places), -1, dtype=np.int64), np.zeros((len(ids), places, 1))
    own = np.array([[network.weights[i, i]] for i in ids], dtype=np.float64)
    for row, node in enumerate(ids):
        for place, other in enumerate(network.neighbours[node]):
            at[row, place] = np.searchsorted(order, other)
            weights[row, place, 0] = network.weights[node, other]
    return at, weights, own


def init_state(algorithm: Algorithm, shard: Shard, config: DataclassInstance) -> State:
    """Return the algorithm's state at the start; raise `InputError` if the platform cannot work with it."""
    state: State = algorithm.init(shard, config)
    about = f"algorithm {algorithm.name!r}"
    if not isinstance(state, algorithm.state):
        raise InputError(f"{about}: init returns {_describe(state)}; must be a {algorithm.state.__name__}")
    flat = flatten(state := unwrap_state(state))
    for name, value in flat.items():
        _check_rows(about, name, value, shard.nodes)
        if "float" in str(value.dtype) and value.dtype != shard.x0.dtype:      # its messages would have other sizes
            raise InputError(
                f"{about}: init returns state.{name} in {value.dtype}; must be {shard.x0.dtype}, the experiment's dtype"
            )
    _check_rows(about, "x", state.x, shard.nodes, ("dim_x", shard.dim_x))
    _check_rows(about, "y", state.y, shard.nodes, ("dim_y", shard.dim_y))
    _check_rows(about, "direction", state.direction, shard.nodes, ("dim_x", shard.dim_x))
    if algorithm.public is not None:
        _check_public(about, algorithm.public, state, (shard.nodes, shard.dim_y))
    try:
        unflatten(algorithm.state, flat)
    except Exception as error:
        raise InputError(
            f"{about}: {algorithm.state.__name__} cannot be rebuilt from its arrays, which resuming a run needs: "
            f"{type(error).__name__}: {error}; the type of every field must be visible at run time"
        ) from error
    return state


def _check_public(about: str, public: Callable[[Any], Array], state: Any, shape: tuple[int, int]) -> None:
    """Refuse a declaration of public copies that fails at the start, or returns anything but rows like y."""
    try:
        rows = public(state)
        found = f"of shape {tuple(rows.shape)}" if is_array_api_obj(rows) else _describe(rows)
    except Exception as error:
        raise InputError(
            f"{about}: public(state) fails with {type(error).__name__}: {error}; must return the copies of y that "
            f"neighbours have, e.g. lambda state: state.y"
        ) from error
    if not is_array_api_obj(rows) or tuple(rows.shape) != shape:
        raise InputError(f"{about}: public returns {found}; must be an array (nodes, dim_y) = {shape}")


def _check_rows(about: str, name: str, value: Any, nodes: int, dim: tuple[str, int] | None = None) -> None:
    if not is_array_api_obj(value):
        raise InputError(f"{about}: init returns {_describe(value)} as state.{name}; must be an array, rows first")
    shape = tuple(value.shape)
    if dim is None:
        fits, wanted = shape[:1] == (nodes,), f"({nodes}, …), rows first"
    else:
        fits, wanted = shape == (nodes, dim[1]), f"(nodes, {dim[0]}) = ({nodes}, {dim[1]})"
    if not fits:
        raise InputError(f"{about}: init returns state.{name} of shape {shape} for {nodes} nodes; must be {wanted}")


def _sum(plan: RoutePlan, message: Message | Packed, remote: Any) -> Array:
    """Return Σ_j w_ij (·)_j of one channel, the own rows included."""
    if isinstance(message, Packed):
        return _sum_rows(
            plan, _in_node_order(plan, message.rows, remote), message.dim, message.rows[0].entries.dtype)
    rows = message.values
    if can_fuse(rows):
        return _sum_rows(plan, _in_node_order(plan, list(rows), remote), rows.shape[1], rows.dtype)
    mixed: Array = wrap(plan.apply_weights(rows, remote))
    return mixed


def _in_node_order(plan: RoutePlan, own: Sequence[Any], remote: Sequence[Any]) -> list[Any]:
    rows: list[Any] = [None] * (len(own) + len(remote))
    for at, row in chain(zip(plan.own_at, own, strict=True), zip(plan.remote_at, remote, strict=True)):
        rows[at] = row
    return rows


def _sum_rows(plan: RoutePlan, rows: list[Any], dim: int, dtype: Any) -> Array:
    """Return the sums of wide rows, which are computed together with what the algorithm adds to them."""
    w = plan.weights
    terms = tuple(
        tuple((float(w.data[k]), rows[w.indices[k]]) for k in range(w.indptr[i], w.indptr[i + 1]))
        for i in range(w.shape[0])
    )
    mixed: Any = wrap_sum(RowSum(terms, dim, dtype))
    return mixed  # type: ignore[no-any-return]


def _describe(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _select_prefix(flat: Flat, prefix: str) -> Flat:
    return {name.removeprefix(prefix): array for name, array in flat.items() if name.startswith(prefix)}
