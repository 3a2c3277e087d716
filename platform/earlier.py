"""What an earlier run left in a folder: whether it is this one, and may be repeated or gone on with, here or there."""

import json
from pathlib import Path

from dbo.platform import paths, yaml_text
from dbo.platform.checkpoints import Checkpoints
from dbo.platform.errors import InputError
from dbo.platform.experiment import Experiment
from dbo.platform.masking import masked_in
from dbo.platform.records import RunFolder, in_use, read_metrics
from dbo.platform.storage import is_url


def check_folder(folder: RunFolder, experiment: Experiment, resume: bool) -> None:
    """An earlier run is replaced only by its own repetition, which gives the same results."""
    if not folder.holds_run() or _never_got_going(folder):
        return
    if key_in(folder, experiment) != experiment.run_key:
        rounds = rounds_in(folder, experiment)
        if rounds is None:
            raise InputError(f"--out: {folder.path} holds the run of another experiment; choose another folder")
        way = f", with --from {folder.path} to go on from there" if rounds < experiment.rounds else ""
        raise InputError(
            f"rounds: {folder.path} holds {rounds} rounds of this experiment, not {experiment.rounds}; "
            f"choose another folder{way}"
        )
    found = status(folder)
    if not resume and found in ("unfinished", "failed"):
        kind = "an unfinished" if found == "unfinished" else "a failed"
        raise InputError(f"--out: {folder.path} holds {kind} run of this experiment; --resume goes on with it")


def _never_got_going(folder: RunFolder) -> bool:
    """Whether all that the folder holds is word of a failure before the first evaluation: a slip in a plugin, say."""
    return status(folder) == "failed" and not any(read_metrics(folder.metrics)) and not folder.checkpoints.exists()


def adopt(source: str | Path, folder: RunFolder, experiment: Experiment, data: str | None) -> None:
    """Takes over what a shorter run has done, its records and its newest checkpoint; that run stays as it is."""
    if is_url(source):
        raise InputError(f"--from: {source} is not allowed; must be a folder on this machine")
    shorter = RunFolder(Path(source))
    if not shorter.holds_run():
        raise InputError(f"--from: {source} holds no run")
    if in_use(shorter.path):
        raise InputError(f"--from: {source} is in use by another run")
    rounds = rounds_in(shorter, experiment)
    if rounds is None:
        raise InputError(f"--from: {source} holds the run of another experiment; only rounds may differ")
    if rounds >= experiment.rounds:
        raise InputError(f"rounds: {experiment.rounds} is not allowed; must be more than the {rounds} of {source}")
    checkpoints = Checkpoints(shorter.checkpoints, experiment.trajectory_key)
    checkpoint = checkpoints.latest()
    if checkpoint is None:
        raise InputError(f"--from: {source} has no checkpoint to go on from")
    if checkpoint.run.get("data") != data:
        raise other_data(shorter)
    folder.take_over(shorter, checkpoints.place(checkpoint.round), yaml_text.dump(masked_in(experiment.recorded())))


def other_data(folder: RunFolder) -> InputError:
    return InputError(f"data_dir: {folder.path} holds a run on other data; give the same data, or another --out")


def key_in(folder: RunFolder, experiment: Experiment) -> str | None:
    """The key of the run in a folder. The summary's is that of the code and plugins with which the run was made."""
    try:
        if folder.summary.exists():
            return str(dict(json.loads(folder.summary.read_bytes()))["run_key"])
        # Reading an experiment runs its plugins: those of a folder that only lies here must not be run. This one's
        # stand for files of the same names, which a job may have in another place each time; so do edges that are gone.
        found, own = yaml_text.read(folder.experiment), experiment.resolved()
        if paths.names(found) != paths.names(own):
            return None
        if "file" in own["topology"] and not Path(found["topology"]["file"]).expanduser().exists():
            found["topology"]["file"] = own["topology"]["file"]
        return Experiment(**{**found, "plugins": own["plugins"]}).run_key
    except (InputError, OSError, ValueError, TypeError, KeyError):
        return None


def rounds_in(folder: RunFolder, experiment: Experiment) -> int | None:
    """The rounds of the run in a folder, if these are all in which it may differ from this one."""
    try:
        rounds = yaml_text.read(folder.experiment)["rounds"]
        same = Experiment(**{**experiment.resolved(), "rounds": rounds}).run_key == key_in(folder, experiment)
    except (InputError, OSError, ValueError, TypeError, KeyError):
        return None
    return int(rounds) if same else None


def status(folder: RunFolder) -> str:
    """How the run in a folder has ended, if it has."""
    try:
        return str(dict(json.loads(folder.summary.read_bytes()))["status"])
    except (OSError, ValueError, TypeError, KeyError):
        return "unfinished"
