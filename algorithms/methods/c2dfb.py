"""C²DFB: compressed residuals, gradient tracking on both levels, first-order oracles only.

M. Wen, C. Liu, A. M. Abdelmoniem, Y. Zhou, Y. Xu: A Communication and Computation Efficient Fully First-order Method
for Decentralized Bilevel Optimization, arXiv 2410.14115, Algorithms 1 and 2.

Per round a node sends x and s uncompressed (one packet) and, in each of the K inner steps, four compressed residuals
(one packet): 2 d_x + 4 K k values in K + 1 packets; with `compressor_x` 2 k_x instead of 2 d_x. Oracles: 3(K + 1)
partial gradients in y and 3 in x; with `tracker: cached`, which takes none before the first step, 3 K and 3.

departs: the y loop steps on h / λ with the η_in of the z loop, where the paper's theory takes η_in ~ 1/(λ L_g) and its
experiments η_in = 1 (`y_objective: h` is its text; parts/penalty.py has the reasons).
departs: `eta_y` and `eta_z` give the loops their own steps; with one η_in and `y_objective: h`, z lags by a factor λ.
departs: `compressor_x` sends residuals of x and s to reference points, as the inner loops do, where d_x dominates; with
the identity the iterates are those of the paper.
departs: residuals of the two inner loops and of iterate and tracker travel together, since s^{k+1} needs no
neighbour's d^{k+1}.
departs: reference points start at 0 (the paper leaves them open).
departs: before the inner loop the tracker adds the change of the gradient that the new x causes. The paper does not
specify at which x its ∇r^0 is taken; re-evaluating it without this correction makes (1/m) Σ s_i drift away from the
mean gradient permanently.
departs: with mini-batches the trackers follow sampled gradients: the mean of s is the mean of the last ones. One batch
per inner step serves y and z, one serves the three upper gradients: independent ones would multiply the noise by λ.
departs: every `reset_every` rounds all nodes set ŝ and Σ_j w_ij (ŝ_j − ŝ_i) to 0 at once, as at the start, which takes
no message. That sum only accumulates, and rounding errors from when s was large enter the trackers in every later step:
without the reset a float32 run drifts away from its solution. Near the solution s is close to 0 and little is lost.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from dbo.algorithms.api import (
    PENALTY,
    Array,
    Claim,
    Compressor,
    ErrorTerms,
    Key,
    Message,
    Noise,
    Packed,
    Shard,
    TopK,
    algorithm,
    counter,
    mean,
    mix,
    param,
    round_key,
)
from dbo.algorithms.parts.consensus import derive_gamma
from dbo.algorithms.parts.penalty import YObjective, upper_gradient, y_gradient
from dbo.algorithms.references import penalty_methods as references


@dataclass(frozen=True, slots=True, kw_only=True)
class Loops:
    """Parameters of C²DFB and its ablation. Defaults are the paper's for 20 Newsgroups, except `y_objective`."""

    inner_steps: int = param(15, ge=1, help="K, compressed steps of the two inner loops per round")
    lam: float = param(10.0, gt=0, help="penalty λ (called σ in the paper's experiments)")
    eta_in: float = param(1.0, gt=0, help="step size of the inner loops", schedule=True)
    eta_out: float = param(1.0, gt=0, help="step size of x", schedule=True)
    gamma_in: float = param(
        0.5, gt=0, le=1, help="consensus step of the inner loops; auto: from Q and the network", schedule=True,
        auto=derive_gamma,
    )
    gamma_out: float = param(0.5, gt=0, le=1, help="consensus step of x and its tracker", schedule=True)
    y_objective: YObjective = param("h_over_lambda", help="what the y loop descends on: h / λ, or h = f + λ g")
    tracker: Literal["refresh", "cached"] = param(
        "refresh",
        help="when x has moved: add the gradient's change to the tracker at once, or with the first inner step",
    )
    compressor: Compressor = param(TopK(ratio=0.2), help="Q, applied to residuals row by row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Loops):
    """Parameters of C²DFB."""

    reset_every: int = param(
        200, ge=0, help="rounds after which the trackers' reference points ŝ start from 0 again; 0: never"
    )
    eta_y: float | None = param(None, gt=0, help="step size of the y loop; null: eta_in", schedule=True)
    eta_z: float | None = param(None, gt=0, help="step size of the z loop; null: eta_in", schedule=True)
    compressor_x: Compressor | None = param(None, help="Q of the residuals of x and its tracker; null: sent whole")


@dataclass(frozen=True, slots=True)
class Inner:
    """State of one inner loop (Algorithm 2) on r_i, which is h_i / λ (or h_i) in the y loop and g_i in the z loop."""

    d: Array          # the iterate: y or z
    s: Array          # tracker of the mean gradient
    grad: Array       # last local gradient ∇r_i
    d_hat: Array      # reference points: the neighbours' copies of d and s
    s_hat: Array
    gap_d: Array      # Σ_j w_ij (d̂_j − d̂_i), Σ_j w_ij (ŝ_j − ŝ_i)
    gap_s: Array


@dataclass(frozen=True, slots=True)
class Outer:
    """Reference points of x and its tracker; arrays without columns if both are sent whole."""

    x_hat: Array
    s_hat: Array
    wx_hat: Array     # Σ_j w_ij x̂_j, Σ_j w_ij ŝ_j
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
    outer: Outer

    @property
    def y(self) -> Array:
        return self.loop_y.d

    @property
    def z(self) -> Array:
        return self.loop_z.d

    @property
    def direction(self) -> Array:
        return self.s


@dataclass(frozen=True, slots=True)
class Step:
    """What an inner step of one loop does besides following its gradient."""

    eta: float
    gamma: float
    compressor: Compressor


Gradient: TypeAlias = Callable[[Array], Array]
Residual: TypeAlias = Message | Packed      # compressed


def init(shard: Shard, cfg: Config) -> State:
    """Initialize Algorithm 1: z = y, both trackers at the local gradients, references at zero."""
    t, x, y = counter(shard), shard.x0, shard.y0
    batch = shard.sample(round_key(shard, t))
    u = upper_gradient(batch, cfg.lam, x, y, y)
    return State(
        t=t, x=x, s=u, u=u,
        loop_y=start(y, y_gradient(batch, cfg.lam, cfg.y_objective, x, y)),
        loop_z=start(y, batch.g_y(x, y)),
        outer=start_outer(x if cfg.compressor_x is not None else x[:, :0]),
    )


def start_outer(x: Array) -> Outer:
    """Start reference points at zero."""
    return Outer(x_hat=0 * x, s_hat=0 * x, wx_hat=0 * x, ws_hat=0 * x)


def start(d: Array, grad: Array) -> Inner:
    """Start a loop."""
    return Inner(d=d, s=grad, grad=grad, d_hat=0 * d, s_hat=0 * d, gap_d=0 * d, gap_s=0 * d)


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    """Q changes only what is sent, and mixing terms add up to 0: means behave as without compression."""
    x, y, z = after.x, after.loop_y, after.loop_z
    return {
        "mean(x) steps by −η_out mean(s)": mean(x - before.x) + cfg.eta_out * mean(before.s),
        "mean(s) = mean(∇ψ_λ,i)": mean(after.s - upper_gradient(shard, cfg.lam, x, y.d, z.d)),
        "mean(s_y) = mean(∇r_i)": mean(y.s - y_gradient(shard, cfg.lam, cfg.y_objective, x, y.d)),
        "mean(s_z) = mean(∇_y g_i)": mean(z.s - shard.g_y(x, z.d)),
        "mean(Σ_j w_ij (ŷ_j − ŷ_i)) = 0": mean(y.gap_d),
        "mean(Σ_j w_ij (ẑ_j − ẑ_i)) = 0": mean(z.gap_d),
        "mean(Σ_j w_ij (ŝ_y,j − ŝ_y,i)) = 0": mean(y.gap_s),
        "mean(Σ_j w_ij (ŝ_z,j − ŝ_z,i)) = 0": mean(z.gap_s),
    } | ({} if cfg.compressor_x is None else {
        "mean(Σ_j w_ij x̂_j) = mean(x̂_i)": mean(after.outer.wx_hat - after.outer.x_hat),
        "mean(Σ_j w_ij ŝ_j) = mean(ŝ_i)": mean(after.outer.ws_hat - after.outer.s_hat),
    })


# Ω of the paper's analysis: Ω₂ of the outer loop, Ω₁ … Ω₄ of each inner loop, as root mean squares over the nodes.
# Compression errors of the outer loop exist with `compressor_x` alone: otherwise its reference points have no columns.
ERRORS = ErrorTerms(
    consensus=lambda st: {
        "z": st.loop_z.d, "tracker_x": st.s, "tracker_y": st.loop_y.s, "tracker_z": st.loop_z.s,
    },
    compression=lambda st: {
        "y": (st.loop_y.d, st.loop_y.d_hat), "tracker_y": (st.loop_y.s, st.loop_y.s_hat),
        "z": (st.loop_z.d, st.loop_z.d_hat), "tracker_z": (st.loop_z.s, st.loop_z.s_hat),
    } | ({"x": (st.x, st.outer.x_hat), "tracker_x": (st.s, st.outer.s_hat)} if st.outer.x_hat.shape[1] else {}),
)


def count_batches(cfg: Loops) -> int:
    """Return the batches of a round: one to refresh the trackers, one per inner step, one for the upper gradient."""
    return cfg.inner_steps + (2 if cfg.tracker == "refresh" else 1)


@algorithm(
    "c2dfb", config=Config, state=State, init=init,
    family="penalty", citation="Wen et al. 2024, arXiv 2410.14115", oracles="first_order",
    packets=lambda cfg: cfg.inner_steps + 1, batches=count_batches, penalty=lambda cfg: cfg.lam,
    paper_counts={"y_s": 0.0, "z_s": 0.0},   # Table 1 counts 2K of a round's 4K compressed messages
    errors=ERRORS, public=lambda st: st.loop_y.d_hat,
    reference=references.c2dfb,
    claim=Claim(
        limit=PENALTY, invariants=invariants, rounds=300,
        steps={"inner_steps": 8, "eta_in": 0.3, "eta_out": 0.3, "gamma_in": 0.3, "gamma_out": 0.8},
        noise=Noise(
            scale=("eta_in", "eta_out"), shared=True,
            steps={"inner_steps": 3, "eta_in": 0.05, "eta_out": 0.05, "compressor": TopK(ratio=0.5)},
        ),
    ),
)
async def c2dfb(st: State, shard: Shard, cfg: Config) -> State:
    """C²DFB: first-order, tracked on both levels, sends compressed residuals to reference points."""
    key, outer = round_key(shard, st.t), st.outer
    is_reset = cfg.reset_every > 0 and key.round > 0 and key.round % cfg.reset_every == 0
    if cfg.compressor_x is None:
        wx, ws = await mix(x=st.x, s=st.s)
        x_hat, s_hat = st.x, st.s
    else:
        outer = replace(outer, s_hat=0 * st.s, ws_hat=0 * st.s) if is_reset else outer
        q_x, q_s = cfg.compressor_x(st.x - outer.x_hat, key, "x"), cfg.compressor_x(st.s - outer.s_hat, key, "s")
        wq_x, wq_s = await mix(x=q_x, s=q_s)
        x_hat, s_hat = outer.x_hat + q_x.values, outer.s_hat + q_s.values
        wx, ws = outer.wx_hat + wq_x, outer.ws_hat + wq_s
        outer = Outer(x_hat=x_hat, s_hat=s_hat, wx_hat=wx, ws_hat=ws)
    x = st.x + cfg.gamma_out * (wx - x_hat) - cfg.eta_out * st.s                                      # Alg. 1, l. 4

    t, s, u, loops = st.t, st.s, st.u, {"y": st.loop_y, "z": st.loop_z}
    del st      # nothing but `loops` refers to a loop's arrays: the memory of those that are replaced is used again
    if is_reset:
        loops = {name: reset(loop) for name, loop in loops.items()}
    batches = iter(range(count_batches(cfg)))
    step_y = Step(cfg.eta_in if cfg.eta_y is None else cfg.eta_y, cfg.gamma_in, cfg.compressor)
    step_z = replace(step_y, eta=cfg.eta_in if cfg.eta_z is None else cfg.eta_z)
    if cfg.tracker == "refresh":
        grad_y, grad_z = inner_gradients(shard.sample(key.at(next(batches))), cfg, x)
        loops["y"], loops["z"] = refresh(loops["y"], grad_y), refresh(loops["z"], grad_z)
    for k in range(cfg.inner_steps):                                                                  # Alg. 1, l. 6–7
        grad_y, grad_z = inner_gradients(shard.sample(key.at(next(batches))), cfg, x)
        loops["y"], y_d, y_s = inner_step(loops.pop("y"), grad_y, step_y, key.at(k), "y")
        loops["z"], z_d, z_s = inner_step(loops.pop("z"), grad_z, step_z, key.at(k), "z")
        wy_d, wy_s, wz_d, wz_s = await mix(y_d=y_d, y_s=y_s, z_d=z_d, z_s=z_s)
        loops["y"], loops["z"] = receive(loops["y"], wy_d, wy_s), receive(loops["z"], wz_d, wz_s)

    batch = shard.sample(key.at(next(batches)))
    u_old, u = u, upper_gradient(batch, cfg.lam, x, loops["y"].d, loops["z"].d)                       # Alg. 1, l. 9
    s = s + (cfg.gamma_out * (ws - s_hat) + (u - u_old))                                              # Alg. 1, l. 11
    return State(t=t + 1, x=x, s=s, u=u, loop_y=loops["y"], loop_z=loops["z"], outer=outer)


def inner_gradients(batch: Shard, cfg: Loops, x: Array) -> tuple[Gradient, Gradient]:
    """Return ∇r_i of the y loop and of the z loop at x; one batch serves both."""
    return (lambda y: y_gradient(batch, cfg.lam, cfg.y_objective, x, y)), (lambda z: batch.g_y(x, z))


def reset(v: Inner) -> Inner:
    """Set the tracker's reference point to 0, at all nodes in the same round: their differences are then 0 exactly."""
    return replace(v, s_hat=0 * v.s_hat, gap_s=0 * v.gap_s)


def refresh(v: Inner, gradient: Gradient) -> Inner:
    """Add the gradient's change at the new x to the tracker before the first step: mean(s) = mean(∇r) holds again."""
    grad = gradient(v.d)
    return replace(v, s=v.s + (grad - v.grad), grad=grad)


def inner_step(v: Inner, gradient: Gradient, step: Step, key: Key, channel: str) -> tuple[Inner, Residual, Residual]:
    """Algorithm 2, one k: update d and s, and return the two residuals to send."""
    d, s, grad, d_hat, s_hat, gap_d, gap_s = v.d, v.s, v.grad, v.d_hat, v.s_hat, v.gap_d, v.gap_s
    del v       # see c2dfb
    d = d + step.gamma * gap_d - step.eta * s                                                         # Alg. 2, l. 2
    q_d = step.compressor(d - d_hat, key, channel + "_d")                                             # Alg. 2, l. 4
    grad_old, grad = grad, gradient(d)
    s = s + (step.gamma * gap_s + (grad - grad_old))                                                  # Alg. 2, l. 5
    del grad_old
    q_s = step.compressor(s - s_hat, key, channel + "_s")                                             # Alg. 2, l. 7
    new = Inner(d, s, grad, d_hat + q_d.values, s_hat + q_s.values, gap_d - q_d.values, gap_s - q_s.values)
    return new, q_d, q_s


def receive(v: Inner, wq_d: Array, wq_s: Array) -> Inner:
    """Update Σ_j w_ij (d̂_j − d̂_i) and Σ_j w_ij (ŝ_j − ŝ_i) from residuals alone: no copy of a neighbour is stored."""
    return replace(v, gap_d=v.gap_d + wq_d, gap_s=v.gap_s + wq_s)
