"""Estimate how much disk space a run takes, while it runs and when it has finished."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.arrangement import arrange
from dbo.platform.engine.block import describe_network, init_state
from dbo.platform.engine.evaluation import MAX_RECORDED
from dbo.platform.engine.shard_wrappers import CountingShard
from dbo.platform.engine.state_tree import flatten
from dbo.platform.runs.checkpoints import KEPT
from dbo.platform.runs.preparation import Prepared

LARGE = 500_000_000         # bytes; a smaller run starts without a word about the disk
_MOST_VECTORS = 40          # more rows of the size of x and y than any method keeps per node
_LINE_BYTES = 1_500         # of metrics.jsonl per evaluation
_NODE_BYTES, _RECORDED_BYTES = 4, 50        # of nodes.jsonl per evaluation: of every node, of a recorded one


@dataclass(frozen=True, slots=True)
class DiskSize:
    """Bytes of a run folder."""

    while_running: int          # at most
    finished: int
    results: int                # without checkpoints

    def __str__(self) -> str:
        parts = [f"about {format_bytes(self.while_running)} while it runs"]
        if self.finished != self.results:
            parts.append(f"{format_bytes(self.finished)} when it has finished")
        parts.append(f"{format_bytes(self.results)} without checkpoints (keep_checkpoints=0, or dbo clean)")
        return ", ".join(parts)


def estimate_disk(experiment: Experiment, prepared: Prepared) -> DiskSize:
    """Build the state of one node and extrapolate to all nodes, checkpoints and evaluations."""
    parts = experiment.parts
    problem, graph = arrange(parts.algorithm, prepared.problem, prepared.network)
    shard = CountingShard(problem.shard(range(1)), parts.batches, network=describe_network(graph))
    state = init_state(parts.algorithm, shard, parts.config)
    row = sum(int(array.nbytes) for array in flatten(state).values())
    final = sum(int(getattr(state, name).nbytes) for name in ("x", "y", "z") if hasattr(state, name))
    final_rows = 1 if parts.algorithm.network == "star" else problem.nodes          # only the server's are kept
    return _add_up(experiment, problem.nodes, problem.nodes * row, final_rows * final)


def describe_large_run(experiment: Experiment, prepared: Prepared, folder: Path) -> str | None:
    """Return what a large run takes on the disk, and whether the disk has enough space; None for a small one."""
    problem = prepared.problem
    rows = problem.nodes * (problem.dim_x + problem.dim_y) * np.dtype(experiment.dtype).itemsize
    if _add_up(experiment, problem.nodes, _MOST_VECTORS * rows, 3 * rows).while_running < LARGE:
        return None             # without building a state, which takes time
    size = estimate_disk(experiment, prepared)
    if size.while_running < LARGE:
        return None
    free = shutil.disk_usage(next(place for place in (folder, *folder.absolute().parents) if place.exists())).free
    warning = f"; only {format_bytes(free)} are free" if free < size.while_running else ""
    return f"disk: {size}{warning}"


def _add_up(experiment: Experiment, nodes: int, checkpoint: int, final: int) -> DiskSize:
    """Return the sizes of a run folder from those of a checkpoint and of the final state."""
    evaluations = 1 + experiment.rounds // experiment.eval_every
    lines = evaluations * (_LINE_BYTES + nodes * _NODE_BYTES + min(nodes, MAX_RECORDED) * _RECORDED_BYTES)
    saved = -(-experiment.rounds // experiment.checkpoint_every)
    most = min(saved, max(KEPT, experiment.keep_checkpoints) + 1)         # one more while it is written
    results = final + lines
    return DiskSize(
        results + most * checkpoint, results + min(saved, experiment.keep_checkpoints) * checkpoint, results)


def format_bytes(count: float) -> str:
    """Return a text such as `12.3 MB`."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
