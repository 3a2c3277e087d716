"""C²DFB: compressed residuals, gradient tracking on both levels, first-order oracles only.

M. Wen, C. Liu, A. M. Abdelmoniem, Y. Zhou, Y. Xu: A Communication and Computation Efficient Fully First-order Method
for Decentralized Bilevel Optimization, arXiv 2410.14115, Algorithms 1 and 2.

Per round a node sends x and s uncompressed (one packet) and, in each of the K inner steps, four compressed residuals
(one packet): 2 d_x + 4 K k values in K + 1 packets. Oracles: 3(K + 1) partial gradients in y and 3 in x; with
`tracker: cached`, which takes none before the first step, 3 K and 3.

departs: the y loop steps on h / λ with the η_in of the z loop, where the paper's theory takes η_in ~ 1/(λ L_g) and its
experiments η_in = 1 (`y_objective: h` is its text; penalty.py has the reasons). departs: residuals of the two inner
loops and of iterate and tracker travel together, since s^{k+1} needs no neighbour's d^{k+1}. departs: reference points
start at 0 (the paper leaves them open). departs: before the inner loop the tracker takes in the jump of the gradient
that the new x causes; the paper does not say at which x its ∇r^0 is taken, and re-evaluating it without the jump makes
(1/m) Σ s_i drift away from the mean gradient for good. departs: every `reset_every` rounds all nodes set ŝ and Σ_j w_ij
ŝ_j to 0 at once, as at the start, which takes no message. That sum is only ever added to, and what rounding has left in
it when s was large enters the trackers in every later step: without the reset a float32 run moves away from its
solution for ever. Near the solution s is near 0 itself, and little is lost.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le
from typing_extensions import Doc

from dbo.algorithms.claims import PENALTY, Claim, mean
from dbo.algorithms.compression.compressors import Compressor, TopK
from dbo.algorithms.gossip import Message, Packed, mix
from dbo.algorithms.kernels.fused import cleared, jumped, moved, residual, told, tracked
from dbo.algorithms.parts.penalty import YObjective, upper_gradient, y_gradient
from dbo.algorithms.protocol import Array, Shard
from dbo.algorithms.registry import algorithm, counter
from dbo.algorithms.rng import Draws, draws


@dataclass(frozen=True, slots=True, kw_only=True)
class Loops:
    """What C²DFB and its ablation share. Defaults are the paper's values for 20 Newsgroups, but for `y_objective`."""

    inner_steps: Annotated[int, Ge(1), Doc("K, compressed steps of the two inner loops per round")] = 15
    lam: Annotated[float, Gt(0), Doc("penalty λ (called σ in the paper's experiments)")] = 10.0
    eta_in: Annotated[float, Gt(0), Doc("step size of the inner loops")] = 1.0
    eta_out: Annotated[float, Gt(0), Doc("step size of x")] = 1.0
    gamma_in: Annotated[float, Gt(0), Le(1), Doc("consensus step of the inner loops")] = 0.5
    gamma_out: Annotated[float, Gt(0), Le(1), Doc("consensus step of x and its tracker")] = 0.5
    y_objective: Annotated[YObjective, Doc("what the y loop descends on: h / λ, or h = f + λ g")] = "h_over_lambda"
    tracker: Annotated[
        Literal["refresh", "cached"],
        Doc("when x has moved: take the gradient's jump into the tracker at once, or with the first inner step"),
    ] = "refresh"
    compressor: Annotated[Compressor, Doc("Q, applied to residuals row by row")] = TopK(ratio=0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Loops):
    """As above, and what keeps rounding errors from adding up."""

    reset_every: Annotated[
        int, Ge(0), Doc("rounds after which the trackers' reference points ŝ start from 0 again; 0: never")
    ] = 200


@dataclass(frozen=True, slots=True)
class Inner:
    """State of one inner loop (Algorithm 2)."""

    d: Array          # the iterate: y or z
    s: Array          # tracker of the mean gradient
    grad: Array       # last local gradient ∇r_i
    d_hat: Array      # reference points: what all neighbours know of d and s
    s_hat: Array
    wd_hat: Array     # Σ_j w_ij d̂_j, Σ_j w_ij ŝ_j
    ws_hat: Array


@dataclass(frozen=True, slots=True)
class State:
    """State of Algorithm 1."""

    t: Array
    x: Array
    s: Array          # tracker of the mean upper gradient
    u: Array          # last local upper gradient
    loop_y: Inner
    loop_z: Inner

    @property
    def y(self) -> Array:
        return self.loop_y.d

    @property
    def z(self) -> Array:
        return self.loop_z.d

    @property
    def direction(self) -> Array:
        return self.s


Gradient = Callable[[Array], Array]
Spoken = Message | Packed


def init(shard: Shard, cfg: Config) -> State:
    """Algorithm 1, `initialize`: z = y, both trackers at the local gradients, references at zero."""
    x, y = shard.x0, shard.y0
    u = upper_gradient(shard, cfg.lam, x, y, y)
    return State(
        t=counter(shard), x=x, s=u, u=u,
        loop_y=start(y, y_gradient(shard, cfg.lam, cfg.y_objective, x, y)),
        loop_z=start(y, shard.g_y(x, y)),
    )


