"""Cells as tables: a row per cell, and a row per setting over its seeds, with means and confidence intervals.

Nothing is left out: cells that did not reach the target, diverged or failed are counted in every row.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dbo.platform.config.redact import masked
from dbo.platform.runs.run_folder import CLOCKS, COLUMNS, Target, read_metrics
from dbo.platform.runs.runner import reached
from dbo.sweeps.grid import Cell, shown

PRICES = {"rounds_to_target": "round", "mb_to_target": "comm_mb", "seconds_to_target": "seconds"}
_FINAL = tuple(c for c in COLUMNS if c not in {"round", "timestamp"})
_RESAMPLES = 2000
LEVEL = 0.95


def interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """Bootstrap confidence interval of the mean (percentile method, always the same draws); NaN for fewer than two."""
    data = np.asarray(values, dtype=np.float64)
    if data.size < 2:
        return float("nan"), float("nan")
    if np.all(data == data[0]):
        return float(data[0]), float(data[0])
    from scipy import stats  # takes seconds to load, and is needed only here

    found = stats.bootstrap(
        (data,), np.mean, n_resamples=_RESAMPLES, confidence_level=level, method="percentile", rng=0
    ).confidence_interval
    return float(found.low), float(found.high)


def cell_table(cells: Sequence[Cell], out: Path, target: Target, errors: Mapping[str, str]) -> pd.DataFrame:
    """A row per cell: its axes, how it ended, its price of the target (empty: not reached) and its last evaluation."""
    rows = []
    for cell in cells:
        folder = cell.folder(out)
        summary = summary_of(folder)
        ran = summary.get("run_key") == cell.experiment.run_key
        status = str(summary["status"]) if ran else "failed" if cell.name in errors else "not run"
        records = read_metrics(folder / "metrics.jsonl") if ran else []
        hit = reached(records, target) or {}
        final = records[-1] if records else {}
        extra = [key for key in final if key not in COLUMNS]
        rows.append({
            "cell": cell.name,
            **{key: _entry(value) for key, value in cell.values.items()},
            "seed": cell.experiment.seed,
            "status": status,
            "error": errors.get(cell.name) or summary.get("error", "") if status != "finished" else "",
            "rounds": final.get("round"),
            "target": str(target),
            "reached": bool(hit),
            **{name: hit.get(key) for name, key in PRICES.items()},
            **{key: final.get(key) for key in (*_FINAL, *extra)},
            "run_key": cell.experiment.run_key,
        })
    return pd.DataFrame(rows)


def seed_table(cells: pd.DataFrame, axes: Sequence[str]) -> pd.DataFrame:
    """A row per setting: of everything measured the mean over the seeds, and the ends of its confidence interval.

    Last evaluations are those of finished cells, prices those of cells that reached the target; `cells`, `finished`,
    `diverged`, `failed` and `reached` say of how many.
    """
    keys = [key for key in axes if key != "seed"]
    groups = cells.groupby(keys, sort=False, dropna=False) if keys else [((), cells)]
    rows: list[dict[str, Any]] = []
    for values, group in groups:
        ended = group[group["status"] == "finished"]
        row: dict[str, Any] = dict(zip(keys, values, strict=True))
        row |= {"cells": len(group), "finished": len(ended)}
        row |= {status: int((group["status"] == status).sum()) for status in ("diverged", "stopped", "failed")}
        row |= {"target": group["target"].iloc[0], "reached": int(group["reached"].sum())}
        for name in PRICES:
            row |= _measured(name, group.loc[group["reached"], name])
        for name in _measures(cells):
            row |= _measured(name, ended[name])
        rows.append(row)
    return pd.DataFrame(rows)


def write(cells: pd.DataFrame, seeds: pd.DataFrame, out: Path) -> None:
    """cells.csv, summary.csv and the same as parquet."""
    for name, table in (("cells", cells), ("summary", seeds)):
        table.to_csv(out / f"{name}.csv", index=False)
        # A column must have one type: an axis may mix numbers and words.
        mixed = [key for key in table if table[key].dtype == object]
        table.astype(dict.fromkeys(mixed, "string")).to_parquet(out / f"{name}.parquet", index=False)


def _measured(name: str, values: pd.Series) -> dict[str, float]:
    numbers = [float(value) for value in values if pd.notna(value)]
    low, high = interval(numbers)
    return {
        f"{name}_mean": float(np.mean(numbers)) if numbers else float("nan"), f"{name}_low": low, f"{name}_high": high,
    }


def _measures(cells: pd.DataFrame) -> list[str]:
    """Columns of the last evaluation that hold numbers."""
    after = list(cells.columns)[list(cells.columns).index("seconds_to_target") + 1:-1]
    return [key for key in after if key not in CLOCKS[1:] and cells[key].notna().any()]


def summary_of(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "summary.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def _entry(value: Any) -> Any:
    """A value of an axis as a table holds it: cells that differ in it must not look alike."""
    return value if isinstance(value, bool | int | float) else masked(shown(value, exact=True))
