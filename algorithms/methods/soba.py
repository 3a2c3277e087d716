"""SOBA: a bilevel step without inner loops or inverses, on one machine; the origin of SLDBO, D-SOBA and SPARKLE.

M. Dagréou, P. Ablin, S. Vaiter, T. Moreau: A Framework for Bilevel Optimization that Enables Stochastic and Global
Variance Reduction Algorithms, NeurIPS 2022, arXiv 2201.13409. y, v and x step at once along D_y = ∇_y g, D_v = ∇²_yy g
v − ∇_y f and D_x = ∇_x f − ∇²_xy g v, over all nodes' data. It reaches the minimiser of ψ exactly. On one node SPARKLE
and SLDBO have its iterates, as long as v stays in SLDBO's ball.

Nothing is sent. Oracles per round: 3 partial gradients, 1 Hessian- and 1 Jacobian-vector product. With mini-batches
one batch per round serves the three directions, as in the paper; a batch has samples of every node.

departs: step sizes are constant by default; the paper's fall like 1/√t (`{schedule: inverse_sqrt, …}`).
departs: y and v have step sizes of their own; the paper gives them one. v here has the opposite sign.
"""

from dataclasses import dataclass

from dbo.algorithms.api import MINIMISER, Array, Claim, Noise, Shard, algorithm, counter, param, round_key
from dbo.algorithms.parts.soba import Directions, directions
from dbo.algorithms.references import hessian_methods as references


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Defaults are ours."""

    eta_x: float = param(0.01, gt=0, help="step size of x (the paper's γ)", schedule=True)
    eta_y: float = param(0.1, gt=0, help="step size of y (the paper's ρ)", schedule=True)
    eta_v: float = param(
        0.1, gt=0, help="step size of v, the solution of the Hessian system (the paper's ρ)", schedule=True
    )


@dataclass(frozen=True, slots=True)
class State:
    t: Array
    x: Array
    y: Array
    v: Array
    d: Directions

    @property
    def direction(self) -> Array:
        return self.d.x


def init(shard: Shard, cfg: Config) -> State:
    t, x, y = counter(shard), shard.x0, shard.y0
    return State(t=t, x=x, y=y, v=0 * y, d=directions(shard.sample(round_key(shard, t)), x, y, 0 * y))


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    d = directions(shard, after.x, after.y, after.v)
    return {
        "x steps by −η_x D_x": after.x - before.x + cfg.eta_x * before.d.x,
        "y steps by −η_y D_y": after.y - before.y + cfg.eta_y * before.d.y,
        "v steps by −η_v D_v": after.v - before.v + cfg.eta_v * before.d.v,
        "D_x = ∇_x f − ∇²_xy g v": after.d.x - d.x,
        "D_y = ∇_y g": after.d.y - d.y,
        "D_v = ∇²_yy g v − ∇_y f": after.d.v - d.v,
    }


@algorithm(
    "soba", config=Config, state=State, init=init,
    packets=lambda cfg: 0, batches=lambda cfg: 1,
    network="single", family="soba", oracles="second_order", citation="Dagréou et al. 2022, NeurIPS, arXiv 2201.13409",
    reference=references.soba,
    claim=Claim(
        limit=MINIMISER, invariants=invariants, rounds=150, steps={"eta_x": 0.3, "eta_y": 0.5, "eta_v": 0.5},
        noise=Noise(
            scale=("eta_x", "eta_y", "eta_v"), steps={"eta_x": 0.08, "eta_y": 0.12, "eta_v": 0.12}, rounds=400,
        ),
    ),
)
async def soba(st: State, shard: Shard, cfg: Config) -> State:
    """SOBA: single-loop stochastic bilevel method on one machine that holds all data."""
    x = st.x - cfg.eta_x * st.d.x
    y = st.y - cfg.eta_y * st.d.y
    v = st.v - cfg.eta_v * st.d.v
    t = st.t + 1
    return State(t=t, x=x, y=y, v=v, d=directions(shard.sample(round_key(shard, t)), x, y, v))
