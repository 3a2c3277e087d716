"""`dbo watch`: serve a live page of a running experiment."""

from pathlib import Path
from typing import Annotated

import typer

from dbo.platform.cli.console import print_line


def watch_run(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run, comparison or sweep.")],
    port: Annotated[int, typer.Option(
        "--port", metavar="N", min=0, max=65535, help="Port on loopback; 0: any free port.")] = 8321,
) -> None:
    """Serve a live page of a running experiment on this machine."""
    from dbo.dashboards.watch.server import serve_live_page

    serve_live_page(folder, port, print_line)
