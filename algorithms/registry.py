"""Register algorithms. A built-in one adds its file's name to `_BUILT_IN`; a user's file is loaded as a plugin.

An algorithm is a pair of functions over explicit state, `init(shard, cfg) -> State` and
`async round(state, shard, cfg) -> State`, registered under a name with its configuration class.
"""

from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, get_args

from dbo.algorithms.claims import Claim
from dbo.algorithms.error_terms import ErrorTerms
from dbo.algorithms.gossip import Outgoing
from dbo.algorithms.protocol import Array, Shard
from dbo.components import Registry, check_fields

# Files in methods/, in the order of `dbo list`: the paper's methods, its baselines, other networked methods, this
# project's own ones, methods with a server, single-machine references.
_BUILT_IN = (
    "c2dfb", "c2dfb_nc",
    "madsbo", "madsbo_gt", "mdbo", "vrdbo",
    "dsgda_gt", "sldbo", "d_soba", "gossip_dsbo", "sparkle", "storm_pl", "sun_dsbo", "slam",
    "c2dfb_lead", "c2dfb_central", "lean",
    "fednest", "simfbo", "fedbioacc", "aggitd", "ef_soba",
    "f2ba", "bome", "f2sa", "stocbio", "soba",
)

# What connects the nodes: a graph, a server, or nothing because one machine holds all data.
NetworkKind: TypeAlias = Literal["gossip", "star", "single"]
# The derivatives that a method evaluates; "": its author does not say.
Oracles: TypeAlias = Literal["", "first_order", "second_order"]

Init = Callable[[Shard, Any], Any]
Round = Callable[[Any, Shard, Any], Coroutine[Outgoing, tuple[Array, ...], Any]]
# (shard, W, configuration) → what the state must hold at the start and after each round, by path (`references`).
Reference: TypeAlias = Callable[[Any, Array, Any], Iterator[Mapping[str, Array]]]
# state → (nodes, dim_y) the copies of y that the neighbours have; None: they have none.
Public: TypeAlias = Callable[[Any], Array] | None


def whole_y(state: Any) -> Array:
    """Return y itself: neighbours of a method that does not compress have it."""
    y: Array = state.y
    return y


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """A registered algorithm."""

    name: str
    summary: str
    config: type                            # frozen dataclass; `param` declares ranges and meanings
    state: type                             # frozen dataclass of arrays
    init: Init
    round: Round
    packets: Callable[[Any], int] | None = None     # packets per node and round; None: the platform counts them
    batches: Callable[[Any], int] | None = None     # batches drawn per round; None: unknown, so no epoch-wise sampling
    penalty: Callable[[Any], float] | None = None   # λ of a configuration, for methods that follow ∇ψ_λ
    convex: Callable[[Any], tuple[float, float]] | None = None      # (a, b): needs a f + b g to be strongly convex in y
    network: NetworkKind = "gossip"         # "single": all data in one row, nothing is sent: a reference
    family: str = ""                        # how it gets its hypergradient: penalty, soba, neumann, …
    citation: str = ""                      # authors, year and where, for `dbo list`
    oracles: Oracles = ""
    paper_counts: Mapping[str, float] = field(default_factory=dict)   # Table 1's weight of a channel, where not 1
    errors: ErrorTerms = field(default_factory=ErrorTerms)            # that evaluations record, beside those of x, y
    public: Public = whole_y                # for `public_accuracy_*`; without effect where nothing goes to neighbours
    claim: Claim | None = None              # what `dbo verify` checks; None: it reports errors without a verdict
    reference: Reference | None = None      # its pseudo-code in plain NumPy, for `dbo verify`; None: not compared

    @property
    def requirements(self) -> str:
        """What it needs of an experiment, in words."""
        return ", ".join(filter(None, (_NETWORKS[self.network], _ORACLES[self.oracles])))

    @property
    def built_in(self) -> bool:
        return ALGORITHMS.is_built_in(self.name)


