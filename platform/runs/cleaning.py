"""Find the checkpoints that a run does not need any more, and remove them. Results are never touched.

A finished run needs none: only `dbo run --from` would. An interrupted, failed or diverged one keeps the newest
checkpoint that it can be resumed from, and so does a finished one without a seal: nothing proves that its final state
is intact. Runs that are in use or damaged keep all of them: a repair may need any.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dbo.platform.errors import FolderLockedError, InputError, RunError
from dbo.platform.runs.checkpoints import Checkpoints, remove_checkpoint
from dbo.platform.runs.resume import missing_records
from dbo.platform.runs.run_folder import RunFolder, find_summary, is_locked
from dbo.platform.runs.seal import check_run


@dataclass(frozen=True, slots=True)
class Cleanup:
    """What can be removed from a run folder, or why nothing can."""

    folder: Path
    places: tuple[Path, ...] = ()
    bytes: int = 0
    note: str = ""


def plan_cleanup(folder: Path, keep: int = 0) -> Cleanup:
    """Return what can be removed; `keep` checkpoints of a finished run stay."""
    if is_locked(folder):
        return Cleanup(folder, note="in use by another run")
    return _plan(folder, keep)


def _plan(folder: Path, keep: int) -> Cleanup:
    files = RunFolder(folder)
    if files.checkpoints.is_symlink():
        return Cleanup(folder, note="checkpoints is a symbolic link")
    if not files.checkpoints.is_dir():
        return Cleanup(folder)
    checkpoints = Checkpoints(files.checkpoints, "", allow_other=True)
    verdict = check_run(folder)
    if verdict.state == "damaged":
        return Cleanup(folder, note=f"damaged: {verdict.damage[0]}; repair it first with dbo check --repair")
    summary = find_summary(folder)
    note = ""
    if summary is not None and summary.status == "finished" and verdict.state == "intact":
        removable = checkpoints.list_removable(keep)
    else:
        removable = checkpoints.list_older_than_usable(lambda found: missing_records(files, found) is None)
        status = summary.status if summary else "not finished"
        note = f"{'not sealed' if status == 'finished' else status}: the last checkpoint stays"
    places = tuple(removable)
    return Cleanup(folder, places, sum(map(measure_place, places)), note)


def clean_run(folder: Path, keep: int = 0) -> Cleanup:
    """Remove what `plan_cleanup` finds, under the lock of the folder; return what was removed."""
    files = RunFolder(folder)
    try:
        files.acquire()
    except FolderLockedError:
        return Cleanup(folder, note="in use by another run")
    except InputError as error:
        raise RunError(str(error).removeprefix("--out: ")) from None
    try:
        plan = _plan(folder, keep)          # again: a run may have started and ended since
        _remove(plan.places)
        Checkpoints(files.checkpoints, "").remove_if_empty()
        return plan
    finally:
        files.release()


def _remove(places: Iterable[Path]) -> None:
    for place in places:
        remove_checkpoint(place)
        if os.path.lexists(place):
            raise RunError(f"{place} cannot be removed; is it yours?")


def measure_place(place: Path) -> int:
    """Return the bytes of a folder's files, or of a file; a symbolic link has none."""
    if place.is_symlink():
        return 0
    found = [place] if place.is_file() else [path for path in place.rglob("*") if not path.is_symlink()]
    return sum(path.stat().st_size for path in found if path.is_file())
