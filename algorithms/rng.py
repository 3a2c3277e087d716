"""Random numbers that depend on (seed, purpose, node, round, step) and on nothing else.

Neither the packing of nodes into processes nor the order of calls can change a draw, and a resumed run draws what the
straight run would have drawn.
"""

from dataclasses import dataclass
from zlib import crc32

import numpy as np

from dbo.algorithms.protocol import Array, Shard


@dataclass(frozen=True, slots=True)
class Draws:
    """The generators of one (round, step): ask for one per purpose."""

    seed: int
    ids: Array
    round: int
    step: int = 0

    def at(self, step: int) -> "Draws":
        """The same round, another step of its inner loop."""
        return Draws(self.seed, self.ids, self.round, step)

    def generators(self, purpose: str) -> list[np.random.Generator]:
        """One generator per row."""
        return [
            np.random.default_rng([self.seed, crc32(purpose.encode()), int(node), self.round, self.step])
            for node in self.ids
        ]


def draws(shard: Shard, rounds_done: Array) -> Draws:
    """The draws of the coming round; `rounds_done` is the (nodes, 1) counter that the state carries."""
    return Draws(shard.seed, shard.ids, int(rounds_done[0, 0]) if len(rounds_done) else 0)
