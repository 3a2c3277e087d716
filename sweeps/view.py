"""Print what `dbo sweep` shows: the shipped sweeps, the planned cells, the table of results."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from dbo.platform.errors import InputError
from dbo.sweeps import plan
from dbo.sweeps.grid import shorten_key
from dbo.sweeps.pairs import find_best, format_setting
from dbo.sweeps.plan import Sweep
from dbo.sweeps.runner import SweepProgress, SweepResult

_MAX_ROWS = 40
_MAX_TIED = 4           # settings that a line names


def print_shipped_sweeps(console: Console) -> None:
    """Print name, axes and claim of each shipped sweep."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("sweep", "axes", "claim"):
        table.add_column(heading, no_wrap=heading != "claim")
    for name, file in plan.list_shipped_sweeps().items():
        try:
            sweep = plan.read_sweep(file)
            table.add_row(name, "\n".join(sweep.axes), sweep.claim or "")
        except InputError as error:
            table.add_row(name, "", f"cannot be read: {error}")
    console.print(table, highlight=False)
    console.print("\ndbo sweep NAME runs one of them; add --dry-run to see its cells first.", highlight=False)


def print_cells(console: Console, progress: SweepProgress) -> None:
    """Print a line per cell, with its status."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("cell", "engine", "status", "folder"):
        table.add_column(heading, no_wrap=True)
    for cell in progress.cells:
        status = progress.summaries[cell.name].status if cell.name in progress.summaries else "to run"
        table.add_row(cell.label, cell.experiment.engine["name"], status, f"cells/{cell.name}")
    console.print(table, highlight=False)


def print_result(console: Console, sweep: Sweep, result: SweepResult) -> None:
    """Print a row per setting, with means and intervals over seeds, and the errors of failed cells."""
    rows = result.summary
    metric = sweep.metric if f"{sweep.metric}_mean" in rows else "upper_loss"
    keys = [key for key in sweep.axes if key != "seed" and key in rows]
    if sweep.is_search and f"{metric}_mean" in rows:
        rows = rows.sort_values(f"{metric}_mean", ascending=sweep.direction == "min")
    several = bool((rows["cells"] > 1).any())
    title = f"{sweep.name}: final {metric}, and the cost of reaching {rows['target'].iloc[0]}"
    title += "\nmeans over seeds with 95 % bootstrap intervals; all intervals: summary.csv" if several else ""
    table = Table(
        title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for key in keys:
        table.add_column(shorten_key(key, dict.fromkeys(keys)))
    uneven = bool((rows["finished"] < rows["cells"]).any())
    for heading in (*(["status"] if uneven else []), "final", "reached", "rounds", "MB", "seconds", "total MB"):
        table.add_column(heading, justify="right", no_wrap=True)
    form = ".4g" if "accuracy" not in metric else ".3f" if several else ".4f"
    rounds = ".1f" if several else ".0f"
    for row in rows.head(_MAX_ROWS).to_dict("records"):
        table.add_row(
            *(_format_value(row[key]) for key in keys), *([_format_status(row)] if uneven else []),
            _format_mean(row, metric, form),
            f"{row['reached']}/{row['cells']}",
            _format_mean(row, "rounds_to_target", rounds, interval=False) if row["reached"] else "not reached",
            *(_format_mean(row, name, ".2f", interval=False)
              for name in ("mb_to_target", "seconds_to_target", "comm_mb")),
        )
    console.print(table, highlight=False)
    if len(rows) > _MAX_ROWS:
        console.print(f"… and {len(rows) - _MAX_ROWS} more in {result.out}/summary.csv", highlight=False)
    _print_pairs(console, sweep, result, metric)
    for label, error in result.failed:
        console.print(f"{label}: failed: {error}", style="red", highlight=False, markup=False, soft_wrap=True)


def _print_pairs(console: Console, sweep: Sweep, result: SweepResult, metric: str) -> None:
    """Print the best setting with those that tie with it, and the paired difference of each pair."""
    def write(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    best = _describe_best(sweep, result, metric)
    if best is not None:
        write(best)
    rows = result.pairs[result.pairs["measure"] == metric] if len(result.pairs) else result.pairs
    if rows.empty:
        return
    write(f"paired differences of {metric} over the seeds, with 95 % intervals and the p-value of a paired t-test; "
          "all measures: pairs.csv")
    keys = [key for key in sweep.axes if key in rows]
    for row in rows.head(_MAX_ROWS).to_dict("records"):
        fixed = [key for key in keys if key != row["axis"]]
        where = f"{format_setting(row, fixed)}: " if fixed else ""
        winner = "tie" if row["winner"] == "tie" else f"{_format_value(row['winner'])} is better"
        write(f"    {where}{shorten_key(row['axis'], dict.fromkeys(keys))} "
              f"{_format_value(row['one'])} − {_format_value(row['other'])}: {row['difference']:+.3g} "
              f"[{row['low']:+.3g}, {row['high']:+.3g}], p = {row['p_value']:.2g}, {row['seeds']} seeds: {winner}")
    if len(rows) > _MAX_ROWS:
        write(f"… and {len(rows) - _MAX_ROWS} more in {result.out}/pairs.csv")


def _describe_best(sweep: Sweep, result: SweepResult, metric: str) -> str | None:
    """Return `best mean test_accuracy 0.958: inner_steps=30; inner_steps=20 ties with it`; None: one seed."""
    goal = sweep.direction if metric == sweep.metric else "min"
    verdict = find_best(result.cells, list(sweep.axes), metric, goal)
    if verdict is None:
        return None
    keys = [key for key in sweep.axes if key != "seed"]
    is_best = [format_setting(row, keys) == verdict.best for row in result.cells.to_dict("records")]
    mean = result.cells.loc[is_best, metric].mean()
    more = len(verdict.tied) - _MAX_TIED
    tied = [*verdict.tied[:_MAX_TIED], *([f"{more} more"] if more > 0 else [])]
    ties = f"; ties with it: {', '.join(tied)}" if tied else ""
    return f"best mean {metric} {mean:.4g}: {verdict.best}{ties}"


def describe_result(sweep: Sweep, result: SweepResult) -> str:
    """Return one line: how many cells have finished, and the best setting or cell by the sweep's metric."""
    finished = result.cells[result.cells["status"] == "finished"]
    text = f"{sweep.name}: {len(finished)} of {len(result.cells)} cells finished"
    metric = sweep.metric if sweep.metric in finished and finished[sweep.metric].notna().any() else "upper_loss"
    if metric not in finished or not finished[metric].notna().any():
        return text
    if (several := _describe_best(sweep, result, metric)) is not None:
        return f"{text}, {several}"
    is_maximized = metric == sweep.metric and sweep.direction == "max"
    best = finished.sort_values(metric, ascending=not is_maximized).to_dict("records")[0]
    where = ", ".join(f"{shorten_key(key, dict.fromkeys(sweep.axes))}={_format_value(best[key])}" for key in sweep.axes)
    return f"{text}, best {metric} {best[metric]:.4g} at {where}"


def _format_status(row: dict[Any, Any]) -> str:
    """Return `finished`, `2 finished, 1 diverged`, …"""
    counts = {status: row[status] for status in ("finished", "diverged", "stopped", "failed") if row[status]}
    if len(counts) == 1 and row["cells"] == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {status}" for status, count in counts.items()) or "not run"


def _format_mean(row: dict[Any, Any], name: str, form: str, interval: bool = True) -> str:
    """Return `0.951 [0.949, 0.953]`; a dash if there are no values."""
    mean, low, high = (row.get(f"{name}_{part}", float("nan")) for part in ("mean", "low", "high"))
    if mean != mean:
        return "–"
    around = f" [{low:{form}}, {high:{form}}]" if interval and low == low else ""
    return f"{mean:{form}}{around}"


def _format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
