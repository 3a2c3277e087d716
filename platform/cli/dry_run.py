"""`dbo run --dry-run`: show the resolved experiment, its sizes and an estimate; write nothing."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from dbo.platform.cli.console import console, print_line

if TYPE_CHECKING:
    from dbo.platform.config.experiment import Experiment
    from dbo.platform.runs.preparation import Prepared

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
