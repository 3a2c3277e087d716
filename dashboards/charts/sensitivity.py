"""Build the sensitivity panels: the effect of one parameter on the final metric and on the cost of the target."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypedDict

from dbo.dashboards.charts.curves import SHORT_NAMES, Numbers
from dbo.dashboards.groups import GroupedRuns, flatten, shorten_key
from dbo.dashboards.load import RunData
from dbo.dashboards.number_format import format_number, round_significant
from dbo.platform.runs.schema import PSI_VALUES, Direction, find_direction
from dbo.platform.runs.statistics import MeanEstimate, compare_seeds, estimate_mean

# For each parameter of the paper's sensitivity figure: its title, and what the paper claims about it.
_PAPER_CLAIMS = {
    "algorithm.inner_steps": (
        "K, inner steps per round",
        "“An excessively large number of inner loops […] do[es] not lead to a significant increase in performance”: "
        "a few inner steps are enough (appendix, sensitivity study).",
    ),
    "algorithm.compressor.ratio": (
        "compression ratio, share of entries sent",
        "Varied in the sensitivity study, without a number in the text; the experiments send 20 % of the entries. In "
        "the analysis the step sizes shrink with the compression, γ_in ∝ δ_c ρ.",
    ),
    "algorithm.lam": (
        "λ, multiplier of the penalty (σ in the paper's experiments)",
        "“A high sigma value do[es] not lead to a significant increase in performance” (appendix, sensitivity study); "
        "the error of the hypergradient falls as O(1/λ) (Lemma 1).",
    ),
}
_PAPER_KEYS = tuple(_PAPER_CLAIMS)
_METRIC_NAMES = {
    "node_accuracy_mean": "accuracy", "test_accuracy": "accuracy", "upper_loss": "upper loss", "psi": "ψ",
}
_COMPANIONS = {"test_accuracy": "node_accuracy_mean", "node_accuracy_mean": "test_accuracy"}      # drawn beside it
# In what runs of one combination of parameters may differ, besides the seed.
_IGNORED_KEYS = ("seed", "name", "data_dir", "plugins", "checkpoint_every", "keep_checkpoints", "psi_every")
_IGNORED_SECTIONS = ("tracking.", "engine.")
_MAX_FAMILIES = 6           # combinations of the other parameters that get a panel


class SensitivityPoint(TypedDict):
    """All runs with one value of the parameter."""

    value: float
    runs: int
    failed: int
    reached: int
    final: Numbers | None                # mean, low, high
    second: Numbers | None               # the same of the other metric
    mb: Numbers | None                   # to the target: mean, low, high
    finals: Numbers                      # one per run


class SensitivityPanel(TypedDict):
    """One parameter of one algorithm, all others equal; JSON of the page."""

    algorithm: str
    key: str
    title: str
    family: str                          # the others' values where they have several: `y_objective=h`
    metric: str                          # as people call it
    series: list[str]                    # what `final` and `second` are of; empty without a second
    target: str
    claims: list[tuple[str, str]]        # source and text
    measured: str
    points: list[SensitivityPoint]


def build_sensitivity_panels(runs: GroupedRuns) -> list[SensitivityPanel]:
    """Return panels per numeric parameter of which runs of one algorithm have several values.

    There is one for each combination of the other parameters.
    """
    panels: list[SensitivityPanel] = []
    axes = {key for group in runs.collection.groups for key in group.axes}
    claims = {key: group.claim for group in runs.collection.groups if group.claim for key in group.axes}
    for algorithm in runs.algorithms:
        mine = [run for run in runs.runs if run.algorithm == algorithm and run.records]
        for key in _find_varying_parameters(mine, axes):
            families = _find_families(key, mine, key in axes)
            panels += [
                _build_panel(algorithm, key, label, family, claims.get(key, ""))
                for label, family in families[:_MAX_FAMILIES]
            ]
            if (rest := len(families) - _MAX_FAMILIES) > 0:
                panels[-1]["measured"] += f" {rest} more combination{'s' if rest > 1 else ''} of parameters not shown."
    return panels


def _find_varying_parameters(runs: Sequence[RunData], axes: set[str]) -> list[str]:
    """Return sweep axes and parameters of the algorithm with several values; the paper's three first."""
    experiments = [flatten(run.experiment) for run in runs]
    own = {key for experiment in experiments for key in experiment if key.startswith("algorithm.")}
    varying = [
        key for key in sorted((axes - {"seed"}) | own)
        if len({_as_number(experiment.get(key)) for experiment in experiments} - {None}) > 1
    ]
    return sorted(varying, key=lambda key: (_PAPER_KEYS.index(key) if key in _PAPER_KEYS else len(_PAPER_KEYS), key))


