"""References of the methods that follow a penalty objective: first-order oracles only."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from dbo.algorithms.protocol import Shard
from dbo.algorithms.references.common import Array, Rows, compress, penalty_gradients, track


def c2dfb(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """C²DFB: y on h / λ or h, z on g."""
    upper, y_gradient = penalty_gradients(s, cfg)
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
    """Two inner loops with reference points d̂, ŝ; x and its tracker whole or compressed; ŝ = 0 after some rounds."""
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
                public[part] = public[part] + compress(s, cfg.compressor_x, rows - public[part], t, 0, part)
        x, mixed = x + cfg.gamma_out * lap @ public["x"] - cfg.eta_out * s_x, lap @ public["s"]
        for loop in "yz":
            if getattr(cfg, "tracker", "refresh") == "refresh":
                new = gradients[loop](x, d[loop])
                track[loop], last[loop] = track[loop] + new - last[loop], new
            for k in range(cfg.inner_steps):
                d[loop] = d[loop] + cfg.gamma_in * lap @ d_hat[loop] - eta[loop] * track[loop]
                d_hat[loop] = d_hat[loop] + compress(s, cfg.compressor, d[loop] - d_hat[loop], t, k, f"{loop}_d")
                new = gradients[loop](x, d[loop])
                track[loop] = track[loop] + cfg.gamma_in * lap @ s_hat[loop] + new - last[loop]
                last[loop] = new
                s_hat[loop] = s_hat[loop] + compress(s, cfg.compressor, track[loop] - s_hat[loop], t, k, f"{loop}_s")
        u, u_old = upper(x, d["y"], d["z"]), u
        s_x = s_x + cfg.gamma_out * mixed + u - u_old


def c2dfb_nc(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """The same with error feedback: M = Q(v + E), E ← v + E − M, and mixing over the messages M."""
    upper, y_gradient = penalty_gradients(s, cfg)
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
        sent[loop + part] = compress(s, cfg.compressor, due, *at, f"{loop}_{part}")
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
    upper, y_gradient = penalty_gradients(s, cfg)
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
                q = compress(s, cfg.compressor, half - cfg.eta_in * dual[loop] - h[loop], t, k, loop)
                dual[loop] = dual[loop] - cfg.gamma_in / (2 * cfg.eta_in) * lap @ (h[loop] + q)
                h[loop] = h[loop] + cfg.alpha * q
                d[loop] = half - cfg.eta_in * dual[loop]
        u, u_old = upper(x, d["y"], d["z"]), u
        s_x = s_x + cfg.gamma_out * mixed + u - u_old


def lean(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """One loop over the edges for every entry: a correction where one of the ends has sent it."""
    upper, y_gradient = penalty_gradients(s, cfg)
    v, h = {"x": s.x0, "y": s.y0, "z": s.y0}, {"x": s.x0, "y": s.y0, "z": s.y0}
    old, dual = dict(v), {name: 0 * rows for name, rows in v.items()}
    ratios = {"x": cfg.ratio_x, "y": None, "z": cfg.ratio_z}

    def advance(name: str, grad: Array, eta: float, beta: float, t: int, k: int, known: Array) -> Array:
        momentum = beta * (v[name] - old[name])
        residual = v[name] - eta * (grad + dual[name]) + momentum - h[name] - known
        if name == "x" and not cfg.compress_x:
            sent = residual
        else:
            q = cfg.compressor
            if name == "x" and cfg.compressor_x is not None:
                q = cfg.compressor_x
            if ratios[name] is not None and hasattr(q, "ratio"):
                q = replace(q, ratio=ratios[name])
            sent = known + compress(s, q, residual, t, k, name)
        h[name] = h[name] + sent
        pull = 0 * h[name]
        for i in range(len(w)):
            for j in range(i):
                news = (sent[i] != 0) | (sent[j] != 0) | (not cfg.edge_triggered)
                ends = np.eye(len(w))[i] - np.eye(len(w))[j]
                push = w[i, j] * news * (h[name][i] - h[name][j])
                dual[name] = dual[name] + np.outer(ends, cfg.gamma / (2 * eta) * push)
                pull = pull - np.outer(ends, cfg.damping * push)
        v[name], old[name] = v[name] - eta * (grad + dual[name]) + momentum + pull, v[name]
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


def dsgda_gt(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    upper, y_gradient = penalty_gradients(s, cfg)

    def directions(x: Array, y: Array, z: Array) -> list[Array]:
        return [upper(x, y, z), y_gradient(x, y), s.g_y(x, z)]

    steps = (cfg.eta_x, cfg.eta_y, cfg.eta_z)
    for (x, y, z), trackers in track(w, (s.x0, s.y0, s.y0), steps, directions, lambda z: z):
        yield {"x": x, "y": y, "z": z, "direction": trackers[0]}


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


def f2ba(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """K steps on h/λ and on g, then x along the penalty gradient; the first step of x comes first."""
    upper, y_gradient = penalty_gradients(s, cfg)
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
    x, y, dim_x = s.x0, s.y0, s.x0.shape[1]
    while True:
        y_hat = y
        for _ in range(cfg.inner_steps):
            y_hat = y_hat - cfg.eta_in * s.g_y(x, y_hat)
        f = np.hstack([s.f_x(x, y), s.f_y(x, y)])
        q = np.hstack([s.g_x(x, y) - s.g_x(x, y_hat), s.g_y(x, y)])
        phi = cfg.rate * (s.g(x, y) - s.g(x, y_hat) if cfg.phi == "value" else (q * q).sum(1))
        along = f + np.maximum(0, (phi - (f * q).sum(1)) / ((q * q).sum(1) + cfg.floor))[:, None] * q
        yield {"x": x, "y": y, "direction": along[:, :dim_x], "d_y": along[:, dim_x:]}
        x, y = x - cfg.eta_x * along[:, :dim_x], y - cfg.eta_y * along[:, dim_x:]


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
