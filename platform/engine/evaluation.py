"""Evaluate a run: the mean model, the nodes' own models, consensus, traffic and oracle calls.

The models of `eval_nodes` nodes are evaluated: of all nodes, or of a sample that is the same throughout a run.
A line of nodes.jsonl has accuracies and distances of at most `MAX_RECORDED` nodes, whose numbers are in `nodes`.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from zlib import crc32

import numpy as np

from dbo.algorithms.api import Algorithm, Array
from dbo.platform.config.validation import DataclassInstance
from dbo.platform.engine.base import Engine, Record
from dbo.platform.engine.block import PUBLIC
from dbo.platform.engine.common_point import Floats, Oracle
from dbo.platform.engine.psi import limit_products, solve_psi
from dbo.platform.network.ledger import Ledger
from dbo.tasks.api import Problem

if TYPE_CHECKING:
    from scipy.sparse import csr_array

MAX_RECORDED = 1_000         # nodes in a line of nodes.jsonl
_CHUNK = 1 << 22             # entries of rows whose distances are computed at once


def sample_nodes(seed: int, nodes: int, count: int, purpose: str) -> Array:
    """Return the numbers of `count` nodes, or of all, in order; the seed and the purpose determine the sample."""
    if count >= nodes:
        return np.arange(nodes)
    generator = np.random.default_rng([seed, crc32(purpose.encode())])
    return np.sort(generator.choice(nodes, count, replace=False))


@np.errstate(over="ignore", invalid="ignore")      # `first_nonfinite_metric` detects what overflows here
def evaluate(
    engine: Engine, problem: Problem, algorithm: Algorithm, config: DataclassInstance,
    eval_nodes: int | Literal["all"] = "all", seed: int = 0, weights: "csr_array[Any] | None" = None,
) -> tuple[Record, Record]:
    """Return all columns of metrics.jsonl except the clocks, and the columns of nodes.jsonl.

    `test_*`, `upper_loss` and `lower_loss` belong to the mean model (x̄, ȳ), `node_*` to the nodes' own models.
    `consensus_x` is the root mean square distance of the nodes' x to x̄, `direction_norm` the norm of the mean
    direction of the upper level, which need not be near ∇ψ. `consensus_*` and `compression_*` are the error terms that
    the algorithm declares. Each node has its accuracy, its distance to the means (`apart_x`, `apart_y`) and the
    bytes that it has broadcast. `tune_loss` is the mean over nodes' own models of f on the samples held out for tuning,
    if there are any, `tune_accuracy` that of their accuracy there. `public_accuracy_*` belong to (x_i, Σ_j w_ij ŷ_j),
    with what the neighbours have published of y: of states that keep it, of all others if `weights` has W.
    `channels` are the bytes of all nodes by
    channel. With a sample of nodes, everything about the nodes' own models is that of the sample, whose size is
    `nodes_evaluated`.

    In a star the mean model is the server's, whose row is the last one; the nodes' own models are the clients'.
    """
    x, y, direction = _rows(engine, "x"), _rows(engine, "y"), _rows(engine, "direction")
    has_server = algorithm.network == "star"
    clients = len(x) - has_server                       # rows with data
    choose = _last if has_server else _mean
    x_mean, y_mean = choose(x), choose(y)
    upper, lower = (losses[:clients] for losses in engine.losses(x_mean, y_mean))
    sample = sample_nodes(seed, clients, clients if eval_nodes == "all" else eval_nodes, "evaluated nodes")
    is_sample = len(sample) < clients
    own_x, own_y = (x[sample], y[sample]) if is_sample else (x[:clients], y[:clients])
    of_mean, of_nodes = problem.evaluate(x_mean, y_mean), problem.evaluate_nodes(own_x, own_y)
    ledger = engine.ledger()
    accuracy = of_nodes.get("test_accuracy")
    distance_x, distance_y = _distances(x, x_mean), _distances(y, y_mean)
    recorded = sample_nodes(seed, len(sample), MAX_RECORDED, "recorded nodes")      # positions in the sample
    ids = sample[recorded]
    accuracies = None if accuracy is None else np.asarray(accuracy, np.float64)[recorded].round(6).tolist()
    if has_server:                                      # the last node, whose model is the mean model
        ids = np.append(ids, clients)
        accuracies = None if accuracies is None else [*accuracies, round(float(of_mean["test_accuracy"][0]), 6)]
    nodes = {
        **({} if len(ids) == len(x) else {"nodes": ids.tolist()}),
        "accuracy": accuracies,
        "apart_x": distance_x[ids].tolist(), "apart_y": distance_y[ids].tolist(),
        "bytes": ledger.bytes_by_node().tolist(),       # of all nodes: `dbo replay` needs them
        "channels": {name: int(counts.sum()) for name, counts in sorted(ledger.bytes_by_channel().items())},
    }
    return {
        "test_accuracy": _first(of_mean.get("test_accuracy")),
        "test_loss": _first(of_mean.get("test_loss")),
        "upper_loss": float(np.mean(upper, dtype=np.float64)),
        "lower_loss": float(np.mean(lower, dtype=np.float64)),
        "node_accuracy_mean": None if accuracy is None else float(np.mean(accuracy, dtype=np.float64)),
        "node_accuracy_min": None if accuracy is None else float(np.min(accuracy)),
        "bytes_broadcast": ledger.bytes_broadcast,
        "bytes_links": ledger.bytes_links,
        "packets": int(ledger.packets.sum()),
        "comm_mb": ledger.bytes_links / 1e6,
        "paper_megabytes": ledger.paper_megabytes(algorithm.paper_counts),
        **(_star_metrics(ledger) if has_server else {}),
        "consensus_x": _rms(distance_x[:clients]),
        "consensus_y": _rms(distance_y[:clients]),
        "direction_norm": float(np.linalg.norm(choose(direction).astype(np.float64))),
        **engine.errors(),
        **engine.counters(),
        **_own_metrics(of_mean, of_nodes),
        **problem.task_metrics(x_mean[0], y_mean[0]),
        **_penalty_metrics(problem, algorithm, config, x_mean[0]),
        **_tune_metrics(problem, own_x, own_y),
        **({"nodes_evaluated": len(sample)} if is_sample else {}),
        **_public_metrics(problem, own_x, _public_models(engine, algorithm, weights, sample)),
    }, nodes


def _star_metrics(ledger: Ledger) -> Record:
    """Return the bytes from clients to the server and back, counted once per receiver."""
    *clients, server = ledger.received[:, 0].tolist()
    return {"bytes_up": sum(clients), "bytes_down": server, "server_bytes": sum(clients) + server}


@dataclass(frozen=True, slots=True)
class _ClientMeans:
    """Means over the clients: an engine's means count the server, whose derivatives are 0, as one more node."""

    engine: Engine
    factor: float

    def mean_oracle(self, oracle: Oracle, x: Array, y: Array, v: Array | None = None) -> Floats:
        return self.factor * self.engine.mean_oracle(oracle, x, y, v)


