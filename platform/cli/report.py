"""`dbo report`, and the outputs that other commands write beside their results."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

from dbo.platform.cli.console import Folders, console, print_line, warn


def write_report(
    folders: Folders,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Page to write.")] = Path("report.html"),
    figures: Annotated[Path | None, typer.Option(
        "--figures", metavar="DIR", help="Also write the figures as PDF and PNG, sized for a two-column page.")] = None,
    only: Annotated[str | None, typer.Option(
        "--only", metavar="NAMES", help="With --figures: write these figures only, and no page.")] = None,
    target: Annotated[str | None, typer.Option(
        "--target", metavar="METRIC=LEVEL", help="Target of the cost table; default: the comparison's own.")] = None,
) -> None:
    """Write one HTML page about recorded runs."""
    reading = f"reading {', '.join(map(str, folders[:3]))}{' …' if len(folders) > 3 else ''}"
    if not console.is_interactive and all(folder.is_dir() for folder in folders):
        print_line(reading)
    with console.status(Text(reading)) as status:       # on a terminal only
        from dbo.dashboards import outputs  # takes a second itself

        for text in outputs.export_report(folders, out, figures, only, target, notify=status.update):
            print_line(text)


def write_outputs(kind: Literal["run", "compare", "sweep"], folder: Path, quiet: bool = False) -> None:
    """Write report and figures beside the results. The results are complete: a failure here is a warning."""
    from dbo.dashboards import outputs

    try:
        written = outputs.write_beside_results(kind, folder)
        if not quiet:
            print_line(f"report: {written}")
    except Exception as error:
        warn(f"report: not written: {type(error).__name__}: {error}")
