"""Trials: runs of an equal number of oracle calls, what they are worth, and the log that makes a search resumable."""

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.runs.runner import Prepared, Result, prepare, run
from dbo.sweeps.tuning.plan import Search, Values

_NEAREST = 1e-12      # distances below this are rounding


@dataclass(frozen=True, slots=True)
class Trial:
    """What identifies a trial: equal ones have equal outcomes, so each is run once."""

    algorithm: str
    task: str
    setting: str          # digest of everything else that decides
    topology: str
    seed: int
    stretch: int
    values: Values

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trial went."""

    status: str
    score: float | None       # area under the curve per budget; None: diverged, worse than anything
    best: float | None        # mean height in the best fifth of the run
    end: float | None         # in the last fifth: single evaluations of an untracked method swing
    reached: float | None     # at the last evaluation: the nodes' mean accuracy, or the distance to the solution
    rounds: int
    oracle: Mapping[str, int]     # calls of a node
    seconds: float

    def holds(self, slack: float) -> bool:
        """Neither blew up nor decayed."""
        return self.score is not None and self.end is not None and self.best is not None \
            and self.end >= self.best - slack


class NotTried(Exception):
    """A trial that is not in the log and must not be run."""


@dataclass
class Trials:
    """Runs trials, or remembers them from the log; the same command gives the same answers either way."""

    log: Path | None = None
    remember_only: bool = False
    ran: int = 0
    _known: dict[str, Outcome] = field(default_factory=dict)
    _costs: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    _prepared: dict[tuple[str, int, str], Prepared] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.log is None or not self.log.exists():
            return
        lines = self.log.read_text(encoding="utf-8").splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                self._known[Trial(**entry["trial"]).key] = Outcome(**entry["outcome"])
            except (ValueError, TypeError, KeyError) as error:
                if number == len(lines) and not line.endswith("\n"):
                    self.log.write_text("".join(lines[:-1]), encoding="utf-8")     # cut off in the middle
                    break
                raise InputError(f"{self.log}: line {number} is damaged: {error}") from None

    def outcome(self, search: Search, values: Values, seed: int, stretch: int = 1, there: int = 0) -> Outcome:
        """Of one trial, from the log if it is there."""
        topology = search.topology(there)["name"]
        trial = Trial(search.algorithm, search.task, setting(search, there), topology, seed, stretch, values)
        found = self._known.get(trial.key)
        if found is None:
            if self.remember_only:
                raise NotTried(trial.key)
            found = self._known[trial.key] = self._run(search, trial, there)
            self.ran += 1
            if self.log is not None:
                self.log.parent.mkdir(parents=True, exist_ok=True)
                with open(self.log, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"trial": asdict(trial), "outcome": asdict(found)}, allow_nan=False) + "\n")
        return found

    def _run(self, search: Search, trial: Trial, there: int) -> Outcome:
        budget, started = search.about.budget, time.perf_counter()
        start, per_round = self._cost(search)
        once = max(1, int((budget - start) // per_round))
        rounds = max(1, int((trial.stretch * budget - start) // per_round))
        made = experiment(search, trial.values, trial.seed, rounds, max(1, once // search.points), there)
        result = self._carry_out(search, made)
        history = result.history
        values = curve(history, search.about.score)
        fifths = [float(np.mean(part)) for part in np.array_split(values, min(5, len(values)))] if len(values) else []
        finished = result.status == "finished"
        return Outcome(
            status=result.status,
            score=round(area(spent(history, search), values, budget), 6) if finished else None,
            best=round(max(fifths), 6) if finished else None,
            end=round(fifths[-1], 6) if finished else None,
            reached=float(f"{history[_watched(history)].iloc[-1]:.4g}") if finished else None,
            rounds=int(history["round"].iloc[-1]) if len(history) else 0,
            oracle={name: int(history[name].iloc[-1]) if len(history) else 0 for name in search.plan.weights},
            seconds=round(time.perf_counter() - started, 2),
        )

    def _cost(self, search: Search) -> tuple[float, float]:
        """Weighed calls before the first round and per round; with the smallest steps, which break nothing in one."""
        key = (search.algorithm, search.task)
        if key not in self._costs:
            lowest = {name: low for key, (low, _) in search.ranges.items() for name in key.split("+")}
            result = self._carry_out(search, experiment(search, lowest, search.plan.seeds.search))
            calls = spent(result.history, search)
            self._costs[key] = float(calls[0]), float(calls[1] - calls[0])
        return self._costs[key]

    def _carry_out(self, search: Search, made: Experiment) -> Result:
        place = (search.task, made.seed, str(made.topology))
        if place not in self._prepared:
            self._prepared[place] = prepare(made)
        # One thread also for evaluations: many small products on a busy machine are many times slower with more.
        quiet = np.errstate(all="ignore")
        with TemporaryDirectory(prefix="dbo-tuning-") as folder, quiet, threadpool_limits(limits=1):
            return run(made, Path(folder) / "run", prepared=self._prepared[place])


def setting(search: Search, there: int = 0) -> str:
    """Digest of what decides a trial besides its own values: experiment, budget, score, parameters left at defaults."""
    plan, about = search.plan, search.about
    decisive = {
        "experiment": {**plan.experiment, **about.experiment, "topology": search.topology(there)},
        "budget": about.budget, "score": about.score,
        "weights": plan.weights, "points": search.points,
        "fixed": {name: str(value) for name, value in search.defaults.items() if name not in search.plain},
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:12]


def experiment(
    search: Search, values: Values, seed: int, rounds: int = 1, eval_every: int = 1, there: int = 0
) -> Experiment:
    """The experiment of a trial. All that a preset may hold is given: today's presets have no say in tomorrow's."""
    fixed = {name: value for name, value in search.defaults.items() if name != "compressor"}
    return Experiment(**{
        **search.plan.experiment, **search.about.experiment,
        "topology": search.topology(there), "data_dir": search.data_dir, "seed": seed,
        "rounds": rounds, "eval_every": eval_every, "checkpoint_every": rounds,
        "algorithm": {"name": search.algorithm, **fixed, **values},
    })


def spent(history: pd.DataFrame, search: Search) -> NDArray[np.float64]:
    """Weighed oracle calls of a node at each evaluation."""
    total = sum(weight * history[name].to_numpy(np.float64) for name, weight in search.plan.weights.items())
    return np.asarray(total, dtype=np.float64)


def curve(history: pd.DataFrame, score: str) -> NDArray[np.float64]:
    """What is to rise.

    `accuracy`: the share of test samples that the nodes' own models get right, which is what comparisons are about.
    `distance`: how many decades the solution is nearer than |x*|.
    """
    watched = history[_watched(history)].to_numpy(np.float64)
    if score == "distance":
        return np.asarray(-np.log10(np.maximum(watched, _NEAREST)), dtype=np.float64)
    return watched


def _watched(history: pd.DataFrame) -> str:
    return next(name for name in ("penalty_error", "solution_error", "node_accuracy_mean") if name in history)


def area(calls: NDArray[np.float64], values: NDArray[np.float64], budget: float) -> float:
    """Mean height of the curve over the budget: being early and ending high both count."""
    inside = calls[(calls > 0) & (calls < budget)]
    at = np.concatenate([[0.0], inside, [budget]])
    return float(np.trapezoid(np.interp(at, calls, values), at) / budget)
