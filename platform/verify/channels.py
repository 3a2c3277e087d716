"""Find channels whose content changes nothing: bytes that an algorithm sends in vain.

Everything that the nodes receive on one channel gets noise added. If x and y then have the same bits in every round, no
node uses that channel. A run stops at the first round that differs, which is the second for most trackers.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dbo.algorithms.api import Algorithm, Array, Neighbours, Outgoing
from dbo.platform.engine.local import LocalEngine

ROUNDS = 5      # what a tracker receives reaches x in the third

Start = Callable[[Algorithm], LocalEngine]
Change = Callable[[Outgoing, tuple[Any, ...]], tuple[Any, ...]]


def find_channels(algorithm: Algorithm, start: Start) -> tuple[list[str], list[str]]:
    """Return the names of all channels, and of those without influence on x and y."""
    names: dict[str, None] = {}

    def record(outgoing: Outgoing, answers: tuple[Any, ...]) -> tuple[Any, ...]:
        names.update(dict.fromkeys(outgoing.channels))
        return answers

    expected = list(_run(algorithm, start, record))
    unused = [name for name in names if all(map(_are_equal, expected, _run(algorithm, start, _Noise(name))))]
    return list(names), unused


def _run(algorithm: Algorithm, start: Start, change: Change) -> Iterator[tuple[Array, Array]]:
    """Yield x and y after each round."""
    async def round_(st: Any, shard: Any, cfg: Any) -> Any:
        return await _Changed(algorithm, (st, shard, cfg), change)

    engine = start(replace(algorithm, round=round_))
    block = engine.local_blocks[0]
    for number in range(1, ROUNDS + 1):
        engine.advance(number)
        yield block.rows("x").copy(), block.rows("y").copy()


def _are_equal(one: tuple[Array, Array], other: tuple[Array, Array]) -> bool:
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True))


@dataclass(frozen=True, slots=True)
class _Changed:
    """A round whose received messages are changed on their way to the algorithm."""

    algorithm: Algorithm
    arguments: tuple[Any, Any, Any]
    change: Change

    def __await__(self) -> Generator[Outgoing, tuple[Any, ...], Any]:
        coroutine = self.algorithm.round(*self.arguments)
        answers: Any = None
        try:
            while True:
                outgoing = coroutine.send(answers)
                answers = self.change(outgoing, (yield outgoing))
        except StopIteration as stop:
            return stop.value


class _Noise:
    """Add noise to what is received on one channel."""

    def __init__(self, channel: str) -> None:
        self._channel, self._rng = channel, np.random.default_rng(0)

    def __call__(self, outgoing: Outgoing, answers: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            self._add(outgoing, answer) if name == self._channel else answer
            for name, answer in zip(outgoing.channels, answers, strict=True)
        )

    def _add(self, outgoing: Outgoing, answer: Any) -> Any:
        if isinstance(answer, Neighbours):
            return replace(answer, rows=answer.rows + self._draw(answer.rows) * (answer.weights > 0))
        rows = np.ones((len(answer), 1))
        if outgoing.route == "up":
            rows[:-1] = 0                   # the server alone receives
        elif outgoing.route == "down":
            rows[[node not in outgoing.participants for node in range(len(answer))]] = 0
        return answer + self._draw(answer) * rows

    def _draw(self, like: Array) -> Array:
        noise: Array = 0.1 * (0.1 + np.abs(like).max(initial=0)) * self._rng.standard_normal(like.shape)
        return noise.astype(like.dtype)
