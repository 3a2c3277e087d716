"""`dbo compare`: run several algorithms on one problem and show what each needs to reach a target."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from dbo.platform.cli.console import (
    Arguments,
    KeepOtherEnvironment,
    Quiet,
    console,
    print_line,
    split_arguments,
    typed_command,
    validate_out,
    warn,
)
from dbo.platform.cli.report import write_outputs
from dbo.platform.errors import InputError, RunError

if TYPE_CHECKING:
    import pandas as pd

    from dbo.platform.config.experiment import Experiment
    from dbo.platform.runs.result import Result

# Column heading: (column of the comparison table, number format).
_COST = {"rounds": ("rounds_to_target", ".0f"), "MB": ("mb_to_target", ".2f"), "seconds": ("seconds_to_target", ".2f")}
_ACCURACIES = {
    "accuracy": ("test_accuracy", ".4f"), "nodes": ("node_accuracy_mean", ".4f"), "worst": ("node_accuracy_min", ".4f"),
}
_DISTANCES = {
    "from x*": ("solution_error", ".2g"), "from x*_λ": ("penalty_error", ".2g"), "loss": ("upper_loss", ".4g"),
}


def compare_algorithms(
    arguments: Arguments = None,
    algorithms: Annotated[str | None, typer.Option(
        "--algorithms", metavar="A,B,...", help="Algorithms to compare; `dbo list algorithms` shows them.")] = None,
    target: Annotated[str | None, typer.Option(
        "--target", metavar="METRIC=LEVEL", help="Target whose cost is measured, e.g. test_accuracy=0.7.")] = None,
    out: Annotated[Path | None, typer.Option(
        "--out", metavar="DIR", help="Folder for all runs; default: a folder below runs/.")] = None,
    allow_changed_code: KeepOtherEnvironment = False,
    quiet: Quiet = False,
) -> None:
    """Compare algorithms: rounds, MB and seconds to a target.

    All algorithms run on the same problem. Run the same command again to resume an interrupted comparison.
    """
    file, overrides = split_arguments(arguments)
    names = [name.strip() for name in (algorithms or "").split(",") if name.strip()]
    if algorithms is not None and not names:
        raise InputError(f"--algorithms: {algorithms!r} is not allowed; must be names, e.g. c2dfb,mdbo")
    validate_out(out, url_allowed=False)

    from dbo.platform.cli.progress import ProgressDisplay
    from dbo.platform.runs import compare
    from dbo.platform.tracking.process import follow_in_background

    experiments, level = compare.plan(file, overrides, names, target)
    folder = out or compare.default_folder(experiments)
    tracking = experiments[0].tracking
    with follow_in_background(folder, tracking.uri, tracking.experiment, warn):
        if not quiet:
            _show_problem(experiments[0])
        with nullcontext() if quiet else ProgressDisplay(console) as display:
            results = compare.compare(experiments, level, folder, display, typed_command(), allow_changed_code)
        table = compare.comparison_table(results, level)
        if quiet:
            print_line(f"{_describe_comparison(table, str(level))}; folder: {folder}")
        else:
            show_comparison(table, str(level))
            print_line(f"folder: {folder}")
        write_outputs("compare", folder, quiet)
    unfinished = [result for result in results if result.status != "finished"]
    if unfinished:
        raise RunError("; ".join(_describe_end(result) for result in unfinished))


def _describe_end(result: "Result") -> str:
    """Return how a run ended, and of one that diverged the values that may be the reason."""
    from dbo.platform.config.value_sources import explain_divergence

    hint = f" ({explain_divergence(result.experiment)})" if result.status == "diverged" else ""
    return f"{result.experiment.algorithm['name']} {result.status}{hint}"


def _describe_comparison(rows: "pd.DataFrame", target: str) -> str:
    """Return the cost of the target of every algorithm in one line."""
    costs = [
        f"{row['algorithm']} {row['rounds_to_target']:.0f} rounds, {row['mb_to_target']:.2f} MB" if is_reached
        else f"{row['algorithm']} not reached"
        for row, is_reached in zip(rows.to_dict("records"), rows["rounds_to_target"].notna(), strict=True)
    ]
    return f"{target}: {'; '.join(costs)}"


def _show_problem(experiment: "Experiment") -> None:
    """Print task, network and partition in one line."""
    partition = experiment.partition
    parameters = ", ".join(f"{key} = {value}" for key, value in partition.items() if key != "name")
    console.print(
        f"{experiment.task['name']} {experiment.task.get('dataset', '')} · {experiment.nodes} nodes · "
        f"{experiment.topology['name']} · {partition['name']} {parameters} · seed {experiment.seed}", highlight=False,
    )


def show_comparison(rows: "pd.DataFrame", target: str) -> None:
    """Print a row per algorithm: the cost of reaching the target, then the final values."""
    has_accuracy = rows["test_accuracy"].notna().any()
    final = _ACCURACIES if has_accuracy else {name: found for name, found in _DISTANCES.items() if found[0] in rows}
    metric = re.split("[<>=]", target)[0]
    if metric in rows and metric not in {column for column, _ in final.values()}:
        final = {metric: (metric, ".4g"), **final}
    meaning = "accuracy of the mean model, mean over nodes, worst node" if has_accuracy else "values of the mean model"
    print_line(f"cost of reaching {target}, then final {meaning}")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("algorithm", overflow="fold")
    for name in (*_COST, *final, "total MB"):
        table.add_column(name, justify="right", no_wrap=True)           # a truncated number would be wrong
    for row in rows.to_dict("records"):
        status = "" if row["status"] == "finished" else f" ({row['status']})"
        rounds, *cost = (_format_number(row[key], form) for key, form in _COST.values())
        table.add_row(
            f"{row['algorithm']}{status}{'*' if row['single_machine'] else ''}", rounds.replace("–", "not reached"),
            *cost, *(_format_number(row[key], form) for key, form in final.values()),
            _format_number(row["comm_mb"], ".2f"),
        )
    console.print(table)
    if rows["single_machine"].any():
        console.print("* reference on one machine that holds all data: sends nothing", highlight=False)


def _format_number(value: Any, form: str) -> str:
    """Format a number; without decimals from a thousand on, because columns are narrow."""
    if value is None or value != value:
        return "–"
    return f"{value:.0f}" if value >= 1000 else format(value, form)
