"""Check random draws: that compressors are contractive in the mean over keys, and that methods use a new key each time.

A key is (seed, node, round, step), and the channel. Two messages with the same key and channel, or two nodes with the
same number, draw the same random numbers. The run then looks right: only its noise does not average out.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dbo.algorithms.api import Array, Compressor, Key, Message, RandK
from dbo.platform.engine.local import LocalEngine

ROUNDS = 3
SAMPLES = 400               # keys, over which the mean is taken
DIM = 48                    # two draws of a compressor with so many entries do not agree by chance
STANDARD_ERRORS = 5.0


# ---- compressors -----------------------------------------------------------------------------------------------------


def find_compressor_faults(q: Compressor) -> Iterator[str]:
    """Yield what is wrong with a compressor: contraction in the mean, draws, independence of rows."""
    rng = np.random.default_rng(1)
    for what, row in (("normal", rng.standard_normal(DIM)), ("heavy-tailed", rng.standard_t(1.5, DIM))):
        rows = np.tile(row, (SAMPLES, 1))
        error = np.sum((_send(q, rows, Key(7, np.arange(SAMPLES), 0)) - rows) ** 2, axis=1)
        limit, size = 1 - q.contraction(DIM), float(row @ row)
        margin = STANDARD_ERRORS * float(error.std()) / np.sqrt(SAMPLES)
        if not error.mean() <= limit * size + margin + 1e-9 * size:
            yield (f"E‖Q(v) − v‖² is {error.mean() / size:.3g} ‖v‖² over {SAMPLES} keys and {what} v, more than "
                   f"1 − δ = {limit:.3g}: correct contraction(dim) or the scaling of Q")
            return
    rows, ids = np.tile(rng.standard_normal(DIM), (2, 1)), np.arange(2)
    base = _send(q, rows, Key(7, ids, 3, 2))
    if not np.array_equal(base, _send(q, rows, Key(7, ids, 3, 2))):
        yield "the same key gives another message: draw from key.generators(channel)"
    elif not np.array_equal(base[1:], _send(q, rows[1:], Key(7, ids[1:], 3, 2))):
        yield "a row alone gives another message than in a stack: each row must be compressed by itself"
    elif not np.array_equal(base[0], base[1]):                      # random
        others = {
            "seeds": Key(8, ids, 3, 2), "rounds": Key(7, ids, 4, 2), "steps": Key(7, ids, 3, 3),
        }
        same = [what for what, key in others.items() if np.array_equal(_send(q, rows, key), base)]
        same += ["channels"] if np.array_equal(_send(q, rows, Key(7, ids, 3, 2), "other"), base) else []
        if same:
            yield f"different {', '.join(same)} draw the same numbers: draw from key.generators(channel)"


def _send(q: Compressor, rows: Array, key: Key, channel: str = "y") -> Array:
    values: Array = np.asarray(q(rows, key, channel).values)
    return values


# ---- keys of a method ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingRandK(RandK):
    """rand-k that notes the keys that it is called with."""

    calls: list[tuple[Key, str]] = field(default_factory=list, compare=False)

    def __call__(self, rows: Array, key: Key, channel: str) -> Message:
        self.calls.append((key, channel))
        return RandK.__call__(self, rows, key, channel)


def record_draws(config: Any, names: Iterable[str]) -> tuple[Any, list[tuple[Key, str]]]:
    """Return the configuration with recording compressors in these fields, and their common list of calls."""
    calls: list[tuple[Key, str]] = []
    return replace(config, **{name: RecordingRandK(ratio=0.3, calls=calls) for name in names}), calls


def find_draw_faults(engine: LocalEngine, calls: list[tuple[Key, str]]) -> Iterator[str]:
    """Run a few rounds and yield which draws are repeated."""
    block, seen = engine.local_blocks[0], dict[tuple[int, int, str], int]()
    for round_ in range(1, ROUNDS + 1):
        calls.clear()
        engine.advance(round_)
        for key, channel in calls:
            ids = [int(node) for node in key.ids]
            if len(set(ids)) < len(ids):
                yield f"nodes draw the same numbers on channel {channel}: key.ids must be shard.ids"
                return
            if key.seed != block.shard.seed:
                yield f"channel {channel} draws from another seed than the experiment's: use round_key(shard, st.t)"
                return
            before = seen.setdefault((key.round, key.step, channel), round_)
            if before != round_:
                yield (f"rounds {before} and {round_} draw the same numbers on channel {channel}: "
                       f"use round_key(shard, st.t), and count t in the state")
                return
        counts = [(key.round, key.step, channel) for key, channel in calls]
        repeated = next((call for call in counts if counts.count(call) > 1), None)
        if repeated:
            yield (f"two messages of a round draw the same numbers (channel {repeated[2]}, step {repeated[1]}): "
                   f"use key.at(k) in each inner step, and a channel name of its own for each message")
            return
