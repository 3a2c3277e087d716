"""Compute what a task allows, on one machine: the floor without the upper level, and the ceiling.

The floor is the exact solution of the lower level at the start of x: nothing is learned on the upper level. The ceiling
depends on the task (docs/tasks.md). Both see the data and the partition of the experiment, and are solved by L-BFGS on
the mean over the nodes. With --runs, a row per algorithm shows which share of the gap its runs have closed: by the
mean model (x̄, ȳ), and by the exact solution y*(x̄) of the lower level at the weights that it has found.

With --flooding: what it costs to send the data instead, so that every node has all samples of both levels. Each node
sends every sample once, to all its neighbours: its own ones, and those that it forwards. Positions of non-zeros are
coded as dbo's messages code them (Golomb-Rice), their number takes two bytes, a label one, a value four (float32:
without loss), or one (a word count, a pixel: receivers scale them again). Rows that are cheaper without positions have
none. Beside it, the message of a dense method with one packet per round: x, y and one more vector like y, in float32.

    python benchmarks/ceilings.py [--data-dir DIR] [--tasks NAME ...] [--quick]
    python benchmarks/ceilings.py --runs runs/cleaning
    python benchmarks/ceilings.py --flooding --tasks coefficient_tuning/newsgroups --data-dir DIR
"""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse
from scipy.optimize import minimize

from dbo.platform.config.experiment import Experiment
from dbo.platform.network.positions import encode_positions
from dbo.platform.runs.run_folder import read_experiment, read_group, read_run
from dbo.platform.runs.runner import prepare
from dbo.platform.runs.statistics import MeanEstimate, estimate_mean
from dbo.tasks.api import Array, Problem
from dbo.tasks.problems.classification import ClassificationProblem
from dbo.tasks.problems.hyper_cleaning import HyperCleaningProblem
from dbo.tasks.problems.policy_evaluation import PolicyEvaluationProblem
from dbo.tasks.problems.quadratic import QuadraticProblem

LARGE = 30.0                                      # σ(±30) is 1 or 0 in float32
RIDGES = (-8.0, -4.0, -2.0, 0.0, 2.0, 4.0, 6.0, 8.0, 10.0)
EXAMPLE = Path(__file__).resolve().parents[1] / "docs" / "examples" / "cnn_task.py"

# Name → experiment, and whether its data come from files.
TASKS: dict[str, tuple[dict[str, Any], bool]] = {
    "hyper_cleaning/digits": ({"task": {"name": "hyper_cleaning"}}, False),
    "hyper_cleaning/mnist": ({"task": {"name": "hyper_cleaning", "dataset": "mnist"}}, True),
    "coefficient_tuning/digits": ({"task": {"name": "coefficient_tuning"}}, False),
    "coefficient_tuning/a9a": (
        {"task": {"name": "coefficient_tuning", "dataset": "a9a"}, "nodes": 8, "partition": {"name": "iid"}}, True),
    "hyper_representation/digits": ({"task": {"name": "hyper_representation"}}, False),
    "hyper_representation/mnist": ({"task": {"name": "hyper_representation", "dataset": "mnist"}}, True),
    "cnn_representation/mnist": ({"task": {"name": "cnn_representation"}, "plugins": [str(EXAMPLE)]}, True),
    "logistic_synthetic": ({"task": {"name": "logistic_synthetic"}}, False),
    "policy_evaluation": ({"task": {"name": "policy_evaluation"}}, False),
    "quadratic": ({"task": {"name": "quadratic"}, "dtype": "float64"}, False),
}

