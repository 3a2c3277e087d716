"""`dbo run --dry-run` and `dbo compare --dry-run`: show what would run, its sizes and an estimate; write nothing."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.markup import escape
from rich.table import Table

from dbo.platform.cli.console import console, print_line

if TYPE_CHECKING:
    from pathlib import Path

    from dbo.platform.config.experiment import Experiment
    from dbo.platform.runs.preparation import Prepared
    from dbo.platform.runs.schema import Target

_STYLES = {"you": "bold yellow", "preset": "cyan", "default": "dim"}


def show_dry_run(experiment: "Experiment", folder: str) -> None:
    """Print every value with its source, then sizes, traffic and time from two measured rounds."""
    from dbo.platform.config.engines import LocalSettings
    from dbo.platform.engine.arrangement import arrange
    from dbo.platform.engine.automatic import derive_values
    from dbo.platform.runs.disk_size import estimate_disk, format_bytes
    from dbo.platform.runs.preparation import prepare
    from dbo.sweeps.estimate import measure_experiment
    from dbo.sweeps.live_table import format_duration

    _show_values(experiment)
    with console.status("loading data and measuring two rounds"):
        prepared = prepare(experiment)
        measured = measure_experiment(experiment, prepared)
    estimate = measured.extrapolate(experiment)
    where = "in one process" if isinstance(experiment.parts.engine, LocalSettings) else \
        "in one process; Ray actors compute in parallel, and every packet takes a few milliseconds more"
    choice = experiment.engine_choice
    facts = {
        **({} if choice is None else {"engine": f"auto: {choice.name}, {choice.reason}"}),
        "sizes": _describe_sizes(prepared),
        "network": _describe_network(experiment, prepared),
        "traffic": "none: one machine holds all data" if not measured.round_bytes else
                   f"{format_bytes(measured.round_bytes)} per round over all links, {measured.packets} packets a node; "
                   f"{format_bytes(estimate.bytes_links)} in {experiment.rounds} rounds",
        "time": f"{measured.round_seconds:.2g} s per round, {measured.evaluation_seconds:.2g} s per evaluation, "
                f"about {format_duration(estimate.seconds)} in all {where}",
        "disk": str(estimate_disk(experiment, prepared)),
        "folder": folder,
    }
    problem, network = arrange(experiment.parts.algorithm, prepared.problem, prepared.network)
    if derived := derive_values(experiment, problem, network):
        facts["auto"] = ", ".join(f"{name} = {value:.3g}" for name, value in derived.items())
    console.print()
    for name, text in facts.items():
        print_line(f"{name:<8} {text}")


def show_comparison_plan(experiments: "Sequence[Experiment]", target: "Target", out: "Path") -> None:
    """Print a line per run, with its budget and an estimate, then sizes and the sum; refuse a wrong folder."""
    from dbo.platform.cli.compare import show_problem
    from dbo.platform.runs.compare import find_folders, has_ended, list_members
    from dbo.platform.runs.disk_size import format_bytes
    from dbo.platform.runs.preparation import prepare
    from dbo.platform.runs.targets import check_measured
    from dbo.sweeps.estimate import estimate_cells
    from dbo.sweeps.grid import SweepCell
    from dbo.sweeps.live_table import format_duration

    ended = [has_ended(folder) for folder in find_folders(experiments, out)]
    with console.status("loading data and measuring rounds of some runs"):
        on_graph = [one for one in experiments if one.parts.algorithm.network != "star"]
        prepared = prepare((on_graph or experiments)[0])
        for one in (target, *target.further):
            check_measured(one, prepared.problem, experiments[0].task["name"])
        cells = [SweepCell({}, experiment) for experiment in experiments]
        estimates = estimate_cells([cell for cell, done in zip(cells, ended, strict=True) if not done])
    show_problem(experiments)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for heading in ("run", "rounds", "ends earlier", "engine", "status", "about", "between nodes"):
        table.add_column(heading, justify="right" if heading in ("rounds", "about", "between nodes") else "left")
    for member, cell, done in zip(list_members(experiments), cells, ended, strict=True):
        found = estimates.get(cell.name)
        table.add_row(
            member, f"{cell.experiment.rounds:,}", _describe_stop(cell.experiment), cell.experiment.engine["name"],
            "done" if done else "to run", format_duration(found.seconds) if found else "–",
            format_bytes(found.bytes_links) if found else "–")
    console.print(table, highlight=False)
    count = f"{len(cells)} runs" + (f", {sum(ended)} already done" if any(ended) else "")
    seconds = sum(found.seconds for found in estimates.values())
    links = sum(found.bytes_links for found in estimates.values())
    print_line(f"sizes    {_describe_sizes(prepared)}")
    print_line(f"target   {', '.join(map(str, (target, *target.further)))}")
    print_line(f"folder   {out}")
    print_line(f"{count}; about {format_duration(seconds)} one after another, {format_bytes(links)} between nodes"
               if estimates else count)


def _describe_stop(experiment: "Experiment") -> str:
    """Return the target and the budgets that end a run before its rounds."""
    until = {key: value for key, value in (experiment.to_dict()["until"] or {}).items() if value is not None}
    return ", ".join(str(value) if key == "target" else f"{key} {value:,}" for key, value in until.items()) or "–"


def _show_values(experiment: "Experiment") -> None:
    """Print a line per value: dotted key, value, and who chose it."""
    from dbo.platform.config.redact import redact_all
    from dbo.platform.config.value_sources import trace_values

    grid = Table.grid(padding=(0, 2))
    for key, traced in trace_values(experiment).items():
        value = redact_all({"value": traced.value})["value"]
        style = _STYLES[traced.source]
        grid.add_row(escape(key), f"[green]{escape(_format(value))}[/green]", f"[{style}]{traced.source}[/{style}]")
    console.print(grid, highlight=False)


def _describe_sizes(prepared: "Prepared") -> str:
    problem = prepared.problem
    lower, upper = problem.sample_sizes()
    samples = f"; samples per node: {_range(lower)} lower level, {_range(upper)} upper level" if any(lower) else ""
    return f"x has {problem.dim_x:,} entries, y {problem.dim_y:,}; {problem.nodes} nodes{samples}"


def _describe_network(experiment: "Experiment", prepared: "Prepared") -> str:
    facts = prepared.network.describe()
    gap = facts.get("spectral_gap")
    return f"{experiment.topology['name']}, {facts['links']} links{f', spectral gap {gap:.3g}' if gap else ''}"


def _range(sizes: Sequence[int]) -> str:
    low, high = min(sizes), max(sizes)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _format(value: Any) -> str:
    if value is None:
        return "null"
    return f"{value:g}" if isinstance(value, float) else str(value)
