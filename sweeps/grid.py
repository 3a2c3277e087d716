"""The cells of a sweep: experiments that are checked, named by their run keys, and found again in its folder."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dbo.platform.config import overrides as overriding
from dbo.platform.config.experiment import Experiment
from dbo.platform.config.redact import masked
from dbo.platform.runs.runner import prepare
from dbo.sweeps.plan import Range, Sweep

# Numbers of all nodes' models together, up to which a cell is computed in one process: passing messages between
# processes would take longer than the arithmetic.
SMALL = 5_000_000
Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """One experiment of a sweep, and the values of its axes."""

    values: Values
    experiment: Experiment

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.experiment.run_key[:16]

    @property
    def label(self) -> str:
        return masked(told(self.values))

    def folder(self, out: Path) -> Path:
        return out / "cells" / self.name

    def ended(self, out: Path) -> str | None:
        """finished, diverged or stopped, if it has been run to such an end; else it is to be run."""
        try:
            summary = dict(json.loads((self.folder(out) / "summary.json").read_bytes()))
        except (OSError, ValueError, TypeError):
            return None
        if summary.get("run_key") != self.experiment.run_key:
            return None
        status = str(summary.get("status"))
        return status if status in {"finished", "diverged", "stopped"} else None


def told(values: Mapping[str, Any]) -> str:
    """inner_steps=5 seed=0"""
    return " ".join(f"{short(key, values)}={shown(value)}" for key, value in values.items()) or "base"


def short(key: str, among: Mapping[str, Any]) -> str:
    """The last part of a key, or the section that it names the component of, where that is clear enough."""
    def brief(path: str) -> str:
        head, _, last = path.rpartition(".")
        return head.rpartition(".")[2] if last == "name" and head else last

    return key if sum(brief(other) == brief(key) for other in among) > 1 else brief(key)


def shown(value: Any, exact: bool = False) -> str:
    """A value in few letters; or in as many as it takes, so that no two values are shown alike."""
    if isinstance(value, Mapping):
        rest = (f"{key}={shown(inner, exact)}" for key, inner in value.items() if key != "name")
        return ",".join([*([str(value["name"])] if "name" in value else []), *rest])
    return f"{value:.4g}" if isinstance(value, float) and not exact else str(value)


@dataclass(slots=True)
class _Sizes:
    """How large problems are; each is built once."""

    known: dict[str, int] = field(default_factory=dict)

    def of(self, experiment: Experiment) -> int:
        key = json.dumps([experiment.resolved()["task"], experiment.nodes, experiment.data_dir])
        if key not in self.known:
            problem = prepare(experiment).problem
            self.known[key] = experiment.nodes * (problem.dim_x + problem.dim_y)
        return self.known[key]


class Cells:
    """Makes the experiments of a sweep."""

    def __init__(self, sweep: Sweep, sized: bool = True) -> None:
        self.sweep, self._sizes = sweep, _Sizes() if sized else None       # None: the data are not here
        self.data: dict[str, Any] = {"name": sweep.name, **sweep.experiment}
        self.base = self._experiment({})
        self.base_cell = Cell({}, self.base)
        self.placed = {**self.data, "engine": self.base.resolved()["engine"]}      # the engine decided
        if sweep.mode == "tpe":      # other processes make cells too, and must make the same
            self.data = self.placed

    def cell(self, values: Values, told: Values | None = None) -> Cell:
        """The base with these values; told as others, where some of them are the base's own."""
        return Cell(values if told is None else told, self._experiment(values))

    def _experiment(self, values: Values) -> Experiment:
        """The base with these values. Where nobody says which engine, the size of the problem does."""
        data = overriding.apply(self.data, values)
        if data.get("engine") or self._sizes is None:
            return Experiment(**data)
        size = self._sizes.of(Experiment(**data))
        return Experiment(**{**data, "engine": {"name": "local" if size <= SMALL else "ray"}})

    @cached_property
    def fixed(self) -> list[Cell]:
        """All cells, each once, in the order of the axes; a search's that depend on results are not among them."""
        if self.sweep.mode == "tpe":
            for values in self._ends():
                self.cell(values)
            return []
        made = {"grid": self._grid, "one_at_a_time": self._one_at_a_time, "random": self._random}[self.sweep.mode]()
        return list({cell.name: cell for cell in made}.values())

    @property
    def key(self) -> str:
        """Of the sweep: the same when its axes are extended."""
        return hashlib.sha256(f"{self.sweep.name} {self.base.run_key}".encode()).hexdigest()

    def _lists(self) -> dict[str, Sequence[Any]]:
        return {key: axis for key, axis in self.sweep.ranges.items() if not isinstance(axis, Range)}

    def _grid(self) -> Iterator[Cell]:
        axes = self._lists()
        for combination in itertools.product(*axes.values()):
            yield self.cell(dict(zip(axes, combination, strict=True)))

    def _one_at_a_time(self) -> Iterator[Cell]:
        """The base, then every other value of every axis; all of them for every seed."""
        axes = self._lists()
        seeds = axes.pop("seed", None)
        here = {key: _at(self.base, key) for key in axes}
        points = [here, *({**here, key: value} for key, values in axes.items() for value in values)]
        for point in points:
            # What the base says already is not said again: a component's name would drop its parameters.
            values = {key: value for key, value in point.items() if value != here[key]}
            for seed in seeds or [None]:
                more = {} if seed is None else {"seed": seed}
                yield self.cell(values | more, point | more)

    def _random(self) -> Iterator[Cell]:
        """Drawn from the seed of the base, so that a longer search begins with the shorter one."""
        rng = np.random.default_rng([self.base.seed, 0x5EED])
        for _ in range(self.sweep.trials or 0):
            yield self.cell({key: _drawn(axis, rng) for key, axis in self.sweep.ranges.items()})

    def _ends(self) -> Iterator[Values]:
        """What shows that every axis is a field, and its ends or values are allowed."""
        first = {key: axis.low if isinstance(axis, Range) else axis[0] for key, axis in self.sweep.ranges.items()}
        for key, axis in self.sweep.ranges.items():
            for value in (axis.low, axis.high) if isinstance(axis, Range) else axis:
                yield {**first, key: value}


def _at(experiment: Experiment, key: str) -> Any:
    """The base's value of a key; None where only the axis gives it one."""
    place: Any = experiment.resolved()
    for part in key.split("."):
        place = place.get(part) if isinstance(place, Mapping) else None
    return place


def _drawn(axis: list[Any] | Range, rng: np.random.Generator) -> Any:
    if not isinstance(axis, Range):
        return axis[int(rng.integers(len(axis)))]
    if axis.log:
        value = float(np.exp(rng.uniform(np.log(axis.low), np.log(axis.high))))
        return round(value) if axis.whole else float(f"{value:.6g}")
    return int(rng.integers(int(axis.low), int(axis.high) + 1)) if axis.whole else float(
        f"{rng.uniform(axis.low, axis.high):.6g}")