# Too large for a ceiling by L-BFGS here: docs/data.md has it.
FLOODED = TASKS | {"coefficient_tuning/newsgroups": (
    {"task": {"name": "coefficient_tuning", "dataset": "newsgroups", "val_fraction": 0.2}}, True)}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Test metrics without the upper level, and of the best model that the task allows."""

    floor: dict[str, float]
    ceiling: dict[str, float]


# ---- solutions on one machine ----------------------------------------------------------------------------------------


def minimise_mean(
    problem: Problem, value: Callable[[Array], tuple[Array, Array]], start: Array, iterations: int
) -> Array:
    """Minimise the mean over the nodes of (values, gradients) of a common row; return the row."""
    nodes = problem.nodes

    def evaluate(row: Array) -> tuple[float, Array]:
        values, gradients = value(np.tile(row.astype(start.dtype), (nodes, 1)))
        return float(np.mean(values, dtype=np.float64)), np.mean(gradients, axis=0, dtype=np.float64)

    found = minimize(
        evaluate, start.astype(np.float64), jac=True, method="L-BFGS-B",
        options={"maxiter": iterations, "maxfun": 2 * iterations, "ftol": 1e-13, "gtol": 1e-7},
    )
    solution: Array = found.x.astype(start.dtype)
    return solution


def solve_lower(problem: Problem, x: Array, iterations: int, with_upper: bool = False) -> Array:
    """Return y*(x), the minimiser of mean g_i(x, ·); with the upper level, that of mean (f_i + g_i)(x, ·)."""
    shard = problem.shard(range(problem.nodes))
    rows = np.tile(x.astype(shard.x0.dtype), (problem.nodes, 1))

    def value(y: Array) -> tuple[Array, Array]:
        if with_upper:
            return shard.f(rows, y) + shard.g(rows, y), shard.f_y(rows, y) + shard.g_y(rows, y)
        return shard.g(rows, y), shard.g_y(rows, y)

    return minimise_mean(problem, value, shard.y0[0], iterations)


def train_jointly(problem: Problem, iterations: int) -> tuple[Array, Array]:
    """Return x and y that minimise mean (f_i + g_i): one model, trained on the data of both levels."""
    shard = problem.shard(range(problem.nodes))

    def value(rows: Array) -> tuple[Array, Array]:
        x, y = np.ascontiguousarray(rows[:, : shard.dim_x]), np.ascontiguousarray(rows[:, shard.dim_x :])
        gradients = [
            np.asarray(first(x, y)) + np.asarray(second(x, y))
            for first, second in ((shard.f_x, shard.g_x), (shard.f_y, shard.g_y))
        ]
        return shard.f(x, y) + shard.g(x, y), np.concatenate(gradients, axis=1)

    row = minimise_mean(problem, value, np.concatenate([shard.x0[0], shard.y0[0]]), iterations)
    return row[: shard.dim_x], row[shard.dim_x :]


def test_metrics(problem: Problem, x: Array, y: Array) -> dict[str, float]:
    return {name: float(values[0]) for name, values in problem.evaluate(x[None], y[None]).items()}


# ---- floors and ceilings ---------------------------------------------------------------------------------------------


def find_bounds(problem: Problem, iterations: int) -> Bounds:
    """Return floor and ceiling of a problem."""
    if isinstance(problem, QuadraticProblem | PolicyEvaluationProblem):
        return _bounds_of_closed_forms(problem)
    x0 = problem.shard([0]).x0[0]
    floor = test_metrics(problem, x0, solve_lower(problem, x0, iterations))
    if isinstance(problem, HyperCleaningProblem):
        clean = np.where(problem.corrupted, -LARGE, LARGE).astype(x0.dtype)
        return Bounds(floor, test_metrics(problem, clean, solve_lower(problem, clean, iterations)))
    if not np.any(x0):      # x are coefficients of a regulariser: the best common one, chosen on the test samples
        candidates = [(x := x0 + ridge, solve_lower(problem, x, iterations, with_upper=True)) for ridge in RIDGES]
        return Bounds(floor, min((test_metrics(problem, *pair) for pair in candidates), key=_rank))
    return Bounds(floor, test_metrics(problem, *train_jointly(problem, iterations)))


def _bounds_of_closed_forms(problem: QuadraticProblem | PolicyEvaluationProblem) -> Bounds:
    x0, y0 = np.zeros(problem.dim_x), np.zeros(problem.dim_y)
    if isinstance(problem, PolicyEvaluationProblem):
        return Bounds(test_metrics(problem, x0, y0), test_metrics(problem, problem.solution(), y0))
    solution = problem.solution()
    return Bounds(
        test_metrics(problem, x0, problem.y_star(x0)), test_metrics(problem, solution, problem.y_star(solution))
    )


def _rank(metrics: dict[str, float]) -> float:
    return -metrics["test_accuracy"]


# ---- flooding --------------------------------------------------------------------------------------------------------

_ROW = 3        # bytes of a sample besides its values and their positions: how many there are, and the label


@dataclass(frozen=True, slots=True)
class Flood:
    """All samples of both levels, and the bytes of one copy of them by the bytes of a value."""

    samples: int
    nonzeros: int
    size: dict[int, int]


def measure_flood(problem: ClassificationProblem) -> Flood:
    """Return the bytes that every node sends until all of them have all samples."""
    samples, nonzeros, size = 0, 0, {1: 0, 4: 0}
    for part, numbers in ((problem.samples.train, problem.train), (problem.samples.val, problem.val)):
        rows = sparse.csr_array(part.features)[np.concatenate(numbers)]
        rows.eliminate_zeros()
        samples, nonzeros = samples + rows.shape[0], nonzeros + rows.nnz
        for start, end in pairwise(rows.indptr.tolist()):
            positions = len(encode_positions(np.sort(rows.indices[start:end]), rows.shape[1])) if end > start else 0
            for width in size:
                size[width] += _ROW + min(positions + width * (end - start), width * rows.shape[1])
    return Flood(samples, nonzeros, size)


# ---- output ----------------------------------------------------------------------------------------------------------


def print_bounds(names: Iterable[str], data_dir: str | None, iterations: int) -> None:
    """Print a row per task: dimensions, floor and ceiling of each test metric."""
    print("| task | d_x | d_y | metric | floor | ceiling |\n|---|---|---|---|---|---|")
    for name in names:
        settings, needs_files = FLOODED[name]
        if needs_files and data_dir is None:
            print(f"| {name} | | | needs --data-dir | | |")
            continue
        problem = prepare(Experiment(**settings, data_dir=data_dir, engine={"name": "local"})).problem
        bounds = find_bounds(problem, iterations)
        for metric, low in bounds.floor.items():
            if metric != "corruption_f1":
                dimensions = f"{problem.dim_x:,} | {problem.dim_y:,}"
                print(f"| {name} | {dimensions} | {metric} | {low:.4f} | {bounds.ceiling[metric]:.4f} |", flush=True)


def print_floods(names: Iterable[str], data_dir: str | None, seed: int) -> None:
    """Print a row per classification task: its samples, and what a node sends to flood them, or per dense round."""
    print("| task | samples | non-zeros | bytes per node, float32 values | values of one byte | a dense round |")
    print("|---|---|---|---|---|---|")
    for name in names:
        settings, needs_files = FLOODED[name]
        if needs_files and data_dir is None:
            continue
        problem = prepare(Experiment(**settings, seed=seed, data_dir=data_dir, engine={"name": "local"})).problem
        if isinstance(problem, ClassificationProblem):
            flood, dense = measure_flood(problem), 4 * (problem.dim_x + 2 * problem.dim_y)
            print(f"| {name} | {flood.samples:,} | {flood.nonzeros:,} | {flood.size[4]:,} | {flood.size[1]:,} "
                  f"| {dense:,} |", flush=True)


def print_runs(folders: list[Path], data_dir: str | None, iterations: int) -> None:
    """Print a row per algorithm: test metrics and the share of the gap that is closed, over all folders."""
    found: dict[str, list[dict[str, float]]] = {}
    of_seed: dict[int, tuple[Problem, Bounds]] = {}
    for folder in folders:
        for member in read_group(folder).members:
            experiment = read_experiment(folder / member)
            if experiment["seed"] not in of_seed:
                changes = {} if data_dir is None else {"data_dir": data_dir}
                problem = prepare(Experiment(**{**experiment, **changes})).problem
                of_seed[experiment["seed"]] = problem, (bounds := find_bounds(problem, iterations))
                found.setdefault("floor", []).append(bounds.floor)
                found.setdefault("ceiling", []).append(bounds.ceiling)
            measured = _measure_run(folder / member, *of_seed[experiment["seed"]], iterations)
            found.setdefault(experiment["algorithm"]["name"], []).append(measured)
    columns = (
        "test_accuracy", "node_accuracy_mean", "gap_closed", "exact_accuracy", "exact_gap_closed", "corruption_f1",
    )
    print(f"| | {' | '.join(columns)} | MB |\n|---|{'---|' * (len(columns) + 1)}")
    for name, rows in found.items():
        cells = [_format(estimate_mean(row.get(column) for row in rows)) for column in columns]
        mb = estimate_mean(row.get("comm_mb") for row in rows)
        print(f"| {name} | {' | '.join(cells)} | {'' if mb is None else f'{mb.mean:,.0f}'} |", flush=True)


def _measure_run(folder: Path, problem: Problem, bounds: Bounds, iterations: int) -> dict[str, float]:
    ended = read_run(folder)
    record: dict[str, Any] = dict(ended.history.iloc[-1])
    x = ended.state["x"].mean(axis=0, dtype=np.float64).astype(problem.shard([0]).x0.dtype)
    low, high = bounds.floor["test_accuracy"], bounds.ceiling["test_accuracy"]
    record["exact_accuracy"] = test_metrics(problem, x, solve_lower(problem, x, iterations))["test_accuracy"]
    record["gap_closed"] = (record["test_accuracy"] - low) / (high - low)
    record["exact_gap_closed"] = (record["exact_accuracy"] - low) / (high - low)
    return record


def _format(estimate: MeanEstimate | None) -> str:
    if estimate is None:
        return ""
    if estimate.low is None or estimate.high is None or estimate.low == estimate.high:
        return f"{estimate.mean:.3f}"
    return f"{estimate.mean:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="folder with the files of MNIST and a9a")
    parser.add_argument("--tasks", nargs="+", choices=FLOODED, help="default: all")
    parser.add_argument("--flooding", action="store_true", help="print the cost of sending the data to every node")
    parser.add_argument("--seed", type=int, default=0, help="of the split, with --flooding")
    parser.add_argument("--runs", nargs="+", type=Path, help="folders of comparisons on one task, one or more seeds")
    parser.add_argument("--iterations", type=int, default=300, help="of L-BFGS; default: 300")
    parser.add_argument("--quick", action="store_true", help="few iterations, tasks without files")
    options = parser.parse_args()
    iterations = 3 if options.quick else options.iterations
    if options.flooding:
        print_floods(options.tasks or FLOODED, options.data_dir, options.seed)
    elif options.runs:
        print_runs(options.runs, options.data_dir, iterations)
    else:
        names = [name for name in options.tasks or TASKS if not (options.quick and FLOODED[name][1])]
        print_bounds(names, options.data_dir, iterations)


if __name__ == "__main__":
    main()
