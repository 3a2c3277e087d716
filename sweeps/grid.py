"""Build the cells of a sweep: validated experiments, each identified by its run key, each with its own folder."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dbo.platform.config import overrides as overriding
from dbo.platform.config.experiment import Experiment
from dbo.platform.config.redact import redact
from dbo.platform.runs.preparation import check_compressors, prepare
from dbo.platform.runs.run_folder import find_summary
from dbo.platform.runs.schema import Summary
from dbo.platform.runs.seal import check_run
from dbo.sweeps.plan import Axis, AxisRange, Sweep

# Numbers in the models of all nodes up to which a cell runs on the local engine: above, the arithmetic takes longer
# than messages between processes.
LOCAL_MAX_SIZE = 5_000_000
AxisValues = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SweepCell:
    """One experiment of a sweep and its values on the axes."""

    values: AxisValues
    experiment: Experiment

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.experiment.run_key[:16]

    @property
    def label(self) -> str:
        return redact(format_values(self.values))

    def folder(self, out: Path) -> Path:
        return out / "cells" / self.name

    def read_summary(self, out: Path) -> Summary | None:
        """Return the summary if the cell is complete (finished, diverged or stopped); None: it must run.

        The run key decides, which covers the code; `check_environments` compares library versions and processor.
        """
        summary = find_summary(self.folder(out))
        if summary is None or summary.run_key != self.experiment.run_key or summary.changes:
            return None
        if summary.status not in {"finished", "diverged", "stopped"} or check_run(self.folder(out)).damage:
            return None         # a damaged cell is repaired by resuming it
        return summary


def format_values(values: Mapping[str, Any]) -> str:
    """Return a label such as `inner_steps=5 seed=0`."""
    return " ".join(f"{shorten_key(key, values)}={format_value(value)}" for key, value in values.items()) or "base"


def shorten_key(key: str, among: Mapping[str, Any]) -> str:
    """Return the last part of a key (of `x.name` the section), or the whole key where that would be ambiguous."""
    def shorten(path: str) -> str:
        head, _, last = path.rpartition(".")
        return head.rpartition(".")[2] if last == "name" and head else last

    return key if sum(shorten(other) == shorten(key) for other in among) > 1 else shorten(key)


def format_value(value: Any, exact: bool = False) -> str:
    """Return a value in four digits; `exact`: in all digits, so that different values have different texts."""
    if isinstance(value, Mapping):
        rest = (f"{key}={format_value(inner, exact)}" for key, inner in value.items() if key != "name")
        return ",".join([*([str(value["name"])] if "name" in value else []), *rest])
    return f"{value:.4g}" if isinstance(value, float) and not exact else str(value)


@dataclass(slots=True)
class _ProblemSizes:
    """Measures problems; each is built once."""

    known: dict[str, tuple[int, int]] = field(default_factory=dict)      # d_x and d_y

    def measure(self, experiment: Experiment) -> int:
        key = json.dumps([experiment.to_dict()["task"], experiment.nodes, experiment.data_dir])
        if key not in self.known:
            problem = prepare(experiment).problem
            self.known[key] = (problem.dim_x, problem.dim_y)
        check_compressors(experiment, *self.known[key])
        return experiment.nodes * sum(self.known[key])


class Grid:
    """All cells of a sweep. `measure=False` does not load data: for a machine that submits a job and has none."""

    def __init__(self, sweep: Sweep, measure: bool = True) -> None:
        self.sweep, self._sizes = sweep, _ProblemSizes() if measure else None
        self.data: dict[str, Any] = {"name": sweep.name, **sweep.experiment}
        self.base = self._make_experiment({})
        self.base_cell = SweepCell({}, self.base)
        self.data_with_engine = {**self.data, "engine": self.base.to_dict()["engine"]}
        if sweep.mode == "tpe":      # workers build cells too, and must choose the same engine
            self.data = self.data_with_engine

    def make_cell(self, values: AxisValues, label: AxisValues | None = None) -> SweepCell:
        """Return the base with these values; `label` also has the axes on which the cell is like the base."""
        return SweepCell(values if label is None else label, self._make_experiment(values))

    def _make_experiment(self, values: AxisValues) -> Experiment:
        """Return the base with these values. If no engine is given, the size of the problem decides."""
        data = overriding.apply(self.data, values)
        if data.get("engine") or self._sizes is None:
            return Experiment(**data)
        size = self._sizes.measure(Experiment(**data))
        return Experiment(**{**data, "engine": {"name": "local" if size <= LOCAL_MAX_SIZE else "ray"}})

    @cached_property
    def cells(self) -> list[SweepCell]:
        """All cells, without duplicates, in the order of the axes; none for TPE, whose cells depend on results."""
        if self.sweep.mode == "tpe":
            for values in self._extreme_values():
                self.make_cell(values)
            return []
        make = {"grid": self._combine, "one_at_a_time": self._vary_one, "random": self._sample}[self.sweep.mode]
        return list({cell.name: cell for cell in make()}.values())

    @property
    def key(self) -> str:
        """Identifies the sweep; stays the same when its axes are extended."""
        return hashlib.sha256(f"{self.sweep.name} {self.base.run_key}".encode()).hexdigest()

    def _list_axes(self) -> dict[str, list[Any]]:
        return {key: axis for key, axis in self.sweep.parsed_axes.items() if not isinstance(axis, AxisRange)}

    def _combine(self) -> Iterator[SweepCell]:
        axes = self._list_axes()
        for combination in itertools.product(*axes.values()):
            values = dict(zip(axes, combination, strict=True))
            if not self.sweep.skips(values):
                yield self.make_cell(values)

    def _vary_one(self) -> Iterator[SweepCell]:
        """Yield the base, then every other value of every axis alone; all of them for every seed."""
        axes = self._list_axes()
        seeds = axes.pop("seed", None)
        base = {key: _find_value(self.base, key) for key in axes}
        points = [base, *({**base, key: value} for key, values in axes.items() for value in values)]
        for point in points:
            # Values of the base are not set again: setting a component's name would drop its parameters.
            values = {key: value for key, value in point.items() if value != base[key]}
            for seed in seeds or [None]:
                more = {} if seed is None else {"seed": seed}
                yield self.make_cell(values | more, point | more)

    def _sample(self) -> Iterator[SweepCell]:
        """Yield random cells, keyed by the seed of the base: a longer search begins with the shorter one."""
        rng = np.random.default_rng([self.base.seed, 0x5EED])
        for _ in range(self.sweep.trials or 0):
            yield self.make_cell({key: _sample_axis(axis, rng) for key, axis in self.sweep.parsed_axes.items()})

    def _extreme_values(self) -> Iterator[AxisValues]:
        """Yield values that show whether every axis is a field of the experiment and its ends are allowed."""
        axes = self.sweep.parsed_axes
        first = {key: axis.low if isinstance(axis, AxisRange) else axis[0] for key, axis in axes.items()}
        for key, axis in axes.items():
            for value in (axis.low, axis.high) if isinstance(axis, AxisRange) else axis:
                yield {**first, key: value}


def _find_value(experiment: Experiment, key: str) -> Any:
    """Return the experiment's value of a dotted key; None if it has none."""
    section: Any = experiment.to_dict()
    for part in key.split("."):
        section = section.get(part) if isinstance(section, Mapping) else None
    return section


def _sample_axis(axis: Axis, rng: np.random.Generator) -> Any:
    if not isinstance(axis, AxisRange):
        return axis[int(rng.integers(len(axis)))]
    if axis.log:
        value = float(np.exp(rng.uniform(np.log(axis.low), np.log(axis.high))))
        return round(value) if axis.is_integer else float(f"{value:.6g}")
    return int(rng.integers(int(axis.low), int(axis.high) + 1)) if axis.is_integer else float(
        f"{rng.uniform(axis.low, axis.high):.6g}")
