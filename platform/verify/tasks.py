"""Check a task: its derivatives, and the contracts that every engine and algorithm relies on.

The problem of an experiment is built in float64 and asked at small random points: its start plus 0.1 times a normal
vector, another one for each node. Each check is a line: what was measured, and what to do if it fails.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from dbo.platform.config import overrides as overriding
from dbo.platform.config.experiment import Experiment
from dbo.platform.config.plugins import locate_error
from dbo.platform.engine.device import numeric_context
from dbo.platform.errors import InputError
from dbo.platform.verify import task_contracts as contracts
from dbo.platform.verify.check import Check
from dbo.platform.verify.differences import (
    STEPS,
    TOLERANCE,
    Difference,
    compare_gradient,
    compare_product,
    make_directions,
)
from dbo.platform.verify.shipping import ShippingError
from dbo.platform.verify.task_contracts import SAME
from dbo.platform.verify.task_point import ADVICE, GRADIENTS, POINT, VALUES, Point, judge, measure_distance

__all__ = ["LEGEND", "Check", "check_task", "read_experiment"]

DEFAULTS: Mapping[str, Any] = {"nodes": 4, "partition": {"name": "iid"}}     # of what the command line leaves out
DIRECTIONS = 3          # per derivative and node
VECTORS = 20            # for the smallest curvature
LEGEND = (
    f"Points: the start + {POINT} × normal, float64. Derivatives: fourth-order central differences along random "
    f"directions, relative {TOLERANCE:g} of each node; steps {max(STEPS):g} … {min(STEPS):g}, the best one counts, so "
    f"that losses with kinks (relu) are measured beside the kinks."
)


def read_experiment(task: str, plugins: tuple[str, ...], overrides: list[str]) -> Experiment:
    """Return the experiment whose task is checked; few nodes and equal shares of the data unless given otherwise."""
    given = overriding.parse(overrides)
    base = {**DEFAULTS, "task": {"name": task}, "engine": {"name": "local"}, "plugins": list(plugins)}
    return Experiment(**{**overriding.apply(base, given), "dtype": "float64"})


def check_task(experiment: Experiment) -> Iterator[Check]:
    """Yield the results of all checks; those that build on a failed one are left out."""
    at = Point(experiment)
    for name, check in _FIRST.items():
        found = _run(name, at, check)
        yield found
        if not found.passed:
            return
    for name in GRADIENTS:
        yield _run(name, at, lambda at, name=name: _check_gradient(at, name))      # type: ignore[misc]
    for name, check in _CHECKS.items():
        yield _run(name, at, check)


def _run(name: str, at: Point, check: Callable[[Point], Check]) -> Check:
    """Run a check; an exception of the task is a failure with its place."""
    try:
        with np.errstate(all="ignore"), numeric_context(ThreadpoolController(), 1):
            return check(at)
    except InputError:
        raise
    except ShippingError as error:
        return Check(name, False, str(error), ADVICE[name])
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        place = locate_error(error)
        return Check(name, False, f"raises {type(error).__name__}: {reason}" + (f" ({place})" if place else ""),
                     ADVICE.get(name, ADVICE["derivative"]))


# ---- start and derivatives -------------------------------------------------------------------------------------------


def _check_start(at: Point) -> Check:
    """Shapes and types, and finite values at a random point."""
    shard, problem = at.shard, at.problem
    shapes = {
        "x0": (shard.nodes, problem.dim_x), "y0": (shard.nodes, problem.dim_y),
        **dict.fromkeys(VALUES, (shard.nodes,)), **dict.fromkeys(("f_x", "g_x", "g_xy"), (shard.nodes, problem.dim_x)),
        **dict.fromkeys(("f_y", "g_y", "g_yy"), (shard.nodes, problem.dim_y)),
    }
    for name, rows in {"x0": shard.x0, "y0": shard.y0, **at.answers}.items():
        if tuple(rows.shape) != shapes[name] or rows.dtype != np.float64:
            return judge("start", False, f"{name} is {rows.dtype} {tuple(rows.shape)}, not float64 {shapes[name]}")
        if not np.isfinite(rows).all():
            return judge("start", False, f"{name} is not finite at a random point near the start")
    return judge("start", True, f"{shard.nodes} nodes, {problem.dim_x} upper and {problem.dim_y} lower variables")


def _check_gradient(at: Point, name: str) -> Check:
    x, y, _ = at.rows
    value = at.shard.f if name[0] == "f" else at.shard.g
    gradient = at.answers[name]
    found = [
        compare_gradient(lambda p: value(p, y), x, gradient, at.rng) if name[2] == "x"
        else compare_gradient(lambda p: value(x, p), y, gradient, at.rng)
        for _ in range(DIRECTIONS)
    ]
    return _judge_difference(name, found, f"differences of {name[0]}")


def _check_hessian(at: Point) -> Check:
    x, y, _ = at.rows
    found = []
    for _ in range(DIRECTIONS):
        v = make_directions(y, at.rng)
        found.append(compare_product(lambda p: at.shard.g_y(x, p), y, v, at.shard.g_yy(x, y, v)))
    return _judge_difference("g_yy", found, "differences of g_y")


def _check_jacobian(at: Point) -> Check:
    x, y, _ = at.rows
    found = []
    for _ in range(DIRECTIONS):
        v = make_directions(y, at.rng)
        found.append(compare_gradient(
            lambda p, v=v: np.sum(at.shard.g_y(p, y) * v, axis=1), x, at.shard.g_xy(x, y, v), at.rng))    # type: ignore[misc]
    return _judge_difference("g_xy", found, "differences of ⟨g_y, v⟩")


def _judge_difference(name: str, found: list[Difference], against: str) -> Check:
    worst = max(found, key=lambda one: one.error if np.isfinite(one.error) else np.inf)
    shortest = min(one.step for one in found)
    kinks = f", steps down to {shortest:g} (kinks)" if worst.is_small and shortest < STEPS[0] else ""
    return judge(name, worst.is_small, f"{worst.error:.1e} from {against}{kinks}", "derivative")


def _check_symmetry(at: Point) -> Check:
    x, y, v = at.rows
    u = make_directions(y, at.rng)
    one, other = at.shard.g_yy(x, y, v), at.shard.g_yy(x, y, u)
    size = np.maximum(np.linalg.norm(one, axis=1), np.linalg.norm(other, axis=1))
    error = float(np.max(np.abs(np.sum(u * one - v * other, axis=1)) / np.maximum(size, np.finfo(float).tiny)))
    return judge("symmetry", error <= SAME, f"⟨u, g_yy v⟩ and ⟨v, g_yy u⟩ differ by {error:.1e}")


def _check_weighted(at: Point) -> Check:
    """The fused gradient must be the sum that it replaces."""
    h_y = at.shard.h_y
    if h_y is None:
        return Check("h_y", None, "this task has no fused gradient")
    x, y, _ = at.rows
    error = measure_distance(h_y(x, y, 0.7, 1.3), 0.7 * at.answers["f_y"] + 1.3 * at.answers["g_y"])
    return judge("h_y", error <= SAME, f"{error:.1e} from the sum of f_y and g_y")


def _check_convexity(at: Point) -> Check:
    if not at.experiment.parts.task.strongly_convex:
        return Check("convexity", None, "the class does not set strongly_convex = True")
    x, y, _ = at.rows
    smallest = np.inf
    for _ in range(VECTORS):
        v = make_directions(y, at.rng)
        smallest = min(smallest, float(np.min(np.sum(v * at.shard.g_yy(x, y, v), axis=1))))
    return judge("convexity", smallest > 0, f"smallest ⟨v, g_yy v⟩ of {VECTORS} random unit vectors is {smallest:.2g}")


def _check_metrics(at: Point) -> Check:
    x, y, _ = at.rows
    found, alone = at.problem.evaluate(x, y), at.problem.evaluate(x[:1], y[:1])
    declared = at.experiment.parts.task.directions
    for name, values in found.items():
        if name not in declared:
            return judge("metrics", False, f"{name} has no declared direction")
        if np.shape(values) != (len(x),) or not np.isfinite(values).all():
            return judge("metrics", False, f"{name} is not one finite number per model")
        if not measure_distance(alone[name], values[:1]) <= SAME:
            return judge("metrics", False, f"{name} of a model depends on the other models")
    own = at.problem.task_metrics(x[0], y[0])
    if wrong := next((name for name, value in own.items() if not np.isfinite(value)), None):
        return judge("metrics", False, f"{wrong} is not finite")
    return judge("metrics", True, ", ".join(f"{name} ({declared[name]})" for name in found) + " are finite")


_FIRST: dict[str, Callable[[Point], Check]] = {"start": _check_start, "determinism": contracts.check_determinism}
_CHECKS: dict[str, Callable[[Point], Check]] = {
    "g_yy": _check_hessian, "g_xy": _check_jacobian, "symmetry": _check_symmetry, "h_y": _check_weighted,
    "convexity": _check_convexity, "rows": contracts.check_rows, "batches": contracts.check_batches,
    "packing": contracts.check_packing, "float32": contracts.check_float32, "shipping": contracts.check_shipping,
    "metrics": _check_metrics,
}
