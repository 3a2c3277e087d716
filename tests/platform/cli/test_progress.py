"""The progress display: curves in one line of text, and as many columns as the screen can show."""

import io
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from dbo.platform.cli.progress import Curve, ProgressDisplay, sparkline
from dbo.platform.config.experiment import Experiment


def record(round_: int, **changes: Any) -> dict[str, Any]:
    return {
        "round": round_, "test_accuracy": 1 - 1 / (1 + round_ / 500), "node_accuracy_mean": 0.5, "upper_loss": 1.0,
        "comm_mb": 3.3 * round_, "consensus_x": 10 ** (-round_ / 1000), "seconds": 1.0, **changes,
    }


def render(width: int, experiment: Experiment, records: list[dict[str, Any]]) -> str:
    """Return what a screen of this width shows after these evaluations."""
    screen = io.StringIO()
    console = Console(width=width, force_terminal=True, color_system=None, file=screen)
    display = ProgressDisplay(console)
    display.on_start(experiment, 0)
    for line in records:
        display.on_evaluation(line)
    console.print(display.progress.make_tasks_table(display.progress.tasks))
    return screen.getvalue().rstrip("\n")


def test_sparkline_goes_from_lowest_to_highest() -> None:
    """Values are heights between the lowest and the highest; a long curve is thinned and keeps its last value."""
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline(range(1000), width=4) == "▁▃▆█"
    assert sparkline([0.0] * 999 + [1.0], width=5) == "▁▁▁▁█"
    assert sparkline([]) == ""


def test_sparkline_on_a_logarithmic_scale() -> None:
    """A geometric decrease is a straight line; zeros and values that are not finite are skipped."""
    assert sparkline([1e-2, 1e-4, 1e-6, 1e-8, 1e-10, 1e-12, 1e-14, 1e-16], log=True) == "█▇▆▅▄▃▂▁"
    assert sparkline([0.0, 1.0, math.nan, 10.0, math.inf], log=True) == "▁█"
    assert sparkline([0.0, 0.0], log=True) == ""


def test_a_curve_of_a_long_run_stays_small() -> None:
    """It keeps a bounded number of values, the first and the newest among them."""
    curve = Curve(size=16)
    for round_ in range(10_001):
        curve.add(round_, float(round_))
    assert len(curve.values) <= 18
    assert curve.values == sorted(curve.values)
    assert (curve.values[0], curve.values[-1]) == (0.0, 10_000.0)


def test_a_curve_follows_a_rollback() -> None:
    """Rounds that are replayed after a rollback replace the previous values."""
    curve = Curve()
    for round_, value in ((0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (2, 5.0)):
        curve.add(round_, value)
    assert curve.values == [0.0, 1.0, 5.0]


@pytest.mark.parametrize(("width", "present", "absent"), [
    (160, ("━", "rounds", "MB", "▁▄▅▆▇▇▇███", "█▇▆▆▅▄▃▃▂▁"), ()),
    (100, ("MB", "▁▄▅▆▇▇▇███", "█▇▆▆▅▄▃▃▂▁"), ("━", "rounds")),
    (80, ("4320/5000", "accuracy 0.896 ▁▄▅▆▇▇▇███", "consensus 5e-05 █▇▆▆▅▄▃▃▂▁"), ("━", "MB")),
    (60, ("4320/5000", "accuracy 0.896 ▁▄▅▆▇▇▇███"), ("consensus",)),
    (40, ("4320/5000", "accuracy 0.896"), ("▁", "consensus")),
])
def test_a_narrow_screen_drops_columns(
    tiny: Callable[..., Experiment], width: int, present: tuple[str, ...], absent: tuple[str, ...]
) -> None:
    """The display is one line that fits; the least important columns are dropped first."""
    experiment = tiny(rounds=5000, algorithm={"name": "c2dfb_nc"})
    text = render(width, experiment, [record(r) for r in range(0, 4321, 10)])
    assert len(text.splitlines()) == 1
    assert len(text) <= width
    assert all(part in text for part in present)
    assert not any(part in text for part in absent)


def test_columns_do_not_change_during_a_run(tiny: Callable[..., Experiment]) -> None:
    """A column that would not fit later is not shown at the start either."""
    start, end = (render(80, tiny(), [record(r) for r in range(upto)]) for upto in (1, 7))
    assert "━" not in start + end
    assert "▁" in end
    assert ("MB" in start) == ("MB" in end)


def test_a_task_without_accuracy_shows_its_loss(tiny: Callable[..., Experiment]) -> None:
    """Without an accuracy, the display shows the upper loss and its curve."""
    lines = [record(r, test_accuracy=None, upper_loss=1 / (1 + r)) for r in range(6)]
    text = render(120, tiny(), lines)
    assert "upper loss 0.1667" in text
    assert "█▄▂▂▁▁" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_names_and_reasons_cannot_control_the_terminal(tiny: Callable[..., Experiment], terminal: bool) -> None:
    """Control characters in a name, a notice or an error are escaped, and brackets are no markup."""
    screen = io.StringIO()
    console = Console(width=160, force_terminal=terminal, color_system=None, file=screen)
    display, name = ProgressDisplay(console), "\x1b[31mred\x07 [bold]x"
    experiment = SimpleNamespace(title=name, rounds=1, nodes=2)
    display.on_start(experiment, 0)     # type: ignore[arg-type]
    display.on_evaluation(record(1))
    display.on_notice(name)
    display.on_end(SimpleNamespace(status="diverged", summary={"error": name}))       # type: ignore[arg-type]
    console.print(display.progress.make_tasks_table(display.progress.tasks))
    assert "\x1b" not in screen.getvalue()
    assert screen.getvalue().count(r"\x1b[31mred\x07 [bold]x") == (4 if terminal else 6)


def test_the_bar_is_shown_without_curves(tiny: Callable[..., Experiment]) -> None:
    """Before the first evaluation, and with a consensus error of zero, there is a bar but no curve."""
    assert "0/6" in render(80, tiny(), [])
    assert "consensus 0e+00" in render(120, tiny(), [record(0, consensus_x=0.0)])
