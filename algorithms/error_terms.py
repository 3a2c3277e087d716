"""Declare which arrays of a state the analysis of a method bounds; evaluations record how large these errors are.

The convergence proofs of tracked and compressed methods bound a few sums of squares Ω: how far the nodes' rows are from
their mean, and how far a row is from the copy that its neighbours have. An algorithm names the arrays, the platform
computes the errors. Consensus errors of x and y are recorded for every algorithm.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dbo.algorithms.protocol import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorTerms:
    """Functions of the state that return rows by name.

    `consensus` names further arrays whose distance to the mean over nodes is recorded as `consensus_<name>`:
    trackers, and other iterates. `compression` names pairs of an array and its neighbours' copy of it, whose distance
    is recorded as `compression_<name>`. Names of trackers are `tracker_<what they track>`.
    """

    consensus: Callable[[Any], Mapping[str, Array]] = lambda state: {}
    compression: Callable[[Any], Mapping[str, tuple[Array, Array]]] = lambda state: {}
