"""Run an experiment: prepare, start the engine, train, and record how it ended."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dbo.platform.config import presets
from dbo.platform.config.engines import RaySettings
from dbo.platform.config.experiment import Experiment
from dbo.platform.config.plugins import ship
from dbo.platform.engine.arrangement import arrange
from dbo.platform.engine.automatic import derive_values, describe_derived
from dbo.platform.engine.base import Engine, RunSpec
from dbo.platform.engine.block import describe_network, init_state
from dbo.platform.engine.convexity import describe_convexity
from dbo.platform.engine.device import trim_memory
from dbo.platform.engine.factory import start_engine, startup_notice
from dbo.platform.engine.shard_wrappers import CountingShard
from dbo.platform.errors import InputError, RunError
from dbo.platform.runs.checkpoints import Checkpoints
from dbo.platform.runs.disk_size import describe_large_run
from dbo.platform.runs.driver_guard import guard_driver
from dbo.platform.runs.preparation import Prepared, check_compressors, default_folder, local_folder, prepare
from dbo.platform.runs.progress import RunProgress
from dbo.platform.runs.provenance import collect_environment, collect_provenance
from dbo.platform.runs.recovery import format_failure
from dbo.platform.runs.remote import RemoteFolder, is_url
from dbo.platform.runs.result import NoCallback, Result, RunCallback, Status, build_summary, describe_growth
from dbo.platform.runs.resume import (
    StartPoint,
    adopt_engine,
    check_folder,
    check_source,
    find_source_run,
    find_start_point,
    missing_records,
    prepare_folder,
    read_status,
    report_other_data,
)
from dbo.platform.runs.run_folder import RunFolder, find_manifest, read_end, read_events, read_summary
from dbo.platform.runs.schema import Manifest
from dbo.platform.runs.seal import Damage, check_run, is_repairable, restore_copies, seal_run
from dbo.platform.runs.stop_rule import StopRule
from dbo.platform.runs.training import TrainingLoop
from dbo.version import find_version

__all__ = [
    "Prepared", "Result", "RunCallback", "default_folder", "local_folder", "prepare", "publish_additions", "run",
]

_MAX_LOADED = 32 << 20      # bytes of metrics.jsonl that a result loads at once; longer histories are read when used


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    start_from: str | Path | None = None,
    callback: RunCallback | None = None,
    prepared: Prepared | None = None,
    allow_changed_code: bool = False,
) -> Result:
    """Run an experiment into a folder and return its result.

    `resume` continues from the newest checkpoint in the folder; the results are bit-identical to those of a run without
    interruption. `start_from` is the folder of a run of the same experiment with fewer rounds, which this one extends.
    `allow_changed_code` resumes although the code or the environment has changed since, and records that.
    """
    prepared, callback = prepared or prepare(experiment), callback or NoCallback()
    check_compressors(experiment, prepared.problem.dim_x, prepared.problem.dim_y)     # prepared for another method?
    prepared = prepared.fit(experiment.parts.algorithm)
    remote = RemoteFolder(str(out)) if out is not None and is_url(out) else None
    folder = RunFolder(remote.local if remote else local_folder(experiment, out), remote)
    folder.acquire()
    try:
        if remote:
            remote.acquire(callback.on_notice)
            remote.pull()
        resume = resume or start_from is not None
        if resume:          # a change of the rule, or more rounds, must not change the engine
            source_folder = RunFolder(Path(start_from)) if start_from is not None and not folder.has_run() else folder
            experiment = adopt_engine(experiment, source_folder)
        check_folder(folder, experiment, resume, can_extend=remote is None, allow_changed_code=allow_changed_code)
        checkpoints = Checkpoints(
            folder.checkpoints, experiment.trajectory_key, allow_changed_code, experiment.keep_checkpoints)
        if start_from is not None:
            check_source(folder, checkpoints, start_from)
        damage = _find_damage(folder, callback) if resume else ()
        if resume and not damage and read_status(folder) in ("finished", "diverged"):      # which it would again
            return _return_recorded(folder, experiment, prepared, callback)
        source = None
        if start_from is not None and not checkpoints.has_any():
            source = find_source_run(start_from, experiment, allow_changed_code)
        start = StartPoint()
        if resume:
            start = find_start_point(
                folder, experiment, prepared.network, prepared.data_digest, source, allow_changed_code)
            if damage and start.checkpoint is None:
                raise InputError(
                    f"{folder}: {'; '.join(map(str, damage))}; no checkpoint from before the damage is left: "
                    f"run it again without --resume, or into another folder")
        sealed = find_manifest(folder.path) if damage else None
        result = _Execution(experiment, prepared, folder, checkpoints, callback, resume, start).run()
        trim_memory()                    # of the engine, before figures and pages are made
        if sealed and not _has_same_state(folder, sealed):
            callback.on_notice("the repaired final state differs from the sealed one: has the machine changed?")
        if result.metrics.exists() and result.metrics.stat().st_size <= _MAX_LOADED:
            _ = result.history           # callers may remove the folder of a short run before they use it
        return result
    finally:
        if remote:
            remote.release()
        folder.release()


def _find_damage(folder: RunFolder, callback: RunCallback) -> tuple[Damage, ...]:
    """Return what is damaged in a run that has ended, after small files were restored from the manifest."""
    if restored := restore_copies(folder):
        callback.on_notice(f"restored from manifest.json: {', '.join(restored)}")
    if read_status(folder) not in ("finished", "diverged"):
        return ()
    damage = check_run(folder.path).damage
    repairable = tuple(found for found in damage if is_repairable(folder, found))
    if damage:
        action = "repairing the run from its newest intact checkpoint" if repairable else "it cannot be repaired"
        callback.on_notice(f"damaged: {'; '.join(map(str, damage))}; {action}")
    return repairable


def _has_same_state(folder: RunFolder, sealed: Manifest) -> bool:
    repaired = find_manifest(folder.path)
    return repaired is not None and repaired.files.get(folder.state.name) == sealed.files.get(folder.state.name)


def _return_recorded(folder: RunFolder, experiment: Experiment, prepared: Prepared, callback: RunCallback) -> Result:
    """Return a run that has already finished, or diverged."""
    summary = read_summary(folder.path)
    if summary is None or summary.data_digest != prepared.data_digest:
        raise report_other_data(folder)
    last = Checkpoints(folder.checkpoints, experiment.trajectory_key, allow_other=True).load_latest(with_blocks=False)
    is_last = last is not None and last.round == summary.rounds and not summary.sealed
    if last is not None and is_last and (reason := missing_records(folder, last)):
        raise InputError(f"{folder}: {reason}; run it again without --resume, or into another folder")
    status: Status = "diverged" if summary.status == "diverged" else "finished"
    callback.on_notice(f"{experiment.title}: already {status}, nothing to do")
    recorded, state = read_end(folder.path)
    return Result(experiment, status, folder.path, folder.metrics.absolute(), state, recorded, is_new=False)


@contextmanager
def publish_additions(out: str | Path | None) -> Iterator[None]:
    """Upload what is added meanwhile to the folder of a run that has just ended, if the folder has a URL."""
    if out is None or not is_url(out):
        yield
        return
    remote = RemoteFolder(str(out))
    folder = RunFolder(remote.local, remote)
    folder.acquire()
    try:
        remote.acquire()
        remote.assume_pushed()
        yield
        folder.publish()
    finally:
        remote.release()
        folder.release()


@dataclass(slots=True)
class _Execution:
    """One run in a folder that it holds."""

    experiment: Experiment
    prepared: Prepared
    folder: RunFolder
    checkpoints: Checkpoints
    callback: RunCallback
    resume: bool
    start: StartPoint
    derived: dict[str, float] = field(default_factory=dict)      # values of parameters that are `auto`

    def run(self) -> Result:
        parts, progress = self.experiment.parts, RunProgress(self.prepared.data_digest)
        problem, graph = arrange(parts.algorithm, self.prepared.problem, self.prepared.network)
        disk = describe_large_run(self.experiment, self.prepared, self.folder.path)
        self.derived = derive_values(self.experiment, problem, graph)
        start = (
            self._describe_engine(), disk, startup_notice(parts.engine), self._describe_steps(),
            describe_convexity(parts.algorithm, parts.config, problem), describe_derived(self.derived),
        )
        for notice in (*self.start.notices, *start):
            if notice:
                self.callback.on_notice(notice)
        on_ray = isinstance(parts.engine, RaySettings)
        spec = RunSpec(
            parts.algorithm, parts.config, problem, graph, self.experiment.to_dict(),
            blocks=self.start.checkpoint.run.get("blocks") if self.start.checkpoint else None,
            batches=parts.batches, schedules=parts.schedules, plugins=ship(self.experiment.plugins) if on_ray else (),
            notify=self.callback.on_notice,
        )
        try:
            engine = self._start_engine(spec)
        except InputError:
            raise                      # the folder and its results stay as they are
        except Exception as error:
            if not self.folder.has_run():
                self._prepare_folder(StartPoint())
                self._end(progress, "failed", format_failure(error))
            raise
        loop = TrainingLoop(
            self.experiment, problem, engine, self.folder, self.checkpoints, progress, self.callback,
            StopRule.of(self.experiment), graph.weights if self.experiment.has_public_metrics else None)
        try:
            with guard_driver(self.folder.path) if on_ray else nullcontext():
                return self._train(loop)
        finally:
            engine.close()

    def _describe_engine(self) -> str | None:
        """Return which engine `auto` has chosen, and why."""
        choice = self.experiment.engine_choice
        return None if choice is None else f"engine auto: {choice.name}, {choice.reason}"

    def _describe_steps(self) -> str | None:
        """Return where the step sizes come from, if the user should know."""
        experiment = self.experiment
        given = {"name": experiment.algorithm["name"], **experiment.given.get("algorithm", {})}
        return presets.describe_steps(experiment.presets, given, experiment.task, experiment.plugins)

    def _start_engine(self, spec: RunSpec) -> Engine:
        """Start the engine. A plugin's `init` is tried here first: its errors are clearer than a worker's."""
        if not spec.algorithm.built_in and not self.experiment.parts.engine.gpus_per_node:
            shard = spec.problem.shard(range(min(2, spec.problem.nodes)))
            counting = CountingShard(shard, spec.batches, network=describe_network(spec.network))
            init_state(spec.algorithm, counting, spec.config)
        return start_engine(self.experiment.parts.engine, spec)

    def _train(self, loop: TrainingLoop) -> Result:
        has_started = False
        try:
            self._prepare_folder(self.start)
            done = loop.restore(self.start.checkpoint)
            if self.resume:
                self.callback.on_notice(
                    f"resumed after round {done}" if done else "no checkpoint found: starting from round 0")
            self.folder.log_event(
                "started", after_round=done, rounds=self.experiment.rounds, run_key=self.experiment.run_key,
                version=find_version(), hosts=loop.engine.count_hosts(), **collect_provenance(),
                environment=collect_environment(), **({"derived": self.derived} if self.derived else {}),
            )
            has_started = True
            self.callback.on_start(self.experiment, done)
            outcome = loop.train(done)
            return self._end(loop.progress, outcome.status, outcome.error, outcome.state, outcome.ended_by)
        except Exception as error:
            if has_started or not isinstance(error, InputError):
                with suppress(OSError, RunError):      # a full disk refuses this too: the first error is to be reported
                    self._end(loop.progress, "failed", format_failure(error))
            raise

    def _prune(self, status: Status) -> None:
        """Remove the checkpoints that the ended run does not keep; of a diverged one the last is all that is left.

        The sealed run is published before that: a crash in between must leave a checkpoint or a result at a URL.
        """
        keep = self.experiment.keep_checkpoints
        self.checkpoints.prune(max(1, keep) if status == "diverged" else keep)
        with suppress(RunError):            # the results are there; old checkpoints at a URL do no harm
            self.folder.publish()

    def _find_changes(self) -> list[str]:
        """Return which changes the run was resumed in spite of, this time or before."""
        kinds = set(self.start.changes)
        with suppress(InputError):                  # a damaged line must not keep the run from ending
            kinds |= {event.kind for event in read_events(self.folder.events)}
        return sorted(kinds & {"code_changed", "environment_changed"})

    def _prepare_folder(self, start: StartPoint) -> None:
        prepare_folder(self.folder, self.checkpoints, self.experiment, self.prepared.network, start)

    def _end(
        self, progress: RunProgress, status: Status, error: str | None, state: dict[str, NDArray[Any]] | None = None,
        ended_by: str = "",
    ) -> Result:
        """Record how the run ended."""
        if status == "finished" and (warning := describe_growth(progress.evaluated)):
            self.callback.on_notice(warning)
        if ended_by.startswith("until"):
            self.callback.on_notice(f"ended at round {progress.evaluated.last['round']}: {ended_by}")
        summary = build_summary(
            self.experiment, self.prepared, progress, status, error, self._find_changes(), ended_by)
        self.folder.sync()
        if status == "finished":
            self.folder.write_state(state or {})
        if status == "failed":
            self.folder.manifest.unlink(missing_ok=True)        # the disk may have been full after it was written
            self.folder.write_summary(summary)
        else:
            seal_run(self.folder, summary)
        self.folder.log_event("ended", status=status, **({"error": error} if error else {}))
        self.folder.publish()
        if status != "failed":
            self._prune(status)
        result = Result(
            self.experiment, status, self.folder.path, self.folder.metrics.absolute(), state or {}, summary.to_dict())
        self.callback.on_end(result)
        return result
