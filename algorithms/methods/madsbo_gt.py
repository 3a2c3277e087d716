"""MA-DSBO with gradient tracking in y: the lower level no longer stops short of its solution, x still does.

Later comparisons name this variant beside MA-DSBO, without pseudo-code that we could check: this is our reading. The
tracker s of y is kept from round to round. Since x has moved meanwhile, it adds the gradient's change before the first
step, so that mean(s_i) = mean(∇_y g_i) always. HIGP and x are those of MA-DSBO (see madsbo.py).

Per round a node sends d_x + (2T + 2N − 1) d_y values in T + N packets (s travels with y). Oracles: T + 3 partial
gradients, N Hessian- and 1 Jacobian-vector products. With mini-batches the tracker follows sampled gradients: one batch
for that change, and those of MA-DSBO.
"""

from dataclasses import dataclass

from dbo.algorithms.api import (
    MINIMISER,
    Array,
    Claim,
    ErrorTerms,
    Noise,
    Shard,
    algorithm,
    counter,
    mean,
    mix,
    round_key,
)
from dbo.algorithms.methods.madsbo import Config, count_batches, higp
from dbo.algorithms.references import hessian_methods as references


@dataclass(frozen=True, slots=True)
class State:
    t: Array
    x: Array
    y: Array
    s: Array          # tracker of the mean of ∇_y g_i
    grad: Array       # last local ∇_y g_i
    r: Array          # moving average of the local hypergradients

    @property
    def direction(self) -> Array:
        return self.r


def init(shard: Shard, cfg: Config) -> State:
    t = counter(shard)
    grad = shard.sample(round_key(shard, t)).g_y(shard.x0, shard.y0)
    return State(t=t, x=shard.x0, y=shard.y0, s=grad, grad=grad, r=0 * shard.x0)


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    """y's tracker belongs to the x with which the round began."""
    return {
        "mean(x) steps by −α mean(r)": mean(after.x - before.x) + cfg.eta_x * mean(before.r),
        "mean(s) = mean(∇_y g_i)": mean(after.s - shard.g_y(before.x, after.y)),
    }


@algorithm(
    "madsbo_gt", config=Config, state=State, init=init,
    family="linear_system", citation="after Chen et al. 2023, ICML (our reading)", oracles="second_order",
    packets=lambda cfg: cfg.inner_steps + cfg.higp_steps, batches=lambda cfg: count_batches(cfg) + 1,
    paper_counts={"x": 2.0, "q0": 2.0},   # as for madsbo
    errors=ErrorTerms(consensus=lambda st: {"tracker_y": st.s}),
    reference=references.madsbo_gt,
    claim=Claim(
        limit=MINIMISER, invariants=invariants, rounds=80, floor=("eta_x",),
        steps={"inner_steps": 4, "higp_steps": 80, "eta_x": 0.1, "eta_y": 0.1, "eta_z": 0.12, "theta": 0.7},
        noise=Noise(scale=("eta_x", "eta_y"), steps={"inner_steps": 2, "higp_steps": 8}),
    ),
)
async def madsbo_gt(st: State, shard: Shard, cfg: Config) -> State:
    """MA-DSBO-GT: MA-DSBO with gradient tracking in y as well."""
    key = round_key(shard, st.t)
    y, grad = st.y, shard.sample(key).g_y(st.x, st.y)
    s = st.s + (grad - st.grad)
    x = st.x
    for k in range(cfg.inner_steps):
        if k == 0:
            wx, wy, ws = await mix(x=st.x, y=y, s=s)
            x = st.x + (cfg.gam * (wx - st.x) - cfg.eta_x * st.r)
        else:
            wy, ws = await mix(y=y, s=s)
        y = y + (cfg.gam * (wy - y) - cfg.eta_y * s)
        grad_old, grad = grad, shard.sample(key.at(k + 1)).g_y(st.x, y)
        s = s + (cfg.gam * (ws - s) + (grad - grad_old))

    z = await higp(shard, cfg, st.x, y, key.at(cfg.inner_steps + 1))
    batch = shard.sample(key.at(cfg.inner_steps + cfg.higp_steps + 2))
    u = batch.f_x(st.x, y) - batch.g_xy(st.x, y, z)
    r = (1 - cfg.theta) * st.r + cfg.theta * u
    return State(t=st.t + 1, x=x, y=y, s=s, grad=grad, r=r)
