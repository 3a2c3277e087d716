"""MDBO: momentum on local hypergradients, gradient tracking on both levels, one loop.

H. Gao, B. Gu, M. T. Thai: On the Convergence of Distributed Stochastic Bilevel Optimization Algorithms over a Network,
AISTATS 2023 (PMLR 206). Written for nodes with the same distribution: each one inverts its own Hessian
(neumann.py), so with different lower levels the method reaches, exactly and in consensus, the zero of
mean(∇_x f_i − ∇²_xy g_i P_i ∇_y f_i), which is not the zero of ∇ψ.

Per round a node sends x, y and both trackers in 1 packet: 2 d_x + 2 d_y values. Oracles: 3 partial gradients, J − 1
Hessian-vector products (sampled: J_i, between 0 and J − 1) and 1 Jacobian-vector product. With mini-batches all samples
are fresh: a batch for ∇f and ∇²_xy g, one for each factor of the series, one for ∇_y g.

departs: a round starts with the step and ends with the estimates for the next one, so x, y and the trackers travel
together; the iterates are the paper's.
departs: J_i is sampled from {0 … J − 1}; the paper samples from {0 … J} with factor J, whose mean is not the series.
departs: without `batch_size`, full local batches; the whole truncated series by default.
"""

from dataclasses import dataclass

from dbo.algorithms.api import (
    LOCAL_INVERSE,
    Array,
    Claim,
    ErrorTerms,
    Noise,
    Shard,
    algorithm,
    counter,
    mean,
    mix,
    param,
    round_key,
)
from dbo.algorithms.parts.neumann import Neumann, draw_from, hypergradient
from dbo.algorithms.references import hessian_methods as references


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """β and L are the C²DFB paper's values for MDBO; its α = 5 with η = 0.3 breaks α η < 1, so α η = 0.3 here.

    MDBO's own paper: J = 10, η = 0.1, α = β = 1.
    """

    eta: float = param(0.3, gt=0, le=1, help="η, scales mixing of x and y, steps and momentum", schedule=True)
    beta_x: float = param(5.0, gt=0, help="β₁, x steps by β₁ η", schedule=True)
    beta_y: float = param(5.0, gt=0, help="β₂, y steps by β₂ η", schedule=True)
    alpha_x: float = param(1.0, gt=0, help="α₁, the new hypergradient weighs α₁ η < 1", schedule=True)
    alpha_y: float = param(1.0, gt=0, help="α₂, the new gradient in y weighs α₂ η < 1", schedule=True)
    neumann: Neumann = param("deterministic", help="the whole truncated series, or one random term of it")
    neumann_terms: int = param(10, ge=1, help="J, terms of the Neumann series")
    lipschitz: float = param(15.0, gt=0, help="L, at least the largest eigenvalue of any node's ∇²_yy g_i")

    def __post_init__(self) -> None:
        for name, alpha in (("alpha_x", self.alpha_x), ("alpha_y", self.alpha_y)):
            if alpha * self.eta >= 1:
                raise ValueError(f"{name}, eta: {name} * eta must be below 1, got {alpha} * {self.eta}")


@dataclass(frozen=True, slots=True)
class State:
    t: Array
    x: Array
    y: Array
    u: Array          # momentum estimates of the local hypergradient and of ∇_y g_i
    v: Array
    zf: Array         # trackers of the means of u and v
    zg: Array

    @property
    def direction(self) -> Array:
        return self.zf


def local_hypergradient(shard: Shard, cfg: Config, x: Array, y: Array, t: Array) -> Array:
    """Return the node's own hypergradient, with the samples and random numbers of round t."""
    key = round_key(shard, t)
    return hypergradient(
        draw_from(shard, key), x, y, key, neumann=cfg.neumann, terms=cfg.neumann_terms, lipschitz=cfg.lipschitz
    )


def lower_batch(shard: Shard, cfg: Config, t: Array) -> Shard:
    """Return the samples of ∇_y g in round t; those of steps 0 … J − 1 belong to the hypergradient."""
    return shard.sample(round_key(shard, t).at(cfg.neumann_terms))


