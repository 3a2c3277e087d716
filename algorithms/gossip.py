"""Exchange rows with the neighbours: `mix` and `exchange`, the awaitables of gossip methods, and their messages.

`wy = await mix(y)` sends y to the neighbours and returns Σ_j w_ij y_j, the own rows included. `wx, ws = await mix(x=x,
s=s)` sends several channels in one packet. `(near,) = await exchange(y=y)` sends the same packet, and returns each
neighbour's rows with its weight instead of their sum. The engine drives the coroutine with `.send()`; there is no event
loop.
"""

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn, TypeVar, overload

import numpy as np

from dbo.algorithms.compression.grid import Grid
from dbo.algorithms.kernels.fused import map_rows
from dbo.algorithms.kernels.lazy import RowSum, unwrap, wrap_sum
from dbo.algorithms.protocol import Array

T = TypeVar("T")
Form = Literal["dense", "sparse", "levels"]
Route = Literal["edges", "up", "down"]      # to the neighbours, from clients to the server, from the server to clients

MANY_WORDS = 1 << 10    # words of marks, 64 entries each, from which a kernel outweighs its call

_UNNAMED = "value"      # the channel of a single array without a name


@dataclass(frozen=True, slots=True)
class Message:
    """Rows as every receiver decodes them, and what the wire format needs to encode them in few bytes.

    `values` is the decoded message, to the last bit. "sparse" rows travel without their zeros; with a `grid` their
    values are on its levels, and travel as integers of `grid.bits` bits each. "levels" rows are integers times one unit
    per row, `values = levels * unit`, and travel as integers of `bits` bits each. With a `width`, a sparse row is cut
    into groups of so many entries, and a group with a nonzero entry travels as a whole.
    """

    values: Array                  # (nodes, dim)
    form: Form = "dense"
    kept: int = 0                  # entries per row in the paper's count: k for top-k, dim for dense
    levels: Array | None = None    # (nodes, dim) integers in [-2^(bits-1), 2^(bits-1))
    unit: Array | None = None      # (nodes,) in the dtype of values
    bits: int = 0
    grid: Grid | None = None       # of quantized sparse rows
    width: int = 1                 # entries of a group of a sparse row; divides dim

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)


def mark_kernels() -> Any:
    """Import the kernels for marks, and numba with them, which is slow."""
    from dbo.algorithms.kernels import marks

    return marks


def code_kernels() -> Any:
    """Import the kernels for quantized values and for the gaps between them, and numba with them, which is slow."""
    from dbo.algorithms.kernels import codes

    return codes


