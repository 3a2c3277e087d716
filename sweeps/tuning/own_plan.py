"""Plan the search of step sizes for an experiment of one's own, and write what it finds to a preset file.

The rules are those of `tuning.yaml`, with fewer trials and on the experiment's own network alone. A trial scores the
upper loss on samples that neither level nor the test metrics see.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from dbo.algorithms.registry import algorithms
from dbo.parameters import declaration
from dbo.platform.config import presets, yaml_io
from dbo.platform.config.experiment import Experiment
from dbo.platform.config.validation import pick
from dbo.platform.errors import InputError
from dbo.platform.runs.atomic_io import write_atomically
from dbo.platform.runs.preparation import Prepared, prepare
from dbo.sweeps.tuning.plan import (
    AlgorithmPlan,
    Bounds,
    StepSizeSearch,
    TaskPlan,
    TuningPlan,
    TuningSeeds,
    make_search,
    read_plan,
)
from dbo.sweeps.tuning.search import SearchResult, build_entry

TUNE_FRACTION = 0.3
TRIALS, BUDGET = 16, 2000
SPREAD = 30.0               # an unknown step size is searched from its default / 30 to its default × 30
RANGES: Mapping[str, Bounds] = {            # where tuning.yaml has none for the task
    "lower": (0.003, 3.0), "solve": (0.001, 1.0), "upper": (0.003, 30.0), "curvature": (1.0, 1000.0),
}
# Each trial sets these itself.
_NOT_SEARCHED = (
    "name", "seed", "rounds", "eval_every", "checkpoint_every", "keep_checkpoints", "algorithm", "engine", "tracking",
    "presets", "data_dir",
)
_SLACK = {"psi_tune_loss": 0.05, "tune_loss": 0.05, "upper_loss": 0.05, "distance": 0.5}


@dataclass(frozen=True, slots=True)
class OwnSearches:
    """The searches for one experiment, and the data that they score on."""

    searches: list[StepSizeSearch]
    data_digest: str | None


def plan_searches(
    experiment: Experiment, names: Sequence[str], trials: int = TRIALS, budget: int | None = None,
    ranges: Mapping[str, Bounds] | None = None,
) -> OwnSearches:
    """Return a search per algorithm on the experiment's task, data, network and batches."""
    known = read_plan()
    place = presets.format_place(experiment.task["name"], experiment.task.get("dataset"))
    base = _choose_base(experiment)
    search, final, margin = ((experiment.seed + k) % 2**31 for k in (1, 2, 3))
    seeds = TuningSeeds(search=search, final=final, margin=margin)
    prepared = prepare(Experiment(**base, data_dir=experiment.data_dir, seed=seeds.search))
    like = known.tasks.get(place)
    score = _choose_score(prepared, like)
    for role in ranges or {}:
        pick("--range", role, {*RANGES, *known.ranges})
    plan = known.model_copy(update={
        "seeds": seeds, "elsewhere": (), "finalists": 2, "stretch": 2, "points": 10, "experiment": {},
        "tasks": {place: TaskPlan(
            experiment=base, budget=budget or (like.budget if like else BUDGET), score=score, slack=_SLACK[score],
            ranges={**RANGES, **(like.ranges if like else {}), **(ranges or {})},
            **({"rungs": like.rungs, "points": like.points} if like and like.rungs else {}),
        )},
    })
    given = _read_given(experiment)
    searches = [_make_search(plan, name, place, trials, experiment, given, prepared) for name in names]
    return OwnSearches(searches, prepared.data_digest)


def _choose_base(experiment: Experiment) -> dict[str, Any]:
    """Return what all trials share: the experiment without what each of them sets itself."""
    base = {key: value for key, value in experiment.given.items() if key not in _NOT_SEARCHED}
    base = {**base, "topology": dict(experiment.topology), "task": dict(experiment.task), "engine": {"name": "local"}}
    return {**base, "tune_fraction": experiment.tune_fraction or TUNE_FRACTION}


