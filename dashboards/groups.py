"""Runs put in order: settings (what all algorithms were given alike), variants of algorithms, and their seeds."""

import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dbo.dashboards.estimates import Estimate, estimate
from dbo.dashboards.load import Gathered, Run
from dbo.dashboards.palette import rank
from dbo.platform.runs.run_folder import Target

# Keys by which runs of one algorithm do not become variants of it.
_ASIDE = {
    "name", "seed", "tracking", "data_dir", "plugins", "checkpoint_every", "eval_every", "nodes", "algorithm.name",
    "task.name", "task.dataset",
}
_ASIDE_SECTIONS = ("tracking.", "topology.", "partition.", "engine.")
_ELSEWHERE = ("tracking", "data_dir", "plugins", "topology")      # where files and servers are; graphs are settings
_SHORT = {"algorithm.inner_steps": "K", "algorithm.lam": "λ", "algorithm.compressor.ratio": "ratio"}
_TOPOLOGIES = ("ring", "two_hop", "erdos_renyi")       # in the paper's order, others after them


@dataclass(frozen=True, slots=True)
class Setting:
    """What is the same for all algorithms that are compared."""

    task: str
    nodes: int
    topology: str
    partition: str
    target: Target

    def label(self, among: Sequence["Setting"]) -> str:
        """What tells it from the others; all of it where there are no others."""
        parts = {
            "task": self.task, "nodes": f"{self.nodes} nodes", "topology": self.topology, "partition": self.partition,
            "target": f"target {self.target}",
        }
        differing = [text for key, text in parts.items() if len({getattr(one, key) for one in among}) > 1]
        return " · ".join(differing or [parts["topology"], parts["partition"]])


@dataclass(frozen=True)
class Cell:
    """A variant of an algorithm in a setting, with a run per seed."""

    setting: Setting
    algorithm: str
    variant: str                     # the parameters in which it differs from others of its algorithm; often empty
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        return f"{self.algorithm} · {self.variant}" if self.variant else self.algorithm

    @cached_property
    def statuses(self) -> Counter[str]:
        return Counter(run.status for run in self.runs)

    @cached_property
    def hits(self) -> list[Mapping[str, Any] | None]:
        """Where each run reached the target; from all its evaluations."""
        return [self.setting.target.reached(run.records) for run in self.runs]

    @property
    def reached(self) -> int:
        return sum(hit is not None for hit in self.hits)

    @property
    def whole(self) -> bool:
        """Nothing in it went wrong."""
        return all(run.well for run in self.runs)

    def price(self, column: str) -> Estimate | None:
        """Mean over the seeds that reached the target."""
        return estimate(hit.get(column) for hit in self.hits if hit)

    def final(self, column: str) -> Estimate | None:
        """Mean over seeds of the newest value."""
        return estimate(run.last(column) for run in self.runs)

    def best(self, column: str, rising: bool) -> float | None:
        """The best value that any of its evaluations had."""
        values = np.concatenate([run.columns[column] for run in self.runs])
        values = values[np.isfinite(values)]
        return float(values.max() if rising else values.min()) if values.size else None


@dataclass(frozen=True)
class Ordered:
    """The runs in order, and how many were left out because the same experiment was there already."""

    gathered: Gathered
    settings: tuple[Setting, ...]
    cells: tuple[Cell, ...]
    repeated: int

    @cached_property
    def runs(self) -> list[Run]:
        return [run for cell in self.cells for run in cell.runs]

    @cached_property
    def algorithms(self) -> list[str]:
        return sorted({cell.algorithm for cell in self.cells}, key=rank)

    @cached_property
    def seeds(self) -> int:
        """The most seeds that a cell has."""
        return max(len(cell.runs) for cell in self.cells)

    def has(self, column: str) -> bool:
        return any(np.isfinite(run.columns[column]).any() for run in self.runs)

    def within(self, setting: Setting) -> list[Cell]:
        return [cell for cell in self.cells if cell.setting == setting]

    def label(self, setting: Setting) -> str:
        return setting.label(self.settings)

    def name(self, cell: Cell) -> str:
        """A cell's name among those of its setting."""
        return cell.variant if cell.variant and len(self.algorithms) == 1 else cell.label

    def tell(self, cell: Cell) -> str:
        """A cell's name among all others."""
        return f"{cell.label} · {self.label(cell.setting)}" if len(self.settings) > 1 else cell.label

    def tell_run(self, cell: Cell, run: Run) -> str:
        return f"{self.tell(cell)} · seed {run.seed}" if len(cell.runs) > 1 else self.tell(cell)


