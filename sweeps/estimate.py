"""What a sweep will take, before it starts: two rounds of its cells, as many as can be tried in a few seconds."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from dbo.platform.config.engines import LocalSettings
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.base import Work
from dbo.platform.engine.evaluation import evaluate
from dbo.platform.engine.factory import start_engine
from dbo.platform.engine.shard_wrappers import pooled
from dbo.platform.network.topology import single_node
from dbo.platform.runs.runner import Prepared, prepare
from dbo.sweeps.grid import Cell

_BUDGET = 3.0           # seconds for trying cells
_START = 1.0            # seconds until a cell's first round


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of one cell."""

    seconds: float
    bytes_links: float


@dataclass(frozen=True, slots=True)
class _Pace:
    """What was seen of a cell: of a round, of an evaluation, and of the first packets if they differ."""

    algorithm: str
    packets: int            # per round: what a round takes grows with them, whichever field decides about them
    seconds: float
    bytes_links: float
    evaluation: float
    start: float            # bytes of the first round that the next one does not have

    def of(self, experiment: Experiment) -> Estimate:
        rounds, share = experiment.rounds, _packets(experiment) / self.packets
        evaluations = 1 + rounds // experiment.eval_every
        return Estimate(
            _START + rounds * share * self.seconds + evaluations * self.evaluation,
            share * (self.start + rounds * self.bytes_links),
        )


def estimate(cells: Sequence[Cell], budget: float = _BUDGET) -> dict[str, Estimate]:
    """By the cells' names; those that were not tried are reckoned from the others, of their algorithm if there are."""
    deadline: float | None = None
    paces: dict[str, _Pace] = {}
    problems: dict[str, Prepared] = {}
    for cell in _spread(cells):
        with suppress(Exception):       # what fails here will fail as a cell, and be told there
            paces[cell.name] = _tried(cell.experiment, problems)
        deadline = deadline or time.monotonic() + budget        # the first one also loads the data
        if time.monotonic() > deadline:
            break
    found: dict[str, Estimate] = {}
    for cell in cells if paces else ():
        with suppress(Exception):
            found[cell.name] = _reckoned(cell, paces)
    return found


def _reckoned(cell: Cell, paces: Mapping[str, _Pace]) -> Estimate:
    if cell.name in paces:
        return paces[cell.name].of(cell.experiment)
    alike = [pace for pace in paces.values() if pace.algorithm == cell.experiment.algorithm["name"]]
    found = [pace.of(cell.experiment) for pace in alike or paces.values()]
    return Estimate(fmean(e.seconds for e in found), fmean(e.bytes_links for e in found))


def _packets(experiment: Experiment) -> int:
    return max(1, experiment.parts.algorithm.packets(experiment.parts.config))


def _spread(cells: Sequence[Cell]) -> list[Cell]:
    """All of them, in an order in which the first few are from all over the sweep."""
    step = max(1, int(len(cells) * 0.382))
    return [cells[number] for start in range(step) for number in range(start, len(cells), step)]


def _tried(experiment: Experiment, problems: dict[str, Prepared]) -> _Pace:
    """One round to warm up, one with a clock."""
    settings = experiment.resolved()
    key = json.dumps([settings[k] for k in ("task", "nodes", "seed", "dtype", "partition", "topology")])
    if key not in problems:
        problems.clear()
        problems[key] = prepare(experiment)
    prepared, parts = problems[key], experiment.parts
    problem, graph = prepared.problem, prepared.network
    if parts.algorithm.single_machine:
        problem, graph = pooled(problem), single_node()
    engine = start_engine(LocalSettings(threads=1), Work(parts.algorithm, parts.config, problem, graph, settings))
    try:
        engine.advance(1)
        first = engine.ledger().bytes_links
        begin = time.perf_counter()
        engine.advance(2)
        middle = time.perf_counter()
        evaluate(engine, problem, parts.config, parts.algorithm.paper_counts)
        end = time.perf_counter()
        second = engine.ledger().bytes_links
    finally:
        engine.close()
    return _Pace(
        algorithm=parts.algorithm.name, packets=_packets(experiment), seconds=middle - begin,
        bytes_links=second - first, evaluation=end - middle, start=2 * first - second,
    )


def volume(count: float) -> str:
    """12.3 MB"""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def recorded(summary: dict[str, Any]) -> float:
    """Seconds that a finished cell took."""
    clocks = summary.get("seconds", {})
    return float(clocks.get("training", 0.0)) + float(clocks.get("evaluation", 0.0)) + _START
