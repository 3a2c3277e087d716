"""What every algorithm must do, whatever it computes: `dbo verify` looks at it before it looks at numbers.

The same run again gives the same bits; so does one that goes on from a checkpoint; how nodes are packed into processes
does not matter; and a round leaves the state that it was given alone. An algorithm that draws from a generator of its
own, remembers something outside of its state, lets rows see each other without `mix`, or writes into its arguments does
none of this, and nothing else would tell.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from dbo.platform.engine.local import LocalEngine
from dbo.platform.engine.state_tree import Flat, finite, flatten

Start = Callable[[Sequence[Sequence[int]] | None], LocalEngine]      # a new engine with nodes packed so; None: together

ROUNDS = 4
TOLERANCE = 1e-9        # relative: sums over neighbours may be formed in another order


def broken(start: Start, nodes: int) -> Iterator[str]:
    """Which of these an algorithm does not keep, each with what may be the cause."""
    first = _after(start(None))
    if not _equal(first, _after(start(None))):
        yield "a second run differs from the first: random numbers must come from draws(shard, st.t), " \
              "and all that is remembered must be in the state"
        return                              # the other checks compare runs too
    if sick := finite(first):
        yield f"state.{sick} is not finite after {ROUNDS} rounds"
        return
    straight, resumed = start(None), start(None)
    _advance(straight, 1, ROUNDS // 2)
    blocks = [[part.items() for part in parts] for parts in straight.snapshot()]
    kept = [{key: rows.copy() for part in parts for key, rows in part} for parts in blocks]
    _after(start(None))                     # what is remembered elsewhere is then that of another run
    resumed.restore(kept)
    _advance(resumed, ROUNDS // 2 + 1, ROUNDS)
    if not _equal(first, _states(resumed)):
        yield "a run that goes on from a checkpoint ends elsewhere: all that is remembered must be in the state"
    if nodes > 1 and not _near(first, _after(start([[node] for node in range(nodes)]))):
        yield "nodes in processes of their own end elsewhere: rows may see each other only through `await mix(...)`"
    if changed := _overwritten(start(None)):
        yield f"a round writes into state.{changed}, which it was given: make a new array, x = x - … instead of x -= …"


def _after(engine: LocalEngine) -> Flat:
    _advance(engine, 1, ROUNDS)
    return _states(engine)


def _advance(engine: LocalEngine, first: int, last: int) -> None:
    for round_ in range(first, last + 1):
        engine.advance(round_)


def _states(engine: LocalEngine) -> Flat:
    """All arrays of all nodes, in the order of the nodes."""
    parts = [flatten(host.state) for host in engine.hosts]
    order = np.argsort([node for host in engine.hosts for node in host.ids])
    return {name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]}


def _overwritten(engine: LocalEngine) -> str | None:
    host = engine.hosts[0]
    for round_ in range(1, ROUNDS + 1):
        given = flatten(host.state)
        kept = {name: rows.copy() for name, rows in given.items()}
        engine.advance(round_)
        for name, rows in given.items():
            if not np.array_equal(rows, kept[name], equal_nan=True):
                return name
    return None


def _equal(one: Flat, other: Flat) -> bool:
    return all(np.array_equal(rows, other[name], equal_nan=True) for name, rows in one.items())


def _near(one: Flat, other: Flat) -> bool:
    return all(
        np.allclose(rows, other[name], rtol=0, atol=TOLERANCE * max(1.0, np.abs(rows).max(initial=0)))
        if rows.dtype.kind == "f" else np.array_equal(rows, other[name])
        for name, rows in one.items()
    )
