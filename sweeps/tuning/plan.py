"""Read `tuning.yaml`, the plan of the search for presets, and validate it against the algorithms' parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dbo.algorithms import registry
from dbo.platform.config import yaml_io
from dbo.platform.config.validation import format_error, list_parameters, pick
from dbo.platform.errors import InputError

FILE = Path(__file__).with_name("tuning.yaml")
StepSizes = dict[str, float]
Bounds = tuple[float, float]
_STEP_EXPONENTS = {"lower": 1, "solve": 1, "upper": 1, "curvature": -1}      # ranges of steps, and of inverse steps
_CONSENSUS = "consensus"                                                      # the range of γ


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TuningSeeds(_Strict):
    search: int
    final: int
    margin: int


class TaskPlan(_Strict):
    """How trials on one task run and score."""

    experiment: dict[str, Any]
    budget: int = Field(gt=0, description="weighted oracle calls of a node per trial")
    score: Literal["accuracy", "distance", "psi_tune_loss", "tune_loss", "upper_loss"]
    slack: float = Field(ge=0, description="how far below its best a final run may end, in units of the score")
    ranges: dict[str, Bounds]
    trials: int | None = Field(None, ge=4, description="replaces the plan's")
    finalists: int | None = Field(None, ge=1, description="replaces the plan's")
    stretch: int | None = Field(None, ge=1, description="replaces the plan's")
    points: int | None = Field(None, ge=5, description="replaces the plan's")
    rungs: dict[int, int] = Field(
        {}, description="successive halving: how many of the best run again, for so many budgets, in order"
    )
    algorithm: dict[str, Any] = Field({}, description="parameters that trials fix, of every algorithm that has them")
    own: dict[str, dict[str, Any]] = Field({}, description="parameters that trials of one algorithm fix besides")
    downloaded: bool = Field(False, description="needs a download: searched only if --tasks names it")

    @model_validator(mode="after")
    def _check_rungs(self) -> Self:
        budgets, kept = list(self.rungs), list(self.rungs.values())
        if any(b <= a for a, b in pairwise([1, *budgets])) or any(b > a for a, b in pairwise(kept)) or 0 in kept:
            raise ValueError("rungs: budgets must grow from more than 1, and no more trials may go on than before")
        return self


class AlgorithmPlan(_Strict):
    """Which fields of one algorithm are searched."""

    fields: dict[str, str] = Field(description="searched field (or a+b) to the range that it is sampled from")
    published: dict[str, StepSizes] = {}


class TuningPlan(_Strict):
    """The whole file."""

    trials: int = Field(ge=4)
    finalists: int = Field(ge=1)
    seeds: TuningSeeds
    stretch: int = Field(ge=1)
    apart: float = Field(gt=0, description="how far the second seed's score may be below the first's, in slacks")
    margin: float = Field(ge=1, description="factor on all steps with which values must be stable too")
    elsewhere: tuple[dict[str, Any], ...] = Field(description="further topologies on which they must be stable")
    retreat: tuple[float, ...] = Field(description="factors that shrink steps and γ of the best if none is stable")
    points: int = Field(ge=1)
    seed: int
    weights: dict[str, float]
    experiment: dict[str, Any]
    ranges: dict[str, Bounds]
    tasks: dict[str, TaskPlan]
    algorithms: dict[str, AlgorithmPlan]


@dataclass(frozen=True, slots=True)
class StepSizeSearch:
    """The search of one algorithm on one task."""

    algorithm: str
    task: str
    plan: TuningPlan
    defaults: Mapping[str, Any]               # of all parameters of the algorithm
    ranges: Mapping[str, Bounds]
    step_exponents: Mapping[str, int]         # fields that are step sizes: 1, or inverse ones: -1
    consensus_fields: frozenset[str]          # fields that are consensus steps
    trials: int
    published: StepSizes | None
    data_dir: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)      # parameters that the user or the plan has fixed
    identity: str = ""                        # of the code and the data, where the plan does not determine them

    @property
    def finalists(self) -> int:
        return self.task_plan.finalists or self.plan.finalists

    @property
    def stretch(self) -> int:
        """Budgets of the runs that confirm a choice: the last rung's where there are rungs."""
        return max(self.rungs, default=self.task_plan.stretch or self.plan.stretch)

    @property
    def horizon(self) -> int:
        """Oracle calls over which the score of the choice is taken."""
        return self.task_plan.budget * (self.stretch if self.rungs else 1)

    @property
    def rungs(self) -> Mapping[int, int]:
        return self.task_plan.rungs

    @property
    def points(self) -> int:
        return self.task_plan.points or self.plan.points

    @property
    def task_plan(self) -> TaskPlan:
        return self.plan.tasks[self.task]

    @property
    def default_steps(self) -> StepSizes:
        """The algorithm's defaults of the searched fields."""
        return {name: float(self.defaults[name]) for key in self.ranges for name in key.split("+")}

    def enlarge_steps(self, values: StepSizes) -> StepSizes:
        """Return the values with all steps larger by the margin."""
        return self._scale(values, self.plan.margin, 1.0)

    def shrink_steps(self, values: StepSizes, factor: float) -> StepSizes:
        """Return the values with all steps, and γ, smaller by a factor."""
        return self._scale(values, factor, factor)

    def _scale(self, values: StepSizes, steps: float, consensus: float) -> StepSizes:
        factors = {
            name: consensus if name in self.consensus_fields else steps ** self.step_exponents.get(name, 0)
            for name in values
        }
        return {name: float(f"{value * factors[name]:.3g}") for name, value in values.items()}

    def topology(self, graph: int = 0) -> dict[str, Any]:
        """Return the topology of trials (0), or one of those on which the choice must be stable too (1, 2, …).

        A method without a graph of its own has one topology: its trials on all of them are the same trial.
        """
        network = registry.algorithms()[self.algorithm].network
        if network == "star":
            return {"name": "star"}
        own: dict[str, Any] = {**self.plan.experiment, **self.task_plan.experiment}["topology"]
        return own if network == "single" else (own, *self.plan.elsewhere)[graph]

    @property
    def known_values(self) -> list[StepSizes]:
        """What is tried first: the defaults, and published values."""
        known = [self.default_steps, *([self.published] if self.published else [])]
        return known[:1] if known[1:] == known[:1] else known


