"""`dbo compare`: run several algorithms on one problem and show what each needs to reach a target."""

import re
from collections.abc import Hashable, Mapping, Sequence
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
_TRAFFIC = {"total MB": ("comm_mb", ".2f")}
_SERVER_TRAFFIC = {**_TRAFFIC, "per node": ("node_mb", ".3f"), "server": ("server_mb", ".2f")}
_PSI = {"ψ": ("psi", ".4g")}
_ACCURACIES = {
    "accuracy": ("test_accuracy", ".4f"), "nodes": ("node_accuracy_mean", ".4f"), "worst": ("node_accuracy_min", ".4f"),
}
_DISTANCES = {
    "from x*": ("solution_error", ".2g"), "from x*_λ": ("penalty_error", ".2g"), "loss": ("upper_loss", ".4g"),
}


def compare_algorithms(
    arguments: Arguments = None,
    algorithms: Annotated[str | None, typer.Option(
        "--algorithms", metavar="A,B,...|all|FAMILY",
        help="Algorithms: names, all, a network (gossip, star, single) or a family; see `dbo list`.")] = None,
    target: Annotated[str | None, typer.Option(
        "--target", metavar="METRIC=LEVEL",
        help="Target whose cost is measured, e.g. test_accuracy=0.7; more, after commas, add bytes per node.")] = None,
    seeds: Annotated[str | None, typer.Option(
        "--seeds", metavar="0,1,...", help="Repeat every algorithm with these seeds; report means and differences.",
    )] = None,
    out: Annotated[Path | None, typer.Option(
        "--out", metavar="DIR", help="Folder for all runs; default: a folder below runs/.")] = None,
    allow_changed_code: KeepOtherEnvironment = False,
    dry_run: Annotated[bool, typer.Option(
        "--dry-run", help="Show the runs, their budgets, sizes and an estimate; run nothing.")] = False,
    quiet: Quiet = False,
) -> None:
    """Compare algorithms: rounds, MB and seconds to a target.

    All algorithms run on the same problem, with the same seeds. Run the same command again to resume an interrupted
    comparison.
    """
    file, overrides = split_arguments(arguments)
    names = [name.strip() for name in (algorithms or "").split(",") if name.strip()]
    if algorithms is not None and not names:
        raise InputError(f"--algorithms: {algorithms!r} is not allowed; must be names, e.g. c2dfb,mdbo")
    validate_out(out, url_allowed=False)

    from dbo.platform.cli.progress import ProgressDisplay
    from dbo.platform.runs import compare
    from dbo.platform.tracking.process import follow_in_background

    experiments, level = compare.plan(file, overrides, names, target, parse_seeds(seeds))
    folder = out or compare.default_folder(experiments)
    if dry_run:
        from dbo.platform.cli.dry_run import show_comparison_plan

        show_comparison_plan(experiments, level, folder)
        return
    tracking = experiments[0].tracking
    with follow_in_background(folder, tracking.uri, tracking.experiment, warn):
        if not quiet:
            show_problem(experiments)
        with nullcontext() if quiet else ProgressDisplay(console, names=_name_runs(experiments)) as display:
            results = compare.compare(experiments, level, folder, display, typed_command(), allow_changed_code)
        table = compare.comparison_table(results, level)
        if quiet:
            print_line(f"{_describe_comparison(table, str(level))}; folder: {folder}")
        else:
            (show_seeds if table["seed"].nunique() > 1 else show_comparison)(table, str(level))
            show_node_bytes(table)
            print_line(f"folder: {folder}")
        write_outputs("compare", folder, quiet)
    unfinished = [result for result in results if result.status != "finished"]
    if unfinished:
        raise RunError("; ".join(_describe_end(result) for result in unfinished))


def _describe_end(result: "Result") -> str:
    """Return how a run ended, and of one that diverged the values that may be the reason."""
    from dbo.platform.config.value_sources import explain_divergence

    hint = f" ({explain_divergence(result.experiment)})" if result.status == "diverged" else ""
    name = f"{result.experiment.title} (seed {result.experiment.seed})"
    return f"{name} {result.status}{hint}"


def _describe_comparison(rows: "pd.DataFrame", target: str) -> str:
    """Return the cost of the target of every algorithm in one line."""
    costs = [
        f"{row['algorithm']} {row['rounds_to_target']:.0f} rounds, {row['mb_to_target']:.2f} MB" if is_reached
        else f"{row['algorithm']} not reached"
        for row, is_reached in zip(rows.to_dict("records"), rows["rounds_to_target"].notna(), strict=True)
    ]
    return f"{target}: {'; '.join(costs)}"


