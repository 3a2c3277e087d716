"""What an earlier run left in a folder: whether it is this one, and may be repeated, gone on with or lengthened."""

import json

from dbo.platform import paths, yaml_text
from dbo.platform.errors import InputError
from dbo.platform.experiment import Experiment
from dbo.platform.records import RunFolder


def check_folder(folder: RunFolder, experiment: Experiment, resume: bool, lengthen: bool = False) -> None:
    """An earlier run is replaced only by its own repetition, which gives the same results, or by its continuation."""
    if not folder.holds_run():
        return
    if key_in(folder, experiment) == experiment.run_key:
        if not resume and (found := status(folder)) in ("unfinished", "failed"):
            kind = "an unfinished" if found == "unfinished" else "a failed"
            raise InputError(f"--out: {folder.path} holds {kind} run of this experiment; --resume goes on with it")
        return
    rounds = rounds_in(folder, experiment)
    if rounds is None:
        raise InputError(f"--out: {folder.path} holds the run of another experiment; choose another folder")
    if rounds > experiment.rounds or not lengthen:
        way = "choose" if resume or rounds > experiment.rounds else "--resume goes on with it, or choose"
        raise InputError(
            f"rounds: {folder.path} holds {rounds} rounds of this experiment, not {experiment.rounds}; "
            f"{way} another folder"
        )


def key_in(folder: RunFolder, experiment: Experiment) -> str | None:
    """The key of the run in a folder. The summary's is that of the code and plugins with which the run was made."""
    try:
        if folder.summary.exists():
            return str(dict(json.loads(folder.summary.read_bytes()))["run_key"])
        # Reading an experiment runs its plugins: those of a folder that only lies here must not be run. This one's
        # stand for files of the same names, which a job may have in another place each time.
        found, own = yaml_text.read(folder.experiment), experiment.resolved()
        if paths.names(found) != paths.names(own):
            return None
        if "file" in own["topology"]:
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
