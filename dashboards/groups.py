"""Group runs by setting (what all algorithms share), variant of the algorithm, and seed."""

import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dbo.dashboards.load import RunCollection, RunData
from dbo.dashboards.palette import AlgorithmStyle, get_styles, sample_series, sort_key
from dbo.platform.runs.schema import Target
from dbo.platform.runs.statistics import MeanEstimate, estimate_mean

# Keys that make no variants: runs of one algorithm that differ only in these belong together.
_NOT_VARIANT_KEYS = {
    "name", "label", "seed", "tracking", "data_dir", "plugins", "checkpoint_every", "keep_checkpoints", "eval_every",
    "nodes", "algorithm.name", "task.name", "task.dataset",
}
_NOT_VARIANT_SECTIONS = ("tracking.", "topology.", "partition.", "engine.")
_LOCATION_KEYS = ("tracking", "data_dir", "plugins", "topology")      # paths and servers; the graph is in the setting
_SHORT_NAMES = {"algorithm.inner_steps": "K", "algorithm.lam": "λ", "algorithm.compressor.ratio": "ratio"}
_TOPOLOGY_ORDER = ("ring", "two_hop", "erdos_renyi")       # as in the paper; others follow


@dataclass(frozen=True, slots=True)
class ComparisonSetting:
    """What is the same for all algorithms that are compared."""

    task: str
    nodes: int
    topology: str
    partition: str
    target: Target

    def label(self, among: Sequence["ComparisonSetting"]) -> str:
        """Name what distinguishes it from the others, or topology and partition if there are no others."""
        parts = {
            "task": self.task, "nodes": f"{self.nodes} nodes", "topology": self.topology, "partition": self.partition,
            "target": f"target {self.target}",
        }
        differing = [text for key, text in parts.items() if len({getattr(one, key) for one in among}) > 1]
        return " · ".join(differing or [parts["topology"], parts["partition"]])


@dataclass(frozen=True)
class SeedGroup:
    """A variant of an algorithm in a setting, with one run per seed."""

    setting: ComparisonSetting
    algorithm: str
    variant: str                     # the parameters in which it differs from others of its algorithm; often empty
    runs: tuple[RunData, ...]

    @property
    def label(self) -> str:
        return f"{self.algorithm} · {self.variant}" if self.variant else self.algorithm

    @cached_property
    def statuses(self) -> Counter[str]:
        return Counter(run.status for run in self.runs)

    @cached_property
    def target_records(self) -> list[Mapping[str, Any] | None]:
        """For each run the first evaluation that reached the target, or None."""
        return [self.setting.target.find_first(run.records) for run in self.runs]

    @property
    def reached_count(self) -> int:
        return sum(record is not None for record in self.target_records)

    @property
    def has_failures(self) -> bool:
        return any(run.has_failed for run in self.runs)

    def cost_to_target(self, column: str) -> MeanEstimate | None:
        """Return the mean over the seeds that reached the target."""
        return estimate_mean(record.get(column) for record in self.target_records if record)

    def final_value(self, column: str) -> MeanEstimate | None:
        """Return the mean over seeds of the last evaluation."""
        return estimate_mean(run.last_value(column) for run in self.runs)

    def best_target_value(self) -> float | None:
        """Return the best value of the target's metric over all evaluations of all seeds."""
        target = self.setting.target
        values = np.concatenate([run.find_column(target.metric) for run in self.runs])
        values = values[np.isfinite(values)]
        return float(values.max() if target.is_maximized else values.min()) if values.size else None


