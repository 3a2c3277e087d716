"""Run trials of an equal number of oracle calls, score them, and log them so that a search can be resumed."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.runs.atomic_io import append_durably
from dbo.platform.runs.runner import Prepared, Result, prepare, run
from dbo.sweeps.tuning.plan import StepSizes, StepSizeSearch

_LOSSES = ("psi_tune_loss", "tune_loss", "upper_loss")
_MIN_DISTANCE = 1e-12      # smaller distances are rounding errors


@dataclass(frozen=True, slots=True)
class TrialKey:
    """What identifies a trial: equal keys have equal results, so each trial runs once. Field names are the log's."""

    algorithm: str
    task: str
    setting: str          # hash of everything else that decides
    topology: str
    seed: int
    stretch: int
    values: StepSizes

    @property
    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True, slots=True)
class TrialResult:
    """How a trial ended. Field names are the log's."""

    status: str
    score: float | None       # area under the curve per budget, of a rung `end`; None: diverged, worse than anything
    best: float | None        # mean height in the best fifth of the run
    end: float | None         # in the last fifth: single evaluations of an untracked method oscillate
    reached: float | None     # at the last evaluation: the loss, the distance to the solution, or the accuracy
    rounds: int
    oracle: Mapping[str, int]     # calls of a node
    seconds: float
    data: str | None = None       # SHA-256 of the data

    def is_stable(self, slack: float) -> bool:
        """Decide whether the curve neither diverged nor decayed by more than `slack`."""
        return self.score is not None and self.end is not None and self.best is not None \
            and self.end >= self.best - slack


class TrialNotLogged(Exception):
    """A trial is not in the log and must not run."""


