"""`dbo watch`: serve a live page of a running experiment."""

from pathlib import Path
from typing import Annotated

import typer


def watch(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run, comparison or sweep.")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="On loopback; 0: any free one.")] = 8321,
) -> None:
    """Serve a live page of a running experiment on loopback."""
    from dbo.dashboards.watch.server import serve

    serve(folder, port)
