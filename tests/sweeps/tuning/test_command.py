"""The search for presets is fair, repeatable and resumable, and chooses what holds."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.registry import algorithms
from dbo.platform.config import yaml_io
from dbo.platform.errors import InputError
from dbo.sweeps.tuning import command
from dbo.sweeps.tuning.plan import Plan, Search, read, searches
from dbo.sweeps.tuning.search import Found, tune
from dbo.sweeps.tuning.trials import Outcome, Trials, area, experiment, setting

PLAN = read()
HERE = [task for task, about in PLAN.tasks.items() if not about.downloaded]


def small(task: str = "quadratic", budget: int = 160, **changes: Any) -> Plan:
    """The plan with few, short trials on one task."""
    own = {"budget": budget, "trials": None, "finalists": None, "stretch": None}
    tasks = {task: PLAN.tasks[task].model_copy(update=own)}
    return PLAN.model_copy(update={"tasks": tasks, "trials": 6, "finalists": 1, "stretch": 2, **changes})


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def weighed(outcome: dict[str, Any]) -> float:
    return sum(weight * outcome["oracle"][name] for name, weight in PLAN.weights.items())


def found(search: Search, trials: Trials) -> Found:
    (end,) = [end for end in tune(search, trials) if end is not None]
    return end


# ---- the plan


def test_plan_covers_every_algorithm() -> None:
    """No algorithm is left without a search."""
    assert list(PLAN.algorithms) == list(algorithms())


@pytest.mark.parametrize("search", searches(PLAN, tasks=list(PLAN.tasks)), ids=lambda s: f"{s.algorithm}-{s.task}")
def test_ranges_are_of_the_configuration(search: Search) -> None:
    """Every searched field exists, is a number that is no one's object of study, and both its ends are allowed."""
    lowest = {name: low for key, (low, _) in search.ranges.items() for name in key.split("+")}
    for key, (low, high) in search.ranges.items():
        assert 0 < low < high
        for name in key.split("+"):
            assert type(search.defaults[name]) is float
            assert name not in {"lam", "rate", "radius", "floor", "delta"}
        # just below: of rates and η only the products below 1 are legal, and drawn
        experiment(search, lowest | dict.fromkeys(key.split("+"), 0.99 * high), seed=1)
    for values in search.known:
        assert values.keys() == lowest.keys()
        experiment(search, values, seed=1)


def test_ranges_do_not_depend_on_the_algorithm() -> None:
    """Steps of x are drawn from one range and steps on g from one range, whatever the algorithm calls them."""
    called = {"upper": {"eta_x", "eta_out", "beta_x"}, "lower": {"eta_y", "eta_in", "beta_y"}}
    for search in searches(PLAN, tasks=list(PLAN.tasks)):
        for role, names in called.items():
            mine = {limits for key, limits in search.ranges.items() if key in names}
            assert mine == {search.about.ranges[role]}, (search.algorithm, search.task)


def test_field_that_does_not_exist_is_refused() -> None:
    """A plan that names an unknown field, or leaves one out of published values, is an input error."""
    method = PLAN.algorithms["c2dfb"]
    for wrong in (
        method.model_copy(update={"fields": {"eta_inn": "lower"}}),
        method.model_copy(update={"published": {"quadratic": {"eta_in": 1.0}}}),
    ):
        with pytest.raises(InputError, match="c2dfb"):
            searches(PLAN.model_copy(update={"algorithms": {"c2dfb": wrong}}))


# ---- the search


def test_every_algorithm_has_the_same_means(tmp_path: Path) -> None:
    """As many trials for each, and each trial uses the budget of oracle calls up to less than one round."""
    log = tmp_path / "log.jsonl"
    trials = Trials(log)
    for search in searches(small(retreat=())):      # a retreat is no search: it makes what was found smaller
        found(search, trials)
    entries = lines(log)
    for name in PLAN.algorithms:
        mine = [entry for entry in entries if entry["trial"]["algorithm"] == name]
        assert sum(entry["trial"]["seed"] == PLAN.seeds.search for entry in mine) == 6
        for entry in mine:
            budget = 160 * entry["trial"]["stretch"]
            outcome = entry["outcome"]
            if outcome["status"] == "finished":
                assert budget - weighed(outcome) / outcome["rounds"] <= weighed(outcome) <= budget


def test_search_is_repeatable_and_resumable(tmp_path: Path) -> None:
    """The same search finds the same; interrupted in the middle of a line, it runs only what is not yet recorded."""
    (search,) = searches(small(), ["sldbo"])
    logs = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    first, again = (found(search, Trials(log)) for log in logs)

    def timeless(log: Path) -> list[Any]:
        return [entry | {"outcome": entry["outcome"] | {"seconds": 0}} for entry in lines(log)]

    assert first.chosen.values == again.chosen.values
    assert timeless(logs[0]) == timeless(logs[1])

    whole = logs[0].read_text()
    kept = whole.splitlines(keepends=True)
    logs[0].write_text("".join(kept[:3]) + kept[3][:40])
    trials = Trials(logs[0])
    assert found(search, trials).chosen.values == first.chosen.values
    assert trials.ran == len(kept) - 3
    assert timeless(logs[0]) == timeless(logs[1])

    finished = Trials(logs[0])
    found(search, finished)
    assert finished.ran == 0