@dataclass(frozen=True)
class GroupedRuns:
    """All runs of a report in the order in which they are shown."""

    collection: RunCollection
    settings: tuple[ComparisonSetting, ...]
    seed_groups: tuple[SeedGroup, ...]
    duplicates: int                  # runs left out because the same experiment was there already

    @cached_property
    def runs(self) -> list[RunData]:
        return [run for group in self.seed_groups for run in group.runs]

    @cached_property
    def algorithms(self) -> list[str]:
        return sorted({group.algorithm for group in self.seed_groups}, key=sort_key)

    @cached_property
    def max_seeds(self) -> int:
        return max(len(group.runs) for group in self.seed_groups)

    @cached_property
    def styles(self) -> dict[str, AlgorithmStyle]:
        """The style of each algorithm and labelled variant."""
        return get_styles(self.algorithms)

    @cached_property
    def series(self) -> dict[str, AlgorithmStyle]:
        """What a legend distinguishes: the algorithms or, of one algorithm, the values of what was varied."""
        names = list(dict.fromkeys(self.name_series(group) for group in self.seed_groups))
        if len(self.algorithms) > 1 or len(names) == 1:
            return self.styles
        return dict(zip(names, sample_series(len(names)), strict=True))

    def name_series(self, group: SeedGroup) -> str:
        """Return the entry of the legend that a group belongs to, such as `K = 5`."""
        if len(self.algorithms) > 1 or len({other.variant for other in self.seed_groups}) == 1:
            return group.algorithm
        return group.variant.replace("=", " = ") or group.algorithm

    def get_style(self, group: SeedGroup) -> AlgorithmStyle:
        """Return the style of a group's curve, the same in figures, table and cards."""
        return self.series[self.name_series(group)]

    def has_column(self, column: str) -> bool:
        return any(np.isfinite(run.find_column(column)).any() for run in self.runs)

    def in_setting(self, setting: ComparisonSetting) -> list[SeedGroup]:
        return [group for group in self.seed_groups if group.setting == setting]

    def label_setting(self, setting: ComparisonSetting) -> str:
        return setting.label(self.settings)

    def label_in_setting(self, group: SeedGroup) -> str:
        """Name a group among those of its setting."""
        return group.variant if group.variant and len(self.algorithms) == 1 else group.label

    def label_group(self, group: SeedGroup) -> str:
        """Name a group among all others."""
        return f"{group.label} · {self.label_setting(group.setting)}" if len(self.settings) > 1 else group.label

    def label_run(self, group: SeedGroup, run: RunData) -> str:
        return f"{self.label_group(group)} · seed {run.seed}" if len(group.runs) > 1 else self.label_group(group)


class _GroupKey(NamedTuple):
    setting: ComparisonSetting
    algorithm: str
    variant: str


def group_runs(collection: RunCollection) -> GroupedRuns:
    """Group runs by setting, algorithm, variant and seed; a repetition of the same experiment is a duplicate."""
    parameters = {id(run): flatten(run.experiment) for run in collection.runs}
    settings = _join_stars(collection.runs, {id(run): _find_setting(run) for run in collection.runs})
    varying = _find_varying_keys(collection.runs, parameters, settings)
    groups: dict[_GroupKey, dict[str, RunData]] = {}
    sort_values: dict[_GroupKey, tuple[Any, ...]] = {}
    versions: dict[tuple[_GroupKey, str | None], _GroupKey] = {}      # where runs with this run key went
    duplicates = 0
    for run in collection.runs:
        mine, setting = parameters[id(run)], settings[id(run)]
        keys = [key for key in varying[run.algorithm, setting.task] if key in mine]
        variant = ", ".join(f"{shorten_key(key)}={_format_value(mine[key])}" for key in keys)
        values = tuple(_sortable(mine.get(key)) for key in keys)
        plain = _GroupKey(setting, run.algorithm, variant)
        place = versions.get((plain, run.key), plain)
        other = groups.get(plain, {}).get(str(run.seed))
        if place == plain and other is not None and _code_differs(run, other, parameters):
            place = plain._replace(variant=", ".join(filter(None, (variant, f"in {run.folder}"))))
            values = (*values, _sortable(place.variant))
        versions[plain, run.key] = place
        sort_values[place] = values
        seeds = groups.setdefault(place, {})
        if str(run.seed) in seeds:
            duplicates += 1
        else:
            seeds[str(run.seed)] = run
    in_order = sorted({key.setting for key in groups}, key=_setting_sort_key)
    keys_in_order = sorted(
        groups, key=lambda key: (in_order.index(key.setting), sort_key(key.algorithm), sort_values[key])
    )
    seed_groups = tuple(SeedGroup(*key, tuple(groups[key].values())) for key in keys_in_order)
    return GroupedRuns(collection, tuple(in_order), seed_groups, duplicates)


