"""The search of one algorithm's step sizes on one task: spread, gather around the best, confirm the best few."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
from scipy.stats import qmc

from dbo.platform.errors import InputError
from dbo.sweeps.tuning.plan import Search, Values
from dbo.sweeps.tuning.trials import Outcome, Trials, experiment

# Share of each range, on the log scale, in which the stages draw: everywhere, then around the best so far.
_WIDTHS = (1.0, 0.4, 0.15)
_MOST = 1024          # points of a stage, the invalid ones included

Tried = tuple[Values, Outcome]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Values and their outcomes on the two seeds."""

    values: Values
    first: Outcome
    final: Outcome

    @property
    def score(self) -> float | None:
        """Mean over the seeds; None if one of them diverged."""
        if self.first.score is None or self.final.score is None:
            return None
        return (self.first.score + self.final.score) / 2


@dataclass(frozen=True, slots=True)
class Found:
    """The end of a search."""

    search: Search
    chosen: Candidate
    plain: Candidate
    published: Candidate | None


def tune(search: Search, trials: Trials) -> Iterator[Found | None]:
    """Yields None after every trial, at last what was found."""
    tried: list[Tried] = []
    for values in _proposals(search, trials, tried):
        tried.append((values, trials.outcome(search, values, search.plan.seeds.search)))
        yield None
    best = _best(search, trials, tried)
    plain, *published = [Candidate(t[0], t[1], _again(search, trials, t[0])) for t in tried[: len(search.known)]]
    if _score(plain) > _score(best) and _lasts(search, plain) and _holds_elsewhere(search, trials, plain, plain.values):
        best = plain          # without a margin: a preset is to be no worse than none
    if best is None:
        raise InputError(f"{search.algorithm} on {search.task}: no trial came through; widen its ranges")
    yield Found(search, best, plain, (published or [plain])[0] if search.published else None)


def _best(search: Search, trials: Trials, tried: list[Tried]) -> Candidate | None:
    """Of the first few steady ones the best on average that holds on the other graphs too, with larger steps.

    If none of them does, their best goes back, smaller in all its steps and γ, until it holds; then the next few are
    looked at.
    """
    steady = _steady(search, trials, tried)
    while finalists := sorted(islice(steady, search.finalists), key=_score, reverse=True):
        for candidate in chain(finalists, _retreat(search, trials, finalists[0])):
            if _holds_elsewhere(search, trials, candidate, search.bolder(candidate.values)):
                return candidate
    return None


def _retreat(search: Search, trials: Trials, best: Candidate) -> Iterator[Candidate]:
    """The best one with all steps and γ smaller, then smaller still; those that hold on the graph of the search."""
    for factor in search.plan.retreat:
        values = search.milder(best.values, factor)
        first = trials.outcome(search, values, search.plan.seeds.search)
        if (found := _confirmed(search, trials, values, first)) is not None:
            yield found


def _holds_elsewhere(search: Search, trials: Trials, candidate: Candidate, values: Values) -> bool:
    """On the other graphs these values neither blow up nor decay, nor score much lower than the candidate does."""
    slack = search.about.slack
    for there in range(1, len(search.plan.elsewhere) + 1):
        found = trials.outcome(search, values, search.plan.seeds.final, search.stretch, there)
        if not found.holds(slack) or _score(found) < _score(candidate.final) - slack:
            return False
    return True


def _lasts(search: Search, candidate: Candidate) -> bool:
    first, final, slack = candidate.first, candidate.final, search.about.slack
    alike = _score(final) >= _score(first) - search.plan.apart * slack
    return first.holds(slack) and final.holds(slack) and alike


def _steady(search: Search, trials: Trials, tried: list[Tried]) -> Iterator[Candidate]:
    """From the highest score downwards, those that hold: for longer, on other seeds as well, and with larger steps."""
    for values, first in sorted(tried, key=lambda t: _score(t[1]), reverse=True):
        if (found := _confirmed(search, trials, values, first)) is not None:
            yield found


def _confirmed(search: Search, trials: Trials, values: Values, first: Outcome) -> Candidate | None:
    slack = search.about.slack
    if not first.holds(slack):          # before a long run is spent on it
        return None
    found = Candidate(values, first, _again(search, trials, values))
    if not _lasts(search, found):
        return None
    bolder = trials.outcome(search, search.bolder(values), search.plan.seeds.margin, search.stretch)
    return found if bolder.holds(slack) else None


def _again(search: Search, trials: Trials, values: Values) -> Outcome:
    return trials.outcome(search, values, search.plan.seeds.final, search.stretch)


def _score(one: Outcome | Candidate | None) -> float:
    return -np.inf if one is None or one.score is None else one.score


def _proposals(search: Search, trials: Trials, tried: list[Tried]) -> Iterator[Values]:
    """All values to try, in order; later stages look at what became of the earlier ones."""
    yield from search.known
    ends = (search.trials // 2, search.trials * 3 // 4, search.trials)
    for stage, (width, end) in enumerate(zip(_WIDTHS, ends, strict=True)):
        best = next(_steady(search, trials, tried), None) if stage else None
        for values in _points(search, stage, width if best else 1.0, best.values if best else search.plain):
            if len(tried) >= end:
                break
            if values not in [t[0] for t in tried] and _valid(search, values):
                yield values


def _points(search: Search, stage: int, width: float, around: Values) -> Iterator[Values]:
    """Low-discrepancy points in a box of the log scale: a Sobol sequence, shifted by a keyed random vector."""
    ranges = np.log(np.array(list(search.ranges.values()), dtype=np.float64))
    low, size = ranges[:, 0], ranges[:, 1] - ranges[:, 0]
    centre = (np.log([around[key.split("+")[0]] for key in search.ranges]) - low) / size
    corner = np.clip(centre - width / 2, 0, 1 - width)
    key = [search.plan.seed, stage, *(zlib.crc32(name.encode()) for name in (search.algorithm, search.task))]
    shift = np.random.default_rng(key).random(len(low))
    for point in (qmc.Sobol(len(low), scramble=False).random(_MOST) + shift) % 1:
        drawn = np.exp(low + size * (corner + width * point))
        yield {name: float(f"{value:.2g}") for key, value in zip(search.ranges, drawn, strict=True)
               for name in key.split("+")}


def _valid(search: Search, values: Values) -> bool:
    """Some fields are bound to each other, such as α η < 1."""
    try:
        experiment(search, values, search.plan.seeds.search)
    except InputError:
        return False
    return True