def _find_families(key: str, runs: Sequence[RunData], is_axis: bool) -> list[tuple[str, list[RunData]]]:
    """Return families of runs in which only this parameter and the seed differ, with what distinguishes each.

    Those with the most values come first. A search samples several parameters at once, so that there are no such
    families. Its axes are then shown over all runs; other parameters are not shown.
    """
    families: dict[str, list[RunData]] = {}
    others: dict[str, dict[str, Any]] = {}
    for run in runs:
        flat = flatten(run.experiment)
        rest = {
            name: flat[name] for name in sorted(flat)
            if name not in (key, *_IGNORED_KEYS) and not name.startswith(_IGNORED_SECTIONS)
        }
        if _as_number(flat.get(key)) is not None:
            families.setdefault(repr(rest), []).append(run)
            others[repr(rest)] = rest

    counts = {
        name: len({_as_number(flatten(run.experiment).get(key)) for run in family})
        for name, family in families.items()
    }
    kept = sorted((name for name in families if counts[name] > 1), key=lambda name: -counts[name])
    if not kept:
        return [("", [run for family in families.values() for run in family])] if is_axis else []
    differing = [
        one for one in dict.fromkeys(one for name in kept for one in others[name])
        if len({repr(others[name].get(one)) for name in kept}) > 1
    ]

    def label(name: str) -> str:
        return ", ".join(f"{shorten_key(one)}={others[name][one]}" for one in differing if one in others[name])

    return [(label(name), families[name]) for name in kept]


def _build_panel(algorithm: str, key: str, family: str, runs: Sequence[RunData], claim: str) -> SensitivityPanel:
    by_value: dict[float, list[RunData]] = {}
    for run in runs:
        value = _as_number(flatten(run.experiment).get(key))
        assert value is not None
        by_value.setdefault(value, []).append(run)
    target = runs[0].target
    column = next(
        (one for one in (target.metric, "node_accuracy_mean") if _has(runs, one)), "upper_loss")
    second = companion if (companion := _COMPANIONS.get(column, "")) and _has(runs, companion) else ""
    points = [_build_point(value, same, column, second) for value, same in sorted(by_value.items())]
    title, paper = _PAPER_CLAIMS.get(key, (key, ""))
    claims = [("The paper", paper if algorithm.startswith("c2dfb") else ""), ("Claim", claim)]
    return {
        "algorithm": algorithm, "key": key, "title": title, "family": family,
        "metric": _METRIC_NAMES.get(column, column), "target": str(target),
        "series": [SHORT_NAMES[one] for one in (column, second)] if second else [],
        "claims": [(source, text) for source, text in claims if text],
        "measured": _describe(points, dict(sorted(by_value.items())), column, second), "points": points,
    }


def _has(runs: Sequence[RunData], column: str) -> bool:
    return any(run.last_value(column) is not None for run in runs)


def _build_point(value: float, runs: Sequence[RunData], column: str, second: str) -> SensitivityPoint:
    records = [run.target.find_first(run.records) for run in runs]
    ended = [run for run in runs if not run.has_failed]
    return {
        "value": value, "runs": len(runs), "failed": sum(run.has_failed for run in runs),
        "reached": sum(record is not None for record in records),
        "final": _as_list(estimate_mean(run.last_value(column) for run in ended)),
        "second": _as_list(estimate_mean(run.last_value(second) for run in ended)) if second else None,
        "mb": _as_list(estimate_mean(record["comm_mb"] for record in records if record)),
        "finals": round_significant([run.last_value(column) for run in runs]),
    }


