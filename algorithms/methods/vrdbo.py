"""VRDBO: MDBO with variance-reduced (STORM) estimates instead of momentum.

H. Gao, B. Gu, M. T. Thai: On the Convergence of Distributed Stochastic Bilevel Optimization Algorithms over a Network,
AISTATS 2023 (PMLR 206). Estimates are corrected by the difference of two (hyper)gradients, at the new and at the old
point, on the same samples. With full batches and the whole series that makes them exact, U = hypergradient. With
mini-batches, or a sampled series, the noise that both points have in common cancels: the variance falls with η² where
MDBO's falls with η. Other samples at the old point would add noise instead. The bias under heterogeneity is MDBO's.

Per round a node sends x, y and both trackers in 1 packet: 2 d_x + 2 d_y values. Oracles, all twice: 6 partial
gradients, 2 (J − 1) Hessian-vector products (sampled: 2 J_i, between 0 and 2 (J − 1)) and 2 Jacobian-vector products.
Batches as in MDBO; the key of the round draws them again for the old point, which the state still holds.

departs: as MDBO (see mdbo.py); the first estimates see all samples, where the paper takes a batch of size B.
"""

from dataclasses import dataclass

from dbo.algorithms.api import LOCAL_INVERSE, Array, Claim, Noise, Shard, algorithm, counter, mix, param, round_key
from dbo.algorithms.methods import mdbo
from dbo.algorithms.methods.mdbo import State, count_batches, local_hypergradient, lower_batch, tracking_invariants
from dbo.algorithms.parts.neumann import hypergradient
from dbo.algorithms.parts.storm import storm
from dbo.algorithms.references import hessian_methods as references


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(mdbo.Config):
    """Defaults are the paper's; L, which it does not give, is that of MDBO here."""

    eta: float = param(
        0.33, gt=0, le=1, help="η, scales mixing of x and y and steps; η² corrects estimates", schedule=True
    )
    beta_x: float = param(1.0, gt=0, help="β₁, x steps by β₁ η", schedule=True)
    beta_y: float = param(1.0, gt=0, help="β₂, y steps by β₂ η", schedule=True)
    alpha_x: float = param(5.0, gt=0, help="α₁, the new hypergradient weighs α₁ η² < 1", schedule=True)
    alpha_y: float = param(5.0, gt=0, help="α₂, the new gradient in y weighs α₂ η² < 1", schedule=True)

    def __post_init__(self) -> None:
        for name, alpha in (("alpha_x", self.alpha_x), ("alpha_y", self.alpha_y)):
            if alpha * self.eta**2 >= 1:
                raise ValueError(f"{name}, eta: {name} * eta² must be below 1, got {alpha} * {self.eta}²")


def init(shard: Shard, cfg: Config) -> State:
    """Initialize estimates and trackers with the local (hyper)gradients of all samples."""
    t, x, y = counter(shard), shard.x0, shard.y0
    u = hypergradient(
        lambda step: shard, x, y, round_key(shard, t),
        neumann=cfg.neumann, terms=cfg.neumann_terms, lipschitz=cfg.lipschitz,
    )
    v = shard.g_y(x, y)
    return State(t=t, x=x, y=y, u=u, v=v, zf=u, zg=v)


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    """As MDBO; with full batches and the whole series the estimates are exact."""
    x, y = after.x, after.y
    return tracking_invariants(before, after, cfg) | {
        "U is the hypergradient": after.u - local_hypergradient(shard, cfg, x, y, after.t),
        "V = ∇_y g_i": after.v - shard.g_y(x, y),
    }


@algorithm(
    "vrdbo", config=Config, state=State, init=init,
    family="neumann", citation="Gao et al. 2023, AISTATS (PMLR 206)", oracles="second_order",
    packets=lambda cfg: 1, batches=count_batches,
    errors=mdbo.ERRORS,
    reference=references.vrdbo,
    claim=Claim(
        limit=LOCAL_INVERSE, invariants=invariants, rounds=400,
        fixed=("neumann",),
        steps={"eta": 0.3, "beta_x": 0.5, "beta_y": 0.5, "lipschitz": 1.6, "neumann_terms": 20},
        noise=Noise(
            scale=("eta",), reduced=True, shared=True, below="mdbo",
            # α η² far below β η: otherwise the steps follow the noise of the estimates, reduced or not.
            steps={"eta": 0.1, "alpha_x": 2.0, "alpha_y": 2.0, "neumann_terms": 4}, rounds=400,
        ),
    ),
)
async def vrdbo(st: State, shard: Shard, cfg: Config) -> State:
    """VRDBO: variance-reduced estimates and gradient tracking with each node's own Neumann hypergradient."""
    wx, wy, wzf, wzg = await mix(x=st.x, y=st.y, zf=st.zf, zg=st.zg)
    x = st.x + cfg.eta * (wx - st.x) - cfg.beta_x * cfg.eta * st.zf                       # steps of x and y
    y = st.y + cfg.eta * (wy - st.y) - cfg.beta_y * cfg.eta * st.zg

    t = st.t + 1
    hg = local_hypergradient(shard, cfg, x, y, t)
    hg_before = local_hypergradient(shard, cfg, st.x, st.y, t)                            # old point, same samples
    u = storm(st.u, hg, hg_before, cfg.alpha_x * cfg.eta**2)                              # estimates
    batch = lower_batch(shard, cfg, t)
    v = storm(st.v, batch.g_y(x, y), batch.g_y(st.x, st.y), cfg.alpha_y * cfg.eta**2)
    return State(t=t, x=x, y=y, u=u, v=v, zf=wzf + (u - st.u), zg=wzg + (v - st.v))       # tracking
