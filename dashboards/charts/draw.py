"""Draw the report's figures with matplotlib, in the widths of a two-column page."""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dbo.dashboards.charts import nodes
from dbo.dashboards.charts.costs import build_cost_panels, draw_cost_panels
from dbo.dashboards.charts.curves import (
    AXIS_TITLES,
    NODE_MB,
    PSI_COLUMNS,
    Curve,
    build_curves,
    list_incidents,
    mean_spectral_gap,
)
from dbo.dashboards.charts.replay import build_replay_panels, draw_map, draw_times
from dbo.dashboards.charts.sensitivity import SensitivityPanel, build_sensitivity_panels
from dbo.dashboards.groups import GroupedRuns
from dbo.dashboards.load import RunData, Series
from dbo.dashboards.palette import AlgorithmStyle, get_style, sample_colours, sample_scale
from dbo.dashboards.topology import draw_graph, has_graph

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN_WIDTH, PAGE_WIDTH = 3.3, 6.9       # inches: one column of a two-column page, and both
_INCIDENT_MARKERS = {"lost": "v", "recovered": "^", "diverged": "X", "failed": "s"}
_MANY_CURVES = 16                         # in one panel: thinner lines, no shades
_LOG_AXIS_RATIO = 6                       # costs that differ by more than this go on a log axis
_MAX_BARS = 24
_MAX_SENSITIVITY_PANELS = 9
_LEGEND_LINE = 0.35                       # inches of a legend's entry before its text
NamedFigures = Iterator[tuple[str, "Figure"]]


