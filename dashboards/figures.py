"""Write figures for papers: those of the report as PDF and PNG, with the fonts and widths of a two-column page.

    dbo report runs/compare-1a2b3c4d --figures figures
    python -m dbo.dashboards.figures runs/compare-1a2b3c4d --out compare.png      # one overview: .png, .pdf or .svg
"""

import argparse
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbo.dashboards.charts.curves import AXIS_TITLES, build_curves
from dbo.dashboards.charts.draw import DRAWERS, add_legend, create_figure, draw_curve, needs_log_axis, set_log_axis
from dbo.dashboards.figure_file import save_figure
from dbo.dashboards.groups import GroupedRuns, group_runs
from dbo.dashboards.load import RunCollection, load_runs
from dbo.platform.config.terminal import escape_control
from dbo.platform.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE: dict[Any, Any] = {
    "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "legend.fontsize": 7, "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6,
    "grid.linewidth": 0.4, "grid.alpha": 0.35, "lines.linewidth": 1.2, "pdf.fonttype": 42, "ps.fonttype": 42,
    "svg.fonttype": "none",
}


def select_figures(only: str | None) -> list[str]:
    """Return the names in `--only a,b`, or all figures of the report."""
    names = list(DRAWERS) if only is None else [name.strip() for name in only.split(",")]
    for name in names:
        if name not in DRAWERS:
            raise InputError(f"--only: {name!r} is not allowed; allowed: {', '.join(DRAWERS)}")
    return names


def write_figures(
    collection: RunCollection, folder: Path, names: Sequence[str], files: Collection[str] | None = None
) -> list[str]:
    """Write each figure that has data as PDF and PNG, of `files` only; return the names of the files."""
    import matplotlib as mpl

    runs, written = group_runs(collection), []
    with mpl.rc_context(_STYLE):
        for name in names:
            for file, figure in DRAWERS[name](runs):
                if files is not None and file not in files:
                    continue
                folder.mkdir(parents=True, exist_ok=True)
                save_figure(figure, folder / f"{file}.pdf", metadata={"CreationDate": None})
                save_figure(figure, folder / f"{file}.png", dpi=200)
                written.append(file)
    return written


def draw_overview(runs: GroupedRuns) -> "Figure":
    """Draw the mean accuracy over nodes against MB and seconds, with the worst node or the interval as a shade."""
    figure, axes = create_figure(7.2, 3.0, 1, 2, gaps=(0.2, 0.3), sharey=True)
    curves = [curve for curve in build_curves(runs) if "node_accuracy_mean" in curve["y"]]
    if not curves:
        raise InputError(f"{runs.collection.folders[0]}: no run has an accuracy to draw")
    for axis, x in zip(axes[0], ("comm_mb", "seconds"), strict=True):
        log_x = needs_log_axis(curves, x)
        for curve in curves:
            draw_curve(axis, curve, runs.series[curve["series"]], x, "node_accuracy_mean", log_x=log_x)
        axis.set(xlabel=AXIS_TITLES[x], ylim=(0, 1))
        axis.grid(visible=True)
        if log_x:
            set_log_axis(axis)
    axes[0][0].set_ylabel("test accuracy, mean over nodes")
    add_legend(axes[0][0], {curve["series"]: runs.series[curve["series"]] for curve in curves})
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; wrong input is one line and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m dbo.dashboards.figures", description="Draw an overview of a comparison."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="folders of runs, comparisons or sweeps")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="a .png, .pdf or .svg file")
    given = parser.parse_args(arguments)
    try:
        if given.out.suffix not in {".png", ".pdf", ".svg"}:
            raise InputError(f"--out: {given.out} is not allowed; must end in .png, .pdf or .svg")
        import matplotlib as mpl

        with mpl.rc_context({**_STYLE, "font.size": 9, "legend.fontsize": 8}):
            figure = draw_overview(group_runs(load_runs(given.runs)))
            given.out.parent.mkdir(parents=True, exist_ok=True)
            save_figure(figure, given.out, dpi=200)
    except (InputError, OSError) as error:
        print(f"dbo: {escape_control(str(error))}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
