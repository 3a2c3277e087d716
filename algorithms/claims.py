"""Declare what an algorithm claims about its limit and its invariants, for `dbo verify` to check.

A claim names the hypergradient that the algorithm follows: ∇ψ, or ∇ψ with the bias known from theory. It declares
whether the algorithm converges to the zero of that, or stops at a distance that shrinks with its step sizes. It lists
the identities that hold after every round, whatever the data. Its step sizes are safe on the problem of `dbo verify`,
where every ∇²_yy g_i has its eigenvalues in [1, 1.5] and ψ is strongly convex with constant 1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from dbo.algorithms.protocol import Array, Shard


class Solved(Protocol):
    """A problem in closed form: ∇ψ at x, (dim_x,), and the biased hypergradients that algorithms follow instead."""

    def hypergradient(self, x: Array) -> Array: ...
    def penalty_hypergradient(self, x: Array, lam: float) -> Array: ...
    def central_hypergradient(self, x: Array, lam: float) -> Array: ...
    def local_inverse_hypergradient(self, x: Array, terms: int, lipschitz: float) -> Array: ...
    def averaged_inverse_hypergradient(self, x: Array, terms: int, lipschitz: float) -> Array: ...
    def truncated_inverse_hypergradient(self, x: Array, terms: int, lipschitz: float) -> Array: ...
    def personalised_hypergradient(self, x: Array, terms: int, lipschitz: float) -> Array: ...
    def moreau_hypergradient(self, x: Array, c: float, gamma: float) -> Array: ...


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit of an algorithm: the zero of a hypergradient."""

    label: str
    hypergradient: Callable[[Solved, Any, Array], Array]      # of (problem, configuration, x)
    biased: bool                                              # on heterogeneous nodes it is not ψ's minimiser …
    biased_alone: bool                                        # … nor on identical ones


MINIMISER = Limit("min ψ", lambda problem, cfg, x: problem.hypergradient(x), False, False)
PENALTY = Limit("min ψ_λ", lambda problem, cfg, x: problem.penalty_hypergradient(x, cfg.lam), True, True)
CENTRAL = Limit("min ψ_±λ", lambda problem, cfg, x: problem.central_hypergradient(x, cfg.lam), True, True)
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
SERIES = Limit(
    "J-term H⁻¹",
    lambda problem, cfg, x: problem.truncated_inverse_hypergradient(x, cfg.neumann_terms, 1 / cfg.eta_v), True, True,
)
PERSONALISED = Limit(
    "min ψ with own y_i*",
    lambda problem, cfg, x: problem.personalised_hypergradient(x, cfg.neumann_terms, cfg.lipschitz), True, False,
)
MOREAU = Limit("min ψ_c,γ", lambda problem, cfg, x: problem.moreau_hypergradient(x, cfg.c, cfg.prox), True, True)

# (state before the round, state after it, shard, configuration) → residuals by name, all of which must be 0.
Invariants = Callable[[Any, Any, Shard, Any], Mapping[str, Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What mini-batches do to the end of a run, for `dbo verify --noise`.

    V is the mean square of mean(x) − its end with full batches. An algorithm claims that V is proportional to its step
    sizes and to σ²/m: m nodes have a variance m times smaller than one node.
    """

    scale: tuple[str, ...]                  # the step sizes that V is proportional to
    steps: Mapping[str, Any] = field(default_factory=dict)      # configuration of this check, over that of the claim
    rounds: int = 200                       # over which V is averaged
    reduced: bool = False                   # V is proportional to the square of the step sizes instead
    shared: bool = False                    # differences of gradients see the same samples: other ones enlarge V
    below: str = ""                         # V is smaller than that of this algorithm with the same configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Properties of an algorithm that can be checked."""

    limit: Limit
    invariants: Invariants                  # all nodes are in one block, so means over rows are means over the network
    steps: Mapping[str, Any]                # configuration of the check
    rounds: int                             # after which it has converged on a ring
    floor: tuple[str, ...] = ()             # step sizes that its distance to the limit is proportional to; (): exact
    rate: Callable[[Any], float] | None = None      # r of a configuration: its distance falls like rounds^−r instead
    follows: bool = True                    # with x fixed, its direction is `limit.hypergradient` at x
    bias: tuple[str, float] | None = None   # (parameter, p): its end is ∝ parameter^−p away from ψ's minimiser
    fixed: tuple[str, ...] = ()             # switches without which identities do not hold: other values are not judged
    noise: Noise | None = None              # with mini-batches; None: nothing is claimed


def mean(rows: Array) -> Array:
    """Return the mean over the nodes."""
    average: Array = rows.mean(0)
    return average
