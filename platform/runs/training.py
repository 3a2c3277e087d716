"""Train: advance rounds, evaluate, save checkpoints, and recover from lost blocks."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.base import Engine
from dbo.platform.engine.evaluation import evaluate, evaluate_psi, first_nonfinite_metric
from dbo.platform.engine.psi import TOLERANCE
from dbo.platform.errors import BlocksLost, InputError, RunError
from dbo.platform.runs.checkpoints import Checkpoint, Checkpoints
from dbo.platform.runs.progress import RunProgress
from dbo.platform.runs.recovery import Fail, decide
from dbo.platform.runs.result import RunCallback
from dbo.platform.runs.run_folder import Position, RunFolder, iterate_metrics
from dbo.platform.runs.schema import BLOCK_NODES, BLOCK_SECONDS, Record, Recovery
from dbo.platform.runs.stop_rule import StopRule
from dbo.tasks.api import Problem

if TYPE_CHECKING:
    from scipy.sparse import csr_array

State = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How training ended: with the final rows, or with the reason why they are not finite."""

    status: Literal["finished", "diverged"]
    state: State
    error: str | None = None
    ended_by: str = ""


class _DivergedError(Exception):
    """A state or a metric is not finite."""


@dataclass(slots=True)
class TrainingLoop:
    """One run on an engine that has started, recorded in a folder that has been prepared."""

    experiment: Experiment
    problem: Problem
    engine: Engine
    folder: RunFolder
    checkpoints: Checkpoints
    progress: RunProgress
    callback: RunCallback
    rule: StopRule = field(default_factory=StopRule)
    weights: "csr_array[Any] | None" = None         # W, if public models are to be evaluated

    def restore(self, checkpoint: Checkpoint | None) -> int:
        """Return to a checkpoint (None: to the start), and to the round it was saved at."""
        done = self._restore_progress(checkpoint)
        try:
            if checkpoint is not None:
                self.engine.restore(checkpoint.blocks)
        except BlocksLost as lost:
            done = self._recover(lost)
        return done

    def train(self, done: int) -> Outcome:
        """Run from the end of round `done` to the last round, through as many recoveries as are allowed."""
        while True:
            try:
                ended_by = self._run_rounds(done)
                return Outcome("finished", self._read_state(), ended_by=ended_by)
            except _DivergedError as error:
                return Outcome("diverged", {}, str(error))
            except BlocksLost as lost:
                done = self._recover(lost)

    def _run_rounds(self, done: int) -> str:
        """Run to the last round, or until the stop rule holds; return which of them ended the run."""
        experiment, engine = self.experiment, self.engine
        reason = self._evaluate(0) if done == 0 else self._find_recorded_reason(done)
        while done < experiment.rounds and reason is None:
            start, round_ = time.perf_counter(), self._next_stop(done)
            engine.advance(done + 1, round_)
            self.progress.training += time.perf_counter() - start
            done, is_last = round_, round_ == experiment.rounds
            if round_ % experiment.eval_every == 0 or is_last:
                reason = self._evaluate(round_, is_last)
            if round_ % experiment.checkpoint_every == 0 or is_last or reason is not None:
                self._check_finite(round_, engine.first_nonfinite())       # a checkpoint is always a finite state
                self._save(round_)
        return f"until {reason}" if reason is not None else f"rounds {experiment.rounds}"

    def _find_recorded_reason(self, done: int) -> str | None:
        """Return why the run has ended already: a repaired run is restored at its end."""
        last = self.progress.evaluated.last
        return self.rule.find_reason(last) if last.get("round") == done else None

    def _next_stop(self, done: int) -> int:
        """Return the next round after which there is an evaluation or a checkpoint."""
        every = self.experiment.eval_every, self.experiment.checkpoint_every
        return min(self.experiment.rounds, *(done - done % steps + steps for steps in every))

    def _evaluate(self, round_: int, is_last: bool = False) -> str | None:
        """Record an evaluation and return why the run ends with it; numbers that are not finite end it at once."""
        start = time.perf_counter()
        self._check_finite(round_, self.engine.first_nonfinite())
        parts = self.experiment.parts
        measured, nodes = evaluate(
            self.engine, self.problem, parts.algorithm, parts.config, self.experiment.eval_nodes, self.experiment.seed,
            self.weights)
        self._check_finite(round_, first_nonfinite_metric(measured))
        if has_psi := self._needs_psi(round_, is_last):
            measured |= self._evaluate_psi(is_last)
        reason = self.rule.find_reason({"round": round_, "seconds": self.progress.training, **measured})
        if reason is not None and not has_psi and self._needs_psi(round_, is_last=True):
            measured |= self._evaluate_psi(is_last=True)
        record = {
            "round": round_, "seconds": self.progress.training, **measured,
            BLOCK_SECONDS: self.progress.sum_computing(self.engine.compute_seconds()),
            BLOCK_NODES: [len(ids) for ids in self.engine.blocks], "timestamp": time.time(),
        }
        nodes |= self._count_packets(round_)
        self.folder.append(record, {"round": round_, **nodes})
        self.progress.evaluated.add(record)
        self.callback.on_evaluation(record)
        self.engine.export_metrics({**record, "rounds": self.experiment.rounds, "nodes": nodes})
        self.progress.evaluating += time.perf_counter() - start
        return reason

    def _count_packets(self, round_: int) -> Record:
        """Return the packets of every node, and the exchanges of the network if the method declares them."""
        parts = self.experiment.parts
        declared = parts.algorithm.packets
        exchanges = {} if declared is None else {"exchanges": round_ * int(declared(parts.config))}
        return {"packets": self.engine.ledger().packets.tolist(), **exchanges}

    def _needs_psi(self, round_: int, is_last: bool) -> bool:
        """Decide by the round alone, so that a resumed run has ψ in the same evaluations."""
        every = self.experiment.psi_every
        if every is None or is_last:
            return every is not None
        return isinstance(every, int) and round_ % (every * self.experiment.eval_every) == 0

    def _evaluate_psi(self, is_last: bool) -> Record:
        found = evaluate_psi(self.engine, self.problem, self.experiment.parts.algorithm.network == "star")
        if is_last and not found["psi_converged"]:
            residual = f"{found['psi_residual']:.1e}" if "psi_residual" in found else "not finite"
            self.callback.on_notice(
                f"psi and psi_gradient_norm are approximate: the residual of the lower level's solve is {residual}, "
                f"the tolerance {TOLERANCE:.0e}")
        return found

    def _read_state(self) -> State:
        """Return the final rows of all nodes; of a star those of the server, the last row."""
        rows = {name: self.engine.rows(name) for name in ("x", "y", "z")}
        kept = slice(-1, None) if self.experiment.parts.algorithm.network == "star" else slice(None)
        return {name: np.asarray(array[kept]) for name, array in rows.items() if array is not None}

    def _check_finite(self, round_: int, name: str | None) -> None:
        if name is not None:
            raise _DivergedError(f"round {round_}: {name} is not finite")

    def _save(self, round_: int) -> None:
        self.folder.sync()
        computing = self.engine.compute_seconds()
        stored = self.progress.to_checkpoint(self.engine.blocks, self.folder.position(), computing)
        self.checkpoints.save(round_, self.engine.snapshot(), stored)
        self.folder.publish()

    def _restore_progress(self, checkpoint: Checkpoint | None) -> int:
        stored = checkpoint.run if checkpoint else {}
        self.folder.rollback(checkpoint.round if checkpoint else -1, Position.parse(stored))
        self.progress.restore(stored, iterate_metrics(self.folder.metrics))
        return checkpoint.round if checkpoint else 0

    def _recover(self, error: BlocksLost) -> int:
        """Replace lost blocks and roll all blocks back; the rounds since are replayed and give the same bits."""
        start, progress = time.perf_counter(), self.progress
        after_round = progress.evaluated.last.get("round", 0)
        while True:
            decision = decide(error, progress.recoveries, self.experiment.parts.engine)
            if isinstance(decision, Fail):
                raise RunError(decision.reason) from error
            recovery = Recovery(after_round, list(decision.blocks), decision.reason)
            progress.recoveries.append(recovery)
            self.folder.log_event("lost", **recovery.to_dict())
            self.callback.on_notice(f"{error}; replacing them and rolling back")
            try:
                self.engine.replace_lost()
                checkpoint = self.checkpoints.load_latest()
                self.engine.restore(checkpoint.blocks if checkpoint else None)
                break
            except BlocksLost as again:
                error = again
            except (RunError, InputError, OSError):
                raise
            except Exception as problem:        # of Ray itself: its cluster is gone, say
                line = str(problem).strip().partition("\n")[0]
                raise RunError(f"{error}; they cannot be replaced: {type(problem).__name__}: {line}") from problem
        done = self._restore_progress(checkpoint)
        recovery = Recovery(
            after_round, recovery.blocks, recovery.reason, resumed_after=done, seconds=time.perf_counter() - start)
        progress.recoveries[-1] = recovery
        self.folder.log_event("recovered", **recovery.to_dict())
        return done
