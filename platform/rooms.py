"""How rooms that this one must not know add to it: commands of `dbo`, and what is made of results once they are there.

Both are entry points of the installed package, so that a further package can add its own:

    dbo.commands    name = a function with typer's annotations
    dbo.after       name = a function (kind, folder), called after a "run", "compare" or "sweep" has ended in `folder`,
                    that answers with a line to be shown
"""

from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from dbo.platform.console import plainly, warn

Kind = Literal["run", "compare", "sweep"]


def commands() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Commands of other rooms, by name."""
    for point in sorted(entry_points(group="dbo.commands"), key=lambda point: point.name):
        yield point.name, point.load()


def after(kind: Kind, folder: Path, quiet: bool = False) -> None:
    """Lets every room make what it makes of results. The results are safe: what goes wrong here is told, no more."""
    for point in entry_points(group="dbo.after"):
        try:
            told = point.load()(kind, folder)
            if told and not quiet:
                plainly(told)
        except Exception as error:
            warn(f"{point.name}: not made: {type(error).__name__}: {error}")