def create_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, *, left: float = 0.58, right: float = 0.1,
    bottom: float = 0.42, top: float = 0.1, gaps: tuple[float, float] = (0.3, 0.3), **options: Any,
) -> tuple["Figure", Any]:
    """Return a figure with margins and gaps (across, down) in inches; automatic layouts take longer than drawing."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    across = (width - left - right - gaps[0] * (columns - 1)) / columns
    down = (height - top - bottom - gaps[1] * (rows - 1)) / rows
    figure.subplots_adjust(
        left / width, bottom / height, 1 - right / width, 1 - top / height, gaps[0] / across, gaps[1] / down
    )
    return figure, axes


def _draw_psi(runs: GroupedRuns) -> NamedFigures:
    for column, name in zip(PSI_COLUMNS, ("psi", "psi-gradient"), strict=True):
        for x, axis in (("comm_mb", "mb"), ("round", "rounds")):
            yield from _draw_curve_panels(runs, f"{name}-{axis}", x, column)


def _draw_accuracy(runs: GroupedRuns) -> NamedFigures:
    for x, name in (("comm_mb", "mb"), (NODE_MB, "node-mb"), ("seconds", "seconds"), ("round", "rounds")):
        yield from _draw_curve_panels(runs, f"accuracy-{name}", x, "node_accuracy_mean")


def _draw_loss(runs: GroupedRuns) -> NamedFigures:
    y = "test_loss" if runs.has_column("test_loss") else "upper_loss"
    for x, name in (("comm_mb", "mb"), ("round", "rounds")):
        yield from _draw_curve_panels(runs, f"loss-{name}", x, y)


def _draw_consensus(runs: GroupedRuns) -> NamedFigures:
    for variable in ("x", "y"):
        yield from _draw_curve_panels(runs, f"consensus-{variable}", "round", f"consensus_{variable}", log_y=True)


def _draw_curve_panels(runs: GroupedRuns, name: str, x: str, y: str, log_y: bool = False) -> NamedFigures:
    """Draw a panel per setting in the report's order, with one legend."""
    curves = [curve for curve in build_curves(runs) if y in curve["y"]]
    if log_y:
        curves = [curve for curve in curves if any((value or 0) > 0 for value in curve["y"][y]["mean"])]
    if not curves:
        return
    numbers = sorted({curve["setting"] for curve in curves})
    is_single = len(numbers) == 1
    topologies = len({setting.topology for setting in runs.settings})
    columns = 1 if is_single else min(3, topologies if topologies > 1 else len(numbers))
    rows = -(-len(numbers) // columns)
    figure, axes = create_figure(
        COLUMN_WIDTH if columns == 1 else PAGE_WIDTH, 2.3 if is_single else 0.4 + 1.75 * rows, rows, columns,
        top=0.1 if is_single else 0.25, gaps=(0.15, 0.32), sharex=True, sharey=True,
    )
    log_x = needs_log_axis(curves, x)
    for position, axis in enumerate(axes.flat):
        if position >= len(numbers):
            axis.set_visible(False)
            continue
        _draw_curve_panel(axis, runs, numbers[position], curves, x, y, log_x, log_y)
        axis.set_title("" if is_single else runs.label_setting(runs.settings[numbers[position]]))
        if position >= len(numbers) - columns:
            axis.set_xlabel(AXIS_TITLES[x])
            axis.tick_params(labelbottom=True)
        if position % columns == 0:
            axis.set_ylabel(AXIS_TITLES[y])
    if log_x:
        set_log_axis(axes.flat[0])
    add_legend(axes.flat[0], {curve["series"]: runs.series[curve["series"]] for curve in curves},
               "(1 − ρ)$^t$" if log_y else None)
    yield name, figure


def _draw_curve_panel(
    axis: "Axes", runs: GroupedRuns, number: int, curves: Sequence[Curve], x: str, y: str, log_x: bool, log_y: bool
) -> None:
    setting, mine = runs.settings[number], [curve for curve in curves if curve["setting"] == number]
    is_target = setting.target.metric == y
    for curve in mine:
        draw_curve(
            axis, curve, runs.series[curve["series"]], x, y, log_x=log_x, log_y=log_y,
            is_crowded=len(mine) > _MANY_CURVES, mark_target=is_target,
        )
    if log_y:
        axis.set_yscale("log")
        _draw_averaging_rate(axis, mine, y, mean_spectral_gap(runs, setting))
    if is_target:
        axis.axhline(setting.target.level, color="0.4", linewidth=0.6, linestyle=":")
    for incident in list_incidents(runs):
        if incident["setting"] == number:
            axis.plot(
                [incident["x"][x]], [0.0], _INCIDENT_MARKERS[incident["kind"]], clip_on=False, zorder=5,
                color=runs.series[incident["series"]].light, markersize=4, transform=axis.get_xaxis_transform(),
                markeredgecolor="white", markeredgewidth=0.3,
            )
    axis.grid(visible=True)


def draw_curve(
    axis: "Axes", curve: Curve, style: AlgorithmStyle, x: str, y: str, *, log_x: bool, log_y: bool = False,
    is_crowded: bool = False, mark_target: bool = False,
) -> None:
    """Draw a curve with its shade, without the points that a log axis cannot show."""
    values = curve["y"][y]
    xs, ys = _to_array(curve["x"][x]), _to_array(values["mean"])
    keep = (xs > 0 if log_x else np.isfinite(xs)) & (ys > 0 if log_y else np.isfinite(ys))
    xs, ys = xs[keep], ys[keep]
    axis.plot(
        xs, ys, color=style.light, linestyle=style.linestyle, linewidth=0.7 if is_crowded else 1.2,
        marker="o" if len(xs) < 2 else None, markersize=3,
    )
    if "low" in values and not is_crowded:
        low, high = _to_array(values["low"])[keep], _to_array(values["high"])[keep]
        axis.fill_between(xs, low, high, color=style.light, alpha=0.13, linewidth=0)
    if curve["failed"]:
        axis.plot(xs[-1:], ys[-1:], "x", color=style.light, markersize=5)
    reached = curve["reached"]
    if mark_target and reached and ((reached[x] or 0) > 0 or not log_x):
        axis.plot(
            *_to_array([reached[x], reached["y"]]).reshape(2, 1), "o", markersize=3.5, markerfacecolor="white",
            markeredgecolor=style.light,
        )


def needs_log_axis(curves: Sequence[Curve], x: str) -> bool:
    """Decide whether costs differ so much that a linear axis would hide the cheapest curves; bytes per node always do.
    """
    ends = [end for curve in curves if (end := max(value or 0 for value in curve["x"][x] or [0]))]
    return x != "round" and bool(ends) and (x == NODE_MB or max(ends) / min(ends) > _LOG_AXIS_RATIO)


def set_log_axis(axis: "Axes") -> None:
    """Make the horizontal axis logarithmic, with plain numbers as labels."""
    from matplotlib.ticker import FuncFormatter

    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _draw_averaging_rate(axis: "Axes", curves: Sequence[Curve], y: str, gap: float | None) -> None:
    """Draw (1 − ρ)^t from the largest error at the left edge."""
    values = np.concatenate([_to_array(curve["y"][y]["mean"]) for curve in curves])
    rounds = np.concatenate([_to_array(curve["x"]["round"]) for curve in curves])
    positive = np.isfinite(values) & (values > 0)
    if gap is None or not positive.any() or gap >= 1:
        return
    rounds, values = rounds[positive], values[positive]
    first, top = rounds.min(), values.max()
    end = min(rounds.max(), first + np.log(values.min() / top) / np.log(1 - gap))
    axis.plot([first, end], [top, top * (1 - gap) ** (end - first)], color="0.45", linestyle="-.", linewidth=0.9)


def add_legend(axis: "Axes", series: Mapping[str, AlgorithmStyle], rate: str | None = None) -> None:
    """Add a legend with a line per algorithm or value of a parameter, and one for the averaging rate.

    Entries that are too long for the axis are wrapped, and put above it: the figure grows.
    """
    from matplotlib import rcParams
    from matplotlib.font_manager import FontProperties
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=style.light, linestyle=style.linestyle, label=name) for name, style in series.items()
    ]
    if rate:
        handles.append(Line2D([], [], color="0.45", linestyle="-.", linewidth=0.9, label=rate))
    options: Any = {"frameon": False, "handlelength": 1.8, "borderaxespad": 0.2, "labelspacing": 0.3}
    figure: Any = axis.figure
    width, height = figure.get_size_inches()
    letter = 0.55 * FontProperties(size=rcParams["legend.fontsize"]).get_size_in_points() / 72      # inches
    if max(map(len, series)) * letter < 0.8 * axis.get_position().width * width - _LEGEND_LINE:
        axis.legend(handles=handles, **options)
        return
    for handle in handles:
        label = str(handle.get_label()).replace(" = ", "\u00a0=\u00a0")      # no line ends inside of a setting
        handle.set_label(textwrap.fill(label, int((width - 1.5 * _LEGEND_LINE) / letter)))
    lines = sum(str(handle.get_label()).count("\n") + 1 for handle in handles)
    higher = height + (lines + 1) * 2.6 * letter
    figure.set_size_inches(width, higher)
    edges = figure.subplotpars
    figure.subplots_adjust(bottom=edges.bottom * height / higher, top=edges.top * height / higher)
    figure.legend(handles=handles, loc="upper left", **options)