def evaluate_psi(engine: Engine, problem: Problem, has_server: bool = False) -> Record:
    """Return ψ and ‖∇ψ‖ at x̄, how accurate they are, and the task's losses and accuracy at (x̄, y*(x̄)).

    The solve starts from ȳ, so it depends on the state of the run alone. Values that are not finite are left out.
    """
    choose, nodes = _last if has_server else _mean, problem.nodes
    x, y = (choose(_rows(engine, name)) for name in ("x", "y"))
    oracles = _ClientMeans(engine, nodes / (nodes - 1)) if has_server else engine
    found = solve_psi(oracles, x[0], y[0], limit_products(problem.nodes, problem.dim_y))
    norm = float(np.linalg.norm(found.gradient))
    if not math.isfinite(found.value + norm + found.residual):
        return {"psi_converged": 0}
    solution = found.y[None].astype(y.dtype)
    accuracy = _first(problem.evaluate(x, solution).get("test_accuracy"))
    tune = problem.tune_losses(x, solution)
    return {
        "psi": found.value, "psi_gradient_norm": norm, "psi_residual": found.residual,
        "psi_converged": int(found.converged),
        **({} if accuracy is None else {"psi_test_accuracy": accuracy}),
        **({} if tune is None else {"psi_tune_loss": float(tune[0])}),
    }


