"""What is searched for tuned presets: `tuning.yaml`, checked against the algorithms' own parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dbo.platform.cli import listing
from dbo.platform.config import yaml_io
from dbo.platform.config.validation import pick, tell
from dbo.platform.errors import InputError

FILE = Path(__file__).with_name("tuning.yaml")
Values = dict[str, float]
Range = tuple[float, float]
_STEPS = {"lower": 1, "solve": 1, "upper": 1, "curvature": -1}      # ranges of steps, and of inverse steps
_MIXING = "consensus"                                                # the range of γ


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Seeds(_Strict):
    search: int
    final: int
    margin: int


class Task(_Strict):
    experiment: dict[str, Any]
    budget: int = Field(gt=0, description="oracle calls of a node per trial, weighed")
    score: Literal["accuracy", "distance"]
    slack: float = Field(ge=0, description="how far below its best a final run may end, in units of the score")
    ranges: dict[str, Range]
    trials: int | None = Field(None, ge=4, description="instead of the plan's")
    finalists: int | None = Field(None, ge=1, description="instead of the plan's")
    stretch: int | None = Field(None, ge=1, description="instead of the plan's")
    points: int | None = Field(None, ge=5, description="instead of the plan's")
    downloaded: bool = Field(False, description="needs data from elsewhere: searched only if it is asked for by name")


class Method(_Strict):
    fields: dict[str, str] = Field(description="searched field (or a+b) to the range that it is drawn from")
    published: dict[str, Values] = {}


class Plan(_Strict):
    """The whole file."""

    trials: int = Field(ge=4)
    finalists: int = Field(ge=1)
    seeds: Seeds
    stretch: int = Field(ge=1)
    apart: float = Field(gt=0, description="how far the second seed's score may be below the first's, in slacks")
    margin: float = Field(ge=1, description="factor on all steps under which values must hold too")
    elsewhere: tuple[dict[str, Any], ...] = Field(description="topologies on which they must hold with that factor too")
    retreat: tuple[float, ...] = Field(description="factors on steps and γ with which the best goes back if none holds")
    points: int = Field(ge=1)
    seed: int
    weights: dict[str, float]
    experiment: dict[str, Any]
    ranges: dict[str, Range]
    tasks: dict[str, Task]
    algorithms: dict[str, Method]


@dataclass(frozen=True, slots=True)
class Search:
    """One algorithm on one task."""

    algorithm: str
    task: str
    plan: Plan
    defaults: Mapping[str, Any]       # of all its parameters
    ranges: Mapping[str, Range]
    steps: Mapping[str, int]          # fields that are step sizes: 1, or inverse ones: -1
    mixing: frozenset[str]            # fields that are consensus steps
    trials: int
    published: Values | None
    data_dir: str | None = None

    @property
    def finalists(self) -> int:
        return self.about.finalists or self.plan.finalists

    @property
    def stretch(self) -> int:
        return self.about.stretch or self.plan.stretch

    @property
    def points(self) -> int:
        return self.about.points or self.plan.points

    @property
    def about(self) -> Task:
        return self.plan.tasks[self.task]

    @property
    def plain(self) -> Values:
        """The algorithm's own defaults of what is searched."""
        return {name: float(self.defaults[name]) for key in self.ranges for name in key.split("+")}

    def bolder(self, values: Values) -> Values:
        """The same values with all steps larger by the margin."""
        return self._scaled(values, self.plan.margin, 1.0)

    def milder(self, values: Values, factor: float) -> Values:
        """The same values with all steps, and the γ, smaller by a factor."""
        return self._scaled(values, factor, factor)

    def _scaled(self, values: Values, steps: float, mixing: float) -> Values:
        by = {name: mixing if name in self.mixing else steps ** self.steps.get(name, 0) for name in values}
        return {name: float(f"{value * by[name]:.3g}") for name, value in values.items()}

    def topology(self, there: int = 0) -> dict[str, Any]:
        """The network of trials, or (from 1 on) one of those on which the last choice must hold too."""
        own: dict[str, Any] = {**self.plan.experiment, **self.about.experiment}["topology"]
        return (own, *self.plan.elsewhere)[there]

    @property
    def known(self) -> list[Values]:
        """What is tried first: the defaults, and what was published."""
        known = [self.plain, *([self.published] if self.published else [])]
        return known[:1] if known[1:] == known[:1] else known


def read(path: Path = FILE) -> Plan:
    """The plan in a file."""
    try:
        return Plan.model_validate(yaml_io.read(path))
    except ValidationError as error:
        raise InputError(f"{path}: {tell(error, Plan)}") from None


def searches(
    plan: Plan, algorithms: Sequence[str] = (), tasks: Sequence[str] = (), trials: int | None = None,
    data_dir: str | None = None,
) -> list[Search]:
    """The searches of some algorithms and tasks, task by task; by default all that need no download."""
    names = [pick("--algorithms", name, plan.algorithms) for name in algorithms] or list(plan.algorithms)
    places = [pick("--tasks", task, plan.tasks) for task in tasks] or [
        task for task, about in plan.tasks.items() if not about.downloaded
    ]
    if trials is not None and trials < 4:
        raise InputError(f"--trials: {trials} is not allowed; must be ≥ 4")
    return [_search(plan, name, task, trials, data_dir) for task in places for name in names]


def _search(plan: Plan, algorithm: str, task: str, trials: int | None, data_dir: str | None) -> Search:
    entry = next((e for e in listing.entries()["algorithms"] if e.name == algorithm), None)
    if entry is None:
        raise InputError(f"algorithms.{algorithm}: there is no such algorithm")
    method, about = plan.algorithms[algorithm], plan.tasks[task]
    defaults = {parameter.name: parameter.default for parameter in entry.parameters}
    known = {**plan.ranges, **about.ranges}
    fields = [name for key in method.fields for name in key.split("+")]
    for name in fields:
        pick(f"algorithms.{algorithm}.fields", name, defaults)
    published = method.published.get(about.experiment["task"]["name"])
    if published is not None and set(published) != set(fields):
        raise InputError(f"algorithms.{algorithm}.published: must give exactly {', '.join(fields)}")
    ranges = {
        key: known[pick(f"algorithms.{algorithm}.fields.{key}", role, known)] for key, role in method.fields.items()
    }
    steps = {name: _STEPS[role] for name, role in method.fields.items() if role in _STEPS}
    mixing = frozenset(name for key, role in method.fields.items() if role == _MIXING for name in key.split("+"))
    return Search(
        algorithm, task, plan, defaults, ranges, steps, mixing, trials or about.trials or plan.trials, published,
        data_dir,
    )
