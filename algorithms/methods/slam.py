"""SLAM: augmented Lagrangian for the consensus of x, a lower level of its own for every node: another problem.

S. Lu, S. Zeng, X. Cui, M. Squillante, L. Horesh, B. Kingsbury, J. Liu, M. Hong: A Stochastic Linearized Augmented
Lagrangian Method for Decentralized Bilevel Optimization, NeurIPS 2022. The lines are our reading. The problem is
personalised,

    min_x (1/m) Σ_i f_i(x, y_i*(x))    with    y_i*(x) = argmin_y g_i(x, y)    for every node i,

which is ψ only where all g_i have the same minimisers. Its minimiser is what the method reaches, exactly up to the
series. With L = I − W, the dual variables of x_i = x_j summed over a node's edges as p (Σ_i p_i = 0), and the node's
own hypergradient d_i with the Neumann series of mdbo.py:

    p ← p + ρ L x,      x ← x − α (d + p + ρ L x),      y_i ← y_i − β ∇_y g_i(x_i, y_i), T times.

The line of p belongs to the last round, in which it would need a second packet; L x = 0 at the common start. γ = α ρ
is the consensus step; for γ = 1/2 the steps of x are those of EXTRA.

Per round a node sends x in 1 packet: d_x values. Oracles: T + 2 partial gradients, J − 1 Hessian- and 1
Jacobian-vector product. Batches as in mdbo.py, and one for each step of y.

departs: only the personalised case; the paper also treats a lower level on which the nodes agree.
departs: the weights of the edges' penalties are those of W, so that Σ_j w_ij x_j is all that a node needs.
"""

from dataclasses import dataclass

from dbo.algorithms.api import PERSONALISED, Array, Claim, Noise, Shard, algorithm, counter, mean, mix, param, round_key
from dbo.algorithms.parts.neumann import hypergradient
from dbo.algorithms.references import hessian_methods as references


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Defaults are ours."""

    inner_steps: int = param(1, ge=1, help="T, steps of y per round")
    eta_x: float = param(0.01, gt=0, help="α, step size of x", schedule=True)
    eta_y: float = param(0.1, gt=0, help="β, step size of y", schedule=True)
    gamma: float = param(
        0.5, gt=0, le=1, help="γ = α ρ, consensus step: the penalty ρ of disagreement is γ / α", schedule=True
    )
    neumann_terms: int = param(10, ge=1, help="J, terms of the Neumann series")
    lipschitz: float = param(15.0, gt=0, help="L ≥ λ_max(∇²_yy g), the inverse step of the series")


@dataclass(frozen=True, slots=True)
class State:
    t: Array
    x: Array
    y: Array
    p: Array          # sum of the dual variables of the node's edges
    d: Array          # the node's hypergradient

    @property
    def direction(self) -> Array:
        return self.d


def local_hypergradient(shard: Shard, cfg: Config, x: Array, y: Array, t: Array) -> Array:
    """Return d_i with the batches of steps T … T + J − 1 of round t."""
    key = round_key(shard, t)
    return hypergradient(
        lambda step: shard.sample(key.at(cfg.inner_steps + step)), x, y, key,
        neumann="deterministic", terms=cfg.neumann_terms, lipschitz=cfg.lipschitz,
    )


def init(shard: Shard, cfg: Config) -> State:
    """Initialize p = 0."""
    t, x, y = counter(shard), shard.x0, shard.y0
    return State(t=t, x=x, y=y, p=0 * x, d=local_hypergradient(shard, cfg, x, y, t))


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    """Dual variables of an edge are opposite at its ends; everything else is local."""
    y = before.y
    for _ in range(cfg.inner_steps):
        y = y - cfg.eta_y * shard.g_y(after.x, y)
    return {
        "mean(x) steps by −α mean(d)": mean(after.x - before.x) + cfg.eta_x * mean(before.d),
        "mean(p) = 0": mean(after.p),
        "x steps by −α (d + 2 p − p_last)": after.x - before.x + cfg.eta_x * (before.d + 2 * after.p - before.p),
        "y_i makes T steps on g_i": after.y - y,
        "d_i is the own hypergradient": after.d - local_hypergradient(shard, cfg, after.x, after.y, after.t),
    }


@algorithm(
    "slam", config=Config, state=State, init=init,
    packets=lambda cfg: 1, batches=lambda cfg: cfg.inner_steps + cfg.neumann_terms,
    public=None,        # no node sends its y
    family="neumann", oracles="second_order", citation="Lu et al. 2022, NeurIPS",
    reference=references.slam,
    claim=Claim(
        limit=PERSONALISED, invariants=invariants, rounds=300,
        steps={"eta_x": 0.3, "eta_y": 0.5, "lipschitz": 1.6, "neumann_terms": 20},
        noise=Noise(
            scale=("eta_x", "eta_y"), steps={"eta_x": 0.08, "eta_y": 0.15, "neumann_terms": 4}, rounds=400,
        ),
    ),
)
async def slam(st: State, shard: Shard, cfg: Config) -> State:
    """SLAM, personalised lower levels (another problem than min ψ): augmented Lagrangian for x, own y_i."""
    rho = cfg.gamma / cfg.eta_x
    disagreement = st.x - await mix(st.x)                                                   # L x
    p = st.p + rho * disagreement
    x = st.x - cfg.eta_x * (st.d + p + rho * disagreement)

    y, t = st.y, st.t + 1
    key = round_key(shard, t)
    for k in range(cfg.inner_steps):
        y = y - cfg.eta_y * shard.sample(key.at(k)).g_y(x, y)
    return State(t=t, x=x, y=y, p=p, d=local_hypergradient(shard, cfg, x, y, t))
