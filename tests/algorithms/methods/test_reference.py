"""Compare every algorithm with a second implementation of its pseudo-code, with a dense W and without the engine.

The references follow the pseudo-code: stacked rows, `w @ rows` for Σ_j w_ij (·)_j, local oracles. The comparison
detects errors that closed forms on a quadratic cannot: all numbers of a configuration differ, and all derivatives of
the problem, second ones included, depend on the point at which they are taken.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count, islice
from operator import attrgetter
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from tests.algorithms.methods.star_references import STAR_IDLE, STAR_REFERENCES, STAR_STEPS, STAR_VARIANTS

from dbo.algorithms.compression.compressors import RandK, TopK
from dbo.algorithms.registry import algorithms
from dbo.platform.engine.arrangement import arrange
from dbo.platform.engine.local import LocalEngine
from dbo.platform.engine.shard_wrappers import pool_shard
from dbo.platform.network.topology import TOPOLOGIES, build_network
from dbo.tasks.api import Shard

Array = Any
Rows = dict[str, Array]
NODES, DIM_X, DIM_Y, ROUNDS = 6, 3, 7, 6
GRAPH = build_network(TOPOLOGIES["erdos_renyi"]().graph(NODES, 0))


# ---- the problem ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class BentShard(Shard):
    """g_i = Σ log cosh(C_i y − B_i x − c_i) + μ/2 ‖y‖²,   f_i = Σ log cosh(y − T_i x − t_i) + ρ/2 ‖x‖²."""

    cy: Array
    b: Array
    c: Array
    tx: Array
    t: Array
    mu: float = 0.4
    rho: float = 0.3

    def _inside(self, x: Array, y: Array) -> tuple[Array, Array]:
        return times(self.cy, y) - times(self.b, x) - self.c, y - times(self.tx, x) - self.t

    def f(self, x: Array, y: Array) -> Array:
        return np.log(np.cosh(self._inside(x, y)[1])).sum(1) + 0.5 * self.rho * (x * x).sum(1)

    def g(self, x: Array, y: Array) -> Array:
        return np.log(np.cosh(self._inside(x, y)[0])).sum(1) + 0.5 * self.mu * (y * y).sum(1)

    def f_x(self, x: Array, y: Array) -> Array:
        return self.rho * x - times(transposed(self.tx), np.tanh(self._inside(x, y)[1]))

    def f_y(self, x: Array, y: Array) -> Array:
        return np.tanh(self._inside(x, y)[1])

    def g_x(self, x: Array, y: Array) -> Array:
        return -times(transposed(self.b), np.tanh(self._inside(x, y)[0]))

    def g_y(self, x: Array, y: Array) -> Array:
        return times(transposed(self.cy), np.tanh(self._inside(x, y)[0])) + self.mu * y

    def g_yy(self, x: Array, y: Array, v: Array) -> Array:
        return times(transposed(self.cy), times(self.cy, v) / np.cosh(self._inside(x, y)[0]) ** 2) + self.mu * v

    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        return -times(transposed(self.b), times(self.cy, v) / np.cosh(self._inside(x, y)[0]) ** 2)


def times(matrices: Array, rows: Array) -> Array:
    return (matrices @ rows[:, :, None])[:, :, 0]


def transposed(matrices: Array) -> Array:
    return np.swapaxes(matrices, 1, 2)


class Bent:
    """Nodes that differ in everything, and a common start away from 0."""

    nodes, dim_x, dim_y = NODES, DIM_X, DIM_Y

    def __init__(self) -> None:
        draw = np.random.default_rng(11).standard_normal
        self.x0, self.y0 = 0.5 * draw(DIM_X), 0.5 * draw(DIM_Y)
        self.parts = {
            "cy": np.eye(DIM_Y) + 0.2 * draw((NODES, DIM_Y, DIM_Y)), "b": 0.6 * draw((NODES, DIM_Y, DIM_X)),
            "c": draw((NODES, DIM_Y)), "tx": 0.4 * draw((NODES, DIM_Y, DIM_X)), "t": draw((NODES, DIM_Y)),
        }
        self.evaluate = self.task_metrics = self.penalty_solution = self.describe = None    # not needed
        self.sample_sizes = self.tune_losses = self.evaluate_nodes = None

    def shard(self, ids: Sequence[int]) -> BentShard:
        rows = np.asarray(ids, dtype=np.int64)
        return BentShard(
            ids=rows, seed=5, x0=np.tile(self.x0, (len(rows), 1)), y0=np.tile(self.y0, (len(rows), 1)),
            **{name: part[rows] for name, part in self.parts.items()},
        )


def test_derivatives_are_right_and_depend_on_the_point() -> None:
    """Central differences of f, g and ∇_y g; and products at two points differ, which on a quadratic they do not."""
    s = Bent().shard(range(NODES))
    draw = np.random.default_rng(2).standard_normal
    (x, other_x), (y, other_y, v) = draw((2, NODES, DIM_X)), draw((3, NODES, DIM_Y))
    delta = 1e-5
    for value, in_x, in_y in ((s.f, s.f_x, s.f_y), (s.g, s.g_x, s.g_y)):
        along = (value(x, y + delta * v) - value(x, y - delta * v)) / (2 * delta)
        np.testing.assert_allclose(along, (in_y(x, y) * v).sum(1), rtol=1e-6)
        along = (value(x + delta * other_x, y) - value(x - delta * other_x, y)) / (2 * delta)
        np.testing.assert_allclose(along, (in_x(x, y) * other_x).sum(1), rtol=1e-6)
    ahead, behind = y + delta * v, y - delta * v
    np.testing.assert_allclose((s.g_y(x, ahead) - s.g_y(x, behind)) / (2 * delta), s.g_yy(x, y, v), atol=1e-8)
    np.testing.assert_allclose((s.g_x(x, ahead) - s.g_x(x, behind)) / (2 * delta), s.g_xy(x, y, v), atol=1e-8)
    for product in (s.g_yy, s.g_xy):
        here = product(x, y, v)
        assert np.abs(product(other_x, y, v) - here).max() > 0.01
        assert np.abs(product(x, other_y, v) - here).max() > 0.01


# ---- references: what a state must hold after 0, 1, 2, … rounds ----------------------------------------------------


def penalty(s: Shard, cfg: Any) -> tuple[Callable[..., Array], Callable[..., Array]]:
    """∇_x f + λ (∇_x g(y) − ∇_x g(z)), and what the y loop descends on: h / λ, or h = f + λ g."""
    scale = 1.0 if getattr(cfg, "y_objective", "h_over_lambda") == "h" else 1.0 / cfg.lam
    return (
        lambda x, y, z: s.f_x(x, y) + cfg.lam * (s.g_x(x, y) - s.g_x(x, z)),
        lambda x, y: scale * (s.f_y(x, y) + cfg.lam * s.g_y(x, y)),
    )


def keep_top(rows: Array, ratio: float) -> Array:
    """Of every row its ⌊ratio · d⌋ largest entries by magnitude, of equal ones the first."""
    kept = np.zeros_like(rows)
    for row, out in zip(rows, kept, strict=True):
        largest = np.argsort(-np.abs(row), kind="stable")[: max(1, int(ratio * row.size))]
        out[largest] = row[largest]
    return kept


def keep_sampled(s: Shard, rows: Array, ratio: float, t: int, step: int, channel: str) -> Array:
    """Of every row ⌊ratio · d⌋ entries, sampled with the node's key for this round, inner step and channel."""
    kept = np.zeros_like(rows)
    for node, row, out in zip(s.ids, rows, kept, strict=True):
        key = [s.seed, crc32(f"rand_k {channel}".encode()), node, t, step]
        some = np.random.default_rng(key).choice(row.size, size=max(1, int(ratio * row.size)), replace=False,
                                                 shuffle=False)
        out[some] = row[some]
    return kept


