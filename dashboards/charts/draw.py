"""The report's figures on matplotlib axes, in the widths of a two-column page."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dbo.dashboards.charts import curves, nodes
from dbo.dashboards.charts.sensitivity import sensitivity
from dbo.dashboards.groups import Ordered
from dbo.dashboards.load import Series
from dbo.dashboards.palette import look, shades

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN, PAGE = 3.3, 6.9       # inches: one column of a two-column page, and both
Curve = Mapping[str, Any]
Named = Iterator[tuple[str, "Figure"]]
_MARKS = {"lost": "v", "recovered": "^", "diverged": "X", "failed": "s"}


def new(
    width: float, height: float, rows: int = 1, columns: int = 1, *, left: float = 0.58, right: float = 0.1,
    bottom: float = 0.42, top: float = 0.1, gaps: tuple[float, float] = (0.3, 0.3), **more: Any,
) -> tuple["Figure", Any]:
    """A figure with margins and gaps (across, down) in inches; to search for a layout costs more than to draw."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    axes = figure.subplots(rows, columns, squeeze=False, **more)
    across = (width - left - right - gaps[0] * (columns - 1)) / columns
    down = (height - top - bottom - gaps[1] * (rows - 1)) / rows
    figure.subplots_adjust(
        left / width, bottom / height, 1 - right / width, 1 - top / height, gaps[0] / across, gaps[1] / down
    )
    return figure, axes


def _accuracy(ordered: Ordered) -> Named:
    for against, name in (("comm_mb", "mb"), ("seconds", "seconds"), ("round", "rounds")):
        yield from _curves(ordered, f"accuracy-{name}", "node_accuracy_mean", against)


def _loss(ordered: Ordered) -> Named:
    column = "test_loss" if ordered.has("test_loss") else "upper_loss"
    for against, name in (("comm_mb", "mb"), ("round", "rounds")):
        yield from _curves(ordered, f"loss-{name}", column, against)


def _consensus(ordered: Ordered) -> Named:
    for variable in ("x", "y"):
        yield from _curves(ordered, f"consensus-{variable}", f"consensus_{variable}", "round", log=True)


