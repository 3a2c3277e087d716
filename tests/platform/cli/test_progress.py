"""The terminal's display: curves in one line of text, and as many columns as the screen has room for."""

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from dbo.platform.cli.progress import Bars, Curve, sparkline
from dbo.platform.config.experiment import Experiment


def record(round_: int, **changes: Any) -> dict[str, Any]:
    return {
        "round": round_, "test_accuracy": 1 - 1 / (1 + round_ / 500), "node_accuracy_mean": 0.5, "upper_loss": 1.0,
        "comm_mb": 3.3 * round_, "consensus_x": 10 ** (-round_ / 1000), "seconds": 1.0, **changes,
    }


def shown(width: int, experiment: Experiment, records: list[dict[str, Any]]) -> str:
    """What a screen of this width shows of a run at the end."""
    screen = io.StringIO()
    console = Console(width=width, force_terminal=True, color_system=None, file=screen)
    bars = Bars(console)
    bars.started(experiment, 0)
    for line in records:
        bars.evaluated(line)
    console.print(bars._progress.make_tasks_table(bars._progress.tasks))
    return screen.getvalue().rstrip("\n")


def test_sparkline_goes_from_lowest_to_highest() -> None:
    """Values are heights between the lowest and the highest; longer curves are thinned, the last value stays."""
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline(range(1000), width=4) == "▁▃▆█"
    assert sparkline([0.0] * 999 + [1.0], width=5) == "▁▁▁▁█"
    assert sparkline([]) == ""


def test_sparkline_of_logarithms() -> None:
    """A geometric fall is a straight line; zeros have no logarithm, and what is not finite no height."""
    assert sparkline([1e-2, 1e-4, 1e-6, 1e-8, 1e-10, 1e-12, 1e-14, 1e-16], log=True) == "█▇▆▅▄▃▂▁"
    assert sparkline([0.0, 1.0, math.nan, 10.0, math.inf], log=True) == "▁█"
    assert sparkline([0.0, 0.0], log=True) == ""


def test_a_curve_of_a_long_run_stays_small() -> None:
    """However many evaluations, a bounded number of values, the first and the newest among them."""
    curve = Curve(kept=16)
    for round_ in range(10_001):
        curve.add(round_, float(round_))
    assert len(curve.values) <= 18
    assert curve.values == sorted(curve.values)
    assert (curve.values[0], curve.values[-1]) == (0.0, 10_000.0)


def test_a_curve_goes_back_with_the_run() -> None:
    """Rounds that are replayed after a roll-back replace what was there."""
    curve = Curve()
    for round_, value in ((0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (2, 5.0)):
        curve.add(round_, value)
    assert curve.values == [0.0, 1.0, 5.0]


@pytest.mark.parametrize(("width", "there", "gone"), [
    (160, ("━", "rounds", "MB", "▁▄▅▆▇▇▇███", "█▇▆▆▅▄▃▃▂▁"), ()),
    (100, ("MB", "▁▄▅▆▇▇▇███", "█▇▆▆▅▄▃▃▂▁"), ("━", "rounds")),
    (80, ("4320/5000", "accuracy 0.896 ▁▄▅▆▇▇▇███", "apart 5e-05 █▇▆▆▅▄▃▃▂▁"), ("━", "MB")),
    (60, ("4320/5000", "accuracy 0.896 ▁▄▅▆▇▇▇███"), ("apart",)),
    (40, ("4320/5000", "accuracy 0.896"), ("▁", "apart")),
])
def test_columns_go_where_the_screen_is_narrow(
    tiny: Callable[..., Experiment], width: int, there: tuple[str, ...], gone: tuple[str, ...]
) -> None:
    """One line per run that fits, the least important columns left out first."""
    experiment = tiny(rounds=5000, algorithm={"name": "c2dfb_nc"})
    text = shown(width, experiment, [record(r) for r in range(0, 4321, 10)])
    assert len(text.splitlines()) == 1
    assert len(text) <= width
    assert all(part in text for part in there)
    assert not any(part in text for part in gone)


def test_columns_stay_as_they_are_while_a_run_goes_on(tiny: Callable[..., Experiment]) -> None:
    """What there is no room for later is not shown at first either."""
    start, end = (shown(80, tiny(), [record(r) for r in range(upto)]) for upto in (1, 7))
    assert "━" not in start + end
    assert "▁" in end
    assert ("MB" in start) == ("MB" in end)


def test_a_task_without_accuracy_shows_its_loss(tiny: Callable[..., Experiment]) -> None:
    """Where there is no accuracy, the upper loss and its curve."""
    lines = [record(r, test_accuracy=None, upper_loss=1 / (1 + r)) for r in range(6)]
    text = shown(120, tiny(), lines)
    assert "upper loss 0.1667" in text
    assert "█▄▂▂▁▁" in text


def test_before_the_first_evaluation_and_with_agreement_throughout(tiny: Callable[..., Experiment]) -> None:
    """No curve yet, and none of a consensus error that is zero: the bar is shown all the same."""
    assert "0/6" in shown(80, tiny(), [])
    assert "apart 0e+00" in shown(120, tiny(), [record(0, consensus_x=0.0)])
