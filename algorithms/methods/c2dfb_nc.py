"""C²DFB(nc): the paper's ablation, naive compression of the iterates with error feedback instead of reference points.

arXiv 2410.14115 specifies only that the transmitted parameters are compressed and the accumulated error is
compensated. The rest is our completion: per transmitted vector v an error memory E and the last message M,

    v moves by γ Σ_j w_ij (M_j − M_i);   then P = v + E,  M = Q(P),  E = P − M,  and M is sent.

Mixing over messages preserves the means (the mixing terms add up to 0); `mixing: own` takes v_i for M_i and does not.
As Q acts on the whole vector, messages do not shrink and the consensus error does not vanish, as the ablation shows.
Packets, values, oracle calls and batches per round are those of C²DFB.
"""

from dataclasses import dataclass, replace
from typing import Literal

from dbo.algorithms.api import (
    PENALTY,
    Array,
    Claim,
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
from dbo.algorithms.methods import c2dfb
from dbo.algorithms.parts.penalty import upper_gradient, y_gradient
from dbo.algorithms.references import penalty_methods as references


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(c2dfb.Loops):
    """Parameters of C²DFB, and how a node compares itself with its neighbours' messages."""

    mixing: Literal["messages", "own"] = param(
        "messages",
        help="a node's own side of Σ_j w_ij (M_j − ·): its last message (keeps the mean), or its uncompressed vector",
    )


@dataclass(frozen=True, slots=True)
class ErrorFeedback:
    """A vector that is sent compressed, with error feedback."""

    v: Array          # the vector itself
    error: Array      # E, what has not been sent yet
    sent: Array       # M, the last message
    w_sent: Array     # Σ_j w_ij M_j


@dataclass(frozen=True, slots=True)
class Inner:
    d: ErrorFeedback
    s: ErrorFeedback
    grad: Array


@dataclass(frozen=True, slots=True)
class State:
    t: Array
    x: Array
    s: Array
    u: Array
    loop_y: Inner
    loop_z: Inner

    @property
    def y(self) -> Array:
        return self.loop_y.d.v

    @property
    def z(self) -> Array:
        return self.loop_z.d.v

    @property
    def direction(self) -> Array:
        return self.s


def init(shard: Shard, cfg: Config) -> State:
    """Initialize z = y and both trackers at the local gradients; nothing has been sent."""
    t, x, y = counter(shard), shard.x0, shard.y0
    batch = shard.sample(round_key(shard, t))
    u = upper_gradient(batch, cfg.lam, x, y, y)
    return State(
        t=t, x=x, s=u, u=u,
        loop_y=start(y, y_gradient(batch, cfg.lam, cfg.y_objective, x, y)),
        loop_z=start(y, batch.g_y(x, y)),
    )


def start(d: Array, grad: Array) -> Inner:
    """Start a loop."""
    return Inner(d=ErrorFeedback(d, 0 * d, 0 * d, 0 * d), s=ErrorFeedback(grad, 0 * d, 0 * d, 0 * d), grad=grad)


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    """Those of C²DFB, with `mixing: messages`; instead of references a node stores Σ_j w_ij M_j."""
    x, y, z = after.x, after.loop_y, after.loop_z
    return {
        "mean(x) steps by −η_out mean(s)": mean(x - before.x) + cfg.eta_out * mean(before.s),
        "mean(s) = mean(∇ψ_λ,i)": mean(after.s - upper_gradient(shard, cfg.lam, x, y.d.v, z.d.v)),
        "mean(s_y) = mean(∇r_i)": mean(y.s.v - y_gradient(shard, cfg.lam, cfg.y_objective, x, y.d.v)),
        "mean(s_z) = mean(∇_y g_i)": mean(z.s.v - shard.g_y(x, z.d.v)),
        "mean(Σ_j w_ij M_j) = mean(M_i), y": mean(y.d.w_sent - y.d.sent),
        "mean(Σ_j w_ij M_j) = mean(M_i), z": mean(z.d.w_sent - z.d.sent),
    }


@algorithm(
    "c2dfb_nc", config=Config, state=State, init=init,
    family="penalty", citation="Wen et al. 2024, arXiv 2410.14115 (ablation)", oracles="first_order",
    packets=lambda cfg: cfg.inner_steps + 1, batches=c2dfb.count_batches, penalty=lambda cfg: cfg.lam,
    paper_counts={"y_s": 0.0, "z_s": 0.0}, public=lambda st: st.loop_y.d.sent,
    errors=ErrorTerms(
        consensus=lambda st: {
            "z": st.z, "tracker_x": st.s, "tracker_y": st.loop_y.s.v, "tracker_z": st.loop_z.s.v,
        },
        compression=lambda st: {
            "y": (st.loop_y.d.v, st.loop_y.d.sent), "tracker_y": (st.loop_y.s.v, st.loop_y.s.sent),
            "z": (st.loop_z.d.v, st.loop_z.d.sent), "tracker_z": (st.loop_z.s.v, st.loop_z.s.sent),
        },
    ),
    reference=references.c2dfb_nc,
    claim=Claim(
        # On identical nodes rounding errors grow 1000-fold in 50 rounds: they cause a floor after 300 rounds, not 150.
        limit=PENALTY, invariants=invariants, rounds=150, floor=("eta_in", "eta_out", "gamma_in"),
        fixed=("mixing",),
        steps={"inner_steps": 8, "eta_in": 0.04, "eta_out": 0.1, "gamma_in": 0.08, "gamma_out": 0.8},
        noise=Noise(
            scale=("eta_in", "eta_out"), shared=True,
            steps={"inner_steps": 3, "eta_in": 0.05, "eta_out": 0.05, "compressor": TopK(ratio=0.5)},
        ),
    ),
)
async def c2dfb_nc(st: State, shard: Shard, cfg: Config) -> State:
    """C²DFB(nc): C²DFB with naively compressed iterates and error feedback, the paper's ablation."""
    wx, ws = await mix(x=st.x, s=st.s)
    x = st.x + cfg.gamma_out * (wx - st.x) - cfg.eta_out * st.s

    t, s, u, y, z, key = st.t, st.s, st.u, st.loop_y, st.loop_z, round_key(shard, st.t)
    del st      # frees the loops' arrays as they are replaced
    batches = iter(range(c2dfb.count_batches(cfg)))
    if cfg.tracker == "refresh":
        grad_y, grad_z = c2dfb.inner_gradients(shard.sample(key.at(next(batches))), cfg, x)
        y, z = refresh(y, grad_y), refresh(z, grad_z)
    for k in range(cfg.inner_steps):
        grad_y, grad_z = c2dfb.inner_gradients(shard.sample(key.at(next(batches))), cfg, x)
        y, y_d, y_s = inner_step(y, grad_y, cfg, key.at(k), "y")
        z, z_d, z_s = inner_step(z, grad_z, cfg, key.at(k), "z")
        wy_d, wy_s, wz_d, wz_s = await mix(y_d=y_d, y_s=y_s, z_d=z_d, z_s=z_s)
        y, z = receive(y, wy_d, wy_s), receive(z, wz_d, wz_s)

    u_old, u = u, upper_gradient(shard.sample(key.at(next(batches))), cfg.lam, x, y.d.v, z.d.v)
    s = s + (cfg.gamma_out * (ws - s) + (u - u_old))
    return State(t=t + 1, x=x, s=s, u=u, loop_y=y, loop_z=z)


def refresh(v: Inner, gradient: c2dfb.Gradient) -> Inner:
    """Add the gradient's change at the new x to the tracker, as in C²DFB."""
    grad = gradient(v.d.v)
    return replace(v, s=replace(v.s, v=v.s.v + (grad - v.grad)), grad=grad)


def inner_step(
    v: Inner, gradient: c2dfb.Gradient, cfg: Config, key: Key, channel: str
) -> tuple[Inner, Message | Packed, Message | Packed]:
    """d ← d + γ Σ_j w_ij (M_j − M_i) − η s;   s ← s + γ Σ_j w_ij (M_j − M_i) + ∇r(d) − ∇r(d of the step before)."""
    d = v.d.v + cfg.gamma_in * (v.d.w_sent - own(v.d, cfg)) - cfg.eta_in * v.s.v
    grad = gradient(d)
    s = v.s.v + (cfg.gamma_in * (v.s.w_sent - own(v.s, cfg)) + (grad - v.grad))
    new_d, m_d = compress(v.d, d, cfg, key, channel + "_d")
    new_s, m_s = compress(v.s, s, cfg, key, channel + "_s")
    return Inner(d=new_d, s=new_s, grad=grad), m_d, m_s


def own(p: ErrorFeedback, cfg: Config) -> Array:
    """Return a node's own side of the mixing."""
    return p.sent if cfg.mixing == "messages" else p.v


def compress(
    p: ErrorFeedback, v: Array, cfg: Config, key: Key, channel: str
) -> tuple[ErrorFeedback, Message | Packed]:
    """Compress the new vector together with what previous messages left out: M = Q(v + E), E ← v + E − M."""
    due = p.error + v
    message = cfg.compressor(due, key, channel)
    sent = message.values
    return ErrorFeedback(v=v, error=due - sent, sent=sent, w_sent=p.w_sent), message


def receive(v: Inner, wm_d: Array, wm_s: Array) -> Inner:
    """Replace Σ_j w_ij M_j of the previous step by that of this step."""
    return replace(v, d=replace(v.d, w_sent=wm_d), s=replace(v.s, w_sent=wm_s))