def _describe(
    points: Sequence[SensitivityPoint], runs: Mapping[float, Sequence[RunData]], column: str, second: str
) -> str:
    """Describe in words how the final metrics and the cost change with the parameter, and which values tie."""
    clauses = []
    target = next(iter(runs.values()))[0].target
    for one in filter(None, (column, second)):
        ended = {value: [run for run in same if not run.has_failed] for value, same in runs.items()}
        means = {value: found.mean for value, same in ended.items()
                 if (found := estimate_mean(run.last_value(one) for run in same))}
        if len(means) < 2:
            continue
        name = _METRIC_NAMES.get(one, one) + (f" ({SHORT_NAMES[one]})" if second else "")
        ends = ", ".join(f"{format_number(means[value])} at {value:g}" for value in (min(means), max(means)))
        if one in PSI_VALUES and _is_approximate(ended.values()):
            clauses.append(f"{name} {ends}; approximate, no best: ψ missed its tolerance")
            continue
        direction = target.direction if one == target.metric else find_direction(one)
        tied, note = _find_best(means, ended, partial(_read_last, column=one), direction)
        best = f"{format_number(means[tied[0]])} at {tied[0]:g}{note}"
        clauses.append(f"{name} {ends}; {f'{_join(tied)} tie for the best,' if tied[1:] else 'best'} {best}")
    costs = {
        point["value"]: found.mean for point in points if point["reached"] == point["runs"]
        if (found := estimate_mean(map(_measure_cost, runs[point["value"]])))
    }
    if costs and target.metric in PSI_VALUES and _is_approximate(runs.values()):
        clauses.append(f"costs of {target} are approximate")
    elif costs:
        tied, note = _find_best(costs, runs, _measure_cost, "min")
        cost = f"{format_number(costs[tied[0]])} MB"
        clauses.append(
            f"{_join(tied)} tie for the least cost of {target}, {cost} at {tied[0]:g}{note}" if tied[1:] else
            f"{target} costs least at {tied[0]:g}: {cost}{note}")
    missed = [f"{point['value']:g}" for point in points if point["reached"] < point["runs"] and not point["failed"]]
    if missed:
        clauses.append(f"missed by at least one run at {', '.join(missed)}")
    failed = [f"{point['value']:g}" for point in points if point["failed"]]
    if failed:
        clauses.append(f"diverged or failed at {', '.join(failed)}")
    return "; ".join(clauses) + "." if clauses else "Too few runs have ended."


def _find_best(
    means: Mapping[float, float], runs: Mapping[float, Sequence[RunData]],
    measure: Callable[[RunData], float | None], direction: Direction,
) -> tuple[list[float], str]:
    """Return the best value of the parameter and those that tie with it, and a note if differences are not tested.

    Values tie if they are equal, or the paired difference over common seeds is within its interval.
    """
    best = (max if direction == "max" else min)(means, key=lambda value: means[value])
    tied, has_untested = [best], False
    for value in means:
        found = compare_seeds(_map_seeds(runs[value], measure), _map_seeds(runs[best], measure))
        is_tested = found is not None and found.count > 1
        is_tie = means[value] == means[best] or (found is not None and is_tested and not found.is_significant)
        tied += [value] if value != best and is_tie else []
        has_untested |= value != best and not is_tested
    if not has_untested:
        return tied, ""
    is_single = len({str(run.seed) for value in means for run in runs[value]}) == 1
    return tied, f" ({'one seed' if is_single else 'too few common seeds'}: not tested)"


def _map_seeds(runs: Sequence[RunData], measure: Callable[[RunData], float | None]) -> dict[str, float | None]:
    """Return a value per seed; none if several runs have the same seed, which differ in something else."""
    values = {str(run.seed): measure(run) for run in runs}
    return values if len(values) == len(runs) else {}


def _read_last(run: RunData, column: str) -> float | None:
    return run.last_value(column)


def _measure_cost(run: RunData) -> float | None:
    record = run.target.find_first(run.records)
    return None if record is None else record["comm_mb"]


def _is_approximate(groups: Iterable[Sequence[RunData]]) -> bool:
    return any(run.last_value("psi_converged") == 0 for runs in groups for run in runs)


def _join(values: Sequence[float]) -> str:
    names = [f"{value:g}" for value in sorted(values)]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _as_list(value: MeanEstimate | None) -> Numbers | None:
    return None if value is None else round_significant([value.mean, value.low, value.high])


def _as_number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
