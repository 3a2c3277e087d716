"""Lean: the penalty problem of C²DFB with one small message per level and step. This project's own, unpublished method.

docs/beyond.md derives it and says what is proven and what is measured. Seven changes to C²DFB:

1. the loops are primal-dual, as in LEAD (Liu et al., ICLR 2021) and NIDS: one residual per step instead of two;
2. residuals are top-k with values of few bits on logarithmic levels;
3. consensus is edge-triggered (`parts/edges.py`): the consensus step need not shrink with the ratio;
4. z sends only the part of its residual that y's message leaves unexplained: y and z move almost together;
5. x travels compressed as well;
6. heavy ball in y and z;
7. differences move the iterate directly as well, which damps the dual's swinging between messages.

Each change has a parameter that undoes it, except the first: `c2dfb_lead` is C²DFB with the first one alone.

Per round a node sends x's residual (one packet) and, in each of the K inner steps, those of y and z (one packet):
k_x + K (k_y + k_z) values in K + 1 packets. Oracles: 3 K partial gradients in y and 3 in x. A node keeps a copy of each
neighbour's reference points.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from dbo.algorithms.api import (
    PENALTY,
    Array,
    Claim,
    Compressor,
    ErrorTerms,
    Noise,
    Shard,
    TopK,
    algorithm,
    counter,
    dense,
    exchange,
    mean,
    param,
    round_key,
)
from dbo.algorithms.compression.compressors import without_width
from dbo.algorithms.parts.consensus import derive_triggered_gamma
from dbo.algorithms.parts.edges import Loop, Published, Step, advance, publish, start
from dbo.algorithms.parts.penalty import upper_gradient, y_gradient
from dbo.algorithms.references import penalty_methods as references


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Parameters of Lean."""

    inner_steps: int = param(10, ge=1, help="K, steps of y and z per round")
    lam: float = param(10.0, gt=0, help="penalty λ")
    eta_in: float = param(0.3, gt=0, help="step size of y on h / λ and of z on g", schedule=True)
    eta_out: float = param(0.1, gt=0, help="step size of x", schedule=True)
    gamma: float = param(
        0.5, gt=0, le=1, help="consensus step; auto: from Q and the network", schedule=True,
        auto=derive_triggered_gamma,
    )
    damping: float = param(0.0, ge=0, le=1, help="κ, share of a difference that moves the iterate", schedule=True)
    momentum: float = param(0.0, ge=0, lt=1, help="β, heavy ball in y and z")
    compressor: Compressor = param(TopK(ratio=0.2, bits=4), help="Q of y's residuals")
    ratio_z: float | None = param(None, gt=0, le=1, help="share of z's entries that is sent beside y's; null: Q's")
    ratio_x: float | None = param(None, gt=0, le=1, help="share of x's entries that is sent; null: Q's")
    compressor_x: Compressor | None = param(None, help="Q of x's residuals; null: y's, with groups of one entry")
    edge_triggered: bool = param(True, help="correct an entry on an edge only when one of its ends has sent it")
    explain_z: bool = param(True, help="send only what y's message leaves unexplained of z's residual")
    compress_x: bool = param(True, help="send x's residual compressed, not x itself")


@dataclass(frozen=True, slots=True)
class State:
    """State of Lean."""

    t: Array
    u: Array             # local upper gradient
    loop_x: Loop
    loop_y: Loop
    loop_z: Loop
    public_y: Array      # Σ_j w_ij h_j of y: what a neighbourhood has published

    @property
    def x(self) -> Array:
        return self.loop_x.v

    @property
    def y(self) -> Array:
        return self.loop_y.v

    @property
    def z(self) -> Array:
        return self.loop_z.v

    @property
    def direction(self) -> Array:
        return self.u + self.loop_x.dual


def init(shard: Shard, cfg: Config) -> State:
    """Start all loops at the common point; z = y."""
    t, x, y, places = counter(shard), shard.x0, shard.y0, shard.network.places
    u = upper_gradient(shard.sample(round_key(shard, t)), cfg.lam, x, y, y)
    return State(
        t=t, u=u, loop_x=start(x, places), loop_y=start(y, places), loop_z=start(y, places), public_y=y + 0
    )


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    """Corrections cancel on every edge: means behave as without communication, and duals add up to 0."""
    x = after.x
    return {
        "mean(x) steps by −η_out mean(u)": mean(after.x - before.x) + cfg.eta_out * mean(before.u),
        "mean(D_x) = 0": mean(after.loop_x.dual),
        "mean(D_y) = 0": mean(after.loop_y.dual),
        "mean(D_z) = 0": mean(after.loop_z.dual),
        "mean(Σ_j w_ij h_j) = mean(h_i)": mean(after.public_y - after.loop_y.ref),
    } | ({} if cfg.momentum and cfg.inner_steps > 3 else {
        "mean(y) steps by −η mean(∇) + β mean(y − y_old)": last_step(
            before.loop_y, after.loop_y, lambda y: y_gradient(shard, cfg.lam, "h_over_lambda", x, y), cfg),
        "mean(z) steps by −η mean(∇) + β mean(z − z_old)": last_step(
            before.loop_z, after.loop_z, lambda z: shard.g_y(x, z), cfg),
    })