@dataclass(frozen=True, slots=True)
class PackedRow:
    """A sparse row as it travels: a bit per entry, 64 to a word and the first lowest; the marked entries in order."""

    words: Array      # (⌈dim / 64⌉,) uint64
    entries: Array    # (marked,) none of them zero
    levels: Array | None = None      # (marked,) levels of quantized entries, from 1, if known: saves looking them up

    @classmethod
    def of(cls, row: Array) -> "PackedRow":
        marked = row != 0
        bits = np.zeros(-(-row.size // 64) * 8, dtype=np.uint8)
        bits[: -(-row.size // 8)] = np.packbits(marked, bitorder="little")
        return cls(bits.view("<u8"), row[marked])

    def positions(self, dim: int) -> Array:
        """Return the positions of the entries, ascending."""
        if self.words.size >= MANY_WORDS:
            found = np.empty(self.entries.size, dtype=np.int64)
            mark_kernels().find_positions(self.words, found)
            return found
        return np.flatnonzero(np.unpackbits(self.words.view(np.uint8), count=dim, bitorder="little"))

    def dense(self, dim: int) -> Array:
        row = np.zeros(dim, dtype=self.entries.dtype)
        row[self.positions(dim)] = self.entries
        return row


@dataclass(frozen=True, slots=True)
class Packed:
    """A sparse message of wide rows, which take too much memory to keep them in dense form as well."""

    rows: tuple[PackedRow, ...]
    dim: int
    kept: int
    grid: Grid | None = None
    form: ClassVar[Form] = "sparse"
    width: ClassVar[int] = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.rows), self.dim

    def map_rows(self, function: Callable[[PackedRow], T]) -> list[T]:
        """Return function(row) of every row, computed on the threads."""
        return map_rows(lambda i: function(self.rows[i]), len(self.rows))

    @property
    def values(self) -> Array:
        """Return the rows; in a sum with other rows they stay packed."""
        terms = tuple(((1.0, row),) for row in self.rows)
        rows: Any = wrap_sum(RowSum(terms, self.dim, self.rows[0].entries.dtype))
        return rows  # type: ignore[no-any-return]


def dense(values: Array) -> Message:
    """Return a message that is sent uncompressed."""
    return Message(values, kept=values.shape[-1])


class NotRowsError(TypeError):
    """Something that is not an array of rows was sent, or used in arithmetic."""


class _NoArithmetic:
    """Refuse arithmetic, also with an array on the other side, with a hint about the likely mistake."""

    __slots__ = ()
    hint: ClassVar[str]

    def __array_ufunc__(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()                  # array + self, and array += self

    def _refuse(self, other: Any = None) -> NoReturn:
        raise NotRowsError(self.hint)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __neg__ = __pow__ = _refuse


class Mixed(_NoArithmetic, tuple[Array, ...]):
    """Σ_j w_ij (·)_j of each named channel, in the order of the arguments; one named channel is a tuple of one."""

    __slots__ = ()
    hint: ClassVar[str] = (
        "await mix(x=…) returns a tuple, one array per named channel: write `(wx,) = await mix(x=…)` "
        "or `wx = await mix(x)`"
    )


@dataclass(frozen=True, slots=True)
class Neighbours:
    """What one channel brought from each neighbour, in node order: place s of a row is its s-th neighbour.

    All nodes have as many places as the network's largest degree, `shard.network.places`. Places without a neighbour
    have weight 0 and a row of zeros.
    """

    rows: Array           # (nodes, places, dim) as each neighbour's message is decoded
    weights: Array        # (nodes, places, 1) w_ij in the dtype of the rows
    own_weight: Array     # (nodes, 1) w_ii

    def mean(self, own: Array, near: Array) -> Array:
        """Return w_ii own_i + Σ_j w_ij near_ij in node order of the places, for copies like `rows`."""
        total = self.own_weight * own
        for place in range(near.shape[1]):
            total = total + self.weights[:, place] * near[:, place]
        return total


@dataclass(frozen=True, slots=True)
class Outgoing(_NoArithmetic):
    """One packet per row: messages that travel together, by channel name."""

    channels: dict[str, Message | Packed]
    single: bool = False                # one array without a name: awaiting it gives one array
    route: Route = "edges"
    participants: frozenset[int] = frozenset()      # clients that send (up) or receive (down)
    separate: bool = False              # awaiting it gives `Neighbours` of each channel, not the sum
    hint: ClassVar[str] = "mix(...) must be awaited: write `await mix(...)`"

    def __await__(self) -> Generator["Outgoing", tuple[Any, ...], Any]:
        answers = yield self
        if self.separate:
            return answers
        return answers[0] if self.single else Mixed(answers)

    def __iter__(self) -> NoReturn:
        self._refuse()


@overload
def mix(rows: Array | Message | Packed, /) -> Awaitable[Array]: ...
@overload
def mix(**channels: Array | Message | Packed) -> Awaitable[Mixed]: ...
def mix(*rows: Array | Message | Packed, **channels: Array | Message | Packed) -> Outgoing:
    """Send rows to the neighbours in one packet; awaiting it gives Σ_j w_ij (·)_j of each channel.

    One array without a name gives one array; named channels give a tuple, in the order of the arguments. Bytes are
    counted by these names; the channel of an array without a name is called "value".
    """
    return make_outgoing("mix", rows, channels)


def make_outgoing(
    name: str, rows: tuple[Array | Message | Packed, ...], channels: dict[str, Array | Message | Packed],
    route: Route = "edges", participants: frozenset[int] = frozenset(),
) -> Outgoing:
    """Return the packets of one array without a name, or of named channels; `name` is the caller's, for errors."""
    if len(rows) > 1 or (rows and channels):
        got = f"{len(rows)} arrays" if len(rows) > 1 else "an array"
        beside = f" beside {', '.join(channels)}" if channels else ""
        raise NotRowsError(
            f"{name}(...) got {got} without a name{beside}; must be one array, `wx = await {name}(x)`, "
            f"or named ones, `wx, wy = await {name}(x=…, y=…)`"
        )
    if rows:
        return Outgoing({_UNNAMED: _message(name, "…", rows[0])}, True, route, participants)
    messages = {key: _message(name, f"{key}=…", value) for key, value in channels.items()}
    return Outgoing(messages, False, route, participants)


def exchange(**channels: Array | Message | Packed) -> Awaitable[tuple[Neighbours, ...]]:
    """Send rows to the neighbours in one packet; awaiting it gives the `Neighbours` of each channel, in their order.

    Packets, bytes and determinism are those of `mix`. Use it where a sum over neighbours is not enough: corrections per
    edge, copies of neighbours, weights of one's own.
    """
    return Outgoing(
        {name: _message("exchange", f"{name}=…", value) for name, value in channels.items()}, separate=True
    )


def _message(name: str, argument: str, rows: Array | Message | Packed) -> Message | Packed:
    if isinstance(rows, Message | Packed):
        return rows
    if not getattr(rows, "shape", ()):
        raise NotRowsError(f"{name}({argument}) got a {type(rows).__name__}; must be an array with a row per node")
    return dense(unwrap(rows))
