"""SLDBO: SOBA over a network, one loop, gradient tracking on all three variables, v kept in a ball.

Y. Dong, S. Ma, J. Yang, C. Yin: A Single-Loop Algorithm for Decentralized Bilevel Optimization, Mathematics of
Operations Research 2025, doi 10.1287/moor.2024.0488. The abstract gives the ingredients (SOBA, tracking, projection,
two matrix-vector products per iteration); the order of the lines is our reading. It reaches the minimiser of ψ exactly,
whatever the heterogeneity.

Per round a node sends x, y, v and their trackers in 1 packet: 2 d_x + 4 d_y values. Oracles: 3 partial gradients, 1
Hessian- and 1 Jacobian-vector product. With mini-batches one batch per round serves the three directions, and the
trackers follow the sampled ones.
"""

from dataclasses import dataclass

from dbo.algorithms.api import (
    MINIMISER,
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
from dbo.algorithms.parts.ball import project
from dbo.algorithms.parts.soba import Directions, directions
from dbo.algorithms.references import hessian_methods as references


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Defaults are ours."""

    eta_x: float = param(0.01, gt=0, help="step size of x", schedule=True)
    eta_y: float = param(0.1, gt=0, help="step size of y", schedule=True)
    eta_v: float = param(0.1, gt=0, help="step size of v, the solution of the Hessian system", schedule=True)
    radius: float = param(100.0, gt=0, help="v stays in a ball of this radius; the solution must lie inside")


@dataclass(frozen=True, slots=True)
class State:
    t: Array
    x: Array
    y: Array
    v: Array
    track: Directions
    local: Directions

    @property
    def direction(self) -> Array:
        return self.track.x


def init(shard: Shard, cfg: Config) -> State:
    """Initialize v = 0 and the trackers at the local directions."""
    t, x, y = counter(shard), shard.x0, shard.y0
    v = 0 * y
    d = directions(shard.sample(round_key(shard, t)), x, y, v)
    return State(t=t, x=x, y=y, v=v, track=d, local=d)


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    """Gradient tracking, three times; v's mean steps freely only inside the ball."""
    s, d = after.track, directions(shard, after.x, after.y, after.v)
    return {
        "mean(x) steps by −η_x mean(s_x)": mean(after.x - before.x) + cfg.eta_x * mean(before.track.x),
        "mean(y) steps by −η_y mean(s_y)": mean(after.y - before.y) + cfg.eta_y * mean(before.track.y),
        "mean(s_x) = mean(D_x,i)": mean(s.x - d.x),
        "mean(s_y) = mean(D_y,i)": mean(s.y - d.y),
        "mean(s_v) = mean(D_v,i)": mean(s.v - d.v),
    }


@algorithm(
    "sldbo", config=Config, state=State, init=init,
    family="soba", citation="Dong et al. 2025, Mathematics of Operations Research", oracles="second_order",
    packets=lambda cfg: 1, batches=lambda cfg: 1,
    errors=ErrorTerms(consensus=lambda st: {
        "v": st.v, "tracker_x": st.track.x, "tracker_y": st.track.y, "tracker_v": st.track.v,
    }),
    reference=references.sldbo,
    claim=Claim(
        limit=MINIMISER, invariants=invariants, rounds=600, steps={"eta_x": 0.08, "eta_y": 0.1, "eta_v": 0.1},
        noise=Noise(
            scale=("eta_x", "eta_y", "eta_v"), steps={"eta_x": 0.04, "eta_y": 0.06, "eta_v": 0.06}, rounds=400,
        ),
    ),
)
async def sldbo(st: State, shard: Shard, cfg: Config) -> State:
    """SLDBO: SOBA in one loop, gradient tracking on x, y and v."""
    s = st.track
    wx, wy, wv, wsx, wsy, wsv = await mix(x=st.x, y=st.y, v=st.v, s_x=s.x, s_y=s.y, s_v=s.v)
    x = wx - cfg.eta_x * s.x
    y = wy - cfg.eta_y * s.y
    v = project(wv - cfg.eta_v * s.v, cfg.radius)

    t, old = st.t + 1, st.local
    d = directions(shard.sample(round_key(shard, t)), x, y, v)
    track = Directions(x=wsx + (d.x - old.x), y=wsy + (d.y - old.y), v=wsv + (d.v - old.v))
    return State(t=t, x=x, y=y, v=v, track=track, local=d)
