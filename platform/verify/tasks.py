"""Check a task: its derivatives, and the contracts that every engine and algorithm relies on.

The problem of an experiment is built in float64 and asked at small random points: its start plus 0.1 times a normal
vector, another one for each node. Each check is a line: what was measured, and what to do if it fails.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from dbo.algorithms.api import Array
from dbo.algorithms.registry import algorithms
from dbo.platform.config import overrides as overriding
from dbo.platform.config.experiment import Experiment
from dbo.platform.config.plugins import locate_error
from dbo.platform.engine.device import numeric_context
from dbo.platform.engine.local import LocalEngine
from dbo.platform.errors import InputError
from dbo.platform.network.topology import TOPOLOGIES, build_network
from dbo.platform.runs.preparation import prepare
from dbo.platform.verify.differences import (
    STEPS,
    TOLERANCE,
    Difference,
    compare_gradient,
    compare_product,
    make_directions,
)
from dbo.platform.verify.shipping import ShippingError, compute_losses, ship_problem
from dbo.tasks.api import Batches, Problem, Shard

DEFAULTS: Mapping[str, Any] = {"nodes": 4, "partition": {"name": "iid"}}     # of what the command line leaves out
VALUES, GRADIENTS, PRODUCTS = ("f", "g"), ("f_x", "f_y", "g_x", "g_y"), ("g_yy", "g_xy")
ORACLES = (*VALUES, *GRADIENTS, *PRODUCTS)
POINT = 0.1             # size of the random step from the start
DIRECTIONS = 3          # per derivative and node
VECTORS = 20            # for the smallest curvature
SAME = 1e-10            # relative: sums may run in another order
ISOLATED = 1e-12        # relative: rows that must not change at all
SINGLE = 1e-3           # relative: float32 against float64
ROUNDS = 3
MAX_BATCHES = 64        # of an epoch
LEGEND = (
    f"Points: the start + {POINT} × normal, float64. Derivatives: fourth-order central differences along random "
    f"directions, relative {TOLERANCE:g} of each node; steps {max(STEPS):g} … {min(STEPS):g}, the best one counts, so "
    f"that losses with kinks (relu) are measured beside the kinks."
)


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    passed: bool | None     # None: does not apply to this task
    measured: str
    advice: str = ""

    def format(self) -> str:
        """Return the line that a user reads."""
        verdict = "–" if self.passed is None else "ok" if self.passed else "FAILED"
        return f"{verdict:<7}{self.name:<15}{self.measured}" + (f": {self.advice}" if self.passed is False else "")


def read_experiment(task: str, plugins: tuple[str, ...], overrides: list[str]) -> Experiment:
    """Return the experiment whose task is checked; few nodes and equal shares of the data unless given otherwise."""
    given = overriding.parse(overrides)
    base = {**DEFAULTS, "task": {"name": task}, "engine": {"name": "local"}, "plugins": list(plugins)}
    return Experiment(**{**overriding.apply(base, given), "dtype": "float64"})


def check_task(experiment: Experiment) -> Iterator[Check]:
    """Yield the results of all checks; those that build on a failed one are left out."""
    at = _Point(experiment)
    start = _run("start", at, _check_start)
    yield start
    if not start.passed:
        return
    for name in GRADIENTS:
        yield _run(name, at, lambda at, name=name: _check_gradient(at, name))      # type: ignore[misc]
    for name, check in _CHECKS.items():
        yield _run(name, at, check)


@dataclass(frozen=True)
class _Point:
    """A problem with all its rows, and random rows to ask it at."""

    experiment: Experiment
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def build(self, dtype: str = "float64") -> Problem:
        return prepare(Experiment(**{**self.experiment.given, "dtype": dtype})).problem

    @cached_property
    def problem(self) -> Problem:
        return self.build()

    @cached_property
    def shard(self) -> Shard:
        return self.problem.shard(range(self.problem.nodes))

    @cached_property
    def rows(self) -> tuple[Array, Array, Array]:
        """x, y, and v for the products."""
        x, y = (start + POINT * self.rng.standard_normal(start.shape) for start in (self.shard.x0, self.shard.y0))
        return x, y, make_directions(y, self.rng)

    @cached_property
    def answers(self) -> dict[str, Array]:
        """What every oracle returns at the random rows."""
        return evaluate(self.shard, *self.rows)

    def ask_alone(self, node: int) -> dict[str, Array]:
        """Return the same for one node in a block of its own."""
        return evaluate(self.problem.shard([node]), *(rows[[node]] for rows in self.rows))


def evaluate(shard: Shard, x: Array, y: Array, v: Array, names: tuple[str, ...] = ORACLES) -> dict[str, Array]:
    """Return the values, gradients and products of a shard."""
    oracles: dict[str, Callable[..., Array]] = {
        "f": shard.f, "g": shard.g, "f_x": shard.f_x, "f_y": shard.f_y, "g_x": shard.g_x, "g_y": shard.g_y,
        "g_yy": shard.g_yy, "g_xy": shard.g_xy,
    }
    return {name: oracles[name](x, y, v) if name in PRODUCTS else oracles[name](x, y) for name in names}


def _run(name: str, at: _Point, check: Callable[[_Point], Check]) -> Check:
    """Run a check; an exception of the task is a failure with its place."""
    try:
        with np.errstate(all="ignore"), numeric_context(ThreadpoolController(), 1):
            return check(at)
    except InputError:
        raise
    except ShippingError as error:
        return Check(name, False, str(error), _ADVICE[name])
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        place = locate_error(error)
        return Check(name, False, f"raises {type(error).__name__}: {reason}" + (f" ({place})" if place else ""),
                     _ADVICE.get(name, _ADVICE["derivative"]))


def _judge(name: str, passed: bool, measured: str, advice: str | None = None) -> Check:
    return Check(name, passed, measured, "" if passed else _ADVICE[advice or name])


# ---- start and derivatives -------------------------------------------------------------------------------------------


def _check_start(at: _Point) -> Check:
    """Shapes and types, and finite values at a random point."""
    shard, problem = at.shard, at.problem
    shapes = {
        "x0": (shard.nodes, problem.dim_x), "y0": (shard.nodes, problem.dim_y),
        **dict.fromkeys(VALUES, (shard.nodes,)), **dict.fromkeys(("f_x", "g_x", "g_xy"), (shard.nodes, problem.dim_x)),
        **dict.fromkeys(("f_y", "g_y", "g_yy"), (shard.nodes, problem.dim_y)),
    }
    for name, rows in {"x0": shard.x0, "y0": shard.y0, **at.answers}.items():
        if tuple(rows.shape) != shapes[name] or rows.dtype != np.float64:
            return _judge("start", False, f"{name} is {rows.dtype} {tuple(rows.shape)}, not float64 {shapes[name]}")
        if not np.isfinite(rows).all():
            return _judge("start", False, f"{name} is not finite at a random point near the start")
    return _judge("start", True, f"{shard.nodes} nodes, {problem.dim_x} upper and {problem.dim_y} lower variables")


def _check_gradient(at: _Point, name: str) -> Check:
    x, y, _ = at.rows
    value = at.shard.f if name[0] == "f" else at.shard.g
    gradient = at.answers[name]
    found = [
        compare_gradient(lambda p: value(p, y), x, gradient, at.rng) if name[2] == "x"
        else compare_gradient(lambda p: value(x, p), y, gradient, at.rng)
        for _ in range(DIRECTIONS)
    ]
    return _judge_difference(name, found, f"differences of {name[0]}")


def _check_hessian(at: _Point) -> Check:
    x, y, _ = at.rows
    found = []
    for _ in range(DIRECTIONS):
        v = make_directions(y, at.rng)
        found.append(compare_product(lambda p: at.shard.g_y(x, p), y, v, at.shard.g_yy(x, y, v)))
    return _judge_difference("g_yy", found, "differences of g_y")


def _check_jacobian(at: _Point) -> Check:
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
    return _judge(name, worst.is_small, f"{worst.error:.1e} from {against}{kinks}", "derivative")


def _check_symmetry(at: _Point) -> Check:
    x, y, v = at.rows
    u = make_directions(y, at.rng)
    one, other = at.shard.g_yy(x, y, v), at.shard.g_yy(x, y, u)
    size = np.maximum(np.linalg.norm(one, axis=1), np.linalg.norm(other, axis=1))
    error = float(np.max(np.abs(np.sum(u * one - v * other, axis=1)) / np.maximum(size, np.finfo(float).tiny)))
    return _judge("symmetry", error <= SAME, f"⟨u, g_yy v⟩ and ⟨v, g_yy u⟩ differ by {error:.1e}")


def _check_weighted(at: _Point) -> Check:
    """The fused gradient must be the sum that it replaces."""
    h_y = at.shard.h_y
    if h_y is None:
        return Check("h_y", None, "this task has no fused gradient")
    x, y, _ = at.rows
    error = _distance(h_y(x, y, 0.7, 1.3), 0.7 * at.answers["f_y"] + 1.3 * at.answers["g_y"])
    return _judge("h_y", error <= SAME, f"{error:.1e} from the sum of f_y and g_y")


def _check_convexity(at: _Point) -> Check:
    if not at.experiment.parts.task.strongly_convex:
        return Check("convexity", None, "the class does not set strongly_convex = True")
    x, y, _ = at.rows
    smallest = np.inf
    for _ in range(VECTORS):
        v = make_directions(y, at.rng)
        smallest = min(smallest, float(np.min(np.sum(v * at.shard.g_yy(x, y, v), axis=1))))
    return _judge("convexity", smallest > 0, f"smallest ⟨v, g_yy v⟩ of {VECTORS} random unit vectors is {smallest:.2g}")


# ---- rows, batches, repetition ---------------------------------------------------------------------------------------


def _check_rows(at: _Point) -> Check:
    """Another point or other samples of one node change nothing elsewhere; rows alone are the rows of the stack."""
    shard, nodes = at.shard, at.shard.nodes
    for node in range(nodes):
        for name, rows in at.ask_alone(node).items():
            if (error := _distance(rows, at.answers[name][[node]])) > SAME:
                return _judge("rows", False, f"{name} of node {node} alone and stacked differ by {error:.1e}")
    if nodes == 1:
        return Check("rows", None, "a single node")
    changed = [rows.copy() for rows in at.rows]
    for rows in changed:
        rows[1] *= -3.0
    others = np.arange(nodes) != 1
    if name := _find_change(at.answers, evaluate(shard, *changed), others):
        return _judge("rows", False, f"{name} of other nodes changes with the variables of node 1")
    lower, upper = shard.sizes
    if min(lower.min(), upper.min()) >= 2:
        first = [np.zeros((nodes, 1), dtype=np.int64) for _ in range(2)]
        last = [numbers.copy() for numbers in first]
        for numbers in last:
            numbers[1] = 1
        if name := _find_change(*(evaluate(shard.subset(*each), *at.rows) for each in (first, last)), others):
            return _judge("rows", False, f"{name} of other nodes changes with the samples of node 1")
    return _judge("rows", True, f"{nodes} nodes alone and stacked agree; one changes nothing of another")


def _find_change(before: Mapping[str, Array], after: Mapping[str, Array], rows: Array) -> str | None:
    return next((n for n, values in before.items() if not _distance(after[n][rows], values[rows]) <= ISOLATED), None)


def _check_batches(at: _Point) -> Check:
    """The mean over the batches of an epoch is the full gradient; the same key draws the same batch."""
    if not any(int(size.min()) for size in at.shard.sizes):
        return Check("batches", None, "this task has no samples")
    checked = 0
    for node in range(at.shard.nodes):
        alone, rows = at.problem.shard([node]), tuple(r[[node]] for r in at.rows)
        full = evaluate(alone, *rows)
        for level, size in zip(("lower", "upper"), alone.sizes, strict=True):
            count = next((k for k in range(2, MAX_BATCHES + 1) if int(size[0]) % k == 0), None)
            if count is None:
                continue
            batches = Batches(**{level: int(size[0]) // count}, order="epoch")
            names = tuple(name for name in (*GRADIENTS, *PRODUCTS) if name[0] == ("f" if level == "upper" else "g"))
            sampled = [evaluate(alone.draw_batch(batches, round_, 0), *rows, names) for round_ in range(count)]
            for name in names:
                error = _distance(np.mean([one[name] for one in sampled], axis=0), full[name])
                if not error <= SAME:
                    return _judge("batches", False,
                                  f"the mean of {name} over an epoch of node {node} is {error:.1e} from the full one")
            again = evaluate(alone.draw_batch(batches, 1, 0), *rows, names)
            if not all(np.array_equal(again[name], sampled[1][name]) for name in again):
                return _judge("batches", False, "the same key gives another batch")
            checked += 1
    if not checked:
        return Check("batches", None, f"no node's number of samples has a divisor ≤ {MAX_BATCHES}; choose other nodes")
    return _judge("batches", True, f"epoch mean = full gradient on {checked} of {2 * at.shard.nodes} levels; "
                  f"the same key draws the same batch")


def _check_determinism(at: _Point) -> Check:
    answers, copies = at.answers, [rows.copy() for rows in at.rows]
    if name := _find_other_bits(answers, evaluate(at.shard, *at.rows)):
        return _judge("determinism", False, f"a second call of {name} gives other bits")
    if not all(np.array_equal(rows, copy) for rows, copy in zip(at.rows, copies, strict=True)):
        return _judge("determinism", False, "an oracle writes into its arguments")
    second = at.build()
    shard = second.shard(range(second.nodes))
    starts = {"x0": at.shard.x0, "y0": at.shard.y0}, {"x0": shard.x0, "y0": shard.y0}
    if name := _find_other_bits(*starts) or _find_other_bits(answers, evaluate(shard, *at.rows)):
        return _judge("determinism", False, f"a second build gives another {name}")
    x, y, _ = at.rows
    if name := _find_other_bits(at.problem.evaluate(x, y), second.evaluate(x, y)):
        return _judge("determinism", False, f"a second build gives another {name}")
    return _judge("determinism", True, "two builds and two calls give equal bits")


def _find_other_bits(one: Mapping[str, Array], other: Mapping[str, Array]) -> str | None:
    return next((name for name, rows in one.items() if not np.array_equal(rows, other[name], equal_nan=True)), None)


def _check_packing(at: _Point) -> Check:
    nodes = at.problem.nodes
    if nodes == 1:
        return Check("packing", None, "a single node")
    sizes = [int(min(size)) for size in at.problem.sample_sizes()]
    lower, upper = (min(8, size) or None for size in sizes)
    error = max(_compare_packings(at, Batches()), _compare_packings(at, Batches(lower=lower, upper=upper)))
    return _judge("packing", error <= SAME, f"{ROUNDS} rounds of c2dfb: one block of {nodes} nodes and {nodes} blocks "
                  f"of one differ by {error:.1e}")


def _compare_packings(at: _Point, batches: Batches) -> float:
    """Return how far apart the two runs end; small steps and no compression, whose ties would magnify rounding."""
    nodes = at.problem.nodes
    algorithm = algorithms()["c2dfb"]
    section = {
        "name": "c2dfb", "inner_steps": 2, "eta_in": 0.01, "eta_out": 0.01, "gamma_in": 0.5, "gamma_out": 0.5,
        "compressor": {"name": "identity"},
    }
    config = Experiment(**{**at.experiment.given, "algorithm": section}).parts.config
    network = build_network(TOPOLOGIES["ring"]().graph(nodes, 0))
    ends = []
    for blocks in ([list(range(nodes))], [[node] for node in range(nodes)]):
        engine = LocalEngine(algorithm, config, at.problem, network, blocks, batches=batches)
        for round_ in range(1, ROUNDS + 1):
            engine.advance(round_)
        ends.append([np.asarray(engine.rows(name)) for name in ("x", "y")])
    return max(_distance(one, other) for one, other in zip(*ends, strict=True))


# ---- float32, other processes, metrics -------------------------------------------------------------------------------


def _check_float32(at: _Point) -> Check:
    problem = at.build("float32")
    shard = problem.shard(range(problem.nodes))
    rows = [rows.astype(np.float32) for rows in at.rows]
    expected = evaluate(at.shard, *(each.astype(np.float64) for each in rows))
    worst = 0.0
    for name, found in {"x0": shard.x0, "y0": shard.y0, **evaluate(shard, *rows)}.items():
        if found.dtype != np.float32:
            return _judge("float32", False, f"{name} is {found.dtype} in a float32 experiment")
        if name in expected:
            worst = max(worst, _distance(found.astype(np.float64), expected[name]))
    return _judge("float32", worst <= SINGLE, f"{worst:.1e} from float64")


def _check_shipping(at: _Point) -> Check:
    here, there = compute_losses(at.problem), ship_problem(at.problem, at.experiment.plugins)
    error = _distance(np.array([there]), np.array([here]))
    return _judge("shipping", error <= SAME, f"pickled; losses in another process differ by {error:.1e}")


def _check_metrics(at: _Point) -> Check:
    x, y, _ = at.rows
    found, alone = at.problem.evaluate(x, y), at.problem.evaluate(x[:1], y[:1])
    declared = at.experiment.parts.task.directions
    for name, values in found.items():
        if name not in declared:
            return _judge("metrics", False, f"{name} has no declared direction")
        if np.shape(values) != (len(x),) or not np.isfinite(values).all():
            return _judge("metrics", False, f"{name} is not one finite number per model")
        if not _distance(alone[name], values[:1]) <= SAME:
            return _judge("metrics", False, f"{name} of a model depends on the other models")
    own = at.problem.task_metrics(x[0], y[0])
    if wrong := next((name for name, value in own.items() if not np.isfinite(value)), None):
        return _judge("metrics", False, f"{wrong} is not finite")
    return _judge("metrics", True, ", ".join(f"{name} ({declared[name]})" for name in found) + " are finite")


def _distance(one: Array, other: Array) -> float:
    """Return the largest distance of two rows, relative to their norm (at least a millionth of the largest row)."""
    a, b = (np.asarray(rows, dtype=np.float64).reshape(len(rows), -1) for rows in (one, other))
    norms = np.linalg.norm(b, axis=1)
    size = np.maximum(norms, max(1e-6 * float(norms.max(initial=0.0)), np.finfo(float).tiny))
    error = float(np.max(np.linalg.norm(a - b, axis=1) / size, initial=0.0))
    return error if np.isfinite(error) else np.inf


_CHECKS: dict[str, Callable[[_Point], Check]] = {
    "g_yy": _check_hessian, "g_xy": _check_jacobian, "symmetry": _check_symmetry, "h_y": _check_weighted,
    "convexity": _check_convexity, "rows": _check_rows, "batches": _check_batches, "determinism": _check_determinism,
    "packing": _check_packing, "float32": _check_float32, "shipping": _check_shipping, "metrics": _check_metrics,
}
_ADVICE = {
    "start": "return finite arrays with a row per node, in the dtype that the experiment asks for",
    "derivative": "derive it again, or write the task as a dbo.TorchTask; the loss must be computed in float64 and "
                  "without detach() or no_grad()",
    "g_yy": "derive it again, or write the task as a dbo.TorchTask",
    "g_xy": "it is ∂/∂x ⟨∇_y g, v⟩; derive it again, or write the task as a dbo.TorchTask",
    "symmetry": "a Hessian is symmetric; check the indices of g_yy",
    "h_y": "it must be f_weight ∇_y f + g_weight ∇_y g",
    "convexity": "add a ridge on y to the lower loss, or set strongly_convex = False",
    "rows": "row i may use the variables and the samples of node i alone; no mean over the stacked rows",
    "batches": "a loss must be a mean over its samples, plus terms without samples; draws depend on the key alone",
    "determinism": "draw random numbers from the seed or the generator that is passed, and keep no state between calls",
    "packing": "an oracle must give the same rows whichever nodes it hosts, and keep no state between calls",
    "float32": "keep the dtype of the arguments: no .double(), no float64 constants as arrays",
    "shipping": "keep no locks, files, generators or lambdas in the task or its problem; load such things when used",
    "metrics": 'return one number per model, and declare directions = {"name": "max" or "min"} in the class',
}