def _curves(ordered: Ordered, name: str, y: str, against: str, log: bool = False) -> Named:
    """A panel per setting in the report's order; one legend."""
    drawn = [curve for curve in curves.curves(ordered) if y in curve["y"]]
    if log:
        drawn = [curve for curve in drawn if any((v or 0) > 0 for v in curve["y"][y]["v"])]
    if not drawn:
        return
    panels = sorted({curve["s"] for curve in drawn})
    graphs = len({setting.topology for setting in ordered.settings})
    wide = 1 if len(panels) == 1 else min(3, graphs if graphs > 1 else len(panels))
    rows = -(-len(panels) // wide)
    single = len(panels) == 1
    figure, axes = new(
        COLUMN if wide == 1 else PAGE, 2.3 if single else 0.4 + 1.75 * rows, rows, wide, top=0.1 if single else 0.25,
        gaps=(0.15, 0.32), sharex=True, sharey=True,
    )
    log_x = spread_out(drawn, against)
    for number, axis in enumerate(axes.flat):
        if number >= len(panels):
            axis.set_visible(False)
            continue
        setting = ordered.settings[panels[number]]
        mine = [curve for curve in drawn if curve["s"] == panels[number]]
        for curve in mine:
            line(axis, curve, y, against, log_x=log_x, log_y=log, crowd=len(mine) > 16, ring=setting.target.metric == y)
        if log:
            axis.set_yscale("log")
            _rate(axis, mine, y, curves.gap_of(ordered, setting))
        if setting.target.metric == y:
            axis.axhline(setting.target.level, color="0.4", linewidth=0.6, linestyle=":")
        _incidents(axis, ordered, panels[number], against)
        axis.grid(visible=True)
        axis.set_title("" if single else ordered.label(setting))
        if number >= len(panels) - wide:
            axis.set_xlabel(curves.NAMES[against])
            axis.tick_params(labelbottom=True)
        if number % wide == 0:
            axis.set_ylabel(curves.NAMES[y])
    if log_x:
        log_axis(axes.flat[0])
    legend(axes.flat[0], [curve["a"] for curve in drawn], "(1 − ρ)$^t$" if log else None)
    yield name, figure


def line(
    axis: "Axes", curve: Curve, y: str, against: str, *, log_x: bool, log_y: bool = False, crowd: bool = False,
    ring: bool = False,
) -> None:
    """A curve with its shade; what a log axis cannot show is left out."""
    drawn, values = look(curve["a"]), curve["y"][y]
    x, v = _array(curve["x"][against]), _array(values["v"])
    keep = (x > 0 if log_x else np.isfinite(x)) & (v > 0 if log_y else np.isfinite(v))
    x, v = x[keep], v[keep]
    style: dict[str, Any] = {"color": drawn.light, "linestyle": drawn.linestyle, "linewidth": 0.7 if crowd else 1.2}
    if len(x) < 2:
        style |= {"marker": "o", "markersize": 3}
    axis.plot(x, v, **style)
    if "lo" in values and not crowd:
        low, high = _array(values["lo"])[keep], _array(values["hi"])[keep]
        axis.fill_between(x, low, high, color=drawn.light, alpha=0.13, linewidth=0)
    if curve.get("bad"):
        axis.plot(x[-1:], v[-1:], "x", color=drawn.light, markersize=5)
    hit = curve["hit"]
    if ring and hit and (hit[against] > 0 or not log_x):
        axis.plot([hit[against]], [hit["y"]], "o", markersize=3.5, markerfacecolor="white", markeredgecolor=drawn.light)


def _array(values: Sequence[float | None]) -> Series:
    return np.array(values, dtype=np.float64)


def spread_out(curves: Sequence[Curve], against: str) -> bool:
    """Where prices differ by more than a few times, both the first and the last round are to be seen: a log axis."""
    ends = [end for curve in curves if (end := max(curve["x"][against], default=0))]
    return against != "round" and bool(ends) and max(ends) / min(ends) > 6


def log_axis(axis: "Axes") -> None:
    from matplotlib.ticker import FuncFormatter

    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _rate(axis: "Axes", curves: Sequence[Curve], y: str, gap: float | None) -> None:
    """(1 − ρ)^t from the largest error at the left edge."""
    values = np.concatenate([_array(curve["y"][y]["v"]) for curve in curves])
    rounds = np.concatenate([_array(curve["x"]["round"]) for curve in curves])
    there = np.isfinite(values) & (values > 0)
    if gap is None or not there.any() or gap >= 1:
        return
    first, last, top, low = rounds[there].min(), rounds[there].max(), values[there].max(), values[there].min()
    end = min(last, first + np.log(low / top) / np.log(1 - gap))
    axis.plot([first, end], [top, top * (1 - gap) ** (end - first)], color="0.45", linestyle="-.", linewidth=0.9)


def _incidents(axis: "Axes", ordered: Ordered, panel: int, against: str) -> None:
    """Marks on the lower edge."""
    for incident in curves.incidents(ordered):
        if incident["s"] == panel:
            axis.plot(
                [incident["x"][against]], [0.0], _MARKS[incident["kind"]], color=look(incident["a"]).light,
                markersize=4, clip_on=False, transform=axis.get_xaxis_transform(), zorder=5, markeredgecolor="white",
                markeredgewidth=0.3,
            )


def legend(axis: "Axes", algorithms: Sequence[str], rate: str | None = None) -> None:
    """A line per algorithm."""
    from matplotlib.lines import Line2D

    names = list(dict.fromkeys(algorithms))
    handles = [Line2D([], [], color=look(n).light, linestyle=look(n).linestyle, label=n) for n in names]
    if rate:
        handles.append(Line2D([], [], color="0.45", linestyle="-.", linewidth=0.9, label=rate))
    axis.legend(handles=handles, frameon=False, handlelength=1.8, borderaxespad=0.2, labelspacing=0.3)


def _sensitivity(ordered: Ordered) -> Named:
    panels = sensitivity(ordered)[:6]
    if not panels:
        return
    wide = min(3, len(panels))
    blocks = -(-len(panels) // wide)
    figure, axes = new(COLUMN if wide == 1 else PAGE, 2.9 * blocks, 2 * blocks, wide, gaps=(0.45, 0.42))
    for axis in axes.flat:
        axis.set_visible(False)
    for number, panel in enumerate(panels):
        row, column = 2 * (number // wide), number % wide
        for axis, key in ((axes[row][column], "final"), (axes[row + 1][column], "mb")):
            axis.set_visible(True)
            _parameter(axis, panel, key)
            if column == 0:
                what = "upper loss" if panel["metric"] == "upper_loss" else "accuracy"
                axis.set_ylabel("MB to target" if key == "mb" else what)
        axes[row + 1][column].set_ylim(bottom=0)
        axes[row + 1][column].set_xlabel(panel["title"].split(",")[0])
    yield "sensitivity", figure


def _parameter(axis: "Axes", panel: Mapping[str, Any], key: str) -> None:
    points = [point for point in panel["points"] if point[key]]
    x, middle = [point["value"] for point in points], _array([point[key][0] for point in points])
    low, high = (_array([point[key][side] for point in points]) for side in (1, 2))
    spread = np.nan_to_num(np.stack([middle - low, high - middle])) if points else None
    drawn = look(panel["a"])
    axis.errorbar(
        x, middle, yerr=spread, color=drawn.light, marker="o", markersize=3, capsize=2, linestyle=drawn.linestyle
    )
    values = [point["value"] for point in panel["points"]]
    if min(values) > 0 and max(values) / min(values) >= 8:
        axis.set_xscale("log")
    axis.set_xticks(values, [f"{value:g}" for value in values], minor=False)
    axis.set_xticks([], minor=True)
    axis.grid(visible=True)


def _bars(stack: Mapping[str, Any] | None, name: str, unit: str) -> Named:
    if stack is None:
        return
    count = min(len(stack["who"]), 24)
    names = [who if len(who) < 34 else who[:32] + "…" for who in stack["who"][:count]]
    top, left = 0.16 * -(-len(stack["names"]) // 4) + 0.08, min(1.9, 0.15 + 0.058 * max(map(len, names)))
    figure, axes = new(COLUMN, 0.45 + top + 0.21 * count, left=left, top=top)
    axis, begin = axes[0][0], np.zeros(count)
    for tint, part in zip(shades(len(stack["names"])), stack["names"], strict=True):
        values = np.nan_to_num(_array(stack["values"][part][:count]))
        axis.barh(
            range(count), values, left=begin, height=0.68, color=tint, label=part, edgecolor="white", linewidth=0.3
        )
        begin = begin + values
    axis.set_yticks(range(count), names)
    axis.invert_yaxis()
    axis.set_xlabel(unit)
    axis.legend(
        frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5 - left / 2 / (COLUMN - left), 1.0),
        handlelength=0.8, columnspacing=0.9, fontsize=6.5,
    )
    yield name, figure


def _nodes(ordered: Ordered) -> Named:
    for run in nodes.heat(ordered)[:1]:
        figure, axes = new(COLUMN, 2.0, top=0.25)
        axis = axes[0][0]
        mesh = axis.pcolormesh(
            run["rounds"], run["nodes"], [_array(row) for row in run["z"]], cmap="cividis", shading="nearest",
            rasterized=True,
        )
        axis.set(xlabel="round", ylabel="node", title=run["who"])
        axis.invert_yaxis()
        figure.colorbar(mesh, ax=axis, label="accuracy")
        yield "nodes", figure


def _topology(ordered: Ordered) -> Named:
    from dbo.dashboards.topology import draw

    seen: dict[str, tuple[str, Any]] = {}
    for cell, run in nodes.chosen(ordered):
        if nodes.drawable(run) and run.network is not None:
            title = f"{cell.setting.topology}, ρ = {run.network['spectral_gap'] or 0:.3g}"
            seen.setdefault(repr(run.network["edges"]), (title, run))
    if not seen:
        return
    shown = list(seen.values())[:3]
    figure, axes = new(
        COLUMN if len(shown) == 1 else PAGE, 2.3, 1, len(shown), left=0.05, right=0.35 if len(shown) == 1 else 0.6,
        bottom=0.05, top=0.35,
    )
    for axis, (title, run) in zip(axes.flat, shown, strict=True):
        bar = figure.colorbar(draw(axis, run, 0.8), ax=axis, shrink=0.8)
        axis.set_title(f"{title}\n{run.algorithm}, round {int(run.columns['round'][-1])}", fontsize=7)
    bar.set_label("distance of x to the mean")
    yield "topology", figure


DRAWERS: dict[str, Callable[[Ordered], Named]] = {
    "accuracy": _accuracy, "loss": _loss, "sensitivity": _sensitivity, "consensus": _consensus,
    "channels": lambda ordered: _bars(nodes.channels(ordered), "channels", "MB broadcast"),
    "oracles": lambda ordered: _bars(nodes.oracles(ordered), "oracles", "oracle calls of one node"),
    "nodes": _nodes, "topology": _topology,
}
