"""`dbo list`: show every component that an experiment can name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from dbo.platform.cli.console import console, split_arguments
from dbo.platform.errors import InputError

if TYPE_CHECKING:
    from dbo.algorithms.registry import Algorithm
    from dbo.platform.config.validation import Parameter
    from dbo.platform.config.value_sources import TracedValue


# Section of an experiment that names a component of each kind.
_SECTIONS = {
    "algorithms": "algorithm", "tasks": "task", "data sets": "task.dataset", "topologies": "topology",
    "partitions": "partition", "compressors": "algorithm.compressor", "engines": "engine",
}
_WITH_SUMMARIES = ("algorithms", "tasks")       # in the overview; of the other kinds it has only names


def list_components(
    arguments: Annotated[list[str] | None, typer.Argument(
        metavar="KIND|NAME|key=value",
        help="Kind (algorithms, tasks, ...) or name to show; settings, plugins=FILE.py.")] = None,
) -> None:
    """List algorithms, tasks, data sets and other components.

    With a kind, show parameters with default, range and meaning. With a name, show the values that an experiment with
    these settings has, and their source: default, preset, or you.
    """
    from dbo.platform.config import overrides
    from dbo.platform.config.experiment import Experiment
    from dbo.platform.config.validation import pick

    name, given = split_arguments(arguments, "kind or name")
    settings = overrides.parse(given)
    if plugins := settings.get("plugins"):
        Experiment(plugins=plugins)              # loads them
    components = read_components()
    if name is None:
        for key in settings:
            pick("list", key, ["plugins"])
        _show_overview(components)
        return
    pick("list", name, [*components, *(component.name for kind in components.values() for component in kind)])
    for kind, members in components.items():
        chosen = [component for component in members if name in (kind, component.name)]
        if chosen:
            _show_parameters(kind, chosen, None if name == kind else settings)


@dataclass(frozen=True, slots=True)
class Component:
    """An algorithm, a task, a data set, …"""

    name: str
    summary: str
    parameters: "list[Parameter]"
    facts: str = ""             # of an algorithm: its family, citation and requirements
    family: str = ""            # of an algorithm

    def format_summary(self) -> str:
        """Return the summary, and the facts in a line of their own."""
        return escape(self.summary) + (f"\n[dim]{escape(self.facts)}[/dim]" if self.facts else "")


def read_components() -> dict[str, list[Component]]:
    """Return kind → its components, in the order of an experiment file."""
    from dbo.algorithms.compression.compressors import COMPRESSORS
    from dbo.algorithms.registry import algorithms
    from dbo.platform.config.engines import ENGINES
    from dbo.platform.config.validation import list_parameters, summarize
    from dbo.platform.network.topology import TOPOLOGIES
    from dbo.tasks.registry import DATASETS, PARTITIONS, TASKS

    kinds: dict[str, Mapping[str, Any]] = {
        "tasks": TASKS, "data sets": DATASETS, "topologies": TOPOLOGIES, "partitions": PARTITIONS,
        "compressors": COMPRESSORS, "engines": ENGINES,
    }
    found = {"algorithms": [
        Component(a.name, a.summary, list_parameters(a.config), _describe_algorithm(a), a.family)
        for a in algorithms().values()
    ]}
    for kind, classes in kinds.items():
        found[kind] = [Component(name, summarize(cls), list_parameters(cls)) for name, cls in classes.items()]
    return found


def _describe_algorithm(algorithm: "Algorithm") -> str:
    """Return family, citation and requirements of an algorithm in one line."""
    family = f"family {algorithm.family}" if algorithm.family else ""
    return " · ".join(filter(None, (family, algorithm.citation, f"needs {algorithm.requirements}")))


def _show_overview(components: dict[str, list[Component]]) -> None:
    """Print a line per algorithm and task, and the names of all other components: one screen."""
    kinds = max(map(len, components))
    for kind, members in components.items():
        if kind in _WITH_SUMMARIES:
            console.print(f"[bold]{kind}[/bold]")
            widths = [max(map(len, column)) for column in zip(*((c.name, c.family) for c in members), strict=True)]
            for component in members:
                name, family = component.name.ljust(widths[0]), component.family.ljust(widths[1])
                family = f"[dim]{escape(family)}[/dim]  " if kind == "algorithms" else ""
                line = f"  [bold cyan]{name}[/bold cyan]  {family}{escape(component.summary)}"
                console.print(line, highlight=False, no_wrap=True, overflow="ellipsis")
        else:
            _show_rows([(f"[bold]{kind}[/bold]", ", ".join(component.name for component in members))], kinds)
    console.print("`dbo list NAME` shows one of them with its values, `dbo list KIND` all of a kind.", highlight=False)


def _show_parameters(kind: str, members: list[Component], settings: dict[str, Any] | None) -> None:
    """Print components with the defaults of their parameters; with settings, the values of that experiment instead."""
    from dbo.platform.config import presets

    resolved = [{} if settings is None else _trace_component(kind, component, settings) for component in members]
    console.print(f"[bold]{kind}[/bold]")
    for component, values in zip(members, resolved, strict=True):
        _show_rows([(f"  [bold cyan]{component.name}[/bold cyan]", component.format_summary())])
        _show_rows([
            (f"    {parameter.name}", *_format_value(parameter, values.get(parameter.name)),
             f"[dim]{escape(parameter.allowed)}[/dim]", escape(parameter.meaning))
            for parameter in component.parameters
        ])
        if settings is not None and kind == "algorithms" and (tuned := presets.list_presets(component.name)):
            console.print("  [bold]presets[/bold]  replace these defaults where an experiment does not set a value")
            _show_rows([
                (f"    {where}", ", ".join(f"{name} {_format(value)}" for name, value in values.items()))
                for where, values in tuned.items()
            ])


def _trace_component(kind: str, component: Component, settings: dict[str, Any]) -> "dict[str, TracedValue]":
    """Return the parameters of a component with their values and sources in the experiment of these settings.

    A component that cannot be used without further settings, such as a file, has its defaults only.
    """
    from dbo.platform.config import overrides
    from dbo.platform.config.experiment import Experiment
    from dbo.platform.config.value_sources import trace_values

    section = _SECTIONS[kind]
    try:
        experiment = Experiment(**overrides.apply({}, {**settings, section: component.name}))
    except InputError:
        if set(settings) - {"plugins"}:
            raise
        return {}
    prefix = f"{section.removesuffix('.dataset')}."
    found = {key.removeprefix(prefix): traced for key, traced in trace_values(experiment).items()
             if key.startswith(prefix)}
    if "compressor.name" in found:
        inner = [f"{key.partition('.')[2]}={_format(traced.value)}" for key, traced in found.items()
                 if key.startswith("compressor.") and key != "compressor.name"]
        name = found["compressor.name"]
        found["compressor"] = replace(name, value=f"{name.value}({', '.join(inner)})")
    return found


def _format_value(parameter: "Parameter", traced: "TracedValue | None") -> tuple[str, ...]:
    """Return the cells of a value and of its source; of a default alone, one cell."""
    default = _format(parameter.default)
    if traced is None:
        return (f"[green]{escape(default)}[/green]",)
    style = {"you": "bold yellow", "preset": "cyan", "default": "dim"}[traced.source]
    instead = f"\n[dim]not {escape(default)}[/dim]" if traced.source == "preset" else ""
    return f"[green]{escape(_format(traced.value))}[/green]", f"[{style}]{traced.source}[/{style}]{instead}"


def _show_rows(rows: Sequence[Sequence[str]], first_width: int = 0) -> None:
    """Print rows in columns; the first one does not wrap."""
    grid = Table.grid(padding=(0, 2))
    for number in range(max(map(len, rows), default=0)):
        grid.add_column(no_wrap=number == 0, min_width=first_width if number == 0 else None)
    for row in rows:
        grid.add_row(*row)
    if rows:
        console.print(grid, highlight=False)


def _format(value: Any) -> str:
    """Format a default as an experiment file has it; a compressor by its registered name."""
    from dbo.algorithms.compression.compressors import COMPRESSORS

    if value is ...:
        return "required"
    if value is None:
        return "null"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_format, value))}]"
    name = COMPRESSORS.find_name(type(value))
    return str(value).replace(type(value).__name__, name) if name else str(value)
