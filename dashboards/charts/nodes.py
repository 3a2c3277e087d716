"""What nodes did: accuracy by node and round, the graph with its traffic, bytes by channel, oracle calls."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dbo.dashboards.estimates import rounded, thin
from dbo.dashboards.groups import Cell, Ordered
from dbo.dashboards.load import Run
from dbo.dashboards.topology import DRAWN, places

_RUNS = 60              # runs whose nodes can be looked at one by one
_COLUMNS, _STEPS, _ROWS = 200, 60, 64
_BUDGET = 200_000       # numbers in all heat maps together, and in all graphs
ORACLES = (("gradient_calls", "gradients"), ("hvp_calls", "Hessian-vector"), ("jvp_calls", "Jacobian-vector"))


def chosen(ordered: Ordered) -> list[tuple[Cell, Run]]:
    """Runs to look at node by node: the first seed of every cell, then the others, as many as a page carries."""
    pairs = [(cell, run) for number in range(ordered.seeds) for cell in ordered.cells for run in cell.runs[number:][:1]]
    return [(cell, run) for cell, run in pairs if run.nodes is not None][:_RUNS]


def heat(ordered: Ordered) -> list[dict[str, Any]]:
    """Accuracy of each node's own model at each evaluation."""
    pairs = [(cell, run) for cell, run in chosen(ordered) if run.nodes and run.nodes.accuracy is not None]
    found = []
    for cell, run in pairs:
        assert run.nodes is not None
        assert run.nodes.accuracy is not None
        rows = thin(run.nodes.accuracy.shape[1], _ROWS)
        columns = thin(len(run.nodes.rounds), max(20, min(_COLUMNS, _BUDGET // (len(pairs) * len(rows)))))
        values = run.nodes.accuracy[columns][:, rows]
        found.append({
            "who": ordered.tell_run(cell, run), "rounds": run.nodes.rounds[columns].tolist(), "nodes": rows.tolist(),
            "of": run.nodes.accuracy.shape[1], "z": [rounded(row, 3) for row in values.T],
        })
    return found


def graphs(ordered: Ordered) -> dict[str, Any] | None:
    """Where nodes lie, who is linked, and at some rounds how far nodes are from the mean and what they have sent."""
    pairs = [(cell, run) for cell, run in chosen(ordered) if drawable(run)]
    layouts: dict[str, int] = {}
    drawn: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for cell, run in pairs:
        assert run.nodes is not None
        assert run.network is not None
        if (key := repr(run.network["edges"])) not in layouts:
            layouts[key] = len(layouts)
            drawn.append({
                "xy": [rounded(axis, 3) for axis in places(run.network).T], "edges": run.network["edges"],
                "gap": run.network["spectral_gap"],
            })
        nodes = run.nodes.apart_x.shape[1]
        steps = thin(len(run.nodes.rounds), max(5, min(_STEPS, _BUDGET // (2 * len(pairs) * nodes))))
        found.append({
            "who": ordered.tell_run(cell, run), "layout": layouts[key], "rounds": run.nodes.rounds[steps].tolist(),
            "apart": [rounded(row, 3) for row in run.nodes.apart_x[steps]],
            "bytes": [rounded(row, 4) for row in run.nodes.bytes[steps]],
        })
    return {"layouts": drawn, "runs": found} if found else None


def drawable(run: Run) -> bool:
    """Whether the graph is there, small enough, and that on which the nodes ran."""
    return bool(
        run.network and run.network["edges"] and run.network["nodes"] <= DRAWN
        and run.nodes and run.nodes.apart_x.shape[1] == run.network["nodes"]
    )


def channels(ordered: Ordered) -> dict[str, Any] | None:
    """Bytes that all nodes broadcast in a run, by channel; mean over seeds."""
    bars: list[dict[str, Any]] = []
    for cell in ordered.cells:
        there = [run.nodes.channels for run in cell.runs if run.nodes]
        if there:
            names = sorted({name for one in there for name in one})
            totals = {name: float(np.mean([one.get(name, 0.0) for one in there])) / 1e6 for name in names}
            bars.append({"who": ordered.tell(cell), "a": cell.algorithm, "parts": totals})
    return _stack(bars)


def oracles(ordered: Ordered) -> dict[str, Any] | None:
    """Oracle calls of a run by kind; mean over seeds."""
    bars: list[dict[str, Any]] = []
    for cell in ordered.cells:
        parts = {name: cell.final(column) for column, name in ORACLES}
        if any(parts.values()):
            means = {name: value.mean for name, value in parts.items() if value}
            bars.append({"who": ordered.tell(cell), "a": cell.algorithm, "parts": means})
    return _stack(bars, [name for _, name in ORACLES])


def _stack(bars: Sequence[dict[str, Any]], names: Sequence[str] | None = None) -> dict[str, Any] | None:
    """Bars with their parts in one order; parts that are nothing everywhere are left out."""
    names = names or sorted({name for bar in bars for name in bar["parts"]})
    names = [name for name in names if any(bar["parts"].get(name) for bar in bars)]
    if not names:
        return None
    values = {name: rounded([bar["parts"].get(name, 0.0) for bar in bars]) for name in names}
    return {"who": [bar["who"] for bar in bars], "a": [bar["a"] for bar in bars], "names": names, "values": values}
