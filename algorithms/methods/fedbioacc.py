"""FedBiOAcc: local steps along variance-reduced (STORM) estimates of SOBA's directions, averaged every I steps.

J. Li, F. Huang, H. Huang: Communication-Efficient Federated Bilevel Optimization with Global and Local Lower Level
Problems, NeurIPS 2023, arXiv 2302.06701 (the method for a global lower level). A client keeps estimates of the three
directions. In each of I local steps it steps along them and corrects them with the directions at the new and at the old
point on the same samples. Then the server averages variables and estimates. The order of the lines is our reading.

With full batches and I = 1 the mean estimate is the mean direction, and the method reaches the minimiser of ψ exactly.
With I > 1 estimates turn to the clients' own directions between two averages: under heterogeneity the method stops at a
distance proportional to the steps. On identical nodes none remains.

Per round of I local steps variables and estimates go down, their changes come up: 2 (d_x + 2 d_y) values each way, 2
exchanges. Oracles: 6 I partial gradients, 2 I Hessian- and 2 I Jacobian-vector products. With mini-batches a batch per
local step serves both points.

departs: a round starts with the server's average of the round before; the first round does not move.
departs: c is constant, the weight of a new direction; the paper takes c α_t² with decreasing α_t.
departs: v is not projected at a client; the server projects the average.
departs: the first estimates are the directions of the first batch.
"""

from dataclasses import dataclass

from dbo.algorithms.api import (
    MINIMISER,
    Array,
    Claim,
    Noise,
    Shard,
    algorithm,
    average,
    broadcast,
    counter,
    mean_of_clients,
    param,
    round_key,
    sample_clients,
    server_row,
)
from dbo.algorithms.parts.ball import project
from dbo.algorithms.parts.soba import Directions, directions
from dbo.algorithms.parts.storm import storm
from dbo.algorithms.references import star_methods as references


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Defaults are ours."""

    local_steps: int = param(4, ge=1, help="I, steps of a client between two averages")
    eta_x: float = param(0.005, gt=0, help="step size of x", schedule=True)
    eta_y: float = param(0.05, gt=0, help="step size of y", schedule=True)
    eta_v: float = param(0.05, gt=0, help="step size of v, the solution of the Hessian system", schedule=True)
    theta: float = param(0.3, gt=0, le=1, help="c, weight of the new direction in an estimate", schedule=True)
    radius: float = param(100.0, gt=0, help="v stays in a ball of this radius; the solution must lie inside")
    participation: float = param(1.0, gt=0, le=1, help="share of the clients that take part in a round")


@dataclass(frozen=True, slots=True)
class State:
    t: Array
    x: Array
    y: Array
    v: Array          # the solution of the Hessian system
    e: Directions     # the clients' mean estimates, at the server; 0 at a client
    d: Directions     # the same, averaged over the local steps: what the variables have stepped along

    @property
    def direction(self) -> Array:
        return self.d.x


def init(shard: Shard, cfg: Config) -> State:
    x, y, v = shard.x0, shard.y0, 0 * shard.y0
    none = Directions(x=0 * x, y=0 * y, v=v)
    return State(t=counter(shard), x=x, y=y, v=v, e=none, d=none)


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    """The server steps along the clients' mean estimates, and keeps the mean of the last ones."""
    steps = cfg.local_steps
    received = Directions(x=0 * after.x + before.e.x[-1], y=0 * after.y + before.e.y[-1],
                          v=0 * after.v + before.e.v[-1])
    e, d = walk(shard, cfg, after.x, after.y, after.v, received, before.t)
    return {
        "x steps by −I η_x d_x": server_row(after.x - before.x + steps * cfg.eta_x * before.d.x),
        "y steps by −I η_y d_y": server_row(after.y - before.y + steps * cfg.eta_y * before.d.y),
        "v steps by −I η_v d_v": server_row(after.v - before.v + steps * cfg.eta_v * before.d.v),
        "d_x is the clients' mean": server_row(after.d.x) - mean_of_clients(d.x),
        "e_y is the clients' mean": server_row(after.e.y) - mean_of_clients(e.y),
        "e_v is the clients' mean": server_row(after.e.v) - mean_of_clients(e.v),
        "clients hold the server's x": after.x - server_row(after.x),
    }


def walk(
    shard: Shard, cfg: Config, x: Array, y: Array, v: Array, e: Directions, t: Array
) -> tuple[Directions, Directions]:
    """Take I local steps along the estimates; return the last estimates, and the mean of those stepped along."""
    key, steps = round_key(shard, t), cfg.local_steps
    d = Directions(x=0 * x, y=0 * y, v=0 * v)
    for k in range(steps):
        batch = shard.sample(key.at(k))
        old = directions(batch, x, y, v)
        if key.round == 0 and k == 0:
            e = old                                                                       # the first estimates
        d = Directions(x=d.x + e.x / steps, y=d.y + e.y / steps, v=d.v + e.v / steps)
        x, y, v = x - cfg.eta_x * e.x, y - cfg.eta_y * e.y, v - cfg.eta_v * e.v
        new = directions(batch, x, y, v)                                                  # on the same samples
        e = Directions(
            x=storm(e.x, new.x, old.x, cfg.theta), y=storm(e.y, new.y, old.y, cfg.theta),
            v=storm(e.v, new.v, old.v, cfg.theta),
        )
    return e, d


@algorithm(
    "fedbioacc", config=Config, state=State, init=init,
    network="star", family="soba", citation="Li et al. 2023, NeurIPS, arXiv 2302.06701", oracles="second_order",
    packets=lambda cfg: 2, batches=lambda cfg: cfg.local_steps,
    reference=references.fedbioacc,
    claim=Claim(
        limit=MINIMISER, invariants=invariants, rounds=250, floor=("eta_x", "eta_y", "eta_v"),
        fixed=("participation",),
        steps={"local_steps": 3, "eta_x": 0.05, "eta_y": 0.1, "eta_v": 0.1, "theta": 0.3},
        noise=Noise(
            scale=("eta_x", "eta_y", "eta_v", "theta"), shared=True, rounds=400,
            steps={"local_steps": 2, "eta_x": 0.02, "eta_y": 0.03, "eta_v": 0.03, "theta": 0.05},
        ),
    ),
)
async def fedbioacc(st: State, shard: Shard, cfg: Config) -> State:
    """FedBiOAcc: local steps along STORM estimates of SOBA's directions, averaged by a server."""
    clients = sample_clients(shard, cfg.participation, st.t)
    steps = cfg.local_steps
    x, y, v, e_x, e_y, e_v = await broadcast(                                             # the server's averages
        clients,
        x=st.x - steps * cfg.eta_x * st.d.x,
        y=st.y - steps * cfg.eta_y * st.d.y,
        v=project(st.v - steps * cfg.eta_v * st.d.v, cfg.radius),
        e_x=st.e.x, e_y=st.e.y, e_v=st.e.v,
    )
    e, d = walk(clients.shard, cfg, x, y, v, Directions(x=e_x, y=e_y, v=e_v), st.t)       # local steps
    e_x, e_y, e_v, d_x, d_y, d_v = await average(
        clients, e_x=e.x, e_y=e.y, e_v=e.v, x=d.x, y=d.y, v=d.v,
    )
    return State(
        t=st.t + 1, x=x, y=y, v=v, e=Directions(x=e_x, y=e_y, v=e_v), d=Directions(x=d_x, y=d_y, v=d_v))
