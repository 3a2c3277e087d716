"""Comparisons over seeds: means, paired differences, and ties."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from scipy import stats

import dbo
from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.runs import compare
from dbo.platform.runs.schema import CLOSED_FORM_TARGET
from dbo.platform.runs.seed_tables import build_pair_table, build_seed_table, find_approximate, find_verdict
from dbo.platform.runs.statistics import compare_pairs

Tiny = Callable[..., Experiment]
BASE: dict[str, Any] = {"single_machine": False, "status": "finished", "target": "t", "rounds_to_target": 5.0}


def table(**values: list[float | None]) -> pd.DataFrame:
    """A table of runs whose `psi` is given per algorithm and seed."""
    return pd.DataFrame([
        {**BASE, "algorithm": name, "seed": seed, "psi": psi, "test_accuracy": psi}
        for name, many in values.items() for seed, psi in enumerate(many)
    ])


def test_paired_difference_is_that_of_the_t_test() -> None:
    one, other = [0.5, 0.7, 0.4, 0.9], [0.4, 0.65, 0.2, 0.7]
    found, expected = compare_pairs(one, other), stats.ttest_rel(one, other)
    assert found is not None
    assert found.p_value == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert found.mean == pytest.approx(0.1375)


def test_differences_up_to_rounding_have_no_variance() -> None:
    """0.3 − 0.1 and 0.4 − 0.2 differ in the last bit: the interval is a point, without a warning of scipy."""
    assert 0.3 - 0.1 != 0.4 - 0.2
    found = compare_pairs([0.3, 0.4, 0.5], [0.1, 0.2, 0.3])
    assert found is not None
    assert found.low == found.high == pytest.approx(0.2)
    assert found.is_significant


def test_pairs_without_two_values_do_not_count() -> None:
    found = compare_pairs([0.5, None, 0.4, float("nan")], [0.4, 0.3, 0.2, 0.1])
    assert found is not None
    assert found.count == 2
    assert compare_pairs([None], [0.5]) is None
    single = compare_pairs([0.5], [0.4])
    assert single is not None
    assert not single.is_significant


def test_equal_differences_have_no_variance() -> None:
    """Rounds to a target are often the same for every seed."""
    constant, equal = compare_pairs([9, 8, 7], [5, 4, 3]), compare_pairs([5, 4], [5, 4])
    assert constant is not None
    assert equal is not None
    assert constant.is_significant
    assert not equal.is_significant


def test_a_difference_within_its_interval_is_a_tie() -> None:
    """Pairing matters: values that vary a lot between seeds may differ by the same amount in each of them."""
    runs = table(a=[0.1, 0.5, 0.9], b=[0.21, 0.6, 1.0], c=[0.6, 0.4, 0.55])
    pairs = build_pair_table(runs).query("measure == 'psi'").set_index(["one", "other"])["winner"]
    assert pairs.to_dict() == {("a", "b"): "a", ("a", "c"): "tie", ("b", "c"): "tie"}
    verdict = find_verdict(runs, "psi")
    assert verdict is not None
    assert (verdict.best, verdict.tied) == ("a", ("c",))
    accuracy = find_verdict(runs, "test_accuracy")          # the same numbers, but higher is better
    assert accuracy is not None
    assert accuracy.best == "b"


def test_an_algorithm_without_a_value_for_every_seed_is_not_compared() -> None:
    runs = table(a=[0.1, 0.5, 0.9], b=[0.2, None, 1.0], c=[0.6, 0.4, 0.55])
    verdict = find_verdict(runs, "psi")
    assert verdict is not None
    assert [name for name, _ in verdict.others] == ["c"]
    assert {"a", "c"} == set(build_pair_table(runs).query("measure == 'psi'")[["one", "other"]].values.ravel())


@pytest.mark.parametrize("measure", ["psi", "rounds_to_target"])
def test_nobody_wins_by_a_psi_that_missed_its_tolerance(measure: str) -> None:
    """One run is enough, also if the cost of a level of ψ is compared; by other measures the same runs are ranked."""
    runs = table(a=[0.1, 0.2, 0.3], b=[0.5, 0.61, 0.7], c=[0.7, 0.8, 0.91])
    runs = runs.assign(psi_converged=1, psi_residual=1e-9, target="psi=0.9", rounds_to_target=10 * runs["psi"])
    assert find_verdict(runs, measure) is not None
    assert find_approximate(runs, measure) == ()
    runs.loc[4, ["psi_converged", "psi_residual"]] = 0, 0.25
    assert find_verdict(runs, measure) is None
    assert find_approximate(runs, measure) == ("b",)
    pairs = build_pair_table(runs).query("measure == @measure").set_index(["one", "other"])["winner"]
    assert pairs.to_dict() == {("a", "b"): "approximate", ("a", "c"): "a", ("b", "c"): "approximate"}
    runs.loc[3, "rounds_to_target"] = None              # whether b reached the level is known approximately
    assert find_verdict(runs, measure) is None
    assert find_verdict(runs, "test_accuracy") is not None
    assert build_seed_table(runs)["psi_residual"].tolist() == [1e-9, 0.25, 1e-9]


def test_means_have_intervals_and_counts() -> None:
    row = build_seed_table(table(a=[0.1, 0.5, 0.9]).assign(rounds_to_target=[1.0, None, 3.0])).iloc[0]
    assert (row["psi"], row["seeds"], row["reached"], row["rounds_to_target"]) == (pytest.approx(0.5), 3, 2, 2.0)
    assert row["psi_low"] < 0.5 < row["psi_high"]


def test_a_comparison_runs_every_seed_and_can_be_extended_by_seeds(tiny: Tiny, tmp_path: Path) -> None:
    keys = [
        "nodes=4", "rounds=3", "engine.name=local", "task={name: quadratic, dim_x: 4, dim_y: 8}", "tracking.uri=off"]
    for seeds, new in (([0, 1], 4), ([0, 1, 2], 2)):
        experiments, target = compare.plan(None, keys, ["d_soba", "sldbo"], None, seeds)
        results = compare.compare(experiments, target, tmp_path / "c")
        assert sum(result.is_new for result in results) == new
    loaded = dbo.load(tmp_path / "c")
    assert sorted(loaded.summary["run"]) == [f"{name}-seed{seed}" for name in ("d_soba", "sldbo") for seed in range(3)]
    assert loaded.table is not None
    assert loaded.table["seeds"].tolist() == [3, 3]
    assert loaded.pairs is not None
    assert set(loaded.pairs["measure"]) >= {"psi", "solution_error"}
    by_seed = loaded.summary.groupby("seed")["psi"].nunique()
    assert by_seed.tolist() == [2, 2, 2]
    assert loaded.summary["psi"].nunique() == 6            # every seed is another problem


def test_the_seeds_of_a_file_give_way_to_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("seeds: [3, 4]\nalgorithms: {f2ba: {}}\ntask: {name: quadratic}\nengine: {name: local}\n")
    for overrides, seeds, expected in (([], None, [3, 4]), (["seed=7"], None, [7]), ([], [1], [1])):
        experiments, _ = compare.plan(str(file), overrides, [], None, seeds)
        assert [experiment.seed for experiment in experiments] == expected


@pytest.mark.parametrize("seeds", [[], [0, 0], [-1], ["a"], 3, [True]])
def test_wrong_seeds_are_refused(seeds: Any) -> None:
    with pytest.raises(InputError, match=r"--seeds: .* must be different whole numbers ≥ 0"):
        compare.plan(None, ["task=quadratic"], ["f2ba"], str(CLOSED_FORM_TARGET), seeds)
