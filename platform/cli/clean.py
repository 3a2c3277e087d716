"""`dbo clean`: remove the checkpoints of finished runs."""

from pathlib import Path
from typing import Annotated

import typer

from dbo.platform.cli.check import find_runs
from dbo.platform.cli.console import Folders, print_line
from dbo.platform.errors import InputError, RunError
from dbo.platform.runs.remote import is_url


def clean_runs(
    folders: Folders,
    keep: Annotated[int, typer.Option(
        "--keep", min=0, metavar="N", help="Keep the newest N checkpoints of finished runs; --from needs one.")] = 0,
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.")] = False,
) -> None:
    """Remove checkpoints that finished runs do not need; results stay.

    An interrupted, failed or diverged run keeps its last checkpoint. A run that is in use or damaged keeps all of them.
    """
    from dbo.platform.runs.cleaning import Cleanup, clean_run, plan_cleanup
    from dbo.platform.runs.disk_size import format_bytes

    def describe(found: Cleanup) -> str:
        count = len(found.places)
        size = f"{format_bytes(found.bytes)} in {count} checkpoint{'s' if count != 1 else ''}" if count else "nothing"
        return f"{found.folder}: {size}{f' ({found.note})' if found.note else ''}"

    plans = [plan_cleanup(run, keep) for run in _find_own_runs(folders)]
    for plan in plans:
        if plan.places or plan.note:
            print_line(describe(plan))
    planned = [plan for plan in plans if plan.places]
    if not planned:
        print_line("nothing to remove")
        return
    total = format_bytes(sum(plan.bytes for plan in planned))
    if not yes and not _confirm(f"remove {total} from {len(planned)} run{'s' if len(planned) > 1 else ''}?"):
        print_line("nothing was removed")
        return
    freed, errors = 0, []
    for plan in planned:
        try:
            freed += clean_run(plan.folder, keep).bytes
        except RunError as error:
            errors.append(str(error))
    print_line(f"freed {format_bytes(freed)}")
    if errors:
        raise RunError("; ".join(errors))


def _find_own_runs(folders: list[Path]) -> list[Path]:
    """Return the runs in folders; not those behind symbolic links, which may belong to somebody else."""
    for folder in folders:
        if is_url(str(folder)):
            raise InputError(f"{folder}: must be a folder on this machine; keep_checkpoints=0 saves space at a URL")
    return list(dict.fromkeys(run for folder in folders for run in find_runs(folder, follow_links=False)))


def _confirm(question: str) -> bool:
    try:
        return typer.confirm(question)
    except typer.Abort:                 # Ctrl-C, or nobody is there to answer
        raise InputError("--yes: give it to remove without being asked; nothing was removed") from None
