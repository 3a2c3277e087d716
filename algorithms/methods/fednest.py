"""FedNest: nested federated loops for y, for the Neumann series and for x, with variance-reduced local steps.

D. A. Tarzanagh, M. Li, C. Thrampoulidis, S. Oymak: FedNest: Federated Bilevel, Minimax, and Compositional Optimization,
ICML 2022 (PMLR 162), Algorithms 1 to 4, and the authors' code. FedInn: T times, the clients average ∇_y g_i at y, take
τ local steps along ∇_y g_i(y_i) − ∇_y g_i(y) + mean, and average y_i. FedIHGP: a Neumann series whose every product is
averaged, so it has the *mean* Hessian. FedOut: the clients average their hypergradients and take τ local steps along
∇_x f_i(x_i) − ∇_x f_i(x) + mean.

The local corrections vanish at a common fixed point. So the method converges for any τ, exactly, to the zero of the
hypergradient with a series of N terms; the error against the minimiser of ψ is that of the series alone.

Per round y and the series go up and down 2 T + N times, x and the hypergradient once: 2 d_x + (2 T + N) d_y values up,
3 d_x + (2 T + N + 1) d_y down, 4 T + 2 N + 4 exchanges. Oracles: τ (T + 1) + 2 partial gradients (τ = 1: T + 2), N − 1
Hessian- and 1 Jacobian-vector products. With mini-batches every local step and every factor has fresh samples, and a
local step evaluates both terms of its difference on them: 2 (τ − 1) (T + 1) + T + 2 partial gradients.

departs: a round starts with FedOut's steps along the mean hypergradient of the round before; the first does not move.
departs: the whole series instead of one random term of it; the authors' code adds up terms as well.
departs: without `batch_size`, full local batches; the mean at y is then that of all samples, as in the paper.
"""

from dataclasses import dataclass

