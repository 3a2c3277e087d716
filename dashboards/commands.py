"""Commands that look at recorded runs: `dbo report` and `dbo watch`, and what is made when a command ends."""

from pathlib import Path
from typing import Annotated

import typer


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
    from dbo.dashboards import making

    for text in making.report(folders, out, figures, only, target):
        typer.echo(text)


def watch(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run, comparison or sweep.")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="On loopback; 0: any free one.")] = 8321,
) -> None:
    """Serve a live page of a running experiment on loopback."""
    from dbo.dashboards.watch import serve

    serve(folder, port)


def after(kind: str, folder: Path) -> str:
    """Makes what belongs to results of this kind: a page, the graph, and for several runs their figures."""
    from dbo.dashboards import making

    return f"report: {making.after(kind, folder)}"
