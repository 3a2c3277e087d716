"""Where each algorithm ends on the heterogeneous quadratic, against the point computed in closed form.

Tracked methods reach their point exactly: ψ's minimiser, the penalty solution, or the zero of the biased equation of
methods that invert local Hessians. Untracked ones stop at a distance that shrinks with the step sizes. Each claims
which; that it arrives there from the start is what `dbo verify` checks, on a ring in
tests/platform/verify/test_certificates.py.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.methods import sun_dsbo
from dbo.algorithms.methods.dsgda_gt import Triple
from dbo.algorithms.parts.soba import Directions
from dbo.algorithms.registry import algorithms
from dbo.platform.engine.local import LocalEngine
from dbo.platform.verify.certificates import verify
from dbo.tasks.problems.quadratic import QuadraticProblem, neumann

Array = Any
NETWORKED = [name for name, algorithm in algorithms().items() if algorithm.network != "single"]
STAY: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {}) for name in (
        "dsgda_gt", "f2ba", "mdbo", "sldbo", "vrdbo", "sparkle", "storm_pl", "sun_dsbo", "slam", "soba", "stocbio",
    )
} | {
    "sparkle extra": ("sparkle", {"rule_x": "extra", "rule_y": "extra", "rule_v": "extra"}),
    "sparkle gt": ("sparkle", {"rule_x": "gt", "rule_y": "gt", "rule_v": "gt", "eta_y": 0.1, "eta_v": 0.1}),
}


@pytest.mark.parametrize("topology", ["two_hop", "erdos_renyi"])
@pytest.mark.parametrize("name", NETWORKED)
def test_claims_hold_on_other_networks(name: str, topology: str) -> None:
    """From the common start every node arrives where the algorithm claims, or stops at a floor that shrinks."""
    assert verify(algorithms()[name], topology).failures == ()


def point(problem: QuadraticProblem, name: str, cfg: Any) -> Array:
    """Where the algorithm should end, in closed form."""
    claim = algorithms()[name].claim
    assert claim is not None
    return problem.find_zero(lambda x: claim.limit.hypergradient(problem, cfg, x))


def distance(engine: LocalEngine, target: Array) -> float:
    """The largest relative distance of any node's x."""
    rows = engine.rows("x")
    assert rows is not None
    return float(np.linalg.norm(rows - target, axis=1).max() / np.linalg.norm(target))


def test_the_points_differ(lab: Any) -> None:
    """Control: the limits that methods are compared with differ from one another."""
    problem = lab.quadratic()
    names = ["sldbo", "dsgda_gt", "mdbo", "gossip_dsbo", "bome"]
    points = [point(problem, name, lab.config(name)) for name in names]
    distances = [np.linalg.norm(a - b) / np.linalg.norm(a) for i, a in enumerate(points) for b in points[:i]]
    assert min(distances) > 0.01


def soba_at_rest(problem: QuadraticProblem, shard: Any, x: Array, y: Array) -> tuple[Array, Directions]:
    """v = H̄⁻¹ mean ∇_y f_i, and the local directions there; their means are 0, they are not."""
    v = np.linalg.solve(problem.hessians.mean(0), problem.y_star(x[0]) - problem.t.mean(0))
    rows = np.tile(v, (len(x), 1))
    return rows, Directions(
        x=shard.f_x(x, y) - shard.g_xy(x, y, rows), y=shard.g_y(x, y), v=shard.g_yy(x, y, rows) - shard.f_y(x, y)
    )


def sparkle_at_rest(start: Any, cfg: Any, x: Array, y: Array, v: Array, d: Directions) -> Any:
    """ed remembers ψ = s − a D, extra q = −a D, gt nothing; the trackers of gt are 0."""
    memory, track = {}, {}
    for part, s in (("x", x), ("y", y), ("v", v)):
        rule, a, local = getattr(cfg, f"rule_{part}"), getattr(cfg, f"eta_{part}"), getattr(d, part)
        memory[part] = {"ed": s - a * local, "extra": -a * local, "gt": s[:, :0]}[rule]
        track[part] = 0 * s if rule == "gt" else s[:, :0]
    return replace(start, x=x, y=y, v=v, d=d, memory=Directions(**memory), track=Directions(**track))


