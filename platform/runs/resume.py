"""What an earlier run left in a folder: whether it is this one, and may be repeated or gone on with, here or there."""

import json
from pathlib import Path

from dbo.platform.config import yaml_io
from dbo.platform.runs.checkpoints import Checkpoint
from dbo.platform.errors import InputError
from dbo.platform.config.experiment import Experiment
from dbo.platform.config.redact import masked_in
from dbo.platform.runs.run_folder import RunFolder, in_use, read_metrics
from dbo.platform.runs.remote import is_url


def check_folder(folder: RunFolder, experiment: Experiment, resume: bool, extends: bool = False) -> None:
    """An earlier run is replaced only by its own repetition, which gives the same results.

    `extends`: who asks could go on from a shorter run, and is told how.
    """
    if not folder.holds_run() or _never_got_going(folder):
        return
    if folder.run_key() != experiment.run_key:
        rounds = rounds_in(folder, experiment)
        if rounds is None:
            what = "this experiment, run with other code" if _reads_the_same(folder, experiment) else \
                "the run of another experiment"
            raise InputError(f"--out: {folder} holds {what}; choose another folder")
        way = f", with --from {folder} to go on from there" if extends and rounds < experiment.rounds else ""
        raise InputError(
            f"rounds: {folder} holds {rounds} rounds of this experiment, not {experiment.rounds}; "
            f"choose another folder{way}"
        )
    found = status(folder)
    if not resume and found in ("unfinished", "failed"):
        kind = "an unfinished" if found == "unfinished" else "a failed"
        raise InputError(f"--out: {folder} holds {kind} run of this experiment; --resume goes on with it")


def _never_got_going(folder: RunFolder) -> bool:
    """Whether nothing would be lost: word of a failure before the first evaluation, or not even that of a start.

    An experiment.yaml alone, without the network.json that a run writes before it, is somebody's own file.
    """
    silent = folder.network.exists() and not folder.events.exists()
    if not silent and status(folder) != "failed":
        return False
    return not any(read_metrics(folder.metrics)) and not folder.checkpoints.exists()


def shorter(place: str | Path, experiment: Experiment) -> RunFolder:
    """The folder of a run of this experiment with fewer rounds, which this one can go on from."""
    if is_url(place):
        raise InputError(f"--from: {place} is not allowed; must be a folder on this machine")
    folder = RunFolder(Path(place))
    if not folder.holds_run():
        raise InputError(f"--from: {place} holds no run")
    if in_use(folder.path):
        raise InputError(f"--from: {place} is in use by another run")
    rounds = rounds_in(folder, experiment)
    if rounds is None:
        code = ", run with other code" if _reads_the_same(folder, experiment) else ""
        raise InputError(f"--from: {place} holds the run of another experiment{code}; only rounds may differ")
    if rounds >= experiment.rounds:
        raise InputError(f"rounds: {experiment.rounds} is not allowed; must be more than the {rounds} of {place}")
    return folder


def other_data(folder: RunFolder) -> InputError:
    return InputError(f"data_dir: {folder} holds a run on other data; give the same data, or another --out")


def lacks(folder: RunFolder, checkpoint: Checkpoint) -> str | None:
    """What is missing of the evaluations up to a checkpoint: going on without them would lose them for good."""
    if checkpoint.run.get("records") != folder.digest_up_to(checkpoint.round):
        return "metrics.jsonl or nodes.jsonl is not what it was when it was taken"
    return None


def _reads_the_same(folder: RunFolder, experiment: Experiment) -> bool:
    """Whether only a plugin, dbo itself or an edges file can have changed since; rounds aside."""
    try:
        found = yaml_io.read(folder.experiment)
    except (InputError, OSError):
        return False
    aside = dict.fromkeys(("rounds", "tracking", "data_dir"))
    return {**found, **aside} == {**masked_in(experiment.recorded()), **aside}


def rounds_in(folder: RunFolder, experiment: Experiment) -> int | None:
    """The rounds of the run in a folder, if these are all in which it may differ from this one."""
    try:
        rounds = int(yaml_io.read(folder.experiment)["rounds"])
    except (InputError, OSError, ValueError, TypeError, KeyError):
        return None
    return rounds if experiment.key_with(rounds) == folder.run_key() else None


def status(folder: RunFolder) -> str:
    """How the run in a folder has ended, if it has."""
    try:
        return str(dict(json.loads(folder.summary.read_bytes()))["status"])
    except (OSError, ValueError, TypeError, KeyError):
        return "unfinished"
