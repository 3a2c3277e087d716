"""`dbo check`: verify the seals of runs, and repair what can be repaired."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dbo.platform.cli.console import Folders, print_line
from dbo.platform.errors import InputError, RunError

if TYPE_CHECKING:
    from dbo.platform.runs.seal import Verdict

_DEPTH = 3              # folders below the given one in which runs are searched


def check_runs(
    folders: Folders,
    repair: Annotated[bool, typer.Option(
        "--repair", help="Repair damaged files from copies and checkpoints; replay rounds if necessary.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show only damaged runs.")] = False,
) -> None:
    """Verify that the files of runs are as the runs left them.

    Exit code 0: all are intact, or carry no manifest. Exit code 1: a file is damaged.
    """
    from dbo.platform.runs.seal import check_run

    found = list(dict.fromkeys(run for folder in folders for run in find_runs(folder)))
    damaged = 0
    for run in found:
        verdict = check_run(run)
        if verdict.state == "damaged" and repair:
            print_line(str(verdict))
            verdict = _repair(run)
        if verdict.state == "damaged" or not quiet:
            print_line(str(verdict))
        damaged += verdict.state == "damaged"
    if damaged:
        hint = "" if repair else "; repair with dbo check --repair"
        raise RunError(f"{damaged} of {len(found)} {'run is' if len(found) == 1 else 'runs are'} damaged{hint}")


def _repair(folder: Path) -> "Verdict":
    """Repair a run, and return the verdict after it; what keeps it from being repaired is part of the verdict."""
    from dbo.platform.runs.repair import repair_run
    from dbo.platform.runs.seal import Verdict, check_run

    try:
        verdict, done = repair_run(folder)
    except (InputError, RunError) as error:
        return Verdict(folder, "damaged", check_run(folder).damage, f"not repaired: {error}")
    for text in done:
        print_line(f"{folder}: {text}")
    return verdict


def find_runs(folder: Path, follow_links: bool = True) -> list[Path]:
    """Return the run folders of a run, a comparison or a sweep, or below a folder of several."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    found = [run for run in _search(folder, _DEPTH) if follow_links or not _has_link(folder, run)]
    if not found:
        raise InputError(f"{folder}: no run, comparison or sweep in it, down to {_DEPTH} folders below")
    return found


def _has_link(folder: Path, run: Path) -> bool:
    """Decide whether the way from a folder down to a run leads through a symbolic link."""
    below = [run, *run.parents][: len(run.relative_to(folder).parts)]
    return any(place.is_symlink() for place in below)


def _search(folder: Path, depth: int) -> Iterator[Path]:
    from dbo.platform.runs.run_folder import RunFolder, has_group, read_group

    files = RunFolder(folder)
    if files.has_run() or (files.manifest.exists() and files.checkpoints.exists()):
        yield folder
    elif has_group(folder):
        yield from (place for member in read_group(folder).members if RunFolder(place := folder / member).has_run())
    elif depth > 0:
        for inner in sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != "."):
            yield from _search(inner, depth - 1)
