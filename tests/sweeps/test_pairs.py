"""Paired differences of a sweep: which settings make a pair, which seeds count, and what is a tie."""

import io
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pytest
from rich.console import Console

from dbo.platform.runs.statistics import compare_pairs
from dbo.sweeps import view
from dbo.sweeps.pairs import build_pair_table, find_best
from dbo.sweeps.plan import Sweep
from dbo.sweeps.runner import SweepResult
from dbo.sweeps.summaries import build_seed_table

METRIC: tuple[str, Literal["max"]] = ("test_accuracy", "max")
STEPS = "algorithm.inner_steps"
ACCURACIES = {1: [0.5, 0.6, 0.7], 5: [0.8, 0.91, 0.99], 15: [0.81, 0.90, 1.0]}


def table(axis: str, values: dict[Any, list[float]], **columns: Any) -> pd.DataFrame:
    """Return a table of cells: of each value of the axis a cell per seed, with these accuracies."""
    rows = [
        {axis: value, "seed": seed, "status": "finished", "target": "test_accuracy=0.9", "reached": accuracy >= 0.9,
         "rounds_to_target": 10.0 * (1 - accuracy) if accuracy >= 0.9 else None, "mb_to_target": None,
         "seconds_to_target": None, "test_accuracy": accuracy, "run_key": f"{value}{seed}", **columns}
        for value, accuracies in values.items() for seed, accuracy in enumerate(accuracies)
    ]
    return pd.DataFrame(rows)


def test_neighbouring_values_of_a_numeric_axis_are_compared() -> None:
    """The larger minus the smaller one, by the test of a comparison, in the order of the numbers."""
    cells = table(STEPS, {15: ACCURACIES[15], 1: ACCURACIES[1], 5: ACCURACIES[5]})
    rows = build_pair_table(cells, [STEPS, "seed"], *METRIC).query("measure == 'test_accuracy'")
    assert list(zip(rows["one"], rows["other"], rows["winner"], strict=True)) == [(5, 1, 5), (15, 5, "tie")]
    expected = compare_pairs(ACCURACIES[5], ACCURACIES[1])
    assert expected is not None
    found = rows.iloc[0]
    assert (found["difference"], found["low"], found["high"], found["p_value"], found["seeds"]) == (
        expected.mean, expected.low, expected.high, expected.p_value, 3)
    assert (found["axis"], found[STEPS]) == (STEPS, None)


def test_all_pairs_of_algorithms_are_compared_within_a_setting() -> None:
    """On each network alone; networks, which are other problems, are no pairs."""
    values = {"c2dfb": ACCURACIES[15], "madsbo": ACCURACIES[5], "mdbo": ACCURACIES[1]}
    cells = pd.concat([table("algorithm.name", values, topology=name) for name in ("ring", "two_hop")])
    rows = build_pair_table(cells, ["algorithm.name", "topology", "seed"], *METRIC).query("measure == 'test_accuracy'")
    assert set(rows["axis"]) == {"algorithm.name"}
    for _, group in rows.groupby("topology"):
        pairs = list(zip(group["one"], group["other"], group["winner"], strict=True))
        assert pairs == [("c2dfb", "madsbo", "tie"), ("c2dfb", "mdbo", "c2dfb"), ("madsbo", "mdbo", "madsbo")]
    assert set(rows["topology"]) == {"ring", "two_hop"}


def test_only_common_seeds_count_and_one_is_too_few() -> None:
    cells = table(STEPS, {1: ACCURACIES[1], 5: ACCURACIES[5][:2], 15: ACCURACIES[15][:1]})
    rows = build_pair_table(cells, [STEPS, "seed"], *METRIC).query("measure == 'test_accuracy'")
    assert list(zip(rows["one"], rows["other"], rows["seeds"], strict=True)) == [(5, 1, 2)]
    assert build_pair_table(cells[cells["seed"] == 0], [STEPS, "seed"], *METRIC).empty
    assert build_pair_table(cells, ["seed"], *METRIC).empty


