"""A whole algorithm in one file: gossip and gradient steps on f + λ (g − min g). Try it with

    dbo run plugins=docs/examples/gossip_penalty.py algorithm=gossip_penalty task=quadratic rounds=500

It ends at a distance proportional to `step` from the solution for λ; where all nodes have the same data, at it."""
from dataclasses import dataclass

import dbo


@dataclass(frozen=True, kw_only=True)
class Config:                   # keys of `algorithm:` in an experiment; `dbo list plugins=FILE.py NAME` shows them
    lam: float = dbo.param(10.0, gt=0, help="penalty λ")
    step: float = dbo.param(0.1, gt=0, help="step size of x, y and z")

@dataclass(frozen=True)
class State:                    # everything that outlives a round: arrays with a row per node
    x: dbo.Array
    y: dbo.Array                # tracks the minimiser of f / λ + g
    z: dbo.Array                # tracks the minimiser of g
    direction: dbo.Array        # of the next step of x; the norm of its mean is reported

def init(shard: dbo.Shard, cfg: Config) -> State:
    return State(x=shard.x0, y=shard.y0, z=shard.y0, direction=shard.f_x(shard.x0, shard.y0))

@dbo.algorithm("gossip_penalty", config=Config, state=State, init=init, penalty=lambda cfg: cfg.lam)
async def gossip_penalty(st: State, shard: dbo.Shard, cfg: Config) -> State:
    """Gossip penalty: the simplest first-order bilevel method, one packet and no tracking."""
    y = st.y - cfg.step * (shard.f_y(st.x, st.y) / cfg.lam + shard.g_y(st.x, st.y))
    z = st.z - cfg.step * shard.g_y(st.x, st.z)
    x, y, z = await dbo.mix(x=st.x - cfg.step * st.direction, y=y, z=z)     # one packet; returns Σ_j w_ij (·)_j
    direction = shard.f_x(x, y) + cfg.lam * (shard.g_x(x, y) - shard.g_x(x, z))
    return State(x=x, y=y, z=z, direction=direction)