@dataclass
class TrialRunner:
    """Runs trials, or reads them from the log; the results are the same."""

    log: Path | None = None
    replay_only: bool = False         # raise `TrialNotLogged` instead of running a trial
    on_trial: Callable[[], None] = lambda: None       # called after each trial that has run
    ran: int = 0
    _known: dict[str, TrialResult] = field(default_factory=dict)
    _costs: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    _prepared: dict[tuple[str, int, str], Prepared] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.log is None or not self.log.exists():
            return
        lines = self.log.read_text(encoding="utf-8").splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                break              # interrupted while writing it; the next line replaces it
            try:
                entry = json.loads(line)
                self._known[TrialKey(**entry["trial"]).text] = TrialResult(**entry["outcome"])
            except (ValueError, TypeError, KeyError) as error:
                raise InputError(f"{self.log}: line {number} is damaged: {error}") from None

    def run(
        self, search: StepSizeSearch, values: StepSizes, seed: int, stretch: int = 1, graph: int = 0
    ) -> TrialResult:
        """Return the result of one trial, from the log if it is there."""
        topology = search.topology(graph)["name"]
        trial = TrialKey(search.algorithm, search.task, hash_setting(search, graph), topology, seed, stretch, values)
        found = self._known.get(trial.text)
        if found is None:
            if self.replay_only:
                raise TrialNotLogged(trial.text)
            found = self._known[trial.text] = self._run(search, trial, graph)
            self.ran += 1
            if self.log is not None:
                self.log.parent.mkdir(parents=True, exist_ok=True)
                line = json.dumps({"trial": asdict(trial), "outcome": asdict(found)}, allow_nan=False) + "\n"
                append_durably(self.log.resolve(), line, "a trial")       # the user may have chosen a link
            self.on_trial()
        return found

    def has_logged(self, search: StepSizeSearch) -> bool:
        """Decide whether the log has a trial of a search."""
        keys = (json.loads(text) for text in self._known)
        return any((key["algorithm"], key["setting"]) == (search.algorithm, hash_setting(search)) for key in keys)

    def _run(self, search: StepSizeSearch, trial: TrialKey, graph: int) -> TrialResult:
        budget, started = search.task_plan.budget, time.perf_counter()
        start, per_round = self._measure_cost(search)
        if search.identity and start + per_round > budget:
            raise InputError(
                f"--budget: {budget} is not allowed; must be ≥ {int(start + per_round)}, the oracle calls of one round "
                f"of {search.algorithm}"
            )
        horizon = trial.stretch * budget if search.rungs else budget      # whose evaluations are `points` in number
        once = max(1, int((horizon - start) // per_round))
        rounds = max(1, int((trial.stretch * budget - start) // per_round))
        experiment = make_experiment(search, trial.values, trial.seed, rounds, max(1, once // search.points), graph)
        result = self._run_experiment(search, experiment)
        history = result.history
        score = search.task_plan.score
        values = compute_curve(history, score)
        fifths = [float(np.mean(part)) for part in np.array_split(values, min(5, len(values)))] if len(values) else []
        finished = result.status == "finished" and bool(np.isfinite(values).all())
        end = fifths[-1] if finished else 0.0
        # A rung asks what is worth a longer trial: where the curve ends, not how fast it starts.
        height = end if search.rungs or not finished else integrate_curve(count_calls(history, search), values, budget)
        return TrialResult(
            status=result.status,
            score=round(height, 6) if finished else None,
            best=round(max(fifths), 6) if finished else None,
            end=round(end, 6) if finished else None,
            reached=float(f"{history[_find_scored_column(history, score)].iloc[-1]:.4g}") if finished else None,
            rounds=int(history["round"].iloc[-1]) if len(history) else 0,
            oracle={name: int(history[name].iloc[-1]) if len(history) else 0 for name in search.plan.weights},
            seconds=round(time.perf_counter() - started, 2),
            data=result.summary["problem"].get("data_sha256"),
        )

    def _measure_cost(self, search: StepSizeSearch) -> tuple[float, float]:
        """Return weighted calls before the first round and per round, measured with steps too small to diverge."""
        key = (search.algorithm, search.task)
        if key not in self._costs:
            lowest = {name: low for key, (low, _) in search.ranges.items() for name in key.split("+")}
            result = self._run_experiment(search, make_experiment(search, lowest, search.plan.seeds.search))
            calls = count_calls(result.history, search)
            if len(calls) < 2:
                raise InputError(f"{search.algorithm} on {search.task}: a round with the smallest steps diverges")
            self._costs[key] = float(calls[0]), float(calls[1] - calls[0])
        return self._costs[key]

    def _run_experiment(self, search: StepSizeSearch, experiment: Experiment) -> Result:
        key = (search.task, experiment.seed, str(experiment.topology))
        if key not in self._prepared:
            self._prepared[key] = prepare(experiment)
        # One thread also for evaluations: many small products on a busy machine are many times slower with more.
        quiet = np.errstate(all="ignore")
        with TemporaryDirectory(prefix="dbo-tuning-") as folder, quiet, threadpool_limits(limits=1):
            return run(experiment, Path(folder) / "run", prepared=self._prepared[key])


def hash_setting(search: StepSizeSearch, graph: int = 0) -> str:
    """Hash what decides a trial besides its values: experiment, budget, score, parameters that keep their defaults."""
    plan, task_plan = search.plan, search.task_plan
    setting = {
        "experiment": {**plan.experiment, **task_plan.experiment, "topology": search.topology(graph)},
        "budget": task_plan.budget, "score": task_plan.score,
        "weights": plan.weights, "points": search.points,
        **({"scored": "end"} if search.rungs else {}),
        "fixed": {name: str(value) for name, value in search.defaults.items() if name not in search.default_steps},
        **({"identity": search.identity} if search.identity else {}),
        **({"given": str(search.given)} if search.identity or search.given else {}),
    }
    return hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:12]


def make_experiment(
    search: StepSizeSearch, values: StepSizes, seed: int, rounds: int = 1, eval_every: int = 1, graph: int = 0
) -> Experiment:
    """Return the experiment of a trial. It sets every parameter, so that existing presets have no influence."""
    fixed = {name: value for name, value in search.defaults.items() if name != "compressor"}
    return Experiment(**{
        **search.plan.experiment, **search.task_plan.experiment,
        "topology": search.topology(graph), "data_dir": search.data_dir, "seed": seed,
        "rounds": rounds, "eval_every": eval_every, "checkpoint_every": rounds,
        "psi_every": 1 if search.task_plan.score == "psi_tune_loss" else None,
        "algorithm": {"name": search.algorithm, **fixed, **search.given, **values},
    })


def count_calls(history: pd.DataFrame, search: StepSizeSearch) -> NDArray[np.float64]:
    """Return the weighted oracle calls of a node at each evaluation."""
    total = sum(weight * history[name].to_numpy(np.float64) for name, weight in search.plan.weights.items())
    return np.asarray(total, dtype=np.float64)


def compute_curve(history: pd.DataFrame, score: str) -> NDArray[np.float64]:
    """Return the curve whose area is the score; higher is better.

    `accuracy`: the share of test samples that the nodes' own models classify correctly, as comparisons measure it.
    `distance`: how many decades the solution is nearer than |x*|. Losses: by how much of its value at the start the
    loss has fallen; `psi_tune_loss` and `tune_loss` are measured on samples that neither level nor the test sees.
    """
    values = history[_find_scored_column(history, score)].to_numpy(np.float64)
    if score in _LOSSES:
        return np.asarray((values[:1] - values) / np.maximum(np.abs(values[:1]), _MIN_DISTANCE), dtype=np.float64)
    if score == "distance":
        return np.asarray(-np.log10(np.maximum(values, _MIN_DISTANCE)), dtype=np.float64)
    return values


def _find_scored_column(history: pd.DataFrame, score: str) -> str:
    if score in _LOSSES:
        return score
    return next(name for name in ("penalty_error", "solution_error", "node_accuracy_mean") if name in history)


def integrate_curve(calls: NDArray[np.float64], values: NDArray[np.float64], budget: float) -> float:
    """Return the mean height of the curve over the budget: a fast start and a high end both count."""
    inside = calls[(calls > 0) & (calls < budget)]
    at = np.concatenate([[0.0], inside, [budget]])
    return float(np.trapezoid(np.interp(at, calls, values), at) / budget)
