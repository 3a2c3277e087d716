"""What the commands make, file by file."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from dbo.dashboards.load import gather
from dbo.platform.errors import InputError
from dbo.platform.runs.run_folder import Target


def report(
    folders: Sequence[Path], out: Path, figures: Path | None, only: str | None, target: str | None
) -> Iterator[str]:
    """The page and, if asked for, the figures; says what it has made."""
    from dbo.dashboards import figures as drawing
    from dbo.dashboards import report as page

    if only is not None and figures is None:
        raise InputError(f"--only: {only!r} is not allowed without --figures DIR")
    names = drawing.pick(only)
    if out.is_dir():
        raise InputError(f"--out: {out} is a folder; must be a file")
    if figures is not None and figures.exists() and not figures.is_dir():
        raise InputError(f"--figures: {figures} is a file; must be a folder")
    gathered = gather(folders, Target.parse(target) if target else None)
    try:
        if only is None:
            page.write(gathered, out)
            yield f"report: {out}"
        if figures is not None:
            made = drawing.write(gathered, figures, names)
            yield f"figures: {figures} ({', '.join(made) or 'no data to draw'})"
    except OSError as error:
        raise InputError(f"{error.filename or out}: cannot be written: {error.strerror}") from None


def after(kind: str, folder: Path) -> Path:
    """topology.png and report.html in the folder; of several runs the figures too, of a comparison each run's graph."""
    from dbo.dashboards import figures as drawing
    from dbo.dashboards import report as page
    from dbo.dashboards.charts.nodes import drawable
    from dbo.dashboards.topology import picture

    gathered = gather([folder])
    drawn = [run for run in gathered.runs if drawable(run)]
    if drawn:
        picture(drawn[0], folder / "topology.png")
    if kind == "compare":                       # a sweep has too many runs for a picture of each
        for run in drawn:
            picture(run, run.folder / "topology.png")
    if kind != "run":
        drawing.write(gathered, folder / "figures", ["accuracy", "sensitivity"], quick=True)
    page.write(gathered, folder / "report.html")
    return folder / "report.html"
