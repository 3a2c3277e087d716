"""Build the figure of time to the target on other networks, and the map of winners by latency and bandwidth."""

from typing import Any, TypedDict

from dbo.dashboards.charts.curves import Numbers
from dbo.dashboards.groups import GroupedRuns, SeedGroup
from dbo.dashboards.number_format import format_number, round_significant
from dbo.dashboards.replay import (
    BANDWIDTHS_MBIT,
    LATENCIES_MS,
    ReplayedGroup,
    WinnerMap,
    load_networks,
    map_winners,
    read_all,
    replay_groups,
)
from dbo.platform.runs.statistics import MeanEstimate

_MAX_MAPS = 6


class GroupTimes(TypedDict):
    """Times to the target of one group, a triple (mean, low, high) per network; None: not reached."""

    label: str
    algorithm: str
    times: list[Numbers | None]


class Map(TypedDict):
    """Who reaches the target first, by bandwidth and latency."""

    latencies: list[float]
    bandwidths: list[float]
    labels: list[str]
    algorithms: list[str]
    winners: list[list[int]]
    seconds: list[list[Numbers]]         # of each group


class ReplayPanel(TypedDict):
    """One setting on all networks; JSON of the page."""

    setting: str
    target: str
    networks: list[str]
    groups: list[GroupTimes]
    table: list[list[str]]               # a row per group: its label, a time per network
    map: Map | None


def build_replay_panels(runs: GroupedRuns) -> list[ReplayPanel]:
    """Return a panel per setting in which at least two groups can be compared."""
    if len(runs.seed_groups) < 2:
        return []
    replay, networks = read_all(runs), load_networks([])
    replayed = replay_groups(replay, networks)
    panels: list[ReplayPanel] = []
    for setting in runs.settings:
        mine = [one for one in replayed if one.group.setting == setting]
        if len(mine) < 2 or not any(one.times[name] for one in mine for name in networks):
            continue
        winners = map_winners(replay, setting) if len(panels) < _MAX_MAPS else None
        panels.append({
            "setting": runs.label_setting(setting), "target": str(setting.target), "networks": list(networks),
            "groups": [_build_group(runs, one) for one in mine],
            "table": [[runs.label_in_setting(one.group), *(_format(one, name) for name in networks)] for one in mine],
            "map": None if winners is None else _build_map(runs, winners),
        })
    return panels


def _build_group(runs: GroupedRuns, one: ReplayedGroup) -> GroupTimes:
    return {
        "label": runs.label_in_setting(one.group), "algorithm": one.group.algorithm,
        "times": [None if estimate is None else _to_triple(estimate) for estimate in one.times.values()],
    }


def _to_triple(estimate: MeanEstimate) -> Numbers:
    return [None if value is None else round_significant([value], 4)[0]
            for value in (estimate.mean, estimate.low, estimate.high)]


def _format(one: ReplayedGroup, network: str) -> str:
    estimate, seeds = one.times[network], len(one.group.runs)
    if estimate is None:
        return "not reached"
    return format_number(estimate.mean) + (f" ({estimate.count} of {seeds})" if estimate.count < seeds else "")


def _build_map(runs: GroupedRuns, winners: WinnerMap) -> Map:
    def label(group: SeedGroup) -> str:
        return runs.label_in_setting(group)

    return {
        "latencies": list(LATENCIES_MS), "bandwidths": list(BANDWIDTHS_MBIT),
        "labels": [label(group) for group in winners.groups],
        "algorithms": [group.algorithm for group in winners.groups],
        "winners": winners.winners.tolist(),
        "seconds": [[round_significant(row, 4) for row in table] for table in winners.seconds],
    }


def draw_times(axis: Any, panel: ReplayPanel, colours: dict[str, str]) -> None:
    """Draw a mark per group and network, on a log axis."""
    count = len(panel["groups"])
    for number, group in enumerate(panel["groups"]):
        found = [(at, times) for at, times in enumerate(group["times"]) if times and times[0]]
        xs = [at + 0.5 * (number + 0.5) / count - 0.25 for at, _ in found]
        means = [float(times[0] or 0) for _, times in found]
        below = [mean - float(times[1] if times[1] is not None else mean)
                 for mean, (_, times) in zip(means, found, strict=True)]
        above = [float(times[2] if times[2] is not None else mean) - mean
                 for mean, (_, times) in zip(means, found, strict=True)]
        axis.errorbar(xs, means, yerr=[below, above], fmt="o", markersize=3.5, capsize=2, linewidth=0.8,
                      color=colours[group["label"]], label=group["label"])
    axis.set_yscale("log")
    axis.set_xticks(range(len(panel["networks"])), panel["networks"])
    axis.set_ylabel(f"seconds to {panel['target']}")
    axis.grid(visible=True, axis="y")
    axis.legend(frameon=False, fontsize=6.5, loc="upper left")


def draw_map(axis: Any, panel_map: Map, colours: dict[str, str]) -> None:
    """Draw the winner of each latency and bandwidth as a coloured square."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    palette = [colours[label] for label in panel_map["labels"]]
    axis.pcolormesh(
        range(len(panel_map["latencies"])), range(len(panel_map["bandwidths"])), panel_map["winners"],
        cmap=ListedColormap(palette), vmin=-0.5, vmax=len(palette) - 0.5, shading="nearest", edgecolors="white",
        linewidth=0.4,
    )
    axis.set_xticks(range(len(panel_map["latencies"])), [f"{value:g}" for value in panel_map["latencies"]], rotation=60)
    axis.set_yticks(range(len(panel_map["bandwidths"])), [f"{value:g}" for value in panel_map["bandwidths"]])
    axis.set(xlabel="latency (ms, one way)", ylabel="uplink (Mbit/s)")
    shown = sorted({winner for row in panel_map["winners"] for winner in row})
    axis.legend(
        handles=[Patch(color=palette[number], label=panel_map["labels"][number]) for number in shown],
        frameon=False, fontsize=6.5, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), handlelength=0.8,
    )