def test_a_measure_needs_a_value_for_every_common_seed() -> None:
    """Of a final value a cell that has finished, of a cost one that has reached the target: no choice of seeds."""
    cells = table(STEPS, ACCURACIES)
    cells.loc[(cells[STEPS] == 1) & (cells["seed"] == 1), "status"] = "diverged"
    rows = build_pair_table(cells, [STEPS, "seed"], *METRIC)
    assert list(rows[["one", "other", "measure"]].itertuples(index=False, name=None)) == [(15, 5, "test_accuracy")]
    high = table(STEPS, {1: [0.95, 0.96], 5: [0.97, 0.97]})
    assert set(build_pair_table(high, [STEPS, "seed"], *METRIC)["measure"]) == {"rounds_to_target", "test_accuracy"}


def test_the_goal_of_the_sweep_decides_what_is_better() -> None:
    cells = table(STEPS, {1: ACCURACIES[1], 5: ACCURACIES[5]})
    rows = build_pair_table(cells, [STEPS, "seed"], "test_accuracy", "min")
    assert list(rows["winner"]) == [1]
    best = find_best(cells, [STEPS, "seed"], "test_accuracy", "min")
    assert best is not None
    assert best.best == "inner_steps=1"


def test_the_best_setting_has_all_seeds() -> None:
    """A setting with one seed, on another network say, does not win by it."""
    cells = table(STEPS, {**ACCURACIES, 30: [1.0]})
    best = find_best(cells, [STEPS, "seed"], *METRIC)
    assert best is not None
    assert (best.best, best.tied) == ("inner_steps=15", ("inner_steps=5",))
    assert find_best(cells[cells["seed"] == 0], [STEPS, "seed"], *METRIC) is None


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_end_of_a_sweep_lists_ties(seeds: int, tmp_path: Path) -> None:
    """Pairs with interval, p-value and winner or tie; nothing of the kind with one seed."""
    cells = table(STEPS, {steps: values[:seeds] for steps, values in ACCURACIES.items()})
    axes = [STEPS, "seed"]
    sweep = Sweep(name="k", axes={STEPS: [1, 5, 15], "seed": [*range(seeds)]}, target="test_accuracy=0.9")
    result = SweepResult(tmp_path, cells, build_seed_table(cells, axes), build_pair_table(cells, axes, *METRIC), [])
    stream = io.StringIO()
    view.print_result(Console(file=stream, width=100), sweep, result)
    text, line = stream.getvalue(), view.describe_result(sweep, result)
    best = "best mean test_accuracy 0.9033: inner_steps=15; ties with it: inner_steps=5"
    assert (best in text) == (best in line) == (seeds == 3)
    assert ("    inner_steps 15 − 5: +0.00333 [-0.0254, +0.032], p = 0.67, 3 seeds: tie" in text) == (seeds == 3)
    assert ("inner_steps 5 − 1: +0.3 [" in text and "3 seeds: 5 is better" in text) == (seeds == 3)


@pytest.mark.parametrize(("converged", "winner"), [(1.0, "psi_1"), (0.0, "approximate")])
def test_nobody_wins_by_an_approximate_psi(converged: float, winner: str) -> None:
    """A solve that missed its tolerance ranks nothing; measures that do not depend on it keep their winners."""
    cells = table("algorithm.name", {"psi_1": ACCURACIES[5], "psi_2": ACCURACIES[1]}, psi_converged=1.0)
    cells["psi"] = 1 - cells["test_accuracy"]
    cells.loc[0, "psi_converged"] = converged
    rows = build_pair_table(cells, ["algorithm.name", "seed"], *METRIC).set_index("measure")
    assert rows.loc["psi", "winner"] == winner
    assert rows.loc["test_accuracy", "winner"] == "psi_1"
