"""The search for presets is fair, repeatable and resumable, and chooses stable step sizes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from dbo.algorithms.registry import algorithms
from dbo.platform.config import yaml_io
from dbo.platform.errors import InputError
from dbo.sweeps.tuning import command
from dbo.sweeps.tuning.plan import StepSizeSearch, TaskPlan, TuningPlan, list_searches, read_plan
from dbo.sweeps.tuning.search import NoStableTrial, SearchResult, build_entry, run_search
from dbo.sweeps.tuning.trials import TrialResult, TrialRunner, hash_setting, integrate_curve, make_experiment

PLAN = read_plan()
WITHOUT_DOWNLOAD = [task for task, task_plan in PLAN.tasks.items() if not task_plan.downloaded]


def small_plan(task: str = "quadratic", budget: int = 160, **changes: Any) -> TuningPlan:
    """Return the plan with few, short trials on one task."""
    own = {"budget": budget, "trials": None, "finalists": None, "stretch": None}
    tasks = {task: PLAN.tasks[task].model_copy(update=own)}
    return PLAN.model_copy(update={"tasks": tasks, "trials": 6, "finalists": 1, "stretch": 2, **changes})


def read_lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def count_calls(outcome: dict[str, Any]) -> float:
    return sum(weight * outcome["oracle"][name] for name, weight in PLAN.weights.items())


def find(search: StepSizeSearch, trials: TrialRunner) -> SearchResult:
    (result,) = [result for result in run_search(search, trials) if result is not None]
    return result


# ---- plan


def test_plan_covers_every_algorithm() -> None:
    """No algorithm is left without a search."""
    assert list(PLAN.algorithms) == list(algorithms())


@pytest.mark.parametrize("search", list_searches(PLAN, tasks=list(PLAN.tasks)), ids=lambda s: f"{s.algorithm}-{s.task}")
def test_searched_fields_and_their_ranges_are_valid(search: StepSizeSearch) -> None:
    """Every searched field is a float of the configuration, not the axis of a study, and both its ends are allowed."""
    lowest = {name: low for key, (low, _) in search.ranges.items() for name in key.split("+")}
    for key, (low, high) in search.ranges.items():
        assert 0 < low < high
        for name in key.split("+"):
            assert type(search.defaults[name]) is float
            assert name not in {"lam", "rate", "radius", "floor", "delta"}
        # slightly less: of rates and η only products below 1 are valid, and sampled
        make_experiment(search, lowest | dict.fromkeys(key.split("+"), 0.99 * high), seed=1)
    for values in search.known_values:
        assert values.keys() == lowest.keys()
        make_experiment(search, values, seed=1)


def test_a_task_fixes_parameters_of_the_algorithms_that_have_them() -> None:
    """They are in the trials' experiments, identify a trial, and the preset's entry records them."""
    quadratic = PLAN.tasks["quadratic"]
    fixed = quadratic.model_copy(update={"algorithm": {"inner_steps": 3, "higp_steps": 2}})
    plan = small_plan().model_copy(update={"tasks": {"quadratic": fixed}})
    names = ("madsbo", "c2dfb", "mdbo")
    madsbo, c2dfb, mdbo = list_searches(plan, names)
    assert (madsbo.given, c2dfb.given, mdbo.given) == ({"inner_steps": 3, "higp_steps": 2}, {"inner_steps": 3}, {})
    made = make_experiment(madsbo, madsbo.default_steps, seed=1).algorithm
    assert (made["inner_steps"], made["higp_steps"]) == (3, 2)
    free = list_searches(plan.model_copy(update={"tasks": {"quadratic": quadratic}}), names)
    same = [hash_setting(one) == hash_setting(other) for one, other in zip((madsbo, c2dfb, mdbo), free, strict=True)]
    assert same == [False, False, True]
    assert build_entry(find(c2dfb, FakeRunner(0.5)))["setting"] == {"algorithm": {"inner_steps": 3}}
    assert "setting" not in build_entry(find(free[1], FakeRunner(0.5)))


def test_ranges_do_not_depend_on_the_algorithm() -> None:
    """Steps of x are sampled from one range, and steps on g from one range, whatever their names."""
    names_of = {"upper": {"eta_x", "eta_out", "beta_x"}, "lower": {"eta_y", "eta_in", "beta_y"}}
    for search in list_searches(PLAN, tasks=list(PLAN.tasks)):
        for role, names in names_of.items():
            bounds = {limits for key, limits in search.ranges.items() if key in names}
            assert bounds == {search.task_plan.ranges[role]}, (search.algorithm, search.task)


def test_unknown_field_is_refused() -> None:
    """A plan that names an unknown field, or leaves one out of published values, is an input error."""
    method = PLAN.algorithms["c2dfb"]
    for wrong in (
        method.model_copy(update={"fields": {"eta_inn": "lower"}}),
        method.model_copy(update={"published": {"quadratic": {"eta_in": 1.0}}}),
    ):
        with pytest.raises(InputError, match="c2dfb"):
            list_searches(PLAN.model_copy(update={"algorithms": {"c2dfb": wrong}}))


# ---- search


def test_every_algorithm_has_the_same_budget(tmp_path: Path) -> None:
    """The same number of trials, and each uses its oracle calls up to less than one round."""
    log = tmp_path / "log.jsonl"
    trials = TrialRunner(log)
    for search in list_searches(small_plan(retreat=())):      # shrinking steps is not part of the search
        find(search, trials)
    entries = read_lines(log)
    for name in PLAN.algorithms:
        mine = [entry for entry in entries if entry["trial"]["algorithm"] == name]
        assert sum(entry["trial"]["seed"] == PLAN.seeds.search for entry in mine) == 6
        for entry in mine:
            budget = 160 * entry["trial"]["stretch"]
            outcome = entry["outcome"]
            if outcome["status"] == "finished":
                assert budget - count_calls(outcome) / outcome["rounds"] <= count_calls(outcome) <= budget


def test_search_is_repeatable_and_resumable(tmp_path: Path) -> None:
    """The same search has the same result; interrupted in the middle of a line, it runs only what is not logged."""
    (search,) = list_searches(small_plan(), ["sldbo"])
    logs = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    first, again = (find(search, TrialRunner(log)) for log in logs)

    def read_without_seconds(log: Path) -> list[Any]:
        return [entry | {"outcome": entry["outcome"] | {"seconds": 0}} for entry in read_lines(log)]

    assert first.chosen.values == again.chosen.values
    assert read_without_seconds(logs[0]) == read_without_seconds(logs[1])

    whole = logs[0].read_text()
    kept = whole.splitlines(keepends=True)
    logs[0].write_text("".join(kept[:3]) + kept[3][:40])
    trials = TrialRunner(logs[0])
    assert find(search, trials).chosen.values == first.chosen.values
    assert trials.ran == len(kept) - 3
    assert read_without_seconds(logs[0]) == read_without_seconds(logs[1])

    finished = TrialRunner(logs[0])
    find(search, finished)
    assert finished.ran == 0


@pytest.mark.parametrize("cut", [1, 40])
def test_partial_line_of_the_log_is_replaced(tmp_path: Path, cut: int) -> None:
    """Even one that lacks only its newline: the next line must not join it. Reading alone changes nothing."""
    (search,) = list_searches(small_plan(), ["sldbo"])
    log = tmp_path / "log.jsonl"
    TrialRunner(log).run(search, search.default_steps, 0)
    partial = log.read_bytes()[:-cut]
    log.write_bytes(partial)
    trials = TrialRunner(log)
    assert log.read_bytes() == partial
    trials.run(search, search.default_steps, 0)
    assert (trials.ran, len(read_lines(log))) == (1, 1)
    TrialRunner(log)


def test_damaged_log_is_refused(tmp_path: Path) -> None:
    """A damaged line is an error, unless it is the last and incomplete: its trial must not run again silently."""
    log = tmp_path / "log.jsonl"
    log.write_text("nonsense\n{}\n")
    with pytest.raises(InputError, match="line 1"):
        TrialRunner(log)


def test_known_values_are_tried_first(tmp_path: Path) -> None:
    """The algorithm's defaults and published values are among the trials."""
    (search,) = list_searches(small_plan("coefficient_tuning/digits"), ["bome"])
    assert search.published is not None
    assert search.published != search.default_steps
    log = tmp_path / "log.jsonl"
    result = find(search, TrialRunner(log))
    tried = [entry["trial"]["values"] for entry in read_lines(log)]
    assert tried[:2] == [search.default_steps, search.published]
    assert result.published is not None
    assert (result.defaults.values, result.published.values) == (search.default_steps, search.published)


