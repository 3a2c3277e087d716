"""Build the curves of a report (accuracy, loss, consensus error) and the incidents marked under them."""

from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from dbo.dashboards.groups import ComparisonSetting, GroupedRuns, SeedGroup
from dbo.dashboards.load import RunData, Series
from dbo.dashboards.number_format import round_significant, thin_indices
from dbo.platform.runs.statistics import mean_interval

MAX_POINTS = 300
NODE_MB = "node_mb"                                  # bytes_broadcast / nodes, as in the tables of bytes per node
X_COLUMNS = ("comm_mb", NODE_MB, "seconds", "round")
PSI_COLUMNS = ("psi", "psi_gradient_norm")          # of some evaluations only
Y_COLUMNS = (
    *PSI_COLUMNS, "node_accuracy_mean", "test_accuracy", "test_loss", "upper_loss", "lower_loss", "consensus_x",
    "consensus_y", "direction_norm",
)
AXIS_TITLES = {
    "comm_mb": "communication over all links (MB)", NODE_MB: "encoded MB that a node sends",
    "seconds": "training time (s)", "round": "rounds",
    "psi": "upper objective ψ(x̄)", "psi_gradient_norm": "norm of ∇ψ(x̄)",
    "node_accuracy_mean": "accuracy, mean over nodes", "test_accuracy": "accuracy, mean model",
    "test_loss": "test loss, mean model", "upper_loss": "upper loss f", "lower_loss": "lower loss g",
    "consensus_x": "consensus error of x", "consensus_y": "consensus error of y",
    "direction_norm": "norm of the mean upper direction",
}
SHORT_NAMES = {
    "comm_mb": "MB", NODE_MB: "MB per node", "seconds": "seconds", "round": "rounds", "psi": "ψ",
    "psi_gradient_norm": "‖∇ψ‖",
    "node_accuracy_mean": "mean over nodes",
    "test_accuracy": "mean model", "test_loss": "test loss", "upper_loss": "upper loss", "lower_loss": "lower loss",
    "consensus_x": "of x", "consensus_y": "of y", "direction_norm": "norm",
}
Numbers = list[float | int | None]


class CurveValues(TypedDict):
    """One column of a curve, with its interval over seeds or down to the worst node."""

    mean: Numbers
    low: NotRequired[Numbers]
    high: NotRequired[Numbers]


class Curve(TypedDict):
    """Mean over the seeds of a group, or one run that failed; JSON of the page."""

    setting: int                                        # position in GroupedRuns.settings
    algorithm: str
    series: str                                         # its entry in the legend: GroupedRuns.series
    label: str
    seeds: int
    status: str                                         # empty: finished
    failed: bool
    x: dict[str, Numbers]
    y: dict[str, CurveValues]
    reached: dict[str, float | int | None] | None       # where the target was reached: a value per X_COLUMNS, and y


def build_curves(runs: GroupedRuns) -> list[Curve]:
    """Return a curve per group: the mean over its seeds with its interval. Runs that failed get one curve each."""
    curves = []
    for group in runs.seed_groups:
        succeeded = [run for run in group.runs if run.records and not run.has_failed]
        if succeeded:
            curves.append(_build_mean_curve(runs, group, succeeded))
        curves += [_build_failed_curve(runs, group, run) for run in group.runs if run.records and run.has_failed]
    return curves


def list_own_columns(runs: GroupedRuns) -> list[str]:
    """Return the metrics of targets that only their task has, as far as they were measured."""
    metrics = dict.fromkeys(setting.target.metric for setting in runs.settings)
    return [metric for metric in metrics if metric not in Y_COLUMNS and runs.has_column(metric)]


