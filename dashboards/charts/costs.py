"""Show a whole field of algorithms in one figure: final ψ and what the target costs, a line per algorithm."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dbo.dashboards.groups import ComparisonSetting, GroupedRuns, SeedGroup
from dbo.platform.runs.schema import PSI_VALUES, count_oracle_calls
from dbo.platform.runs.statistics import MeanEstimate, estimate_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIN_GROUPS = 5              # with fewer, curves say more
_COLOURS = {"gossip": "#0072B2", "star": "#D55E00", "single": "#666666"}
_MARKERS = {"gossip": "o", "star": "s", "single": "D"}
_NAMES = {"gossip": "gossip", "star": "with a server", "single": "all data on one machine"}


@dataclass(frozen=True, slots=True)
class CostRow:
    """An algorithm of the field: one estimate per panel, None where it has none."""

    label: str
    network: str
    reached: int
    seeds: int
    values: tuple[MeanEstimate | None, ...]
    is_approximate: bool = False            # a solve of ψ missed its tolerance


@dataclass(frozen=True, slots=True)
class CostPanels:
    """The field in one setting, the cheapest algorithm in oracle calls first."""

    titles: tuple[str, ...]
    is_cost: tuple[bool, ...]
    rows: tuple[CostRow, ...]
    depends_on_psi: tuple[bool, ...]        # per panel: the final ψ, and the costs of a level of ψ

    @property
    def is_approximate(self) -> tuple[bool, ...]:
        """Per panel, whether some of its values rest on an approximate ψ."""
        return tuple(depends and any(row.is_approximate for row in self.rows) for depends in self.depends_on_psi)


def build_cost_panels(runs: GroupedRuns, setting: ComparisonSetting) -> CostPanels | None:
    """Return what the figure shows; None with too few algorithms, or where none has a value."""
    groups = runs.in_setting(setting)
    if len(groups) < MIN_GROUPS:
        return None
    columns: dict[str, tuple[bool, Callable[[SeedGroup], MeanEstimate | None]]] = {
        "final ψ": (False, lambda group: group.final_value("psi")),
        "rounds": (True, lambda group: group.cost_to_target("round")),
        "MB": (True, lambda group: group.cost_to_target("comm_mb")),
        "oracle calls of a node": (True, _count_calls),
        "samples of a node": (True, lambda group: group.cost_to_target("samples")),
    }
    rows = [
        CostRow(runs.label_in_setting(group), _find_network(group), group.reached_count, len(group.runs),
                tuple(measure(group) for _, measure in columns.values()),
                any(run.last_value("psi_converged") == 0 for run in group.runs))
        for group in groups
    ]
    shown = [
        number for number in range(len(columns)) if any((value := row.values[number]) and value.mean for row in rows)]
    if not shown:
        return None
    order = [*columns].index("oracle calls of a node")
    calls = {row.label: value.mean for row in rows if (value := row.values[order]) is not None}
    rows.sort(key=lambda row: ([*_NAMES].index(row.network), -row.reached, calls.get(row.label, 0.0)))
    return CostPanels(
        tuple([*columns][number] for number in shown), tuple([*columns.values()][number][0] for number in shown),
        tuple(replace(row, values=tuple(row.values[number] for number in shown)) for row in rows),
        tuple(not [*columns.values()][number][0] or setting.target.metric in PSI_VALUES for number in shown),
    )


def _count_calls(group: SeedGroup) -> MeanEstimate | None:
    return estimate_mean(count_oracle_calls(record) for record in group.target_records if record)


def _find_network(group: SeedGroup) -> str:
    """Return how the nodes are connected; a run on one machine sends nothing."""
    run = group.runs[0]
    if run.network is not None and run.network.server is not None:
        return "star"
    return "gossip" if run.last_value("bytes_links") else "single"


def draw_cost_panels(axes: "Sequence[Axes]", panels: CostPanels) -> None:
    """Draw a panel per column: means as dots, 95 % intervals as lines.

    A hollow dot missed the target on some seeds, or rests on an approximate ψ; then the panel's title says so.
    """
    for number, (axis, title) in enumerate(zip(axes, panels.titles, strict=True)):
        _draw_panel(axis, panels, number)
        axis.set_title(f"≈ {title}" if panels.is_approximate[number] else title)
        axis.set_ylim(len(panels.rows) - 0.4, -0.6)
        axis.set_yticks(range(len(panels.rows)), [row.label for row in panels.rows] if number == 0 else [])
        axis.tick_params(axis="y", length=0)
        axis.grid(visible=True)
    _add_legend(axes[0], panels)


def _draw_panel(axis: "Axes", panels: CostPanels, number: int) -> None:
    means = [value.mean for row in panels.rows if (value := row.values[number]) is not None and value.mean > 0]
    if means and max(means) / min(means) > 3:
        _set_log_scale(axis, max(means) / min(means))
    for position, row in enumerate(panels.rows):
        value, colour = row.values[number], _COLOURS[row.network]
        if value is None or value.mean <= 0:
            text = "not reached" if value is None and panels.is_cost[number] else "none" if value else "–"
            axis.text(0.03, position, text, transform=axis.get_yaxis_transform(), va="center", color="0.55",
                      fontsize=5.5)
            continue
        if value.low is not None and value.high is not None:
            axis.plot([max(value.low, value.mean / 1e3), value.high], [position, position], color=colour, linewidth=0.9)
        is_exact = not (row.is_approximate and panels.depends_on_psi[number])
        complete = is_exact and (row.reached == row.seeds or not panels.is_cost[number])
        axis.plot([value.mean], [position], _MARKERS[row.network], color=colour, markersize=3.2,
                  markerfacecolor=colour if complete else "white")


def _set_log_scale(axis: "Axes", ratio: float) -> None:
    """Label 1, 3, 10, 30, … in plain numbers, or the decades of a wide range: panels are narrow."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0) if ratio < 30 else (1.0,)))
    axis.xaxis.set_major_formatter(FuncFormatter(
        lambda value, _: f"{value / 1e3:g}k" if value >= 1e3 else f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())


def _add_legend(axis: "Axes", panels: CostPanels) -> None:
    from matplotlib.lines import Line2D

    present = {row.network for row in panels.rows}
    handles = [
        Line2D([], [], color=_COLOURS[network], marker=_MARKERS[network], markersize=3.2, label=name)
        for network, name in _NAMES.items() if network in present
    ]
    axis.figure.legend(handles=handles, frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 0.0))
