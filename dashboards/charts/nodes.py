"""Build the charts of single nodes: accuracy by node and round, graph with traffic, bytes by channel, oracle calls."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np

from dbo.dashboards.charts.curves import Numbers
from dbo.dashboards.groups import GroupedRuns, SeedGroup
from dbo.dashboards.load import RunData
from dbo.dashboards.number_format import round_significant, thin_indices
from dbo.dashboards.topology import compute_layout, has_graph

_MAX_RUNS = 60                  # runs whose nodes a page can show one by one
_MAX_ROUNDS, _MAX_NODES, _MAX_STEPS = 200, 64, 60
_MAX_NUMBERS = 200_000          # in all heat maps together, and in all graphs
_ORACLES = {"gradient_calls": "gradients", "hvp_calls": "Hessian-vector", "jvp_calls": "Jacobian-vector"}


# What the built-in algorithms send under a name; `s_x` and the like are trackers of x.
_CHANNELS = {
    "x": "upper variable", "y": "lower variable", "z": "second lower variable, or the linear solve",
    "v": "solution of the linear system", "s": "gradient tracker", "u": "gradient tracker",
    "y_d": "y in the inner loop, compressed", "y_s": "tracker of y in the inner loop, compressed",
    "z_d": "z in the inner loop, compressed", "z_s": "tracker of z in the inner loop, compressed",
    "q": "residual of the linear solve", "q0": "residual at the start of the linear solve",
    "zf": "tracker of the hypergradient", "zg": "tracker of the lower gradient",
    "a_x": "average of upper gradients in x", "a_y": "average of upper gradients in y",
    "theta": "auxiliary lower variable",
}


def explain_channels(bars: "StackedBars | None") -> str:
    """Return what each channel carries, for a caption; a plugin's own names are left as they are."""
    def explain(name: str) -> str:
        kind, _, of = name.partition("_")
        return _CHANNELS.get(name) or (f"gradient tracker of {of}" if kind in ("s", "u") and of else "")

    known = [f"{name}: {meaning}" for name in (bars["names"] if bars else ()) if (meaning := explain(name))]
    return f"{'; '.join(known)}. " if known else ""


class StackedBars(TypedDict):
    """One bar per group of seeds, stacked from named parts; JSON of the page."""

    labels: list[str]
    series: list[str]                # entries of the legend
    names: list[str]                 # of the parts
    values: dict[str, Numbers]       # by part: a value per bar


class _Bar(NamedTuple):
    label: str
    series: str
    parts: Mapping[str, float]


def select_runs(runs: GroupedRuns) -> list[tuple[SeedGroup, RunData]]:
    """Return the runs to show node by node: the first seed of every group, then the others, up to a limit."""
    pairs = [
        (group, run) for number in range(runs.max_seeds) for group in runs.seed_groups
        for run in group.runs[number : number + 1]
    ]
    return [(group, run) for group, run in pairs if run.nodes is not None][:_MAX_RUNS]


def build_heatmaps(runs: GroupedRuns) -> list[dict[str, Any]]:
    """Return per run the accuracy of each node's own model at each evaluation."""
    pairs = [(group, run) for group, run in select_runs(runs) if run.nodes and run.nodes.accuracy is not None]
    heatmaps = []
    for group, run in pairs:
        assert run.nodes is not None
        assert run.nodes.accuracy is not None
        nodes = thin_indices(run.nodes.accuracy.shape[1], _MAX_NODES)
        limit = max(20, min(_MAX_ROUNDS, _MAX_NUMBERS // (len(pairs) * len(nodes))))
        evaluations = thin_indices(len(run.nodes.rounds), limit)
        values = run.nodes.accuracy[evaluations][:, nodes]
        heatmaps.append({
            "run": runs.label_run(group, run), "rounds": run.nodes.rounds[evaluations].tolist(),
            "nodes": run.nodes.ids[nodes].tolist(), "node_count": run.nodes.accuracy.shape[1],
            "accuracy": [round_significant(row, 3) for row in values.T],
        })
    return heatmaps


def build_graphs(runs: GroupedRuns) -> dict[str, Any] | None:
    """Return layouts and links, and at some rounds each node's distance to the mean and the bytes it has sent."""
    pairs = [(group, run) for group, run in select_runs(runs) if has_graph(run)]
    numbers: dict[str, int] = {}             # of the layouts, by their edges
    layouts: list[dict[str, Any]] = []
    graphs: list[dict[str, Any]] = []
    for group, run in pairs:
        assert run.nodes is not None
        assert run.network is not None
        if (key := repr(run.network.edges)) not in numbers:
            numbers[key] = len(layouts)
            layouts.append({
                "xy": [round_significant(axis, 3) for axis in compute_layout(run.network).T],
                "edges": run.network.edges, "gap": run.network.spectral_gap,
            })
        limit = max(5, min(_MAX_STEPS, _MAX_NUMBERS // (2 * len(pairs) * run.nodes.distance_x.shape[1])))
        steps = thin_indices(len(run.nodes.rounds), limit)
        graphs.append({
            "run": runs.label_run(group, run), "layout": numbers[key], "rounds": run.nodes.rounds[steps].tolist(),
            "distance": [round_significant(row, 3) for row in run.nodes.distance_x[steps]],
            "bytes": [round_significant(row, 4) for row in run.nodes.bytes[steps]],
        })
    return {"layouts": layouts, "runs": graphs} if graphs else None


def stack_channels(runs: GroupedRuns) -> StackedBars | None:
    """Return the megabytes that all nodes broadcast in a run, by channel; mean over seeds."""
    bars = []
    for group in runs.seed_groups:
        totals = [run.nodes.channels for run in group.runs if run.nodes]
        names = sorted({name for total in totals for name in total})
        means = {name: float(np.mean([total.get(name, 0.0) for total in totals])) / 1e6 for name in names}
        if totals:
            bars.append(_Bar(runs.label_group(group), runs.name_series(group), means))
    return _stack(bars, sorted({name for bar in bars for name in bar.parts}))


def stack_oracle_calls(runs: GroupedRuns) -> StackedBars | None:
    """Return the oracle calls of a run by kind; mean over seeds."""
    bars = []
    for group in runs.seed_groups:
        values = {name: group.final_value(column) for column, name in _ORACLES.items()}
        means = {name: value.mean for name, value in values.items() if value}
        if means:
            bars.append(_Bar(runs.label_group(group), runs.name_series(group), means))
    return _stack(bars, list(_ORACLES.values()))


def _stack(bars: Sequence[_Bar], names: Sequence[str]) -> StackedBars | None:
    """Give all bars the same parts in the same order, without parts that are zero everywhere."""
    names = [name for name in names if any(bar.parts.get(name) for bar in bars)]
    if not names:
        return None
    return {
        "labels": [bar.label for bar in bars], "series": [bar.series for bar in bars], "names": names,
        "values": {name: round_significant([bar.parts.get(name, 0.0) for bar in bars]) for name in names},
    }
