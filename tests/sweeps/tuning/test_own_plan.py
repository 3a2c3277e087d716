"""`dbo tune` plans fair searches for any task and algorithm, scores held-out samples and writes a preset file."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dbo.platform.config import presets
from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.sweeps.tuning import own_plan
from dbo.sweeps.tuning.search import run_search
from dbo.sweeps.tuning.trials import TrialRunner, compute_curve, hash_setting, make_experiment

DIGITS: dict[str, Any] = {"nodes": 3, "partition": {"name": "iid"}, "seed": 7}
PLUGIN = '''
from dataclasses import dataclass

import dbo


@dataclass(frozen=True)
class Config:
    step: float = dbo.param(0.3, gt=0, schedule=True)
    weight: float = dbo.param(0.5, gt=0, le=1, schedule=True)
    steps: int = dbo.param(2, ge=1)


@dataclass(frozen=True)
class State:
    t: dbo.Array
    x: dbo.Array
    y: dbo.Array
    direction: dbo.Array


def init(shard, cfg):
    return State(dbo.counter(shard), shard.x0, shard.y0, 0 * shard.x0)


@dbo.algorithm("own_descent", config=Config, state=State, init=init)
async def own_descent(st, shard, cfg):
    """Descend on g."""
    (mixed,) = await dbo.mix(y=st.y)
    y = mixed - cfg.step * cfg.weight * shard.g_y(st.x, st.y)
    return State(st.t + 1, st.x, y, st.direction)
'''


def plan(names: list[str] = ["sldbo"], **changes: Any) -> own_plan.OwnSearches:  # noqa: B006
    return own_plan.plan_searches(Experiment(**{**DIGITS, **changes}), names, trials=5, budget=60)


def test_trial_scores_samples_that_are_held_out() -> None:
    """Trials hold out a part of the validation samples; a fraction of one's own is kept."""
    (search,) = plan().searches
    assert search.task_plan.score == "psi_tune_loss"
    assert make_experiment(search, search.default_steps, 8).tune_fraction == own_plan.TUNE_FRACTION
    (search,) = plan(tune_fraction=0.1).searches
    assert make_experiment(search, search.default_steps, 8).tune_fraction == 0.1


def test_task_without_samples_keeps_its_score() -> None:
    """The quadratic task scores the distance to its solution."""
    assert plan(task={"name": "quadratic"}).searches[0].task_plan.score == "distance"


def test_rungs_of_the_shipped_plan_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that the shipped plan searches by successive halving is searched so here too."""
    known = own_plan.read_plan()
    rungs = known.tasks["coefficient_tuning/digits"].model_copy(update={"rungs": {3: 4}, "points": 6})
    shipped = known.model_copy(update={"tasks": {**known.tasks, "coefficient_tuning/digits": rungs}})
    assert plan().searches[0].rungs == {}
    monkeypatch.setattr(own_plan, "read_plan", lambda: shipped)
    (search,) = plan().searches
    assert (search.rungs, search.stretch, search.points) == ({3: 4}, 3, 6)


def test_loss_curve_is_the_share_that_has_fallen() -> None:
    """Zero at the start, one at a loss of zero, negative where the loss grows; test metrics do not matter."""
    history = pd.DataFrame({"tune_loss": [2.0, 1.0, 0.0, 3.0], "node_accuracy_mean": [0.9, 0.1, 0.1, 0.1]})
    np.testing.assert_allclose(compute_curve(history, "tune_loss"), [0, 0.5, 1, -0.5])
    np.testing.assert_allclose(compute_curve(-history, "tune_loss"), [0, -0.5, -1, 0.5])


def test_seed_of_the_experiment_is_not_searched() -> None:
    """Split, partition and start of the runs that use the presets are others than those of the trials."""
    seeds = plan().searches[0].plan.seeds
    assert (seeds.search, seeds.final, seeds.margin) == (8, 9, 10)


def test_given_parameters_are_kept_and_not_searched() -> None:
    """Of the algorithm that the experiment names; others have their defaults."""
    given = {"name": "c2dfb", "lam": 50.0, "gamma_in": 0.3, "compressor": {"name": "top_k", "ratio": 0.5}}
    c2dfb, sldbo = plan(["c2dfb", "sldbo"], algorithm=given).searches
    assert list(c2dfb.ranges) == ["eta_in", "eta_out", "gamma_out"]
    section = make_experiment(c2dfb, c2dfb.default_steps, 8).algorithm
    assert (section["lam"], section["gamma_in"], section["compressor"]["ratio"]) == (50.0, 0.3, 0.5)
    assert sldbo.given == {}


def test_algorithm_without_a_plan_is_searched_by_its_declared_steps(tmp_path: Path) -> None:
    """A plugin's step sizes around their defaults; weights up to 1 as consensus steps; whole numbers are kept."""
    (tmp_path / "own.py").write_text(PLUGIN)
    (search,) = plan(["own_descent"], plugins=[str(tmp_path / "own.py")]).searches
    assert search.ranges == {"step": (0.01, 9.0), "weight": (0.1, 1.0)}
    assert search.step_exponents == {"step": 1}
    assert search.enlarge_steps({"step": 0.1, "weight": 0.5}) == {"step": 0.15, "weight": 0.5}