class FakeRunner(TrialRunner):
    """The larger eta_in, the higher the score; above `limit`, on other graphs above `dense_limit`, it is not stable.

    With `penalty`, it is stable on other graphs, but its score is lower by so much.
    """

    def __init__(self, limit: float, dense_limit: float = 1e9, penalty: float = 0.0) -> None:
        super().__init__()
        self.limit, self.dense_limit, self.penalty = limit, dense_limit, penalty
        self.tried: list[float] = []

    def run(
        self, search: StepSizeSearch, values: dict[str, float], seed: int, stretch: int = 1, graph: int = 0
    ) -> TrialResult:
        score = step = values["eta_in"]
        if stretch == 1:
            self.tried.append(step)
        decay = 0.0
        if graph and step > self.dense_limit:
            decay, score = (0.0, score - self.penalty) if self.penalty else (100.0, score)
        if stretch > 1 and step > self.limit:
            decay = 100.0
        return TrialResult("finished", score, score, score - decay, score, 1, {}, 0.0)

    def choose(self, search: StepSizeSearch) -> float:
        return find(search, self).chosen.values["eta_in"]

    def best_below(self, limit: float) -> float:
        return max(step for step in self.tried if step * PLAN.margin <= limit)


def test_unstable_values_are_not_chosen() -> None:
    """Values that score best but are not stable, or not with larger steps, are skipped."""
    (search,) = list_searches(small_plan(trials=8), ["f2ba"])
    fake = FakeRunner(0.3)
    assert find(search, fake).chosen.values["eta_in"] == fake.best_below(0.3)
    low, high = PLAN.tasks["quadratic"].ranges["lower"]
    centre = max(step for step in fake.tried[:4] if step * PLAN.margin <= 0.3)
    assert all(abs(np.log(step / centre)) <= 0.41 * np.log(high / low) for step in fake.tried[4:6])


