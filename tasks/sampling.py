"""Draw mini-batches: sample numbers that depend on (seed, level, node, round, step) and on nothing else.

Neither the packing of nodes into processes nor a resumed run changes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from zlib import crc32

import numpy as np

from dbo.tasks.arrays import Array

Level = Literal["lower", "upper"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """How many samples a step sees, and how they are drawn.

    `independent` draws every batch anew, without a repetition inside the batch. `epoch` cuts a random order of a node's
    samples into batches and uses all of them before it draws the next order; samples that do not fill a batch wait for
    another order.
    """

    lower: int | None = None        # samples per node; None: all of them
    upper: int | None = None
    per: Literal["step", "round"] = "step"
    order: Literal["independent", "epoch"] = "independent"
    per_round: int = 1              # batches that the algorithm draws in a round; counts the epochs

    @property
    def is_full(self) -> bool:
        """Whether every step sees all samples."""
        return self.lower is None and self.upper is None

    def check(self, lower: Sequence[int] | Array, upper: Sequence[int] | Array) -> None:
        """Raise ValueError if a batch is larger than the data of a node."""
        for level, size, sizes in (("lower", self.lower, lower), ("upper", self.upper, upper)):
            if size is None:
                continue
            smallest = int(np.argmin(sizes))
            have = int(sizes[smallest])
            if have == 0:
                raise ValueError("batch_size: this task has no samples; must be null")
            if size > have:
                raise ValueError(
                    f"batch_size.{level}: {size} is not allowed; node {smallest} has {have} samples; must be ≤ {have}, "
                    f"or choose fewer nodes or another partition"
                )

    def draw(self, level: Level, seed: int, ids: Array, sizes: Array, round_: int, step: int) -> Array | None:
        """Return (nodes, batch) numbers among each node's own samples; None: all samples."""
        size = self.lower if level == "lower" else self.upper
        if size is None:
            return None
        if self.per == "round":
            step = 0
        numbers = np.empty((len(ids), size), dtype=np.int64)
        for row, (node, have) in enumerate(zip(ids.tolist(), sizes.tolist(), strict=True)):
            if self.order == "epoch":
                count = round_ * (1 if self.per == "round" else self.per_round) + step
                epoch, number = divmod(count, have // size)
                order = _generator(seed, f"epoch {level}", node, epoch).permutation(have)
                numbers[row] = order[number * size : (number + 1) * size]
            else:
                numbers[row] = _draw(_generator(seed, f"batch {level}", node, round_, step), have, size)
        return numbers


def _draw(generator: np.random.Generator, have: int, size: int) -> Array:
    """Return `size` of the numbers below `have` without repetition; every subset is equally likely.

    A small batch is drawn with repetitions, which are then dropped: `choice` takes several times as long.
    """
    if 4 * size > have:
        return generator.permutation(have)[:size]
    numbers = generator.integers(have, size=2 * size)
    while True:
        first = np.sort(np.unique(numbers, return_index=True)[1])
        if len(first) >= size:
            return numbers[first[:size]]
        numbers = np.concatenate([numbers, generator.integers(have, size=size)])


def _generator(seed: int, purpose: str, *key: int) -> np.random.Generator:
    return np.random.default_rng([seed, crc32(purpose.encode()), *key])
