"""`dbo list`: everything that an experiment can name, with one line each and its parameters."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from dbo.algorithms.compression.compressors import COMPRESSORS
from dbo.algorithms.registry import algorithms
from dbo.platform.config import presets
from dbo.platform.config.engines import ENGINES
from dbo.platform.config.validation import Parameter, parameters, summary
from dbo.platform.network.topology import TOPOLOGIES
from dbo.tasks.datasets.digits import DATASETS
from dbo.tasks.partitions import PARTITIONS
from dbo.tasks.registry import TASKS


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    summary: str
    parameters: list[Parameter]


def entries() -> dict[str, list[Entry]]:
    """Kind → its entries, in the order of an experiment file."""
    kinds: dict[str, dict[str, type]] = {
        "tasks": TASKS, "data sets": DATASETS, "topologies": TOPOLOGIES, "partitions": PARTITIONS,
        "compressors": COMPRESSORS, "engines": ENGINES,
    }
    found = {"algorithms": [Entry(a.name, a.summary, parameters(a.config)) for a in algorithms().values()]}
    for kind, known in kinds.items():
        found[kind] = [Entry(name, summary(cls), parameters(cls)) for name, cls in known.items()]
    return found


def show(console: Console, only: str | None = None) -> None:
    """Prints the catalogue, or the one entry (or kind) that is asked for."""
    for kind, known in entries().items():
        chosen = [entry for entry in known if only is None or only in (kind, entry.name)]
        if not chosen:
            continue
        console.print(f"\n[bold]{kind}[/bold]")
        for entry in chosen:
            console.print(f"  [bold cyan]{entry.name}[/bold cyan]  {entry.summary}", highlight=False)
            if entry.parameters:
                console.print(_table(entry.parameters))
            if only == entry.name and kind == "algorithms" and (tuned := presets.known(entry.name)):
                console.print("  [bold]presets[/bold]  in the place of these, where an experiment leaves them out")
                console.print(_presets(tuned))


def names() -> Iterator[str]:
    """All that `dbo list WHAT` understands."""
    for kind, known in entries().items():
        yield kind
        yield from (entry.name for entry in known)


def _table(found: list[Parameter]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(min_width=18)
    for parameter in found:
        grid.add_row(f"    {parameter.name}", f"[green]{_show(parameter.default)}[/green]",
                     f"[dim]{parameter.allowed}[/dim]", parameter.meaning)
    return grid


def _presets(tuned: dict[str, dict[str, Any]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for where, values in tuned.items():
        grid.add_row(f"    {where}", ", ".join(f"{name} {_show(value)}" for name, value in values.items()))
    return grid


def _show(value: Any) -> str:
    if value is ...:
        return "required"
    if isinstance(value, float):
        return f"{value:g}"
    name = next((name for name, kind in COMPRESSORS.items() if kind is type(value)), None)
    return str(value).replace(type(value).__name__, name) if name else str(value)
