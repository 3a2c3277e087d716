"""What several references share: penalty gradients, compression, Neumann series, directions, trackers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np

from dbo.algorithms.compression.compressors import RandK, TopK
from dbo.algorithms.protocol import Shard
from dbo.algorithms.rng import Key

Array: TypeAlias = Any
Rows: TypeAlias = dict[str, Array]


def penalty_gradients(s: Shard, cfg: Any) -> tuple[Callable[..., Array], Callable[..., Array]]:
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


def compress(s: Shard, q: Any, rows: Array, t: int, step: int, channel: str) -> Array:
    """Q of every row; top-k and rand-k of floats are written again here, the others are called."""
    if isinstance(q, RandK) and q.bits is None:
        return keep_sampled(s, rows, q.ratio, t, step, channel)
    if isinstance(q, TopK) and q.bits is None:
        return keep_top(rows, q.ratio)
    return q(rows, Key(s.seed, s.ids, t, step), channel).values


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


def track(
    w: Array, start: Sequence[Array], steps: Sequence[float], directions: Any, project: Any
) -> Iterator[tuple[list[Array], list[Array]]]:
    """For each variable var ← W var − step · T, then T ← W T + D_new − D_old; T = D at the start."""
    variables = list(start)
    trackers = old = directions(*variables)
    while True:
        yield variables, trackers
        variables = [w @ var - step * t for var, step, t in zip(variables, steps, trackers, strict=True)]
        variables[2] = project(variables[2])
        new = directions(*variables)
        trackers, old = [w @ t + d - d_old for t, d, d_old in zip(trackers, new, old, strict=True)], new


def soba_directions(s: Shard, x: Array, y: Array, v: Array) -> list[Array]:
    """D_x = ∇_x f − ∇²_xy g v,   D_y = ∇_y g,   D_v = ∇²_yy g v − ∇_y f."""
    return [s.f_x(x, y) - s.g_xy(x, y, v), s.g_y(x, y), s.g_yy(x, y, v) - s.f_y(x, y)]
