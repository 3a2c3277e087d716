"""Draw mini-batches: sample numbers that depend on (seed, level, node, round, step) and on nothing else.

Neither the packing of nodes into processes nor a resumed run changes them. The batches of several steps are drawn at
once, because all keys of a run are known before it begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal
from zlib import crc32

import numpy as np

from dbo.tasks.arrays import Array
from dbo.tasks.streams import draw_integers

_AHEAD = 1 << 13      # numbers that are drawn at once at most, so that they stay in the cache

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
        per_round, step = (1, 0) if self.per == "round" else (self.per_round, step)
        count = round_ * per_round + step
        ahead = max(1, _AHEAD // (max(1, len(ids)) * size)) if step < per_round else 0      # 0: an undeclared step
        first = divmod(count // ahead * ahead, per_round) if ahead else (round_, step)
        steps = _draw_ahead(
            level, self.order, seed, size, per_round, first, ahead,
            ids.astype(np.int64, copy=False).tobytes(), sizes.astype(np.int64, copy=False).tobytes())
        numbers: Array = steps[count % ahead if ahead else 0]
        return numbers


@lru_cache(maxsize=256)
def _draw_ahead(
    level: Level, order: str, seed: int, size: int, per_round: int, first: tuple[int, int], ahead: int, ids: bytes,
    sizes: bytes,
) -> Array:
    """Return (steps, nodes, batch) numbers of the steps from (round, step) on; read-only, because calls share them."""
    start = first[0] * per_round + first[1]
    steps = [divmod(count, per_round) for count in range(start, start + ahead)] or [first]
    nodes, have = np.frombuffer(ids, dtype=np.int64), np.frombuffer(sizes, dtype=np.int64)
    if order == "epoch":
        counts = [round_ * per_round + step for round_, step in steps]
        numbers = np.empty((len(steps), len(nodes), size), dtype=np.int64)
        for row, (node, own) in enumerate(zip(nodes.tolist(), have.tolist(), strict=True)):
            numbers[:, row] = _cut_epochs(seed, level, node, own, size, counts)
    else:
        keys = np.empty((len(steps), len(nodes), 3), dtype=np.int64)
        keys[:, :, 0], keys[:, :, 1:] = nodes, np.array(steps, dtype=np.int64)[:, None]
        flat = _draw(seed, f"batch {level}", keys.reshape(-1, 3), np.tile(have, len(steps)), size)
        numbers = flat.reshape(len(steps), len(nodes), size)
    numbers.setflags(write=False)
    return numbers


def _cut_epochs(seed: int, level: Level, node: int, have: int, size: int, counts: Sequence[int]) -> Array:
    """Return the batches with these numbers since the start, each of the random order of its epoch."""
    orders: dict[int, Array] = {}
    batches = []
    for count in counts:
        epoch, number = divmod(count, have // size)
        if epoch not in orders:
            orders[epoch] = _generator(seed, f"epoch {level}", node, epoch).permutation(have)
        batches.append(orders[epoch][number * size : (number + 1) * size])
    return np.stack(batches)


def _draw(seed: int, purpose: str, keys: Array, sizes: Array, size: int) -> Array:
    """Return, per key, `size` of the numbers below its size without repetition; every subset is equally likely.

    A small batch is drawn with repetitions, which are then dropped: `choice` takes several times as long.
    """
    numbers = np.empty((len(keys), size), dtype=np.int64)
    is_small = 4 * size <= sizes
    is_open = ~is_small
    small = np.flatnonzero(is_small)
    if small.size and max(seed, int(keys.max()), int(sizes.max())) < 1 << 32:
        words = np.empty((small.size, 5), dtype=np.uint32)      # those of `_generator`
        words[:, 0], words[:, 1], words[:, 2:] = seed, crc32(purpose.encode()), keys[small]
        samples, is_rejected = draw_integers(words, sizes[small], size)
        first = _find_first(samples, size)
        has_few = first[:, -1] >= samples.shape[1]
        first[has_few] = 0
        numbers[small] = np.take_along_axis(samples, first, axis=1)
        is_open[small] = is_rejected | has_few
    else:
        is_open[:] = True
    for row in np.flatnonzero(is_open).tolist():
        generator, have = _generator(seed, purpose, *keys[row].tolist()), int(sizes[row])
        numbers[row] = _draw_more(generator, have, size) if is_small[row] else generator.permutation(have)[:size]
    return numbers


def _draw_more(generator: np.random.Generator, have: int, size: int) -> Array:
    """Draw until there are `size` different numbers; return the first ones."""
    samples = generator.integers(have, size=2 * size)
    while len(np.unique(samples)) < size:
        samples = np.concatenate([samples, generator.integers(have, size=size)])
    found: Array = samples[_find_first(samples[None], size)[0]]
    return found


def _find_first(numbers: Array, size: int) -> Array:
    """Return, per row, the first `size` positions of numbers that were not there before; the row's length for none."""
    length = numbers.shape[1]
    shift = length.bit_length()
    is_short = (int(numbers.max(initial=0)) + 1) << shift < 1 << 31
    keys: Array = numbers.astype(np.int32 if is_short else np.int64)      # short numbers are sorted faster
    keys <<= shift
    keys |= np.arange(length, dtype=keys.dtype)
    keys.sort(axis=1)                     # equal numbers follow each other, in the order of their positions
    ranked = keys >> shift
    keys &= (1 << shift) - 1
    keys[:, 1:][ranked[:, 1:] == ranked[:, :-1]] = length
    keys.sort(axis=1)
    first: Array = keys[:, :size].astype(np.int64)
    return first


def _generator(seed: int, purpose: str, *key: int) -> np.random.Generator:
    return np.random.default_rng([seed, crc32(purpose.encode()), *key])