def moreau_at_rest(problem: QuadraticProblem, cfg: Any, x: Array) -> tuple[Array, Array]:
    """y and θ: c (y − θ) = −H̄⁻¹ (y − t̄) and H̄ θ + (θ − y) / γ = M x + e."""
    h, identity = problem.hessians.mean(0), np.eye(problem.dim_y)
    toward = np.linalg.inv(h) / cfg.c                           # θ = y + H̄⁻¹ (y − t̄) / c
    lower = h @ problem.y_star(x)
    left = (h + identity / cfg.prox) @ (identity + toward) - identity / cfg.prox
    y = np.linalg.solve(left, lower + (h + identity / cfg.prox) @ toward @ problem.t.mean(0))
    return y, y + toward @ (y - problem.t.mean(0))


def at_rest(lab: Any, label: str, topology: str) -> tuple[LocalEngine, Array]:
    """The engine with every node at the method's point and trackers at 0, the means of the local directions there."""
    name, changes = STAY[label]
    problem, cfg = lab.quadratic(), lab.config(name, **changes)
    engine = lab.engine(name, cfg, problem, topology)
    block = engine.local_blocks[0]
    shard, nodes, target = block.shard, len(block.ids), point(problem, name, cfg)

    def rows(v: Array) -> Array:
        return np.tile(v, (nodes, 1))

    x, y = rows(target), rows(problem.y_star(target))
    start = block.state
    if name in ("sldbo", "sparkle", "soba"):
        v, local = soba_at_rest(problem, shard, x, y)
        if name == "sldbo":
            state = replace(start, x=x, y=y, v=v, local=local, track=Directions(x=0 * x, y=0 * y, v=0 * y))
        elif name == "sparkle":
            state = sparkle_at_rest(start, cfg, x, y, v, local)
        else:
            state = replace(start, x=x, y=y, v=v, d=local)
    elif name == "stocbio":
        state = replace(start, x=x, y=y, u=0 * x)
    elif name == "slam":
        y = np.linalg.solve(problem.hessians, -shard.g_y(x, 0 * y)[:, :, None])[:, :, 0]
        p = (neumann(problem.hessians, cfg.neumann_terms, cfg.lipschitz) @ shard.f_y(x, y)[:, :, None])[:, :, 0]
        d = shard.f_x(x, y) - shard.g_xy(x, y, p)
        state = replace(start, x=x, y=y, d=d, p=-d)
    elif name == "sun_dsbo":
        y, theta = map(rows, moreau_at_rest(problem, cfg, target))
        local = sun_dsbo.directions(shard, cfg, x, y, theta)
        none = sun_dsbo.Triple(x=0 * x, y=0 * y, theta=0 * theta)
        state = replace(start, x=x, y=y, theta=theta, local=local, track=none)
    elif name in ("mdbo", "vrdbo"):
        p = (neumann(problem.hessians, cfg.neumann_terms, cfg.lipschitz) @ shard.f_y(x, y)[:, :, None])[:, :, 0]
        u, v = shard.f_x(x, y) - shard.g_xy(x, y, p), shard.g_y(x, y)
        state = replace(start, x=x, y=y, u=u, v=v, zf=0 * x, zg=0 * y)
    else:
        _, y_pen, z_pen = problem.penalty_minimisers(cfg.lam)
        y, z = rows(y_pen), rows(z_pen)
        u = shard.f_x(x, y) + cfg.lam * (shard.g_x(x, y) - shard.g_x(x, z))
        if name == "f2ba":
            state = replace(start, x=x, y=y, z=z, u=u)
        else:
            parts = Triple(x=u, y=shard.f_y(x, y) / cfg.lam + shard.g_y(x, y), z=shard.g_y(x, z))
            own = {"local": parts} if name == "dsgda_gt" else {"estimate": parts}
            state = replace(start, x=x, y=y, z=z, **own, track=Triple(x=0 * x, y=0 * y, z=0 * z))
    block.state = state
    return engine, target


@pytest.mark.parametrize("topology", ["ring", "two_hop", "erdos_renyi"])
@pytest.mark.parametrize("label", STAY)
def test_methods_without_a_floor_stay_where_they_should(lab: Any, label: str, topology: str) -> None:
    """At the method's point, in consensus and with trackers at 0, ten rounds move no node by more than 1e-12."""
    engine, target = at_rest(lab, label, topology)
    for round_ in range(1, 11):
        engine.advance(round_)
    assert distance(engine, target) < 1e-12
