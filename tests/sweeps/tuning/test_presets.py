"""The presets that ship are what the recorded search found, and work."""

import json
from pathlib import Path
from typing import Any

import pytest

from dbo.algorithms.registry import algorithms
from dbo.platform.config import yaml_io
from dbo.platform.config.experiment import Experiment
from dbo.platform.runs.runner import prepare, run
from dbo.sweeps.tuning import command
from dbo.sweeps.tuning.plan import read, searches
from dbo.sweeps.tuning.search import Found
from dbo.sweeps.tuning.trials import Trials

PLAN = read()
PRESETS = {file.stem: yaml_io.read(file) for file in sorted(command.PRESETS.glob("*.yaml"))}
ENTRIES = [(name, task) for name, tasks in PRESETS.items() for task in tasks]
HERE = [task for task, about in PLAN.tasks.items() if not about.downloaded]
FOUR = ("c2dfb", "c2dfb_nc", "madsbo", "mdbo")      # the systems of the paper


@pytest.fixture(scope="module")
def shipped() -> dict[tuple[str, str], Found]:
    """What the shipped log says, without running anything."""
    return {(end.search.algorithm, end.search.task): end for end in command.remembered(PLAN, command.LOG)}


def test_every_algorithm_and_task_has_a_preset() -> None:
    """`dbo run algorithm.name=X` is sensible for every X on every task of the plan."""
    assert {(name, task) for name in algorithms() for task in PLAN.tasks} == set(ENTRIES)


def test_shipped_presets_are_what_the_log_says(shipped: dict[tuple[str, str], Found]) -> None:
    """Each entry of a preset file is the outcome of the search over the recorded trials: none is set by hand."""
    assert {key: end.chosen.values for key, end in shipped.items()} == {
        (name, task): PRESETS[name][task] for name, task in ENTRIES
    }


def test_shipped_presets_score_at_least_the_defaults(shipped: dict[tuple[str, str], Found]) -> None:
    """In the recorded trials, a preset is never worse than leaving it out, but where that breaks on another graph."""
    memory = Trials(command.LOG, remember_only=True)
    for key, end in shipped.items():
        assert end.chosen.score is not None
        if end.plain.score is not None and end.plain.score > end.chosen.score:
            slack, reached = end.search.about.slack, end.plain.final.score or 0.0
            there = (
                memory.outcome(end.search, end.plain.values, PLAN.seeds.final, end.search.stretch, graph)
                for graph in range(1, len(PLAN.elsewhere) + 1)
            )
            assert any(not o.holds(slack) or (o.score or 0.0) < reached - slack for o in there), key


def test_shipped_page_is_what_the_log_says(shipped: dict[tuple[str, str], Found]) -> None:
    """The tables of docs/tuning.md are those of the recorded trials."""
    assert command.tables(list(shipped.values())) in command.PAGE.read_text()


def test_shipped_log_gave_everyone_the_same(shipped: dict[tuple[str, str], Found]) -> None:
    """In the recorded search every algorithm had as many trials of as many oracle calls, published values included."""
    entries = [json.loads(line) for line in command.LOG.read_text(encoding="utf-8").splitlines()]
    for search in (end.search for end in shipped.values()):
        mine = [
            entry for entry in entries
            if (entry["trial"]["algorithm"], entry["trial"]["task"]) == (search.algorithm, search.task)
        ]
        tried = [entry for entry in mine if entry["trial"]["seed"] == PLAN.seeds.search]
        retreats = [search.milder(entry["trial"]["values"], by) for entry in tried for by in PLAN.retreat]
        assert sum(entry["trial"]["values"] not in retreats for entry in tried) == search.trials
        assert all(values in [entry["trial"]["values"] for entry in tried] for values in search.known)
        for entry in mine:
            budget, outcome = search.about.budget * entry["trial"]["stretch"], entry["outcome"]
            if outcome["status"] == "finished":
                assert budget - weighed(outcome) / outcome["rounds"] <= weighed(outcome) <= budget


def weighed(outcome: dict[str, Any]) -> float:
    return sum(weight * outcome["oracle"][name] for name, weight in PLAN.weights.items())


@pytest.mark.parametrize(("name", "task"), ENTRIES)
def test_preset_speaks_where_the_experiment_is_silent(name: str, task: str) -> None:
    """It names only existing fields, is in the resolved experiment, and gives way to a value that is given."""
    kind, _, dataset = task.partition("/")
    section = {"name": kind, **({"dataset": dataset} if dataset else {})}
    resolved = Experiment(task=section, algorithm={"name": name}, engine={"name": "local"}).resolved()["algorithm"]
    assert PRESETS[name][task].items() <= resolved.items()
    field, value = next(iter(PRESETS[name][task].items()))
    given = Experiment(task=section, algorithm={"name": name, field: value / 2}, engine={"name": "local"})
    assert given.resolved()["algorithm"] == resolved | {field: value / 2}


@pytest.fixture(scope="module")
def prepared() -> dict[str, Any]:
    """One problem per task, on the seed that experiments start from and the search never saw."""
    return {
        task: prepare(Experiment(**{**PLAN.experiment, **PLAN.tasks[task].experiment})) for task in HERE
    }


@pytest.mark.parametrize(("name", "task"), [entry for entry in ENTRIES if entry[1] in HERE])
def test_preset_learns(
    name: str, task: str, shipped: dict[tuple[str, str], Found], prepared: dict[str, Any], tmp_path: Path
) -> None:
    """A short run with nothing but the preset does not diverge and lowers the upper loss.

    On the quadratic task the start has a lower upper loss than the solution (y = 0 is not y*(0)), so there it is the
    distance to the solution that falls.
    """
    first = shipped[name, task].chosen.first
    per_round = sum(weight * first.oracle[key] for key, weight in PLAN.weights.items()) / first.rounds
    about = PLAN.tasks[task]
    rounds = max(3, int(max(200, about.budget // 10) // per_round))
    made = Experiment(**{
        **PLAN.experiment, **about.experiment, "algorithm": {"name": name}, "rounds": rounds,
        "eval_every": 10**6, "checkpoint_every": 10**6,
    })
    result = run(made, tmp_path / "run", prepared=prepared[task])
    assert result.status == "finished"
    column = "upper_loss" if about.score == "accuracy" else "solution_error"
    assert result.history[column].iloc[-1] < result.history[column].iloc[0]


@pytest.mark.parametrize("name", FOUR)
def test_preset_is_not_worse_than_the_defaults(name: str, tmp_path: Path) -> None:
    """On a fresh seed of the digits and a fifth of the budget, the preset scores at least what the defaults score."""
    task = PLAN.tasks["coefficient_tuning/digits"].model_copy(update={"budget": 600})
    plan = PLAN.model_copy(update={"tasks": {"coefficient_tuning/digits": task}})
    (search,) = searches(plan, [name])
    trials = Trials()
    preset = trials.outcome(search, PRESETS[name]["coefficient_tuning/digits"], seed=0)
    plain = trials.outcome(search, search.plain, seed=0)
    assert preset.score is not None
    assert plain.score is None or preset.score >= plain.score
