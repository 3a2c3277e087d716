"""D-SOBA: SOBA over a network, one loop, plain gossip, a moving average for x.

B. Kong, S. Zhu, S. Lu, X. Huang, K. Yuan: Decentralized Bilevel Optimization over Graphs: Loopless Algorithmic Update
and Transient Iteration Complexity, arXiv 2402.03167. The order of the lines and the differences of the first-order
variant are our reading. Nothing is tracked: at constant steps the method stops at a distance from the minimiser of ψ
that heterogeneity causes and that shrinks with the steps.

Per round a node sends its three variables after the local step in 1 packet: d_x + 2 d_y values. Oracles: 3 partial
gradients, 1 Hessian- and 1 Jacobian-vector product; first-order variant (D-SOBA-FO): 7 partial gradients. With
mini-batches one batch per round serves the three directions.

departs: without `batch_size`, full local batches instead of samples.
"""

from dataclasses import dataclass
from typing import Literal

from dbo.algorithms.api import MINIMISER, Array, Claim, Noise, Shard, algorithm, counter, mean, mix, param, round_key
from dbo.algorithms.parts.soba import directions, first_order_directions
from dbo.algorithms.references import hessian_methods as references


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Defaults are ours."""

    eta_x: float = param(0.01, gt=0, help="step size of x (the paper's α)", schedule=True)
    eta_y: float = param(0.1, gt=0, help="step size of y (the paper's β)", schedule=True)
    eta_v: float = param(
        0.1, gt=0, help="step size of v, the solution of the Hessian system (the paper's γ)", schedule=True
    )
    theta: float = param(0.3, gt=0, le=1, help="weight of the new hypergradient in the moving average", schedule=True)
    derivatives: Literal["second_order", "first_order"] = param(
        "second_order",
        help="Hessian- and Jacobian-vector products (D-SOBA-SO), or differences of gradients (D-SOBA-FO)",
    )
    delta: float = param(1e-3, gt=0, help="first_order only: gradients are taken at y ± delta · v")


@dataclass(frozen=True, slots=True)
class State:
    t: Array
    x: Array
    y: Array
    v: Array
    h: Array          # moving average of the local hypergradients

    @property
    def direction(self) -> Array:
        return self.h


def init(shard: Shard, cfg: Config) -> State:
    return State(t=counter(shard), x=shard.x0, y=shard.y0, v=0 * shard.y0, h=0 * shard.x0)


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    """Gossip preserves means: each moves along the mean of the local directions."""
    d = directions(shard, before.x, before.y, before.v)
    return {
        "mean(x) steps by −α mean(h)": mean(after.x - before.x) + cfg.eta_x * mean(before.h),
        "mean(y) steps by −β mean(D_y,i)": mean(after.y - before.y) + cfg.eta_y * mean(d.y),
        "mean(v) steps by −γ mean(D_v,i)": mean(after.v - before.v) + cfg.eta_v * mean(d.v),
        "h moves by θ to D_x": after.h - (1 - cfg.theta) * before.h - cfg.theta * d.x,
    }


@algorithm(
    "d_soba", config=Config, state=State, init=init,
    family="soba", citation="Kong et al. 2024, arXiv 2402.03167", oracles="second_order",
    packets=lambda cfg: 1, batches=lambda cfg: 1,
    reference=references.d_soba,
    claim=Claim(
        limit=MINIMISER, invariants=invariants, rounds=300, floor=("eta_x", "eta_y", "eta_v"),
        steps={"eta_x": 0.1, "eta_y": 0.12, "eta_v": 0.12},
        noise=Noise(scale=("eta_x", "eta_y", "eta_v"), rounds=400),
    ),
)
async def d_soba(st: State, shard: Shard, cfg: Config) -> State:
    """D-SOBA: SOBA in one loop over plain gossip, with a moving average in x."""
    batch = shard.sample(round_key(shard, st.t))
    if cfg.derivatives == "first_order":
        d = first_order_directions(batch, st.x, st.y, st.v, cfg.delta)
    else:
        d = directions(batch, st.x, st.y, st.v)
    x, y, v = await mix(
        x=st.x - cfg.eta_x * st.h,
        y=st.y - cfg.eta_y * d.y,
        v=st.v - cfg.eta_v * d.v,
    )
    h = (1 - cfg.theta) * st.h + cfg.theta * d.x
    return State(t=st.t + 1, x=x, y=y, v=v, h=h)