from dbo.algorithms.api import (
    Array,
    Claim,
    Clients,
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
    lambda problem, cfg, x: problem.truncated_inverse_hypergradient(x, cfg.neumann_terms, cfg.lipschitz), True, True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """T, τ and N are those of the authors' code (1, 5 and 5 there), the rest is ours."""

    inner_steps: int = param(1, ge=1, help="T, rounds of FedInn per round")
    local_steps: int = param(5, ge=1, help="τ, steps of a client in FedInn and FedOut")
    neumann_terms: int = param(5, ge=1, help="N, terms of the Neumann series")
    lipschitz: float = param(15.0, gt=0, help="L, at least the largest eigenvalue of the mean ∇²_yy g_i")
    eta_x: float = param(0.01, gt=0, help="step size of x at a client (the paper's α)", schedule=True)
    eta_y: float = param(0.1, gt=0, help="step size of y at a client (the paper's β)", schedule=True)
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


def count_batches(cfg: Config) -> int:
    """Return the batches of a round: τ − 1 of FedOut, T τ of FedInn, N of the hypergradient."""
    return (cfg.inner_steps + 1) * cfg.local_steps - 1 + cfg.neumann_terms


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    """All nodes hold the server's variables; h is the mean of the clients' hypergradients with the mean series."""
    p = 0 * after.y
    for _ in range(cfg.neumann_terms):       # Horner's rule, on the mean of all clients
        total = shard.f_y(after.x, after.y) + p - shard.g_yy(after.x, after.y, p) / cfg.lipschitz
        p = 0 * p + mean_of_clients(total)
    h = shard.f_x(after.x, after.y) - shard.g_xy(after.x, after.y, p / cfg.lipschitz)
    x_i, x = before.x, before.x
    for _ in range(cfg.local_steps):
        x_i = x_i - cfg.eta_x * (shard.f_x(x_i, before.y) - shard.f_x(x, before.y) + server_row(before.h))
    return {
        "x is the mean of the clients' steps": server_row(after.x) - mean_of_clients(x_i),
        "clients hold the server's x": after.x - server_row(after.x),
        "clients hold the server's y": after.y - server_row(after.y),
        "h is the clients' mean": server_row(after.h) - mean_of_clients(h),
    }


@algorithm(
    "fednest", config=Config, state=State, init=init,
    network="star", family="neumann", citation="Tarzanagh et al. 2022, ICML (PMLR 162)", oracles="second_order",
    packets=lambda cfg: 4 * cfg.inner_steps + 2 * cfg.neumann_terms + 4, batches=count_batches,
    reference=references.fednest,
    claim=Claim(
        limit=SERIES, invariants=invariants, rounds=80,
        fixed=("participation",),
        steps={"inner_steps": 2, "local_steps": 3, "neumann_terms": 2, "lipschitz": 1.6, "eta_x": 0.1, "eta_y": 0.3},
        noise=Noise(
            scale=("eta_x", "eta_y"), rounds=300,
            steps={"inner_steps": 1, "local_steps": 2, "neumann_terms": 3, "eta_x": 0.05, "eta_y": 0.1},
        ),
    ),
)
async def fednest(st: State, shard: Shard, cfg: Config) -> State:
    """FedNest: federated loops for y, the Neumann series and x, with variance-reduced local steps."""
    clients = sample_clients(shard, cfg.participation, st.t)
    key = round_key(shard, st.t)
    x, y, h = await broadcast(clients, x=st.x, y=st.y, h=st.h)
    x = await fed_out(clients, cfg, key, x, y, h)
    for n in range(1, cfg.inner_steps + 1):
        y = await fed_inn(clients, cfg, key.at(n * cfg.local_steps - 1), x, y)
    key = key.at((cfg.inner_steps + 1) * cfg.local_steps - 1)
    batch = clients.shard.sample(key)
    p = await fed_ihgp(clients, cfg, key, x, y, batch.f_y(x, y))
    (h,) = await average(clients, h=batch.f_x(x, y) - batch.g_xy(x, y, p))
    return State(t=st.t + 1, x=x, y=y, h=h)


async def fed_out(clients: Clients, cfg: Config, key: Key, x: Array, y: Array, h: Array) -> Array:
    """FedOut: τ local steps of x along ∇_x f_i(x_i) − ∇_x f_i(x) + h, then their mean."""
    x_i, last = x - cfg.eta_x * h, None                                                   # x_i = x: no difference
    for k in range(cfg.local_steps - 1):
        batch = clients.shard.sample(key.at(k))
        if batch is not last:                # fresh samples; with full batches ∇_x f_i(x) stays the same
            last, anchor = batch, batch.f_x(x, y)
        x_i = x_i - cfg.eta_x * (batch.f_x(x_i, y) - anchor + h)
    (change,) = await aggregate(clients, x=x_i - x)
    return x + change


async def fed_inn(clients: Clients, cfg: Config, key: Key, x: Array, y: Array) -> Array:
    """FedInn: the mean q of ∇_y g_i, τ local steps along ∇_y g_i(y_i) − ∇_y g_i(y) + q, then their mean."""
    last = clients.shard.sample(key)
    anchor = last.g_y(x, y)
    (q,) = await aggregate(clients, q=anchor)
    y_i = y - cfg.eta_y * q
    for k in range(1, cfg.local_steps):
        batch = clients.shard.sample(key.at(key.step + k))
        if batch is not last:
            last, anchor = batch, batch.g_y(x, y)
        y_i = y_i - cfg.eta_y * (batch.g_y(x, y_i) - anchor + q)
    (change,) = await aggregate(clients, y=y_i - y)
    return y + change


async def fed_ihgp(clients: Clients, cfg: Config, key: Key, x: Array, y: Array, f_y: Array) -> Array:
    """FedIHGP: p ≈ (mean ∇²_yy g_i)⁻¹ mean ∇_y f_i, a series of N terms with an average in every one."""
    (term,) = await aggregate(clients, p=f_y)
    p = term
    for j in range(1, cfg.neumann_terms):
        batch = clients.shard.sample(key.at(key.step + j))
        (term,) = await aggregate(clients, p=term - batch.g_yy(x, y, term) / cfg.lipschitz)
        p = p + term
    return p / cfg.lipschitz
