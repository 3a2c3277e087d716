"""`dbo ui`: serve the MLflow UI on loopback."""

from pathlib import Path
from typing import Annotated

import typer

from dbo.platform.cli.console import print_line


def serve_ui(
    folder: Annotated[Path, typer.Argument(
        metavar="DIR", help="Folder with recorded runs.")] = Path("runs"),
    port: Annotated[int | None, typer.Option(
        "--port", metavar="N", min=1, max=65535, help="Port on loopback; default: 5000, or a free port.")] = None,
) -> None:
    """Serve the MLflow UI with recorded runs on this machine."""
    from dbo.platform.tracking.mlflow_ui import serve

    serve(folder, port, print_line)
