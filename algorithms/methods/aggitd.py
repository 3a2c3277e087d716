"""AggITD: the messages of the lower-level loop carry the Hessian-vector products of the hypergradient as well.

P. Xiao, K. Ji: Communication-Efficient Federated Hypergradient Computation via Aggregated Iterative Differentiation,
ICML 2023 (PMLR 202). N times the clients average their ∇_y g_i and, in the same packet, one factor z − λ ∇²_yy g_i z of
a Neumann series; so the hypergradient needs no loop of its own. In the paper the product starts at a random step Q, and
p = λ (N + 1) z is one term of the series, scaled. Which gradients start it is our reading.

With x fixed, y and the series settle together. The method converges exactly to the zero of the hypergradient with a
series of N terms and the *mean* Hessian; the error against the minimiser of ψ is that of the series alone.

Per round, `series: whole`: d_x + 2 N d_y values up, d_x + (2 N + 1) d_y down, 2 N + 2 exchanges; `sampled`: z travels
in N − Q of the N steps. Oracles: 2 N + 1 partial gradients, N − 1 Hessian- and 1 Jacobian-vector products (sampled:
N + 2 and N − 1 − Q). With mini-batches every step has fresh samples.

departs: a round starts with the server's step of x along the last round's mean; the first round does not move x.
departs: by default the whole series, z ← mean(∇_y f_i + z − λ ∇²_yy g_i z), instead of one random term of it.
departs: Q is uniform on {0 … N − 1} and the factor N; the paper's N + 1 terms need an average after the loop.
departs: one step of y per exchange, and of x per round; the paper allows several local ones.
"""

from dataclasses import dataclass
from typing import Literal
from zlib import crc32

import numpy as np

from dbo.algorithms.api import (
    Array,
    Claim,
    Key,
    Limit,
    Noise,
    Shard,
    aggregate,
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
from dbo.algorithms.references import star_methods as references

SERIES = Limit(
    "N-term H̄⁻¹",
    lambda problem, cfg, x: problem.truncated_inverse_hypergradient(x, cfg.inner_steps, 1 / cfg.eta_z), True, True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Defaults are ours."""

    inner_steps: int = param(10, ge=1, help="N, steps of y and terms of the series per round")
    eta_x: float = param(0.01, gt=0, help="step size of x", schedule=True)
    eta_y: float = param(0.1, gt=0, help="step size of y", schedule=True)
    eta_z: float = param(
        0.05, gt=0, help="λ, step of the series: at most 1 / L with L of the mean ∇²_yy g_i", schedule=True
    )
    series: Literal["whole", "sampled"] = param("whole", help="all terms of the series, or one random term, scaled")
    participation: float = param(1.0, gt=0, le=1, help="share of the clients that take part in a round")


@dataclass(frozen=True, slots=True)
class State:
    t: Array
    x: Array
    y: Array
    h: Array          # the clients' mean hypergradient, at the server; 0 at a client

    @property
    def direction(self) -> Array:
        return self.h


def init(shard: Shard, cfg: Config) -> State:
    return State(t=counter(shard), x=shard.x0, y=shard.y0, h=0 * shard.x0)


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    """The server steps along h; y takes N steps along the clients' mean gradient."""
    y = 0 * after.y + server_row(before.y)
    for _ in range(cfg.inner_steps):
        y = y - cfg.eta_y * mean_of_clients(shard.g_y(after.x, y))
    return {
        "x steps by −η_x h": server_row(after.x - before.x + cfg.eta_x * before.h),
        "y takes N steps along the mean gradient": after.y - y,
        "clients hold the server's x": after.x - server_row(after.x),
    }


@algorithm(
    "aggitd", config=Config, state=State, init=init,
    network="star", family="neumann", citation="Xiao and Ji 2023, ICML (PMLR 202)", oracles="second_order",
    packets=lambda cfg: 2 * cfg.inner_steps + 2, batches=lambda cfg: cfg.inner_steps + 1,
    reference=references.aggitd,
    claim=Claim(
        limit=SERIES, invariants=invariants, rounds=80,
        fixed=("participation",),
        steps={"inner_steps": 2, "eta_x": 0.3, "eta_y": 0.5, "eta_z": 0.6},
        noise=Noise(scale=("eta_x", "eta_y"), rounds=300, steps={"inner_steps": 3, "eta_x": 0.1, "eta_y": 0.1}),
    ),
)
async def aggitd(st: State, shard: Shard, cfg: Config) -> State:
    """AggITD: the averages of the lower-level loop carry the Neumann series as well."""
    clients = sample_clients(shard, cfg.participation, st.t)
    key = round_key(shard, st.t)
    x, y = await broadcast(clients, x=st.x - cfg.eta_x * st.h, y=st.y)                    # the server's step
    first = 0 if cfg.series == "whole" else sample_start(key, cfg.inner_steps)            # Q
    z = 0 * y
    for n in range(cfg.inner_steps):
        batch = clients.shard.sample(key.at(n))
        if n < first:
            (d,) = await aggregate(clients, y=batch.g_y(x, y))
        elif n == first:
            d, z = await aggregate(clients, y=batch.g_y(x, y), z=batch.f_y(x, y))
        else:
            factor = z - cfg.eta_z * batch.g_yy(x, y, z)
            factor = factor + batch.f_y(x, y) if cfg.series == "whole" else factor
            d, z = await aggregate(clients, y=batch.g_y(x, y), z=factor)
        y = y - cfg.eta_y * d
    p = z * (cfg.eta_z if cfg.series == "whole" else cfg.eta_z * cfg.inner_steps)
    batch = clients.shard.sample(key.at(cfg.inner_steps))
    (h,) = await average(clients, h=batch.f_x(x, y) - batch.g_xy(x, y, p))
    return State(t=st.t + 1, x=x, y=y, h=h)


def sample_start(key: Key, steps: int) -> int:
    """Return Q, the same for all nodes: the step at which the product starts, uniform on {0 … N − 1}."""
    return int(np.random.default_rng([key.seed, crc32(b"aggitd"), key.round]).integers(steps))