def parse_seeds(text: str | None) -> list[int] | None:
    """Return the seeds of --seeds 0,1,2."""
    if text is None:
        return None
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise InputError(f"--seeds: {text!r} is not allowed; must be whole numbers, e.g. 0,1,2") from None


def _name_runs(experiments: "Sequence[Experiment]") -> dict[str, str]:
    """Return a name for each run: its number, its title and, of several, its seed."""
    has_seeds = len({experiment.seed for experiment in experiments}) > 1
    return {
        experiment.run_key: f"{number}/{len(experiments)} {experiment.title}"
        f"{f' seed {experiment.seed}' if has_seeds else ''}"
        for number, experiment in enumerate(experiments, 1)
    }


def show_problem(experiments: "Sequence[Experiment]") -> None:
    """Print task, network, partition and seeds in one line."""
    experiment = experiments[0]
    seeds = list(dict.fromkeys(str(one.seed) for one in experiments))
    partition = experiment.partition
    parameters = ", ".join(f"{key} = {value}" for key, value in partition.items() if key != "name")
    which = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}"
    task = " ".join(filter(None, (experiment.task["name"], experiment.task.get("dataset"))))
    console.print(
        f"{task} · {experiment.nodes} nodes · "
        f"{experiment.topology['name']} · {partition['name']} {parameters} · {which}", highlight=False, soft_wrap=True,
    )


def show_comparison(rows: "pd.DataFrame", target: str) -> None:
    """Print a row per algorithm: the cost of reaching the target, then the final values."""
    has_accuracy = rows["test_accuracy"].notna().any()
    final = _ACCURACIES if has_accuracy else {name: found for name, found in _DISTANCES.items() if found[0] in rows}
    metric = re.split("[<>=]", target)[0]
    if metric in rows and metric not in {"psi", *(column for column, _ in final.values())}:
        final = {metric: (metric, ".4g"), **final}
    meaning = "accuracy of the mean model, mean over nodes, worst node" if has_accuracy else "values of the mean model"
    lead = _PSI if "psi" in rows and rows["psi"].notna().any() else {}
    final = {name: found for name, found in final.items() if not lead or name != "loss"}     # ψ says more
    about = "final ψ at the mean x, " if lead else ""
    print_line(f"{about}cost of reaching {target}, then final {meaning}")
    has_server = "network" in rows and (rows["network"] == "star").any()
    traffic = _SERVER_TRAFFIC if has_server else _TRAFFIC
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("algorithm", overflow="fold", min_width=len("algorithm"))
    for name in (*lead, *_COST, *final, *traffic):
        table.add_column(name, justify="right", no_wrap=True)           # a truncated number would be wrong
    for row in rows.to_dict("records"):
        status = "" if row["status"] == "finished" else f" ({row['status']})"
        rounds, *cost = (_format_number(row[key], form) for key, form in _COST.values())
        table.add_row(
            f"{row['algorithm']}{status}{'*' if row['single_machine'] else ''}",
            *(_mark_approximate(_format_number(row[key], form), row) for key, form in lead.values()),
            rounds.replace("–", "not reached"),
            *cost, *(_format_number(row[key], form) for key, form in final.values()),
            *(_format_number(row.get(key), form) for key, form in traffic.values()),
        )
    console.print(table)
    if rows["single_machine"].any():
        console.print("* reference on one machine that holds all data: sends nothing", highlight=False)
    _explain_approximate(rows)
    if has_server:
        console.print("per node: MB that a node with data sends and receives; server: MB through it", highlight=False)


_SEED_COLUMNS = {       # narrow enough for intervals in 80 columns
    "ψ": ("psi", ".3g"), **_COST, "accuracy": ("test_accuracy", ".3f"), "nodes": ("node_accuracy_mean", ".3f"),
    "from x*": ("solution_error", ".2g"), "from x*_λ": ("penalty_error", ".2g"),
}


def show_seeds(runs: "pd.DataFrame", target: str) -> None:
    """Print means over seeds with their intervals, and by each measure who wins or ties."""
    from dbo.platform.runs.seed_tables import build_seed_table

    rows = build_seed_table(runs)
    shown = {name: found for name, found in _SEED_COLUMNS.items() if found[0] in rows}
    about = "final ψ at the mean x, " if "psi" in rows else ""
    meaning = "final accuracy of the mean model, mean over nodes" if "test_accuracy" in rows else "final values"
    print_line(f"{about}cost of reaching {target}, {meaning}")
    print_line(f"mean over {runs['seed'].nunique()} seeds, below it the 95 % interval; summary.csv has more measures")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("algorithm", overflow="fold", min_width=len("algorithm"))
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows.to_dict("records"):
        missing = f" ({row['finished']} of {row['seeds']} finished)" if row["finished"] < row["seeds"] else ""
        cells = [_format_estimate(row, key, form) for key, form in shown.values()]
        if "rounds" in shown and row["reached"] < row["seeds"]:
            at = list(shown).index("rounds")
            cells[at] = f"{cells[at]}\n{row['reached']} of {row['seeds']} seeds" if row["reached"] else "not reached"
        table.add_row(f"{row['algorithm']}{missing}{'*' if row['single_machine'] else ''}", *cells)
    console.print(table)
    if rows["single_machine"].any():
        console.print("* reference on one machine that holds all data: sends nothing", highlight=False)
    _explain_approximate(rows)
    _show_verdicts(runs)