def _code_differs(run: RunData, other: RunData, parameters: Mapping[int, Mapping[str, Any]]) -> bool:
    """Decide whether two runs of the same parameters were made by different code, such as an edited plugin."""
    one, two = (
        {key: value for key, value in parameters[id(which)].items() if key.partition(".")[0] not in _LOCATION_KEYS}
        for which in (run, other)
    )
    return None not in (run.key, other.key) and run.key != other.key and one == two


def flatten(section: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the plain values of nested sections under dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{above}{key}.")
        else:
            flat[f"{above}{key}"] = value
    return flat


def shorten_key(key: str) -> str:
    """Return the name of a parameter for labels."""
    return _SHORT_NAMES.get(key, key.removeprefix("algorithm."))


def _find_varying_keys(
    runs: Sequence[RunData], parameters: Mapping[int, Mapping[str, Any]], settings: Mapping[int, ComparisonSetting]
) -> dict[tuple[str, str], list[str]]:
    """Return for each algorithm and task the parameters in which its runs differ."""
    families: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for run in runs:
        families.setdefault((run.algorithm, settings[id(run)].task), []).append(parameters[id(run)])
    varying = {}
    for family, members in families.items():
        keys = dict.fromkeys(key for one in members for key in one)
        varying[family] = [
            key for key in keys
            if ((key not in _NOT_VARIANT_KEYS and not key.startswith(_NOT_VARIANT_SECTIONS)) or key == "engine.name")
            and len({repr(one.get(key)) for one in members}) > 1
        ]
    return varying


def _find_setting(run: RunData) -> ComparisonSetting:
    sections = {key: run.experiment.get(key) for key in ("task", "topology", "partition")}
    parts = {key: dict(value) if isinstance(value, dict) else {} for key, value in sections.items()}
    task = " · ".join(str(parts["task"][key]) for key in ("name", "dataset") if key in parts["task"])
    if "file" in parts["topology"]:          # without its folder: a job has the same file somewhere else each time
        parts["topology"]["file"] = f"{Path(str(parts['topology']['file'])).name}{_hash_graph(run)}"
    nodes = run.experiment.get("nodes", 0)
    return ComparisonSetting(
        task, nodes if isinstance(nodes, int) else 0, _describe(parts["topology"]), _describe(parts["partition"]),
        run.target,
    )


def _join_stars(
    runs: Sequence[RunData], settings: dict[int, ComparisonSetting]
) -> dict[int, ComparisonSetting]:
    """Give runs with a server the setting of the only graph that they are compared with, if there is one."""
    has_server = {id(run) for run in runs if run.network and run.network.server is not None}
    joined = dict(settings)
    for key in has_server:
        mine = settings[key]
        others = {
            setting for other, setting in settings.items()
            if other not in has_server and replace(setting, topology=mine.topology) == mine
        }
        if len(others) == 1:
            joined[key] = others.pop()
    return joined


def _hash_graph(run: RunData) -> str:
    """Distinguish graphs whose files have the same name."""
    edges = run.network.edges if run.network else None
    return f" ({zlib.crc32(json.dumps(edges).encode()):08x})" if edges else ""


def _describe(section: Mapping[str, Any]) -> str:
    parameters = [f"{key}={_format_value(value)}" for key, value in section.items() if key != "name"]
    return " ".join([str(section.get("name", "?")), *parameters])


def _setting_sort_key(setting: ComparisonSetting) -> tuple[Any, ...]:
    name = setting.topology.split(" ")[0]
    position = _TOPOLOGY_ORDER.index(name) if name in _TOPOLOGY_ORDER else len(_TOPOLOGY_ORDER)
    is_heterogeneous = not setting.partition.startswith("iid")
    return (
        setting.task, setting.nodes, str(setting.target), is_heterogeneous, setting.partition, position,
        setting.topology,
    )


def _format_value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _sortable(value: Any) -> tuple[int, float, str]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (0, float(value), "") if is_number else (1, 0.0, str(value))