_NETWORKS: Mapping[NetworkKind, str] = {
    "gossip": "any connected graph", "star": "a server and clients", "single": "all data on one machine",
}
_ORACLES: Mapping[Oracles, str] = {
    "": "", "first_order": "gradients only", "second_order": "Hessian- and Jacobian-vector products",
}

ALGORITHMS: Registry[Algorithm] = Registry(
    "algorithm", {name: f"dbo.algorithms.methods.{name}" for name in _BUILT_IN}
)


def algorithm(
    name: str,
    *,
    config: type,
    state: type,
    init: Init,
    packets: Callable[[Any], int] | None = None,
    batches: Callable[[Any], int] | None = None,
    penalty: Callable[[Any], float] | None = None,
    convex: Callable[[Any], tuple[float, float]] | None = None,
    network: NetworkKind = "gossip",
    family: str = "",
    citation: str = "",
    oracles: Oracles = "",
    single_machine: bool = False,
    paper_counts: Mapping[str, float] | None = None,
    errors: ErrorTerms | None = None,
    public: Public = whole_y,
    claim: Claim | None = None,
    reference: Reference | None = None,
) -> Callable[[Round], Algorithm]:
    """Register the decorated `async def round(state, shard, cfg)`; the first line of its docstring is the summary.

    `convex` declares a function a f + b g that must be strongly convex in y, if g alone does not suffice: (a, b) of a
    configuration. A run warns at its start if it finds a direction in which that function curves downwards.
    `public` returns the copies of y that the neighbours have: a method that compresses names its reference points, one
    that does not send y at all says None. By default it is y itself.
    `reference` is a second, plain implementation that `dbo verify` compares trajectories with.
    `single_machine=True` is an older way to write `network="single"`.
    """

    def register(round_: Round) -> Algorithm:
        qualified_name = getattr(round_, "__qualname__", "")
        ALGORITHMS.check_name(name, round_.__module__, qualified_name)
        for option, function in (
            ("packets", packets), ("batches", batches), ("penalty", penalty), ("convex", convex)
        ):
            if function is not None and not callable(function):
                raise ValueError(
                    f"algorithm {name!r}: {option} must be a function of the configuration, e.g. lambda cfg: 1"
                )
        if public is not None and not callable(public):
            raise ValueError(f"algorithm {name!r}: public must be a function of the state, e.g. lambda st: st.y_hat")
        if reference is not None and not callable(reference):
            raise ValueError(f"algorithm {name!r}: reference must be a generator function of (shard, w, cfg)")
        for option, value, kind in (("network", network, NetworkKind), ("oracles", oracles, Oracles)):
            if value not in get_args(kind):
                names = ", ".join(filter(None, get_args(kind)))
                raise ValueError(f"algorithm {name!r}: {option}: {value!r} is not allowed; allowed: {names}")
        if problem := check_fields("config", config) or check_fields("state", state):
            raise ValueError(f"algorithm {name!r}: {problem}")
        attributes = {field.name for field in fields(state)} | set(dir(state))
        if missing := {"x", "y", "direction"} - attributes:
            raise ValueError(f"algorithm {name!r}: its state must have {', '.join(sorted(missing))}")
        summary = (round_.__doc__ or "").strip().partition("\n")[0]
        if not summary:
            raise ValueError(f"algorithm {name!r}: its round function needs a docstring, users see the first line")
        made = Algorithm(
            name=name, summary=summary, config=config, state=state, init=init, round=round_, packets=packets,
            batches=batches, penalty=penalty, convex=convex, network="single" if single_machine else network,
            family=family, citation=citation, oracles=oracles, paper_counts=paper_counts or {},
            errors=errors or ErrorTerms(), public=public, claim=claim, reference=reference,
        )
        ALGORITHMS.add(name, made, round_.__module__, qualified_name)
        return made

    return register


def algorithms() -> Mapping[str, Algorithm]:
    """Return every registered algorithm: built-in ones in their order, then those of plugins."""
    return ALGORITHMS
