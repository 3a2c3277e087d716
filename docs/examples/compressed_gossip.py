"""Compression, random draws and a claim: gossip on f + λ (g − min g) that sends compressed residuals. Try it with

    dbo verify --plugin docs/examples/compressed_gossip.py --algorithm compressed_gossip
    dbo compare "plugins=[docs/examples/compressed_gossip.py]" task.name=quadratic rounds=300 \\
        --algorithms compressed_gossip,c2dfb

Of y and z neighbours hear Q(y − ŷ), where ŷ, the sum of all that was sent, is known to everybody who listened:
residuals shrink as y settles (CHOCO gossip). x travels as it is. At constant steps it stops at a distance, as plain
gossip does."""
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt, Le
from typing_extensions import Doc

from dbo.algorithms.claims import PENALTY, Claim, mean
from dbo.algorithms.compression.compressors import Compressor, TopK
from dbo.algorithms.gossip import mix
from dbo.algorithms.protocol import Array, Shard
from dbo.algorithms.registry import algorithm, counter
from dbo.algorithms.rng import draws


@dataclass(frozen=True, kw_only=True)
class Config:
    lam: Annotated[float, Gt(0), Doc("penalty λ")] = 10.0
    step: Annotated[float, Gt(0), Doc("step size of y and z")] = 0.05
    step_x: Annotated[float, Gt(0), Doc("step size of x")] = 0.02
    gamma: Annotated[float, Gt(0), Le(1), Doc("consensus step of y and z")] = 0.3
    compressor: Annotated[Compressor, Doc("Q, applied to residuals row by row")] = TopK(ratio=0.3)

@dataclass(frozen=True)
class Said:                     # a state may be made of parts: every leaf is an array with a row per node
    v: Array                    # y or z
    hat: Array                  # v̂, what everybody knows of it
    w_hat: Array                # Σ_j w_ij v̂_j, kept up to date from the messages

@dataclass(frozen=True)
class State:
    t: Array                    # rounds done, (nodes, 1): random draws are keyed by it
    x: Array
    low: Said                   # follows the minimiser of f / λ + g
    bottom: Said                # follows the minimiser of g
    direction: Array

    @property
    def y(self) -> Array:       # what is asked of a state may be a property
        return self.low.v

def upper(shard: Shard, cfg: Config, x: Array, y: Array, z: Array) -> Array:
    return shard.f_x(x, y) + cfg.lam * (shard.g_x(x, y) - shard.g_x(x, z))

def init(shard: Shard, cfg: Config) -> State:
    x, y = shard.x0, shard.y0
    start = Said(y, 0 * y, 0 * y)
    return State(counter(shard), x, start, start, upper(shard, cfg, x, y, y))

def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    """Each of these is 0 after every round, whatever the data: mixing terms add up to 0 over the nodes."""
    return {
        "mean(x) steps by −η mean(u)": mean(after.x - before.x) + cfg.step_x * mean(before.direction),
        "mean(z) steps by −η mean(∇_y g_i)":
            mean(after.bottom.v - before.bottom.v) + cfg.step * mean(shard.g_y(before.x, before.bottom.v)),
        "mean(Σ_j w_ij ẑ_j) = mean(ẑ_i)": mean(after.bottom.w_hat - after.bottom.hat),
    }

CLAIM = Claim(limit=PENALTY, invariants=invariants, rounds=600, floor=("step", "step_x"), steps=dict(Config().__dict__))

@algorithm("compressed_gossip", config=Config, state=State, init=init, packets=lambda cfg: 1, claim=CLAIM)
async def compressed_gossip(st: State, shard: Shard, cfg: Config) -> State:
    """Compressed gossip: a first-order penalty method whose neighbours hear residuals of y and z."""
    key = draws(shard, st.t)                                    # the same numbers in every packing and after a crash

    def moved(said: Said, gradient: Array) -> Array:
        return said.v + cfg.gamma * (said.w_hat - said.hat) - cfg.step * gradient

    y = moved(st.low, shard.f_y(st.x, st.y) / cfg.lam + shard.g_y(st.x, st.y))
    z = moved(st.bottom, shard.g_y(st.x, st.bottom.v))
    q_y, q_z = cfg.compressor(y - st.low.hat, key, "y"), cfg.compressor(z - st.bottom.hat, key, "z")
    x, wq_y, wq_z = await mix(x=st.x - cfg.step_x * st.direction, y=q_y, z=q_z)
    low = Said(y, st.low.hat + q_y.values, st.low.w_hat + wq_y)
    bottom = Said(z, st.bottom.hat + q_z.values, st.bottom.w_hat + wq_z)
    return State(st.t + 1, x, low, bottom, upper(shard, cfg, x, y, z))