def last_step(before: Loop, after: Loop, gradient: Callable[[Array], Array], cfg: Config) -> Array:
    """Return by how much the mean's last step of a round differs from −η mean(∇) + β mean(v − v_old).

    The state has the last two iterates. Momentum needs the one before them: in rounds of one and two steps it is in
    the state before, and in those of three its mean follows from there.
    """
    older = after.old
    if cfg.momentum:
        older = (
            before.old, before.v,
            before.v - cfg.eta_in * gradient(before.v) + cfg.momentum * (before.v - before.old),
        )[cfg.inner_steps - 1]
    return (
        mean(after.v - after.old) + cfg.eta_in * mean(gradient(after.old)) - cfg.momentum * mean(after.old - older))


def with_ratio(q: Compressor, ratio: float | None) -> Compressor:
    """Return the compressor with another ratio, if it has one."""
    if ratio is None or "ratio" not in {field.name for field in fields(q)}:      # type: ignore[arg-type]
        return q
    return replace(q, ratio=ratio)      # type: ignore[type-var]


@algorithm(
    "lean", config=Config, state=State, init=init,
    packets=lambda cfg: cfg.inner_steps + 1, batches=lambda cfg: cfg.inner_steps + 1, penalty=lambda cfg: cfg.lam,
    family="penalty", citation="this project, unpublished, 2026", oracles="first_order",
    errors=ErrorTerms(
        consensus=lambda st: {"z": st.z},
        compression=lambda st: {
            name: (loop.v, loop.ref) for name, loop in (("x", st.loop_x), ("y", st.loop_y), ("z", st.loop_z))
        },
    ),
    reference=references.lean,
    claim=Claim(
        limit=PENALTY, invariants=invariants, rounds=600,
        steps={"inner_steps": 8, "eta_in": 0.3, "eta_out": 0.1, "gamma": 0.5},
        noise=Noise(
            scale=("eta_in", "eta_out"), shared=True, rounds=300,
            steps={
                "inner_steps": 3, "eta_in": 0.05, "eta_out": 0.05, "gamma": 0.1, "compressor": TopK(ratio=0.5),
                "ratio_x": 0.5, "ratio_z": 0.5},
        ),
    ),
)
async def lean(st: State, shard: Shard, cfg: Config) -> State:
    """Lean: penalty method with one quantized message per level and step, edge-triggered consensus."""
    key = round_key(shard, st.t)
    step = Step(cfg.eta_out, cfg.gamma, triggered=cfg.edge_triggered, damping=cfg.damping)
    if cfg.compress_x:
        q_x = without_width(cfg.compressor) if cfg.compressor_x is None else cfg.compressor_x
        sent = publish(st.loop_x, st.u, step, with_ratio(q_x, cfg.ratio_x), key, "x")
    else:
        residual = st.loop_x.v - step.eta * (st.u + st.loop_x.dual) - st.loop_x.ref
        sent = Published(dense(residual), residual, st.loop_x.ref + residual)
    (got,) = await exchange(x=sent.message)
    loop_x = advance(st.loop_x, st.u, step, sent, got)
    x, loop_y, loop_z, public_y = loop_x.v, st.loop_y, st.loop_z, st.public_y

    step = Step(cfg.eta_in, cfg.gamma, cfg.momentum, cfg.edge_triggered, cfg.damping)
    q_z = with_ratio(cfg.compressor, cfg.ratio_z)
    for k in range(cfg.inner_steps):
        batch = shard.sample(key.at(k))
        grad_y, grad_z = y_gradient(batch, cfg.lam, "h_over_lambda", x, loop_y.v), batch.g_y(x, loop_z.v)
        sent_y = publish(loop_y, grad_y, step, cfg.compressor, key.at(k), "y")
        explained = sent_y.change if cfg.explain_z else None
        sent_z = publish(loop_z, grad_z, step, q_z, key.at(k), "z", explained)
        got_y, got_z = await exchange(y=sent_y.message, z=sent_z.message)
        loop_y = advance(loop_y, grad_y, step, sent_y, got_y)
        loop_z = advance(loop_z, grad_z, step, sent_z, got_z, got_y.rows if cfg.explain_z else None)
        public_y = got_y.mean(loop_y.ref, loop_y.near)

    u = upper_gradient(shard.sample(key.at(cfg.inner_steps)), cfg.lam, x, loop_y.v, loop_z.v)
    return State(t=st.t + 1, u=u, loop_x=loop_x, loop_y=loop_y, loop_z=loop_z, public_y=public_y)
