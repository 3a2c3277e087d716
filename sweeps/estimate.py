"""Estimate time and traffic of a sweep before it starts, from two rounds of as many cells as fit into a few seconds."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from statistics import fmean

from dbo.platform.config.engines import LocalSettings
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.arrangement import arrange
from dbo.platform.engine.base import RunSpec
from dbo.platform.engine.evaluation import evaluate
from dbo.platform.engine.factory import start_engine
from dbo.platform.runs.disk_size import estimate_disk
from dbo.platform.runs.runner import Prepared, prepare
from dbo.platform.runs.schema import Summary
from dbo.sweeps.grid import SweepCell

_TIME_LIMIT = 3.0           # seconds for measuring cells
_STARTUP_SECONDS = 1.0      # until a cell's first round


@dataclass(frozen=True, slots=True)
class CellEstimate:
    """What one cell will take."""

    seconds: float
    bytes_links: float
    bytes_disk: float = 0.0         # of its folder when it has finished


@dataclass(frozen=True, slots=True)
class Measurement:
    """Two rounds and an evaluation of one experiment, on one core."""

    algorithm: str
    packets: int                # per node and round: time and bytes of a round grow with them
    round_seconds: float
    round_bytes: float
    evaluation_seconds: float
    startup_bytes: float        # what the first round sends more than the next one
    disk_bytes: float = 0.0

    def extrapolate(self, experiment: Experiment) -> CellEstimate:
        """Estimate a cell of the same or a similar experiment, which may send more or fewer packets per round."""
        rounds, share = experiment.rounds, (_count_declared_packets(experiment) or self.packets) / self.packets
        evaluations = 1 + rounds // experiment.eval_every
        return CellEstimate(
            _STARTUP_SECONDS + rounds * share * self.round_seconds + evaluations * self.evaluation_seconds,
            share * (self.startup_bytes + rounds * self.round_bytes),
            self.disk_bytes,
        )


def estimate_cells(cells: Sequence[SweepCell], time_limit: float = _TIME_LIMIT) -> dict[str, CellEstimate]:
    """Return estimates by the cells' names. Cells that were not measured follow from others of their algorithm."""
    deadline: float | None = None
    measured: dict[str, Measurement] = {}
    problems: dict[str, Prepared] = {}
    for cell in _spread_out(cells):
        with suppress(Exception):       # the same error will end the cell, and be reported there
            measured[cell.name] = measure_experiment(cell.experiment, _prepare_once(cell.experiment, problems))
        deadline = deadline or time.monotonic() + time_limit        # the first one also loads the data
        if time.monotonic() > deadline:
            break
    found: dict[str, CellEstimate] = {}
    for cell in cells if measured else ():
        with suppress(Exception):
            found[cell.name] = _estimate_cell(cell, measured)
    return found


def _estimate_cell(cell: SweepCell, measured: Mapping[str, Measurement]) -> CellEstimate:
    if cell.name in measured:
        return measured[cell.name].extrapolate(cell.experiment)
    similar = [one for one in measured.values() if one.algorithm == cell.experiment.algorithm["name"]]
    found = [one.extrapolate(cell.experiment) for one in similar or measured.values()]
    return CellEstimate(*(fmean(values) for values in zip(*map(astuple, found), strict=True)))


def _count_declared_packets(experiment: Experiment) -> int | None:
    """Return the packets per node and round that the algorithm declares; None: it declares none."""
    packets = experiment.parts.algorithm.packets
    return None if packets is None else max(1, packets(experiment.parts.config))


def _spread_out(cells: Sequence[SweepCell]) -> list[SweepCell]:
    """Return all cells in an order whose first few come from all over the sweep."""
    step = max(1, int(len(cells) * 0.382))
    return [cells[number] for start in range(step) for number in range(start, len(cells), step)]


def _prepare_once(experiment: Experiment, problems: dict[str, Prepared]) -> Prepared:
    """Return the problem of an experiment; the previous one if it is the same."""
    settings = experiment.to_dict()
    key = json.dumps([settings[k] for k in ("task", "nodes", "seed", "dtype", "partition", "topology")])
    if key not in problems:
        problems.clear()
        problems[key] = prepare(experiment)
    return problems[key]


def measure_experiment(experiment: Experiment, prepared: Prepared) -> Measurement:
    """Run one round to warm up and one with a clock, in this process."""
    parts, settings = experiment.parts, experiment.to_dict()
    problem, graph = arrange(parts.algorithm, prepared.problem, prepared.network)
    engine = start_engine(LocalSettings(threads=1), RunSpec(
        parts.algorithm, parts.config, problem, graph, settings, batches=parts.batches, schedules=parts.schedules))
    try:
        engine.advance(1)
        first = engine.ledger()
        first_bytes, first_packets = first.bytes_links, int(first.packets.max())
        begin = time.perf_counter()
        engine.advance(2)
        middle = time.perf_counter()
        evaluate(engine, problem, parts.algorithm, parts.config)
        end = time.perf_counter()
        second = engine.ledger()
        round_bytes, round_packets = second.bytes_links - first_bytes, int(second.packets.max()) - first_packets
    finally:
        engine.close()
    return Measurement(
        algorithm=parts.algorithm.name, packets=max(1, round_packets), round_seconds=middle - begin,
        round_bytes=round_bytes, evaluation_seconds=end - middle, startup_bytes=first_bytes - round_bytes,
        disk_bytes=estimate_disk(experiment, prepared).finished,
    )


def read_seconds(summary: Summary) -> float:
    """Return how long a finished cell took."""
    return summary.seconds.get("training", 0.0) + summary.seconds.get("evaluation", 0.0) + _STARTUP_SECONDS