def _choose_score(
    prepared: Prepared, like: TaskPlan | None
) -> Literal["psi_tune_loss", "tune_loss", "distance", "upper_loss"]:
    """Return the loss on the tune part: at (x̄, y*(x̄)) where the shipped plan takes that solve for cheap.

    Without samples it is the distance to a known solution, else the upper loss.
    """
    problem = prepared.problem
    shard = problem.shard([0])
    if problem.tune_losses(shard.x0, shard.y0) is not None:
        return "psi_tune_loss" if like is not None and like.score == "psi_tune_loss" else "tune_loss"
    return "distance" if "solution_error" in problem.task_metrics(shard.x0[0], shard.y0[0]) else "upper_loss"


def _read_given(experiment: Experiment) -> dict[str, Any]:
    """Return the algorithm's parameters that the user has fixed, with the algorithm's name."""
    return {"name": experiment.algorithm["name"], **experiment.given.get("algorithm", {})}


def _make_search(
    plan: TuningPlan, name: str, place: str, trials: int, experiment: Experiment, given: Mapping[str, Any],
    prepared: Prepared,
) -> StepSizeSearch:
    pick("--algorithms", name, algorithms())
    fixed = {key: value for key, value in given.items() if key != "name"} if given["name"] == name else {}
    method = plan.algorithms.get(name)
    task_plan = plan.tasks[place]
    if method is None:
        method, own = _plan_unknown(name)
        task_plan = task_plan.model_copy(update={"ranges": {**task_plan.ranges, **own}})
    searched = {key: role for key, role in method.fields.items() if not fixed.keys() & set(key.split("+"))}
    if not searched:
        raise InputError(f"--algorithms: {name} has no step size to search; declare them with param(…, schedule=True)")
    published = method.published if searched == method.fields else {}
    plan = plan.model_copy(update={
        "algorithms": {name: AlgorithmPlan(fields=searched, published=published)}, "tasks": {place: task_plan},
    })
    search = make_search(plan, name, place, trials, experiment.data_dir)
    if name not in read_plan().algorithms:
        steps = {key for key, role in searched.items() if role != "consensus"}
        search = replace(search, step_exponents=dict.fromkeys(steps, 1))
    setting = {**task_plan.experiment, "topology": search.topology()}
    key = Experiment(**setting, algorithm={"name": name, **fixed}).trajectory_key
    identity = hashlib.sha256(f"{key} {prepared.data_digest}".encode()).hexdigest()
    return replace(search, given=fixed, identity=identity)


def _plan_unknown(name: str) -> tuple[AlgorithmPlan, dict[str, Bounds]]:
    """Return what is searched of an algorithm that tuning.yaml does not know: its declared step sizes."""
    searched: dict[str, str] = {}
    ranges: dict[str, Bounds] = {}
    for field in fields(algorithms()[name].config):
        found, default = declaration(field), field.default
        if not found.schedule or not isinstance(default, float) or default <= 0:
            continue
        limit = found.le if found.le is not None else found.lt
        if limit == 1:                              # a weight, such as a consensus step
            searched[field.name] = "consensus"
        else:
            searched[field.name] = f"{name}.{field.name}"
            ranges[searched[field.name]] = (default / SPREAD, min(default * SPREAD, limit or float("inf")))
    return AlgorithmPlan(fields=searched), ranges


def parse_ranges(texts: Sequence[str]) -> dict[str, Bounds]:
    """Parse `role=low:high`."""
    found: dict[str, Bounds] = {}
    for text in texts:
        role, _, bounds = text.partition("=")
        try:
            low, high = (float(bound) for bound in bounds.split(":"))
            if not 0 < low < high < float("inf"):
                raise ValueError
        except ValueError:
            raise InputError(f"--range: {text!r} is not role=low:high with 0 < low < high, e.g. upper=0.01:1") from None
        found[role] = (low, high)
    return found


def write_preset(file: Path, result: SearchResult, command: str) -> None:
    """Add the values that a search has found to a preset file; other entries stay."""
    search, base = result.search, result.search.task_plan.experiment
    entry = {
        **build_entry(result),
        "setting": {
            key: base[key] for key in ("nodes", "topology", "partition", "batch_size", "dtype") if key in base
        } | ({"algorithm": dict(search.given)} if search.given else {}),
        "command": command,
    }
    content = presets.read_file(file, "--out") if file.exists() else {}
    content.setdefault(search.algorithm, {})[search.task] = entry
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, "# Tuned step sizes. An experiment uses them with the key `presets`; given values win.\n"
                     + yaml_io.dump(content))
