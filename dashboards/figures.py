"""Figures for papers: the report's, as PDF and PNG, with the fonts and widths of a two-column page.

    dbo report runs/compare-1a2b3c4d --figures figures
    python -m dbo.dashboards.figures runs/compare-1a2b3c4d --out compare.png      # one overview: .png, .pdf or .svg
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbo.dashboards.charts import curves
from dbo.dashboards.charts.draw import DRAWERS, legend, line, log_axis, new, spread_out
from dbo.dashboards.groups import Ordered, order
from dbo.dashboards.load import Gathered, gather
from dbo.platform.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE: dict[Any, Any] = {
    "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "legend.fontsize": 7, "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6,
    "grid.linewidth": 0.4, "grid.alpha": 0.35, "lines.linewidth": 1.2, "pdf.fonttype": 42, "ps.fonttype": 42,
    "svg.fonttype": "none",
}
QUICK = frozenset({"accuracy-mb", "accuracy-seconds", "sensitivity"})


def pick(only: str | None) -> list[str]:
    """The figures that are asked for, by the names that they have in the report."""
    names = list(DRAWERS) if only is None else [name.strip() for name in only.split(",")]
    for name in names:
        if name not in DRAWERS:
            raise InputError(f"--only: {name!r} is not allowed; allowed: {', '.join(DRAWERS)}")
    return names


def write(gathered: Gathered, folder: Path, names: Sequence[str], quick: bool = False) -> list[str]:
    """Each figure that has data as PDF and PNG; the names of those made. Quick: the most looked at alone."""
    import matplotlib as mpl

    ordered, made = order(gathered), []
    with mpl.rc_context(_STYLE):
        for name in names:
            for file, figure in DRAWERS[name](ordered):
                if quick and file not in QUICK:
                    continue
                folder.mkdir(parents=True, exist_ok=True)
                figure.savefig(folder / f"{file}.pdf", metadata={"CreationDate": None})
                figure.savefig(folder / f"{file}.png", dpi=200)
                made.append(file)
    return made


def overview(ordered: Ordered) -> "Figure":
    """Accuracy of the nodes' own models (the worst node, or the seeds' interval, as a shade) against MB and seconds."""
    figure, axes = new(7.2, 3.0, 1, 2, gaps=(0.2, 0.3), sharey=True)
    drawn = [curve for curve in curves.curves(ordered) if "node_accuracy_mean" in curve["y"]]
    if not drawn:
        raise InputError(f"{ordered.gathered.places[0]}: these runs have no accuracies to draw")
    for axis, against in zip(axes[0], ("comm_mb", "seconds"), strict=True):
        log_x = spread_out(drawn, against)
        for curve in drawn:
            line(axis, curve, "node_accuracy_mean", against, log_x=log_x)
        axis.set(xlabel=curves.NAMES[against], ylim=(0, 1))
        axis.grid(visible=True)
        if log_x:
            log_axis(axis)
    axes[0][0].set_ylabel("test accuracy, mean over nodes")
    legend(axes[0][0], [curve["a"] for curve in drawn])
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; wrong input is one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m dbo.dashboards.figures", description="Draws a comparison of runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="folders of runs, comparisons or sweeps")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="a .png, .pdf or .svg file")
    given = parser.parse_args(arguments)
    try:
        if given.out.suffix not in {".png", ".pdf", ".svg"}:
            raise InputError(f"--out: {given.out} must end in .png, .pdf or .svg")
        import matplotlib as mpl

        with mpl.rc_context({**_STYLE, "font.size": 9, "legend.fontsize": 8}):
            figure = overview(order(gather(given.runs)))
            given.out.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(given.out, dpi=200)
    except (InputError, OSError) as error:
        print(f"dbo: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