def _draw_sensitivity(runs: GroupedRuns) -> NamedFigures:
    panels = build_sensitivity_panels(runs)[:_MAX_SENSITIVITY_PANELS]
    if not panels:
        return
    columns = min(3, len(panels))
    blocks = -(-len(panels) // columns)
    width = COLUMN_WIDTH if columns == 1 else PAGE_WIDTH
    titles = _name_panels(panels, int(width / columns / 0.058))
    above = 0.14 * max(title.count("\n") + 1 for title in titles) if any(titles) else 0.0        # inches
    figure, axes = create_figure(
        width, (2.9 + above) * blocks, 2 * blocks, columns, top=0.1 + above, gaps=(0.45, 0.42 + above / 2))
    for axis in axes.flat:
        axis.set_visible(False)
    for number, panel in enumerate(panels):
        row, column = 2 * (number // columns), number % columns
        upper, lower = axes[row][column], axes[row + 1][column]
        for axis in (upper, lower):
            axis.set_visible(True)
        upper.set_title(titles[number], fontsize=7)
        if panel["series"]:
            _draw_parameter(upper, panel, "second")
        _draw_parameter(upper, panel, "final")
        _draw_parameter(lower, panel, "mb")
        lower.set_ylim(bottom=0)
        family = [one for one in range(number) if _is_same_parameter(panels[one], panel)]
        if family:                          # the same axes for all combinations of the other parameters
            first = axes[2 * (family[0] // columns)][family[0] % columns]
            upper.sharey(first)
            lower.sharey(axes[2 * (family[0] // columns) + 1][family[0] % columns])
        if panel["series"]:
            upper.legend(frameon=False, fontsize=6, handlelength=1.8, borderaxespad=0.2, labelspacing=0.3)
        lower.set_xlabel(panel["title"].split(",")[0])
        if column == 0:
            upper.set_ylabel(panel["metric"])
            lower.set_ylabel("MB to target")
    yield "sensitivity", figure


def _is_same_parameter(one: SensitivityPanel, other: SensitivityPanel) -> bool:
    return (one["algorithm"], one["key"]) == (other["algorithm"], other["key"])


def _name_panels(panels: Sequence[SensitivityPanel], letters: int) -> list[str]:
    """Return a title per panel: the algorithm if there are several, and the values of the other parameters."""
    has_several = len({panel["algorithm"] for panel in panels}) > 1
    return [
        textwrap.fill(" · ".join(filter(None, (panel["algorithm"] if has_several else "", panel["family"]))), letters)
        for panel in panels
    ]


def _draw_parameter(axis: "Axes", panel: SensitivityPanel, key: Literal["final", "second", "mb"]) -> None:
    xs = [point["value"] for point in panel["points"] if point[key]]
    estimates = np.array([point[key] for point in panel["points"] if point[key]], dtype=np.float64).reshape(-1, 3)
    mean, low, high = estimates.T
    style, is_second = get_style(panel["algorithm"]), key == "second"
    axis.errorbar(
        xs, mean, yerr=np.nan_to_num(np.stack([mean - low, high - mean])) if xs else None,
        color="0.5" if is_second else style.light, marker="s" if is_second else "o", markersize=3, capsize=2,
        linestyle=":" if is_second else style.linestyle, markerfacecolor="white" if is_second else style.light,
        label=panel["series"][is_second] if panel["series"] and key != "mb" else None,
    )
    values = [point["value"] for point in panel["points"]]
    if min(values) > 0 and max(values) / min(values) >= 8:
        axis.set_xscale("log")
    axis.set_xticks(values, [f"{value:g}" for value in values], minor=False)
    axis.set_xticks([], minor=True)
    axis.grid(visible=True)


def _draw_bars(bars: nodes.StackedBars | None, name: str, unit: str) -> NamedFigures:
    if bars is None:
        return
    labels = [label if len(label) < 34 else label[:32] + "…" for label in bars["labels"][:_MAX_BARS]]
    count = len(labels)
    top, left = 0.16 * -(-len(bars["names"]) // 4) + 0.08, min(1.9, 0.15 + 0.058 * max(map(len, labels)))
    figure, axes = create_figure(COLUMN_WIDTH, 0.45 + top + 0.21 * count, left=left, top=top)
    axis, starts = axes[0][0], np.zeros(count)
    for colour, part in zip(sample_scale(len(bars["names"])), bars["names"], strict=True):
        values = np.nan_to_num(_to_array(bars["values"][part][:count]))
        axis.barh(
            range(count), values, left=starts, height=0.68, color=colour, label=part, edgecolor="white", linewidth=0.3
        )
        starts = starts + values
    axis.set_yticks(range(count), labels)
    axis.invert_yaxis()
    axis.set_xlabel(unit)
    axis.legend(
        frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5 - left / 2 / (COLUMN_WIDTH - left), 1.0),
        handlelength=0.8, columnspacing=0.9, fontsize=6.5,
    )
    yield name, figure


def _draw_heatmap(runs: GroupedRuns) -> NamedFigures:
    for heatmap in nodes.build_heatmaps(runs)[:1]:
        figure, axes = create_figure(COLUMN_WIDTH, 2.0, top=0.25)
        axis = axes[0][0]
        mesh = axis.pcolormesh(
            heatmap["rounds"], heatmap["nodes"], [_to_array(row) for row in heatmap["accuracy"]], cmap="cividis",
            shading="nearest", rasterized=True,
        )
        axis.set(xlabel="round", ylabel="node", title=heatmap["run"])
        axis.invert_yaxis()
        figure.colorbar(mesh, ax=axis, label="accuracy")
        yield "nodes", figure


def _draw_topology(runs: GroupedRuns) -> NamedFigures:
    graphs: dict[str, tuple[str, RunData]] = {}
    for group, run in nodes.select_runs(runs):
        if has_graph(run) and run.network is not None:
            title = f"{group.setting.topology}, ρ = {run.network.spectral_gap or 0:.3g}"
            graphs.setdefault(repr(run.network.edges), (title, run))
    if not graphs:
        return
    shown = list(graphs.values())[:3]
    is_single = len(shown) == 1
    figure, axes = create_figure(
        COLUMN_WIDTH if is_single else PAGE_WIDTH, 2.3, 1, len(shown), left=0.05, right=0.35 if is_single else 0.6,
        bottom=0.05, top=0.35,
    )
    for axis, (title, run) in zip(axes.flat, shown, strict=True):
        bar = figure.colorbar(draw_graph(axis, run, 0.8), ax=axis, shrink=0.8)
        axis.set_title(f"{title}\n{run.algorithm}, round {int(run.columns['round'][-1])}", fontsize=7)
    bar.set_label("distance of x to the mean")
    yield "topology", figure


def _draw_replay(runs: GroupedRuns) -> NamedFigures:
    """Draw time to the target by network, and the map of winners, of each setting that has both."""
    panels = [panel for panel in build_replay_panels(runs) if panel["map"] is not None]
    for number, panel in enumerate(panels):
        figure, axes = create_figure(PAGE_WIDTH, 2.6, 1, 2, bottom=0.55, top=0.3, gaps=(0.75, 0.3))
        styles = sample_colours([group["algorithm"] for group in panel["groups"]])
        colours = dict(zip([group["label"] for group in panel["groups"]], styles, strict=True))
        draw_times(axes[0][0], panel, colours)
        assert panel["map"] is not None
        draw_map(axes[0][1], panel["map"], colours)
        yield "replay" if len(panels) == 1 else f"replay-{number + 1}", figure


def _draw_costs(runs: GroupedRuns) -> NamedFigures:
    """Draw final ψ and the costs of the target, a line per algorithm, of each setting with many of them."""
    built = [(setting, build_cost_panels(runs, setting)) for setting in runs.settings]
    panels = [(setting, panel) for setting, panel in built if panel is not None]
    for number, (setting, panel) in enumerate(panels):
        figure, axes = create_figure(
            PAGE_WIDTH, 1.0 + 0.145 * len(panel.rows), 1, len(panel.titles), left=0.85, bottom=0.65, top=0.25,
            gaps=(0.12, 0.3), sharey=False,
        )
        draw_cost_panels(axes[0], panel)
        note = "; hollow under ≈: approximate, ψ missed its tolerance" if any(panel.is_approximate) else ""
        figure.text(
            0.5, 0.28 / figure.get_figheight(), f"costs of {setting.target}, and ψ at the end{note}", ha="center")
        yield "costs" if len(panels) == 1 else f"costs-{number + 1}", figure


def _to_array(values: Sequence[float | None]) -> Series:
    return np.array(values, dtype=np.float64)


DRAWERS: dict[str, Callable[[GroupedRuns], NamedFigures]] = {
    "psi": _draw_psi, "costs": _draw_costs, "accuracy": _draw_accuracy, "loss": _draw_loss,
    "sensitivity": _draw_sensitivity, "consensus": _draw_consensus,
    "channels": lambda runs: _draw_bars(nodes.stack_channels(runs), "channels", "MB broadcast"),
    "oracles": lambda runs: _draw_bars(nodes.stack_oracle_calls(runs), "oracles", "oracle calls per node"),
    "nodes": _draw_heatmap, "topology": _draw_topology, "replay": _draw_replay,
}
