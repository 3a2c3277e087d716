"""Curves over the course of runs: accuracy, loss and consensus error, and the incidents under them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbo.dashboards.estimates import band, rounded, thin
from dbo.dashboards.groups import Cell, Ordered, Setting
from dbo.dashboards.load import Run, Series

POINTS = 300
AGAINST = ("comm_mb", "seconds", "round")
DRAWN = (
    "node_accuracy_mean", "test_accuracy", "test_loss", "upper_loss", "lower_loss", "consensus_x", "consensus_y",
    "hypergradient_norm",
)
NAMES = {
    "comm_mb": "sent over all links (MB)", "seconds": "training time (s)", "round": "rounds",
    "node_accuracy_mean": "accuracy, mean of nodes", "test_accuracy": "accuracy, mean model",
    "test_loss": "test loss, mean model", "upper_loss": "upper loss f", "lower_loss": "lower loss g",
    "consensus_x": "consensus error of x", "consensus_y": "consensus error of y",
    "hypergradient_norm": "norm of the mean upper direction",
}
SHORT = {
    "comm_mb": "MB", "seconds": "seconds", "round": "rounds", "node_accuracy_mean": "nodes' own models",
    "test_accuracy": "mean model", "test_loss": "test loss", "upper_loss": "upper loss", "lower_loss": "lower loss",
    "consensus_x": "of x", "consensus_y": "of y", "hypergradient_norm": "norm",
}


def curves(ordered: Ordered) -> list[dict[str, Any]]:
    """A curve per cell: the mean over its seeds with its interval. What went wrong is drawn run by run."""
    found = []
    for cell in ordered.cells:
        well = [run for run in cell.runs if run.well and run.records]
        if well:
            found.append(_mean(ordered, cell, well))
        found += [_single(ordered, cell, run) for run in cell.runs if not run.well and run.records]
    return found


def common(runs: Sequence[Run]) -> list[NDArray[np.int64]]:
    """For each run the positions of the evaluations that all of them have."""
    rounds = runs[0].columns["round"]
    for run in runs[1:]:
        rounds = np.intersect1d(rounds, run.columns["round"], assume_unique=True)
    return [np.searchsorted(run.columns["round"], rounds).astype(np.int64) for run in runs]


def _mean(ordered: Ordered, cell: Cell, runs: Sequence[Run]) -> dict[str, Any]:
    places = common(runs)
    length = len(places[0])
    hit = _crossing(cell, runs)
    keep = [int(np.argmin(np.abs(runs[0].columns["round"][places[0]] - hit["round"])))] if hit and length else []
    chosen = thin(length, POINTS, keep)

    def rows(column: str) -> Series:
        return np.stack([run.columns[column][at[chosen]] for run, at in zip(runs, places, strict=True)])

    y: dict[str, Any] = {}
    for column in DRAWN:
        values = rows(column)
        if not np.isfinite(values).any():
            continue
        y[column] = {"v": rounded(values.mean(axis=0))}
        if len(runs) > 1:
            low, high = band(values)
            y[column] |= {"lo": rounded(low), "hi": rounded(high)}
        elif column == "node_accuracy_mean":
            y[column] |= {"lo": rounded(rows("node_accuracy_min")[0]), "hi": y[column]["v"]}
    x = {column: rounded(rows(column).mean(axis=0), 5) for column in AGAINST}
    statuses = sorted({run.status for run in runs} - {"finished"})
    return {**_about(ordered, cell), "seeds": len(runs), "state": ", ".join(statuses), "x": x, "y": y, "hit": hit}


def _single(ordered: Ordered, cell: Cell, run: Run) -> dict[str, Any]:
    """A run that went wrong, to where it came."""
    chosen = thin(len(run.records), POINTS)
    y = {
        column: {"v": rounded(run.columns[column][chosen])}
        for column in DRAWN if np.isfinite(run.columns[column]).any()
    }
    x = {column: rounded(run.columns[column][chosen], 5) for column in AGAINST}
    state = f"{run.status} after round {int(run.columns['round'][-1])}"
    return {**_about(ordered, cell), "seeds": 1, "state": state, "bad": True, "x": x, "y": y, "hit": None}


def _about(ordered: Ordered, cell: Cell) -> dict[str, Any]:
    return {"s": ordered.settings.index(cell.setting), "a": cell.algorithm, "l": cell.label}


def _crossing(cell: Cell, runs: Sequence[Run]) -> dict[str, Any] | None:
    """Where the target was reached, mean over seeds; none unless all of them did."""
    hits = [cell.setting.target.reached(run.records) for run in runs]
    if any(hit is None for hit in hits):
        return None
    keys = (*AGAINST, cell.setting.target.metric)
    means = [float(np.mean([hit[key] for hit in hits if hit])) for key in keys]
    return {key: rounded([value], 6)[0] for key, value in zip((*AGAINST, "y"), means, strict=True)}


def panels(ordered: Ordered) -> list[dict[str, Any]]:
    """A panel per setting, with its spectral gap and its target."""
    return [
        {
            "label": ordered.label(setting), "task": setting.task, "gap": gap_of(ordered, setting),
            "target": [setting.target.metric, setting.target.level],
        }
        for setting in ordered.settings
    ]


def gap_of(ordered: Ordered, setting: Setting) -> float | None:
    """ρ of the setting's graph; the mean where seeds draw different graphs."""
    gaps = [
        run.network["spectral_gap"] for cell in ordered.within(setting) for run in cell.runs
        if run.network and run.network["spectral_gap"] and run.network["nodes"] > 1
    ]
    return float(f"{np.mean(gaps):.5g}") if gaps else None


def incidents(ordered: Ordered) -> list[dict[str, Any]]:
    """What happened on the way, with the place on each horizontal axis where it did."""
    found = []
    for cell in ordered.cells:
        for run in cell.runs:
            for incident in run.incidents:
                at = int(np.searchsorted(run.columns["round"], incident.round, side="right")) - 1
                x = {c: rounded(run.columns[c][[max(at, 0)]], 5)[0] if run.records else 0 for c in AGAINST}
                found.append({
                    **_about(ordered, cell), "kind": incident.kind, "text": incident.text,
                    "who": ordered.tell_run(cell, run), "folder": str(run.folder),
                    "x": {**x, "round": incident.round},
                })
    return found
