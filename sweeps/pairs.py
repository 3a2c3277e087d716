"""Tabulate paired differences of a sweep: between algorithms, and between neighbouring values of a numeric axis.

Both settings of a pair have the same values on all other axes. They are compared over the seeds that both have, by the
test of a comparison (`compare_pairs`): a difference within its interval is a tie.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from dbo.platform.runs.schema import PSI_VALUES, Direction
from dbo.platform.runs.seed_tables import Verdict, describe_pair, find_verdict, is_cost, is_maximized, list_measures
from dbo.platform.runs.statistics import compare_pairs
from dbo.sweeps.grid import shorten_key


def build_pair_table(cells: pd.DataFrame, axes: Sequence[str], metric: str, goal: Direction) -> pd.DataFrame:
    """Return a row per pair of settings and measure: paired difference, interval, p-value, and the winner or tie.

    The columns of the axes hold the setting; `axis` is the one on which the two differ. A pair needs two common seeds,
    and a measure a value for each of them: of finished cells, or of a target's cost, of cells that reached it.
    """
    keys = [key for key in axes if key != "seed" and key in cells]
    measures = list(dict.fromkeys([*list_measures(cells), *([metric] if metric in cells else [])]))
    rows: list[dict[str, Any]] = []
    for axis in keys:
        others = [key for key in keys if key != axis]
        groups = cells.groupby(others, sort=False, dropna=False) if others else [((), cells)]
        for values, group in groups:
            setting = dict(zip(others, values, strict=True))
            found = {value: rows.set_index("seed") for value, rows in group.groupby(axis, sort=False, dropna=False)}
            for one, other in _choose_pairs(axis, group[axis], list(found)):
                rows += [
                    {**dict.fromkeys(keys), **setting, "axis": axis, **row}
                    for row in _compare(found[one], found[other], measures, (one, other), metric, goal)
                ]
    return pd.DataFrame(rows)


def find_best(cells: pd.DataFrame, axes: Sequence[str], metric: str, goal: Direction) -> Verdict | None:
    """Return the setting with the best mean over the seeds, and which others tie with it; None: fewer than two.

    Settings are compared that have all seeds.
    """
    keys = [key for key in axes if key != "seed" and key in cells]
    if not keys or metric not in cells:
        return None
    labels = pd.Series([format_setting(row, keys) for row in cells.to_dict("records")], index=cells.index)
    has_all = cells.groupby(labels)["seed"].transform("nunique") == cells["seed"].nunique()
    return find_verdict(cells.assign(algorithm=labels)[has_all], metric, goal)


def format_setting(row: Mapping[Any, Any], axes: Sequence[str]) -> str:
    """Return a label such as `inner_steps=5 topology=ring`, with all digits."""
    return " ".join(f"{shorten_key(key, dict.fromkeys(axes))}={row[key]}" for key in axes)


def _choose_pairs(axis: str, column: pd.Series, values: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield neighbours on a numeric axis, the larger one first, and all pairs where the algorithm varies."""
    if is_numeric_dtype(column) and not is_bool_dtype(column):
        yield from ((large, small) for small, large in pairwise(sorted(values)))
    elif axis.partition(".")[0] == "algorithm":
        yield from combinations(values, 2)


def _compare(
    one: pd.DataFrame, other: pd.DataFrame, measures: Sequence[str], names: tuple[Any, Any], metric: str,
    goal: Direction,
) -> Iterator[dict[str, Any]]:
    """Yield a row per measure that both settings have for every common seed."""
    seeds = one.index.intersection(other.index)
    for measure in measures if len(seeds) > 1 else ():
        values = [
            rows[measure].where(rows["reached"] if is_cost(measure) else rows["status"] == "finished").loc[seeds]
            for rows in (one, other)
        ]
        if any(each.isna().any() for each in values):
            continue
        found = compare_pairs(*(map(float, each) for each in values))
        if found is not None:
            better_is_more = goal == "max" if measure == metric else is_maximized(measure)
            yield describe_pair(measure, *names, found, better_is_more, _is_approximate(measure, metric, (one, other)))


def _is_approximate(measure: str, metric: str, settings: Sequence[pd.DataFrame]) -> bool:
    """Decide whether a measure depends on ψ, and a solve of the lower level has missed its tolerance: nobody wins."""
    depends = measure in PSI_VALUES or (is_cost(measure) and metric in PSI_VALUES)
    return depends and any((rows["psi_converged"] == 0).any() for rows in settings if "psi_converged" in rows)
