"""EF-SOBA: SOBA with a server and compressed uploads, with error feedback.

Y. He, J. Hu, X. Huang, S. Lu, B. Wang, K. Yuan: Distributed Bilevel Optimization with Communication Compression, ICML
2024, arXiv 2405.18858. A client keeps a memory m_i of each of its three directions D_i, uploads Q(D_i − m_i) and adds
it to m_i; the server adds the mean to its own memory, the mean of the clients', and steps along it. The abstract gives
the ingredients (compression, error feedback, SOBA); the lines are our reading, in the form of EF21.

The uploads shrink as the directions settle, so the method reaches the minimiser of ψ exactly, whatever the
heterogeneity, and with biased compressors too.

Per round a client uploads three compressed differences and receives three variables: k_x + 2 k values up, d_x + 2 d_y
down, 2 exchanges. Oracles: 3 partial gradients, 1 Hessian- and 1 Jacobian-vector product. With mini-batches one batch
per round serves the three directions.

departs: a round starts with the server's step along the memory of the round before; the first round does not move.
departs: with `participation` below 1 the memories of absent clients stay, and the server's remains their mean.
departs: without `batch_size`, full local batches instead of samples.
"""

from dataclasses import dataclass

from dbo.algorithms.api import (
    MINIMISER,
    Array,
    Claim,
    Compressor,
    Noise,
    Shard,
    TopK,
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
from dbo.algorithms.compression.compressors import without_width
from dbo.algorithms.parts.ball import project
from dbo.algorithms.parts.soba import Directions, directions
from dbo.algorithms.references import star_methods as references


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Defaults are ours."""

    eta_x: float = param(0.01, gt=0, help="step size of x", schedule=True)
    eta_y: float = param(0.1, gt=0, help="step size of y", schedule=True)
    eta_v: float = param(0.1, gt=0, help="step size of v, the solution of the Hessian system", schedule=True)
    radius: float = param(100.0, gt=0, help="v stays in a ball of this radius; the solution must lie inside")
    participation: float = param(1.0, gt=0, le=1, help="share of the clients that take part in a round")
    compressor: Compressor = param(TopK(ratio=0.2), help="Q of a client's uploads; groups are of y and v alone")


@dataclass(frozen=True, slots=True)
class State:
    t: Array
    x: Array
    y: Array
    v: Array          # the solution of the Hessian system
    m: Directions     # a client's memory of its directions; at the server the mean of the clients'

    @property
    def direction(self) -> Array:
        return self.m.x


def init(shard: Shard, cfg: Config) -> State:
    x, y, v = shard.x0, shard.y0, 0 * shard.y0
    return State(t=counter(shard), x=x, y=y, v=v, m=Directions(x=0 * x, y=0 * y, v=v))


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    """The server steps along its memory, which is the mean of the clients'."""
    return {
        "x steps by −η_x m_x": server_row(after.x - before.x + cfg.eta_x * before.m.x),
        "y steps by −η_y m_y": server_row(after.y - before.y + cfg.eta_y * before.m.y),
        "v steps by −η_v m_v": server_row(after.v - before.v + cfg.eta_v * before.m.v),
        "m_x is the clients' mean": server_row(after.m.x) - mean_of_clients(after.m.x),
        "m_y is the clients' mean": server_row(after.m.y) - mean_of_clients(after.m.y),
        "m_v is the clients' mean": server_row(after.m.v) - mean_of_clients(after.m.v),
        "clients hold the server's x": after.x - server_row(after.x),
    }


@algorithm(
    "ef_soba", config=Config, state=State, init=init,
    network="star", family="soba", citation="He et al. 2024, ICML, arXiv 2405.18858", oracles="second_order",
    packets=lambda cfg: 2, batches=lambda cfg: 1,
    reference=references.ef_soba,
    claim=Claim(
        limit=MINIMISER, invariants=invariants, rounds=500,
        fixed=("participation",),
        steps={"eta_x": 0.1, "eta_y": 0.15, "eta_v": 0.15, "compressor": TopK(ratio=0.5)},
        noise=Noise(
            scale=("eta_x", "eta_y", "eta_v"), rounds=400,
            steps={"eta_x": 0.05, "eta_y": 0.06, "eta_v": 0.06, "compressor": TopK(ratio=0.5)},
        ),
    ),
)
async def ef_soba(st: State, shard: Shard, cfg: Config) -> State:
    """EF-SOBA: SOBA with a server, clients upload compressed differences to a memory."""
    clients = sample_clients(shard, cfg.participation, st.t)
    x, y, v = await broadcast(                                                            # the server's step
        clients,
        x=st.x - cfg.eta_x * clients.at_server(st.m.x),
        y=st.y - cfg.eta_y * clients.at_server(st.m.y),
        v=project(st.v - cfg.eta_v * clients.at_server(st.m.v), cfg.radius),
    )
    key = round_key(shard, st.t)
    d = directions(clients.shard.sample(key), x, y, v)
    q_x = without_width(cfg.compressor)(d.x - st.m.x, key, "x")                           # Q(D_i − m_i)
    q_y = cfg.compressor(d.y - st.m.y, key, "y")
    q_v = cfg.compressor(d.v - st.m.v, key, "v")
    mean_x, mean_y, mean_v = await average(clients, x=q_x, y=q_y, v=q_v)

    def remember(m: Array, own: Array, mean: Array) -> Array:
        share = len(clients.participants) / shard.clients         # of the clients whose memory has changed
        return clients.keep(m + own, m + share * mean)            # m_i += Q(·); the server: m += mean of all changes

    m = Directions(
        x=remember(st.m.x, q_x.values, mean_x), y=remember(st.m.y, q_y.values, mean_y),
        v=remember(st.m.v, q_v.values, mean_v),
    )
    return State(t=st.t + 1, x=x, y=y, v=v, m=m)
