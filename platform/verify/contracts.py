"""Check the contracts that every algorithm must keep, whatever it computes.

Determinism: a repeated run gives the same bits. Resume: so does a run that continues from a checkpoint. Packing: how
nodes are packed into blocks does not matter. No hidden state: a round does not write into the state that it is given.
An algorithm breaks them with a random generator of its own, with memory outside of its state, with rows that see each
other without `mix`, or with in-place updates of its arguments. Nothing else would show that.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from dbo.platform.engine.local import LocalEngine
from dbo.platform.engine.state_tree import Flat, first_nonfinite, flatten

Start = Callable[[Sequence[Sequence[int]] | None], LocalEngine]      # a new engine with these blocks; None: one block

ROUNDS = 4
TOLERANCE = 1e-9        # relative: packing may change the order of sums over neighbours


def find_violations(start: Start, nodes: int) -> Iterator[str]:
    """Yield the violated contracts, each with its likely cause."""
    first = _run(start(None))
    if not _are_equal(first, _run(start(None))):
        yield "a second run differs from the first: random numbers must come from round_key(shard, st.t), " \
              "and all memory must be in the state"
        return                              # the other checks compare runs too
    if name := first_nonfinite(first):
        yield f"state.{name} is not finite after {ROUNDS} rounds"
        return
    if not _are_equal(first, _run_with_resume(start)):
        yield "a run resumed from a checkpoint ends elsewhere: all memory must be in the state"
    if nodes > 1 and not _are_close(first, _run(start([[node] for node in range(nodes)]))):
        yield "nodes in blocks of their own end elsewhere: rows may see each other only through `await mix(...)`"
    if name := _find_overwritten(start(None)):
        yield f"a round writes into state.{name}, its argument: create a new array, x = x - … instead of x -= …"


def _run(engine: LocalEngine) -> Flat:
    _advance(engine, 1, ROUNDS)
    return _read_states(engine)


def _run_with_resume(start: Start) -> Flat:
    """Run half of the rounds, and the rest on a new engine that restores the snapshot."""
    straight, resumed = start(None), start(None)
    _advance(straight, 1, ROUNDS // 2)
    snapshot = [{key: rows.copy() for part in parts for key, rows in part.items()} for parts in straight.snapshot()]
    _run(start(None))                       # hidden memory is then that of another run
    resumed.restore(snapshot)
    _advance(resumed, ROUNDS // 2 + 1, ROUNDS)
    return _read_states(resumed)


def _advance(engine: LocalEngine, first: int, last: int) -> None:
    for round_ in range(first, last + 1):
        engine.advance(round_)


def _read_states(engine: LocalEngine) -> Flat:
    """Return all arrays of all nodes, in node order."""
    parts = [flatten(block.state) for block in engine.local_blocks]
    order = np.argsort([node for block in engine.local_blocks for node in block.ids])
    return {name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]}


def _find_overwritten(engine: LocalEngine) -> str | None:
    """Return the name of a state array that a round has changed in place."""
    block = engine.local_blocks[0]
    for round_ in range(1, ROUNDS + 1):
        given = flatten(block.state)
        copies = {name: rows.copy() for name, rows in given.items()}
        engine.advance(round_)
        for name, rows in given.items():
            if not np.array_equal(rows, copies[name], equal_nan=True):
                return name
    return None


def _are_equal(one: Flat, other: Flat) -> bool:
    return all(np.array_equal(rows, other[name], equal_nan=True) for name, rows in one.items())


def _are_close(one: Flat, other: Flat) -> bool:
    return all(
        np.allclose(rows, other[name], rtol=0, atol=TOLERANCE * max(1.0, np.abs(rows).max(initial=0)))
        if rows.dtype.kind == "f" else np.array_equal(rows, other[name])
        for name, rows in one.items()
    )