def test_algorithm_without_step_sizes_is_refused(tmp_path: Path) -> None:
    """With a hint on how to declare them."""
    (tmp_path / "own.py").write_text(PLUGIN.replace(", schedule=True", ""))
    with pytest.raises(InputError, match="no step size"):
        plan(["own_descent"], plugins=[str(tmp_path / "own.py")])


def test_log_of_other_code_or_data_is_not_reused(tmp_path: Path) -> None:
    """The hash of a trial's setting depends on the plugin, the data and the parameters that are given."""
    hashes = set()
    for text in (PLUGIN, PLUGIN.replace("mixed - cfg", "mixed - 2 * cfg")):
        (tmp_path / "own.py").write_text(text)
        for changes in ({}, {"task": {"name": "coefficient_tuning", "test_fraction": 0.3}},
                        {"algorithm": {"name": "own_descent", "steps": 3}}):
            changed = {"plugins": [str(tmp_path / "own.py")], **changes}
            hashes.add(hash_setting(plan(["own_descent"], **changed).searches[0]))
    assert len(hashes) == 6


def test_preset_records_how_it_was_found(tmp_path: Path) -> None:
    """Values, horizon, score, data and command; other entries stay, and an experiment can name the file."""
    file = tmp_path / "own.yaml"
    file.write_text("mdbo: {elsewhere: {values: {eta: 0.5}}}\n")
    found = plan()
    (search,) = found.searches
    (result,) = [result for result in run_search(search, TrialRunner()) if result is not None]
    own_plan.write_preset(file, result, "dbo tune …")
    content = presets.read_file(file)
    entry = content["sldbo"]["coefficient_tuning/digits"]
    assert content["mdbo"] == {"elsewhere": {"values": {"eta": 0.5}}}
    assert entry["values"] == result.chosen.values
    assert entry["horizon"]["oracle_calls"] == 60
    assert entry["score"]["metric"] == "psi_tune_loss"
    assert entry["data"] == {"sha256": found.data_digest, "seeds": [8, 9], "tune_fraction": 0.3}
    used = Experiment(**DIGITS, algorithm={"name": "sldbo"}, presets=str(file)).algorithm
    assert result.chosen.values.items() <= used.items()


@pytest.mark.parametrize("text", ["upper", "upper=1", "upper=2:1", "upper=0:1", "upper=a:b", "upper=1:inf"])
def test_wrong_range_is_refused(text: str) -> None:
    """One line that names the option."""
    with pytest.raises(InputError, match="--range"):
        own_plan.parse_ranges([text])


def test_budget_below_a_round_is_refused() -> None:
    """The error names the smallest one."""
    (search,) = own_plan.plan_searches(Experiment(**DIGITS), ["c2dfb"], 4, 10).searches
    with pytest.raises(InputError, match=r"--budget: 10 .* one round of c2dfb"):
        TrialRunner().run(search, search.default_steps, 8)
