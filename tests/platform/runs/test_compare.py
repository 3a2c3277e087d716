"""Comparisons: what is kept of an earlier start of the same command."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.runs.compare import compare, comparison_table, list_members, plan
from dbo.platform.runs.run_folder import read_group
from dbo.platform.runs.schema import CLOSED_FORM_TARGET

Tiny = Callable[..., Experiment]


def pretend_other_library(folder: Path) -> None:
    """Record that the run was started with another NumPy, and remove its seal."""
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "started":
            line["environment"]["numpy"] = "1.0"
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "manifest.json").unlink()
    summary = json.loads((folder / "summary.json").read_text())
    del summary["sealed"]
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def pair(tiny: Tiny) -> list[Experiment]:
    return [tiny(algorithm={"name": name}) for name in ("f2ba", "bome")]


def test_a_finished_run_of_another_environment_is_not_mixed_with_new_ones(
    pair: list[Experiment], tmp_path: Path
) -> None:
    """Refused in one line; kept on request, which is recorded."""
    compare(pair[:1], CLOSED_FORM_TARGET, tmp_path)
    pretend_other_library(tmp_path / "f2ba")
    with pytest.raises(InputError, match=r"f2ba ended with another one: numpy 1\.0 → .*--allow-changed-code"):
        compare(pair, CLOSED_FORM_TARGET, tmp_path)
    assert not (tmp_path / "bome").exists()
    assert len(compare(pair, CLOSED_FORM_TARGET, tmp_path, allow_changed_code=True)) == 2
    assert read_group(tmp_path).changes == ("environment_changed",)


def test_a_complete_comparison_is_shown_in_any_environment(pair: list[Experiment], tmp_path: Path) -> None:
    """Nothing is left to run, so nothing is mixed. Control: in the same environment nothing is recorded."""
    compare(pair, CLOSED_FORM_TARGET, tmp_path)
    for name in ("f2ba", "bome"):
        pretend_other_library(tmp_path / name)
    assert not any(result.is_new for result in compare(pair, CLOSED_FORM_TARGET, tmp_path))
    assert read_group(tmp_path).changes == ()


LABELLED = {
    "task": {"name": "quadratic", "dim_x": 2, "dim_y": 6}, "nodes": 4, "engine": {"name": "local"},
    "tracking": {"uri": "off"}, "dtype": "float64", "rounds": {"half": 2, "coded": 3, "d_soba": 4},
    "target": ["solution_error=0.99", "penalty_error=0.98"],
    "algorithms": {
        "half": {"name": "c2dfb", "inner_steps": 2, "compressor": {"ratio": 0.5}},
        "coded": {"name": "c2dfb", "inner_steps": 2, "compressor": {"ratio": 0.5, "bits": 4}},
        "d_soba": {},
    },
}


def write_plan(folder: Path, **changes: object) -> str:
    (folder / "plan.yaml").write_text(yaml.safe_dump({**LABELLED, **changes}, sort_keys=False))
    return str(folder / "plan.yaml")


def test_labelled_variants_of_one_algorithm_run_side_by_side(tmp_path: Path) -> None:
    """A label is a name: of the folder, in the table, in the record; the algorithm and its result are the same."""
    experiments, target = plan(write_plan(tmp_path), [], [], None)
    assert list_members(experiments) == ["half", "coded", "d_soba"]
    assert [(one.label, one.algorithm["name"], one.rounds) for one in experiments] == [
        ("half", "c2dfb", 2), ("coded", "c2dfb", 3), (None, "d_soba", 4)]
    assert experiments[1].algorithm["compressor"] == {"name": "top_k", "ratio": 0.5, "bits": 4, "levels": "log"}
    results = compare(experiments, target, tmp_path / "out")
    table = comparison_table(results, target).set_index("algorithm")
    assert list(table.index) == ["half", "coded", "d_soba"]
    assert read_group(tmp_path / "out").axes == {"label": ["half", "coded", "d_soba"]}
    for name, result in zip(table.index, results, strict=True):
        for column, one in (("node_bytes_to_solution_error=0.99", target), ("node_bytes_to_penalty_error=0.98",
                                                                            target.further[0])):
            first = one.find_first(result.history.to_dict("records"))
            expected = None if first is None else first["bytes_broadcast"] / 4
            assert table.loc[name, column] == expected or (expected is None and table[column].isna()[name])
    assert experiments[0].run_key == Experiment(**{**experiments[0].to_dict(), "label": None}).run_key


@pytest.mark.parametrize("where", ["file", "option"])
def test_a_target_of_public_models_asks_for_them(tmp_path: Path, where: str) -> None:
    """Of all algorithms, as the first target or a further one; without it the experiments are as before."""
    texts = ["node_accuracy_mean=0.05", "public_accuracy_mean=0.05", "public_accuracy_min=0.01"]
    changes: dict[str, object] = {"task": {"name": "coefficient_tuning"}, "psi_every": None}
    file = write_plan(tmp_path, **changes, target=texts if where == "file" else None)
    experiments, target = plan(file, [], [], None if where == "file" else ",".join(texts))
    assert all(one.eval_public for one in experiments)
    table = comparison_table(compare(experiments, target, tmp_path / "out"), target)
    assert table[[f"node_bytes_to_{text}" for text in texts]].notna().all(axis=None)
    unasked, _ = plan(file, [], [], texts[0])
    assert not any(one.eval_public for one in unasked)
    refused, _ = plan(file, ["eval_public=false"], [], texts[1])
    assert not any(one.eval_public for one in refused)


def test_some_variants_can_be_chosen(tmp_path: Path) -> None:
    """`--algorithms` takes labels beside names; an override reaches every variant that has the parameter."""
    experiments, _ = plan(write_plan(tmp_path), ["algorithm.lam=7.5"], ["coded", "d_soba"], None)
    assert [one.title for one in experiments] == ["coded", "d_soba"]
    assert experiments[0].algorithm["lam"] == 7.5


@pytest.mark.parametrize(
    ("changes", "names", "message"),
    [
        ({"algorithms": {"bad": {"name": "c2dfb", "lam": -1.0}}, "rounds": 2}, [],
         "algorithms.bad: algorithm.lam: -1.0 is not allowed; must be > 0"),
        ({"algorithms": {"bad": {"name": "c2dbf"}}, "rounds": 2}, [],
         "algorithms.bad.name: unknown value 'c2dbf', did you mean 'c2dfb'?"),
        ({"algorithms": {"a/b": {"name": "c2dfb"}}, "rounds": 2}, [],
         "algorithms: 'a/b' is not allowed; a label has letters, digits, '_', '.' and '-'"),
        ({"algorithms": {"mdbo": {"name": "c2dfb"}}, "rounds": 2}, [],
         "algorithms: 'mdbo' is not allowed as the label of c2dfb: it names others"),
        ({"rounds": {"half": 2}}, [], "must be a number, or have one for coded"),
        ({"rounds": {"halve": 2}}, [], "rounds: unknown value 'halve', did you mean 'half'?"),
        ({}, ["hafl"], "--algorithms: unknown value 'hafl', did you mean 'half'?"),
    ],
)
def test_errors_name_the_label(tmp_path: Path, changes: dict[str, object], names: list[str], message: str) -> None:
    with pytest.raises(InputError) as error:
        plan(write_plan(tmp_path, **changes), [], names, None)
    assert message in str(error.value)
