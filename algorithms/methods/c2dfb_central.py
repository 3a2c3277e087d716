"""C²DFB with a central difference: bias O(1/λ²) at the same bytes. This project's own, unpublished combination.

The hypergradient is that of F²SA-p with p = 2 (arXiv 2509.02937); the loops are those of C²DFB (arXiv 2410.14115,
Algorithm 2). With

    y₊(x) = argmin_y g + f/λ        y₋(x) = argmin_y g − f/λ        ψ_±λ(x) = (λ/2) (min_y [g + f/λ] − min_y [g − f/λ])

the two compressed loops follow y₊ and y₋ instead of y and z, and x descends along

    ∇ψ_±λ(x) = ½ (∇_x f(x, y₊) + ∇_x f(x, y₋)) + (λ/2) (∇_x g(x, y₊) − ∇_x g(x, y₋)).

(min_y [g + t f])/t differs from ψ by O(t): C²DFB has t = 1/λ, a forward difference. In the central difference the odd
terms of t = ± 1/λ cancel. It needs g − f/λ to be strongly convex; a run warns if that is not so at its start.

Per round a node sends x and its tracker uncompressed (one packet) and, in each of the K inner steps, four compressed
residuals (one packet): 2 d_x + 4 K k values in K + 1 packets. Oracles: 4 (K + 1) partial gradients in y and 4 in x.
"""

from dataclasses import dataclass

from dbo.algorithms.api import (
    CENTRAL,
    Array,
    Claim,
    Compressor,
    ErrorTerms,
    Noise,
    Shard,
    TopK,
    algorithm,
    counter,
    mean,
    mix,
    param,
    round_key,
)
from dbo.algorithms.methods.c2dfb import Gradient, Inner, Step, inner_step, receive, refresh, reset, start
from dbo.algorithms.parts.consensus import derive_gamma
from dbo.algorithms.parts.penalty import central_gradient, shifted_gradient
from dbo.algorithms.references import penalty_methods as references


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Parameters of C²DFB with a central difference."""

    inner_steps: int = param(15, ge=1, help="K, compressed steps of the two inner loops per round")
    lam: float = param(10.0, gt=0, help="λ, the inverse step of the central difference")
    eta_in: float = param(1.0, gt=0, help="step size of the inner loops", schedule=True)
    eta_out: float = param(1.0, gt=0, help="step size of x", schedule=True)
    gamma_in: float = param(
        0.5, gt=0, le=1, help="consensus step of the inner loops; auto: from Q and the network", schedule=True,
        auto=derive_gamma,
    )
    gamma_out: float = param(0.5, gt=0, le=1, help="consensus step of x and its tracker", schedule=True)
    compressor: Compressor = param(TopK(ratio=0.2), help="Q, applied to residuals row by row")
    reset_every: int = param(
        200, ge=0, help="rounds after which the trackers' reference points ŝ start from 0 again; 0: never"
    )


@dataclass(frozen=True, slots=True)
class State:
    """State of the method: C²DFB's, with y₊ and y₋ in its two loops."""

    t: Array
    x: Array
    s: Array          # tracker of the mean upper gradient
    u: Array          # last local upper gradient
    plus: Inner       # y₊
    minus: Inner      # y₋

    @property
    def y(self) -> Array:
        return self.plus.d

    @property
    def z(self) -> Array:
        return self.minus.d

    @property
    def direction(self) -> Array:
        return self.s


def init(shard: Shard, cfg: Config) -> State:
    """Start y₊ = y₋ at the common point, trackers at the local gradients, references at zero."""
    t, x, y = counter(shard), shard.x0, shard.y0
    batch = shard.sample(round_key(shard, t))
    u = central_gradient(batch, cfg.lam, x, y, y)
    grad_plus, grad_minus = inner_gradients(batch, cfg, x)
    return State(t=t, x=x, s=u, u=u, plus=start(y, grad_plus(y)), minus=start(y, grad_minus(y)))