def start(d: Array, grad: Array) -> Inner:
    """Each array has memory of its own: where rows are wide, the steps below are made in place."""
    return Inner(d=d + 0, s=grad + 0, grad=grad, d_hat=0 * d, s_hat=0 * d, wd_hat=0 * d, ws_hat=0 * d)


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    """Q touches only what is sent, and mixing terms add up to 0: means behave as without compression."""
    x, y, z = after.x, after.loop_y, after.loop_z
    return {
        "mean(x) steps by −η_out mean(s)": mean(x - before.x) + cfg.eta_out * mean(before.s),
        "mean(s) = mean(∇ψ_λ,i)": mean(after.s - upper_gradient(shard, cfg.lam, x, y.d, z.d)),
        "mean(s_y) = mean(∇r_i)": mean(y.s - y_gradient(shard, cfg.lam, cfg.y_objective, x, y.d)),
        "mean(s_z) = mean(∇_y g_i)": mean(z.s - shard.g_y(x, z.d)),
        "mean(Σ_j w_ij ŷ_j) = mean(ŷ_i)": mean(y.wd_hat - y.d_hat),
        "mean(Σ_j w_ij ẑ_j) = mean(ẑ_i)": mean(z.wd_hat - z.d_hat),
        "mean(Σ_j w_ij ŝ_y,j) = mean(ŝ_y,i)": mean(y.ws_hat - y.s_hat),
        "mean(Σ_j w_ij ŝ_z,j) = mean(ŝ_z,i)": mean(z.ws_hat - z.s_hat),
    }


@algorithm(
    "c2dfb", config=Config, state=State, init=init,
    packets=lambda cfg: cfg.inner_steps + 1,
    paper_counts={"y_s": 0.0, "z_s": 0.0},   # Table 1 counts 30 of the 60 compressed messages of a round
    claim=Claim(
        limit=PENALTY, invariants=invariants, rounds=300,
        steps={"inner_steps": 8, "eta_in": 0.3, "eta_out": 0.3, "gamma_in": 0.3, "gamma_out": 0.8},
    ),
)
async def c2dfb(st: State, shard: Shard, cfg: Config) -> State:
    """C²DFB: first-order, tracked on both levels, neighbours hear compressed residuals to reference points."""
    wx, ws = await mix(x=st.x, s=st.s)
    x = st.x + cfg.gamma_out * (wx - st.x) - cfg.eta_out * st.s                                       # Alg. 1, l. 4

    def grad_y(y: Array) -> Array:
        return y_gradient(shard, cfg.lam, cfg.y_objective, x, y)

    def grad_z(z: Array) -> Array:
        return shard.g_y(x, z)

    y, z, key = st.loop_y, st.loop_z, draws(shard, st.t)
    if cfg.reset_every and key.round and key.round % cfg.reset_every == 0:
        y, z = reset(y), reset(z)
    if cfg.tracker == "refresh":
        y, z = refresh(y, grad_y), refresh(z, grad_z)
    for k in range(cfg.inner_steps):                                                                  # Alg. 1, l. 6–7
        y, y_d, y_s = inner_step(y, grad_y, cfg, key.at(k), "y")
        z, z_d, z_s = inner_step(z, grad_z, cfg, key.at(k), "z")
        wy_d, wy_s, wz_d, wz_s = await mix(y_d=y_d, y_s=y_s, z_d=z_d, z_s=z_s)
        y, z = heard(y, wy_d, wy_s), heard(z, wz_d, wz_s)

    u = upper_gradient(shard, cfg.lam, x, y.d, z.d)                                                   # Alg. 1, l. 9
    s = st.s + (cfg.gamma_out * (ws - st.s) + (u - st.u))                                             # Alg. 1, l. 11
    return State(t=st.t + 1, x=x, s=s, u=u, loop_y=y, loop_z=z)


def reset(v: Inner) -> Inner:
    """The tracker's reference point back to 0, at all nodes in the same round: Σ_j w_ij ŝ_j is then 0 exactly."""
    return replace(v, s_hat=cleared(v.s_hat), ws_hat=cleared(v.ws_hat))


def refresh(v: Inner, gradient: Gradient) -> Inner:
    """The gradient's jump at the new x enters the tracker before the first step: mean(s) = mean(∇r) stays true."""
    s, grad = jumped(v.s, gradient(v.d), v.grad)
    return replace(v, s=s, grad=grad)


def inner_step(v: Inner, gradient: Gradient, cfg: Config, key: Draws, channel: str) -> tuple[Inner, Spoken, Spoken]:
    """Algorithm 2, one k: the local part, and the two residuals that are sent.

    d ← d + γ (Σ_j w_ij d̂_j − d̂) − η s;   s ← s + γ (Σ_j w_ij ŝ_j − ŝ) + ∇r(d) − ∇r(d of the step before);
    d̂ ← d̂ + Q(d − d̂) and ŝ ← ŝ + Q(s − ŝ), with the Q(·) as the messages.
    """
    d = moved(v.d, cfg.gamma_in, v.wd_hat, v.d_hat, cfg.eta_in, v.s)                                  # Alg. 2, l. 2
    q_d, d_hat = residual(cfg.compressor, d, v.d_hat, key, channel + "_d")                            # Alg. 2, l. 4
    s, grad = tracked(v.s, cfg.gamma_in, v.ws_hat, v.s_hat, gradient(d), v.grad)                      # Alg. 2, l. 5
    q_s, s_hat = residual(cfg.compressor, s, v.s_hat, key, channel + "_s")                            # Alg. 2, l. 7
    return Inner(d=d, s=s, grad=grad, d_hat=d_hat, s_hat=s_hat, wd_hat=v.wd_hat, ws_hat=v.ws_hat), q_d, q_s


def heard(v: Inner, wq_d: Array, wq_s: Array) -> Inner:
    """Σ_j w_ij d̂_j and Σ_j w_ij ŝ_j follow from the residuals alone: no copy of a neighbour is kept."""
    return replace(v, wd_hat=told(v.wd_hat, wq_d), ws_hat=told(v.ws_hat, wq_s))