@pytest.mark.parametrize(("lower", "skipped"), [(1.0, False), (2.0, True)])
def test_values_that_work_with_one_seed_only_are_not_chosen(lower: float, skipped: bool) -> None:
    """A second seed whose score is more than `apart` slacks (here 1.5) below the first's does not confirm it."""

    class LuckyRunner(FakeRunner):
        def run(
            self, search: StepSizeSearch, values: dict[str, float], seed: int, stretch: int = 1, graph: int = 0
        ) -> TrialResult:
            result = super().run(search, values, seed, stretch, graph)
            luck = seed == PLAN.seeds.final and values["eta_in"] > 0.3
            return replace(result, score=(result.score or 0.0) - lower * luck)

    (search,) = list_searches(small_plan(trials=16).model_copy(update={"retreat": ()}), ["f2ba"])
    fake = LuckyRunner(2.0)
    chosen = find(search, fake).chosen.values["eta_in"]
    assert chosen == fake.best_below(0.3 if skipped else 2.0)
    assert fake.best_below(0.3) < fake.best_below(2.0)


@pytest.mark.parametrize("penalty", [0.0, 10.0])
def test_choice_is_stable_on_the_other_graphs(penalty: float) -> None:
    """Values that diverge there with larger steps, or score much lower, are skipped."""
    (search,) = list_searches(small_plan(trials=16).model_copy(update={"retreat": ()}), ["f2ba"])
    fake = FakeRunner(2.0, dense_limit=0.3, penalty=penalty)
    assert find(search, fake).chosen.values["eta_in"] == fake.best_below(0.3)
    assert fake.best_below(0.3) < fake.best_below(2.0)
    assert find(search, FakeRunner(2.0)).chosen.values["eta_in"] == fake.best_below(2.0)


