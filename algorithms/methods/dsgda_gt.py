"""DSGDA-GT: the fully first-order penalty method with gradient tracking on x, y and z, uncompressed, one loop.

X. Wang, X. Chen, S. Ma, T. Zhang: Fully First-Order Methods for Decentralized Bilevel Optimization, arXiv 2410.19319.
Its abstract gives the ingredients; the lines are our reading. Descent in x and y and ascent in z on

    (1/m) Σ_i f_i(x, y) + λ (g_i(x, y) − g_i(x, z)),

all three at once, each with a tracker of the mean direction. It reaches the penalty solution of λ exactly. It is also
what C²DFB becomes without compression and with one step on each level: an ablation of it.

Per round a node sends x, y, z and their trackers in 1 packet: 2 d_x + 4 d_y values. Oracles: 3 partial gradients in x
and 3 in y.

departs: the directions of y and z are divided by λ, so that step sizes of order 1/L_g fit.
departs: λ is constant.
departs: one batch per round serves all directions; two would leave λ times the difference of their noises.
"""

from dataclasses import dataclass

from dbo.algorithms.api import (
    PENALTY,
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
from dbo.algorithms.parts.penalty import upper_gradient, y_gradient
from dbo.algorithms.references import penalty_methods as references


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Defaults are ours."""

    lam: float = param(10.0, gt=0, help="penalty λ")
    eta_x: float = param(0.01, gt=0, help="step size of x", schedule=True)
    eta_y: float = param(0.1, gt=0, help="step size of y, on (f + λ g) / λ", schedule=True)
    eta_z: float = param(0.1, gt=0, help="step size of z, on g", schedule=True)


@dataclass(frozen=True, slots=True)
class Triple:
    """One row per node for each of the three variables: local directions, or trackers of their means."""

    x: Array
    y: Array
    z: Array


@dataclass(frozen=True, slots=True)
class State:
    t: Array
    x: Array
    y: Array
    z: Array
    track: Triple
    local: Triple

    @property
    def direction(self) -> Array:
        return self.track.x


def directions(shard: Shard, lam: float, x: Array, y: Array, z: Array) -> Triple:
    return Triple(
        x=upper_gradient(shard, lam, x, y, z),
        y=y_gradient(shard, lam, "h_over_lambda", x, y),
        z=shard.g_y(x, z),
    )


def init(shard: Shard, cfg: Config) -> State:
    """Initialize z = y and the trackers at the local directions."""
    t, x, y = counter(shard), shard.x0, shard.y0
    d = directions(shard.sample(round_key(shard, t)), cfg.lam, x, y, y)
    return State(t=t, x=x, y=y, z=y, track=d, local=d)


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    """Gradient tracking, three times."""
    s, d = after.track, directions(shard, cfg.lam, after.x, after.y, after.z)
    return {
        "mean(x) steps by −η_x mean(s_x)": mean(after.x - before.x) + cfg.eta_x * mean(before.track.x),
        "mean(y) steps by −η_y mean(s_y)": mean(after.y - before.y) + cfg.eta_y * mean(before.track.y),
        "mean(z) steps by −η_z mean(s_z)": mean(after.z - before.z) + cfg.eta_z * mean(before.track.z),
        "mean(s_x) = mean(∇ψ_λ,i)": mean(s.x - d.x),
        "mean(s_y) = mean(∇_y h_i / λ)": mean(s.y - d.y),
        "mean(s_z) = mean(∇_y g_i)": mean(s.z - d.z),
    }


@algorithm(
    "dsgda_gt", config=Config, state=State, init=init,
    family="penalty", citation="Wang et al. 2024, arXiv 2410.19319", oracles="first_order",
    packets=lambda cfg: 1, batches=lambda cfg: 1, penalty=lambda cfg: cfg.lam,
    errors=ErrorTerms(consensus=lambda st: {
        "z": st.z, "tracker_x": st.track.x, "tracker_y": st.track.y, "tracker_z": st.track.z,
    }),
    reference=references.dsgda_gt,
    claim=Claim(
        limit=PENALTY, invariants=invariants, rounds=900, steps={"eta_x": 0.05, "eta_y": 0.1, "eta_z": 0.1},
        noise=Noise(scale=("eta_x", "eta_y", "eta_z"), shared=True, rounds=400),
    ),
)
async def dsgda_gt(st: State, shard: Shard, cfg: Config) -> State:
    """DSGDA-GT: first-order penalty method, one loop, gradient tracking on x, y and z, uncompressed."""
    s = st.track
    wx, wy, wz, wsx, wsy, wsz = await mix(x=st.x, y=st.y, z=st.z, s_x=s.x, s_y=s.y, s_z=s.z)
    x = wx - cfg.eta_x * s.x
    y = wy - cfg.eta_y * s.y
    z = wz - cfg.eta_z * s.z

    t, old = st.t + 1, st.local
    d = directions(shard.sample(round_key(shard, t)), cfg.lam, x, y, z)
    track = Triple(x=wsx + (d.x - old.x), y=wsy + (d.y - old.y), z=wsz + (d.z - old.z))
    return State(t=t, x=x, y=y, z=z, track=track, local=d)
