"""Write the files of `dbo report`, and those that `run`, `compare` and `sweep` leave beside their results."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from dbo.dashboards.load import load_runs
from dbo.platform.errors import InputError
from dbo.platform.runs.schema import Target

_FIRST_FIGURES = ("costs", "accuracy-mb", "accuracy-seconds", "sensitivity")      # all others: `dbo report --figures`


def export_report(
    folders: Sequence[Path], out: Path, figures: Path | None, only: str | None, target: str | None,
    notify: Callable[[str], None] = lambda _: None,
) -> Iterator[str]:
    """Write the page and, if requested, the figures; yield a line about each. `notify` gets what is being done."""
    from dbo.dashboards.figures import select_figures, write_figures
    from dbo.dashboards.report import write_page

    if only is not None and figures is None:
        raise InputError(f"--only: {only!r} is not allowed without --figures DIR")
    names = select_figures(only)
    if out.is_dir():
        raise InputError(f"--out: {out} is a folder; must be a file")
    if figures is not None and figures.exists() and not figures.is_dir():
        raise InputError(f"--figures: {figures} is a file; must be a folder")
    collection = load_runs(folders, Target.parse(target) if target else None)
    number = len(collection.runs)
    runs = f"{number} run{'' if number == 1 else 's'}"
    try:
        if only is None:
            notify(f"drawing the page of {runs}")
            write_page(collection, out)
            yield f"report: {out}"
        if figures is not None:
            notify(f"drawing the figures of {runs}")
            written = write_figures(collection, figures, names)
            yield f"figures: {figures} ({', '.join(written) or 'no data to draw'})"
    except OSError as error:
        raise InputError(f"{error.filename or out}: cannot be written: {error.strerror}") from None


def write_beside_results(kind: Literal["run", "compare", "sweep"], folder: Path) -> Path:
    """Write report.html and topology.png into the folder; of several runs also figures; return the page's path."""
    from dbo.dashboards.figures import write_figures
    from dbo.dashboards.report import write_page
    from dbo.dashboards.topology import has_graph, save_graph

    collection = load_runs([folder])
    with_graph = [run for run in collection.runs if has_graph(run)]
    if with_graph:
        save_graph(with_graph[0], folder / "topology.png")
    if kind == "compare":                       # a sweep has too many runs for a picture of each
        for run in with_graph:
            save_graph(run, run.folder / "topology.png")
    if kind != "run":
        if (folder / "figures").is_symlink():
            raise InputError(f"{folder / 'figures'} is a symbolic link; remove it")
        write_figures(collection, folder / "figures", ["costs", "accuracy", "sensitivity"], _FIRST_FIGURES)
    write_page(collection, folder / "report.html")
    return folder / "report.html"