def count_batches(cfg: Config) -> int:
    """Return the batches of a round: 1 for the upper gradients, J − 1 for the series, 1 for ∇_y g."""
    return cfg.neumann_terms + 1


def init(shard: Shard, cfg: Config) -> State:
    """Initialize estimates and trackers with the first local (hyper)gradients."""
    t, x, y = counter(shard), shard.x0, shard.y0
    u, v = local_hypergradient(shard, cfg, x, y, t), lower_batch(shard, cfg, t).g_y(x, y)
    return State(t=t, x=x, y=y, u=u, v=v, zf=u, zg=v)


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    """Trackers follow the estimates' means, estimates move by the share α η to the new local (hyper)gradients."""
    x, y, a_x, a_y = after.x, after.y, cfg.alpha_x * cfg.eta, cfg.alpha_y * cfg.eta
    new = local_hypergradient(shard, cfg, x, y, after.t)
    return tracking_invariants(before, after, cfg) | {
        "U moves by α₁ η to the hypergradient": after.u - (1 - a_x) * before.u - a_x * new,
        "V moves by α₂ η to ∇_y g_i": after.v - (1 - a_y) * before.v - a_y * shard.g_y(x, y),
    }


def tracking_invariants(before: State, after: State, cfg: Config) -> dict[str, Array]:
    """The invariants that MDBO and VRDBO share."""
    return {
        "mean(x) steps by −β₁ η mean(Z^F)": mean(after.x - before.x) + cfg.beta_x * cfg.eta * mean(before.zf),
        "mean(y) steps by −β₂ η mean(Z^G)": mean(after.y - before.y) + cfg.beta_y * cfg.eta * mean(before.zg),
        "mean(Z^F) = mean(U)": mean(after.zf - after.u),
        "mean(Z^G) = mean(V)": mean(after.zg - after.v),
    }


ERRORS = ErrorTerms(consensus=lambda st: {"tracker_x": st.zf, "tracker_y": st.zg})


@algorithm(
    "mdbo", config=Config, state=State, init=init,
    family="neumann", citation="Gao et al. 2023, AISTATS (PMLR 206)", oracles="second_order",
    packets=lambda cfg: 1, batches=count_batches,
    paper_counts={"zg": 0.0},   # Table 1 fits d_y + 2 d_x per iteration: y's tracker is not counted
    errors=ERRORS,
    reference=references.mdbo,
    claim=Claim(
        limit=LOCAL_INVERSE, invariants=invariants, rounds=400,
        steps={"eta": 0.3, "beta_x": 0.5, "beta_y": 0.5, "alpha_x": 2.0, "alpha_y": 2.0,
               "lipschitz": 1.6, "neumann_terms": 20},
        noise=Noise(scale=("eta",), steps={"eta": 0.2, "alpha_x": 4.0, "alpha_y": 4.0, "neumann_terms": 4}),
    ),
)
async def mdbo(st: State, shard: Shard, cfg: Config) -> State:
    """MDBO: momentum and gradient tracking with each node's own Neumann hypergradient."""
    wx, wy, wzf, wzg = await mix(x=st.x, y=st.y, zf=st.zf, zg=st.zg)
    x = st.x + (cfg.eta * (wx - st.x) - cfg.beta_x * cfg.eta * st.zf)                     # steps of x and y
    y = st.y + (cfg.eta * (wy - st.y) - cfg.beta_y * cfg.eta * st.zg)

    t, a_x, a_y = st.t + 1, cfg.alpha_x * cfg.eta, cfg.alpha_y * cfg.eta
    u = (1 - a_x) * st.u + a_x * local_hypergradient(shard, cfg, x, y, t)                 # momentum
    v = (1 - a_y) * st.v + a_y * lower_batch(shard, cfg, t).g_y(x, y)
    zf, zg = wzf + (u - st.u), wzg + (v - st.v)                                           # tracking
    return State(t=t, x=x, y=y, u=u, v=v, zf=zf, zg=zg)
