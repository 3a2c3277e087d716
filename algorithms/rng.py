"""Derive random numbers from (seed, purpose, node, round, step) and from nothing else.

Neither the packing of nodes into processes nor the order of calls changes them, and a resumed run gets the numbers that
the uninterrupted run would have got.
"""

from dataclasses import dataclass
from zlib import crc32

import numpy as np

from dbo.algorithms.protocol import Array, Shard


@dataclass(frozen=True, slots=True)
class Key:
    """The random key of one (round, step): request generators from it, by purpose, or a batch with `shard.sample`."""

    seed: int
    ids: Array
    round: int
    step: int = 0

    def at(self, step: int) -> "Key":
        """Return the key of another inner step of the same round."""
        return Key(self.seed, self.ids, self.round, step)

    def generators(self, purpose: str) -> list[np.random.Generator]:
        """Return one generator per row."""
        return [
            np.random.default_rng([self.seed, crc32(purpose.encode()), int(node), self.round, self.step])
            for node in self.ids
        ]


def round_key(shard: Shard, rounds_done: Array) -> Key:
    """Return the key of the coming round; `rounds_done` is the (nodes, 1) counter in the state."""
    return Key(shard.seed, shard.ids, int(rounds_done[0, 0]) if len(rounds_done) else 0)


def counter(shard: Shard) -> Array:
    """Return a (nodes, 1) round counter at 0, for a state; it keys the random numbers."""
    return np.zeros((shard.nodes, 1), dtype=np.int64)
