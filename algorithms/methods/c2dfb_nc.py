"""C²DFB(nc): the paper's ablation, naive compression of the iterates with error feedback instead of reference points.

Of this variant arXiv 2410.14115 says only that the transmitted parameters are compressed and the accumulated error is
compensated. All below is our completion: per transmitted vector v an error memory E and the last message M,

    v moves by γ Σ_j w_ij (M_j − M_i);   then P = v + E,  M = Q(P),  E = P − M,  and M is sent.

Mixing over messages keeps the means (the mixing terms add up to 0); `mixing: own` takes v_i for M_i and does not. As Q
acts on the whole vector, messages never shrink and consensus noise does not vanish: that is what the ablation shows.
Packets, values and oracle calls per round are those of C²DFB.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from typing_extensions import Doc

from dbo.algorithms.claims import PENALTY, Claim, mean
from dbo.algorithms.gossip import mix
from dbo.algorithms.kernels.fused import cleared, jumped, moved, plus, residual, told, tracked
from dbo.algorithms.methods import c2dfb
from dbo.algorithms.parts.penalty import upper_gradient, y_gradient
from dbo.algorithms.protocol import Array, Shard
from dbo.algorithms.registry import algorithm, counter
from dbo.algorithms.rng import Draws, draws


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(c2dfb.Loops):
    """As C²DFB, and how a node compares itself with its neighbours' messages."""

    mixing: Annotated[
        Literal["messages", "own"],
        Doc("a node's own side of Σ_j w_ij (M_j − ·): its last message (keeps the mean), or its uncompressed vector"),
    ] = "messages"


@dataclass(frozen=True, slots=True)
class Spoken:
    """A vector that is sent compressed with error feedback."""

    v: Array          # the vector itself
    error: Array      # E, what has not been said yet
    sent: Array       # M, the last message
    w_sent: Array     # Σ_j w_ij M_j


@dataclass(frozen=True, slots=True)
class Inner:
    d: Spoken
    s: Spoken
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
    """z = y, both trackers at the local gradients, nothing said yet."""
    x, y = shard.x0, shard.y0
    u = upper_gradient(shard, cfg.lam, x, y, y)
    return State(
        t=counter(shard), x=x, s=u, u=u,
        loop_y=start(y, y_gradient(shard, cfg.lam, cfg.y_objective, x, y)),
        loop_z=start(y, shard.g_y(x, y)),
    )


def start(d: Array, grad: Array) -> Inner:
    """Each array has memory of its own: where rows are wide, the steps below are made in place."""
    return Inner(d=Spoken(d + 0, 0 * d, 0 * d, 0 * d), s=Spoken(grad + 0, 0 * d, 0 * d, 0 * d), grad=grad)


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    """Those of C²DFB, with `mixing: messages`; in the place of references a node knows Σ_j w_ij M_j."""
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
    packets=lambda cfg: cfg.inner_steps + 1,
    paper_counts={"y_s": 0.0, "z_s": 0.0},
    claim=Claim(
        # On identical nodes rounding errors grow 1000-fold in 50 rounds: a floor after 300 rounds, not seen after 150.
        limit=PENALTY, invariants=invariants, rounds=150, floor=("eta_in", "eta_out", "gamma_in"),
        steps={"inner_steps": 8, "eta_in": 0.04, "eta_out": 0.1, "gamma_in": 0.08, "gamma_out": 0.8},
    ),
)
async def c2dfb_nc(st: State, shard: Shard, cfg: Config) -> State:
    """C²DFB(nc): C²DFB with naively compressed iterates and error feedback, the paper's ablation."""
    wx, ws = await mix(x=st.x, s=st.s)
    x = st.x + cfg.gamma_out * (wx - st.x) - cfg.eta_out * st.s

    def grad_y(y: Array) -> Array:
        return y_gradient(shard, cfg.lam, cfg.y_objective, x, y)

    def grad_z(z: Array) -> Array:
        return shard.g_y(x, z)

    y, z = st.loop_y, st.loop_z
    if cfg.tracker == "refresh":
        y, z = refresh(y, grad_y), refresh(z, grad_z)
    key = draws(shard, st.t)
    for k in range(cfg.inner_steps):
        y, y_d, y_s = inner_step(y, grad_y, cfg, key.at(k), "y")
        z, z_d, z_s = inner_step(z, grad_z, cfg, key.at(k), "z")
        wy_d, wy_s, wz_d, wz_s = await mix(y_d=y_d, y_s=y_s, z_d=z_d, z_s=z_s)
        y, z = heard(y, wy_d, wy_s), heard(z, wz_d, wz_s)

    u = upper_gradient(shard, cfg.lam, x, y.d.v, z.d.v)
    s = st.s + (cfg.gamma_out * (ws - st.s) + (u - st.u))
    return State(t=st.t + 1, x=x, s=s, u=u, loop_y=y, loop_z=z)


def refresh(v: Inner, gradient: c2dfb.Gradient) -> Inner:
    """As in C²DFB: the tracker's mean follows the gradients' mean when x moves."""
    s, grad = jumped(v.s.v, gradient(v.d.v), v.grad)
    return replace(v, s=replace(v.s, v=s), grad=grad)


def inner_step(
    v: Inner, gradient: c2dfb.Gradient, cfg: Config, key: Draws, channel: str
) -> tuple[Inner, c2dfb.Spoken, c2dfb.Spoken]:
    """d ← d + γ Σ_j w_ij (M_j − M_i) − η s;   s ← s + γ Σ_j w_ij (M_j − M_i) + ∇r(d) − ∇r(d of the step before)."""
    d = moved(v.d.v, cfg.gamma_in, v.d.w_sent, own(v.d, cfg), cfg.eta_in, v.s.v)
    s, grad = tracked(v.s.v, cfg.gamma_in, v.s.w_sent, own(v.s, cfg), gradient(d), v.grad)
    said_d, m_d = say(v.d, d, cfg, key, channel + "_d")
    said_s, m_s = say(v.s, s, cfg, key, channel + "_s")
    return Inner(d=said_d, s=said_s, grad=grad), m_d, m_s


def own(p: Spoken, cfg: Config) -> Array:
    """A node's own side of the mixing."""
    return p.sent if cfg.mixing == "messages" else p.v


def say(p: Spoken, v: Array, cfg: Config, key: Draws, channel: str) -> tuple[Spoken, c2dfb.Spoken]:
    """The new vector, compressed together with what earlier messages left out: M = Q(v + E), E ← v + E − M."""
    due = plus(p.error, (1, v))
    message, sent = residual(cfg.compressor, due, cleared(p.sent), key, channel)
    return Spoken(v=v, error=plus(due, (-1, sent)), sent=sent, w_sent=p.w_sent), message


def heard(v: Inner, wm_d: Array, wm_s: Array) -> Inner:
    """Σ_j w_ij M_j of this step, in the place of the last one's."""
    d, s = (replace(p, w_sent=told(cleared(p.w_sent), wm)) for p, wm in ((v.d, wm_d), (v.s, wm_s)))
    return replace(v, d=d, s=s)
