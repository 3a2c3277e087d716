"""Search the step sizes of one algorithm on one task: sample everywhere, then around the best, and confirm the best."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
from scipy.stats import qmc

from dbo.platform.errors import InputError
from dbo.sweeps.tuning.plan import StepSizes, StepSizeSearch
from dbo.sweeps.tuning.trials import TrialResult, TrialRunner, make_experiment

# Share of each range, on the log scale, that a stage samples: everything, then around the best so far.
_WIDTHS = (1.0, 0.4, 0.15)
_MAX_POINTS = 1024          # of a stage, invalid ones included

Tried = tuple[StepSizes, TrialResult]


class NoStableTrial(InputError):
    """A search has found nothing that holds: the algorithm keeps its defaults on this task."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Step sizes and their results on the two seeds."""

    values: StepSizes
    first: TrialResult
    final: TrialResult

    @property
    def score(self) -> float | None:
        """Mean over the seeds; None if one of them diverged."""
        if self.first.score is None or self.final.score is None:
            return None
        return (self.first.score + self.final.score) / 2


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search has found."""

    search: StepSizeSearch
    chosen: Candidate
    defaults: Candidate
    published: Candidate | None


def build_entry(result: SearchResult) -> dict[str, Any]:
    """Return the entry of a preset file: the values, and how they were found."""
    search, chosen = result.search, result.chosen
    task_plan, base = search.task_plan, {**search.plan.experiment, **search.task_plan.experiment}
    return {
        "values": dict(chosen.values),
        "horizon": {"oracle_calls": search.horizon, "rounds": chosen.first.rounds, "trials": search.trials},
        "score": {
            "metric": task_plan.score, "mean": _round(chosen.score), "reached": chosen.first.reached,
            "defaults": _round(result.defaults.score),
        },
        "data": {
            "sha256": chosen.first.data, "seeds": [search.plan.seeds.search, search.plan.seeds.final],
            **({"tune_fraction": base["tune_fraction"]} if "tune_fraction" in base else {}),
        },
        **({"setting": setting} if (setting := _describe_setting(search)) else {}),
    }


def _describe_setting(search: StepSizeSearch) -> dict[str, Any]:
    """Return what of the trials' experiment the task itself adds: its batches, and the parameters that it fixes."""
    base = search.task_plan.experiment
    return {
        **({"batch_size": base["batch_size"]} if "batch_size" in base else {}),
        **({"algorithm": dict(search.given)} if search.given else {}),
    }


def _round(score: float | None) -> float | None:
    return None if score is None else round(score, 6)


def run_search(search: StepSizeSearch, trials: TrialRunner) -> Iterator[SearchResult | None]:
    """Yield None after every trial, and the result at the end."""
    tried: list[Tried] = []
    for values in _propose(search, trials, tried):
        tried.append((values, trials.run(search, values, search.plan.seeds.search)))
        yield None
    best = _choose_by_halving(search, trials, tried) if search.rungs else _choose(search, trials, tried)
    defaults, *published = [
        _run_whole(search, trials, values, first) for values, first in tried[: len(search.known_values)]
    ]
    if _score(defaults) > _score(best) and _is_consistent(search, defaults) and _is_stable_elsewhere(
            search, trials, defaults, defaults.values):
        best = defaults         # without a margin: a preset must not be worse than the defaults
    if best is None:
        raise NoStableTrial(f"{search.algorithm} on {search.task}: no trial is stable; widen its ranges")
    yield SearchResult(search, best, defaults, (published or [defaults])[0] if search.published else None)


def _choose(search: StepSizeSearch, trials: TrialRunner, tried: list[Tried]) -> Candidate | None:
    """Return the best of the first few stable candidates that is stable on the other graphs too, with larger steps.

    If none is, shrink all steps and γ of the best until it is; then look at the next few.
    """
    stable = _find_stable(search, trials, tried)
    while finalists := sorted(islice(stable, search.finalists), key=_score, reverse=True):
        for candidate in chain(finalists, _shrink(search, trials, finalists[0])):
            if _is_stable_elsewhere(search, trials, candidate, search.enlarge_steps(candidate.values)):
                return candidate
    return None


def _choose_by_halving(search: StepSizeSearch, trials: TrialRunner, tried: list[Tried]) -> Candidate | None:
    """Return the best over the longest horizon that is stable there on both seeds and on the other graphs.

    Fewer and fewer of the best run again for longer and longer. There is no margin: what a step does over the
    whole horizon has been tried. If none of the last few is stable, shrink all steps and γ of the best until it is.
    """
    slack, seed = search.task_plan.slack, search.plan.seeds.search
    for stretch, kept in search.rungs.items():
        stable = [one for one in tried if one[1].is_stable(slack)]
        best = sorted(stable, key=lambda one: _score(one[1]), reverse=True)[:kept]
        tried = [(values, trials.run(search, values, seed, stretch)) for values, _ in best]
    if not tried:
        return None
    finalists = sorted((_run_whole(search, trials, *one) for one in tried), key=_score, reverse=True)
    smaller = (search.shrink_steps(finalists[0].values, factor) for factor in search.plan.retreat)
    for candidate in chain(finalists, (
        _run_whole(search, trials, values, trials.run(search, values, seed)) for values in smaller
    )):
        if _is_consistent(search, candidate) and _is_stable_elsewhere(search, trials, candidate, candidate.values):
            return candidate
    return None


