"""`dbo sync`: send recorded runs to MLflow."""

from typing import Annotated

import typer

from dbo.platform.cli.console import Folders, print_line


def sync_runs(
    folders: Folders,
    uri: Annotated[str | None, typer.Option(
        "--uri", metavar="URI", help="MLflow store; default: the one that the runs name.")] = None,
    experiment: Annotated[str | None, typer.Option(
        "--experiment", metavar="NAME", help="MLflow experiment; default: the one that the runs name.")] = None,
) -> None:
    """Send recorded runs to MLflow, each point once."""
    from dbo.platform.config import tracking_uri
    from dbo.platform.tracking.sync import find_root, resolve_destination, sync_folder

    if uri is not None:
        tracking_uri.validate_uri("--uri", "" if uri == tracking_uri.OFF else uri)
    # Check every folder before the first one is sent.
    stores = [resolve_destination(find_root(folder), uri) for folder in folders]
    for folder, store in zip(folders, stores, strict=True):
        sync_folder(folder, store, experiment, print_line)