def test_steps_of_the_best_shrink_until_it_is_stable_everywhere() -> None:
    """If no finalist is stable on the other graphs, the best of them is, with smaller steps and γ."""
    (search,) = list_searches(small_plan(trials=16), ["f2ba"])
    limit = 0.505 * FakeRunner(2.0).choose(search) * PLAN.margin      # below the defaults: they must not be chosen
    result = find(search, FakeRunner(2.0, dense_limit=limit))
    assert result.chosen.values == search.shrink_steps(find(search, FakeRunner(2.0)).chosen.values, 0.5)
    (compressed,) = list_searches(small_plan(trials=16), ["c2dfb"])
    smaller = compressed.shrink_steps({"eta_in": 1.0, "eta_out": 2.0, "gamma_in": 0.5, "gamma_out": 1.0}, 0.5)
    assert smaller == {"eta_in": 0.5, "eta_out": 1.0, "gamma_in": 0.25, "gamma_out": 0.5}


def test_no_preset_is_worse_than_the_defaults() -> None:
    """Defaults that score higher are chosen even without a margin, if they are stable on all graphs."""
    (search,) = list_searches(small_plan(trials=8), ["f2ba"])
    step = search.default_steps["eta_in"]
    assert find(search, FakeRunner(step)).chosen.values == search.default_steps
    assert find(search, FakeRunner(0.9 * step)).chosen.values["eta_in"] < step
    assert find(search, FakeRunner(step, dense_limit=0.9 * step)).chosen.values["eta_in"] < step
    assert find(search, FakeRunner(1e9)).chosen.values["eta_in"] > step


class SlowlyDivergingRunner(FakeRunner):
    """The larger eta_in, the higher the score of a short trial; over eight budgets more than `limit` is not stable."""

    def run(
        self, search: StepSizeSearch, values: dict[str, float], seed: int, stretch: int = 1, graph: int = 0
    ) -> TrialResult:
        self.runs.append((stretch, seed, graph))
        step = values["eta_in"]
        if stretch == 1:
            self.tried.append(step)
        unstable = stretch == 8 and step > (self.dense_limit if graph else self.limit)
        return TrialResult("finished", step, step, step - 100.0 * unstable, step, stretch, {}, 0.0)

    def __init__(self, limit: float, dense_limit: float = 1e9) -> None:
        super().__init__(limit, dense_limit)
        self.runs: list[tuple[int, int, int]] = []


def halving_search(**changes: Any) -> StepSizeSearch:
    plan = small_plan(trials=12, **changes)
    task_plan = plan.tasks["quadratic"].model_copy(update={"rungs": {2: 6, 8: 3}})
    (search,) = list_searches(plan.model_copy(update={"tasks": {"quadratic": task_plan}}), ["f2ba"])
    return search


def test_fewer_and_fewer_of_the_best_run_longer() -> None:
    """Each rung has its number of trials on the first seed; the best of the longest is the choice, as it is."""
    search = halving_search()
    free = SlowlyDivergingRunner(1e9)
    assert free.choose(search) == max(free.tried)
    on_first_seed = [stretch for stretch, seed, graph in free.runs if (seed, graph) == (PLAN.seeds.search, 0)]
    assert on_first_seed[:12 + 6 + 3] == [1] * 12 + [2] * 6 + [8] * 3
    third = sorted(free.tried)[-3]
    assert SlowlyDivergingRunner(third).choose(search) == third
    entry = build_entry(find(search, SlowlyDivergingRunner(third)))
    assert entry["horizon"] == {"oracle_calls": 8 * 160, "rounds": 8, "trials": 12}


