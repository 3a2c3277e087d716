"""Schedules of step sizes: the numbers that they state, their ranges, and where they are allowed."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from dbo.platform.config.experiment import Experiment
from dbo.platform.config.schedules import Cosine, InverseSqrt, Piecewise, Schedules
from dbo.platform.errors import InputError
from dbo.platform.runs.runner import run

Tiny = Callable[..., Experiment]


def test_inverse_square_root() -> None:
    schedule = InverseSqrt(value=2.0, rounds=3)
    assert [schedule.at(t) for t in (0, 3, 9)] == pytest.approx([2.0, 2.0 / math.sqrt(2), 1.0])


def test_cosine_goes_from_value_to_end_and_stays() -> None:
    schedule = Cosine(value=1.0, end=0.2, rounds=10)
    assert [schedule.at(t) for t in (0, 5, 10, 99)] == pytest.approx([1.0, 0.6, 0.2, 0.2])


def test_piecewise_changes_after_the_given_rounds() -> None:
    schedule = Piecewise(value=1.0, after=(2, 5), values=(0.5, 0.1))
    assert [schedule.at(t) for t in range(7)] == [1.0, 1.0, 0.5, 0.5, 0.5, 0.1, 0.1]


def cosine(**changes: Any) -> dict[str, Any]:
    return {"schedule": "cosine", "value": 0.5, "end": 0.1, "rounds": 4, **changes}


def test_rounds_get_their_numbers(tiny: Tiny) -> None:
    """Round t sees the schedule after t − 1 rounds; the rest of the configuration stays."""
    parts = tiny(algorithm={"name": "c2dfb", "eta_out": cosine()}).parts
    found = [parts.schedules.apply(parts.config, round_) for round_ in (0, 1, 5)]
    assert [config.eta_out for config in found] == pytest.approx([0.5, 0.5, 0.1])      # type: ignore[attr-defined]
    assert {config.lam for config in found} == {parts.config.lam}                      # type: ignore[attr-defined]
    assert Schedules().apply(parts.config, 3) is parts.config


def test_a_constant_schedule_is_the_number(tiny: Tiny) -> None:
    """It gives the same bits; another number does not."""
    states = [
        run(tiny(algorithm={"name": "c2dfb", "eta_in": eta})).state["y"]
        for eta in (0.2, {"schedule": "constant", "value": 0.2}, {"schedule": "inverse_sqrt", "value": 0.2})
    ]
    assert (states[0] == states[1]).all()
    assert (states[0] != states[2]).any()


def test_the_schedule_is_resolved_and_part_of_the_key(tiny: Tiny) -> None:
    """A resolved experiment resolves to itself, and another end is another run."""
    first, other = (tiny(algorithm={"name": "c2dfb", "eta_in": cosine(end=end)}) for end in (0.1, 0.2))
    assert first.algorithm["eta_in"] == cosine()
    assert Experiment(**first.to_dict()).run_key == first.run_key != other.run_key


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (cosine(schedule="linear"), "algorithm.eta_in.schedule: unknown value 'linear'"),
        (cosine(end=0.0), "algorithm.eta_in: 0 in its schedule is not allowed; must be > 0"),
        (cosine(rounds=0), "algorithm.eta_in.rounds: 0 is not allowed; must be ≥ 1"),
        ({"schedule": "cosine", "value": 1.0, "rounds": 3}, "algorithm.eta_in.end: a value is required"),
        ({"schedule": "piecewise", "value": 1.0, "after": [5, 2], "values": [0.1, 0.2]}, "must ascend"),
    ],
)
def test_wrong_schedules_are_one_line(tiny: Tiny, value: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        tiny(algorithm={"name": "c2dfb", "eta_in": value})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_step_sizes_have_schedules(tiny: Tiny) -> None:
    with pytest.raises(InputError, match=r"algorithm.lam: a schedule is not allowed here; step sizes .*eta_in"):
        tiny(algorithm={"name": "c2dfb", "lam": cosine()})