def _own_metrics(of_mean: dict[str, Array], of_nodes: dict[str, Array]) -> Record:
    """Return a task's metrics besides accuracy and loss: of the mean model, and their mean over the nodes' own."""
    own = [name for name in of_mean if name not in ("test_accuracy", "test_loss")]
    return {name: _first(of_mean[name]) for name in own} | {
        f"node_{name}_mean": float(np.mean(of_nodes[name], dtype=np.float64)) for name in own
    }


def first_nonfinite_metric(record: Record) -> str | None:
    """Return the name of the first metric that is not finite; None if there is none."""
    return next((name for name, v in record.items() if isinstance(v, float) and not math.isfinite(v)), None)


def _public_models(
    engine: Engine, algorithm: Algorithm, weights: "csr_array[Any] | None", sample: Array
) -> Array | None:
    """Return Σ_j w_ij ŷ_j of the nodes in the sample: from the state, or from the copies that neighbours have.

    A server's clients have no neighbours, and a single machine has none: without W there is nothing to return.
    """
    if (kept := engine.rows("public_y")) is not None:
        kept_rows: Array = kept[sample]
        return kept_rows
    if weights is None or algorithm.network != "gossip" or (copies := engine.rows(PUBLIC)) is None:
        return None
    mixed: Array = weights[sample].astype(copies.dtype) @ copies
    return mixed


def _public_metrics(problem: Problem, x: Array, public_y: Array | None) -> dict[str, float]:
    """Return the accuracies of the models that neighbourhoods have published, if they were requested."""
    if public_y is None:
        return {}
    accuracy = problem.evaluate_nodes(x, public_y).get("test_accuracy")
    if accuracy is None:
        return {}
    return {
        "public_accuracy_mean": float(np.mean(accuracy, dtype=np.float64)),
        "public_accuracy_min": float(np.min(accuracy)),
    }


def _penalty_metrics(problem: Problem, algorithm: Algorithm, config: DataclassInstance, x: Array) -> dict[str, float]:
    """Return the relative distance of x to the solution of the penalty problem, for penalty methods."""
    target = None if algorithm.penalty is None else problem.penalty_solution(algorithm.penalty(config))
    if target is None:
        return {}
    scale = max(float(np.linalg.norm(target)), float(np.finfo(np.float64).tiny))
    return {"penalty_error": float(np.linalg.norm(x - target) / scale)}


def _tune_metrics(problem: Problem, x: Array, y: Array) -> dict[str, float]:
    """Return the means over the nodes' own models of upper loss and accuracy on the samples held out for tuning."""
    found = {"tune_loss": problem.tune_losses(x, y), "tune_accuracy": problem.tune_accuracies(x, y)}
    return {name: float(np.mean(values, dtype=np.float64)) for name, values in found.items() if values is not None}


def _rows(engine: Engine, name: str) -> Array:
    rows = engine.rows(name)
    assert rows is not None, f"every state has {name}"
    return rows


def _mean(rows: Array) -> Array:
    mean: Array = rows.mean(axis=0, keepdims=True, dtype=np.float64).astype(rows.dtype)
    return mean


def _last(rows: Array) -> Array:
    return rows[-1:]


def _distances(rows: Array, mean: Array) -> Array:
    """Return (nodes,) distances of the rows to the mean; a few rows at a time, since all can be large."""
    step = max(1, _CHUNK // max(1, rows.shape[1]))
    parts = [
        np.sqrt(np.sum((rows[start : start + step] - mean).astype(np.float64) ** 2, axis=1))
        for start in range(0, len(rows), step)
    ]
    return np.concatenate(parts)


def _rms(values: Array) -> float:
    return float(np.sqrt(np.mean(values**2)))


def _first(values: Array | None) -> float | None:
    return None if values is None else float(values[0])
