"""References of the methods that use Hessian- and Jacobian-vector products."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np

from dbo.algorithms.protocol import Shard
from dbo.algorithms.references.common import Array, Rows, one_term, series, soba_directions, track


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


def sldbo(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    def project(v: Array) -> Array:
        return v * np.minimum(1, cfg.radius / np.linalg.norm(v, axis=1, keepdims=True))

    steps = (cfg.eta_x, cfg.eta_y, cfg.eta_v)
    for (x, y, v), trackers in track(w, (s.x0, s.y0, 0 * s.y0), steps, lambda *at: soba_directions(s, *at), project):
        yield {"x": x, "y": y, "v": v, "direction": trackers[0]}


def d_soba(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """x ← W (x − α h), y ← W (y − β D_y), v ← W (v − γ D_v), h ← (1 − θ) h + θ D_x, all from the same point."""
    x, y, v, h = s.x0, s.y0, 0 * s.y0, 0 * s.x0
    while True:
        yield {"x": x, "y": y, "v": v, "direction": h}
        d_x, d_y, d_v = soba_directions(s, x, y, v)
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

    at: list[Array] = [s.x0, s.y0, 0 * s.y0]
    before: list[Array | None] = [None] * 3
    d = d_before = trackers = soba_directions(s, *at)
    while True:
        along = [t if rule == "gt" else new for rule, t, new in zip(rules, trackers, d, strict=True)]
        yield {"x": at[0], "y": at[1], "v": at[2], "direction": along[0], "along.y": along[1], "along.v": along[2]}
        new_rows = [
            w @ now - a * t if rule == "gt" else move(rule, a, now, last, new, old)
            for rule, a, now, last, new, old, t in zip(rules, steps, at, before, d, d_before, trackers, strict=True)
        ]
        d_x, d_y, d_v = soba_directions(s, *new_rows)
        new = [(1 - cfg.theta) * d[0] + cfg.theta * d_x, d_y, d_v]
        trackers = [w @ t + n - o for t, n, o in zip(trackers, new, d, strict=True)]
        at, before, d, d_before = new_rows, at, new, d


def slam(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """One dual variable per edge, λ ← λ + ρ A x after the step of x; A has a row √w_ij (e_i − e_j) for every edge."""
    edges = [(i, j) for i in range(len(w)) for j in range(i) if w[i, j] > 0]
    a = np.array([np.sqrt(w[i, j]) * (np.eye(len(w))[i] - np.eye(len(w))[j]) for i, j in edges])
    x, y, dual, rho = s.x0, s.y0, np.zeros((len(edges), s.x0.shape[1])), cfg.gamma / cfg.eta_x
    while True:
        d = s.f_x(x, y) - s.g_xy(x, y, series(s, x, y, s.f_y(x, y), cfg))
        yield {"x": x, "y": y, "direction": d}
        x = x - cfg.eta_x * (d + a.T @ dual + rho * a.T @ (a @ x))
        dual = dual + rho * a @ x
        for _ in range(cfg.inner_steps):
            y = y - cfg.eta_y * s.g_y(x, y)


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


def soba(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """y, v and x at once, with the authors' sign of v: H v + ∇_y f = 0."""
    x, y, v = s.x0, s.y0, 0 * s.y0
    while True:
        d_x = s.f_x(x, y) + s.g_xy(x, y, v)
        yield {"x": x, "y": y, "direction": d_x}
        d_y, d_v = s.g_y(x, y), s.g_yy(x, y, v) + s.f_y(x, y)
        x, y, v = x - cfg.eta_x * d_x, y - cfg.eta_y * d_y, v - cfg.eta_v * d_v
