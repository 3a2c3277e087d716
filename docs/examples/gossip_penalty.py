"""A whole algorithm in one file: gossip and gradient steps on f + λ (g − min g). Try it with

    dbo run plugins=[docs/examples/gossip_penalty.py] algorithm.name=gossip_penalty task.name=quadratic rounds=500

It ends near the solution for the penalty λ, at a distance proportional to `step` as always in gossip with constant
steps; where all nodes hold the same data it ends exactly there."""
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt
from typing_extensions import Doc

from dbo.algorithms.gossip import mix
from dbo.algorithms.protocol import Array, Shard
from dbo.algorithms.registry import algorithm


@dataclass(frozen=True, kw_only=True)
class Config:                   # what `algorithm:` may set: ranges are checked; `dbo list plugins=[…]` shows meanings
    lam: Annotated[float, Gt(0), Doc("penalty λ")] = 10.0
    step: Annotated[float, Gt(0), Doc("step size of x, y and z")] = 0.1

@dataclass(frozen=True)
class State:                    # all that is remembered between rounds: arrays with a row per node
    x: Array
    y: Array                    # follows the minimiser of f / λ + g
    z: Array                    # follows the minimiser of g
    direction: Array            # of the next step of x; the norm of its mean is reported

def init(shard: Shard, cfg: Config) -> State:
    return State(x=shard.x0, y=shard.y0, z=shard.y0, direction=shard.f_x(shard.x0, shard.y0))

@algorithm("gossip_penalty", config=Config, state=State, init=init, packets=lambda cfg: 1)
async def gossip_penalty(st: State, shard: Shard, cfg: Config) -> State:
    """Gossip penalty: the simplest first-order bilevel method, one packet and no tracking."""
    y = st.y - cfg.step * (shard.f_y(st.x, st.y) / cfg.lam + shard.g_y(st.x, st.y))
    z = st.z - cfg.step * shard.g_y(st.x, st.z)
    x, y, z = await mix(x=st.x - cfg.step * st.direction, y=y, z=z)    # one packet; answers with Σ_j w_ij (·)_j
    direction = shard.f_x(x, y) + cfg.lam * (shard.g_x(x, y) - shard.g_x(x, z))
    return State(x=x, y=y, z=z, direction=direction)