def _format_estimate(row: Mapping[Hashable, Any], key: str, form: str) -> str:
    text = _format_number(row[key], form)
    if key == "psi" and row.get("psi_converged") == 0:
        text = f"≈{text}"
    low, high = row[f"{key}_low"], row[f"{key}_high"]
    if low is None or low != low:
        return text
    return f"{text}\n{_format_number(low, form)}–{_format_number(high, form)}"


def show_node_bytes(runs: "pd.DataFrame") -> None:
    """Print the bytes that a node sends until each of several targets: the mean over seeds, then every seed's."""
    from dbo.platform.runs.seed_tables import NODE_BYTES

    columns = [column for column in map(str, runs) if column.startswith(NODE_BYTES)]
    if not columns:
        return
    seeds = list(dict.fromkeys(runs["seed"]))
    each = f"; below it those of seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else ""
    print_line(f"encoded bytes that a node sends (bytes_broadcast / nodes) until the target; –: not reached{each}")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("algorithm", overflow="fold", min_width=len("algorithm"))
    for column in columns:
        table.add_column(column.removeprefix(NODE_BYTES).replace("_", " "), justify="right")
    for name, group in runs.groupby("algorithm", sort=False):
        cells = []
        for column in columns:
            values = [group.loc[group["seed"] == seed, column].iloc[0] for seed in seeds]
            own = [f"{value:.3g}" if value is not None and value == value else "–" for value in values]
            mean = "–" if "–" in own else f"{sum(values) / len(values):.3g}"
            cells.append("\n".join([mean, *(own if len(seeds) > 1 else ())]))
        table.add_row(str(name), *cells)
    console.print(table)


_VERDICTS = {
    "psi": "lowest ψ", "rounds_to_target": "fewest rounds to the target", "mb_to_target": "fewest MB to the target",
    "calls_to_target": "fewest oracle calls to the target", "samples_to_target": "fewest samples to the target",
    "seconds_to_target": "least time to the target",
    "node_accuracy_mean": "highest accuracy, mean over nodes", "solution_error": "nearest to x*",
}


def _show_verdicts(runs: "pd.DataFrame") -> None:
    """Print by each measure the best algorithm, or those that tie, and the paired differences of all others."""
    from dbo.platform.runs.seed_tables import find_approximate, find_verdict

    runs = runs[~runs["single_machine"]]
    if runs["algorithm"].nunique() < 2:
        return
    print_line("paired differences to the best, with their 95 % intervals and the p-value of a paired t-test:")
    for measure, title in _VERDICTS.items():
        if measure in runs and (names := find_approximate(runs, measure)):
            print_line(f"{title}: approximate, no winner; ψ missed its tolerance: {', '.join(names)}")
        verdict = find_verdict(runs, measure) if measure in runs else None
        if verdict is None:
            continue
        first = " and ".join([verdict.best, *verdict.tied])
        print_line(f"{title}: {first}{' tie' if verdict.tied else ''}")
        for name, found in verdict.others:
            interval = "" if found.low is None else f" [{found.low:+.3g}, {found.high:+.3g}], p = {found.p_value:.2g}"
            print_line(f"    {name} − {verdict.best}: {found.mean:+.3g}{interval}")


def _explain_approximate(rows: "pd.DataFrame") -> None:
    """Say what ≈ means, if the table has one."""
    if "psi" in rows and "psi_converged" in rows and ((rows["psi_converged"] == 0) & rows["psi"].notna()).any():
        console.print("≈ approximate: the solve of ψ missed its tolerance; see psi_residual in the .csv",
                      highlight=False)


def _mark_approximate(text: str, row: Mapping[Hashable, Any]) -> str:
    """Mark a value of ψ whose solve has missed its tolerance."""
    return f"≈{text}" if row["psi_converged"] == 0 and text != "–" else text


def _format_number(value: Any, form: str) -> str:
    """Format a number; without decimals from a thousand on, because columns are narrow."""
    if value is None or value != value:
        return "–"
    return f"{value:.0f}" if value >= 1000 else format(value, form)
