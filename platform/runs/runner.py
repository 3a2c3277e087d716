"""One run from experiment to folder: prepare, advance, evaluate, checkpoint, and end in a state that can be told."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dbo.platform.config import yaml_io
from dbo.platform.runs.checkpoints import Checkpoint, Checkpoints
from dbo.platform.runs.resume import check_folder, lacks, other_data, shorter, status
from dbo.platform.engine.base import Engine, Work
from dbo.platform.engine.factory import start_engine, startup_notice
from dbo.platform.errors import BlocksLost, InputError, RunError
from dbo.platform.engine.evaluation import evaluate, unwell
from dbo.platform.config.experiment import Experiment
from dbo.platform.runs.atomic_io import write_atomically
from dbo.platform.engine.block import begun
from dbo.platform.config.redact import masked, masked_in
from dbo.platform.engine.shard_wrappers import Counted, pooled
from dbo.platform.runs.provenance import origin
from dbo.platform.runs.run_folder import Record, RunFolder, Target, history, read_metrics, read_run
from dbo.platform.runs.remote import Storage, is_url
from dbo.platform.network.topology import Network, network, single_node, validate
from dbo.tasks.api import Problem, Setup

Status = Literal["finished", "diverged", "failed"]

_BLOWN_UP = 1e6      # times the first upper loss: nothing that learns is there
# summary.json tells when these were reached; other levels can be read off metrics.jsonl at any time.
_TARGETS = tuple(
    Target(metric, level)
    for metric in ("test_accuracy", "node_accuracy_mean")
    for level in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
)


class Watcher(Protocol):
    """Is told how a run goes on; a progress bar, for example."""

    def started(self, experiment: Experiment, done: int) -> None: ...
    def evaluated(self, record: Record) -> None: ...
    def noted(self, text: str) -> None: ...
    def ended(self, result: "Result") -> None: ...


class _Nobody:
    def started(self, experiment: Experiment, done: int) -> None: ...
    def evaluated(self, record: Record) -> None: ...
    def noted(self, text: str) -> None: ...
    def ended(self, result: "Result") -> None: ...


@dataclass(frozen=True, slots=True)
class Result:
    """A run that has ended."""

    experiment: Experiment
    status: Status
    folder: Path
    history: pd.DataFrame                # a row per evaluation
    state: dict[str, NDArray[Any]]       # x, y (and z): (nodes, dim)
    summary: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What an experiment describes, built: the problem with its data, and the network."""

    problem: Problem
    network: Network


def prepare(experiment: Experiment, problem: Problem | None = None) -> Prepared:
    """Loads data, cuts it among the nodes and draws the graph; wrong combinations are input errors."""
    parts = experiment.parts
    try:
        graph = parts.topology.graph(experiment.nodes, experiment.seed)
        validate(graph)              # what is quick comes first: wrong input is told before anything takes long
        problem = problem or parts.task.build(Setup(
            nodes=experiment.nodes, seed=experiment.seed, dtype=experiment.dtype, partition=parts.partition,
            data=parts.data, data_dir=experiment.data_dir,
        ))
        return Prepared(problem, network(graph))
    except ValueError as error:
        raise InputError(str(error)) from error


def default_folder(experiment: Experiment) -> Path:
    """runs/<name>-<start of the run key>."""
    slug = "".join(c if c.isalnum() or c in "._-" else "-" for c in experiment.name).strip(".-") or "run"
    return Path("runs") / f"{slug}-{experiment.run_key[:8]}"


