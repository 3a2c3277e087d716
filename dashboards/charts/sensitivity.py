"""What a parameter does: the values of a sweep's axis against accuracy and price, beside what the paper claims."""

from collections.abc import Mapping, Sequence
from typing import Any

from dbo.dashboards.estimates import Estimate, estimate, rounded, show
from dbo.dashboards.groups import Ordered, flatten
from dbo.dashboards.load import Run
from dbo.platform.runs.run_folder import Target

# The paper's words on its sensitivity figure, and what its analysis says of the same parameter.
_PAPER = {
    "algorithm.inner_steps": (
        "K, inner steps per round",
        "“An excessively large number of inner loops […] do[es] not lead to a significant increase in performance”: "
        "a few inner steps are enough (appendix, sensitivity study).",
    ),
    "algorithm.compressor.ratio": (
        "compression ratio, share of entries sent",
        "Varied in the sensitivity study, without a number in the text; the experiments send 20 % of the entries. The "
        "analysis lets the step sizes shrink with the compression, γ_in ∝ δ_c ρ.",
    ),
    "algorithm.lam": (
        "λ, multiplier of the penalty (σ in the paper's experiments)",
        "“A high sigma value do[es] not lead to a significant increase in performance” (appendix, sensitivity study); "
        "the error of the hypergradient falls as O(1/λ) (Lemma 1).",
    ),
}
_FIRST = tuple(_PAPER)


def sensitivity(ordered: Ordered) -> list[dict[str, Any]]:
    """A panel per numeric parameter of which runs of one algorithm have several values."""
    found = []
    claims = {key: group.claim for group in ordered.gathered.groups if group.claim for key in group.axes}
    for algorithm in ordered.algorithms:
        runs = [run for run in ordered.runs if run.algorithm == algorithm and run.records]
        for key in _axes(ordered, runs):
            named = any(key in group.axes for group in ordered.gathered.groups)
            panel = _panel(algorithm, key, _comparable(key, runs, named), claims)
            if panel is not None:
                found.append(panel)
    return found


def _axes(ordered: Ordered, runs: Sequence[Run]) -> list[str]:
    """Axes of sweeps and parameters of the algorithm that differ; the paper's three first."""
    flat = [flatten(run.experiment) for run in runs]
    named = {key for group in ordered.gathered.groups for key in group.axes} - {"seed"}
    own = {key for one in flat for key in one if key.startswith("algorithm.")}
    varying = [key for key in sorted(named | own) if len({_number(one.get(key)) for one in flat} - {None}) > 1]
    return sorted(varying, key=lambda key: (_FIRST.index(key) if key in _FIRST else len(_FIRST), key))


def _panel(algorithm: str, key: str, runs: Sequence[Run], claims: Mapping[str, str]) -> dict[str, Any] | None:
    by_value: dict[float, list[Run]] = {}
    for run in runs:
        value = _number(flatten(run.experiment).get(key))
        if value is not None:
            by_value.setdefault(value, []).append(run)
    if len(by_value) < 2:
        return None
    asked = runs[0].target.metric if runs[0].target.rising else "node_accuracy_mean"
    column = asked if any(run.last(asked) is not None for run in runs) else "upper_loss"
    points = []
    for value, there in sorted(by_value.items()):
        hits = [run.target.reached(run.records) for run in there]
        final = estimate(run.last(column) for run in there if run.well)
        points.append({
            "value": value, "runs": len(there), "bad": sum(not run.well for run in there),
            "reached": sum(hit is not None for hit in hits),
            "final": _plain(final), "mb": _plain(estimate(hit["comm_mb"] for hit in hits if hit)),
            "each": rounded([run.last(column) or float("nan") for run in there]),
        })
    title, paper = _PAPER.get(key, (key, ""))
    return {
        "a": algorithm, "key": key, "title": title, "metric": column, "target": str(runs[0].target),
        "said": [
            [who, text] for who, text in (
                ("The paper", paper if algorithm.startswith("c2dfb") else ""), ("Claim", claims.get(key, "")),
            ) if text
        ],
        "measured": _measured(points, column, runs[0].target), "points": points,
    }


def _comparable(key: str, runs: Sequence[Run], named: bool) -> list[Run]:
    """Runs among which only this parameter, and the seed, differs: the families with the most values of it.

    If there is none, all runs, provided that somebody named the parameter as an axis: values drawn at random.
    """
    def rest(run: Run) -> str:
        flat = flatten(run.experiment)
        return repr(sorted((k, repr(v)) for k, v in flat.items() if k not in (key, "seed", "name")))

    families: dict[str, list[Run]] = {}
    for run in runs:
        families.setdefault(rest(run), []).append(run)

    def values(family: Sequence[Run]) -> int:
        return len({_number(flatten(run.experiment).get(key)) for run in family})

    most = max(values(family) for family in families.values())
    widest = [family for family in families.values() if values(family) == most]
    return [run for family in widest for run in family] if most > 1 else list(runs) if named else []


def _plain(value: Estimate | None) -> list[float | int | None] | None:
    if value is None:
        return None
    nan = float("nan")
    return rounded([value.mean, nan if value.low is None else value.low, nan if value.high is None else value.high])


def _measured(points: Sequence[Mapping[str, Any]], column: str, target: Target) -> str:
    """The steps from value to value, in words."""
    what = "accuracy" if "accuracy" in column else "upper loss"
    ended = [point for point in points if point["final"]]
    told = []
    if len(ended) > 1:
        better = max if what == "accuracy" else min
        best = better(ended, key=lambda point: point["final"][0])
        first, last = ended[0], ended[-1]
        told.append(
            f"{what} {show(first['final'][0])} at {first['value']:g}, {show(last['final'][0])} at {last['value']:g}; "
            f"best {show(best['final'][0])} at {best['value']:g}"
        )
    priced = [point for point in points if point["mb"] and point["reached"] == point["runs"]]
    if priced:
        cheapest = min(priced, key=lambda point: point["mb"][0])
        told.append(f"{target} is cheapest at {cheapest['value']:g}: {show(cheapest['mb'][0])} MB")
    missed = [f"{point['value']:g}" for point in points if point["reached"] < point["runs"] and not point["bad"]]
    if missed:
        told.append(f"not reached by every run at {', '.join(missed)}")
    bad = [f"{point['value']:g}" for point in points if point["bad"]]
    if bad:
        told.append(f"diverged or failed at {', '.join(bad)}")
    return "; ".join(told) + "." if told else "Too few runs have ended."


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