def test_steps_shrink_if_none_of_the_longest_trials_is_stable() -> None:
    """By the factors of the plan, and no further; on other graphs too."""
    search = halving_search()
    free = SlowlyDivergingRunner(1e9)
    best = free.choose(search)
    limit = 0.65 * best
    assert limit < sorted(free.tried)[-3]           # all three of the last rung are above
    for limits in ((limit, 1e9), (1e9, limit)):
        assert SlowlyDivergingRunner(*limits).choose(search) == pytest.approx(0.64 * best, rel=0.01)
    with pytest.raises(NoStableTrial):
        find(search, SlowlyDivergingRunner(0.4 * best))


def test_a_rung_is_scored_by_its_end(tmp_path: Path) -> None:
    """A long trial has as many evaluations as a short one; without rungs the area over the first budget counts."""
    search = halving_search()
    plain = replace(search, plan=small_plan(trials=12))
    runner, values = TrialRunner(tmp_path / "log.jsonl"), {"eta_in": 0.1, "eta_out": 0.1}
    short, whole = (runner.run(search, values, 1, stretch) for stretch in (1, 8))
    area, longer = (runner.run(plain, values, 1, stretch) for stretch in (1, 8))
    assert hash_setting(search) != hash_setting(plain)
    assert (short.score, whole.score) == (short.end, whole.end)
    assert (short.end, whole.rounds, whole.reached) == (area.end, longer.rounds, longer.reached)
    assert area.score == pytest.approx(longer.score, rel=0.05)
    assert short.score > area.score
    assert whole.score > short.score


@pytest.mark.parametrize("rungs", [{1: 4}, {4: 2, 2: 1}, {2: 3, 4: 5}, {2: 0}])
def test_rungs_that_do_not_halve_are_refused(rungs: dict[int, int]) -> None:
    """Budgets grow, and the number of trials does not."""
    with pytest.raises(ValidationError, match="rungs"):
        TaskPlan(**{**PLAN.tasks["quadratic"].model_dump(), "rungs": rungs})


def test_a_task_fixes_parameters_of_one_algorithm() -> None:
    """Besides those that it fixes for all."""
    fixed = {"algorithm": {"inner_steps": 3}, "own": {"lean": {"lam": 20.0}}}
    task_plan = PLAN.tasks["quadratic"].model_copy(update=fixed)
    lean, c2dfb = list_searches(PLAN.model_copy(update={"tasks": {"quadratic": task_plan}}), ["lean", "c2dfb"])
    assert (lean.given, c2dfb.given) == ({"inner_steps": 3, "lam": 20.0}, {"inner_steps": 3})


def test_tasks_with_downloads_are_searched_by_name_only() -> None:
    """The folder of the data is not part of a trial's key."""
    assert {search.task for search in list_searches(PLAN)} == set(WITHOUT_DOWNLOAD)
    downloaded = sorted(set(PLAN.tasks) - set(WITHOUT_DOWNLOAD))
    assert downloaded
    for task in downloaded:
        (without,), (given,) = (list_searches(PLAN, ["mdbo"], [task], data_dir=folder) for folder in (None, "/data"))
        assert make_experiment(without, without.default_steps, seed=1).data_dir is None
        assert make_experiment(given, without.default_steps, seed=1).data_dir == "/data"
        assert hash_setting(without) == hash_setting(given) != hash_setting(without, 1)


def test_score_is_the_mean_height_over_the_budget() -> None:
    """Of a constant its value, of a ramp its mean; the last value continues; nothing after the budget counts."""
    calls = np.array([0.0, 40.0, 60.0, 80.0])
    assert integrate_curve(calls, np.full(4, 0.7), 100) == pytest.approx(0.7)
    assert integrate_curve(calls, np.array([0.0, 0.0, 1.0, 1.0]), 100) == pytest.approx(0.5)
    assert integrate_curve(np.array([10.0, 90.0]), np.array([0.2, 0.2]), 100) == pytest.approx(0.2)
    assert integrate_curve(np.array([0.0, 100.0, 200.0]), np.array([0.0, 1.0, -5.0]), 100) == pytest.approx(0.5)


