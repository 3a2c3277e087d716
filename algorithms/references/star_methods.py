"""References of the methods with a server: vectors of the server, rows of clients.

A round is: the server's step, down to the clients of the round, their work, up again. Absent clients keep what they
have. The last row of what a reference yields is the server's.
"""

from collections.abc import Iterator
from typing import Any
from zlib import crc32

import numpy as np

from dbo.algorithms.protocol import Shard
from dbo.algorithms.references.common import Array, Rows, compress, soba_directions


def present(s: Shard, cfg: Any, t: int) -> Array:
    """The clients of round t, as numbers."""
    number = max(1, round(cfg.participation * s.nodes))
    if number == s.nodes:
        return np.arange(s.nodes)
    draw = np.random.default_rng([s.seed, crc32(b"participation"), t])
    return draw.choice(s.nodes, size=number, replace=False)


def clip(v: Array, radius: float) -> Array:
    return v * min(1.0, radius / max(float(np.linalg.norm(v)), 1e-300))


class Copies:
    """What clients have received, and the server's own: rows of a name."""

    def __init__(self, s: Shard, **start: Array) -> None:
        self.rows = {name: np.tile(row, (s.nodes, 1)) for name, row in start.items()}

    def receive(self, who: Array, **sent: Array) -> None:
        for name, row in sent.items():
            self.rows[name][who] = row

    def show(self, **server: Array) -> Rows:
        return {name: np.vstack([self.rows[name], row]) for name, row in server.items()}


def at_server(s: Shard, row: Array) -> Array:
    return np.vstack([np.zeros((s.nodes, len(row))), row])


