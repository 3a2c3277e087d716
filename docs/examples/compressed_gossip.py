"""Compression, random keys and a claim: gossip on f + λ (g − min g) that sends compressed residuals. Try it with

    dbo verify --plugin docs/examples/compressed_gossip.py --algorithm compressed_gossip
    dbo compare "plugins=docs/examples/compressed_gossip.py" task.name=quadratic rounds=300 \\
        --algorithms compressed_gossip,c2dfb

Of y and z a node sends Q(y − ŷ). The reference point ŷ, the sum of all messages, is known to every receiver, and the
residuals shrink as y converges (CHOCO gossip). x is sent uncompressed. At constant steps the method stops at a distance
from the solution, as plain gossip does."""
from dataclasses import dataclass

import dbo


@dataclass(frozen=True, kw_only=True)
class Config:
    lam: float = dbo.param(10.0, gt=0, help="penalty λ")
    step: float = dbo.param(0.05, gt=0, help="step size of y and z")
    step_x: float = dbo.param(0.02, gt=0, help="step size of x")
    gamma: float = dbo.param(0.3, gt=0, le=1, help="consensus step of y and z")
    compressor: dbo.Compressor = dbo.param(dbo.TopK(ratio=0.3), help="Q, applied to residuals row by row")

@dataclass(frozen=True)
class Loop:                     # a state may be nested: every leaf is an array with a row per node
    v: dbo.Array                # y or z
    hat: dbo.Array              # v̂, the reference point
    w_hat: dbo.Array            # Σ_j w_ij v̂_j, updated from the messages

@dataclass(frozen=True)
class State:
    t: dbo.Array                # rounds done, (nodes, 1): random numbers are keyed by it
    x: dbo.Array
    loop_y: Loop                # tracks the minimiser of f / λ + g
    loop_z: Loop                # tracks the minimiser of g
    direction: dbo.Array

    @property
    def y(self) -> dbo.Array:   # x, y and direction may be properties
        return self.loop_y.v

def upper(shard: dbo.Shard, cfg: Config, x: dbo.Array, y: dbo.Array, z: dbo.Array) -> dbo.Array:
    return shard.f_x(x, y) + cfg.lam * (shard.g_x(x, y) - shard.g_x(x, z))

def init(shard: dbo.Shard, cfg: Config) -> State:
    x, y = shard.x0, shard.y0
    start = Loop(y, 0 * y, 0 * y)
    return State(dbo.counter(shard), x, start, start, upper(shard, cfg, x, y, y))

def invariants(before: State, after: State, shard: dbo.Shard, cfg: Config) -> dict[str, dbo.Array]:
    """Each of these is 0 after every round, whatever the data: mixing terms add up to 0 over the nodes."""
    z_before, z_after = before.loop_z, after.loop_z
    return {
        "mean(x) steps by −η mean(u)": dbo.mean(after.x - before.x) + cfg.step_x * dbo.mean(before.direction),
        "mean(z) steps by −η mean(∇_y g_i)":
            dbo.mean(z_after.v - z_before.v) + cfg.step * dbo.mean(shard.g_y(before.x, z_before.v)),
        "mean(Σ_j w_ij ẑ_j) = mean(ẑ_i)": dbo.mean(z_after.w_hat - z_after.hat),
    }

CLAIM = dbo.Claim(
    limit=dbo.PENALTY, invariants=invariants, rounds=600, floor=("step", "step_x"), steps=dict(Config().__dict__)
)

@dbo.algorithm(
    "compressed_gossip", config=Config, state=State, init=init, penalty=lambda cfg: cfg.lam, claim=CLAIM,
    public=lambda st: st.loop_y.hat)     # what neighbours have of y, for `eval_public`
async def compressed_gossip(st: State, shard: dbo.Shard, cfg: Config) -> State:
    """Compressed gossip: a first-order penalty method that sends compressed residuals of y and z."""
    key = dbo.round_key(shard, st.t)                            # the same numbers in every packing and after a crash

    def step(loop: Loop, gradient: dbo.Array) -> dbo.Array:
        return loop.v + cfg.gamma * (loop.w_hat - loop.hat) - cfg.step * gradient

    y = step(st.loop_y, shard.f_y(st.x, st.y) / cfg.lam + shard.g_y(st.x, st.y))
    z = step(st.loop_z, shard.g_y(st.x, st.loop_z.v))
    q_y, q_z = cfg.compressor(y - st.loop_y.hat, key, "y"), cfg.compressor(z - st.loop_z.hat, key, "z")
    x, wq_y, wq_z = await dbo.mix(x=st.x - cfg.step_x * st.direction, y=q_y, z=q_z)
    loop_y = Loop(y, st.loop_y.hat + q_y.values, st.loop_y.w_hat + wq_y)
    loop_z = Loop(z, st.loop_z.hat + q_z.values, st.loop_z.w_hat + wq_z)
    return State(st.t + 1, x, loop_y, loop_z, upper(shard, cfg, x, y, z))
