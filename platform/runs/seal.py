"""Seal a run that has ended, and verify the seal: manifest.json has size and SHA-256 of every final file.

A finished or diverged run is sealed. The manifest is written before summary.json, so a sealed summary without its
manifest is damage. events.jsonl may grow after the seal: only its beginning is compared. Pictures and the report can be
drawn again and are not sealed. Verifying needs constant memory, and compares sizes before it reads any file.
"""

import hashlib
import os
import shlex
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dbo.platform.errors import InputError
from dbo.platform.runs import schema
from dbo.platform.runs.atomic_io import read_chunks, write_atomically
from dbo.platform.runs.run_folder import (
    RunFolder,
    find_manifest,
    is_locked,
    iterate_metrics,
    read_manifest,
    read_summary,
)
from dbo.platform.runs.schema import FileDigest, Manifest, Summary

_MISSING = "is missing"


@dataclass(frozen=True, slots=True)
class Damage:
    """A file that is not as the run left it."""

    file: str
    problem: str

    def __str__(self) -> str:
        return f"{self.file} {self.problem}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check of a run folder found."""

    folder: Path
    state: Literal["intact", "not sealed", "damaged"]
    damage: tuple[Damage, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        more = "; ".join([*map(str, self.damage), *([self.note] if self.note else [])])
        return f"{self.folder}: {self.state}{f': {more}' if more else ''}"


# ---- writing ---------------------------------------------------------------------------------------------------------


def seal_run(folder: RunFolder, summary: Summary, files: dict[str, FileDigest] | None = None) -> None:
    """Write manifest.json, then summary.json. `files`: digests of the other files; default: of what was written."""
    text = schema.serialize_summary(summary)
    sealed = dict(folder.list_written() if files is None else files)
    if (events := measure_file(folder.events)) is not None:
        sealed[folder.events.name] = events
    sealed[folder.summary.name] = measure_pieces([text.encode()])
    copies = {folder.summary.name: text}
    with suppress(OSError, UnicodeDecodeError):         # somebody has removed or damaged it during the run
        copies[folder.experiment.name] = folder.experiment.read_text(encoding="utf-8")
    manifest = Manifest(summary.run_key, summary.status, sealed, copies)
    write_atomically(folder.manifest, schema.serialize_manifest(manifest), "the manifest")
    folder.write_summary(summary)


def measure_files(folder: RunFolder) -> dict[str, FileDigest]:
    """Return the digests of the files of a run as they are on the disk."""
    paths = (folder.experiment, folder.network, folder.metrics, folder.nodes, folder.state)
    return {path.name: digest for path in paths if (digest := measure_file(path)) is not None}


def measure_file(path: Path, size: int | None = None) -> FileDigest | None:
    """Return the digest of a file, or of its first `size` bytes; None if it is missing."""
    if (found := _find_size(path)) is None:
        return None
    return measure_pieces(read_chunks(path, found if size is None else size))


def measure_pieces(pieces: Iterable[bytes | memoryview]) -> FileDigest:
    """Return the digest of a file with this content."""
    digest, length = hashlib.sha256(), 0
    for piece in pieces:
        digest.update(piece)
        length += len(piece)
    return FileDigest(length, digest.hexdigest())


def _find_size(path: Path) -> int | None:
    """Return the size of a regular file; None for everything else: reading a pipe would wait for ever."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


# ---- verifying -------------------------------------------------------------------------------------------------------


def check_run(folder: Path) -> Verdict:
    """Compare a run folder with its manifest. Without one: read its lines, as far as they show damage themselves."""
    try:
        manifest = read_manifest(folder)
    except InputError as error:
        return Verdict(folder, "damaged", (Damage(RunFolder(folder).manifest.name, _shorten(error)),))
    if manifest is None:
        return _check_unsealed(folder)
    damage = find_damage(folder, manifest)
    return Verdict(folder, "damaged" if damage else "intact", damage)


def find_damage(folder: Path, manifest: Manifest) -> tuple[Damage, ...]:
    """Return which files differ from the manifest. Sizes are compared first: most damage is found without reading."""
    damage, growing = [], RunFolder(folder).events.name
    for name, sealed in manifest.files.items():
        size = _find_size(folder / name)
        if size is None:
            damage.append(Damage(name, _MISSING))
        elif size < sealed.size or (size > sealed.size and name != growing):
            damage.append(Damage(name, f"has {size} bytes instead of {sealed.size}"))
        elif measure_file(folder / name, sealed.size) != sealed:
            damage.append(Damage(name, "does not match its checksum"))
    return tuple(damage)


def _check_unsealed(folder: Path) -> Verdict:
    files = RunFolder(folder)
    try:
        summary = read_summary(folder)
    except InputError as error:
        return Verdict(folder, "damaged", (Damage(files.summary.name, _shorten(error)),))
    if summary is not None and summary.sealed:
        return Verdict(folder, "damaged", (Damage(files.manifest.name, _MISSING),))
    for path in (files.metrics, files.nodes):
        try:
            for _ in iterate_metrics(path):
                pass
        except InputError as error:
            return Verdict(folder, "damaged", (Damage(path.name, str(error).partition(": ")[2]),))
    if summary is None:
        return Verdict(folder, "not sealed", note="the run has not ended")
    if summary.status == "finished" and _find_size(files.state) is None:
        return Verdict(folder, "damaged", (Damage(files.state.name, _MISSING),))
    note = "a failed run" if summary.status == "failed" else "written by an older version"
    return Verdict(folder, "not sealed", note=note)


def is_repairable(folder: RunFolder, damage: Damage) -> bool:
    """Decide whether a run can give a file back: the log of events comes from nowhere else."""
    return damage.file != folder.events.name


def require_intact(folders: Iterable[Path]) -> None:
    """Raise an InputError that names the first damaged file of sealed runs; runs without a seal pass.

    A summary that is missing is no error: readers show such a run as interrupted.
    """
    for folder in folders:
        absent = Damage(RunFolder(folder).summary.name, _MISSING)
        try:
            manifest = read_manifest(folder)
            damage = find_damage(folder, manifest) if manifest else ()
        except InputError as error:
            damage = (Damage(RunFolder(folder).manifest.name, _shorten(error)),)
        damage = tuple(found for found in damage if found != absent)
        if damage and not is_locked(folder):        # a run that has just restarted removes its files
            raise InputError(describe_damage(folder, damage))


def describe_damage(folder: Path, damage: Iterable[Damage]) -> str:
    """Return one line: what is damaged, and which command repairs it."""
    first, *more = damage
    command = shlex.join(["dbo", "check", "--repair", str(folder)])
    return "; ".join([f"{folder / first.file} {first.problem}", *map(str, more), command])


def restore_copies(folder: RunFolder, end_run: bool = False) -> list[str]:
    """Write damaged small files again from their copies in the manifest; return their names. The caller has the lock.

    A summary that is missing means that the run has not ended: only `end_run` restores it.
    """
    manifest = find_manifest(folder.path)
    if manifest is None:
        return []
    restored = []
    has_ended = folder.summary.exists() or end_run
    for name in _list_copied(folder) if has_ended else ():
        text, sealed = manifest.copies.get(name), manifest.files.get(name)
        if text is None or sealed is None or measure_file(folder.path / name) == sealed:
            continue
        if measure_pieces([text.encode()]) == sealed:
            write_atomically(folder.path / name, text, name)
            restored.append(name)
    return restored


def _list_copied(folder: RunFolder) -> tuple[str, str]:
    """Return what no computation gives back: the clocks, and what was to be run."""
    return folder.summary.name, folder.experiment.name


def _shorten(error: InputError) -> str:
    """Return what is wrong without the path, which the verdict names."""
    return str(error).partition(": ")[2]
