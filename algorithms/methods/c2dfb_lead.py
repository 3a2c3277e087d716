"""C²DFB with LEAD inside: one compressed stream per inner loop instead of two. This project's own, unpublished method.

C²DFB (arXiv 2410.14115) sends iterate and tracker in every inner step. LEAD (X. Liu et al.: Linear Convergent
Decentralized Optimization with Compression, ICLR 2021) replaces the tracker by a dual variable D, which is local and
adds up to 0 over the nodes. For each of the y and z loops, with a reference point H that all neighbours know:

    Y = d − η ∇r(d) − η D;   q = Q(Y − H);   Ŷ = H + q;   H ← H + α q
    D ← D + γ/(2η) (Ŷ − Σ_j w_ij Ŷ_j);   d ← d − η ∇r(d) − η D

No tracker, and nothing to correct when x has moved. The outer loop is that of C²DFB. LEAD's theory takes an unbiased Q;
with top-k the method is unproven. docs/beyond.md has what is measured.

Per round a node sends x and s uncompressed (one packet) and, in each of the K inner steps, two compressed residuals
(one packet): 2 d_x + 2 K k values in K + 1 packets. Oracles: 3 K partial gradients in y and 3 in x.
"""

from dataclasses import dataclass

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
from dbo.algorithms.parts.consensus import derive_lead_gamma
from dbo.algorithms.parts.penalty import YObjective, upper_gradient, y_gradient
from dbo.algorithms.references import penalty_methods as references


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Parameters of C²DFB with LEAD inside."""

    inner_steps: int = param(10, ge=1, help="K, compressed steps of the two inner loops per round")
    lam: float = param(10.0, gt=0, help="penalty λ")
    eta_in: float = param(0.3, gt=0, help="step size of the inner loops", schedule=True)
    eta_out: float = param(0.1, gt=0, help="step size of x", schedule=True)
    gamma_in: float = param(
        0.5, gt=0, le=1, help="consensus step of the inner loops; auto: from Q and the network", schedule=True,
        auto=derive_lead_gamma,
    )
    gamma_out: float = param(0.5, gt=0, le=1, help="consensus step of x and its tracker", schedule=True)
    alpha: float = param(1.0, gt=0, le=1, help="α, step of the reference points", schedule=True)
    y_objective: YObjective = param("h_over_lambda", help="what the y loop descends on: h / λ, or h = f + λ g")
    compressor: Compressor = param(TopK(ratio=0.2, bits=4), help="Q, applied to residuals row by row")


@dataclass(frozen=True, slots=True)
class Inner:
    """State of one inner loop."""

    d: Array         # the iterate: y or z
    dual: Array      # D, adds up to 0 over the nodes
    ref: Array       # H, the neighbours' copy
    w_ref: Array     # Σ_j w_ij H_j


@dataclass(frozen=True, slots=True)
class State:
    """State of the method."""

    t: Array
    x: Array
    s: Array         # tracker of the mean upper gradient
    u: Array         # last local upper gradient
    loop_y: Inner
    loop_z: Inner

    @property
    def y(self) -> Array:
        return self.loop_y.d

    @property
    def z(self) -> Array:
        return self.loop_z.d

    @property
    def public_y(self) -> Array:
        return self.loop_y.w_ref

    @property
    def direction(self) -> Array:
        return self.s


def init(shard: Shard, cfg: Config) -> State:
    """Start at the common point, which all nodes know: z = y, the tracker of x at the local gradients."""
    t, x, y = counter(shard), shard.x0, shard.y0
    u = upper_gradient(shard.sample(round_key(shard, t)), cfg.lam, x, y, y)
    return State(t=t, x=x, s=u, u=u, loop_y=start(y), loop_z=start(y))


def start(d: Array) -> Inner:
    """Start a loop; each array has memory of its own."""
    return Inner(d=d + 0, dual=0 * d, ref=d + 0, w_ref=d + 0)


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    """Q changes only what is sent, and mixing terms add up to 0."""
    y, z = after.loop_y, after.loop_z
    return {
        "mean(x) steps by −η_out mean(s)": mean(after.x - before.x) + cfg.eta_out * mean(before.s),
        "mean(s) = mean(∇ψ_λ,i)": mean(after.s - upper_gradient(shard, cfg.lam, after.x, y.d, z.d)),
        "mean(D_y) = 0": mean(y.dual),
        "mean(D_z) = 0": mean(z.dual),
        "mean(Σ_j w_ij H_y,j) = mean(H_y,i)": mean(y.w_ref - y.ref),
        "mean(Σ_j w_ij H_z,j) = mean(H_z,i)": mean(z.w_ref - z.ref),
    }


@algorithm(
    "c2dfb_lead", config=Config, state=State, init=init,
    packets=lambda cfg: cfg.inner_steps + 1, batches=lambda cfg: cfg.inner_steps + 1, penalty=lambda cfg: cfg.lam,
    family="penalty", citation="this project, unpublished, 2026", oracles="first_order",
    errors=ErrorTerms(
        consensus=lambda st: {"z": st.z, "tracker_x": st.s},
        compression=lambda st: {"y": (st.y, st.loop_y.ref), "z": (st.z, st.loop_z.ref)},
    ),
    reference=references.c2dfb_lead,
    claim=Claim(
        limit=PENALTY, invariants=invariants, rounds=300,
        steps={"inner_steps": 8, "eta_in": 0.3, "eta_out": 0.3, "gamma_in": 0.3, "gamma_out": 0.8},
        noise=Noise(
            scale=("eta_in", "eta_out"), shared=True, rounds=300,
            steps={
                "inner_steps": 3, "eta_in": 0.05, "eta_out": 0.05, "gamma_in": 0.1, "compressor": TopK(ratio=0.5)},
        ),
    ),
)
async def c2dfb_lead(st: State, shard: Shard, cfg: Config) -> State:
    """C²DFB with LEAD: one compressed residual per inner loop and step, duals instead of trackers."""
    wx, ws = await mix(x=st.x, s=st.s)
    x = st.x + cfg.gamma_out * (wx - st.x) - cfg.eta_out * st.s                     # C²DFB, Alg. 1, l. 4

    loop_y, loop_z, key = st.loop_y, st.loop_z, round_key(shard, st.t)
    for k in range(cfg.inner_steps):
        batch = shard.sample(key.at(k))
        grad_y = y_gradient(batch, cfg.lam, cfg.y_objective, x, loop_y.d)
        grad_z = batch.g_y(x, loop_z.d)
        q_y, y_hat = publish(loop_y, grad_y, cfg, key.at(k), "y")
        q_z, z_hat = publish(loop_z, grad_z, cfg, key.at(k), "z")
        wq_y, wq_z = await mix(y=q_y, z=q_z)
        loop_y = receive(loop_y, grad_y, cfg, y_hat, wq_y)
        loop_z = receive(loop_z, grad_z, cfg, z_hat, wq_z)

    u = upper_gradient(shard.sample(key.at(cfg.inner_steps)), cfg.lam, x, loop_y.d, loop_z.d)
    s = st.s + (cfg.gamma_out * (ws - st.s) + (u - st.u))                            # C²DFB, Alg. 1, l. 11
    return State(t=st.t + 1, x=x, s=s, u=u, loop_y=loop_y, loop_z=loop_z)


def publish(v: Inner, grad: Array, cfg: Config, key: Key, channel: str) -> tuple[Message | Packed, Array]:
    """Return q = Q(Y − H) and Ŷ = H + q, with Y = d − η ∇r − η D."""
    q = cfg.compressor(v.d - cfg.eta_in * (grad + v.dual) - v.ref, key, channel)
    return q, v.ref + q.values


def receive(v: Inner, grad: Array, cfg: Config, hat: Array, wq: Array) -> Inner:
    """Update D and d with the neighbours' Ŷ, and the reference points."""
    w_hat = v.w_ref + wq
    dual = v.dual + cfg.gamma_in / (2 * cfg.eta_in) * (hat - w_hat)
    d = v.d - cfg.eta_in * (grad + dual)
    ref, w_ref = v.ref + cfg.alpha * (hat - v.ref), v.w_ref + cfg.alpha * (w_hat - v.w_ref)
    return Inner(d=d, dual=dual, ref=ref, w_ref=w_ref)
