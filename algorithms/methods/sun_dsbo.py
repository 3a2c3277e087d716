"""SUN-DSBO-GT: penalty method for nonconvex lower levels, by a Moreau envelope; gradient tracking, one loop.

Y. Ma, X. Wang, W. Yao, J. Zhang: SUN-DSBO: A Structured Unified Framework for Nonconvex Decentralized Stochastic
Bilevel Optimization, arXiv 2601.22682. The base method on one machine is from public code (MEHA); the gossip part is
our reading. The lower level is replaced by g(x, y) ≤ v_γ(x, y) with the Moreau envelope v_γ(x, y) = min_θ g(x, θ) + ‖θ
− y‖² / (2γ), which holds at every stationary point of g and needs no convexity. With the penalty c, all three step at
once, each with a tracker of the mean:

    θ   along ∇_y g(x, θ) + (θ − y) / γ
    y   along ∇_y f(x, y) / c + ∇_y g(x, y) − (y − θ) / γ
    x   along ∇_x f(x, y) + c (∇_x g(x, y) − ∇_x g(x, θ))

It reaches the stationary point of f / c + g − v_γ exactly, at a distance O(1/c) from ψ's minimiser where g is strongly
convex. For γ → ∞ it is DSGDA-GT with λ = c.

Per round a node sends x, y, θ and their trackers in 1 packet: 2 d_x + 4 d_y values. Oracles: 3 partial gradients in x
and 3 in y.

departs: x steps along c times the paper's direction, which then estimates ∇ψ and does not shrink with c.
departs: c is constant; the paper's grows.
departs: one batch per round serves all directions; two would leave c times the difference of their noises.
"""

from dataclasses import dataclass

from dbo.algorithms.api import (
    MOREAU,
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
from dbo.algorithms.parts.penalty import upper_gradient
from dbo.algorithms.references import penalty_methods as references


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Defaults are ours."""

    c: float = param(10.0, gt=0, help="penalty of g − v_γ")
    prox: float = param(2.0, gt=0, help="γ of the Moreau envelope; 1/γ must exceed the weak convexity of g")
    eta_x: float = param(0.01, gt=0, help="step size of x", schedule=True)
    eta_y: float = param(0.1, gt=0, help="step size of y", schedule=True)
    eta_theta: float = param(0.1, gt=0, help="step size of θ, the proximal point", schedule=True)


@dataclass(frozen=True, slots=True)
class Triple:
    """One row per node for each of the three variables: local directions, or trackers of their means."""

    x: Array
    y: Array
    theta: Array


@dataclass(frozen=True, slots=True)
class State:
    t: Array
    x: Array
    y: Array
    theta: Array
    track: Triple
    local: Triple

    @property
    def direction(self) -> Array:
        return self.track.x


def directions(shard: Shard, cfg: Config, x: Array, y: Array, theta: Array) -> Triple:
    apart = (y - theta) / cfg.prox
    return Triple(
        x=upper_gradient(shard, cfg.c, x, y, theta),
        y=shard.f_y(x, y) / cfg.c + shard.g_y(x, y) - apart,
        theta=shard.g_y(x, theta) - apart,
    )


def init(shard: Shard, cfg: Config) -> State:
    """Initialize θ = y and the trackers at the local directions."""
    t, x, y = counter(shard), shard.x0, shard.y0
    d = directions(shard.sample(round_key(shard, t)), cfg, x, y, y)
    return State(t=t, x=x, y=y, theta=y, track=d, local=d)


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    """Gradient tracking, three times."""
    old, new, d = before.track, after.track, directions(shard, cfg, after.x, after.y, after.theta)
    return {
        "mean(x) steps by −η_x mean(s_x)": mean(after.x - before.x) + cfg.eta_x * mean(old.x),
        "mean(y) steps by −η_y mean(s_y)": mean(after.y - before.y) + cfg.eta_y * mean(old.y),
        "mean(θ) steps by −η_θ mean(s_θ)": mean(after.theta - before.theta) + cfg.eta_theta * mean(old.theta),
        "mean(s_x) = mean(∇_x f_i + c (∇_x g_i(y) − ∇_x g_i(θ)))": mean(new.x - d.x),
        "mean(s_y) = mean(∇_y f_i / c + ∇_y g_i − (y − θ) / γ)": mean(new.y - d.y),
        "mean(s_θ) = mean(∇_y g_i(θ) + (θ − y) / γ)": mean(new.theta - d.theta),
    }


@algorithm(
    "sun_dsbo", config=Config, state=State, init=init,
    packets=lambda cfg: 1, batches=lambda cfg: 1,
    family="penalty", oracles="first_order", citation="Ma et al. 2026, arXiv 2601.22682",
    errors=ErrorTerms(consensus=lambda st: {
        "theta": st.theta, "tracker_x": st.track.x, "tracker_y": st.track.y, "tracker_theta": st.track.theta,
    }),
    reference=references.sun_dsbo,
    claim=Claim(
        limit=MOREAU, invariants=invariants, rounds=900, steps={"eta_x": 0.05, "eta_y": 0.1, "eta_theta": 0.1},
        noise=Noise(scale=("eta_x", "eta_y", "eta_theta"), shared=True, rounds=400),
    ),
)
async def sun_dsbo(st: State, shard: Shard, cfg: Config) -> State:
    """SUN-DSBO-GT: penalty method with a Moreau envelope for nonconvex lower levels, gradient tracking, one loop."""
    s = st.track
    wx, wy, wt, wsx, wsy, wst = await mix(x=st.x, y=st.y, theta=st.theta, s_x=s.x, s_y=s.y, s_theta=s.theta)
    x = wx - cfg.eta_x * s.x
    y = wy - cfg.eta_y * s.y
    theta = wt - cfg.eta_theta * s.theta

    t, old = st.t + 1, st.local
    d = directions(shard.sample(round_key(shard, t)), cfg, x, y, theta)
    track = Triple(x=wsx + (d.x - old.x), y=wsy + (d.y - old.y), theta=wst + (d.theta - old.theta))
    return State(t=t, x=x, y=y, theta=theta, track=track, local=d)