def _build_mean_curve(grouped: GroupedRuns, group: SeedGroup, runs: Sequence[RunData]) -> Curve:
    positions = _find_common_rounds(runs)
    reached = _find_target_point(group, runs)
    rounds = runs[0].columns["round"][positions[0]]
    keep = [int(np.argmin(np.abs(rounds - reached["round"])))] if reached and len(rounds) else []
    with_psi = np.flatnonzero(np.isfinite(runs[0].columns["psi"][positions[0]]))
    keep += with_psi[thin_indices(len(with_psi), MAX_POINTS // 2)].tolist()
    chosen = thin_indices(len(rounds), MAX_POINTS, keep)

    def stack(column: str) -> Series:
        return np.stack([find_values(run, column)[at[chosen]] for run, at in zip(runs, positions, strict=True)])

    y: dict[str, CurveValues] = {}
    for column in (*Y_COLUMNS, *list_own_columns(grouped)):
        values = stack(column)
        if not np.isfinite(values).any():
            continue
        y[column] = {"mean": round_significant(values.mean(axis=0))}
        if len(runs) > 1:
            low, high = mean_interval(values)
            y[column] |= {"low": round_significant(low), "high": round_significant(high)}
        elif column == "node_accuracy_mean":
            y[column] |= {"low": round_significant(stack("node_accuracy_min")[0]), "high": y[column]["mean"]}
    return {
        "setting": grouped.settings.index(group.setting), "algorithm": group.algorithm,
        "series": grouped.name_series(group), "label": group.label,
        "seeds": len(runs), "status": ", ".join(sorted({run.status for run in runs} - {"finished"})), "failed": False,
        "x": {column: round_significant(stack(column).mean(axis=0), 5) for column in X_COLUMNS}, "y": y,
        "reached": reached,
    }


def _build_failed_curve(grouped: GroupedRuns, group: SeedGroup, run: RunData) -> Curve:
    """Return the curve of a run that diverged or failed, up to its last evaluation."""
    chosen = thin_indices(len(run.records), MAX_POINTS)
    return {
        "setting": grouped.settings.index(group.setting), "algorithm": group.algorithm,
        "series": grouped.name_series(group), "label": group.label,
        "seeds": 1, "status": f"{run.status} after round {int(run.columns['round'][-1])}", "failed": True,
        "x": {column: round_significant(find_values(run, column)[chosen], 5) for column in X_COLUMNS},
        "y": {
            column: {"mean": round_significant(run.find_column(column)[chosen])}
            for column in (*Y_COLUMNS, *list_own_columns(grouped)) if np.isfinite(run.find_column(column)).any()
        },
        "reached": None,
    }


def _find_common_rounds(runs: Sequence[RunData]) -> list[NDArray[np.int64]]:
    """Return for each run the positions of the evaluations that all of them have."""
    rounds = runs[0].columns["round"]
    for run in runs[1:]:
        rounds = np.intersect1d(rounds, run.columns["round"], assume_unique=True)
    return [np.searchsorted(run.columns["round"], rounds).astype(np.int64) for run in runs]


def _find_target_point(group: SeedGroup, runs: Sequence[RunData]) -> dict[str, Any] | None:
    """Return where the target was reached, as a mean over seeds; None unless all of them reached it."""
    target = group.setting.target
    records = [target.find_first(run.records) for run in runs]
    if any(record is None for record in records):
        return None
    points = [
        {**record, NODE_MB: per_node_mb(record["bytes_broadcast"], run)}
        for record, run in zip(records, runs, strict=True) if record
    ]
    means = [float(np.mean([point[key] for point in points])) for key in (*X_COLUMNS, target.metric)]
    return dict(zip((*X_COLUMNS, "y"), round_significant(means, 6), strict=True))


def find_values(run: RunData, column: str) -> Series:
    """Return a column of a run, or the MB that a node has sent."""
    return per_node_mb(run.find_column("bytes_broadcast"), run) if column == NODE_MB else run.find_column(column)


def per_node_mb(sent: Any, run: RunData) -> Any:
    """Return bytes of all nodes, each message counted once, in 10⁶ bytes per node with data."""
    return sent / run.experiment.get("nodes", 1) / 1e6


def build_panels(runs: GroupedRuns) -> list[dict[str, Any]]:
    """Return a panel per setting, with its spectral gap and its target."""
    return [
        {
            "label": runs.label_setting(setting), "task": setting.task, "gap": mean_spectral_gap(runs, setting),
            "target": [setting.target.metric, setting.target.level],
        }
        for setting in runs.settings
    ]


def mean_spectral_gap(runs: GroupedRuns, setting: ComparisonSetting) -> float | None:
    """Return ρ of the setting's graph; the mean where each seed has its own random graph."""
    gaps = [
        run.network.spectral_gap for group in runs.in_setting(setting) for run in group.runs
        if run.network and run.network.spectral_gap and run.network.nodes > 1
    ]
    return float(f"{np.mean(gaps):.5g}") if gaps else None


def list_incidents(runs: GroupedRuns) -> list[dict[str, Any]]:
    """Return lost and replaced workers, divergence and failure, with their position on each horizontal axis."""
    incidents = []
    for group in runs.seed_groups:
        for run in group.runs:
            for incident in run.incidents:
                at = int(np.searchsorted(run.columns["round"], incident.round, side="right")) - 1
                x = {
                    column: round_significant(find_values(run, column)[[max(at, 0)]], 5)[0] if run.records else 0
                    for column in X_COLUMNS
                }
                incidents.append({
                    "setting": runs.settings.index(group.setting), "series": runs.name_series(group),
                    "kind": incident.kind,
                    "text": incident.text, "run": runs.label_run(group, run), "x": {**x, "round": incident.round},
                })
    return incidents
