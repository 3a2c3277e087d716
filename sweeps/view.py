"""What `dbo sweep` shows: the shipped sweeps, the cells to come, the table at the end."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from dbo.platform.errors import InputError
from dbo.sweeps import plan
from dbo.sweeps.grid import short
from dbo.sweeps.plan import Sweep
from dbo.sweeps.runner import Folder, Forecast, Outcome

_MOST_ROWS = 40


def show_shipped(console: Console) -> None:
    """Names, axes and purposes."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("sweep", "axes", "claim"):
        table.add_column(heading, no_wrap=heading == "sweep")
    for name, file in plan.shipped().items():
        try:
            sweep = plan.read(file)
            table.add_row(name, ", ".join(sweep.axes), sweep.claim or "")
        except InputError as error:
            table.add_row(name, "", f"cannot be read: {error}")
    console.print(table, highlight=False)


def show_cells(console: Console, forecast: Forecast, folder: Folder) -> None:
    """A line per cell, and whether it is there already."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("cell", "engine", "", "folder"):
        table.add_column(heading, no_wrap=True)
    for cell in forecast.cells:
        status = cell.ended(folder.path) or "to run"
        table.add_row(cell.label, cell.experiment.engine["name"], status, f"cells/{cell.name}")
    console.print(table, highlight=False)


def show_outcome(console: Console, sweep: Sweep, outcome: Outcome) -> None:
    """A row per setting, means over seeds with their intervals, and what went wrong."""
    rows = outcome.summary
    metric = sweep.metric if f"{sweep.metric}_mean" in rows else "upper_loss"
    keys = [key for key in sweep.axes if key != "seed" and key in rows]
    if sweep.searches and f"{metric}_mean" in rows:
        rows = rows.sort_values(f"{metric}_mean", ascending=sweep.best == "min")
    several = bool((rows["cells"] > 1).any())
    title = f"{sweep.name}: last {metric}, and the price of {rows['target'].iloc[0]}"
    title += "\nmeans over seeds with 95 % bootstrap intervals; all intervals: summary.csv" if several else ""
    table = Table(
        title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for key in keys:
        table.add_column(short(key, dict.fromkeys(keys)))
    uneven = bool((rows["finished"] < rows["cells"]).any())
    for heading in (*(["ended"] if uneven else []), "last", "reached", "rounds", "MB", "seconds", "total MB"):
        table.add_column(heading, justify="right", no_wrap=True)
    form = ".4g" if "accuracy" not in metric else ".3f" if several else ".4f"
    rounds = ".1f" if several else ".0f"
    for row in rows.head(_MOST_ROWS).to_dict("records"):
        table.add_row(
            *(_value(row[key]) for key in keys), *([_ended(row)] if uneven else []), _mean(row, metric, form),
            f"{row['reached']}/{row['cells']}",
            _mean(row, "rounds_to_target", rounds, ends=False) if row["reached"] else "not reached",
            *(_mean(row, name, ".2f", ends=False) for name in ("mb_to_target", "seconds_to_target", "comm_mb")),
        )
    console.print(table, highlight=False)
    if len(rows) > _MOST_ROWS:
        console.print(f"… and {len(rows) - _MOST_ROWS} more in {outcome.out}/summary.csv", highlight=False)
    for label, error in outcome.failed:
        console.print(f"{label}: failed: {error}", style="red", highlight=False, markup=False, soft_wrap=True)


def _ended(row: dict[Any, Any]) -> str:
    """finished, 2 finished 1 diverged, …"""
    counts = {status: row[status] for status in ("finished", "diverged", "stopped", "failed") if row[status]}
    if len(counts) == 1 and row["cells"] == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {status}" for status, count in counts.items()) or "not run"


def _mean(row: dict[Any, Any], name: str, form: str, ends: bool = True) -> str:
    """0.951 [0.949, 0.953]; a dash where there is nothing to take the mean of."""
    mean, low, high = (row.get(f"{name}_{part}", float("nan")) for part in ("mean", "low", "high"))
    if mean != mean:
        return "–"
    around = f" [{low:{form}}, {high:{form}}]" if ends and low == low else ""
    return f"{mean:{form}}{around}"


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