def simfbo(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """Clients: τ steps from the server's (x, y, v); server: x ← x − γ mean of the directions on the way."""
    x, y, v = s.x0[0], s.y0[0], 0 * s.y0[0]
    d, copies, t = [0 * x, 0 * y, 0 * v], Copies(s, x=x, y=y, v=v), 0
    while True:
        yield copies.show(x=x, y=y, v=v) | {"direction": at_server(s, d[0]), "d.v": at_server(s, d[2])}
        who = present(s, cfg, t)
        x, y, v = x - cfg.eta_x * d[0], y - cfg.eta_y * d[1], clip(v - cfg.eta_v * d[2], cfg.radius)
        copies.receive(who, x=x, y=y, v=v)
        at = [np.tile(row, (s.nodes, 1)) for row in (x, y, v)]
        seen = []
        for _ in range(cfg.local_steps):
            seen.append(soba_directions(s, *at))
            sizes = (cfg.local_x, cfg.local_y, cfg.local_v)
            at = [row - size * step for row, size, step in zip(at, sizes, seen[-1], strict=True)]
        d = [np.mean([step[k][who].mean(0) for step in seen], axis=0) for k in range(3)]
        t += 1


def fedbioacc(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """Clients: e ← D(new) + (1 − c) (e − D(old)) after each of I steps along e; server: means of variables and e."""
    z = [s.x0[0], s.y0[0], 0 * s.y0[0]]
    e, copies, t = [0 * row for row in z], Copies(s, x=z[0], y=z[1], v=z[2]), 0
    sizes, change = (cfg.eta_x, cfg.eta_y, cfg.eta_v), [0 * row for row in z]
    while True:
        direction = -change[0] / (cfg.eta_x * cfg.local_steps)
        yield copies.show(x=z[0], y=z[1], v=z[2]) | {
            "direction": at_server(s, direction), "e.y": at_server(s, e[1]), "e.v": at_server(s, e[2])}
        who = present(s, cfg, t)
        z = [row + step for row, step in zip(z, change, strict=True)]
        z[2] = clip(z[2], cfg.radius)
        copies.receive(who, x=z[0], y=z[1], v=z[2])
        at, own = ([np.tile(row, (s.nodes, 1)) for row in rows] for rows in (z, e))
        for k in range(cfg.local_steps):
            old = soba_directions(s, *at)
            if t == k == 0:
                own = old
            at = [row - size * step for row, size, step in zip(at, sizes, own, strict=True)]
            own = [new + (1 - cfg.theta) * (est - before)
                   for new, est, before in zip(soba_directions(s, *at), own, old, strict=True)]
        change = [rows[who].mean(0) - row for rows, row in zip(at, z, strict=True)]
        e = [rows[who].mean(0) for rows in own]
        t += 1


def fednest(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """FedOut along the last h, T times FedInn, FedIHGP with means in every factor, then h of the clients."""
    x, y, h = s.x0[0], s.y0[0], 0 * s.x0[0]
    copies, t = Copies(s, x=x, y=y), 0

    def rows(v: Array) -> Array:
        return np.tile(v, (s.nodes, 1))

    while True:
        yield copies.show(x=x, y=y) | {"direction": at_server(s, h)}
        who = present(s, cfg, t)
        x_i, x0 = rows(x), rows(x)
        for _ in range(cfg.local_steps):
            x_i = x_i - cfg.eta_x * (s.f_x(x_i, rows(y)) - s.f_x(x0, rows(y)) + h)
        x = x_i[who].mean(0)
        for _ in range(cfg.inner_steps):
            y_i, y0 = rows(y), rows(y)
            q = s.g_y(rows(x), y0)[who].mean(0)
            for _ in range(cfg.local_steps):
                y_i = y_i - cfg.eta_y * (s.g_y(rows(x), y_i) - s.g_y(rows(x), y0) + q)
            y = y_i[who].mean(0)
        copies.receive(who, x=x, y=y)
        term = s.f_y(rows(x), rows(y))[who].mean(0)
        p = term / cfg.lipschitz
        for _ in range(cfg.neumann_terms - 1):
            term = (term - s.g_yy(rows(x), rows(y), rows(term)) / cfg.lipschitz)[who].mean(0)
            p = p + term / cfg.lipschitz
        h = (s.f_x(rows(x), rows(y)) - s.g_xy(rows(x), rows(y), rows(p)))[who].mean(0)
        t += 1


def aggitd(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """N steps of y along the mean gradient; from step Q on z ← mean(z − λ H z), plus ∇_y f if the series is whole."""
    x, y, h = s.x0[0], s.y0[0], 0 * s.x0[0]
    copies, t = Copies(s, x=x, y=y), 0

    def rows(v: Array) -> Array:
        return np.tile(v, (s.nodes, 1))

    while True:
        yield copies.show(x=x, y=y) | {"direction": at_server(s, h)}
        who = present(s, cfg, t)
        x, n = x - cfg.eta_x * h, cfg.inner_steps
        draw = np.random.default_rng([s.seed, crc32(b"aggitd"), t])
        first, z = 0 if cfg.series == "whole" else int(draw.integers(n)), 0 * y
        for k in range(n):
            f_y, factor = s.f_y(rows(x), rows(y)), rows(z) - cfg.eta_z * s.g_yy(rows(x), rows(y), rows(z))
            if k == first:
                z = f_y[who].mean(0)
            elif k > first:
                z = (factor + f_y if cfg.series == "whole" else factor)[who].mean(0)
            y = y - cfg.eta_y * s.g_y(rows(x), rows(y))[who].mean(0)
        copies.receive(who, x=x, y=y)
        p = cfg.eta_z * z * (1 if cfg.series == "whole" else n)
        h = (s.f_x(rows(x), rows(y)) - s.g_xy(rows(x), rows(y), rows(p)))[who].mean(0)
        t += 1


def ef_soba(s: Shard, w: Array, cfg: Any) -> Iterator[Rows]:
    """Clients upload Q(D_i − m_i) and add it to m_i; the server steps along the mean of all memories."""
    z = [s.x0[0], s.y0[0], 0 * s.y0[0]]
    memory = [np.zeros((s.nodes, len(row))) for row in z]
    sizes, copies, t = (cfg.eta_x, cfg.eta_y, cfg.eta_v), Copies(s, x=z[0], y=z[1], v=z[2]), 0
    while True:
        yield copies.show(x=z[0], y=z[1], v=z[2]) | {
            "direction": np.vstack([memory[0], memory[0].mean(0)]), "m.v": np.vstack([memory[2], memory[2].mean(0)])}
        who = present(s, cfg, t)
        z = [row - size * m.mean(0) for row, size, m in zip(z, sizes, memory, strict=True)]
        z[2] = clip(z[2], cfg.radius)
        copies.receive(who, x=z[0], y=z[1], v=z[2])
        directions = soba_directions(s, *(np.tile(row, (s.nodes, 1)) for row in z))
        for m, d, channel in zip(memory, directions, "xyv", strict=True):
            m[who] += compress(s, cfg.compressor, d - m, t, 0, channel)[who]
        t += 1
