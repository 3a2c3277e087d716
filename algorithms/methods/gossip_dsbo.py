"""Gossip-DSBO in its vector form: gossiped running averages of ∇_x f and ∇_y f, each node's own Hessian and Jacobian.

S. Yang, X. Zhang, M. Wang: Decentralized Gossip-Based Stochastic Bilevel Optimization over Communication Networks,
NeurIPS 2022. The original method also gossips whole Jacobians and Hessians, d_x d_y + b_N d_y² values, which no task
here can afford. This is the simplified form used in comparisons (for example by Gao et al. 2023): products with the
node's own matrices, vectors only. The lines are our reading.

With J_i and P_i the node's Jacobian and truncated Neumann inverse, x moves along A_x − J_i P_i A_y. As θ and the steps
tend to 0 the averages A agree, and x converges to the zero of mean(∇_x f_i) − mean(J_i P_i) mean(∇_y f_i): biased under
heterogeneity, like MDBO, but with another limit. At constant steps it stops at a distance that shrinks with them.

Per round a node sends x, y and the two averages in 1 packet: 2 d_x + 2 d_y values. Oracles: 3 partial gradients, J − 1
Hessian- and 1 Jacobian-vector products. With mini-batches all samples are fresh: a batch for ∇f and ∇²_xy g, one for
each factor of the series, one for ∇_y g.

departs: without `batch_size`, full local batches instead of samples; always the whole truncated series.
departs: vectors only, as described above.
"""

from dataclasses import dataclass

from dbo.algorithms.api import (
    AVERAGED_INVERSE,
    Array,
    Claim,
    Key,
    Noise,
    Shard,
    algorithm,
    counter,
    mean,
    mix,
    param,
    round_key,
)
from dbo.algorithms.parts.neumann import draw_from, truncated_inverse
from dbo.algorithms.references import hessian_methods as references


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Defaults are ours."""

    eta_x: float = param(0.01, gt=0, help="step size of x", schedule=True)
    eta_y: float = param(0.1, gt=0, help="step size of y", schedule=True)
    theta: float = param(
        0.3, gt=0, le=1, help="weight of the new gradients of f in the running averages", schedule=True
    )
    neumann_terms: int = param(10, ge=1, help="J, terms of the Neumann series")
    lipschitz: float = param(15.0, gt=0, help="L, at least the largest eigenvalue of any node's ∇²_yy g_i")


@dataclass(frozen=True, slots=True)
class State:
    t: Array
    x: Array
    y: Array
    a_x: Array        # running averages of ∇_x f and ∇_y f over neighbours and rounds
    a_y: Array
    u: Array          # the hypergradient they give

    @property
    def direction(self) -> Array:
        return self.u


def hypergradient(shard: Shard, cfg: Config, x: Array, y: Array, a_x: Array, a_y: Array, key: Key) -> Array:
    """Return A_x − ∇²_xy g_i P_i A_y, on the batches of steps 0 … J − 1."""
    batch = shard.sample(key)
    return a_x - batch.g_xy(x, y, truncated_inverse(draw_from(shard, key), x, y, a_y, cfg.neumann_terms, cfg.lipschitz))


def init(shard: Shard, cfg: Config) -> State:
    """Initialize the averages at the local gradients."""
    t, x, y = counter(shard), shard.x0, shard.y0
    key = round_key(shard, t)
    batch = shard.sample(key)
    a_x, a_y = batch.f_x(x, y), batch.f_y(x, y)
    return State(t=t, x=x, y=y, a_x=a_x, a_y=a_y, u=hypergradient(shard, cfg, x, y, a_x, a_y, key))


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    """Gossip preserves means, those of the running averages too."""
    x, y, keep = after.x, after.y, 1 - cfg.theta
    f_x, f_y = cfg.theta * shard.f_x(x, y), cfg.theta * shard.f_y(x, y)
    u = hypergradient(shard, cfg, x, y, after.a_x, after.a_y, round_key(shard, after.t))
    return {
        "mean(x) steps by −η_x mean(u)": mean(x - before.x) + cfg.eta_x * mean(before.u),
        "mean(y) steps by −η_y mean(∇_y g_i)": mean(y - before.y) + cfg.eta_y * mean(shard.g_y(before.x, before.y)),
        "mean(A_x) moves by θ to mean(∇_x f_i)": mean(after.a_x - keep * before.a_x - f_x),
        "mean(A_y) moves by θ to mean(∇_y f_i)": mean(after.a_y - keep * before.a_y - f_y),
        "u = A_x − J_i P_i A_y": after.u - u,
    }


@algorithm(
    "gossip_dsbo", config=Config, state=State, init=init,
    family="neumann", citation="Yang et al. 2022, NeurIPS", oracles="second_order",
    packets=lambda cfg: 1, batches=lambda cfg: cfg.neumann_terms + 1,
    reference=references.gossip_dsbo,
    claim=Claim(
        limit=AVERAGED_INVERSE, invariants=invariants, rounds=250, floor=("eta_x", "eta_y", "theta"),
        steps={"eta_x": 0.06, "eta_y": 0.1, "theta": 0.15, "lipschitz": 1.6, "neumann_terms": 20},
        noise=Noise(scale=("eta_x", "eta_y"), steps={"theta": 0.5, "neumann_terms": 4}),
    ),
)
async def gossip_dsbo(st: State, shard: Shard, cfg: Config) -> State:
    """Gossip-DSBO, vectors only: gossiped averages of upper gradients, each node's own Neumann inverse."""
    wx, wy, wa_x, wa_y = await mix(x=st.x, y=st.y, a_x=st.a_x, a_y=st.a_y)
    x = wx - cfg.eta_x * st.u
    t = st.t + 1
    key = round_key(shard, t)
    y = wy - cfg.eta_y * shard.sample(key.at(cfg.neumann_terms)).g_y(st.x, st.y)
    batch = shard.sample(key)
    a_x = (1 - cfg.theta) * wa_x + cfg.theta * batch.f_x(x, y)
    a_y = (1 - cfg.theta) * wa_y + cfg.theta * batch.f_y(x, y)
    return State(t=t, x=x, y=y, a_x=a_x, a_y=a_y, u=hypergradient(shard, cfg, x, y, a_x, a_y, key))
