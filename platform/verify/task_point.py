"""Hold what the checks of a task share: the problem, the random rows that it is asked at, and how a check reports."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from dbo.algorithms.api import Array
from dbo.platform.config.experiment import Experiment
from dbo.platform.runs.preparation import prepare
from dbo.platform.verify.check import Check
from dbo.platform.verify.differences import make_directions
from dbo.tasks.api import Problem, Shard

VALUES, GRADIENTS, PRODUCTS = ("f", "g"), ("f_x", "f_y", "g_x", "g_y"), ("g_yy", "g_xy")
ORACLES = (*VALUES, *GRADIENTS, *PRODUCTS)
POINT = 0.1             # size of the random step from the start
ADVICE = {
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


@dataclass(frozen=True)
class Point:
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
        return evaluate(self.shard, self.rows)

    def ask_alone(self, node: int) -> dict[str, Array]:
        """Return the same for one node in a block of its own."""
        return evaluate(self.problem.shard([node]), [rows[[node]] for rows in self.rows])


def evaluate(shard: Shard, rows: Sequence[Array], names: tuple[str, ...] = ORACLES) -> dict[str, Array]:
    """Return the values, gradients and products of a shard at rows x, y, v."""
    x, y, v = rows
    oracles: dict[str, Callable[..., Array]] = {
        "f": shard.f, "g": shard.g, "f_x": shard.f_x, "f_y": shard.f_y, "g_x": shard.g_x, "g_y": shard.g_y,
        "g_yy": shard.g_yy, "g_xy": shard.g_xy,
    }
    return {name: oracles[name](x, y, v) if name in PRODUCTS else oracles[name](x, y) for name in names}


def judge(name: str, passed: bool, measured: str, advice: str | None = None) -> Check:
    """Return the result of a check; a failed one has the advice of its name, or of another."""
    return Check(name, passed, measured, "" if passed else ADVICE[advice or name])


def measure_distance(one: Array, other: Array) -> float:
    """Return the largest distance of two rows, relative to their norm (at least a millionth of the largest row)."""
    a, b = (np.asarray(rows, dtype=np.float64).reshape(len(rows), -1) for rows in (one, other))
    norms = np.linalg.norm(b, axis=1)
    size = np.maximum(norms, max(1e-6 * float(norms.max(initial=0.0)), np.finfo(float).tiny))
    error = float(np.max(np.linalg.norm(a - b, axis=1) / size, initial=0.0))
    return error if np.isfinite(error) else np.inf
