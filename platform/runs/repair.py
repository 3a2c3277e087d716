"""Repair a sealed run from what is left of it: copies in the manifest, checkpoints, and the rounds since.

Nothing that cannot be proven is written: a repaired file has the checksum of the manifest, or it is the result of
rounds that were replayed from an intact checkpoint with the same code and environment.
"""

import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbo.algorithms.registry import algorithms
from dbo.platform.config.engines import select_decisive
from dbo.platform.config.experiment import Experiment
from dbo.platform.config.redact import has_redacted_path
from dbo.platform.engine.base import gather_rows
from dbo.platform.engine.state_tree import unflatten
from dbo.platform.errors import InputError
from dbo.platform.runs.atomic_io import truncate
from dbo.platform.runs.checkpoints import Checkpoint, Checkpoints
from dbo.platform.runs.run_folder import RunFolder, find_manifest, read_experiment
from dbo.platform.runs.runner import run
from dbo.platform.runs.safetensors_io import serialize
from dbo.platform.runs.schema import section
from dbo.platform.runs.seal import (
    Verdict,
    check_run,
    is_repairable,
    measure_file,
    measure_pieces,
    restore_copies,
)

_CODE = ("plugins", "data_dir")       # what a foreign experiment could make this machine execute


def repair_run(folder: Path) -> tuple[Verdict, list[str]]:
    """Repair what is damaged; return the verdict after it, and what was done. Code of a foreign folder is never run."""
    verdict = check_run(folder)
    if verdict.state != "damaged":
        return verdict, []
    files, done = RunFolder(folder), []
    files.acquire()
    try:
        done += [f"restored {name} from the manifest" for name in restore_copies(files, end_run=True)]
        done += _cut_tails(files)
        if _restore_state(files):
            done.append(f"restored {files.state.name} from the last checkpoint")
    finally:
        files.release()
    verdict = check_run(folder)
    if not verdict.damage:
        return verdict, done
    if not any(is_repairable(files, damage) for damage in verdict.damage):
        return replace(verdict, note="cannot be repaired; the results are intact"), done
    if problem := _find_code(folder):
        return replace(verdict, note=problem), done
    recorded = read_experiment(folder)
    if has_redacted_path(str(section(recorded, "tracking").get("uri"))):
        recorded["tracking"] = {}                       # nothing is sent to MLflow here
    recorded["engine"] = select_decisive(section(recorded, "engine"))
    run(Experiment(**recorded), folder, resume=True)    # replays from the newest intact evaluations
    return check_run(folder), [*done, "replayed the rounds after the newest intact checkpoint"]


def _find_code(folder: Path) -> str:
    """Return why the rounds of a run are not replayed here: its experiment names code or data of its own."""
    try:
        recorded = read_experiment(folder)
    except InputError as error:
        return str(error)
    named = [key for key in _CODE if recorded.get(key)]
    command = shlex.join(["dbo", "run", str(folder / "experiment.yaml"), "--out", str(folder), "--resume"])
    return f"the experiment names {' and '.join(named)}; if you trust them: {command}" if named else ""


def _cut_tails(folder: RunFolder) -> list[str]:
    """Cut off what was appended to a file after the seal, if what is before it matches."""
    manifest = find_manifest(folder.path)
    done = []
    for path in (folder.metrics, folder.nodes, folder.network, folder.state):
        sealed = manifest.files.get(path.name) if manifest else None
        if sealed and measure_file(path) != sealed and measure_file(path, sealed.size) == sealed:
            truncate(path, sealed.size)
            done.append(f"cut off what was appended to {path.name}")
    return done


def _restore_state(folder: RunFolder) -> bool:
    """Write state.safetensors from the newest checkpoint that gives the sealed checksum; return whether it did."""
    manifest = find_manifest(folder.path)
    sealed = manifest.files.get(folder.state.name) if manifest else None
    if sealed is None or measure_file(folder.state) == sealed:
        return False
    with suppress(InputError, KeyError, TypeError, ValueError):       # not a checkpoint of this method's code
        for checkpoint in Checkpoints(folder.checkpoints, "", allow_other=True).load_each():
            state = _gather_state(checkpoint, str(section(read_experiment(folder.path), "algorithm").get("name")))
            if measure_pieces(serialize(state)) == sealed:
                folder.write_state(state)
                return True
    return False


def _gather_state(checkpoint: Checkpoint, algorithm: str) -> dict[str, NDArray[Any]]:
    """Return x, y and z of all nodes at a checkpoint of a built-in algorithm."""
    kind = algorithms()[algorithm].state
    prefix = "state."
    states = [
        unflatten(kind, {name.removeprefix(prefix): array for name, array in block.items() if name.startswith(prefix)})
        for block in checkpoint.blocks
    ]
    names = [name for name in ("x", "y", "z") if hasattr(states[0], name)]
    blocks = checkpoint.run["blocks"]
    return {name: np.asarray(gather_rows(blocks, (getattr(state, name) for state in states))) for name in names}
