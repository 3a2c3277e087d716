"""Tabulate the cells of a sweep: a row per cell, and a row per setting with means and intervals over its seeds.

Nothing is left out: cells that did not reach the target, diverged or failed are counted in every row.
"""

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pandas as pd
from pandas.api.types import is_numeric_dtype

from dbo.platform.config.redact import redact
from dbo.platform.runs.atomic_io import write_atomically
from dbo.platform.runs.run_folder import RunFolder, find_summary, read_metrics
from dbo.platform.runs.schema import COLUMNS, Target
from dbo.platform.runs.statistics import estimate_mean
from dbo.sweeps.grid import SweepCell, format_value

COSTS = {"rounds_to_target": "round", "mb_to_target": "comm_mb", "seconds_to_target": "seconds"}
_FINAL = tuple(column for column in COLUMNS if column not in {"round", "timestamp"})


def build_cell_table(cells: Sequence[SweepCell], out: Path, target: Target, errors: Mapping[str, str]) -> pd.DataFrame:
    """Return a row per cell: axes, status, cost of the target (empty: not reached) and last evaluation."""
    rows = []
    for cell in cells:
        folder = cell.folder(out)
        summary = find_summary(folder)
        if summary is not None and summary.run_key != cell.experiment.run_key:
            summary = None
        status = summary.status if summary else "failed" if cell.name in errors else "not run"
        error = errors.get(cell.name) or (summary.error if summary else "") or ""
        records = read_metrics(RunFolder(folder).metrics) if summary else []
        cost = target.find_cost(records) or {}
        final = records[-1] if records else {}
        extra = [key for key, value in final.items() if key not in COLUMNS and isinstance(value, int | float)]
        rows.append({
            "cell": cell.name,
            **{key: _format_axis_value(value) for key, value in cell.values.items()},
            "seed": cell.experiment.seed,
            "status": status,
            "error": error if status != "finished" else "",
            "rounds": final.get("round"),
            "target": str(target),
            "reached": bool(cost),
            **{name: cost.get(key) for name, key in COSTS.items()},
            **{key: final.get(key) for key in (*_FINAL, *extra)},
            "run_key": cell.experiment.run_key,
        })
    return pd.DataFrame(rows)


def build_seed_table(cells: pd.DataFrame, axes: Sequence[str]) -> pd.DataFrame:
    """Return a row per setting: of every measure the mean over the seeds and the ends of its confidence interval.

    Last evaluations are those of finished cells, costs those of cells that reached the target; `cells`, `finished`,
    `diverged`, `failed` and `reached` count them.
    """
    keys = [key for key in axes if key != "seed"]
    groups = cells.groupby(keys, sort=False, dropna=False) if keys else [((), cells)]
    rows: list[dict[str, Any]] = []
    for values, group in groups:
        finished = group[group["status"] == "finished"]
        row: dict[str, Any] = dict(zip(keys, values, strict=True))
        row |= {"cells": len(group), "finished": len(finished)}
        row |= {status: int((group["status"] == status).sum()) for status in ("diverged", "stopped", "failed")}
        row |= {"target": group["target"].iloc[0], "reached": int(group["reached"].sum())}
        for name in COSTS:
            row |= _summarize(name, group.loc[group["reached"], name])
        for name in _list_measures(cells):
            row |= _summarize(name, finished[name])
        rows.append(row)
    return pd.DataFrame(rows)


def write_tables(cells: pd.DataFrame, seeds: pd.DataFrame, pairs: pd.DataFrame, out: Path) -> None:
    """Write cells.csv, summary.csv, pairs.csv if there are pairs, and the same as parquet."""
    for name, table in (("cells", cells), ("summary", seeds), ("pairs", pairs)):
        if table.empty and name == "pairs":         # those of an earlier command are of other cells
            for kind in ("csv", "parquet"):
                (out / f"{name}.{kind}").unlink(missing_ok=True)
            continue
        write_atomically(out / f"{name}.csv", table.to_csv(index=False), "a table")
        # A column of a parquet file has one type, but an axis may mix numbers and text.
        mixed = [key for key in table if table[key].dtype == object]
        buffer = BytesIO()
        table.astype(dict.fromkeys(mixed, "string")).to_parquet(buffer, index=False)
        write_atomically(out / f"{name}.parquet", buffer.getvalue(), "a table")


def _summarize(name: str, values: pd.Series) -> dict[str, float | None]:
    estimate = estimate_mean(float(value) for value in values if pd.notna(value))
    ends = (estimate.mean, estimate.low, estimate.high) if estimate else (None, None, None)
    numbers = (float("nan") if end is None else end for end in ends)
    return dict(zip((f"{name}_mean", f"{name}_low", f"{name}_high"), numbers, strict=True))


def _list_measures(cells: pd.DataFrame) -> list[str]:
    """Return the columns of the last evaluation that hold numbers."""
    columns = list(cells.columns)
    measured = columns[columns.index("seconds_to_target") + 1 : -1]
    return [
        key for key in measured if key != "timestamp" and cells[key].notna().any() and is_numeric_dtype(cells[key])
    ]


def _format_axis_value(value: Any) -> Any:
    """Return a value of an axis for a table; cells that differ in it must not look the same."""
    return value if isinstance(value, bool | int | float) else redact(format_value(value, exact=True))