def test_damaged_log_is_refused(tmp_path: Path) -> None:
    """A wrong line that is not the cut-off last one is an error, not a silent repetition."""
    log = tmp_path / "log.jsonl"
    log.write_text("nonsense\n{}\n")
    with pytest.raises(InputError, match="line 1"):
        Trials(log)


def test_known_values_are_tried_first(tmp_path: Path) -> None:
    """The algorithm's defaults and published values are among the trials."""
    (search,) = searches(small("coefficient_tuning/digits"), ["bome"])
    assert search.published is not None
    assert search.published != search.plain
    log = tmp_path / "log.jsonl"
    end = found(search, Trials(log))
    tried = [entry["trial"]["values"] for entry in lines(log)]
    assert tried[:2] == [search.plain, search.published]
    assert (end.plain.values, end.published and end.published.values) == (search.plain, search.published)


class Fake(Trials):
    """The larger eta_in, the higher the score; above `lasting`, on other graphs above `dense`, it does not last.

    With `fading`, it lasts there but at a score lower by so much.
    """

    def __init__(self, lasting: float, dense: float = 1e9, fading: float = 0.0) -> None:
        super().__init__()
        self.lasting, self.dense, self.fading = lasting, dense, fading
        self.tried: list[float] = []

    def outcome(
        self, search: Search, values: dict[str, float], seed: int, stretch: int = 1, there: int = 0
    ) -> Outcome:
        score = step = values["eta_in"]
        if stretch == 1:
            self.tried.append(step)
        lost = 0.0
        if there and step > self.dense:
            lost, score = (0.0, score - self.fading) if self.fading else (100.0, score)
        if stretch > 1 and step > self.lasting:
            lost = 100.0
        return Outcome("finished", score, score, score - lost, score, 1, {}, 0.0)

    def best_of(self, search: Search) -> float:
        return found(search, self).chosen.values["eta_in"]

    def best(self, limit: float) -> float:
        return max(step for step in self.tried if step * PLAN.margin <= limit)


def test_what_does_not_hold_is_not_chosen() -> None:
    """Values that score best but do not last, or would not with larger steps, are passed over."""
    (search,) = searches(small(trials=8), ["f2ba"])
    fake = Fake(0.3)
    assert found(search, fake).chosen.values["eta_in"] == fake.best(0.3)
    low, high = PLAN.tasks["quadratic"].ranges["lower"]
    centre = max(step for step in fake.tried[:4] if step * PLAN.margin <= 0.3)
    assert all(abs(np.log(step / centre)) <= 0.41 * np.log(high / low) for step in fake.tried[4:6])


@pytest.mark.parametrize(("lower", "passed_over"), [(1.0, False), (2.0, True)])
def test_what_works_with_one_seed_only_is_not_chosen(lower: float, passed_over: bool) -> None:
    """A second seed whose score is more than `apart` slacks (here 1.5) below the first's does not confirm it."""

    class Lucky(Fake):
        def outcome(
            self, search: Search, values: dict[str, float], seed: int, stretch: int = 1, there: int = 0
        ) -> Outcome:
            told = super().outcome(search, values, seed, stretch, there)
            luck = seed == PLAN.seeds.final and values["eta_in"] > 0.3
            return replace(told, score=(told.score or 0.0) - lower * luck)

    (search,) = searches(small(trials=16).model_copy(update={"retreat": ()}), ["f2ba"])
    fake = Lucky(2.0)
    chosen = found(search, fake).chosen.values["eta_in"]
    assert chosen == fake.best(0.3 if passed_over else 2.0)
    assert fake.best(0.3) < fake.best(2.0)


@pytest.mark.parametrize("fading", [0.0, 10.0])
def test_choice_holds_on_the_other_graphs(fading: float) -> None:
    """What blows up there with larger steps, or scores far below, is passed over down to what does not."""
    (search,) = searches(small(trials=16).model_copy(update={"retreat": ()}), ["f2ba"])
    fake = Fake(2.0, dense=0.3, fading=fading)
    assert found(search, fake).chosen.values["eta_in"] == fake.best(0.3)
    assert fake.best(0.3) < fake.best(2.0)
    assert found(search, Fake(2.0)).chosen.values["eta_in"] == fake.best(2.0)


def test_the_best_goes_back_until_it_holds_everywhere() -> None:
    """Where none of the finalists holds on the other graphs, the best of them does with steps and γ made smaller."""
    (search,) = searches(small(trials=16), ["f2ba"])
    limit = 0.505 * Fake(2.0).best_of(search) * PLAN.margin      # below the defaults, which would be chosen otherwise
    end = found(search, Fake(2.0, dense=limit))
    assert end.chosen.values == search.milder(found(search, Fake(2.0)).chosen.values, 0.5)
    (compressed,) = searches(small(trials=16), ["c2dfb"])
    milder = compressed.milder({"eta_in": 1.0, "eta_out": 2.0, "gamma_in": 0.5, "gamma_out": 1.0}, 0.5)
    assert milder == {"eta_in": 0.5, "eta_out": 1.0, "gamma_in": 0.25, "gamma_out": 0.5}


