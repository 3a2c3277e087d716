"""Let a step size change with the rounds: an experiment gives a schedule in place of a number.

    algorithm: {name: c2dfb, eta_out: {schedule: cosine, value: 1.0, end: 0.01, rounds: 500}}

`auto` is derived once, when the network is known: from the configuration, the dimensions and facts such as the spectral
gap, with the function that the parameter declares. Every block derives the same number.

A schedule is a function of the number of rounds done, so resumed and extended runs continue it. Algorithms do not see
it: every round gets a configuration with that round's numbers.
"""

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from dbo.algorithms.api import NetworkFacts
from dbo.parameters import declaration, param
from dbo.platform.config.validation import DataclassInstance, build, pick, validate
from dbo.platform.errors import InputError

AUTO = "auto"


class Schedule(Protocol):
    """A step size as a function of the rounds done."""

    @property
    def value(self) -> float: ...

    def at(self, t: int) -> float:
        """Return the step size of the round after `t` rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """The same in every round."""

    value: float = param(help="step size")

    def at(self, t: int) -> float:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class InverseSqrt:
    """value / √(1 + t / rounds)."""

    value: float = param(help="step size of the first round")
    rounds: int = param(1, ge=1, help="rounds after which the step size is value / √2")

    def at(self, t: int) -> float:
        return self.value / math.sqrt(1 + t / self.rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine:
    """From value to end along half a cosine, then constant."""

    value: float = param(help="step size of the first round")
    end: float = param(help="step size after `rounds` rounds")
    rounds: int = param(ge=1, help="length of the descent")

    def at(self, t: int) -> float:
        share = min(t / self.rounds, 1.0)
        return self.end + (self.value - self.end) * 0.5 * (1 + math.cos(math.pi * share))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piecewise:
    """value, then values[i] from round after[i] + 1 on."""

    value: float = param(help="step size of the first round")
    after: tuple[int, ...] = param(ge=1, help="numbers of rounds, ascending, after which the step size changes")
    values: tuple[float, ...] = param(help="the step sizes from then on, one for each entry of `after`")

    def __post_init__(self) -> None:
        if len(self.after) != len(self.values) or sorted(set(self.after)) != list(self.after):
            raise ValueError(f"after: {list(self.after)} is not allowed; must ascend and have an entry per value")

    def at(self, t: int) -> float:
        passed = sum(t >= number for number in self.after)
        return self.values[passed - 1] if passed else self.value


SCHEDULES: dict[str, type[Schedule]] = {
    "constant": Constant, "inverse_sqrt": InverseSqrt, "cosine": Cosine, "piecewise": Piecewise,
}


@dataclass(frozen=True, slots=True)
class Schedules:
    """The schedules of a configuration, by parameter."""

    by_name: Mapping[str, Schedule] = field(default_factory=dict)
    automatic: tuple[str, ...] = ()     # parameters whose value is derived from the network

    def derive(self, config: DataclassInstance, network: NetworkFacts, dim_x: int, dim_y: int) -> dict[str, float]:
        """Return the values of `automatic`."""
        declared = {f.name: declaration(f).auto for f in fields(config)}
        derived = {name: declared[name] for name in self.automatic}
        return {name: float(rule(config, network, dim_x, dim_y)) for name, rule in derived.items() if rule is not None}

    def resolve(self, config: DataclassInstance, network: NetworkFacts, dim_x: int, dim_y: int) -> "Schedules":
        """Return the schedules of a run on this network: what is automatic is a constant."""
        found = self.derive(config, network, dim_x, dim_y)
        return Schedules({**self.by_name, **{name: Constant(value=value) for name, value in found.items()}})

    def apply(self, config: DataclassInstance, round_: int) -> DataclassInstance:
        """Return the configuration of round `round_` (1, 2, …); of the start if it is 0."""
        if not self.by_name:
            return config
        values = {name: schedule.at(max(round_ - 1, 0)) for name, schedule in self.by_name.items()}
        changed: DataclassInstance = replace(config, **values)
        return changed


def split_schedules(config: type, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values with each schedule replaced by its first number, and the resolved schedules by parameter.

    A value that is `auto` is left to its default until the network is known.
    """
    plain: dict[str, Any] = dict(values)
    resolved: dict[str, Any] = {}
    can_vary = {f.name for f in fields(config) if declaration(f).schedule}
    can_derive = {f.name for f in fields(config) if declaration(f).auto is not None}
    for name, value in values.items():
        if value == AUTO and name in can_derive:
            plain.pop(name)
            resolved[name] = AUTO
        if not isinstance(value, Mapping) or "schedule" not in value:
            continue
        where = f"algorithm.{name}"
        if name not in can_vary:
            allowed = ", ".join(sorted(can_vary)) or "none"
            raise InputError(f"{where}: a schedule is not allowed here; step sizes that can have one: {allowed}")
        kind = pick(f"{where}.schedule", value["schedule"], SCHEDULES)
        given = {key: inner for key, inner in value.items() if key != "schedule"}
        resolved[name] = {"schedule": kind, **validate(where, (SCHEDULES[kind],), given)}
        _check_range(config, name, build_schedule(where, resolved[name]))
        plain[name] = resolved[name]["value"]
    return plain, resolved


def build_schedule(where: str, section: Mapping[str, Any]) -> Schedule:
    """Return the schedule of a resolved section."""
    return build(where, SCHEDULES[section["schedule"]], section)


def _check_range(config: type, name: str, schedule: Schedule) -> None:
    """Refuse a schedule that leaves the range of its parameter; every kind is monotone between these rounds."""
    found = next(declaration(f) for f in fields(config) if f.name == name)
    ends = [schedule.value, *(getattr(schedule, "values", ())), getattr(schedule, "end", schedule.value)]
    for value in ends:
        for limit, sign, compare in (
            (found.gt, ">", operator.gt), (found.ge, "≥", operator.ge),
            (found.lt, "<", operator.lt), (found.le, "≤", operator.le),
        ):
            if limit is not None and not compare(value, limit):
                raise InputError(
                    f"algorithm.{name}: {value:g} in its schedule is not allowed; must be {sign} {limit:g}")
