"""What is measured at an evaluation: the mean model, the nodes' own models, disagreement, traffic, oracle calls."""

import math
from typing import Any

import numpy as np

from dbo.algorithms.protocol import Array
from dbo.platform.engine.base import Engine
from dbo.platform.runs.run_folder import Record
from dbo.tasks.api import Problem


@np.errstate(over="ignore", invalid="ignore")      # a metric that is not finite is looked for, not warned of
def evaluate(engine: Engine, problem: Problem, config: Any, paper_counts: Any) -> tuple[Record, Record]:
    """All columns of a metrics line but the clocks, and what nodes.jsonl tells of each node.

    `test_*`, `upper_loss` and `lower_loss` are those of the mean model (x̄, ȳ), `node_*` those of the nodes' own.
    `consensus_x` is the root mean square distance of the nodes' x to x̄, `hypergradient_norm` the norm of the mean
    direction of the upper level. Of each node: its accuracy, its distance to the means (`apart_x`, `apart_y`) and the
    bytes that it has broadcast; and the bytes of all nodes by channel.
    """
    x, y, direction = _rows(engine, "x"), _rows(engine, "y"), _rows(engine, "direction")
    x_mean, y_mean = _mean(x), _mean(y)
    upper, lower = engine.losses(x_mean, y_mean)
    common, own = problem.evaluate(x_mean, y_mean), problem.evaluate(x, y)
    extra = problem.extra(x_mean[0], y_mean[0], getattr(config, "lam", None))
    ledger = engine.ledger()
    accuracy = own.get("test_accuracy")
    apart_x, apart_y = _apart(x, x_mean), _apart(y, y_mean)
    nodes = {
        "accuracy": None if accuracy is None else np.asarray(accuracy, dtype=np.float64).round(6).tolist(),
        "apart_x": apart_x.tolist(), "apart_y": apart_y.tolist(),
        "bytes": ledger.bytes_by_node().tolist(),
        "channels": {name: int(counts.sum()) for name, counts in sorted(ledger.bytes_by_channel().items())},
    }
    return {
        "test_accuracy": _first(common.get("test_accuracy")),
        "test_loss": _first(common.get("test_loss")),
        "upper_loss": float(np.mean(upper, dtype=np.float64)),
        "lower_loss": float(np.mean(lower, dtype=np.float64)),
        "node_accuracy_mean": None if accuracy is None else float(np.mean(accuracy, dtype=np.float64)),
        "node_accuracy_min": None if accuracy is None else float(np.min(accuracy)),
        "bytes_broadcast": ledger.bytes_broadcast,
        "bytes_links": ledger.bytes_links,
        "packets": int(ledger.packets.sum()),
        "comm_mb": ledger.bytes_links / 1e6,
        "paper_megabytes": ledger.paper_megabytes(paper_counts),
        "consensus_x": _rms(apart_x),
        "consensus_y": _rms(apart_y),
        "hypergradient_norm": float(np.linalg.norm(_mean(direction).astype(np.float64))),
        **engine.counters(),
        **extra,
    }, nodes


def unwell(record: Record) -> str | None:
    """The first metric that is not finite."""
    return next((k for k, v in record.items() if isinstance(v, float) and not math.isfinite(v)), None)


def _rows(engine: Engine, name: str) -> Array:
    rows = engine.rows(name)
    assert rows is not None, f"every state has {name}"
    return rows


def _mean(rows: Array) -> Array:
    mean: Array = rows.mean(axis=0, keepdims=True, dtype=np.float64).astype(rows.dtype)
    return mean


def _apart(rows: Array, mean: Array) -> Array:
    """(nodes,) distance of each row to the mean; a row at a time, rows can be long."""
    return np.array([np.sqrt(np.sum((row - mean[0]).astype(np.float64) ** 2)) for row in rows])


def _rms(values: Array) -> float:
    return float(np.sqrt(np.mean(values**2)))


def _first(values: Array | None) -> float | None:
    return None if values is None else float(values[0])
