"""`dbo report`, and the outputs that every command writes beside its results."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dbo.platform.cli.console import plainly, warn


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Folders of runs, comparisons or sweeps.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page to write.")] = Path("report.html"),
    figures: Annotated[Path | None, typer.Option(
        "--figures", metavar="DIR", help="Also the figures as PDF and PNG, sized for a two-column page.")] = None,
    only: Annotated[str | None, typer.Option(
        "--only", metavar="NAMES", help="With --figures: these figures alone, and no page.")] = None,
    target: Annotated[str | None, typer.Option(
        "--target", metavar="METRIC=LEVEL", help="What is to be reached; default: the comparison's own.")] = None,
) -> None:
    """Make one HTML page of recorded runs."""
    from dbo.dashboards import outputs

    for text in outputs.report(folders, out, figures, only, target):
        typer.echo(text)


def write_outputs(kind: Literal["run", "compare", "sweep"], folder: Path, quiet: bool = False) -> None:
    """Write report and figures beside the results. The results are safe: a failure here is a warning."""
    from dbo.dashboards import outputs

    try:
        written = outputs.after(kind, folder)
        if not quiet:
            plainly(f"report: {written}")
    except Exception as error:
        warn(f"report: not made: {type(error).__name__}: {error}")
