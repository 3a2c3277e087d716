"""Count the bytes, values and packets that every node has sent since the start of a run.

A node's packet is one broadcast, and one transmission per receiver: all neighbours, or in a star the server (up) or the
clients of the round (down). The ledger of a block covers the block's rows
only; `Ledger.merge` combines blocks. Two counts are kept separate:

* the real traffic: encoded bytes, headers included (`bytes_broadcast`, `bytes_links`), and the four totals
  {values only, values + indices} × {per broadcast, per link} without headers (`totals`);
* the paper's Table 1 (`paper_megabytes`): float32 values of one node, nominal k per message, once per broadcast.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dbo.algorithms.api import Message, Packed
from dbo.platform.network.codecs import ENCODED, VALUE_BYTES, VALUES
from dbo.platform.network.packet import PacketSizes

Counts = NDArray[np.int64]

_MEBIBYTE = 1 << 20
_NOMINAL = 3             # column of a channel's table beside the three of `codecs.Table`
_MAX_PENDING = 8         # sums of packets; in a star the receivers change from round to round
_CHANNEL = "channel."    # prefix of a channel's table in an export


@dataclass(slots=True)
class _Sum:
    """Packets of all rows with the same channels and receivers, which are counted when somebody reads the counts."""

    receivers: Counts
    header: Counts
    tables: dict[str, Counts]      # channel → (nodes, 3)
    kept: dict[str, int]
    packets: int = 0


class Ledger:
    """Counts per channel and node."""

    def __init__(self, ids: Sequence[int] | Counts, degree: Sequence[int] | Counts) -> None:
        self.ids: Counts = np.array(ids, dtype=np.int64)
        self.degree: Counts = np.array(degree, dtype=np.int64)
        if self.ids.shape != self.degree.shape or len(set(self.ids.tolist())) != self.ids.size:
            raise ValueError(f"a ledger needs distinct nodes and a degree for each, got {self.ids} and {self.degree}")
        self._packets: Counts = np.zeros_like(self.ids)
        self._header: Counts = np.zeros_like(self.ids)
        self._received: Counts = np.zeros((self.ids.size, 3), dtype=np.int64)
        self._channels: dict[str, Counts] = {}              # channel → (nodes, 4)
        self._pending: dict[tuple[int, tuple[str, ...]], _Sum] = {}

    def record(
        self, messages: Mapping[str, Message | Packed], sizes: PacketSizes,
        sends: NDArray[np.bool_] | None = None, receivers: Counts | None = None,
    ) -> None:
        """Count one packet of every row, with these messages of these sizes, sent to all neighbours.

        In a star `sends` are the rows that send a packet, and `receivers` the numbers of nodes that receive it.
        """
        receivers = self.degree if receivers is None else receivers
        if sends is not None and not np.logical_and.reduce(sends):
            self._settle()
            self._add(sends.astype(np.int64), receivers, sizes.header, sizes.tables, {
                name: message.kept for name, message in messages.items()})
            return
        key = id(receivers), tuple(sizes.tables)            # `receivers` is kept: no other array has its number
        total = self._pending.get(key)
        if total is None:
            if len(self._pending) >= _MAX_PENDING:
                self._settle()
            tables = {name: np.zeros_like(table) for name, table in sizes.tables.items()}
            total = self._pending[key] = _Sum(receivers, np.zeros_like(self.ids), tables, dict.fromkeys(tables, 0))
        total.packets += 1
        total.header += sizes.header
        for name, counts in sizes.tables.items():
            table = total.tables[name]
            table += counts
            total.kept[name] += messages[name].kept

    def _settle(self) -> None:
        """Count the packets that have been added up."""
        pending, self._pending = self._pending, {}
        for total in pending.values():
            everybody = np.ones_like(self.ids)
            self._packets += (total.packets - 1) * everybody
            self._add(everybody, total.receivers, total.header, total.tables, total.kept)

    def _add(
        self, sent: Counts, receivers: Counts, header: Counts, tables: Mapping[str, Counts], kept: Mapping[str, int]
    ) -> None:
        """Count packets of the rows where `sent` is 1."""
        self._packets += sent
        self._header += sent * header
        bodies = np.zeros((self.ids.size, 3), dtype=np.int64)
        for name, counts in tables.items():
            table = self._channels.get(name)
            if table is None:
                table = self._channels[name] = np.zeros((self.ids.size, 4), dtype=np.int64)
            bodies += counts
            table[:, :_NOMINAL] += sent[:, None] * counts
            table[:, _NOMINAL] += sent * kept[name]
        self._received[:, 1:] += receivers[:, None] * bodies[:, : VALUE_BYTES + 1]
        self._received[:, 0] += receivers * (header + bodies[:, ENCODED])

    @property
    def packets(self) -> Counts:
        """(nodes,) packets that each node has sent."""
        self._settle()
        return self._packets

    @property
    def header(self) -> Counts:
        """(nodes,) bytes of them outside of bodies."""
        self._settle()
        return self._header

    @property
    def received(self) -> Counts:
        """(nodes, 3) bytes counted once per receiver: whole packets, bodies, values."""
        self._settle()
        return self._received

    @property
    def _tables(self) -> dict[str, Counts]:
        self._settle()
        return self._channels

    @property
    def channels(self) -> tuple[str, ...]:
        """The channels that have been used, in order of first use."""
        return tuple(self._tables)

    def bytes_by_channel(self) -> dict[str, Counts]:
        """(nodes,) bytes that each node has broadcast, by channel, and those outside of bodies as "header"."""
        return {"header": self.header.copy()} | {name: t[:, ENCODED].copy() for name, t in self._tables.items()}

    def values_by_channel(self) -> dict[str, Counts]:
        """(nodes,) values that each node has broadcast, by channel."""
        return {name: table[:, VALUES].copy() for name, table in self._tables.items()}

    def bytes_by_node(self) -> Counts:
        """(nodes,) encoded bytes that each node has broadcast, headers included."""
        return self.header + self._column(ENCODED)

    @property
    def bytes_broadcast(self) -> int:
        """Encoded bytes, each packet once."""
        return int(self.bytes_by_node().sum())

    @property
    def bytes_links(self) -> int:
        """Encoded bytes, each packet once for every neighbour that receives it."""
        return int(self.received[:, 0].sum())

    def links(self, neighbours: Sequence[Sequence[int]]) -> dict[tuple[int, int], int]:
        """Encoded bytes that went from i to j, by (i, j); `neighbours` are those of the whole network."""
        sent = zip(self.ids.tolist(), self.bytes_by_node().tolist(), strict=True)
        return {(i, j): count for i, count in sent for j in neighbours[i]}

    def totals(self) -> dict[str, int]:
        """Return the bytes without headers, by the four counting conventions of the literature."""
        values, bodies = self._column(VALUE_BYTES), self._column(ENCODED)
        return {
            "values_broadcast": int(values.sum()),
            "values_links": int(self.received[:, 2].sum()),
            "values_indices_broadcast": int(bodies.sum()),
            "values_indices_links": int(self.received[:, 1].sum()),
        }

    def paper_megabytes(self, weights: Mapping[str, float] | None = None) -> float:
        """Return Table 1's "MB": MiB of float32 values that a node broadcasts on average, k values per message.

        `weights` is how often a channel counts where that is not once; the paper leaves out half of C²DFB's.
        """
        weights = weights or {}
        # Rounded once: a restored ledger has its channels in another order, and must give the same bits.
        values = fsum(weights.get(name, 1.0) * float(t[:, _NOMINAL].mean()) for name, t in self._tables.items())
        return values * 4 / _MEBIBYTE

    def export(self) -> dict[str, NDArray[Any]]:
        """Return all counts as arrays, rows first, for a checkpoint."""
        flat = {"ids": self.ids.copy(), "packets": self.packets.copy(), "header": self.header.copy()}
        flat["received"] = self.received.copy()
        return flat | {f"{_CHANNEL}{name}": table.copy() for name, table in self._tables.items()}

    def restore(self, *exports: Mapping[str, NDArray[Any]]) -> None:
        """Go back to the counts of an export; those of other blocks may be among them, rows are found by node."""
        given = np.concatenate([part["ids"] for part in exports]) if exports else self.ids[:0]
        order = np.argsort(given, kind="stable")
        if len(np.unique(given)) != len(given):
            raise ValueError("ledger: a node is in more than one export")
        at = np.searchsorted(given[order], self.ids)
        is_known = at < len(given)
        is_known[is_known] = given[order][at[is_known]] == self.ids[is_known]
        if not is_known.all():
            raise ValueError(f"ledger: no counts for nodes {self.ids[~is_known].tolist()}")
        rows = order[at]                                    # of the exports one below the other
        names = dict.fromkeys(key for part in exports for key in part if key.startswith(_CHANNEL))
        self.packets[:] = np.concatenate([part["packets"] for part in exports])[rows]
        self.header[:] = np.concatenate([part["header"] for part in exports])[rows]
        self._channels = {
            name.removeprefix(_CHANNEL): np.concatenate([
                part[name] if name in part else np.zeros((len(part["ids"]), 4), dtype=np.int64) for part in exports
            ])[rows]
            for name in names
        }
        if all("received" in part for part in exports):
            self.received[:] = np.concatenate([part["received"] for part in exports])[rows]
        else:                                               # older checkpoints: all neighbours received all
            counts = (self.bytes_by_node(), self._column(ENCODED), self._column(VALUE_BYTES))
            self.received[:] = self.degree[:, None] * np.stack(counts, axis=1)

    @classmethod
    def merge(cls, parts: Iterable["Ledger"]) -> Self:
        """Return one ledger of all blocks' rows, in node order."""
        parts = list(parts)
        ids, degree = (np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "degree"))
        nodes, first = np.unique(ids, return_index=True)
        merged = cls(nodes, degree[first])
        merged.restore(*(part.export() for part in parts))
        return merged

    def _column(self, column: int) -> Counts:
        """Return the (nodes,) sum of a column over all channels."""
        return sum((table[:, column] for table in self._tables.values()), np.zeros_like(self.ids))
