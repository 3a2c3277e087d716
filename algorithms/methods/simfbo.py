"""SimFBO: local SOBA steps at the clients, one averaged step of all three variables at the server.

Y. Yang, P. Xiao, K. Ji: SimFBO: Towards Simple, Flexible and Communication-efficient Federated Bilevel Learning,
NeurIPS 2023, arXiv 2305.19442. A client takes τ steps along the three directions of SOBA from the server's (x, y, v)
and sends the mean of what it has seen; the server steps each variable with its own step size and keeps v in a ball.
Clients are sampled without replacement. The order of the lines is our reading.

With τ = 1 the method reaches the minimiser of ψ exactly. With τ > 1 the clients' directions belong to points that have
drifted apart: under heterogeneity it stops at a distance proportional to the *local* steps. On identical nodes none
remains.

Per round a client sends three directions up and receives three variables: d_x + 2 d_y values each way, 2 exchanges.
Oracles: 3 τ partial gradients, τ Hessian- and τ Jacobian-vector products. With mini-batches a batch per local step.

departs: a round starts with the server's step, for which the last round's mean directions are kept; the first round
does not move. The iterates are the paper's.
departs: all clients take the same τ with equal weights; the paper allows both to differ.
departs: without `batch_size`, full local batches instead of samples.
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
from dbo.algorithms.references import star_methods as references


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Defaults are ours."""

    local_steps: int = param(1, ge=1, help="τ, steps of a client per round")
    local_x: float = param(0.01, gt=0, help="step size of x at a client", schedule=True)
    local_y: float = param(0.1, gt=0, help="step size of y at a client", schedule=True)
    local_v: float = param(0.1, gt=0, help="step size of v at a client", schedule=True)
    eta_x: float = param(0.01, gt=0, help="step size of x at the server (the paper's γ_x)", schedule=True)
    eta_y: float = param(0.1, gt=0, help="step size of y at the server (the paper's γ_y)", schedule=True)
    eta_v: float = param(0.1, gt=0, help="step size of v at the server (the paper's γ_v)", schedule=True)
    radius: float = param(100.0, gt=0, help="v stays in a ball of this radius; the solution must lie inside")
    participation: float = param(1.0, gt=0, le=1, help="share of the clients that take part in a round")


@dataclass(frozen=True, slots=True)
class State:
    t: Array
    x: Array
    y: Array
    v: Array          # the solution of the Hessian system
    d: Directions     # the clients' mean directions, at the server; 0 at a client

    @property
    def direction(self) -> Array:
        return self.d.x


def init(shard: Shard, cfg: Config) -> State:
    x, y, v = shard.x0, shard.y0, 0 * shard.y0
    return State(t=counter(shard), x=x, y=y, v=v, d=Directions(x=0 * x, y=0 * y, v=v))


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    """The server steps along the mean of what the clients see on their way."""
    seen = walk(shard, cfg, after.x, after.y, after.v, before.t)
    return {
        "x steps by −γ_x d_x": server_row(after.x - before.x + cfg.eta_x * before.d.x),
        "y steps by −γ_y d_y": server_row(after.y - before.y + cfg.eta_y * before.d.y),
        "v steps by −γ_v d_v": server_row(after.v - before.v + cfg.eta_v * before.d.v),
        "d_x is the clients' mean": server_row(after.d.x) - mean_of_clients(seen.x),
        "d_y is the clients' mean": server_row(after.d.y) - mean_of_clients(seen.y),
        "d_v is the clients' mean": server_row(after.d.v) - mean_of_clients(seen.v),
        "clients hold the server's x": after.x - server_row(after.x),
    }


def walk(shard: Shard, cfg: Config, x: Array, y: Array, v: Array, t: Array) -> Directions:
    """Take τ local steps from (x, y, v); return the mean of the directions on the way."""
    key, total = round_key(shard, t), Directions(x=0 * x, y=0 * y, v=0 * v)
    for k in range(cfg.local_steps):
        d = directions(shard.sample(key.at(k)), x, y, v)
        total = Directions(x=total.x + d.x, y=total.y + d.y, v=total.v + d.v)
        x, y, v = x - cfg.local_x * d.x, y - cfg.local_y * d.y, v - cfg.local_v * d.v
    steps = cfg.local_steps
    return Directions(x=total.x / steps, y=total.y / steps, v=total.v / steps)


@algorithm(
    "simfbo", config=Config, state=State, init=init,
    network="star", family="soba", citation="Yang et al. 2023, NeurIPS, arXiv 2305.19442", oracles="second_order",
    packets=lambda cfg: 2, batches=lambda cfg: cfg.local_steps,
    reference=references.simfbo,
    claim=Claim(
        limit=MINIMISER, invariants=invariants, rounds=250, floor=("local_x", "local_y", "local_v"),
        fixed=("participation",),
        steps={"local_steps": 3, "local_x": 0.05, "local_y": 0.1, "local_v": 0.1,
               "eta_x": 0.2, "eta_y": 0.4, "eta_v": 0.4},
        noise=Noise(
            scale=("eta_x", "eta_y", "eta_v"), rounds=400,
            steps={"local_steps": 1, "eta_x": 0.1, "eta_y": 0.12, "eta_v": 0.12},
        ),
    ),
)
async def simfbo(st: State, shard: Shard, cfg: Config) -> State:
    """SimFBO: local SOBA steps at the clients, one averaged step of x, y and v at the server."""
    clients = sample_clients(shard, cfg.participation, st.t)
    x, y, v = await broadcast(                                                            # the server's step
        clients,
        x=st.x - cfg.eta_x * st.d.x,
        y=st.y - cfg.eta_y * st.d.y,
        v=project(st.v - cfg.eta_v * st.d.v, cfg.radius),
    )
    seen = walk(clients.shard, cfg, x, y, v, st.t)                                        # local steps
    d_x, d_y, d_v = await average(clients, x=seen.x, y=seen.y, v=seen.v)
    return State(t=st.t + 1, x=x, y=y, v=v, d=Directions(x=d_x, y=d_y, v=d_v))
