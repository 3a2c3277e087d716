"""Compute when recorded runs would have reached their target on other networks, and who would have won there."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dbo.dashboards.groups import ComparisonSetting, GroupedRuns, SeedGroup
from dbo.platform.errors import InputError
from dbo.platform.network.timing import Floats, Integers, Profile
from dbo.platform.runs.replay import Traffic, list_profiles, load_profile, read_traffic
from dbo.platform.runs.statistics import MeanEstimate, estimate_mean

# One-way latencies and uplinks of the map of winners.
LATENCIES_MS = (0.01, 0.1, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
BANDWIDTHS_MBIT = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000)
MAX_STEPS = 2_000_000_000      # node updates of a map: about half a minute

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ReplayedGroup:
    """The seeds of a group on every network: mean time to the target, and how many seeds reach it."""

    group: SeedGroup
    times: dict[str, MeanEstimate | None]       # network → seconds; None: no seed reached the target
    totals: dict[str, MeanEstimate]             # network → seconds until the end of the run


@dataclass(frozen=True, slots=True, eq=False)
class WinnerMap:
    """Which group reaches the target first, for each latency and bandwidth."""

    setting: ComparisonSetting
    groups: tuple[SeedGroup, ...]
    seconds: Floats                             # (groups, bandwidths, latencies) mean over seeds

    @property
    def winners(self) -> Integers:
        """(bandwidths, latencies) position in `groups`."""
        best: Integers = self.seconds.argmin(axis=0)
        return best


@dataclass(frozen=True, slots=True)
class Replay:
    """Recorded traffic of all runs of a report; runs without it are named."""

    runs: GroupedRuns
    traffic: Mapping[Path, Traffic]
    missing: tuple[str, ...]
    estimated: int                              # runs without measured computing times


def read_all(runs: GroupedRuns) -> Replay:
    """Read the traffic of all runs that recorded it."""
    traffic: dict[Path, Traffic] = {}
    missing = []
    for run in runs.runs:
        try:
            traffic[run.folder] = read_traffic(run.folder)
        except InputError as error:
            missing.append(str(error))
    estimated = sum(not one.has_compute for one in traffic.values())
    return Replay(runs, traffic, tuple(missing), estimated)


def load_networks(given: Sequence[str]) -> dict[str, Profile]:
    """Load profiles by their names or files; all shipped ones if none is given."""
    networks = {Path(name).stem if name.endswith((".yaml", ".yml", ".csv")) else name: load_profile(name)
                for name in given or list_profiles()}
    if given and len(networks) < len(given):
        raise InputError(f"--network: {', '.join(given)}: two networks have the same name")
    return networks


def replay_groups(replay: Replay, networks: Mapping[str, Profile]) -> list[ReplayedGroup]:
    """Return the time to the target of every group on every network."""
    replayed = []
    for group in replay.runs.seed_groups:
        recorded = [replay.traffic[run.folder] for run in group.runs if run.folder in replay.traffic]
        if not recorded:
            continue
        times: dict[str, MeanEstimate | None] = {}
        totals: dict[str, MeanEstimate] = {}
        for name, profile in networks.items():
            clocks = [one.replay(profile) for one in recorded]
            reached = [_find_time(one, clock, group) for one, clock in zip(recorded, clocks, strict=True)]
            times[name] = estimate_mean(reached)
            total = estimate_mean(float(clock[-1]) for clock in clocks)
            assert total is not None
            totals[name] = total
        replayed.append(ReplayedGroup(group, times, totals))
    return replayed


def _find_time(traffic: Traffic, clock: Floats, group: SeedGroup) -> float | None:
    found = group.setting.target.find_first(traffic.records)
    if found is None:
        return None
    return float(clock[[record["round"] for record in traffic.records].index(found["round"])])


def map_winners(replay: Replay, setting: ComparisonSetting) -> WinnerMap | None:
    """Return the winner for each latency and bandwidth; None with fewer than two groups, or too much traffic."""
    reached: list[tuple[SeedGroup, list[Traffic]]] = []
    for group in replay.runs.in_setting(setting):
        recorded = [replay.traffic.get(run.folder) for run in group.runs]
        parts = [part for one in recorded if one is not None and (part := one.up_to(setting.target)) is not None]
        if len(parts) == len(group.runs):
            reached.append((group, parts))
    points = len(LATENCIES_MS) * len(BANDWIDTHS_MBIT)
    if len(reached) < 2 or points * sum(part.steps for _, parts in reached for part in parts) > MAX_STEPS:
        return None
    seconds = np.empty((len(reached), len(BANDWIDTHS_MBIT), len(LATENCIES_MS)))
    for row, bandwidth in enumerate(BANDWIDTHS_MBIT):
        for column, latency in enumerate(LATENCIES_MS):
            profile = Profile(latency_ms=latency, bandwidth_mbit=bandwidth)
            for number, (_, parts) in enumerate(reached):
                seconds[number, row, column] = np.mean([part.replay(profile)[-1] for part in parts])
    return WinnerMap(setting, tuple(group for group, _ in reached), seconds)
