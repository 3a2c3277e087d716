"""STORM-PL: the penalty method with gradient tracking and variance-reduced (STORM) estimates, one loop.

Decentralized Hessian-free bilevel method for lower levels with the Polyak–Łojasiewicz property, ICML 2026 (poster
64280). The name and the lines are our reading of the authors' public code. With λ = 1/ρ, x descends on ∇_x f(x, y) + λ
(∇_x g(x, y) − ∇_x g(x, z)), y on f + λ g and z on g. Each gradient is estimated by STORM,

    e ← (1 − α η²) (e − ∇(old point)) + ∇(new point),      both on the same samples,

and the mean of the estimates is tracked: U ← W U + m − m_last, s ← W s − β η U. It reaches the penalty solution of λ
exactly. With full batches the estimates are exact, and it is DSGDA-GT. With mini-batches the variance falls with η²
where that of DSGDA-GT falls with η. Other samples at the old point would add noise instead.

Per round a node sends x, y, z and their trackers in 1 packet: 2 d_x + 4 d_y values. Oracles, all twice: 6 partial
gradients in x and 6 in y. One batch per round serves all directions at both points, which the state still holds.

departs: one estimate of each direction instead of one of each gradient in it; with one α both are the same sum.
departs: the directions of y and z are divided by λ, so that step sizes of order 1/L_g fit; β_x, β_y and β_z are ours.
departs: the first estimates see all samples.
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
from dbo.algorithms.methods.dsgda_gt import Triple, directions
from dbo.algorithms.references import penalty_methods as references


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Defaults are ours."""

    lam: float = param(10.0, gt=0, help="penalty λ, 1/ρ")
    eta: float = param(0.3, gt=0, le=1, help="η, scales all steps; η² corrects estimates", schedule=True)
    beta_x: float = param(0.1, gt=0, help="x steps by β_x η", schedule=True)
    beta_y: float = param(0.3, gt=0, help="y steps by β_y η, on (f + λ g) / λ", schedule=True)
    beta_z: float = param(0.3, gt=0, help="z steps by β_z η, on g", schedule=True)
    alpha: float = param(5.0, gt=0, help="α, the new gradient weighs α η² < 1", schedule=True)

    def __post_init__(self) -> None:
        if self.alpha * self.eta**2 >= 1:
            raise ValueError(f"alpha, eta: alpha * eta² must be below 1, got {self.alpha} * {self.eta}²")


@dataclass(frozen=True, slots=True)
class State:
    t: Array
    x: Array
    y: Array
    z: Array
    estimate: Triple      # m
    track: Triple         # U

    @property
    def direction(self) -> Array:
        return self.track.x


def init(shard: Shard, cfg: Config) -> State:
    """Initialize z = y, estimates and trackers at the local directions of all samples."""
    x, y = shard.x0, shard.y0
    d = directions(shard, cfg.lam, x, y, y)
    return State(t=counter(shard), x=x, y=y, z=y, estimate=d, track=d)


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    """Gradient tracking, three times; with full batches the estimates are exact."""
    s, m, d = before.track, after.estimate, directions(shard, cfg.lam, after.x, after.y, after.z)
    return {
        "mean(x) steps by −β_x η mean(U_x)": mean(after.x - before.x) + cfg.beta_x * cfg.eta * mean(s.x),
        "mean(y) steps by −β_y η mean(U_y)": mean(after.y - before.y) + cfg.beta_y * cfg.eta * mean(s.y),
        "mean(z) steps by −β_z η mean(U_z)": mean(after.z - before.z) + cfg.beta_z * cfg.eta * mean(s.z),
        "mean(U_x) = mean(m_x)": mean(after.track.x - m.x),
        "mean(U_y) = mean(m_y)": mean(after.track.y - m.y),
        "mean(U_z) = mean(m_z)": mean(after.track.z - m.z),
        "m_x = ∇_x f + λ (∇_x g(y) − ∇_x g(z))": m.x - d.x,
        "m_y = ∇_y f / λ + ∇_y g": m.y - d.y,
        "m_z = ∇_y g(z)": m.z - d.z,
    }


@algorithm(
    "storm_pl", config=Config, state=State, init=init,
    packets=lambda cfg: 1, batches=lambda cfg: 1, penalty=lambda cfg: cfg.lam,
    family="penalty", oracles="first_order", citation="ICML 2026, poster 64280 (our reading of the code)",
    errors=ErrorTerms(consensus=lambda st: {
        "z": st.z, "tracker_x": st.track.x, "tracker_y": st.track.y, "tracker_z": st.track.z,
    }),
    reference=references.storm_pl,
    claim=Claim(
        limit=PENALTY, invariants=invariants, rounds=900,
        steps={"eta": 0.25, "beta_x": 0.2, "beta_y": 0.4, "beta_z": 0.4},
        noise=Noise(
            scale=("eta",), reduced=True, shared=True, below="dsgda_gt", rounds=800,
            steps={
                "eta": 0.1, "beta_x": 0.5, "beta_y": 1.0, "beta_z": 1.0, "alpha": 2.0,
                "eta_x": 0.05, "eta_y": 0.1, "eta_z": 0.1,      # the same steps of DSGDA-GT
            },
        ),
    ),
)
async def storm_pl(st: State, shard: Shard, cfg: Config) -> State:
    """STORM-PL: first-order penalty method, one loop, variance-reduced estimates, gradient tracking on x, y and z."""
    u, old = st.track, st.estimate
    wx, wy, wz, wux, wuy, wuz = await mix(x=st.x, y=st.y, z=st.z, u_x=u.x, u_y=u.y, u_z=u.z)
    x = wx - cfg.beta_x * cfg.eta * u.x
    y = wy - cfg.beta_y * cfg.eta * u.y
    z = wz - cfg.beta_z * cfg.eta * u.z

    t, keep = st.t + 1, 1 - cfg.alpha * cfg.eta**2
    batch = shard.sample(round_key(shard, t))
    new = directions(batch, cfg.lam, x, y, z)
    last = directions(batch, cfg.lam, st.x, st.y, st.z)                                  # old point, same samples
    m = Triple(x=keep * (old.x - last.x) + new.x, y=keep * (old.y - last.y) + new.y, z=keep * (old.z - last.z) + new.z)
    track = Triple(x=wux + (m.x - old.x), y=wuy + (m.y - old.y), z=wuz + (m.z - old.z))
    return State(t=t, x=x, y=y, z=z, estimate=m, track=track)
