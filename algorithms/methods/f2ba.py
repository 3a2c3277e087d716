"""F2BA: the fully first-order penalty method on one machine, the centralised counterpart of C²DFB.

L. Chen, Y. Ma, J. Zhang: Near-Optimal Nonconvex-Strongly-Convex Bilevel Optimization with Fully First-Order Oracles,
arXiv 2306.14853, and the authors' code. K gradient steps on (f + λ g) / λ in y and on g in z, then one of x along
∇_x f + λ (∇_x g(x, y) − ∇_x g(x, z)), over all nodes' data. With z kept between rounds it reaches the penalty
solution of λ exactly; C²DFB on a single node without compression has the same iterates.

Nothing is sent. Oracles per round: 3 K partial gradients in y and 3 in x. With mini-batches one batch per inner step
serves y and z, another one the three upper gradients; a batch has samples of every node.

departs: a round starts with the step of x, for which the last round's direction is kept; the iterates are the paper's,
except that the first step of x comes before the first inner loop.
departs: z starts each round where it ended; the authors' code starts it at y (`z_start: y`).
"""

from dataclasses import dataclass
from typing import Literal

from dbo.algorithms.api import PENALTY, Array, Claim, Noise, Shard, algorithm, counter, param, round_key
from dbo.algorithms.parts.penalty import upper_gradient, y_gradient
from dbo.algorithms.references import penalty_methods as references


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Defaults are those of C²DFB, whose reference this is; the authors' code takes K = 10, η = 100 and η_x = 1000."""

    inner_steps: int = param(15, ge=1, help="K, steps of the two inner loops per round")
    lam: float = param(10.0, gt=0, help="penalty λ")
    eta_in: float = param(1.0, gt=0, help="η, step size of the inner loops", schedule=True)
    eta_out: float = param(1.0, gt=0, help="η_x, step size of x", schedule=True)
    z_start: Literal["last", "y"] = param(
        "last",
        help="where z starts each round: its last value, or y as in the authors' code, which K too small makes biased",
    )


@dataclass(frozen=True, slots=True)
class State:
    t: Array
    x: Array
    y: Array
    z: Array
    u: Array          # ∇ψ_λ with the current y and z

    @property
    def direction(self) -> Array:
        return self.u


def init(shard: Shard, cfg: Config) -> State:
    t, x, y = counter(shard), shard.x0, shard.y0
    batch = shard.sample(round_key(shard, t).at(cfg.inner_steps))
    return State(t=t, x=x, y=y, z=y, u=upper_gradient(batch, cfg.lam, x, y, y))


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    return {
        "x steps by −η_x u": after.x - before.x + cfg.eta_out * before.u,
        "u = ∇_x f + λ (∇_x g(y) − ∇_x g(z))": after.u - upper_gradient(shard, cfg.lam, after.x, after.y, after.z),
    }


@algorithm(
    "f2ba", config=Config, state=State, init=init,
    network="single", family="penalty", citation="Chen et al. 2023, arXiv 2306.14853", oracles="first_order",
    packets=lambda cfg: 0, batches=lambda cfg: cfg.inner_steps + 1, penalty=lambda cfg: cfg.lam,
    reference=references.f2ba,
    claim=Claim(
        limit=PENALTY, invariants=invariants, rounds=80, steps={"inner_steps": 10, "eta_in": 0.6, "eta_out": 0.3},
        noise=Noise(scale=("eta_in", "eta_out"), shared=True, steps={"inner_steps": 3, "eta_in": 0.2, "eta_out": 0.1}),
    ),
)
async def f2ba(st: State, shard: Shard, cfg: Config) -> State:
    """F2BA: the first-order penalty method on one machine that holds all data."""
    x = st.x - cfg.eta_out * st.u
    y, z = st.y, st.z if cfg.z_start == "last" else st.y
    t = st.t + 1
    key = round_key(shard, t)
    for k in range(cfg.inner_steps):
        batch = shard.sample(key.at(k))
        z = z - cfg.eta_in * batch.g_y(x, z)
        y = y - cfg.eta_in * y_gradient(batch, cfg.lam, "h_over_lambda", x, y)
    batch = shard.sample(key.at(cfg.inner_steps))
    return State(t=t, x=x, y=y, z=z, u=upper_gradient(batch, cfg.lam, x, y, z))