def _run_whole(search: StepSizeSearch, trials: TrialRunner, values: StepSizes, first: TrialResult) -> Candidate:
    """Return values with the results that decide; where horizons differ, both are of the longest, if `first` holds."""
    if search.rungs:
        if not first.is_stable(search.task_plan.slack):
            return Candidate(values, first, first)
        first = trials.run(search, values, search.plan.seeds.search, search.stretch)
    return Candidate(values, first, _run_final(search, trials, values))


def _shrink(search: StepSizeSearch, trials: TrialRunner, best: Candidate) -> Iterator[Candidate]:
    """Yield the best with smaller and smaller steps and γ, if it is stable on the graph of the search."""
    for factor in search.plan.retreat:
        values = search.shrink_steps(best.values, factor)
        first = trials.run(search, values, search.plan.seeds.search)
        if (found := _confirm(search, trials, values, first)) is not None:
            yield found


def _is_stable_elsewhere(
    search: StepSizeSearch, trials: TrialRunner, candidate: Candidate, values: StepSizes
) -> bool:
    """Decide whether the values are stable on the other graphs, and score there about what the candidate scores."""
    slack = search.task_plan.slack
    for graph in range(1, len(search.plan.elsewhere) + 1):
        found = trials.run(search, values, search.plan.seeds.final, search.stretch, graph)
        if not found.is_stable(slack) or _score(found) < _score(candidate.final) - slack:
            return False
    return True


def _is_consistent(search: StepSizeSearch, candidate: Candidate) -> bool:
    """Decide whether a candidate is stable on both seeds, and scores about the same."""
    first, final, slack = candidate.first, candidate.final, search.task_plan.slack
    similar = _score(final) >= _score(first) - search.plan.apart * slack
    return first.is_stable(slack) and final.is_stable(slack) and similar


def _find_stable(search: StepSizeSearch, trials: TrialRunner, tried: list[Tried]) -> Iterator[Candidate]:
    """Yield, from the highest score downwards, those that are stable: for longer, on other seeds, with larger steps."""
    for values, first in sorted(tried, key=lambda t: _score(t[1]), reverse=True):
        if (found := _confirm(search, trials, values, first)) is not None:
            yield found


def _confirm(
    search: StepSizeSearch, trials: TrialRunner, values: StepSizes, first: TrialResult
) -> Candidate | None:
    slack = search.task_plan.slack
    if not first.is_stable(slack):          # before a long run is spent on it
        return None
    found = Candidate(values, first, _run_final(search, trials, values))
    if not _is_consistent(search, found):
        return None
    larger = trials.run(search, search.enlarge_steps(values), search.plan.seeds.margin, search.stretch)
    return found if larger.is_stable(slack) else None


def _run_final(search: StepSizeSearch, trials: TrialRunner, values: StepSizes) -> TrialResult:
    return trials.run(search, values, search.plan.seeds.final, search.stretch)


def _score(one: TrialResult | Candidate | None) -> float:
    return -np.inf if one is None or one.score is None else one.score


def _propose(search: StepSizeSearch, trials: TrialRunner, tried: list[Tried]) -> Iterator[StepSizes]:
    """Yield all values to try, in order; later stages depend on the results of earlier ones."""
    yield from search.known_values
    ends = (search.trials // 2, search.trials * 3 // 4, search.trials)
    for stage, (width, end) in enumerate(zip(_WIDTHS, ends, strict=True)):
        best = _find_centre(search, trials, tried) if stage else None
        centre = best or search.default_steps
        for values in _sample_box(search, stage, width if best else 1.0, centre):
            if len(tried) >= end:
                break
            if values not in [t[0] for t in tried] and _is_valid(search, values):
                yield values


def _find_centre(search: StepSizeSearch, trials: TrialRunner, tried: list[Tried]) -> StepSizes | None:
    """Return the values to sample around: the best so far; with rungs, which discard later, the best short trial."""
    if not search.rungs:
        return next((found.values for found in _find_stable(search, trials, tried)), None)
    stable = [one for one in tried if one[1].is_stable(search.task_plan.slack)]
    return max(stable, key=lambda one: _score(one[1]))[0] if stable else None


def _sample_box(search: StepSizeSearch, stage: int, width: float, around: StepSizes) -> Iterator[StepSizes]:
    """Yield low-discrepancy points in a box of the log scale: a Sobol sequence, shifted by a keyed random vector."""
    ranges = np.log(np.array(list(search.ranges.values()), dtype=np.float64))
    low, size = ranges[:, 0], ranges[:, 1] - ranges[:, 0]
    centre = (np.log([around[key.split("+")[0]] for key in search.ranges]) - low) / size
    corner = np.clip(centre - width / 2, 0, 1 - width)
    key = [search.plan.seed, stage, *(zlib.crc32(name.encode()) for name in (search.algorithm, search.task))]
    shift = np.random.default_rng(key).random(len(low))
    for point in (qmc.Sobol(len(low), scramble=False).random(_MAX_POINTS) + shift) % 1:
        sampled = np.exp(low + size * (corner + width * point))
        yield {name: float(f"{value:.2g}") for key, value in zip(search.ranges, sampled, strict=True)
               for name in key.split("+")}


def _is_valid(search: StepSizeSearch, values: StepSizes) -> bool:
    """Decide whether an experiment accepts the values: some fields constrain each other, such as α η < 1."""
    try:
        make_experiment(search, values, search.plan.seeds.search)
    except InputError:
        return False
    return True