def local_folder(experiment: Experiment, out: str | Path | None) -> Path:
    """Where on this machine the run's files are while it runs."""
    if out is not None and is_url(out):
        return Storage(str(out)).local
    return Path(out) if out is not None else default_folder(experiment)


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    start_from: str | Path | None = None,
    watcher: Watcher | None = None,
    prepared: Prepared | None = None,
) -> Result:
    """Runs the experiment into a folder and answers with what came out.

    `resume` goes on from the newest checkpoint in the folder; the rest of the run is then the same to the last bit.
    `start_from` is the folder of a run of the same experiment with fewer rounds, from whose end this one goes on.
    """
    prepared = prepared or prepare(experiment)
    storage = Storage(str(out)) if out is not None and is_url(out) else None
    folder = RunFolder(storage.local if storage else local_folder(experiment, out), storage)
    folder.acquire()
    try:
        if storage:
            storage.pull()
        resume = resume or start_from is not None
        check_folder(folder, experiment, resume, extends=storage is None)
        if resume and status(folder) == "finished":
            recorded = _recorded(folder, experiment)
            if dict(recorded.summary.get("problem") or {}).get("data_sha256") != _data(prepared):
                raise other_data(folder)
            (watcher or _Nobody()).noted(f"{experiment.algorithm['name']}: finished earlier, nothing to do")
            return recorded
        checkpoints = Checkpoints(folder.checkpoints, experiment.trajectory_key)
        source = shorter(start_from, experiment) if start_from is not None and not checkpoints.exist() else None
        return _Run(experiment, prepared, folder, checkpoints, watcher or _Nobody(), resume, source).go()
    finally:
        folder.release()


@contextmanager
def adding_to(out: str | Path | None) -> Iterator[None]:
    """What is added meanwhile to the folder of a run that has just ended goes to its URL too, if it has one."""
    if out is None or not is_url(out):
        yield
        return
    storage = Storage(str(out))
    folder = RunFolder(storage.local, storage)
    folder.acquire()
    try:
        storage.in_step()
        yield
        folder.publish()
    finally:
        folder.release()


def _data(prepared: Prepared) -> str | None:
    return prepared.problem.describe().get("data_sha256")


def _recorded(folder: RunFolder, experiment: Experiment) -> "Result":
    """A run that has finished earlier, as it lies in its folder."""
    found = read_run(folder.path)
    return Result(experiment, "finished", folder.path, found.history, found.state, found.summary)


