"""BOME: first-order bilevel optimization on one machine, with a multiplier that is recomputed at every step.

M. Ye, B. Liu, S. Wright, P. Stone, Q. Liu: BOME! Bilevel Optimization Made Easy: A Simple First-Order Approach, NeurIPS
2022, and the authors' code. With ŷ = K gradient steps on g from y and q(x, y) = g(x, y) − g(x, ŷ), (x, y) steps along
∇f + μ ∇q, where μ ≥ 0 is the smallest multiplier for which q falls at the rate φ: ⟨∇q, ∇f + μ ∇q⟩ ≥ φ.

Limit: q tends to 0, μ grows without bound, and μ ∇q tends to a limit with ∇_y f + μ ∇_y g = 0. In the update of x this
gives ∇_x f − ∇²_xy g P_K ∇_y f with P_K = α Σ_{j<K} (I − α ∇²_yy g)^j, α the step of ŷ: the hypergradient with a
Neumann series of K terms. So the method converges to the minimiser of ψ up to the error of K inner steps. It stays at a
distance that shrinks with the step size, because y cannot get closer to y*(x) than one step.

Nothing is sent. Oracles per round: K + 5 partial gradients, and the value of q. With mini-batches: a batch for each
step of ŷ, and one for q and all gradients at (x, y), because two would add noise to the difference q. The multiplier is
a ratio of sampled numbers. Its mean, unlike that of the other methods' directions, is not the one of full batches.

departs: plain steps; the authors' code adds momentum 0.9.
departs: a round starts with the step, for which the last round's directions are kept; the iterates are the paper's.
"""

from dataclasses import dataclass
from typing import Literal

import array_api_compat

from dbo.algorithms.api import TRUNCATED_INVERSE, Array, Claim, Shard, algorithm, counter, param, round_key
from dbo.algorithms.references import penalty_methods as references


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """K, u and φ are those of the authors' code, step sizes are ours (theirs for 20 Newsgroups: 100 and 1000)."""

    inner_steps: int = param(10, ge=1, help="K, gradient steps from y to ŷ")
    eta_in: float = param(1.0, gt=0, help="α, step size of those steps", schedule=True)
    eta_x: float = param(0.01, gt=0, help="step size of x", schedule=True)
    eta_y: float = param(0.01, gt=0, help="step size of y", schedule=True)
    rate: float = param(1.0, gt=0, help="u, how fast q must decrease")
    phi: Literal["value", "gradient"] = param(
        "value", help="the required decrease of q: φ = u q (the authors' code), or φ = u |∇q|²"
    )
    floor: float = param(1e-8, gt=0, help="added to |∇q|² in the multiplier's denominator")


@dataclass(frozen=True, slots=True)
class State:
    t: Array
    x: Array
    y: Array
    d_x: Array        # ∇f + μ ∇q, its two parts
    d_y: Array

    @property
    def direction(self) -> Array:
        return self.d_x


def init(shard: Shard, cfg: Config) -> State:
    t = counter(shard)
    d_x, d_y = directions(shard, cfg, shard.x0, shard.y0, t)
    return State(t=t, x=shard.x0, y=shard.y0, d_x=d_x, d_y=d_y)


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    d_x, d_y = directions(shard, cfg, after.x, after.y, after.t)
    return {
        "x steps by −η_x (∇_x f + μ ∇_x q)": after.x - before.x + cfg.eta_x * before.d_x,
        "y steps by −η_y (∇_y f + μ ∇_y q)": after.y - before.y + cfg.eta_y * before.d_y,
        "d_x = ∇_x f + μ ∇_x q": after.d_x - d_x,
        "d_y = ∇_y f + μ ∇_y q": after.d_y - d_y,
    }


@algorithm(
    "bome", config=Config, state=State, init=init,
    network="single", family="penalty", citation="Ye et al. 2022, NeurIPS", oracles="first_order",
    packets=lambda cfg: 0, batches=lambda cfg: cfg.inner_steps + 1,
    reference=references.bome,
    claim=Claim(
        limit=TRUNCATED_INVERSE, invariants=invariants, rounds=400, floor=("eta_x", "eta_y"),
        follows=False,
        steps={"inner_steps": 2, "eta_in": 0.3, "eta_x": 0.1, "eta_y": 0.1},
    ),
)
async def bome(st: State, shard: Shard, cfg: Config) -> State:
    """BOME: dynamic-barrier first-order method on one machine that holds all data."""
    t = st.t + 1
    x = st.x - cfg.eta_x * st.d_x
    y = st.y - cfg.eta_y * st.d_y
    d_x, d_y = directions(shard, cfg, x, y, t)
    return State(t=t, x=x, y=y, d_x=d_x, d_y=d_y)


def directions(shard: Shard, cfg: Config, x: Array, y: Array, t: Array) -> tuple[Array, Array]:
    """Return ∇f + μ ∇q in x and in y, with the samples of round t; ŷ is a constant in ∇q."""
    y_hat, key = y, round_key(shard, t)
    for k in range(cfg.inner_steps):
        y_hat = y_hat - cfg.eta_in * shard.sample(key.at(k)).g_y(x, y_hat)
    batch = shard.sample(key.at(cfg.inner_steps))
    f_x, f_y = batch.f_x(x, y), batch.f_y(x, y)
    q = (batch.g(x, y) - batch.g(x, y_hat))[:, None]
    q_x, q_y = batch.g_x(x, y) - batch.g_x(x, y_hat), batch.g_y(x, y)

    square = inner(q_x, q_x) + inner(q_y, q_y)
    phi = cfg.rate * (q if cfg.phi == "value" else square)
    mu = (phi - inner(f_x, q_x) - inner(f_y, q_y)) / (square + cfg.floor)
    mu = mu * (mu > 0)
    return f_x + mu * q_x, f_y + mu * q_y


def inner(a: Array, b: Array) -> Array:
    """Return the (nodes, 1) inner products of the rows."""
    xp = array_api_compat.array_namespace(a)
    product: Array = xp.sum(a * b, axis=1, keepdims=True)
    return product
