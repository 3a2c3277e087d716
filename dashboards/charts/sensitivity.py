"""Build the sensitivity panels: the effect of one parameter on the final metric and on the cost of the target."""

from collections.abc import Sequence
from typing import Any, TypedDict

from dbo.dashboards.charts.curves import Numbers
from dbo.dashboards.groups import GroupedRuns, flatten
from dbo.dashboards.load import RunData
from dbo.dashboards.number_format import format_number, round_significant
from dbo.platform.runs.schema import Direction, Target, find_direction
from dbo.platform.runs.statistics import MeanEstimate, estimate_mean

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
_METRIC_NAMES = {"node_accuracy_mean": "accuracy", "test_accuracy": "accuracy", "upper_loss": "upper loss"}


class SensitivityPoint(TypedDict):
    """All runs with one value of the parameter."""

    value: float
    runs: int
    failed: int
    reached: int
    final: Numbers | None                # mean, low, high
    mb: Numbers | None                   # to the target: mean, low, high
    finals: Numbers                      # one per run


class SensitivityPanel(TypedDict):
    """One parameter of one algorithm; JSON of the page."""

    algorithm: str
    key: str
    title: str
    metric: str                          # as people call it
    target: str
    claims: list[tuple[str, str]]        # source and text
    measured: str
    points: list[SensitivityPoint]


def build_sensitivity_panels(runs: GroupedRuns) -> list[SensitivityPanel]:
    """Return a panel per numeric parameter of which runs of one algorithm have several values."""
    panels = []
    axes = {key for group in runs.collection.groups for key in group.axes}
    claims = {key: group.claim for group in runs.collection.groups if group.claim for key in group.axes}
    for algorithm in runs.algorithms:
        mine = [run for run in runs.runs if run.algorithm == algorithm and run.records]
        for key in _find_varying_parameters(mine, axes):
            panel = _build_panel(algorithm, key, _select_comparable(key, mine, key in axes), claims.get(key, ""))
            if panel is not None:
                panels.append(panel)
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


def _select_comparable(key: str, runs: Sequence[RunData], is_axis: bool) -> list[RunData]:
    """Return runs among which only this parameter and the seed differ: the families with the most values of it.

    A search samples several parameters at once, so that there are no such families. Its axes are then shown over all
    runs; other parameters are not shown.
    """
    families: dict[str, list[RunData]] = {}
    for run in runs:
        rest = sorted((k, repr(v)) for k, v in flatten(run.experiment).items() if k not in (key, "seed", "name"))
        families.setdefault(repr(rest), []).append(run)

    def count_values(family: Sequence[RunData]) -> int:
        return len({_as_number(flatten(run.experiment).get(key)) for run in family})

    largest = max(count_values(family) for family in families.values())
    if largest == 1:
        return list(runs) if is_axis else []
    return [run for family in families.values() if count_values(family) == largest for run in family]


def _build_panel(algorithm: str, key: str, runs: Sequence[RunData], claim: str) -> SensitivityPanel | None:
    by_value: dict[float, list[RunData]] = {}
    for run in runs:
        value = _as_number(flatten(run.experiment).get(key))
        if value is not None:
            by_value.setdefault(value, []).append(run)
    if len(by_value) < 2:
        return None
    target = runs[0].target
    preferred = target.metric if target.is_maximized else "node_accuracy_mean"
    column = preferred if any(run.last_value(preferred) is not None for run in runs) else "upper_loss"
    points = [_build_point(value, same, column) for value, same in sorted(by_value.items())]
    title, paper = _PAPER_CLAIMS.get(key, (key, ""))
    metric = _METRIC_NAMES.get(column, column)
    claims = [("The paper", paper if algorithm.startswith("c2dfb") else ""), ("Claim", claim)]
    return {
        "algorithm": algorithm, "key": key, "title": title, "metric": metric, "target": str(target),
        "claims": [(source, text) for source, text in claims if text],
        "measured": _describe(points, metric, find_direction(column), target), "points": points,
    }


def _build_point(value: float, runs: Sequence[RunData], column: str) -> SensitivityPoint:
    records = [run.target.find_first(run.records) for run in runs]
    return {
        "value": value, "runs": len(runs), "failed": sum(run.has_failed for run in runs),
        "reached": sum(record is not None for record in records),
        "final": _as_list(estimate_mean(run.last_value(column) for run in runs if not run.has_failed)),
        "mb": _as_list(estimate_mean(record["comm_mb"] for record in records if record)),
        "finals": round_significant([run.last_value(column) for run in runs]),
    }


def _describe(points: Sequence[SensitivityPoint], metric: str, direction: Direction, target: Target) -> str:
    """Describe in words how the final metric and the cost change with the parameter."""
    finals = [(point["value"], point["final"][0] or 0.0) for point in points if point["final"]]
    clauses = []
    if len(finals) > 1:
        best = (max if direction == "max" else min)(finals, key=lambda pair: pair[1])
        ends = ", ".join(f"{format_number(final)} at {value:g}" for value, final in (finals[0], finals[-1]))
        clauses.append(f"{metric} {ends}; best {format_number(best[1])} at {best[0]:g}")
    costs = [
        (point["mb"][0] or 0.0, point["value"]) for point in points
        if point["mb"] and point["reached"] == point["runs"]
    ]
    if costs:
        cost, value = min(costs, key=lambda pair: pair[0])
        clauses.append(f"{target} costs least at {value:g}: {format_number(cost)} MB")
    missed = [f"{point['value']:g}" for point in points if point["reached"] < point["runs"] and not point["failed"]]
    if missed:
        clauses.append(f"missed by at least one run at {', '.join(missed)}")
    failed = [f"{point['value']:g}" for point in points if point["failed"]]
    if failed:
        clauses.append(f"diverged or failed at {', '.join(failed)}")
    return "; ".join(clauses) + "." if clauses else "Too few runs have ended."


def _as_list(value: MeanEstimate | None) -> Numbers | None:
    return None if value is None else round_significant([value.mean, value.low, value.high])


def _as_number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
