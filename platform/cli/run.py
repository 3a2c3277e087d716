"""`dbo run`: run one experiment."""

import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from dbo.platform.cli.console import (
    AllowChangedCode,
    Arguments,
    Quiet,
    console,
    print_line,
    split_arguments,
    validate_out,
    warn,
)
from dbo.platform.cli.report import write_outputs
from dbo.platform.config.redact import redact
from dbo.platform.errors import FolderLockedError, InputError, RunError, ShorterRunError

if TYPE_CHECKING:
    from dbo.platform.runs.runner import Result


_NOT_SHOWN = ("timestamp", "block_seconds", "block_nodes")


def run_experiment(
    arguments: Arguments = None,
    out: Annotated[str | None, typer.Option(
        "--out", metavar="DIR", help="Folder or URL for the results; default: a folder below runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the newest checkpoint in the folder.")] = False,
    start_from: Annotated[Path | None, typer.Option(
        "--from", metavar="DIR", help="Extend the finished run in this folder to more rounds, in --out.")] = None,
    allow_changed_code: AllowChangedCode = False,
    dry_run: Annotated[bool, typer.Option(
        "--dry-run", help="Show all values, sizes, bytes per round and a time estimate; run nothing.")] = False,
    quiet: Quiet = False,
) -> None:
    """Run one experiment and record it in a folder.

    After an interruption, run the same command with --resume. The results are the same, bit for bit.
    """
    from dbo.platform.config.experiment import Experiment

    file, overrides = split_arguments(arguments)
    validate_out(out)
    experiment = Experiment.read(file, overrides)       # before the slow imports: wrong input is refused quickly

    if dry_run:
        from dbo.platform.cli.dry_run import show_dry_run
        from dbo.platform.runs.preparation import default_folder

        show_dry_run(experiment, out or str(default_folder(experiment)))
        return

    from dbo.platform.cli.progress import ProgressDisplay, describe_end
    from dbo.platform.config.value_sources import explain_divergence
    from dbo.platform.runs import runner
    from dbo.platform.tracking.process import follow_in_background

    tracking, folder = experiment.tracking, runner.local_folder(experiment, out)
    with follow_in_background(folder, tracking.uri, tracking.experiment, warn):
        try:
            with nullcontext() if quiet else ProgressDisplay(console, shows_end=False) as display:
                result = runner.run(
                    experiment, out, resume=resume, start_from=start_from, allow_changed_code=allow_changed_code,
                    callback=display,
                )
        except ShorterRunError as error:
            raise InputError(f"{error}: {_suggest_extension(error)}") from None
        if not quiet:
            _show_result(result)
        try:
            if result.is_new or not _has_report(result.folder):
                with runner.publish_additions(out):
                    write_outputs("run", result.folder, quiet)
        except (FolderLockedError, RunError) as error:              # the run itself is complete
            warn(f"the report was not copied to {out}: {error}")
    if result.status != "finished":
        hint = f"; {explain_divergence(experiment)}" if result.status == "diverged" else ""
        raise RunError(f"{result.status}: {result.summary.get('error', '')}{hint}; folder: {result.folder}")
    if quiet:
        print_line(f"{describe_end(result)}; folder: {result.folder}")


def _suggest_extension(error: ShorterRunError) -> str:
    """Return the typed command, changed so that it extends the shorter run in its folder."""
    arguments, kept = iter(sys.argv[1:]), []
    for argument in arguments:
        if argument in ("--out", "--from"):
            next(arguments, None)
        elif not argument.startswith(("--out=", "--from=")) and argument != "--resume":
            kept.append(redact(argument))
    return shlex.join(["dbo", *kept, "--from", error.folder, "--out", f"{error.folder}-{error.rounds}-rounds"])


def _has_report(folder: Path) -> bool:
    """Decide whether the report was written after the run had ended: it then needs no reading of all evaluations."""
    from dbo.platform.runs.run_folder import RunFolder

    report, summary = folder / "report.html", RunFolder(folder).summary
    return report.exists() and summary.exists() and report.stat().st_mtime >= summary.stat().st_mtime


def _show_result(result: "Result") -> None:
    """Print the last evaluation and the folder."""
    grid = Table.grid(padding=(0, 2))
    for key, value in result.summary.get("final", {}).items():
        if value is not None and key not in _NOT_SHOWN:
            grid.add_row(f"  {key}", f"{value:.6g}" if isinstance(value, float) else str(value))
    console.print(f"\n{result.experiment.title} {result.status}", style="bold", highlight=False)
    console.print(grid)
    print_line(f"  folder              {result.folder}")