def order(gathered: Gathered) -> Ordered:
    """Runs by setting, algorithm, variant and seed."""
    flat = {id(run): flatten(run.experiment) for run in gathered.runs}
    settings_of = {id(run): _setting(run) for run in gathered.runs}
    varying = _varying(gathered.runs, flat, settings_of)
    found: dict[tuple[Setting, str, str], dict[str, Run]] = {}
    order_of: dict[tuple[Setting, str, str], tuple[Any, ...]] = {}
    copies: dict[tuple[tuple[Setting, str, str], str | None], tuple[Setting, str, str]] = {}
    repeated = 0
    for run in gathered.runs:
        setting = settings_of[id(run)]
        keys = [key for key in varying[run.algorithm, setting.task] if key in flat[id(run)]]
        variant = ", ".join(f"{short(key)}={_value(flat[id(run)][key])}" for key in keys)
        values = tuple(_sortable(flat[id(run)].get(key)) for key in keys)
        here = (setting, run.algorithm, variant)
        place = copies.get((here, run.key), here)
        there = found.get(here, {}).get(str(run.seed))
        if place == here and there is not None and _differs(run, there, flat):
            variant = ", ".join(filter(None, (variant, f"in {run.folder}")))
            place, values = (setting, run.algorithm, variant), (*values, _sortable(variant))
        copies[here, run.key] = place
        seeds = found.setdefault(place, {})
        order_of[place] = values
        if str(run.seed) in seeds:
            repeated += 1
        else:
            seeds[str(run.seed)] = run
    settings = sorted({place[0] for place in found}, key=_setting_order)
    places = sorted(found, key=lambda place: (settings.index(place[0]), rank(place[1]), order_of[place]))
    cells = tuple(Cell(*place, tuple(found[place].values())) for place in places)
    return Ordered(gathered, tuple(settings), cells, repeated)


def _differs(run: Run, other: Run, flat: Mapping[int, Mapping[str, Any]]) -> bool:
    """Whether what reads as one experiment was run with two versions of the code, a plugin's say."""
    one, two = (
        {key: value for key, value in flat[id(which)].items() if key.partition(".")[0] not in _ELSEWHERE}
        for which in (run, other)
    )
    return None not in (run.key, other.key) and run.key != other.key and one == two


def flatten(section: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Dotted keys and plain values."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{above}{key}.")
        else:
            flat[f"{above}{key}"] = value
    return flat


def short(key: str) -> str:
    """How a parameter is called in labels."""
    return _SHORT.get(key, key.removeprefix("algorithm."))


def _varying(
    runs: Sequence[Run], flat: Mapping[int, Mapping[str, Any]], settings: Mapping[int, Setting]
) -> dict[tuple[str, str], list[str]]:
    """For each algorithm and task, the keys in which runs differ that have all else of their setting alike."""
    families: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for run in runs:
        families.setdefault((run.algorithm, settings[id(run)].task), []).append(flat[id(run)])
    varying = {}
    for place, mine in families.items():
        keys = dict.fromkeys(key for one in mine for key in one)
        varying[place] = [
            key for key in keys
            if ((key not in _ASIDE and not key.startswith(_ASIDE_SECTIONS)) or key == "engine.name")
            and len({repr(one.get(key)) for one in mine}) > 1
        ]
    return varying


def _setting(run: Run) -> Setting:
    parts = {key: run.experiment.get(key) for key in ("task", "topology", "partition")}
    named = {key: dict(value) if isinstance(value, dict) else {} for key, value in parts.items()}
    task = " · ".join(str(named["task"][key]) for key in ("name", "dataset") if key in named["task"])
    if "file" in named["topology"]:          # wherever it lies: a job has it in another place each time
        named["topology"]["file"] = f"{Path(str(named['topology']['file'])).name}{_graph_mark(run)}"
    nodes = run.experiment.get("nodes", 0)
    return Setting(
        task, nodes if isinstance(nodes, int) else 0, _described(named["topology"]), _described(named["partition"]),
        run.target,
    )


def _graph_mark(run: Run) -> str:
    """Tells apart graphs whose files are called the same."""
    edges = (run.network or {}).get("edges")
    return f" ({zlib.crc32(json.dumps(edges).encode()):08x})" if edges else ""


def _described(section: Mapping[str, Any]) -> str:
    parameters = [f"{key}={_value(value)}" for key, value in section.items() if key != "name"]
    return " ".join([str(section.get("name", "?")), *parameters])


def _setting_order(setting: Setting) -> tuple[Any, ...]:
    name = setting.topology.split(" ")[0]
    place = _TOPOLOGIES.index(name) if name in _TOPOLOGIES else len(_TOPOLOGIES)
    alike = not setting.partition.startswith("iid")
    return setting.task, setting.nodes, str(setting.target), alike, setting.partition, place, setting.topology


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _sortable(value: Any) -> tuple[int, float, str]:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return (0, float(value), "") if number else (1, 0.0, str(value))
