"""Measure variants in turn, several times, and judge ratios only.

A busy machine slows variants that run at different moments by different amounts. So every repeat runs all variants one
after the other, and the least disturbed repeats are compared. The ratio of the medians, printed beside it, shows how
quiet the machine was.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

Timed = Callable[[], float]    # runs a variant once and returns the seconds of one round


@dataclass(frozen=True, slots=True)
class Times:
    """The seconds of one variant, one number per repeat."""

    seconds: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def middle(self) -> float:
        return median(self.seconds)

    def __str__(self) -> str:
        return f"{self.best * 1e3:9.2f} ms   median {self.middle * 1e3:9.2f} ms"


def time_rounds(advance: Callable[[], None], rounds: int) -> Timed:
    """Return a function that calls `advance` so many times without a pause and returns the seconds of one call."""

    def timed() -> float:
        start = time.perf_counter()
        for _ in range(rounds):
            advance()
        return (time.perf_counter() - start) / rounds

    return timed


def run_in_turn(variants: Mapping[str, Timed], repeats: int, warm_up: int = 1) -> dict[str, Times]:
    """Run all variants a few times to warm up, then measure them in turn."""
    for timed in list(variants.values()) * warm_up:
        timed()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, timed in variants.items():
            seconds[name].append(timed())
    return {name: Times(tuple(found)) for name, found in seconds.items()}


def show(times: Mapping[str, Times]) -> None:
    """Print one line per variant."""
    for name, found in times.items():
        print(f"  {name:<44}{found}", flush=True)


def judge(what: str, above: Times, below: Times, *, most: float | None = None, least: float | None = None) -> None:
    """Print the ratio above : below, its target, and whether it is met."""
    ratio, middle = above.best / below.best, above.middle / below.middle
    if most is not None:
        target, met = f"at most {most:g}×", ratio <= most
    else:
        assert least is not None
        target, met = f"at least {least:g}×", ratio >= least
    verdict = "met" if met else "MISSED"
    print(f"  {what}: {ratio:.2f}× (of medians {middle:.2f}×), target {target}: {verdict}", flush=True)


def judge_number(what: str, value: float, *, most: float, unit: str = "×") -> None:
    """Print a number that is not a ratio of times, its target, and whether it is met."""
    verdict = "met" if value <= most else "MISSED"
    print(f"  {what}: {value:.3f}{unit}, target at most {most:g}{unit}: {verdict}", flush=True)
