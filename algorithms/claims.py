"""What an algorithm promises where the solution is known: `dbo verify` holds it to that.

A claim names the hypergradient that the algorithm really follows, exactly ∇ψ or with the bias that its theory gives it;
says whether it arrives at the zero of that or stops at a distance that shrinks with its step sizes; and lists the
identities that every round keeps, whatever the data. It also carries step sizes that are safe on the problem of
`dbo verify`, where every ∇²_yy g_i has its eigenvalues in [1, 1.5] and ψ is strongly convex with constant 1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dbo.algorithms.protocol import Array, Shard


class Solved(Protocol):
    """A problem in closed form: ∇ψ at x, (dim_x,), and what algorithms follow in its place."""

    def hypergradient(self, x: Array) -> Array: ...
    def penalty_hypergradient(self, x: Array, lam: float) -> Array: ...
    def local_inverse_hypergradient(self, x: Array, terms: int, lipschitz: float) -> Array: ...
    def averaged_inverse_hypergradient(self, x: Array, terms: int, lipschitz: float) -> Array: ...
    def truncated_inverse_hypergradient(self, x: Array, terms: int, lipschitz: float) -> Array: ...


@dataclass(frozen=True, slots=True)
class Limit:
    """A point that algorithms go to: where a certain hypergradient is 0."""

    label: str
    hypergradient: Callable[[Solved, Any, Array], Array]      # of (problem, configuration, x)
    biased: bool                                              # on different nodes it is not ψ's minimiser …
    biased_alone: bool                                        # … nor on identical ones


MINIMISER = Limit("min ψ", lambda problem, cfg, x: problem.hypergradient(x), False, False)
PENALTY = Limit("min ψ_λ", lambda problem, cfg, x: problem.penalty_hypergradient(x, cfg.lam), True, True)
LOCAL_INVERSE = Limit(
    "local H⁻¹",
    lambda problem, cfg, x: problem.local_inverse_hypergradient(x, cfg.neumann_terms, cfg.lipschitz), True, False,
)
AVERAGED_INVERSE = Limit(
    "local H⁻¹, mean ∇f",
    lambda problem, cfg, x: problem.averaged_inverse_hypergradient(x, cfg.neumann_terms, cfg.lipschitz), True, False,
)
TRUNCATED_INVERSE = Limit(
    "K-step H⁻¹",
    lambda problem, cfg, x: problem.truncated_inverse_hypergradient(x, cfg.inner_steps, 1 / cfg.eta_in), True, True,
)

# (state before the round, state after it, shard, configuration) → residuals by name, each of which must be 0.
Invariants = Callable[[Any, Any, Shard, Any], Mapping[str, Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What can be checked about an algorithm."""

    limit: Limit
    invariants: Invariants                  # all nodes are in one block, so means over rows are means over the network
    steps: Mapping[str, Any]                # configuration with which it is checked
    rounds: int                             # after which it has arrived on a ring
    floor: tuple[str, ...] = ()             # steps that keep it at a distance which shrinks with them; (): it arrives
    follows: bool = True                    # with x held still it moves along `limit.hypergradient` there


def mean(rows: Array) -> Array:
    """The mean over the nodes."""
    average: Array = rows.mean(0)
    return average
