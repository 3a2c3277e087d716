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
        if self.order == "epoch":
            count = round_ * (1 if self.per == "round" else self.per_round) + step
            return np.stack([
                _cut_epoch(seed, level, node, have, size, count)
                for node, have in zip(ids.tolist(), sizes.tolist(), strict=True)
            ]) if len(ids) else np.empty((0, size), dtype=np.int64)
        return _draw(_generators(seed, f"batch {level}", ids, round_, step), sizes.tolist(), size)


def _cut_epoch(seed: int, level: Level, node: int, have: int, size: int, count: int) -> Array:
    """Return the batch with this number since the start, of the random order of its epoch."""
    epoch, number = divmod(count, have // size)
    order = _generator(seed, f"epoch {level}", node, epoch).permutation(have)
    return order[number * size : (number + 1) * size]


def _draw(generators: Sequence[np.random.Generator], sizes: Sequence[int], size: int) -> Array:
    """Return, per row, `size` of the numbers below its size without repetition; every subset is equally likely.

    A small batch is drawn with repetitions, which are then dropped: `choice` takes several times as long.
    """
    samples = np.empty((len(generators), 2 * size), dtype=np.int64)
    numbers = np.empty((len(generators), size), dtype=np.int64)
    is_small = np.array([4 * size <= have for have in sizes], dtype=np.bool_)
    for row, (generator, have) in enumerate(zip(generators, sizes, strict=True)):
        if is_small[row]:
            samples[row] = generator.integers(have, size=2 * size)
        else:
            numbers[row] = generator.permutation(have)[:size]
    small = np.flatnonzero(is_small)
    chosen = samples if small.size == len(samples) else samples[small]
    first = _find_first(chosen, size)
    if (first[:, -1] < chosen.shape[1]).all():
        numbers[small] = chosen.reshape(-1)[first + chosen.shape[1] * np.arange(len(chosen))[:, None]]
        return numbers
    for row in small.tolist():      # one of them had too few different numbers
        numbers[row] = _draw_more(generators[row], sizes[row], samples[row], size)
    return numbers


def _draw_more(generator: np.random.Generator, have: int, samples: Array, size: int) -> Array:
    """Draw until there are `size` different numbers; return the first ones."""
    while len(np.unique(samples)) < size:
        samples = np.concatenate([samples, generator.integers(have, size=size)])
    found: Array = samples[_find_first(samples[None], size)[0]]
    return found


def _find_first(numbers: Array, size: int) -> Array:
    """Return, per row, the first `size` positions of numbers that were not there before; the row's length for none."""
    length = numbers.shape[1]
    keys = numbers * length + np.arange(length)      # equal numbers follow each other, in the order of their positions
    keys.sort(axis=1)
    ranked = keys // length
    positions = keys - ranked * length
    positions[:, 1:][ranked[:, 1:] == ranked[:, :-1]] = length
    positions.sort(axis=1)
    first: Array = positions[:, :size]
    return first


def _generator(seed: int, purpose: str, *key: int) -> np.random.Generator:
    return np.random.default_rng([seed, crc32(purpose.encode()), *key])


def _generators(seed: int, purpose: str, ids: Array, *key: int) -> list[np.random.Generator]:
    """Return `_generator` of each node. NumPy takes half of its time to check a list of integers."""
    if max(seed, int(ids.max(initial=0)), *key) >= 1 << 32:
        return [_generator(seed, purpose, node, *key) for node in ids.tolist()]
    keys = np.empty((len(ids), 3 + len(key)), dtype=np.uint32)
    keys[:, :2], keys[:, 2], keys[:, 3:] = (seed, crc32(purpose.encode())), ids, key
    return [np.random.Generator(np.random.PCG64(row)) for row in keys]      # the generator of `default_rng`
