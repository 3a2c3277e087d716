"""Compare an algorithm with its reference, round by round: the only check of how it gets to its limit.

Invariants are about means over nodes and a limit is about the end. A consensus step of half its size, a step along the
wrong tracker or a gradient at the wrong point changes neither. So an algorithm may name a reference
(`dbo.algorithms.references`), and all rows that it yields must be those of the state, to rounding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from operator import attrgetter
from typing import Any

import numpy as np

from dbo.algorithms.api import Algorithm, Array
from dbo.parameters import declaration
from dbo.platform.engine.arrangement import arrange
from dbo.platform.engine.local import LocalEngine
from dbo.platform.engine.shard_wrappers import pool_shard
from dbo.platform.network.topology import TOPOLOGIES, build_network
from dbo.platform.verify.log_cosh import NODES, build_problem

ROUNDS = 6
TOLERANCE = 1e-10       # relative to the largest entry; rounding is 1e-15 … 1e-13
GRAPH = build_network(TOPOLOGIES["erdos_renyi"]().graph(NODES, 0))      # nodes have different degrees
SMALL_STEPS = 0.1       # of the step sizes: a run that bounces magnifies rounding
FACTOR = 0.97           # by which one number of a configuration is reduced more than the one before it

REQUIRED = frozenset({"x", "y"})


@dataclass(frozen=True, slots=True)
class Deviation:
    """Differences between the rows of the state and of the reference: the largest, and where they begin."""

    error: float
    path: str = ""      # of the first rows that differ by more than rounding
    round: int = 0


class ReferenceMismatchError(Exception):
    """A reference yields rows that the state does not have, or has in another shape."""


def separate_numbers(config: Any) -> Any:
    """Return a configuration with small steps, whose numbers all differ: one used for another shows."""
    changes = {}
    for number, field in enumerate(fields(config)):
        value, declared = getattr(config, field.name), declaration(field)
        if isinstance(value, float) and value > 0 and value not in (declared.ge, declared.le):
            small = value * FACTOR**number * (SMALL_STEPS if declared.schedule else 1.0)
            at_least = [bound for bound in (declared.gt, declared.ge) if bound is not None]
            changes[field.name] = small if small > max(at_least, default=0.0) else value
    return replace(config, **changes)


def run_reference(
    algorithm: Algorithm, config: Any, weights: Array | None = None, rounds: int = ROUNDS
) -> list[Mapping[str, Array]]:
    """Return the rows of the reference at the start and after each round."""
    assert algorithm.reference is not None
    shard, w = build_problem().shard(range(NODES)), GRAPH.weights.toarray() if weights is None else weights
    if algorithm.network == "single":
        return list(islice(algorithm.reference(pool_shard(shard), np.eye(1), config), rounds + 1))
    return list(islice(algorithm.reference(shard, w, config), rounds + 1))


def compare(algorithm: Algorithm, config: Any, expected: Sequence[Mapping[str, Array]]) -> Deviation:
    """Run the algorithm and return the largest difference from the expected rows, relative to their largest entry."""
    problem, graph = arrange(algorithm, build_problem(), GRAPH)
    engine, worst = LocalEngine(algorithm, config, problem, graph, [range(graph.nodes)]), Deviation(0.0)
    for round_, rows in enumerate(expected):
        if round_:
            engine.advance(round_)
        if missing := REQUIRED - rows.keys():
            raise ReferenceMismatchError(f"the reference does not yield {', '.join(sorted(missing))}")
        for path, row in rows.items():
            found = _read(engine.local_blocks[0].state, path)
            if found.shape != row.shape:
                raise ReferenceMismatchError(f"{path} is {found.shape} in the state, {row.shape} in the reference")
            error = float(np.abs(found - row).max() / max(np.abs(row).max(), 1e-3))
            error = error if np.isfinite(error) else np.inf
            if error > TOLERANCE and not worst.path:
                worst = replace(worst, path=path, round=round_)
            worst = replace(worst, error=max(error, worst.error))
    return worst


def _read(state: Any, path: str) -> Array:
    try:
        rows: Array = attrgetter(path)(state)
    except AttributeError as error:
        raise ReferenceMismatchError(f"the reference yields {path}, which the state does not have") from error
    return rows
