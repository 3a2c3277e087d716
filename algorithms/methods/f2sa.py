"""F²SA: the fully first-order penalty method on one machine with a growing penalty.

J. Kwon, D. Kwon, S. Wright, R. Nowak: A Fully First-Order Method for Stochastic Bilevel Optimization, ICML 2023 (PMLR
202). Round k makes T gradient steps on g in z and on f + λ_k g in y, then one of x along ∇_x f + λ_k (∇_x g(x, y) −
∇_x g(x, z)), over all nodes' data. λ_k = λ_0 (1 + k / r)^p grows, the step α_k = η_y / λ_k of y and ξ α_k of x shrinks
with it. The paper's p is 1/3 without noise, 1/5 where f is noisy and 1/7 where both are. x follows the minimiser of
ψ_λ, whose distance from that of ψ is O(1/λ): it falls like rounds^−p. F2BA is the same with a constant λ.

Nothing is sent. Oracles per round: 3 T partial gradients in y and 3 in x. With mini-batches one batch per inner step
serves y and z, another one the three upper gradients; a batch has samples of every node.

departs: λ_k has this closed form instead of increments δ_k.
departs: both ∇_x g of the step of x see the same samples, both ∇_y g of an inner step too; the paper's are
independent.
departs: a round starts with the step of x, for which the last round's direction is kept; the iterates are the paper's,
except that the first step of x comes before the first inner loop.
"""

from dataclasses import dataclass

from dbo.algorithms.api import MINIMISER, Array, Claim, Noise, Shard, algorithm, counter, param, round_key
from dbo.algorithms.parts.penalty import upper_gradient, y_gradient
from dbo.algorithms.references import penalty_methods as references


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """p is the paper's without noise; T is that of benchopt's benchmark of bilevel solvers, the rest is ours."""

    inner_steps: int = param(10, ge=1, help="T, steps of y and z per round")
    lam_start: float = param(2.0, gt=0, help="λ_0, penalty of the first round")
    lam_rounds: float = param(10.0, gt=0, help="r, λ grows as (1 + k / r)^p")
    lam_power: float = param(1 / 3, gt=0, le=1, help="p; 1/3 without noise, 1/7 with noise on both levels")
    eta_z: float = param(0.1, gt=0, help="step size of z, on g (the paper's γ)", schedule=True)
    eta_y: float = param(0.1, gt=0, help="step size of y, on f / λ + g: the paper's α_k is η_y / λ_k", schedule=True)
    eta_x: float = param(
        0.1, gt=0, help="step size of x in the first round; it shrinks like 1 / λ_k (the paper's ξ α_k)", schedule=True
    )


@dataclass(frozen=True, slots=True)
class State:
    t: Array
    x: Array
    y: Array
    z: Array
    u: Array          # ∇ψ_λ with the current λ, y and z

    @property
    def direction(self) -> Array:
        return self.u


def penalty(cfg: Config, t: Array) -> float:
    """Return λ_t after t rounds."""
    rounds = int(t[0, 0]) if len(t) else 0
    return float(cfg.lam_start * (1 + rounds / cfg.lam_rounds) ** cfg.lam_power)


def init(shard: Shard, cfg: Config) -> State:
    t, x, y = counter(shard), shard.x0, shard.y0
    batch = shard.sample(round_key(shard, t).at(cfg.inner_steps))
    return State(t=t, x=x, y=y, z=y, u=upper_gradient(batch, penalty(cfg, t), x, y, y))


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    step, lam = cfg.eta_x * cfg.lam_start / penalty(cfg, before.t), penalty(cfg, after.t)
    y, z = before.y, before.z
    for _ in range(cfg.inner_steps):
        y = y - cfg.eta_y / lam * (shard.f_y(after.x, y) + lam * shard.g_y(after.x, y))
        z = z - cfg.eta_z * shard.g_y(after.x, z)
    return {
        "x steps by −ξ α_k u": after.x - before.x + step * before.u,
        "y makes T steps on f + λ_k g": after.y - y,
        "z makes T steps on g": after.z - z,
        "u = ∇_x f + λ_k (∇_x g(y) − ∇_x g(z))": after.u - upper_gradient(shard, lam, after.x, after.y, after.z),
    }


@algorithm(
    "f2sa", config=Config, state=State, init=init,
    packets=lambda cfg: 0, batches=lambda cfg: cfg.inner_steps + 1,
    network="single", family="penalty", oracles="first_order", citation="Kwon et al. 2023, ICML",
    reference=references.f2sa,
    claim=Claim(
        limit=MINIMISER, invariants=invariants, rounds=150, rate=lambda cfg: float(cfg.lam_power),
        steps={"inner_steps": 5, "lam_start": 4.0, "lam_rounds": 2.0, "eta_z": 0.5, "eta_y": 0.5, "eta_x": 0.5},
        # λ is nearly constant here: V would grow with it.
        noise=Noise(
            scale=("eta_y", "eta_z", "eta_x"), shared=True,
            steps={"inner_steps": 3, "lam_start": 10.0, "lam_rounds": 1e6, "eta_z": 0.2, "eta_y": 0.2, "eta_x": 0.1},
        ),
    ),
)
async def f2sa(st: State, shard: Shard, cfg: Config) -> State:
    """F²SA: the first-order penalty method with a growing penalty on one machine that holds all data."""
    x = st.x - cfg.eta_x * cfg.lam_start / penalty(cfg, st.t) * st.u                       # ξ α_k
    y, z, t = st.y, st.z, st.t + 1
    key, lam = round_key(shard, t), penalty(cfg, t)
    for k in range(cfg.inner_steps):
        batch = shard.sample(key.at(k))
        z = z - cfg.eta_z * batch.g_y(x, z)
        y = y - cfg.eta_y * y_gradient(batch, lam, "h_over_lambda", x, y)                   # α_k (∇_y f + λ_k ∇_y g)
    batch = shard.sample(key.at(cfg.inner_steps))
    return State(t=t, x=x, y=y, z=z, u=upper_gradient(batch, lam, x, y, z))
