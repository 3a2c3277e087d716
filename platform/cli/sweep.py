"""`dbo sweep`."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dbo.platform.cli.console import Quiet, check_out, console, plainly
from dbo.platform.cli.report import write_outputs
from dbo.platform.config.redact import masked
from dbo.platform.errors import InputError, RunError

if TYPE_CHECKING:
    from dbo.platform.cli.submit import Job

_SWEEP = typer.Argument(
    metavar="FILE.yaml|NAME [key=value ...]",
    help="A sweep; overrides of its experiment (rounds=20), its axes (axes.seed=[0,1]) or itself (mode=random).",
)


def sweep(
    arguments: Annotated[list[str] | None, _SWEEP] = None,
    out: Annotated[str | None, typer.Option(
        "--out", metavar="DIR", help="The folder for all cells; default: below runs/.")] = None,
    resume: Annotated[bool, typer.Option(
        "--resume", help="Go on with the sweep in the folder, as the same command does without this.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the cells and the estimate, run nothing.")] = False,
    quiet: Quiet = False,
) -> None:
    """Run a grid or a search of experiments on Ray Tune; without a name, list those that are shipped."""
    from dbo.sweeps import plan, view
    from dbo.sweeps import runner as sweeping

    given = arguments or []
    names, overrides = _split(given)
    if not names:
        view.show_shipped(console)
        return
    check_out(out, url=False)
    cells = sweeping.plan(plan.read(plan.find(names[0]), overrides))
    folder = sweeping.Folder(
        Path(out) if out else sweeping.default_folder(cells), cells, shlex.join(["dbo", "sweep", *map(masked, given)]))
    folder.earlier()
    shown: Any = None if quiet else console
    forecast = sweeping.Forecast(folder, shown or (console if dry_run else None))
    if dry_run:
        view.show_cells(console, forecast, folder)
    if dry_run or not quiet:
        plainly(f"{cells.sweep.name}: {forecast.text(sweeping.slots(cells))}")
    if dry_run:
        return
    if forecast.left:
        sweeping.connect(cells)             # first of all: without it nothing is written
    with folder, _tracking(folder):
        outcome = sweeping.run(folder, forecast, shown)
        view.show_outcome(console, cells.sweep, outcome)
        plainly(f"folder: {outcome.out}")
        write_outputs("sweep", outcome.out, quiet)
    if outcome.failed:
        label, error = outcome.failed[0]
        raise RunError(f"{len(outcome.failed)} of {len(outcome.cells)} cells failed; {label}: {error}")


def pack(arguments: Sequence[str]) -> "Job":
    """The sweep as a job: checked here, as far as that can be done without its data."""
    from dbo.platform.cli.submit import Job
    from dbo.sweeps import plan
    from dbo.sweeps.grid import Cells

    names, overrides = _split(arguments)
    if not names:
        raise InputError("sweep: a file or a name is required")
    sweep = plan.read(plan.find(names[0]), overrides)
    cells = Cells(sweep, sized=False)
    _ = cells.fixed
    return Job(
        ["sweep", "sweep.yaml"], f"sweep-{sweep.name}-{cells.key[:8]}", cells.key,
        lambda folder: plan.pack(sweep, folder), shared=True,
    )


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    names = [argument for argument in arguments if "=" not in argument]
    if len(names) > 1:
        raise InputError(f"{names[1]!r}: one sweep at most; overrides are of the form key=value")
    return names, [argument for argument in arguments if "=" in argument]


def _tracking(folder: Any) -> Any:
    from dbo.platform.tracking.process import following

    base = folder.cells.base
    return following(folder.path, base.tracking.uri, base.tracking.experiment, plainly)