def read_plan(path: Path = FILE) -> TuningPlan:
    """Return the plan in a file."""
    try:
        return TuningPlan.model_validate(yaml_io.read(path))
    except ValidationError as error:
        raise InputError(f"{path}: {format_error(error, TuningPlan)}") from None


def list_searches(
    plan: TuningPlan, algorithms: Sequence[str] = (), tasks: Sequence[str] = (), trials: int | None = None,
    data_dir: str | None = None,
) -> list[StepSizeSearch]:
    """Return the searches of some algorithms and tasks, task by task; by default all that need no download."""
    names = [pick("--algorithms", name, plan.algorithms) for name in algorithms] or list(plan.algorithms)
    chosen = [pick("--tasks", task, plan.tasks) for task in tasks] or [
        task for task, task_plan in plan.tasks.items() if not task_plan.downloaded
    ]
    if trials is not None and trials < 4:
        raise InputError(f"--trials: {trials} is not allowed; must be ≥ 4")
    return [make_search(plan, name, task, trials, data_dir) for task in chosen for name in names]


def make_search(
    plan: TuningPlan, algorithm: str, task: str, trials: int | None, data_dir: str | None
) -> StepSizeSearch:
    """Return the search of one algorithm on one task of the plan."""
    known_algorithms = registry.algorithms()
    if algorithm not in known_algorithms:
        raise InputError(f"algorithms.{algorithm}: there is no such algorithm")
    method, task_plan = plan.algorithms[algorithm], plan.tasks[task]
    defaults = {p.name: p.default for p in list_parameters(known_algorithms[algorithm].config)}
    known = {**plan.ranges, **task_plan.ranges}
    fields = [name for key in method.fields for name in key.split("+")]
    for name in fields:
        pick(f"algorithms.{algorithm}.fields", name, defaults)
    published = method.published.get(task_plan.experiment["task"]["name"])
    if published is not None and set(published) != set(fields):
        raise InputError(f"algorithms.{algorithm}.published: must give exactly {', '.join(fields)}")
    ranges = {
        key: known[pick(f"algorithms.{algorithm}.fields.{key}", role, known)] for key, role in method.fields.items()
    }
    exponents = {name: _STEP_EXPONENTS[role] for name, role in method.fields.items() if role in _STEP_EXPONENTS}
    consensus = frozenset(name for key, role in method.fields.items() if role == _CONSENSUS for name in key.split("+"))
    return StepSizeSearch(
        algorithm, task, plan, defaults, ranges, exponents, consensus, trials or task_plan.trials or plan.trials,
        published, data_dir, {
            **{name: value for name, value in task_plan.algorithm.items() if name in defaults},
            **task_plan.own.get(algorithm, {}),
        },
    )
