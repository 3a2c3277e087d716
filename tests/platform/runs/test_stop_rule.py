"""`until`: a run ends at the first evaluation at which its rule holds, resumed or not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.runs.run_folder import read_summary
from dbo.platform.runs.runner import prepare, run
from dbo.platform.runs.schema import Target
from dbo.platform.runs.stop_rule import StopRule

Tiny = Callable[..., Experiment]
QUICK: dict[str, Any] = {"rounds": 30, "psi_every": None}


def test_a_run_ends_where_the_target_is_reached(tiny: Tiny, tmp_path: Path) -> None:
    whole = run(tiny(**QUICK), tmp_path / "whole").history
    level = float(whole["solution_error"].iloc[9]) * 1.0000001
    first = next(int(row["round"]) for row in whole.to_dict("records")[1:] if row["solution_error"] <= level)
    result = run(tiny(**QUICK, until={"target": f"solution_error={level!r}"}), tmp_path / "until")
    assert result.status == "finished"
    assert result.history["round"].iloc[-1] == first < 30
    assert result.summary["ended_by"] == f"until target solution_error={level:g}"
    assert result.summary["rounds"] == first
    assert result.history["solution_error"].tolist() == whole["solution_error"].tolist()[: first + 1]


@pytest.mark.parametrize(("rule", "column"), [({"rounds": 7}, "round"), ({"bytes": 40_000}, "bytes_links")])
def test_a_run_ends_when_its_budget_is_spent(tiny: Tiny, tmp_path: Path, rule: dict[str, Any], column: str) -> None:
    history = run(tiny(**QUICK, eval_every=2, until=rule), tmp_path / "run").history
    (limit,) = rule.values()
    assert history[column].iloc[-1] >= limit > history[column].iloc[-2]


def test_oracle_calls_and_samples_end_a_run(tiny: Tiny, tmp_path: Path) -> None:
    """A product counts as two gradients; samples count what the calls have seen."""
    mdbo = {"name": "mdbo", "eta": 0.3, "beta_x": 0.7, "beta_y": 0.7, "alpha_x": 1.0, "alpha_y": 1.0, "lipschitz": 1.2}
    sampled = {"task": {"name": "quadratic", "dim_x": 3, "dim_y": 5, "noise": 0.3}, "batch_size": 4, "algorithm": mdbo}
    history = run(tiny(**QUICK, **sampled), tmp_path / "whole").history
    calls = history["gradient_calls"] + 2 * history["hvp_calls"] + 2 * history["jvp_calls"]
    for key, column in (("oracle_calls", calls), ("samples", history["samples"])):
        limit = int(column.iloc[4]) + 1
        ended = run(tiny(**QUICK, **sampled, until={key: limit}), tmp_path / key)
        assert ended.history["round"].iloc[-1] == 5
        assert ended.summary["ended_by"] == f"until {key} {limit:g}"


def test_the_run_key_of_an_older_rule_is_what_it_was(tiny: Tiny) -> None:
    """Keys of `until` that did not exist are no part of it, so runs with a rule can still be resumed."""
    identity = tiny(until={"rounds": 5})._identity["until"]
    assert identity == {"target": None, "rounds": 5, "bytes": None, "seconds": None}
    assert tiny(until={"samples": 5}).run_key != tiny(until={"samples": 6}).run_key


def test_seconds_end_a_run(tiny: Tiny, tmp_path: Path) -> None:
    result = run(tiny(**QUICK, until={"seconds": 1e-9}), tmp_path / "run")
    assert result.history["round"].iloc[-1] == 1
    assert result.summary["ended_by"] == "until seconds 1e-09"


def test_a_run_whose_rule_never_holds_ends_with_its_rounds(tiny: Tiny, tmp_path: Path) -> None:
    result = run(tiny(until={"target": "solution_error=1e-30", "bytes": 10**12}), tmp_path / "run")
    assert (result.summary["ended_by"], result.summary["rounds"]) == ("rounds 6", 6)


def test_psi_belongs_to_the_evaluation_that_ends_a_run(tiny: Tiny, tmp_path: Path) -> None:
    history = run(tiny(rounds=30, until={"rounds": 4}), tmp_path / "run").history
    assert history["psi"].notna().tolist() == [False] * 4 + [True]


class Interrupt(Exception):
    pass


def test_a_resumed_run_ends_at_the_same_round(
    tiny: Tiny, tmp_path: Path, same: Callable[[Path, Path], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = tiny(**QUICK, until={"rounds": 5})
    run(experiment, tmp_path / "straight")

    class StopAtThree:
        def on_start(self, experiment: Experiment, done: int) -> None: ...
        def on_notice(self, text: str) -> None: ...
        def on_end(self, result: object) -> None: ...
        def on_evaluation(self, record: dict[str, Any]) -> None:
            if record["round"] == 3:
                raise Interrupt

    with pytest.raises(Interrupt):
        run(experiment, tmp_path / "resumed", callback=StopAtThree())
    run(experiment, tmp_path / "resumed", resume=True)
    assert same(tmp_path / "straight", tmp_path / "resumed")


def test_a_run_that_has_ended_is_returned_as_it_is(tiny: Tiny, tmp_path: Path) -> None:
    experiment = tiny(**QUICK, until={"rounds": 5})
    run(experiment, tmp_path / "run")
    assert not run(experiment, tmp_path / "run", resume=True).is_new


def test_a_damaged_run_is_repaired_up_to_its_end(tiny: Tiny, tmp_path: Path) -> None:
    """The last checkpoint is that of the end: the repair must not train on."""
    experiment = tiny(**QUICK, until={"rounds": 5})
    before = run(experiment, tmp_path / "run").summary
    (tmp_path / "run" / "state.safetensors").unlink()
    run(experiment, tmp_path / "run", resume=True)
    summary = read_summary(tmp_path / "run")
    assert summary is not None
    assert (summary.rounds, summary.ended_by) == (5, before["ended_by"])


def test_a_run_that_ended_early_is_extended(tiny: Tiny, tmp_path: Path, same: Callable[[Path, Path], bool]) -> None:
    run(tiny(**QUICK, until={"rounds": 5}), tmp_path / "short")
    run(tiny(**QUICK, until={"rounds": 9}), tmp_path / "extended", start_from=tmp_path / "short")
    run(tiny(**QUICK, until={"rounds": 9}), tmp_path / "straight")
    assert same(tmp_path / "straight", tmp_path / "extended")


def test_a_run_is_not_extended_beyond_its_own_end(tiny: Tiny, tmp_path: Path) -> None:
    run(tiny(rounds=6, psi_every=None), tmp_path / "short")
    with pytest.raises(InputError, match=r"until: rounds 4 is not allowed; it holds at round 4 of"):
        run(tiny(**QUICK, until={"rounds": 4}), tmp_path / "longer", start_from=tmp_path / "short")


def test_a_folder_of_another_end_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    run(tiny(**QUICK, until={"rounds": 2}), tmp_path / "run")
    with pytest.raises(InputError, match=r"until: .* holds this experiment with another end"):
        run(tiny(**QUICK, until={"rounds": 3}), tmp_path / "run")


def test_the_rule_is_part_of_the_run_key(tiny: Tiny) -> None:
    plain, ruled, other = tiny(), tiny(until={"rounds": 3}), tiny(until={"rounds": 4})
    assert len({plain.run_key, ruled.run_key, other.run_key}) == 3
    assert plain.trajectory_key == ruled.trajectory_key


@pytest.mark.parametrize(("until", "message"), [
    ({"target": "test_acuracy=0.7"}, "until.target: 'test_acuracy=0.7' is not metric=level"),
    ({"target": "solution_error"}, "until.target: 'solution_error' is not metric=level"),
    ({"bytes": -1}, "until.bytes: -1 is not allowed"),
    ({"minutes": 3}, "until.minutes: "),
])
def test_a_wrong_rule_is_refused_in_one_line(tiny: Tiny, until: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        prepare(tiny(until=until))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_metric_of_the_task_can_be_the_target(tiny: Tiny) -> None:
    experiment = tiny(task={"name": "hyper_cleaning"}, until={"target": "corruption_f1=0.8"})
    assert StopRule.of(experiment).target == Target("corruption_f1", 0.8, "max")
