"""Decide when a run ends before its last round: `until: {target, rounds, bytes, …}` of an experiment.

A run ends at the first evaluation at which one of them holds. All but `seconds` depend on the evaluation alone, so a
resumed or repeated run ends at the same round.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.runs.schema import Record, Target, count_oracle_calls
from dbo.platform.runs.targets import choose_target

# key of `until`: what it limits
_BUDGETS: dict[str, Callable[[Record], float | None]] = {
    "rounds": lambda record: record["round"], "bytes": lambda record: record["bytes_links"],
    "seconds": lambda record: record["seconds"], "oracle_calls": count_oracle_calls,
    "samples": lambda record: record["samples"],
}


@dataclass(frozen=True, slots=True)
class StopRule:
    """The parsed `until` of an experiment; without one it never holds."""

    target: Target | None = None
    budgets: tuple[tuple[str, float], ...] = ()         # (key, limit)

    @classmethod
    def of(cls, experiment: Experiment) -> "StopRule":
        """Parse the rule; a wrong target is an input error."""
        until = experiment.until
        if until is None:
            return cls()
        limits = {key: getattr(until, key) for key in _BUDGETS}
        return cls(
            _parse_target(experiment, until.target) if until.target is not None else None,
            tuple((key, float(limit)) for key, limit in limits.items() if limit is not None),
        )

    def find_reason(self, record: Record) -> str | None:
        """Return which part of the rule holds at an evaluation; None if none does."""
        if self.target is not None and self.target.find_first([record]) is not None:
            return f"target {self.target}"
        for key, limit in self.budgets:
            if (_BUDGETS[key](record) or 0) >= limit:
                return f"{key} {limit:g}"
        return None

    def find_first(self, records: Iterable[Record]) -> tuple[int, str] | None:
        """Return the first round at which the rule holds, and why."""
        return next(((r["round"], reason) for r in records if (reason := self.find_reason(r))), None)


def _parse_target(experiment: Experiment, text: str) -> Target:
    """Parse a target of the task's metrics."""
    try:
        return choose_target(text, experiment.task["name"])
    except InputError as error:
        raise InputError(str(error).replace("--target:", "until.target:", 1)) from None