def compress(s: Shard, cfg: Any, rows: Array, t: int, step: int, channel: str) -> Array:
    if isinstance(cfg.compressor, RandK):
        return keep_sampled(s, rows, cfg.compressor.ratio, t, step, channel)
    return keep_top(rows, cfg.compressor.ratio)


def c2dfb(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """C²DFB: y on h / λ or h, z on g."""
    upper, y_gradient = penalty(s, cfg)
    for rows in tracked_loops(s, w, cfg, upper, {"y": y_gradient, "z": s.g_y}):
        yield {"loop_y.s": rows.pop("track_y"), "loop_z.s": rows.pop("track_z"), **rows}


def c2dfb_central(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """The same loops on g + f/λ and g − f/λ."""
    def upper(x: Array, plus: Array, minus: Array) -> Array:
        return (s.f_x(x, plus) + s.f_x(x, minus) + cfg.lam * s.g_x(x, plus) - cfg.lam * s.g_x(x, minus)) / 2

    gradients = {
        "y": lambda x, y: s.g_y(x, y) + s.f_y(x, y) / cfg.lam, "z": lambda x, y: s.g_y(x, y) - s.f_y(x, y) / cfg.lam,
    }
    for rows in tracked_loops(s, w, cfg, upper, gradients):
        yield {"plus.s": rows.pop("track_y"), "minus.s": rows.pop("track_z"), **rows}


def tracked_loops(
    s: Shard, w: Array, cfg: Any, upper: Callable[..., Array], gradients: dict[str, Callable[..., Array]]
) -> Iterator[Rows]:
    """Two inner loops with reference points d̂, ŝ; x and its tracker uncompressed; ŝ = 0 again after some rounds."""
    lap, x = w - np.eye(len(w)), s.x0
    d = dict.fromkeys("yz", s.y0)
    track = {loop: gradients[loop](x, s.y0) for loop in "yz"}
    last, d_hat, s_hat = dict(track), dict.fromkeys("yz", 0 * s.y0), dict.fromkeys("yz", 0 * s.y0)
    s_x = u = upper(x, s.y0, s.y0)
    public = {"x": 0 * s.x0, "s": 0 * s.x0}
    eta = {loop: getattr(cfg, f"eta_{loop}", None) or cfg.eta_in for loop in "yz"}
    for t in count():
        yield {"x": x, "y": d["y"], "z": d["z"], "direction": s_x, "track_y": track["y"], "track_z": track["z"]}
        if cfg.reset_every and t > 0 and t % cfg.reset_every == 0:
            s_hat, public["s"] = dict.fromkeys("yz", 0 * s.y0), 0 * s.x0
        if getattr(cfg, "compressor_x", None) is None:
            public = {"x": x, "s": s_x}
        else:
            for part, rows in (("x", x), ("s", s_x)):
                public[part] = public[part] + keep_top(rows - public[part], cfg.compressor_x.ratio)
        x, mixed = x + cfg.gamma_out * lap @ public["x"] - cfg.eta_out * s_x, lap @ public["s"]
        for loop in "yz":
            if getattr(cfg, "tracker", "refresh") == "refresh":
                new = gradients[loop](x, d[loop])
                track[loop], last[loop] = track[loop] + new - last[loop], new
            for k in range(cfg.inner_steps):
                d[loop] = d[loop] + cfg.gamma_in * lap @ d_hat[loop] - eta[loop] * track[loop]
                d_hat[loop] = d_hat[loop] + compress(s, cfg, d[loop] - d_hat[loop], t, k, f"{loop}_d")
                new = gradients[loop](x, d[loop])
                track[loop] = track[loop] + cfg.gamma_in * lap @ s_hat[loop] + new - last[loop]
                last[loop] = new
                s_hat[loop] = s_hat[loop] + compress(s, cfg, track[loop] - s_hat[loop], t, k, f"{loop}_s")
        u, u_old = upper(x, d["y"], d["z"]), u
        s_x = s_x + cfg.gamma_out * mixed + u - u_old


def c2dfb_nc(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """The same with error feedback: M = Q(v + E), E ← v + E − M, and mixing over the messages M."""
    upper, y_gradient = penalty(s, cfg)
    lap, x, gradients = w - np.eye(len(w)), s.x0, {"y": y_gradient, "z": s.g_y}
    d = dict.fromkeys("yz", s.y0)
    track = {loop: gradients[loop](x, s.y0) for loop in "yz"}
    last = dict(track)
    sent, error = ({loop + part: 0 * s.y0 for loop in "yz" for part in "ds"} for _ in range(2))
    s_x = u = upper(x, s.y0, s.y0)

    def mixed(loop: str, part: str, rows: Array) -> Array:
        """Σ_j w_ij (M_j − M_i), or Σ_j w_ij (M_j − v_i) with the node's own vector."""
        message = sent[loop + part]
        return lap @ message if cfg.mixing == "messages" else w @ message - rows

    at = (0, 0)      # round and inner step

    def send(loop: str, part: str, rows: Array) -> None:
        due = rows + error[loop + part]
        sent[loop + part] = compress(s, cfg, due, *at, f"{loop}_{part}")
        error[loop + part] = due - sent[loop + part]

    for t in count():
        yield {"x": x, "y": d["y"], "z": d["z"], "direction": s_x, "loop_y.s.v": track["y"], "loop_z.s.v": track["z"]}
        x, mixed_x = x + cfg.gamma_out * lap @ x - cfg.eta_out * s_x, lap @ s_x
        for loop in "yz":
            if cfg.tracker == "refresh":
                new = gradients[loop](x, d[loop])
                track[loop], last[loop] = track[loop] + new - last[loop], new
            for k in range(cfg.inner_steps):
                at = (t, k)
                d[loop] = d[loop] + cfg.gamma_in * mixed(loop, "d", d[loop]) - cfg.eta_in * track[loop]
                send(loop, "d", d[loop])
                new = gradients[loop](x, d[loop])
                track[loop] = track[loop] + cfg.gamma_in * mixed(loop, "s", track[loop]) + new - last[loop]
                last[loop] = new
                send(loop, "s", track[loop])
        u, u_old = upper(x, d["y"], d["z"]), u
        s_x = s_x + cfg.gamma_out * mixed_x + u - u_old


def c2dfb_lead(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """LEAD in both loops, α < 1; x and its tracker as in C²DFB."""
    upper, y_gradient = penalty(s, cfg)
    lap, x, gradients = w - np.eye(len(w)), s.x0, {"y": y_gradient, "z": s.g_y}
    d, h = dict.fromkeys("yz", s.y0), dict.fromkeys("yz", s.y0)
    dual = dict.fromkeys("yz", 0 * s.y0)
    s_x = u = upper(x, s.y0, s.y0)
    for t in count():
        yield {"x": x, "y": d["y"], "z": d["z"], "direction": s_x, "loop_y.dual": dual["y"], "public_y": w @ h["y"]}
        x, mixed = x + cfg.gamma_out * lap @ x - cfg.eta_out * s_x, lap @ s_x
        for k in range(cfg.inner_steps):
            for loop in "yz":
                half = d[loop] - cfg.eta_in * gradients[loop](x, d[loop])
                q = compress(s, cfg, half - cfg.eta_in * dual[loop] - h[loop], t, k, loop)
                dual[loop] = dual[loop] - cfg.gamma_in / (2 * cfg.eta_in) * lap @ (h[loop] + q)
                h[loop] = h[loop] + cfg.alpha * q
                d[loop] = half - cfg.eta_in * dual[loop]
        u, u_old = upper(x, d["y"], d["z"]), u
        s_x = s_x + cfg.gamma_out * mixed + u - u_old


def lean(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """One loop over the edges for every entry: a correction where one of the ends has sent it."""
    upper, y_gradient = penalty(s, cfg)
    v, h = {"x": s.x0, "y": s.y0, "z": s.y0}, {"x": s.x0, "y": s.y0, "z": s.y0}
    old, dual = dict(v), {name: 0 * rows for name, rows in v.items()}
    ratios = {"x": cfg.ratio_x, "y": cfg.compressor.ratio, "z": cfg.ratio_z}

    def advance(name: str, grad: Array, eta: float, beta: float, t: int, k: int, known: Array) -> Array:
        momentum = beta * (v[name] - old[name])
        residual = v[name] - eta * (grad + dual[name]) + momentum - h[name] - known
        if name == "x" and not cfg.compress_x:
            sent = residual
        else:
            q = replace(cfg, compressor=replace(cfg.compressor, ratio=ratios[name]))
            sent = known + compress(s, q, residual, t, k, name)
        h[name] = h[name] + sent
        for i in range(len(w)):
            for j in range(i):
                news = (sent[i] != 0) | (sent[j] != 0) | (not cfg.edge_triggered)
                push = cfg.gamma / (2 * eta) * w[i, j] * news * (h[name][i] - h[name][j])
                dual[name] = dual[name] + np.outer(np.eye(len(w))[i] - np.eye(len(w))[j], push)
        v[name], old[name] = v[name] - eta * (grad + dual[name]) + momentum, v[name]
        return sent

    u = upper(v["x"], v["y"], v["z"])
    for t in count():
        yield {
            "x": v["x"], "y": v["y"], "z": v["z"], "direction": u + dual["x"], "loop_y.dual": dual["y"],
            "loop_z.ref": h["z"], "public_y": w @ h["y"],
        }
        advance("x", u, cfg.eta_out, 0.0, t, 0, 0 * s.x0)
        for k in range(cfg.inner_steps):
            grads = y_gradient(v["x"], v["y"]), s.g_y(v["x"], v["z"])
            sent = advance("y", grads[0], cfg.eta_in, cfg.momentum, t, k, 0 * s.y0)
            advance("z", grads[1], cfg.eta_in, cfg.momentum, t, k, sent * cfg.explain_z)
        u = upper(v["x"], v["y"], v["z"])


def madsbo(s: Shard, w: Array, cfg: Any, gradient_tracking: bool = False) -> Iterator[Rows]:
    """T gossip steps of y (or tracked ones), N steps of HIGP from 0, x along the average of the rounds before."""
    w = np.eye(len(w)) + cfg.gam * (w - np.eye(len(w)))
    x, y, r = s.x0, s.y0, 0 * s.x0
    track = last = s.g_y(x, y)
    while True:
        yield {"x": x, "y": y, "direction": r} | ({"s": track} if gradient_tracking else {})
        new = s.g_y(x, y)
        track, last = track + new - last, new                       # what the step of x changed
        for _ in range(cfg.inner_steps):
            if gradient_tracking:
                y = w @ y - cfg.eta_y * track
                new = s.g_y(x, y)
                track, last = w @ track + new - last, new
            else:
                y = w @ y - cfg.eta_y * s.g_y(x, y)
        b = s.f_y(x, y)
        z, q, old = 0 * b, -b, -b
        for _ in range(cfg.higp_steps):
            z = w @ z - cfg.eta_z * q
            new = s.g_yy(x, y, z) - b
            q, old = w @ q + new - old, new
        u = s.f_x(x, y) - s.g_xy(x, y, z)
        x, r = w @ x - cfg.eta_x * r, (1 - cfg.theta) * r + cfg.theta * u


def madsbo_gt(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    return madsbo(s, w, cfg, gradient_tracking=True)


def series(s: Shard, x: Array, y: Array, b: Array, cfg: Any) -> Array:
    """(1/L) Σ_{j<J} (I − H/L)^j b, term by term."""
    term = total = b
    for _ in range(cfg.neumann_terms - 1):
        term = term - s.g_yy(x, y, term) / cfg.lipschitz
        total = total + term
    return total / cfg.lipschitz


def one_term(s: Shard, x: Array, y: Array, b: Array, cfg: Any, t: int) -> Array:
    """(J/L) (I − H/L)^{J_i} b, J_i from {0 … J − 1}, sampled with the node's key of round t."""
    p = b
    lengths = [
        np.random.default_rng([s.seed, crc32(b"neumann"), node, t, 0]).integers(cfg.neumann_terms) for node in s.ids
    ]
    for j in range(cfg.neumann_terms):
        shorter = p - s.g_yy(x, y, p) / cfg.lipschitz
        p = np.where(np.array(lengths)[:, None] > j, shorter, p)
    return p * cfg.neumann_terms / cfg.lipschitz


def mdbo(s: Shard, w: Array, cfg: Any, reduced: bool = False) -> Iterator[Rows]:
    """Momentum, or variance reduction with the same samples at the old point; trackers of both estimates."""
    lap, x, y, t = w - np.eye(len(w)), s.x0, s.y0, 0

    def hypergradient(x: Array, y: Array) -> Array:
        b = s.f_y(x, y)
        p = one_term(s, x, y, b, cfg, t) if cfg.neumann == "sampled" else series(s, x, y, b, cfg)
        return s.f_x(x, y) - s.g_xy(x, y, p)

    u, v = hypergradient(x, y), s.g_y(x, y)
    z_f, z_g = u, v
    while True:
        yield {"x": x, "y": y, "direction": z_f, "u": u, "v": v, "zg": z_g}
        x_old, y_old, u_old, v_old, t = x, y, u, v, t + 1
        x = x_old + cfg.eta * lap @ x_old - cfg.beta_x * cfg.eta * z_f
        y = y_old + cfg.eta * lap @ y_old - cfg.beta_y * cfg.eta * z_g
        if reduced:
            a_x, a_y = cfg.alpha_x * cfg.eta**2, cfg.alpha_y * cfg.eta**2
            u, v = u + hypergradient(x, y) - hypergradient(x_old, y_old), v + s.g_y(x, y) - s.g_y(x_old, y_old)
        else:
            a_x, a_y = cfg.alpha_x * cfg.eta, cfg.alpha_y * cfg.eta
        u, v = (1 - a_x) * u + a_x * hypergradient(x, y), (1 - a_y) * v + a_y * s.g_y(x, y)
        z_f, z_g = w @ z_f + u - u_old, w @ z_g + v - v_old


def vrdbo(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    return mdbo(s, w, cfg, reduced=True)


def track(w: Array, start: Sequence[Array], steps: Sequence[float], directions: Any, project: Any) -> Any:
    """For each variable var ← W var − step · T, then T ← W T + D_new − D_old; T = D at the start."""
    variables = list(start)
    trackers = old = directions(*variables)
    while True:
        yield variables, trackers
        variables = [w @ var - step * t for var, step, t in zip(variables, steps, trackers, strict=True)]
        variables[2] = project(variables[2])
        new = directions(*variables)
        trackers, old = [w @ t + d - d_old for t, d, d_old in zip(trackers, new, old, strict=True)], new


def dsgda_gt(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    upper, y_gradient = penalty(s, cfg)

    def directions(x: Array, y: Array, z: Array) -> list[Array]:
        return [upper(x, y, z), y_gradient(x, y), s.g_y(x, z)]

    steps = (cfg.eta_x, cfg.eta_y, cfg.eta_z)
    for (x, y, z), trackers in track(w, (s.x0, s.y0, s.y0), steps, directions, lambda z: z):
        yield {"x": x, "y": y, "z": z, "direction": trackers[0]}


def soba(s: Shard, x: Array, y: Array, v: Array) -> list[Array]:
    """D_x = ∇_x f − ∇²_xy g v,   D_y = ∇_y g,   D_v = ∇²_yy g v − ∇_y f."""
    return [s.f_x(x, y) - s.g_xy(x, y, v), s.g_y(x, y), s.g_yy(x, y, v) - s.f_y(x, y)]


def sldbo(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    def project(v: Array) -> Array:
        return v * np.minimum(1, cfg.radius / np.linalg.norm(v, axis=1, keepdims=True))

    steps = (cfg.eta_x, cfg.eta_y, cfg.eta_v)
    for (x, y, v), trackers in track(w, (s.x0, s.y0, 0 * s.y0), steps, lambda *at: soba(s, *at), project):
        yield {"x": x, "y": y, "v": v, "direction": trackers[0]}


def d_soba(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """x ← W (x − α h), y ← W (y − β D_y), v ← W (v − γ D_v), h ← (1 − θ) h + θ D_x, all from the same point."""
    x, y, v, h = s.x0, s.y0, 0 * s.y0, 0 * s.x0
    while True:
        yield {"x": x, "y": y, "v": v, "direction": h}
        d_x, d_y, d_v = soba(s, x, y, v)
        if cfg.derivatives == "first_order":
            ahead, behind = y + cfg.delta * v, y - cfg.delta * v
            d_x = s.f_x(x, y) - (s.g_x(x, ahead) - s.g_x(x, behind)) / (2 * cfg.delta)
            d_v = (s.g_y(x, ahead) - s.g_y(x, behind)) / (2 * cfg.delta) - s.f_y(x, y)
        x, y, v = w @ (x - cfg.eta_x * h), w @ (y - cfg.eta_y * d_y), w @ (v - cfg.eta_v * d_v)
        h = (1 - cfg.theta) * h + cfg.theta * d_x


def gossip_dsbo(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """x and y by gossip; A ← (1 − θ) W A + θ ∇f for both upper gradients; x along A_x − J_i P_i A_y."""
    x, y = s.x0, s.y0
    a_x, a_y = s.f_x(x, y), s.f_y(x, y)
    while True:
        u = a_x - s.g_xy(x, y, series(s, x, y, a_y, cfg))
        yield {"x": x, "y": y, "direction": u, "a_x": a_x, "a_y": a_y}
        x, y = w @ x - cfg.eta_x * u, w @ y - cfg.eta_y * s.g_y(x, y)
        a_x = (1 - cfg.theta) * w @ a_x + cfg.theta * s.f_x(x, y)
        a_y = (1 - cfg.theta) * w @ a_y + cfg.theta * s.f_y(x, y)


def sparkle(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """The two-term recursions of exact diffusion and EXTRA with W̃ = (I + W) / 2; tracking with W."""
    half, steps = 0.5 * (np.eye(len(w)) + w), (cfg.eta_x, cfg.eta_y, cfg.eta_v)
    rules = (cfg.rule_x, cfg.rule_y, cfg.rule_v)

    def move(rule: str, a: float, now: Array, last: Array | None, d: Array, d_last: Array) -> Array:
        if rule == "ed":
            return half @ (now - a * d) if last is None else half @ (2 * now - last - a * (d - d_last))
        return half @ now - a * d if last is None else half @ (2 * now - last) - a * (d - d_last)

    at, before = [s.x0, s.y0, 0 * s.y0], [None] * 3
    d = d_before = trackers = soba(s, *at)
    while True:
        along = [t if rule == "gt" else new for rule, t, new in zip(rules, trackers, d, strict=True)]
        yield {"x": at[0], "y": at[1], "v": at[2], "direction": along[0], "along.y": along[1], "along.v": along[2]}
        new_rows = [
            w @ now - a * t if rule == "gt" else move(rule, a, now, last, new, old)
            for rule, a, now, last, new, old, t in zip(rules, steps, at, before, d, d_before, trackers, strict=True)
        ]
        d_x, d_y, d_v = soba(s, *new_rows)
        new = [(1 - cfg.theta) * d[0] + cfg.theta * d_x, d_y, d_v]
        trackers = [w @ t + n - o for t, n, o in zip(trackers, new, d, strict=True)]
        at, before, d, d_before = new_rows, at, new, d


def storm_pl(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """Six estimates, one per gradient, each e ← (1 − α η²) (e − ∇old) + ∇new; m_x, m_y and m_z are their sums."""
    def gradients(x: Array, y: Array, z: Array) -> list[Array]:
        return [s.f_x(x, y), s.g_x(x, y), s.g_x(x, z), s.f_y(x, y), s.g_y(x, y), s.g_y(x, z)]

    def sums(u_1: Array, u_2: Array, u_3: Array, v_1: Array, v_2: Array, w_1: Array) -> list[Array]:
        return [u_1 + cfg.lam * (u_2 - u_3), v_1 / cfg.lam + v_2, w_1]

    at, keep = [s.x0, s.y0, s.y0], 1 - cfg.alpha * cfg.eta**2
    e = gradients(*at)
    m = trackers = sums(*e)
    while True:
        yield {"x": at[0], "y": at[1], "z": at[2], "direction": trackers[0], "estimate.y": m[1]}
        betas, old = (cfg.beta_x, cfg.beta_y, cfg.beta_z), at
        at = [w @ now - beta * cfg.eta * u for now, beta, u in zip(at, betas, trackers, strict=True)]
        e = [keep * (a - b) + c for a, b, c in zip(e, gradients(*old), gradients(*at), strict=True)]
        m_old, m = m, sums(*e)
        trackers = [w @ u + a - b for u, a, b in zip(trackers, m, m_old, strict=True)]


def sun_dsbo(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """x, y on f + c (g − v_γ), v_γ(x, y) = min_θ g(x, θ) + ‖θ − y‖² / 2γ with the current θ; y's part by c."""
    def directions(x: Array, y: Array, theta: Array) -> list[Array]:
        envelope_x, envelope_y = s.g_x(x, theta), (y - theta) / cfg.prox
        return [
            s.f_x(x, y) + cfg.c * (s.g_x(x, y) - envelope_x),
            (s.f_y(x, y) + cfg.c * (s.g_y(x, y) - envelope_y)) / cfg.c,
            s.g_y(x, theta) + (theta - y) / cfg.prox,
        ]

    steps = (cfg.eta_x, cfg.eta_y, cfg.eta_theta)
    for (x, y, theta), trackers in track(w, (s.x0, s.y0, s.y0), steps, directions, lambda theta: theta):
        yield {"x": x, "y": y, "theta": theta, "direction": trackers[0]}


def slam(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """One dual variable per edge, λ ← λ + ρ A x after the step of x; A has a row √w_ij (e_i − e_j) for every edge."""
    edges = [(i, j) for i in range(len(w)) for j in range(i) if w[i, j] > 0]
    a = np.array([np.sqrt(w[i, j]) * (np.eye(len(w))[i] - np.eye(len(w))[j]) for i, j in edges])
    np.testing.assert_allclose(a.T @ a, np.eye(len(w)) - w, atol=1e-15)
    x, y, dual, rho = s.x0, s.y0, np.zeros((len(edges), s.x0.shape[1])), cfg.gamma / cfg.eta_x
    while True:
        d = s.f_x(x, y) - s.g_xy(x, y, series(s, x, y, s.f_y(x, y), cfg))
        yield {"x": x, "y": y, "direction": d}
        x = x - cfg.eta_x * (d + a.T @ dual + rho * a.T @ (a @ x))
        dual = dual + rho * a @ x
        for _ in range(cfg.inner_steps):
            y = y - cfg.eta_y * s.g_y(x, y)


def f2ba(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """K steps on h/λ and on g, then x along the penalty gradient; the first step of x comes first."""
    upper, y_gradient = penalty(s, cfg)
    x, y, z = s.x0, s.y0, s.y0
    while True:
        u = upper(x, y, z)
        yield {"x": x, "y": y, "z": z, "direction": u}
        x = x - cfg.eta_out * u
        z = y if cfg.z_start == "y" else z
        for _ in range(cfg.inner_steps):
            y, z = y - cfg.eta_in * y_gradient(x, y), z - cfg.eta_in * s.g_y(x, z)


def bome(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """(x, y) along ∇f + μ ∇q, μ = max(0, (φ − ⟨∇f, ∇q⟩) / ‖∇q‖²), q = g(x, y) − g(x, ŷ), ŷ a constant."""
    x, y = s.x0, s.y0
    while True:
        y_hat = y
        for _ in range(cfg.inner_steps):
            y_hat = y_hat - cfg.eta_in * s.g_y(x, y_hat)
        f = np.hstack([s.f_x(x, y), s.f_y(x, y)])
        q = np.hstack([s.g_x(x, y) - s.g_x(x, y_hat), s.g_y(x, y)])
        phi = cfg.rate * (s.g(x, y) - s.g(x, y_hat) if cfg.phi == "value" else (q * q).sum(1))
        along = f + np.maximum(0, (phi - (f * q).sum(1)) / ((q * q).sum(1) + cfg.floor))[:, None] * q
        yield {"x": x, "y": y, "direction": along[:, :DIM_X], "d_y": along[:, DIM_X:]}
        x, y = x - cfg.eta_x * along[:, :DIM_X], y - cfg.eta_y * along[:, DIM_X:]


def f2sa(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """T steps of z on g and of y on f + λ_k g with α_k = η_y / λ_k, then x by ξ α_k; λ_k = λ_0 (1 + k / r)^p."""
    x, y, z = s.x0, s.y0, s.y0
    for k in count():
        lam = cfg.lam_start * (1 + k / cfg.lam_rounds) ** cfg.lam_power
        alpha = cfg.eta_y / lam
        for _ in range(cfg.inner_steps if k else 0):
            z = z - cfg.eta_z * s.g_y(x, z)
            y = y - alpha * (s.f_y(x, y) + lam * s.g_y(x, y))
        u = s.f_x(x, y) + lam * (s.g_x(x, y) - s.g_x(x, z))
        yield {"x": x, "y": y, "z": z, "direction": u}
        xi = cfg.eta_x * cfg.lam_start / cfg.eta_y
        x = x - xi * alpha * u


def stocbio(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """T steps of y on g, then x along ∇_x f − ∇²_xy g p; p by Horner's rule."""
    x, y = s.x0, s.y0
    for k in count():
        for _ in range(cfg.inner_steps if k else 0):
            y = y - cfg.eta_y * s.g_y(x, y)
        b = s.f_y(x, y)
        p = cfg.eta_v * b
        for _ in range(cfg.neumann_terms - 1):
            p = p - cfg.eta_v * (s.g_yy(x, y, p) - b)
        u = s.f_x(x, y) - s.g_xy(x, y, p)
        yield {"x": x, "y": y, "direction": u}
        x = x - cfg.eta_x * u


def single_soba(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """y, v and x at once, with the authors' sign of v: H v + ∇_y f = 0."""
    x, y, v = s.x0, s.y0, 0 * s.y0
    while True:
        d_x = s.f_x(x, y) + s.g_xy(x, y, v)
        yield {"x": x, "y": y, "direction": d_x}
        d_y, d_v = s.g_y(x, y), s.g_yy(x, y, v) + s.f_y(x, y)
        x, y, v = x - cfg.eta_x * d_x, y - cfg.eta_y * d_y, v - cfg.eta_v * d_v


# ---- the comparison ------------------------------------------------------------------------------------------------

REFERENCES: dict[str, Callable[[Shard, Array, Any], Iterator[Rows]]] = {
    "c2dfb": c2dfb, "c2dfb_nc": c2dfb_nc, "c2dfb_lead": c2dfb_lead, "lean": lean,
    "c2dfb_central": c2dfb_central,
    "madsbo": madsbo, "madsbo_gt": madsbo_gt, "mdbo": mdbo, "vrdbo": vrdbo,
    "dsgda_gt": dsgda_gt, "sldbo": sldbo, "d_soba": d_soba, "gossip_dsbo": gossip_dsbo,
    "sparkle": sparkle, "storm_pl": storm_pl, "sun_dsbo": sun_dsbo, "slam": slam,
    "f2ba": f2ba, "bome": bome, "f2sa": f2sa, "stocbio": stocbio, "soba": single_soba,
    **STAR_REFERENCES,
}
PENALTY = {"lam": 7.0, "inner_steps": 4, "eta_in": 0.31, "eta_out": 0.07}
COMPRESSED = PENALTY | {"gamma_in": 0.4, "gamma_out": 0.6, "compressor": TopK(ratio=0.3)}
HIGP = {"inner_steps": 3, "higp_steps": 4, "eta_x": 0.11, "eta_y": 0.23, "eta_z": 0.17, "theta": 0.37, "gam": 0.7}
MOMENTUM = {
    "eta": 0.3, "beta_x": 0.4, "beta_y": 0.6, "alpha_x": 0.7, "alpha_y": 1.3, "neumann_terms": 6, "lipschitz": 2.6
}
# Stable on the problem above; all numbers of one configuration differ.
STEPS: dict[str, dict[str, Any]] = {
    "c2dfb": COMPRESSED,
    "c2dfb_nc": COMPRESSED,
    "c2dfb_lead": COMPRESSED | {"alpha": 0.8},
    "c2dfb_central": COMPRESSED,
    "lean": PENALTY | {
        "gamma": 0.4, "momentum": 0.23, "compressor": TopK(ratio=0.3), "ratio_z": 0.426, "ratio_x": 0.662
    },
    "madsbo": HIGP,
    "madsbo_gt": HIGP,
    "mdbo": MOMENTUM,
    "vrdbo": MOMENTUM,
    "dsgda_gt": {"lam": 7.0, "eta_x": 0.05, "eta_y": 0.12, "eta_z": 0.17},
    "sldbo": {"eta_x": 0.05, "eta_y": 0.12, "eta_v": 0.17, "radius": 0.2},     # v comes to the ball's edge
    "d_soba": {"eta_x": 0.05, "eta_y": 0.12, "eta_v": 0.17, "theta": 0.4, "delta": 0.1},
    "gossip_dsbo": {"eta_x": 0.05, "eta_y": 0.12, "theta": 0.3, "neumann_terms": 6, "lipschitz": 2.6},
    "sparkle": {"eta_x": 0.05, "eta_y": 0.12, "eta_v": 0.17, "theta": 0.4},
    "storm_pl": {"lam": 7.0, "eta": 0.4, "beta_x": 0.15, "beta_y": 0.3, "beta_z": 0.5, "alpha": 2.0},
    "sun_dsbo": {"c": 7.0, "prox": 1.7, "eta_x": 0.05, "eta_y": 0.12, "eta_theta": 0.17},
    "slam": {"inner_steps": 3, "eta_x": 0.11, "eta_y": 0.23, "gamma": 0.33, "neumann_terms": 6, "lipschitz": 2.6},
    "f2ba": PENALTY,
    # Three rounds with μ = 0, then μ > 0.
    "bome": {"inner_steps": 4, "eta_in": 0.31, "eta_x": 0.07, "eta_y": 0.5, "rate": 0.3, "floor": 0.01},
    "f2sa": {
        "inner_steps": 4, "lam_start": 3.0, "lam_rounds": 2.0, "lam_power": 0.4,
        "eta_z": 0.23, "eta_y": 0.31, "eta_x": 0.07,
    },
    "stocbio": {"inner_steps": 3, "neumann_terms": 6, "eta_y": 0.31, "eta_v": 0.37, "eta_x": 0.07},
    "soba": {"eta_x": 0.07, "eta_y": 0.12, "eta_v": 0.17},
    **STAR_STEPS,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in algorithms()} | {
    "c2dfb cached": ("c2dfb", {"tracker": "cached"}),
    "c2dfb reset": ("c2dfb", {"reset_every": 2}),
    "c2dfb rand_k": ("c2dfb", {"compressor": RandK(ratio=0.3)}),
    "c2dfb_nc rand_k": ("c2dfb_nc", {"compressor": RandK(ratio=0.3)}),
    "c2dfb_lead rand_k": ("c2dfb_lead", {"compressor": RandK(ratio=0.3)}),
    "c2dfb_central rand_k": ("c2dfb_central", {"compressor": RandK(ratio=0.3)}),
    "c2dfb_central reset": ("c2dfb_central", {"reset_every": 2}),
    "lean rand_k": ("lean", {"compressor": RandK(ratio=0.3)}),
    "lean untriggered": ("lean", {"edge_triggered": False}),
    "lean z alone": ("lean", {"explain_z": False}),
    "lean x whole": ("lean", {"compress_x": False}),
    "c2dfb own steps": ("c2dfb", {"eta_y": 0.27, "eta_z": 0.37}),
    "c2dfb x compressed": ("c2dfb", {"compressor_x": TopK(ratio=0.5)}),
    "c2dfb x compressed, reset": ("c2dfb", {"compressor_x": TopK(ratio=0.5), "reset_every": 2}),
    "c2dfb h": ("c2dfb", {"y_objective": "h", "eta_in": 0.03}),
    "c2dfb_nc cached": ("c2dfb_nc", {"tracker": "cached"}),
    "c2dfb_nc own": ("c2dfb_nc", {"mixing": "own"}),
    "mdbo sampled": ("mdbo", {"neumann": "sampled"}),
    "vrdbo sampled": ("vrdbo", {"neumann": "sampled"}),
    "d_soba first_order": ("d_soba", {"derivatives": "first_order"}),
    "sparkle extra": ("sparkle", {"rule_x": "extra", "rule_y": "extra", "rule_v": "extra"}),
    "sparkle gt": ("sparkle", {"rule_x": "gt", "rule_y": "gt", "rule_v": "gt"}),
    "sparkle gt ed extra": ("sparkle", {"rule_x": "gt", "rule_v": "extra"}),
    "sparkle extra gt ed": ("sparkle", {"rule_x": "extra", "rule_y": "gt"}),
    "f2ba z from y": ("f2ba", {"z_start": "y"}),
    "bome gradient": ("bome", {"phi": "gradient"}),
    **STAR_VARIANTS,
}
# Numbers without influence on the iterates: with full batches ∇_y g needs no correction, nor does the whole series.
IDLE = {
    "lean x whole": {"ratio_x"}, "vrdbo": {"alpha_x", "alpha_y"}, "vrdbo sampled": {"alpha_y"}, "d_soba": {"delta"},
    "storm_pl": {"alpha"}, "c2dfb own steps": {"eta_in"},
    **STAR_IDLE,
}


def configure(label: str) -> tuple[str, Any]:
    """The algorithm's name, and its configuration."""
    name, changes = VARIANTS[label]
    if name not in REFERENCES or name not in STEPS:
        missing = "it has no reference here: write its pseudo-code with a dense W, and give it steps that all differ"
        pytest.fail(f"{name}: {missing}", pytrace=False)
    return name, algorithms()[name].config(**STEPS[name] | changes)


def reference(name: str, config: Any) -> list[Rows]:
    """Return the rows of the second implementation, at the start and after each round."""
    shard, w = Bent().shard(range(NODES)), GRAPH.weights.toarray()
    if algorithms()[name].network == "single":
        shard, w = pool_shard(shard), np.eye(1)
    return list(islice(REFERENCES[name](shard, w, config), ROUNDS + 1))


def error(label: str, config: Any, expected: list[Rows]) -> float:
    """The largest difference between the algorithm and these rows in any round, relative to the rows' largest entry."""
    name, _ = VARIANTS[label]
    algorithm, problem, graph = algorithms()[name], Bent(), GRAPH
    problem, graph = arrange(algorithm, problem, graph)
    engine, largest = LocalEngine(algorithm, config, problem, graph, [range(graph.nodes)]), 0.0
    for round_, rows in enumerate(expected):
        if round_:
            engine.advance(round_)
        assert rows.keys() >= {"x", "y", "direction"}
        for part, row in rows.items():
            found = attrgetter(part)(engine.local_blocks[0].state)
            assert found.shape == row.shape
            largest = max(largest, np.abs(found - row).max() / max(np.abs(row).max(), 1e-3))
    return largest


@pytest.mark.parametrize("label", VARIANTS)
def test_iterates_are_those_of_the_pseudo_code(label: str) -> None:
    """On a random graph all nodes' x, y, direction and more agree with the reference in every round, to 1e-10."""
    name, config = configure(label)
    expected = reference(name, config)
    assert error(label, config, expected) < 1e-10
    assert all(np.abs(expected[-1][part] - expected[0][part]).max() > 1e-2 for part in ("x", "y"))
    assert max(np.abs(row).max() for row in expected[-1].values()) < 100


def numbers(config: Any) -> dict[str, float]:
    return {field.name: value for field in fields(config) if isinstance(value := getattr(config, field.name), float)}


@pytest.mark.parametrize("label", VARIANTS)
def test_another_number_is_detected(label: str) -> None:
    """Control: all numbers of a configuration differ, and one that is 1 % off changes the iterates."""
    name, config = configure(label)
    given = numbers(config)
    assert len({*given.values(), 1.0}) == len(given) + 1
    for changed in given.keys() - IDLE.get(label, set()):
        other = replace(config, **{changed: 1.01 * given[changed]})
        assert error(label, config, reference(name, other)) > 1e-6, changed


@pytest.mark.parametrize("label", [label for label, (_, changes) in VARIANTS.items() if changes])
def test_another_variant_is_detected(label: str) -> None:
    """Control: what a variant changes affects the iterates."""
    name, config = configure(label)
    _, default = configure(name)
    assert error(label, config, reference(name, default)) > 1e-6


@pytest.mark.parametrize("label", [label for label in VARIANTS if algorithms()[VARIANTS[label][0]].network == "gossip"])
def test_another_network_is_detected(label: str) -> None:
    """Control: a reference with a little less mixing is another one."""
    name, config = configure(label)
    lazy = 0.99 * GRAPH.weights.toarray() + 0.01 * np.eye(NODES)
    expected = list(islice(REFERENCES[name](Bent().shard(range(NODES)), lazy, config), ROUNDS + 1))
    assert error(label, config, expected) > 1e-6


def test_errors_of_estimates_decay() -> None:
    """VRDBO: errors of U and V shrink by 1 − α₁ η² and 1 − α₂ η² in a round, and that is all that happens to them."""
    _, config = configure("vrdbo")
    engine = LocalEngine(algorithms()["vrdbo"], config, Bent(), GRAPH, [range(NODES)])
    block, draw = engine.local_blocks[0], np.random.default_rng(3).standard_normal
    off_u, off_v = draw((NODES, DIM_X)), draw((NODES, DIM_Y))
    block.state = replace(block.state, u=block.state.u + off_u, v=block.state.v + off_v)
    engine.advance(1)
    s, x, y = Bent().shard(range(NODES)), block.state.x, block.state.y
    exact_u, exact_v = s.f_x(x, y) - s.g_xy(x, y, series(s, x, y, s.f_y(x, y), config)), s.g_y(x, y)
    weight_u, weight_v = config.alpha_x * config.eta**2, config.alpha_y * config.eta**2
    np.testing.assert_allclose(block.state.u - exact_u, (1 - weight_u) * off_u, rtol=0, atol=1e-13)
    np.testing.assert_allclose(block.state.v - exact_v, (1 - weight_v) * off_v, rtol=0, atol=1e-13)
