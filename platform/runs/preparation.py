"""Prepare a run: build the problem and the network that an experiment describes, and choose the folder."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dbo.algorithms.api import Algorithm
from dbo.platform.config.experiment import COMPRESSOR_KEYS, Experiment
from dbo.platform.config.models import load_start
from dbo.platform.config.plugins import locate_error
from dbo.platform.engine.factory import check_request
from dbo.platform.engine.shard_wrappers import start_at
from dbo.platform.errors import InputError
from dbo.platform.network.topology import Network, build_graph, build_network, server_network
from dbo.platform.runs.remote import RemoteFolder, is_url
from dbo.platform.runs.schema import CLOSED_FORMS, METRICS
from dbo.platform.runs.stop_rule import StopRule
from dbo.tasks.api import Problem, Setup


@dataclass(frozen=True, slots=True)
class Prepared:
    """The problem with its data, and the network."""

    problem: Problem
    network: Network

    def fit(self, algorithm: Algorithm) -> "Prepared":
        """Return the same problem with the network that the algorithm runs on: its own for a method with a server."""
        is_star = algorithm.network == "star" and self.network.server is None
        return replace(self, network=server_network(self.problem.nodes)) if is_star else self

    @property
    def data_digest(self) -> str | None:
        """The SHA-256 of the data; None for tasks without data."""
        return self.problem.describe().get("data_sha256")


def prepare(experiment: Experiment, problem: Problem | None = None) -> Prepared:
    """Load and partition the data and draw the graph; wrong combinations are input errors."""
    parts = experiment.parts
    _check_metrics(parts.task.directions)
    StopRule.of(experiment)
    check_request(parts.engine, experiment.nodes)
    try:
        graph = build_graph(parts.topology, experiment.nodes, experiment.seed)
        problem = problem or parts.task.build(Setup(
            nodes=experiment.nodes, seed=experiment.seed, dtype=experiment.dtype, partition=parts.partition,
            data=parts.data, data_dir=experiment.data_dir, tune_fraction=experiment.tune_fraction,
        ))
        if experiment.start is not None:
            problem = start_at(problem, *_read_start(experiment, experiment.start))
        if not parts.batches.is_full:
            parts.batches.check(*problem.sample_sizes())
        check_compressors(experiment, problem.dim_x, problem.dim_y)
        return Prepared(problem, build_network(graph))
    except InputError:
        raise
    except Exception as error:
        at = locate_error(error)
        if not isinstance(error, ValueError) and not at:
            raise
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise InputError(f"{reason} ({at})" if at else reason) from error


def check_compressors(experiment: Experiment, dim_x: int, dim_y: int) -> None:
    """Refuse a compressor that cannot take the rows of the problem, before anything is written."""
    config = experiment.parts.config
    for key in COMPRESSOR_KEYS:
        if (compressor := getattr(config, key, None)) is None:
            continue
        level, dim = ("x", dim_x) if key == "compressor_x" else ("y", dim_y)
        try:
            compressor.contraction(dim)
        except ValueError as error:
            joint = "." if str(error).partition(":")[0] in {field.name for field in fields(compressor)} else ": "
            raise InputError(f"algorithm.{key}{joint}{error} of {level}") from None


def _check_metrics(directions: Mapping[str, Any]) -> None:
    """Refuse metrics of a task that would replace a column of ours, or that no target could name."""
    for name in directions:
        if name in METRICS and name not in ("test_accuracy", "test_loss", *CLOSED_FORMS):
            raise InputError(f"task: directions has {name!r}, which is a metric of dbo; choose another name")
        if not str(name).isidentifier():
            raise InputError(f"task: directions has {str(name)!r}; a metric's name has letters, digits and _ only")


def _read_start(experiment: Experiment, file: str) -> tuple[NDArray[Any], NDArray[Any]]:
    arrays = load_start(file)
    try:
        return experiment.parts.task.read_model(experiment.seed, arrays)
    except ValueError as error:
        raise InputError(f"start: {file} {error}") from None


def default_folder(experiment: Experiment) -> Path:
    """Return runs/<name>-<start of the run key>."""
    slug = "".join(c if c.isalnum() or c in "._-" else "-" for c in experiment.name).strip(".-") or "run"
    return Path("runs") / f"{slug}-{experiment.run_key[:8]}"


def local_folder(experiment: Experiment, out: str | Path | None) -> Path:
    """Return the folder on this machine that holds the run's files while it runs."""
    if out is not None and is_url(out):
        return RemoteFolder(str(out)).local
    return Path(out) if out is not None else default_folder(experiment)