def test_a_run_that_decays_is_not_stable() -> None:
    """A run is stable if it neither diverged nor ended more than the slack below its best."""
    def make_result(score: float | None, best: float | None, end: float | None) -> TrialResult:
        return TrialResult("finished", score, best, end, end, 1, {}, 0.0)

    assert make_result(0.8, 0.9, 0.86).is_stable(0.05)
    assert not make_result(0.8, 0.9, 0.84).is_stable(0.05)
    assert not make_result(None, None, None).is_stable(0.05)


def test_existing_presets_do_not_influence_trials() -> None:
    """A trial sets every parameter that a preset may hold, so it is the same before and after presets are written."""
    for search in list_searches(PLAN):
        assert make_experiment(search, search.default_steps, seed=1).algorithm.items() >= search.default_steps.items()


# ---- output


def test_a_search_that_finds_nothing_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is reported, has no preset, and the next algorithm is searched; the tables leave it out."""
    plan = small_plan()
    (hopeless,) = list_searches(plan, ["f2ba"])
    with pytest.raises(NoStableTrial, match="f2ba on quadratic: no trial is stable"):
        find(hopeless, FakeRunner(-1.0))

    def search(which: StepSizeSearch, runner: TrialRunner) -> Iterator[SearchResult | None]:
        return run_search(which, FakeRunner(-1.0) if which.algorithm == "f2ba" else runner)

    written: list[str] = []
    monkeypatch.setattr(command, "read_plan", lambda: plan)
    monkeypatch.setattr(command, "run_search", search)
    monkeypatch.setattr(command, "write_preset", lambda result: written.append(result.search.algorithm))
    monkeypatch.setattr(command, "write_page", lambda results, page: written.extend(
        f"page {result.search.algorithm}" for result in results))
    command.main(algorithms="f2ba,soba", tasks="quadratic", log=tmp_path / "log.jsonl", write=True)
    assert written == ["soba", "page soba"]
    assert "no trial is stable; widen its ranges; no preset" in " ".join(capsys.readouterr().out.split())


def test_preset_is_added_to_its_file(tmp_path: Path) -> None:
    """Entries of other tasks stay, the header names the command, and the file can be read back."""
    (tmp_path / "sldbo.yaml").write_text("elsewhere: {eta_x: 0.5}\n")
    (search,) = list_searches(small_plan(), ["sldbo"])
    result = find(search, TrialRunner())
    command.write_preset(result, tmp_path)
    text = (tmp_path / "sldbo.yaml").read_text()
    entry = yaml_io.parse(text, "")["quadratic"]
    assert yaml_io.parse(text, "")["elsewhere"] == {"eta_x": 0.5}
    assert entry["values"] == result.chosen.values
    assert entry["horizon"] == {"oracle_calls": 160, "rounds": result.chosen.first.rounds, "trials": search.trials}
    assert entry["score"]["metric"] == "distance"
    assert entry["data"] == {"sha256": result.chosen.first.data, "seeds": [1, 2]}
    assert "# " in text
    assert "python -m dbo.sweeps.tuning --algorithms sldbo --write" in text


def test_page_is_changed_between_its_marks_only(tmp_path: Path) -> None:
    """The tables are replaced, the prose around them stays; a page without marks is refused."""
    (search,) = list_searches(small_plan(), ["sldbo"])
    result = find(search, TrialRunner())
    page = tmp_path / "page.md"
    page.write_text("before <!-- tables: begin -->\nold\n<!-- tables: end --> after")
    command.write_page([result], page)
    text = page.read_text()
    assert text.startswith("before ")
    assert text.endswith(" after")
    assert "old" not in text
    assert "| sldbo |" in text
    page.write_text("no marks")
    with pytest.raises(InputError, match="marks"):
        command.write_page([result], page)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--algorithms", "c2dbf"], "did you mean 'c2dfb'"),
     (["--tasks", "cubic"], "--tasks"), (["--trials", "2"], "≥"),
     (["--trials", "8", "--write"], "--trials")],
)
def test_wrong_input_is_refused_in_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    """Exit code 2 and one line; nothing is run or written."""
    command = [sys.executable, "-m", "dbo.sweeps.tuning", *arguments, "--log", str(tmp_path / "log.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "log.jsonl").exists()
