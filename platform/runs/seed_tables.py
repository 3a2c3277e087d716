"""Tabulate a comparison over several seeds: means with intervals, paired differences, and who wins or ties."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dbo.platform.runs.schema import METRICS, PSI_VALUES, Direction
from dbo.platform.runs.statistics import PairedDifference, compare_pairs, estimate_mean

if TYPE_CHECKING:
    import pandas as pd

NODE_BYTES = "node_bytes_to_"        # columns of the bytes per node to each of several targets
COSTS = {
    "rounds_to_target": "round", "mb_to_target": "comm_mb", "seconds_to_target": "seconds",
    "calls_to_target": "gradient_calls", "samples_to_target": "samples",
}
# In the order of importance: ψ is what a bilevel method minimises.
MEASURES = (
    "psi", "psi_gradient_norm", *COSTS, "test_accuracy", "node_accuracy_mean", "node_accuracy_min", "test_loss",
    "upper_loss", "solution_error", "penalty_error", "psi_test_accuracy", "comm_mb", "seconds",
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which algorithm is the best by one measure, and how all others differ from it."""

    measure: str
    best: str
    others: tuple[tuple[str, PairedDifference], ...]        # value of the other minus that of the best

    @property
    def tied(self) -> tuple[str, ...]:
        """The algorithms whose difference to the best is within its interval."""
        return tuple(name for name, difference in self.others if not difference.is_significant)


def is_cost(measure: str) -> bool:
    """Decide whether a measure is the cost of a target, which a run has that reached it, however it ended."""
    return measure in COSTS or measure.startswith(NODE_BYTES)


def is_maximized(measure: str) -> bool:
    metric = METRICS.get(COSTS.get(measure, measure))
    return metric is not None and metric.direction == "max"


def build_seed_table(runs: "pd.DataFrame") -> "pd.DataFrame":
    """Return a row per algorithm: seeds, how many reached the target, mean and interval of every measure.

    Costs are means over the seeds that reached the target, other measures over the finished runs.
    """
    import pandas as pd

    rows = []
    for name, group in runs.groupby("algorithm", sort=False):
        row = {
            "algorithm": name, "single_machine": bool(group["single_machine"].iloc[0]), "seeds": len(group),
            "finished": int((group["status"] == "finished").sum()), "target": group["target"].iloc[0],
            "reached": int(group["rounds_to_target"].notna().sum()),
        }
        finished = group[group["status"] == "finished"]
        for measure in list_measures(runs):
            estimate = estimate_mean(_to_floats((group if is_cost(measure) else finished)[measure]))
            row[measure] = estimate.mean if estimate else None
            row[f"{measure}_low"], row[f"{measure}_high"] = (estimate.low, estimate.high) if estimate else (None, None)
        if "psi_converged" in finished and finished["psi_converged"].notna().any():
            row["psi_converged"] = finished["psi_converged"].min()
            row["psi_residual"] = finished["psi_residual"].astype(float).max() if "psi_residual" in finished else None
        rows.append(row)
    return pd.DataFrame(rows)


def build_pair_table(runs: "pd.DataFrame") -> "pd.DataFrame":
    """Return a row per measure and pair of algorithms: the paired difference, its interval, p, and the winner or tie.

    A pair is compared only where both have a value for every seed. There is no winner by ψ, but `approximate`, where a
    solve of the lower level missed its tolerance.
    """
    import pandas as pd

    names, rows = list(dict.fromkeys(runs["algorithm"])), []
    for measure in list_measures(runs):
        for number, one in enumerate(names):
            for other in names[number + 1:]:
                found = _compare(runs, measure, one, other)
                if found is not None:
                    is_approximate = bool(_select_approximate(runs, measure, (one, other)))
                    rows.append(describe_pair(measure, one, other, found, is_maximized(measure), is_approximate))
    return pd.DataFrame(rows)


def describe_pair(
    measure: str, one: Any, other: Any, found: PairedDifference, maximized: bool, is_approximate: bool = False
) -> dict[str, Any]:
    """Return a row of a table of pairs: the difference of two, its interval, p, and the winner, tie or approximate."""
    better = one if (found.mean > 0) == maximized else other
    return {
        "measure": measure, "one": one, "other": other, "difference": found.mean, "low": found.low, "high": found.high,
        "p_value": found.p_value, "seeds": found.count,
        "winner": "approximate" if is_approximate else better if found.is_significant else "tie",
    }


def find_verdict(runs: "pd.DataFrame", measure: str, goal: Direction | None = None) -> Verdict | None:
    """Return the best algorithm by a measure among those that have it for every seed.

    None: fewer than two have it, or `find_approximate` names some. `goal` says which values are better where the
    measure does not.
    """
    complete = _list_complete(runs, measure)
    if len(complete) < 2 or find_approximate(runs, measure):
        return None
    means = {name: float(runs.loc[runs["algorithm"] == name, measure].mean()) for name in complete}
    maximized = is_maximized(measure) if goal is None else goal == "max"
    best = (max if maximized else min)(means, key=lambda name: means[name])
    others = [(name, _compare(runs, measure, name, best)) for name in complete if name != best]
    return Verdict(measure, best, tuple((name, found) for name, found in others if found is not None))


def find_approximate(runs: "pd.DataFrame", measure: str) -> tuple[str, ...]:
    """Return the compared algorithms whose ψ missed its tolerance, if the measure depends on ψ: nobody wins then."""
    names = _list_complete(runs, "status" if is_cost(measure) else measure)     # one that missed a level of ψ counts
    return _select_approximate(runs, measure, names) if len(names) > 1 else ()


def _list_complete(runs: "pd.DataFrame", measure: str) -> list[str]:
    """Return the algorithms that have finished and have the measure for every seed; none with a single seed."""
    return [] if runs["seed"].nunique() < 2 else [
        str(name) for name, group in runs.groupby("algorithm", sort=False)
        if measure in group and (group["status"] == "finished").all() and group[measure].notna().all()
    ]


def _select_approximate(runs: "pd.DataFrame", measure: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return those of the algorithms with a missed tolerance; the cost of reaching a level of ψ depends on ψ too."""
    metric = measure
    if is_cost(measure):
        target = measure.removeprefix(NODE_BYTES) if measure.startswith(NODE_BYTES) else str(runs["target"].iloc[0])
        metric = re.split("[<>=]", target)[0]
    if metric not in PSI_VALUES or "psi_converged" not in runs:
        return ()
    missed = set(runs.loc[runs["psi_converged"] == 0, "algorithm"])
    return tuple(name for name in names if name in missed)


def _compare(runs: "pd.DataFrame", measure: str, one: str, other: str) -> PairedDifference | None:
    table = runs.pivot(index="seed", columns="algorithm", values=measure)
    if table[[one, other]].isna().any(axis=None):
        return None
    return compare_pairs(_to_floats(table[one]), _to_floats(table[other]))


def _to_floats(values: "pd.Series") -> Sequence[float | None]:
    return [None if value is None or value != value else float(value) for value in values]


def list_measures(runs: "pd.DataFrame") -> list[str]:
    """Return the measures that a table of runs has, in the order of importance."""
    further = [column for column in map(str, runs) if column.startswith(NODE_BYTES)]
    return [measure for measure in (*MEASURES, *further) if measure in runs and runs[measure].notna().any()]
