"""What a node says to its neighbours: the message, and the one awaitable of this room.

`await mix(x=a, s=b)` shows a and b to the neighbours in one packet and answers with (Σ_j w_ij a_j, Σ_j w_ij b_j), the
own rows included. The engine drives the coroutine with `.send()`; there is no event loop.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn

import numpy as np

from dbo.algorithms.protocol import Array

Form = Literal["dense", "sparse", "levels"]


@dataclass(frozen=True, slots=True)
class Message:
    """Rows as every receiver will see them, and what the wire needs to know to make them small.

    `values` is what decoding gives, to the last bit. "sparse" rows travel without their zeros; "levels" rows are
    integers times one unit per row, `values = levels * unit`, and travel as integers of `bits` bits each.
    """

    values: Array                  # (nodes, dim)
    form: Form = "dense"
    kept: int = 0                  # entries per row in the paper's count: k for top-k, dim for dense
    levels: Array | None = None    # (nodes, dim) integers in [-2^(bits-1), 2^(bits-1))
    unit: Array | None = None      # (nodes,) in the dtype of values
    bits: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)


@dataclass(frozen=True, slots=True)
class PackedRow:
    """A sparse row as it travels: a mark per entry, 64 to a word and the first lowest; the marked entries in order."""

    words: Array      # (⌈dim / 64⌉,) uint64
    entries: Array    # (marks,) none of them zero

    @classmethod
    def of(cls, row: Array) -> "PackedRow":
        there = row != 0
        marks = np.zeros(-(-row.size // 64) * 8, dtype=np.uint8)
        marks[: -(-row.size // 8)] = np.packbits(there, bitorder="little")
        return cls(marks.view("<u8"), row[there])

    def positions(self, dim: int) -> Array:
        """Where the entries belong, ascending."""
        marks = np.unpackbits(self.words.view(np.uint8), count=dim, bitorder="little")
        return np.flatnonzero(marks)

    def dense(self, dim: int) -> Array:
        row = np.zeros(dim, dtype=self.entries.dtype)
        row[self.positions(dim)] = self.entries
        return row


@dataclass(frozen=True, slots=True)
class Packed:
    """A sparse message of rows that are too wide to be kept in full beside what is sent of them."""

    rows: tuple[PackedRow, ...]
    dim: int
    kept: int
    form: ClassVar[Form] = "sparse"

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.rows), self.dim

    @property
    def values(self) -> Array:
        """The rows in full, made anew for whoever asks."""
        return np.stack([row.dense(self.dim) for row in self.rows])


@dataclass(frozen=True, slots=True)
class Sum:
    """Σ_j w_ij q_j of packed rows, not yet formed: for each row of the block its weights and the neighbours' rows."""

    terms: tuple[tuple[tuple[float, PackedRow], ...], ...]
    dim: int

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """The sum in full, for algorithms that do not add it to anything."""
        kind = self.terms[0][0][1].entries.dtype
        rows = np.zeros((len(self.terms), self.dim), dtype=kind)
        for row, terms in zip(rows, self.terms, strict=True):
            for weight, packed in terms:
                row[packed.positions(self.dim)] += kind.type(weight) * packed.entries
        return rows if dtype is None else rows.astype(dtype)


def dense(values: Array) -> Message:
    """A message that is sent as it is."""
    return Message(values, kept=values.shape[-1])


class NotRows(TypeError):
    """Something was taken for rows, to be shown to the neighbours or to be reckoned with, that is none."""


class _NoNumber:
    """What arithmetic refuses with a word about what was meant, also beside an array."""

    __slots__ = ()
    meant: ClassVar[str]

    def __array_ufunc__(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()                  # beside an array, in place too

    def _refuse(self, other: Any = None) -> NoReturn:
        raise NotRows(self.meant)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __neg__ = __pow__ = _refuse


class Answer(_NoNumber, tuple[Array, ...]):
    """Σ_j w_ij (·)_j of each channel, in the order in which they were given; one channel is a tuple of one."""

    __slots__ = ()
    meant: ClassVar[str] = "await mix(...) answers with a tuple, a part per channel: write `(x,) = await mix(x=…)`"


@dataclass(frozen=True, slots=True)
class Outgoing(_NoNumber):
    """One packet per row: named messages that travel together."""

    channels: dict[str, Message | Packed]
    meant: ClassVar[str] = "mix(...) must be awaited: write `await mix(...)`"

    def __await__(self) -> Generator["Outgoing", tuple[Array, ...], Answer]:
        return Answer((yield self))

    def __iter__(self) -> NoReturn:
        self._refuse()


def mix(*unnamed: Any, **channels: Array | Message | Packed) -> Outgoing:
    """Shows the rows to the neighbours; awaiting it gives Σ_j w_ij (·)_j for each channel, in the order given."""
    if unnamed:
        raise NotRows("mix(...) got rows without a name: write mix(x=…), bytes are counted by these names")
    return Outgoing({name: _message(name, shown) for name, shown in channels.items()})


def _message(channel: str, shown: Array | Message | Packed) -> Message | Packed:
    if isinstance(shown, Message | Packed):
        return shown
    if not getattr(shown, "shape", ()):
        raise NotRows(f"mix({channel}=…) got a {type(shown).__name__}; must be an array with a row per node")
    return dense(shown)
