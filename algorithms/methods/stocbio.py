"""stocBiO: T steps on the lower level, then x along the hypergradient with a truncated Neumann series, on one machine.

K. Ji, J. Yang, Y. Liang: Bilevel Optimization: Convergence Analysis and Enhanced Design, ICML 2021 (PMLR 139). y makes
T gradient steps on g from where it was. The series p = η Σ_{j<J} (I − η ∇²_yy g)^j ∇_y f stands for (∇²_yy g)⁻¹ ∇_y f,
and x steps along ∇_x f − ∇²_xy g p, over all nodes' data. It reaches the zero of the hypergradient with the truncated
series, so the distance to ψ's minimiser falls like (1 − η μ)^J. The paper's Q is J − 1.

Nothing is sent. Oracles per round: T + 2 partial gradients, J − 1 Hessian- and 1 Jacobian-vector product. With
mini-batches, as in the paper: a batch for each step of y, one for both gradients of f, one for each factor of the
series, one for ∇²_xy g.

departs: every batch has the same size; the paper's batches of the factors shrink with j.
departs: a round starts with the step of x, for which the last round's direction is kept; the iterates are the paper's,
except that the first step of x comes before the first inner loop.
"""

from dataclasses import dataclass

from dbo.algorithms.api import SERIES, Array, Claim, Noise, Shard, algorithm, counter, param, round_key
from dbo.algorithms.references import hessian_methods as references


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """T and J are those of benchopt's benchmark of bilevel solvers, step sizes are ours."""

    inner_steps: int = param(10, ge=1, help="T, steps of y per round")
    neumann_terms: int = param(11, ge=1, help="J, terms of the Neumann series; the paper's Q is J − 1")
    eta_y: float = param(0.1, gt=0, help="step size of y (the paper's α)", schedule=True)
    eta_v: float = param(0.1, gt=0, help="η of the Neumann series; below 2 / L_g", schedule=True)
    eta_x: float = param(0.01, gt=0, help="step size of x (the paper's β)", schedule=True)


@dataclass(frozen=True, slots=True)
class State:
    t: Array
    x: Array
    y: Array
    u: Array          # hypergradient with the truncated series

    @property
    def direction(self) -> Array:
        return self.u


def init(shard: Shard, cfg: Config) -> State:
    t, x, y = counter(shard), shard.x0, shard.y0
    return State(t=t, x=x, y=y, u=hypergradient(shard, cfg, x, y, t))


def hypergradient(shard: Shard, cfg: Config, x: Array, y: Array, t: Array) -> Array:
    """Return ∇_x f − ∇²_xy g p, with the samples of round t: steps T … T + J of its key."""
    key, first = round_key(shard, t), cfg.inner_steps
    batch = shard.sample(key.at(first))
    f_x, term = batch.f_x(x, y), batch.f_y(x, y)
    p = term
    for j in range(1, cfg.neumann_terms):
        term = term - cfg.eta_v * shard.sample(key.at(first + j)).g_yy(x, y, term)          # (I − η H_j) … ∇_y f
        p = p + term
    return f_x - shard.sample(key.at(first + cfg.neumann_terms)).g_xy(x, y, cfg.eta_v * p)


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    x, y = after.x, before.y
    for _ in range(cfg.inner_steps):
        y = y - cfg.eta_y * shard.g_y(x, y)
    return {
        "x steps by −η_x u": after.x - before.x + cfg.eta_x * before.u,
        "y makes T steps on g": after.y - y,
        "u = ∇_x f − ∇²_xy g p": after.u - hypergradient(shard, cfg, x, after.y, after.t),
    }


@algorithm(
    "stocbio", config=Config, state=State, init=init,
    packets=lambda cfg: 0, batches=lambda cfg: cfg.inner_steps + cfg.neumann_terms + 1,
    network="single", family="neumann", oracles="second_order", citation="Ji et al. 2021, ICML",
    reference=references.stocbio,
    claim=Claim(
        limit=SERIES, invariants=invariants, rounds=60,
        steps={"inner_steps": 5, "neumann_terms": 4, "eta_y": 0.5, "eta_v": 0.3, "eta_x": 0.4},
        noise=Noise(scale=("eta_y", "eta_x"), steps={"inner_steps": 3, "eta_y": 0.2, "eta_x": 0.1}),
    ),
)
async def stocbio(st: State, shard: Shard, cfg: Config) -> State:
    """stocBiO: inner loop and truncated Neumann series on one machine that holds all data."""
    x, y, t = st.x - cfg.eta_x * st.u, st.y, st.t + 1
    key = round_key(shard, t)
    for k in range(cfg.inner_steps):
        y = y - cfg.eta_y * shard.sample(key.at(k)).g_y(x, y)
    return State(t=t, x=x, y=y, u=hypergradient(shard, cfg, x, y, t))