@dataclass(slots=True)
class _Run:
    experiment: Experiment
    prepared: Prepared
    folder: RunFolder
    checkpoints: Checkpoints
    watcher: Watcher
    resume: bool
    source: RunFolder | None = None      # a shorter run's, whose last checkpoint and records are taken over
    training: float = 0.0
    evaluating: float = 0.0
    records: list[Record] = field(default_factory=list)
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    data: str | None = None              # digest of the data
    begun: bool = False
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def go(self) -> Result:
        parts = self.experiment.parts
        problem, graph = self.prepared.problem, self.prepared.network
        if parts.algorithm.single_machine:
            problem, graph = pooled(problem), single_node()
        self.data = _data(self.prepared)
        checkpoint = self._found() if self.resume else None
        work = Work(
            parts.algorithm, parts.config, problem, graph, self.experiment.resolved(),
            blocks=checkpoint.run.get("blocks") if checkpoint else None,
        )
        if notice := startup_notice(parts.engine):
            self.watcher.noted(notice)
        try:
            self._try(problem)
            engine = start_engine(parts.engine, work)
        except InputError:
            raise                      # an earlier run in the folder, and its results, are as they were
        except Exception as failure:
            if not self.folder.holds_run():      # nothing has been run: what an earlier run left stays as it is
                self._settle(None)
                self._end("failed", _told(failure))
            raise
        try:
            self._settle(checkpoint)
            return self._carry(engine, problem, checkpoint)
        except Exception as failure:
            if self.begun or not isinstance(failure, InputError):
                self._end("failed", _told(failure))
            raise
        finally:
            engine.close()

    def _try(self, problem: Problem) -> None:
        """A stranger's state at the start, made here: processes that are started for it could not tell it as well."""
        parts = self.experiment.parts
        if not parts.algorithm.built_in and not parts.engine.gpus_per_node:
            begun(parts.algorithm, Counted(problem.shard(range(min(2, problem.nodes)))), parts.config)

    def _found(self) -> Checkpoint | None:
        """The checkpoint to go on from: the newest here, or that of a shorter run, which must have one."""
        folder, checkpoints = self.folder, self.checkpoints
        if self.source is not None:
            folder, checkpoints = self.source, Checkpoints(self.source.checkpoints, self.experiment.trajectory_key)
        checkpoint, refused = checkpoints.latest(), checkpoints.refused
        if checkpoint is not None and checkpoint.run.get("data") != self.data:
            raise other_data(folder)
        if checkpoint is not None and (missing := lacks(folder, checkpoint)):
            refused.append(f"round {checkpoint.round}: {missing}")
            checkpoint = None
        if self.source is not None and checkpoint is None:
            raise InputError(": ".join([f"--from: {folder} has no checkpoint to go on from", *refused[-1:]]))
        for reason in refused:
            self.watcher.noted(f"passed over a checkpoint: {reason}")
        return checkpoint

    def _settle(self, checkpoint: Checkpoint | None) -> None:
        """The folder as a run needs it: without an earlier run that is not gone on with, or its claim to have ended."""
        if checkpoint is None or self.source is not None:
            self.folder.clear()
        self.folder.summary.unlink(missing_ok=True)
        self.folder.write_network(self.prepared.network.describe())
        if self.source is not None and checkpoint is not None:
            self.folder.tell(
                "continued", after_round=checkpoint.round, run_key=self.experiment.run_key,
                source=str(self.source.path.absolute()),
            )
        write_atomically(self.folder.experiment, yaml_io.dump(masked_in(self.experiment.recorded())))
        if self.source is not None and checkpoint is not None:
            self.folder.copy_records(self.source)
            if missing := lacks(self.folder, checkpoint):        # somebody else was at work there meanwhile
                raise RunError(f"--from: {self.source} has changed: {missing}")
            self.checkpoints.save(checkpoint.round, ([block] for block in checkpoint.blocks), checkpoint.run)
        if checkpoint is not None:
            self.folder.rewind(checkpoint.round)

    def _carry(self, engine: Engine, problem: Problem, checkpoint: Checkpoint | None) -> Result:
        """To the end of the run, through as many losses of processes as are allowed."""
        done = self._return_to(checkpoint)
        try:
            if checkpoint is not None:
                engine.restore(checkpoint.blocks)
        except BlocksLost as lost:
            done = self._recover(engine, lost)
        if self.resume:
            self.watcher.noted(f"resumed after round {done}" if done else "no checkpoint found: starting from round 0")
        self.folder.tell(
            "started", after_round=done, rounds=self.experiment.rounds, run_key=self.experiment.run_key,
            version=version("dbo"), **origin(),
        )
        self.begun = True
        self.watcher.started(self.experiment, done)
        while True:
            try:
                status, error = self._forward(engine, problem, done)
                return self._end(status, error, _state(engine) if status == "finished" else {})
            except BlocksLost as lost:
                done = self._recover(engine, lost)

    def _forward(self, engine: Engine, problem: Problem, done: int) -> tuple[Status, str | None]:
        experiment = self.experiment
        if done == 0 and (sick := self._evaluate(engine, problem, 0)):
            return "diverged", sick
        for round_ in range(done + 1, experiment.rounds + 1):
            start = time.perf_counter()
            engine.advance(round_)
            self.training += time.perf_counter() - start
            last = round_ == experiment.rounds
            if (round_ % experiment.eval_every == 0 or last) and (sick := self._evaluate(engine, problem, round_)):
                return "diverged", sick
            if round_ % experiment.checkpoint_every == 0 or last:
                if name := engine.sick():      # only a state that is well replaces the last checkpoint
                    return "diverged", f"round {round_}: {name} is not finite"
                self._save(engine, round_)
        return "finished", None

    def _save(self, engine: Engine, round_: int) -> None:
        self.folder.sync()
        remembered = {
            "training": self.training, "evaluating": self.evaluating, "started": self.started,
            "recoveries": self.recoveries, "blocks": [list(ids) for ids in engine.blocks],
            "records": self.folder.digest(), "data": self.data,
        }
        self.checkpoints.save(round_, engine.snapshot(), remembered)
        self.folder.publish()

    def _return_to(self, checkpoint: Checkpoint | None) -> int:
        """Records and clocks as they were at the checkpoint (None: at the start); the round that it was taken at."""
        remembered = checkpoint.run if checkpoint else {}
        self.training, self.evaluating = remembered.get("training", 0.0), remembered.get("evaluating", 0.0)
        self.started = remembered.get("started", self.started)
        self.recoveries = self.recoveries or remembered.get("recoveries", [])
        done = checkpoint.round if checkpoint else 0
        self.folder.rewind(done if checkpoint else -1)
        self.records = read_metrics(self.folder.metrics)
        return done

    def _recover(self, engine: Engine, lost: BlocksLost) -> int:
        """Replaces what died and rolls every block back; the rounds since are replayed and give the same bits."""
        allowed = self.experiment.parts.engine.max_recoveries
        start = time.perf_counter()
        at = self.records[-1]["round"] if self.records else 0
        while True:
            if len(self.recoveries) >= allowed:
                raise RunError(f"{lost}; engine.max_recoveries = {allowed} is used up") from lost
            self.recoveries.append({"after_round": at, "blocks": list(lost.blocks), "reason": lost.reason})
            self.folder.tell("lost", **self.recoveries[-1])
            self.watcher.noted(f"{lost}; replacing and rolling back")
            try:
                engine.revive()
                checkpoint = self.checkpoints.latest()
                engine.restore(checkpoint.blocks if checkpoint else None)
                break
            except BlocksLost as again:
                lost = again
        done = self._return_to(checkpoint)
        self.recoveries[-1] |= {"resumed_after": done, "seconds": time.perf_counter() - start}
        self.folder.tell("recovered", **self.recoveries[-1])
        return done

    def _evaluate(self, engine: Engine, problem: Problem, round_: int) -> str | None:
        """Appends a line; if something is not finite, says what instead."""
        start = time.perf_counter()
        if name := engine.sick():
            return f"round {round_}: {name} is not finite"
        parts = self.experiment.parts
        measured, nodes = evaluate(engine, problem, parts.config, parts.algorithm.paper_counts)
        if name := unwell(measured):
            return f"round {round_}: {name} is not finite"
        record = {"round": round_, "seconds": self.training, **measured, "timestamp": time.time()}
        self.folder.append(record, {"round": round_, **nodes})
        self.records.append(record)
        self.watcher.evaluated(record)
        engine.observe({**record, "rounds": self.experiment.rounds, "nodes": nodes})
        self.evaluating += time.perf_counter() - start
        return None

    def _end(self, status: Status, error: str | None, state: dict[str, NDArray[Any]] | None = None) -> Result:
        state = state or {}
        if status == "finished" and (grown := _grown(self.records)):
            self.watcher.noted(grown)
        summary = self._summary(status, error)
        self.folder.sync()
        if status == "finished":
            self.folder.write_state(state)
        self.folder.write_summary(summary)
        self.folder.tell("ended", status=status, **({"error": error} if error else {}))
        self.folder.publish()
        result = Result(self.experiment, status, self.folder.path, history(self.records), state, summary)
        self.watcher.ended(result)
        return result

    def _summary(self, status: Status, error: str | None) -> dict[str, Any]:
        experiment, graph = self.experiment, self.prepared.network
        return {
            "status": status,
            **({"error": error} if error else {}),
            "name": experiment.name,
            "run_key": experiment.run_key,
            "algorithm": experiment.algorithm["name"],
            "rounds": self.records[-1]["round"] if self.records else 0,
            "final": self.records[-1] if self.records else {},
            "targets": {str(target): reached(self.records, target) for target in _TARGETS},
            "recoveries": self.recoveries,
            "seconds": {"training": self.training, "evaluation": self.evaluating},
            "problem": self.prepared.problem.describe(),
            "network": {key: value for key, value in graph.describe().items() if key != "edges"},
            "started": self.started,
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            "version": version("dbo"),
        }


def _state(engine: Engine) -> dict[str, NDArray[Any]]:
    rows = {name: engine.rows(name) for name in ("x", "y", "z")}
    return {name: np.asarray(array) for name, array in rows.items() if array is not None}


def _grown(records: list[Record]) -> str | None:
    """Word of a loss that is finite but says that the run has blown up."""
    losses = [record["upper_loss"] for record in records if record.get("upper_loss") is not None]
    if not losses or not losses[-1] > _BLOWN_UP * max(1.0, losses[0]):
        return None
    return f"upper_loss went from {losses[0]:.3g} to {losses[-1]:.3g}: the run has blown up; try smaller steps"


def _told(failure: Exception) -> str:
    plain = isinstance(failure, RunError | InputError)
    return masked(str(failure) if plain else f"{type(failure).__name__}: {failure}")


def reached(records: list[Record], target: Target) -> Mapping[str, Any] | None:
    """Rounds, bytes and training seconds to a target; None if it was not reached."""
    record = target.reached(records)
    keys = ("round", "bytes_links", "bytes_broadcast", "comm_mb", "paper_megabytes", "seconds")
    return None if record is None else {key: record[key] for key in keys}