def inner_gradients(batch: Shard, cfg: Config, x: Array) -> tuple[Gradient, Gradient]:
    """Return ∇_y (g + f/λ) and ∇_y (g − f/λ) at x; one batch serves both."""
    return (lambda y: shifted_gradient(batch, cfg.lam, x, y)), (lambda y: shifted_gradient(batch, -cfg.lam, x, y))


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    """Q changes only what is sent, and mixing terms add up to 0: means behave as without compression."""
    x, plus, minus = after.x, after.plus, after.minus
    grad_plus, grad_minus = inner_gradients(shard, cfg, x)
    return {
        "mean(x) steps by −η_out mean(s)": mean(x - before.x) + cfg.eta_out * mean(before.s),
        "mean(s) = mean(∇ψ_±λ,i)": mean(after.s - central_gradient(shard, cfg.lam, x, plus.d, minus.d)),
        "mean(s₊) = mean(∇_y (g_i + f_i/λ))": mean(plus.s - grad_plus(plus.d)),
        "mean(s₋) = mean(∇_y (g_i − f_i/λ))": mean(minus.s - grad_minus(minus.d)),
        "mean(Σ_j w_ij (ŷ₊,j − ŷ₊,i)) = 0": mean(plus.gap_d),
        "mean(Σ_j w_ij (ŷ₋,j − ŷ₋,i)) = 0": mean(minus.gap_d),
        "mean(Σ_j w_ij (ŝ₊,j − ŝ₊,i)) = 0": mean(plus.gap_s),
        "mean(Σ_j w_ij (ŝ₋,j − ŝ₋,i)) = 0": mean(minus.gap_s),
    }


@algorithm(
    "c2dfb_central", config=Config, state=State, init=init,
    packets=lambda cfg: cfg.inner_steps + 1, batches=lambda cfg: cfg.inner_steps + 2,
    family="penalty", citation="this project, unpublished, 2026", oracles="first_order",
    convex=lambda cfg: (-1 / cfg.lam, 1.0), public=lambda st: st.plus.d_hat, reference=references.c2dfb_central,
    errors=ErrorTerms(
        consensus=lambda st: {
            "z": st.minus.d, "tracker_x": st.s, "tracker_y": st.plus.s, "tracker_z": st.minus.s,
        },
        compression=lambda st: {
            "y": (st.plus.d, st.plus.d_hat), "tracker_y": (st.plus.s, st.plus.s_hat),
            "z": (st.minus.d, st.minus.d_hat), "tracker_z": (st.minus.s, st.minus.s_hat),
        },
    ),
    claim=Claim(
        limit=CENTRAL, invariants=invariants, rounds=300, bias=("lam", 2),
        steps={"inner_steps": 8, "eta_in": 0.3, "eta_out": 0.3, "gamma_in": 0.3, "gamma_out": 0.8},
        noise=Noise(
            scale=("eta_in", "eta_out"), shared=True,
            steps={"inner_steps": 3, "eta_in": 0.05, "eta_out": 0.05, "compressor": TopK(ratio=0.5)},
        ),
    ),
)
async def c2dfb_central(st: State, shard: Shard, cfg: Config) -> State:
    """C²DFB with a central difference: follows argmin g ± f/λ, bias O(1/λ²) instead of O(1/λ)."""
    wx, ws = await mix(x=st.x, s=st.s)
    x = st.x + cfg.gamma_out * (wx - st.x) - cfg.eta_out * st.s                     # C²DFB, Alg. 1, l. 4

    t, s, u, plus, minus, key = st.t, st.s, st.u, st.plus, st.minus, round_key(shard, st.t)
    del st      # frees the loops' arrays as they are replaced
    if cfg.reset_every and key.round and key.round % cfg.reset_every == 0:
        plus, minus = reset(plus), reset(minus)
    grad_plus, grad_minus = inner_gradients(shard.sample(key.at(0)), cfg, x)
    plus, minus = refresh(plus, grad_plus), refresh(minus, grad_minus)
    step = Step(cfg.eta_in, cfg.gamma_in, cfg.compressor)
    for k in range(cfg.inner_steps):
        grad_plus, grad_minus = inner_gradients(shard.sample(key.at(k + 1)), cfg, x)
        plus, plus_d, plus_s = inner_step(plus, grad_plus, step, key.at(k), "y")
        minus, minus_d, minus_s = inner_step(minus, grad_minus, step, key.at(k), "z")
        w_plus_d, w_plus_s, w_minus_d, w_minus_s = await mix(y_d=plus_d, y_s=plus_s, z_d=minus_d, z_s=minus_s)
        plus, minus = receive(plus, w_plus_d, w_plus_s), receive(minus, w_minus_d, w_minus_s)

    batch = shard.sample(key.at(cfg.inner_steps + 1))
    u_old, u = u, central_gradient(batch, cfg.lam, x, plus.d, minus.d)
    s = s + (cfg.gamma_out * (ws - s) + (u - u_old))                                # C²DFB, Alg. 1, l. 11
    return State(t=t + 1, x=x, s=s, u=u, plus=plus, minus=minus)