def test_no_preset_is_worse_than_none() -> None:
    """Defaults that score higher than what has a margin are the choice without one, if they hold on both graphs."""
    (search,) = searches(small(trials=8), ["f2ba"])
    step = search.plain["eta_in"]
    assert found(search, Fake(step)).chosen.values == search.plain
    assert found(search, Fake(0.9 * step)).chosen.values["eta_in"] < step
    assert found(search, Fake(step, dense=0.9 * step)).chosen.values["eta_in"] < step
    assert found(search, Fake(1e9)).chosen.values["eta_in"] > step


def test_downloads_only_if_asked_for() -> None:
    """Tasks with data from elsewhere are searched by name only; where the data lie is no part of a trial."""
    assert {search.task for search in searches(PLAN)} == set(HERE)
    away = sorted(set(PLAN.tasks) - set(HERE))
    assert away
    for task in away:
        (plain,), (given,) = (searches(PLAN, ["mdbo"], [task], data_dir=folder) for folder in (None, "/data"))
        assert experiment(plain, plain.plain, seed=1).data_dir is None
        assert experiment(given, plain.plain, seed=1).data_dir == "/data"
        assert setting(plain) == setting(given) != setting(plain, 1)


def test_score_is_the_mean_height_over_the_budget() -> None:
    """Constant: its value; a ramp: its mean; the last value lasts; what comes after the budget does not count."""
    calls = np.array([0.0, 40.0, 60.0, 80.0])
    assert area(calls, np.full(4, 0.7), 100) == pytest.approx(0.7)
    assert area(calls, np.array([0.0, 0.0, 1.0, 1.0]), 100) == pytest.approx(0.5)
    assert area(np.array([10.0, 90.0]), np.array([0.2, 0.2]), 100) == pytest.approx(0.2)
    assert area(np.array([0.0, 100.0, 200.0]), np.array([0.0, 1.0, -5.0]), 100) == pytest.approx(0.5)


def test_holding_is_not_ending_below_one_s_best() -> None:
    """A run that diverged or decayed by more than the slack does not hold."""
    def ended(score: float | None, best: float | None, end: float | None) -> Outcome:
        return Outcome("finished", score, best, end, end, 1, {}, 0.0)

    assert ended(0.8, 0.9, 0.86).holds(0.05)
    assert not ended(0.8, 0.9, 0.84).holds(0.05)
    assert not ended(None, None, None).holds(0.05)


def test_today_s_presets_have_no_say() -> None:
    """A trial gives every parameter that a preset may hold, so it is the same before and after presets are written."""
    for search in searches(PLAN):
        assert experiment(search, search.plain, seed=1).algorithm.items() >= search.plain.items()


# ---- what is written


def test_preset_is_written_beside_the_others(tmp_path: Path) -> None:
    """Entries of other tasks stay, the header tells the command, and the file reads back as it was meant."""
    (tmp_path / "sldbo.yaml").write_text("elsewhere: {eta_x: 0.5}\n")
    (search,) = searches(small(), ["sldbo"])
    end = found(search, Trials())
    command.write_preset(end, tmp_path)
    text = (tmp_path / "sldbo.yaml").read_text()
    assert yaml_io.parse(text, "") == {"quadratic": end.chosen.values, "elsewhere": {"eta_x": 0.5}}
    assert "# " in text
    assert "python -m dbo.sweeps.tuning --algorithms sldbo --write" in text


def test_page_is_changed_between_its_marks_only(tmp_path: Path) -> None:
    """The tables are replaced, the prose around them stays; a page without marks is refused."""
    (search,) = searches(small(), ["sldbo"])
    end = found(search, Trials())
    page = tmp_path / "page.md"
    page.write_text("before <!-- tables: begin -->\nold\n<!-- tables: end --> after")
    command.write_page([end], page)
    text = page.read_text()
    assert text.startswith("before ")
    assert text.endswith(" after")
    assert "old" not in text
    assert "| sldbo |" in text
    page.write_text("no marks")
    with pytest.raises(InputError, match="marks"):
        command.write_page([end], page)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["--algorithms", "c2dbf"], "did you mean 'c2dfb'"),
     (["--tasks", "cubic"], "--tasks"), (["--trials", "2"], "≥"),
     (["--trials", "8", "--write"], "--trials")],
)
def test_wrong_input_is_told_in_one_line(arguments: list[str], told: str, tmp_path: Path) -> None:
    """Exit code 2 and one line; nothing is run or written."""
    command = [sys.executable, "-m", "dbo.sweeps.tuning", *arguments, "--log", str(tmp_path / "log.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "log.jsonl").exists()
