"""`dbo sweep`: run a grid or a search of experiments on Ray Tune."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from dbo.platform.cli.console import (
    KeepOtherEnvironment,
    Quiet,
    console,
    print_line,
    split_arguments,
    validate_out,
    warn,
)
from dbo.platform.cli.report import write_outputs
from dbo.platform.config.redact import redact
from dbo.platform.errors import RunError


def run_sweep(
    arguments: Annotated[list[str] | None, typer.Argument(
        metavar="FILE.yaml|NAME|key=value",
        help="Sweep, and overrides of its experiment (rounds=20), axes (axes.seed=[0,1]) or mode (mode=random).",
    )] = None,
    out: Annotated[str | None, typer.Option(
        "--out", metavar="DIR", help="Folder for all cells; default: a folder below runs/.")] = None,
    resume: Annotated[bool, typer.Option(
        "--resume", help="Resume the sweep in the folder. This is the default.")] = False,
    allow_changed_code: KeepOtherEnvironment = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the cells and the estimate; run nothing.")] = False,
    quiet: Quiet = False,
) -> None:
    """Run a grid or a search of experiments on Ray Tune.

    Without a name, list the included sweeps.
    """
    name, overrides = split_arguments(arguments, "sweep")
    validate_out(out, url_allowed=False)

    from dbo.sweeps import plan, runner, view

    if name is None:
        view.print_shipped_sweeps(console)
        return
    grid = runner.build_grid(plan.read_sweep(plan.find_sweep(name), overrides))
    command = shlex.join(["dbo", "sweep", *map(redact, arguments or ())])
    folder = runner.SweepFolder(Path(out) if out else runner.default_sweep_folder(grid), grid, command)
    folder.read_group()
    progress = runner.SweepProgress(folder, console if dry_run or not quiet else None)
    if dry_run:
        view.print_cells(console, progress)
    if dry_run or not quiet:
        print_line(f"{grid.sweep.name}: {progress.format(runner.count_local_slots(grid))}")
    if dry_run:
        return
    if progress.left:
        runner.check_cells(folder, progress, allow_changed_code)
        runner.connect_cluster(grid)            # first: nothing is written if there is no cluster

    from dbo.platform.tracking.process import follow_in_background

    tracking = grid.base.tracking
    with folder, follow_in_background(folder.path, tracking.uri, tracking.experiment, warn):
        result = runner.run_sweep(folder, progress, None if quiet else console)
        if quiet:
            print_line(f"{view.describe_result(grid.sweep, result)}; folder: {result.out}")
        else:
            view.print_result(console, grid.sweep, result)
            print_line(f"folder: {result.out}")
        write_outputs("sweep", result.out, quiet)
    if result.failed:
        label, error = result.failed[0]
        raise RunError(f"{len(result.failed)} of {len(result.cells)} cells failed; {label}: {error}")
