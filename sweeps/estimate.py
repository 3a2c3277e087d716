"""What a sweep will take, before it starts: two rounds of its cells, as many as can be tried in a few seconds."""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from dbo.platform.engine import Work
from dbo.platform.evaluation import evaluate
from dbo.platform.experiment import Experiment
from dbo.platform.local import Local
from dbo.platform.oracles import pooled
from dbo.platform.run import Prepared, prepare
from dbo.platform.topology import single_node
from dbo.sweeps.cells import Cell

_BUDGET = 3.0           # seconds for trying cells
_START = 1.0            # seconds until a cell's first round


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of one cell, or the mean of several."""

    seconds: float
    bytes_links: float


def estimate(cells: Sequence[Cell], budget: float = _BUDGET) -> dict[str, Estimate]:
    """By the cells' names; those that were not tried are taken to be like the others on average."""
    deadline = time.monotonic() + budget
    found: dict[str, Estimate] = {}
    problems: dict[str, Prepared] = {}
    for cell in _spread(cells):
        with suppress(Exception):       # what fails here will fail as a cell, and be told there
            found[cell.name] = _tried(cell.experiment, problems)
        if time.monotonic() > deadline:
            break
    if not found:
        return {}
    usual = Estimate(fmean(e.seconds for e in found.values()), fmean(e.bytes_links for e in found.values()))
    return {cell.name: found.get(cell.name, usual) for cell in cells}


def _spread(cells: Sequence[Cell]) -> list[Cell]:
    """All of them, in an order in which the first few are from all over the sweep."""
    step = max(1, int(len(cells) * 0.382))
    return [cells[number] for start in range(step) for number in range(start, len(cells), step)]


def _tried(experiment: Experiment, problems: dict[str, Prepared]) -> Estimate:
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
    engine = Local(threads=1).start(Work(parts.algorithm, parts.config, problem, graph, settings))
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
    rounds = experiment.rounds
    evaluations = 1 + rounds // experiment.eval_every
    return Estimate(
        _START + rounds * (middle - begin) + evaluations * (end - middle), first + (rounds - 1) * (second - first)
    )


def volume(count: float) -> str:
    """12.3 MB"""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def recorded(summary: dict[str, Any]) -> float:
    """Seconds that a finished cell took."""
    clocks = summary.get("seconds", {})
    return float(clocks.get("training", 0.0)) + float(clocks.get("evaluation", 0.0)) + _START
