"""`dbo list`: show every component that an experiment can name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from dbo.platform.cli.console import console, split_arguments

if TYPE_CHECKING:
    from dbo.algorithms.registry import Algorithm
    from dbo.platform.config.validation import Parameter


def list_components(
    arguments: Annotated[list[str] | None, typer.Argument(
        metavar="KIND|NAME|plugins=[FILE.py]",
        help="Kind (algorithms, tasks, ...) or name whose parameters are shown; plugins to include.")] = None,
) -> None:
    """List algorithms, tasks, data sets and other components.

    With a kind or a name, also show parameters: default, range and meaning.
    """
    from dbo.platform.config import overrides
    from dbo.platform.config.experiment import Experiment
    from dbo.platform.config.validation import pick

    name, given = split_arguments(arguments, "kind or name")
    settings = overrides.parse(given)
    for key in settings:
        pick("list", key, ["plugins"])
    if settings:
        Experiment(**settings)              # loads the plugins
    components = read_components()
    if name is None:
        _show_overview(components)
        return
    pick("list", name, [*components, *(component.name for kind in components.values() for component in kind)])
    for kind, members in components.items():
        chosen = [component for component in members if name in (kind, component.name)]
        if chosen:
            _show_parameters(kind, chosen, with_presets=name != kind and kind == "algorithms")


@dataclass(frozen=True, slots=True)
class Component:
    """An algorithm, a task, a data set, …"""

    name: str
    summary: str
    parameters: "list[Parameter]"
    facts: str = ""             # of an algorithm: its family, citation and requirements

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
        Component(a.name, a.summary, list_parameters(a.config), _describe_algorithm(a)) for a in algorithms().values()
    ]}
    for kind, classes in kinds.items():
        found[kind] = [Component(name, summarize(cls), list_parameters(cls)) for name, cls in classes.items()]
    return found


def _describe_algorithm(algorithm: "Algorithm") -> str:
    """Return family, citation and requirements of an algorithm in one line."""
    family = f"family {algorithm.family}" if algorithm.family else ""
    return " · ".join(filter(None, (family, algorithm.citation, f"needs {algorithm.requirements}")))


def _show_overview(components: dict[str, list[Component]]) -> None:
    """Print a line per component."""
    width = max(len(component.name) for members in components.values() for component in members)
    for kind, members in components.items():
        console.print(f"[bold]{kind}[/bold]")
        rows = [(f"  [bold cyan]{component.name}[/bold cyan]", component.format_summary()) for component in members]
        _show_rows(rows, first_width=width + 2)
        console.print()
    console.print("`dbo list NAME` shows the parameters of one of them.", highlight=False)


def _show_parameters(kind: str, members: list[Component], with_presets: bool) -> None:
    """Print components with their parameters: name, default, range and meaning."""
    from dbo.platform.config import presets

    console.print(f"[bold]{kind}[/bold]")
    for component in members:
        _show_rows([(f"  [bold cyan]{component.name}[/bold cyan]", component.format_summary())])
        _show_rows([
            (f"    {parameter.name}", f"[green]{escape(_format(parameter.default))}[/green]",
             f"[dim]{escape(parameter.allowed)}[/dim]", escape(parameter.meaning))
            for parameter in component.parameters
        ])
        if with_presets and (tuned := presets.list_presets(component.name)):
            console.print("  [bold]presets[/bold]  replace these defaults where an experiment does not set a value")
            _show_rows([
                (f"    {where}", ", ".join(f"{name} {_format(value)}" for name, value in values.items()))
                for where, values in tuned.items()
            ])


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
    name = COMPRESSORS.find_name(type(value))
    return str(value).replace(type(value).__name__, name) if name else str(value)
