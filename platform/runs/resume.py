"""Decide whether an existing run folder can be resumed or extended, or must be refused.

A run continues only from its own checkpoint: same experiment, same code, same data, same environment, and all
evaluations up to it still recorded. Then the rest of the run is bit-identical to a run without interruption.
`allow_changed_code` waives code and environment; what has changed is recorded as an event.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dbo.platform.config.engines import select_decisive
from dbo.platform.config.experiment import NOT_DECISIVE, Experiment
from dbo.platform.config.overrides import flatten
from dbo.platform.config.redact import redact_all
from dbo.platform.errors import InputError, RunError, ShorterRunError
from dbo.platform.network.topology import Network
from dbo.platform.runs.checkpoints import Checkpoint, Checkpoints
from dbo.platform.runs.provenance import collect_environment, describe_differences
from dbo.platform.runs.remote import is_url
from dbo.platform.runs.run_folder import (
    Position,
    RunFolder,
    find_summary,
    has_group,
    is_locked,
    iterate_metrics,
    read_events,
    read_experiment,
    read_network,
)
from dbo.platform.runs.stop_rule import StopRule

_MAX_SHOWN = 4          # differences between two experiments in one line


def read_status(folder: RunFolder) -> str:
    """Return how the run in a folder ended, or `unfinished`."""
    summary = find_summary(folder.path)
    return summary.status if summary and summary.status else "unfinished"


def adopt_engine(experiment: Experiment, folder: RunFolder) -> Experiment:
    """Return the experiment on the engine that the run in a folder recorded, if `auto` has chosen another one.

    Only what influences results is adopted: a folder must not choose the cluster that this process connects to.
    """
    if experiment.engine_choice is None:
        return experiment
    try:
        recorded = read_experiment(folder.path).get("engine")
    except InputError:
        return experiment
    known = isinstance(recorded, dict) and recorded.get("name") != experiment.engine["name"]
    return experiment.with_engine(select_decisive(recorded)) if known and isinstance(recorded, dict) else experiment


def check_folder(
    folder: RunFolder, experiment: Experiment, resume: bool, can_extend: bool = False, allow_changed_code: bool = False
) -> None:
    """Refuse a folder that holds another run; only its own repetition, which gives the same results, replaces a run.

    `can_extend`: the caller offers --from and --allow-changed-code, so the error may advise them.
    """
    if has_group(folder.path):
        raise InputError(f"--out: {folder} holds a comparison or a sweep; choose another folder")
    if not folder.has_run() or _has_no_results(folder):
        return
    if folder.run_key() != experiment.run_key:
        rounds = find_rounds(folder, experiment, resume and allow_changed_code)
        if rounds is None:
            has_other_code = _find_text_rounds(folder, experiment) is not None
            what = "this experiment, run with other code" if has_other_code else "the run of another experiment"
            advice = ", or resume it with --allow-changed-code" if has_other_code and resume and can_extend else ""
            difference = "" if has_other_code else _describe_difference(folder, experiment)
            raise InputError(f"--out: {folder} holds {what}{difference}; choose another folder{advice}")
        if rounds == experiment.rounds and read_experiment(folder.path).get("until") != experiment.to_dict()["until"]:
            raise InputError(f"until: {folder} holds this experiment with another end; choose another folder")
        if rounds != experiment.rounds:
            text = (f"rounds: {folder} holds {rounds} rounds of this experiment, not {experiment.rounds}; "
                    f"choose another folder")
            if can_extend and rounds < experiment.rounds:
                raise ShorterRunError(
                    f"{text}, with --from {folder} to extend it", str(folder.path), experiment.rounds)
            raise InputError(text)
    _refuse_mixed_code("--out", folder, resume and not allow_changed_code)
    status = read_status(folder)
    if not resume and status in ("unfinished", "failed"):
        kind = "an unfinished" if status == "unfinished" else "a failed"
        raise InputError(f"--out: {folder} holds {kind} run of this experiment; --resume continues it")


def _describe_difference(folder: RunFolder, experiment: Experiment, without: tuple[str, ...] = ()) -> str:
    """Return in which values a recorded experiment differs from this one, some keys apart; "": it cannot be read."""
    try:
        there = flatten(read_experiment(folder.path))
    except InputError:
        return ""
    here = flatten(redact_all(experiment.to_record()))
    ignored = {f"engine.{key}" for key in experiment.parts.engine.runtime_only} | {*NOT_DECISIVE, *without}
    keys = [key for key in dict.fromkeys([*here, *there])
            if key not in ignored and not key.startswith("tracking.") and there.get(key) != here.get(key)]
    renamed = tuple(key.removesuffix("name") for key in keys if key.endswith(".name"))      # another component
    keys = [key for key in keys if key.endswith(".name") or not key.startswith(renamed)]
    pairs = [(key, there.get(key, "missing"), here.get(key, "missing")) for key in keys[:_MAX_SHOWN]]
    shown = [f"{key} is {recorded} there, {requested} here" for key, recorded, requested in pairs]
    if len(keys) > len(shown):
        shown.append(f"{len(keys) - len(shown)} more differ")
    return f" ({'; '.join(shown)})" if shown else ""


def _refuse_mixed_code(option: str, folder: RunFolder, is_strict: bool) -> None:
    """Refuse a run that was resumed with other code or libraries: its key is that of the code it ended with."""
    summary = find_summary(folder.path)
    if is_strict and summary is not None and summary.changes:
        what = " and ".join(kind.removesuffix("_changed") for kind in summary.changes)
        raise InputError(
            f"{option}: {folder} holds a run whose {what} changed on the way; choose another folder, or accept it with "
            f"dbo run --allow-changed-code"
        )


def _has_no_results(folder: RunFolder) -> bool:
    """Decide whether nothing would be lost: the run failed before its first evaluation, or did not even start.

    An experiment.yaml alone, without the network.json that a run writes before it, is a user's own file.
    """
    never_started = folder.network.exists() and not read_events(folder.events)       # the first may be cut off
    if not never_started and read_status(folder) != "failed":
        return False
    return next(iterate_metrics(folder.metrics), None) is None and not folder.checkpoints.exists()


def find_source_run(place: str | Path, experiment: Experiment, allow_changed_code: bool = False) -> RunFolder:
    """Return the folder of a run of this experiment with fewer rounds, which this one extends."""
    if is_url(place):
        raise InputError(f"--from: {place} is not allowed; must be a folder on this machine")
    folder = RunFolder(Path(place))
    if not folder.has_run():
        raise InputError(f"--from: {place} holds no run")
    if is_locked(folder.path):
        raise InputError(f"--from: {place} is in use by another run")
    rounds = find_rounds(folder, experiment, allow_changed_code)
    if rounds is None:
        code = ", run with other code" if _find_text_rounds(folder, experiment) is not None else ""
        difference = "" if code else _describe_difference(folder, experiment, without=("rounds", "until"))
        raise InputError(
            f"--from: {place} holds the run of another experiment{code}{difference}; only rounds and until may differ")
    _refuse_mixed_code("--from", folder, not allow_changed_code)
    summary = find_summary(folder.path)
    done = summary.rounds if summary is not None and summary.status == "finished" else rounds
    if done >= experiment.rounds:
        raise InputError(f"rounds: {experiment.rounds} is not allowed; must be more than the {done} of {place}")
    if (found := StopRule.of(experiment).find_first(iterate_metrics(folder.metrics))) is not None:
        raise InputError(f"until: {found[1]} is not allowed; it holds at round {found[0]} of {place} already")
    return folder


def check_source(folder: RunFolder, checkpoints: Checkpoints, place: str | Path) -> None:
    """Refuse --from if the folder has results that did not start from that run: they would be used instead of it."""
    if read_status(folder) not in ("finished", "diverged") and not checkpoints.has_any():
        return
    sources = [Path(event.source) for event in read_events(folder.events) if event.kind == "continued"]
    if Path(place).resolve() not in [source.resolve() for source in sources]:
        raise InputError(
            f"--from: {folder} holds a run of this experiment that did not start from {place}; "
            f"use it with --resume instead of --from, or choose another --out")


def find_rounds(folder: RunFolder, experiment: Experiment, allow_changed_code: bool = False) -> int | None:
    """Return the rounds of the run in a folder; None if it differs from this experiment in more than rounds."""
    if allow_changed_code:
        return _find_text_rounds(folder, experiment)
    try:
        recorded = read_experiment(folder.path)
        rounds, until = int(recorded["rounds"]), recorded.get("until")
    except (InputError, ValueError, TypeError, KeyError):
        return None
    until = until if isinstance(until, dict) else None
    return rounds if experiment.key_with(rounds, until) == folder.run_key() else None


def _find_text_rounds(folder: RunFolder, experiment: Experiment) -> int | None:
    """Return the rounds of an experiment that reads the same: only a plugin, dbo or an edges file can have changed."""
    def normalize(data: dict[str, Any]) -> dict[str, Any]:
        engine = data.get("engine")
        kept = select_decisive(engine) if isinstance(engine, dict) else engine
        return {**data, "engine": kept, **dict.fromkeys(("rounds", "until", *NOT_DECISIVE))}

    try:
        recorded = read_experiment(folder.path)
        rounds = int(recorded["rounds"])
    except (InputError, ValueError, TypeError, KeyError):
        return None
    return rounds if normalize(recorded) == normalize(redact_all(experiment.to_record())) else None


# ---- the checkpoint --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartPoint:
    """Where a run starts: at a checkpoint of its own or of a shorter run, or (no checkpoint) at round 0."""

    checkpoint: Checkpoint | None = None
    source: RunFolder | None = None             # the shorter run whose checkpoint and records are copied
    changes: dict[str, dict[str, str]] = field(default_factory=dict)       # events to record, with their facts
    notices: tuple[str, ...] = ()

    @property
    def round(self) -> int:
        return self.checkpoint.round if self.checkpoint else 0


def find_start_point(
    folder: RunFolder, experiment: Experiment, network: Network, data: str | None, source: RunFolder | None = None,
    allow_changed_code: bool = False,
) -> StartPoint:
    """Find the newest checkpoint to resume from, and refuse one that gives other results.

    A shorter run (`source`) must have one. A folder without a usable checkpoint starts from round 0.
    """
    owner = source or folder
    checkpoints = Checkpoints(owner.checkpoints, experiment.trajectory_key, allow_other=allow_changed_code)
    checkpoint, refused = _find_checkpoint(checkpoints, owner, data), checkpoints.refused
    notices = [f"skipped a checkpoint: {reason}" for reason in refused]
    if checkpoint is None:
        if source is not None:
            reason = refused[0] if refused else "dbo clean or keep_checkpoints: 0 has removed it"
            raise InputError(f"--from: {owner} has no checkpoint to resume from: {reason}")
        return StartPoint(notices=tuple(notices))
    changes: dict[str, dict[str, str]] = {}
    if checkpoint.trajectory != experiment.trajectory_key:
        _check_graph(owner, network)
        changes["code_changed"] = {"previous_run_key": owner.run_key() or ""}
        notices.append("the code has changed: results are not bit-identical to those of one version")
    recorded = checkpoint.run.get("environment")
    if recorded is None:
        notices.append("the checkpoint does not record its environment: whether it has changed is unknown")
    elif differences := describe_differences(recorded, collect_environment()):
        if not allow_changed_code:
            raise InputError(
                f"environment: {differences}; choose another --out, or resume with dbo run --allow-changed-code")
        changes["environment_changed"] = {"differences": differences}
        notices.append(f"the environment has changed: {differences}")
    return StartPoint(checkpoint, source, changes, tuple(notices))


def _find_checkpoint(checkpoints: Checkpoints, owner: RunFolder, data: str | None) -> Checkpoint | None:
    """Return the newest checkpoint whose evaluations are still recorded; later ones are replayed.

    If there is none because of a damaged line, raise an error that names the line.
    """
    has_records = True
    for checkpoint in checkpoints.load_each():
        if checkpoint.run.get("data") != data:
            raise report_other_data(owner)
        if not (reason := missing_records(owner, checkpoint)):
            return checkpoint
        checkpoints.refused.append(f"round {checkpoint.round}: {reason}")
        has_records = False
    for path in () if has_records else (owner.metrics, owner.nodes):
        for _ in iterate_metrics(path):
            pass                        # raises an error at a damaged line
    return None


def check_environments(ended: Iterable[RunFolder], allow_changed_code: bool) -> tuple[str, ...]:
    """Refuse to add runs of this environment to runs that ended in another one; return the changes to record.

    A table of both would compare environments, not algorithms. Older versions recorded none: nothing is known then.
    """
    current = collect_environment()
    for folder in ended:
        starts = [event for event in read_events(folder.events) if event.kind == "started" and event.environment]
        differences = describe_differences(starts[-1].environment, current) if starts else ""
        if differences and not allow_changed_code:
            raise InputError(
                f"environment: {folder} ended with another one: {differences}; choose another --out, "
                f"or keep its results with --allow-changed-code")
        if differences:
            return ("environment_changed",)
    return ()


def report_other_data(folder: RunFolder) -> InputError:
    """Return the error for a run on other data; where data are stored is no part of the run key."""
    return InputError(f"data_dir: {folder} holds a run on other data; give the same data, or another --out")


def missing_records(folder: RunFolder, checkpoint: Checkpoint) -> str | None:
    """Return what is wrong with the evaluations up to a checkpoint: resuming without them would lose them for good."""
    position = Position.parse(checkpoint.run)
    if position is None:
        is_same = checkpoint.run.get("records") == folder.digest_up_to(checkpoint.round)     # raises at a damaged line
    else:
        is_same = folder.has_position(position)
    return None if is_same else "metrics.jsonl or nodes.jsonl has changed since it was saved"


def _check_graph(folder: RunFolder, network: Network) -> None:
    """Refuse a run on another graph: an edges file is no code, though the run key covers both."""
    recorded, current = read_network(folder.path), network.describe()
    if recorded is None or any(getattr(recorded, key) != current[key] for key in ("nodes", "links", "edges")):
        raise InputError(f"topology: {folder} holds a run on another graph; choose another folder")


# ---- the folder ------------------------------------------------------------------------------------------------------


def prepare_folder(
    folder: RunFolder, checkpoints: Checkpoints, experiment: Experiment, network: Network, start: StartPoint
) -> None:
    """Clear stale results and write the description of the run; of a shorter run, copy records and checkpoint.

    Lines after the checkpoint stay until the training loop restores it.
    """
    checkpoint, source = start.checkpoint, start.source
    if checkpoint is None or source is not None:
        folder.clear()
    folder.summary.unlink(missing_ok=True)
    folder.manifest.unlink(missing_ok=True)      # second: it can restore the summary
    folder.write_network(network.describe())
    if checkpoint is not None and source is not None:
        folder.log_event(
            "continued", after_round=checkpoint.round, run_key=experiment.run_key, source=str(source.path.absolute()))
    folder.write_experiment(experiment.to_record())
    if checkpoint is None:
        return
    if source is None:
        checkpoints.remove_newer(checkpoint.round)
    else:
        folder.copy_records(source)
        if reason := missing_records(folder, checkpoint):        # another process has written there meanwhile
            raise RunError(f"--from: {source} has changed: {reason}")
        folder.sync()           # the event: a checkpoint without it would look as if the run had not started there
        checkpoints.save(checkpoint.round, ([block] for block in checkpoint.blocks), checkpoint.run)
    for kind, facts in start.changes.items():
        folder.log_event(kind, after_round=checkpoint.round, run_key=experiment.run_key, **facts)
