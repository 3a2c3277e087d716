"""Save and load checkpoints: every block's state at the end of a round, with checksums.

    checkpoints/round-00000020/block-000.safetensors …, manifest.json

A large block is split into several files (block-000.1.safetensors, …), so that it is never in memory twice as a whole.
A checkpoint is written aside, flushed and renamed; an older one is removed only after that. Only safetensors and JSON
are read back, so a foreign file is at worst refused.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load

from dbo.platform.engine.state_tree import Flat
from dbo.platform.errors import InputError
from dbo.platform.regular_files import open_regular
from dbo.platform.runs.atomic_io import (
    describe_errors,
    read_bounded,
    sync_folder,
    temporary_path,
    write_durably,
)
from dbo.platform.runs.safetensors_io import serialize

_FORMAT = 2
_MAX_MANIFEST = 64 << 20     # bytes
KEPT = 2        # while a run goes on: the newest and the one before, in case the newest is damaged
_NAME = re.compile(r"round-[0-9]+")
_LEFTOVER = re.compile(r"\.round-[0-9]+(\.[0-9a-f]{16})?\.new")       # without the token: of older versions


class DamagedError(Exception):
    """A checkpoint does not match its manifest."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The blocks at the end of a round, and the run's own data: clocks, packing, digests."""

    round: int
    blocks: list[Flat]
    run: dict[str, Any]
    trajectory: str = ""


class Checkpoints:
    """The checkpoints of one run. Runs of one experiment have the same trajectory key, whatever their length."""

    def __init__(self, folder: Path, trajectory: str, allow_other: bool = False, keep: int = KEPT) -> None:
        """`allow_other`: load checkpoints of other trajectories too; the caller knows that only the code differs.

        `keep`: how many `save` leaves, two at least.
        """
        self.folder, self.trajectory, self._allow_other = folder, trajectory, allow_other
        self._keep = max(KEPT, keep)
        self.refused: list[str] = []     # why checkpoints were skipped, for the user to read

    def save(self, round_: int, blocks: Iterable[Iterable[Flat]], run: dict[str, Any]) -> None:
        """Write a checkpoint, durable on return, and remove old ones. A block comes in parts."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for entry in self._list_leftovers():
            remove_checkpoint(entry)
        place = self.folder / f"round-{round_:08d}"
        aside = temporary_path(place)
        try:
            with describe_errors(place, f"the checkpoint of round {round_}"):
                self._write(aside, round_, blocks, run)
                remove_checkpoint(place)
                os.rename(aside, place)
                sync_folder(self.folder)
                sync_folder(self.folder.parent)
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)     # it would keep a full disk full
            raise
        self.prune(self._keep)

    def _write(self, aside: Path, round_: int, blocks: Iterable[Iterable[Flat]], run: dict[str, Any]) -> None:
        aside.mkdir()
        files = {}
        for number, parts in enumerate(blocks):
            remaining = iter(parts)
            for part in count():
                if (flat := next(remaining, None)) is None:
                    break
                name = f"block-{number:03d}{f'.{part}' if part else ''}.safetensors"
                files[name] = write_durably(aside / name, serialize(flat))
                del flat                # before the next part is made
        manifest = {"format": _FORMAT, "trajectory": self.trajectory, "round": round_, "run": run, "files": files}
        text = json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1)
        write_durably(aside / "manifest.json", [text.encode()])
        sync_folder(aside)

    def load_latest(self, with_blocks: bool = True) -> Checkpoint | None:
        """Return the newest undamaged checkpoint; `refused` has the reasons why newer ones were skipped.

        Without its blocks only the manifest is read, and checked.
        """
        return next(self.load_each(with_blocks), None)

    def load_each(self, with_blocks: bool = True) -> Iterator[Checkpoint]:
        """Yield the undamaged checkpoints, the newest first; `refused` has the reasons why others were skipped."""
        for place in self._list_newest_first():
            try:
                yield self._load(place, with_blocks)
            except DamagedError as error:
                self.refused.append(f"{place.name}: {error}")

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints, and the folder if it is empty then."""
        for old in self._list_newest_first()[keep:]:
            remove_checkpoint(old)
        self.remove_if_empty()

    def remove_if_empty(self) -> None:
        """Remove the folder if nothing is in it."""
        with suppress(OSError):
            self.folder.rmdir()

    def list_removable(self, keep: int) -> list[Path]:
        """Return all but the newest `keep` checkpoints, and what a process that died has left."""
        return [*self._list_newest_first()[keep:], *self._list_leftovers()]

    def list_older_than_usable(self, is_usable: Callable[[Checkpoint], bool]) -> list[Path]:
        """Return the same, but keep all down to the newest that matches its checksums and that the caller can use."""
        places = self._list_newest_first()
        usable = (number for number, place in enumerate(places, 1) if self._is_intact(place, is_usable))
        return self.list_removable(next(usable, len(places)))

    def _is_intact(self, place: Path, is_usable: Callable[[Checkpoint], bool]) -> bool:
        try:
            return is_usable(self._load(place, with_blocks=True))
        except DamagedError:
            return False

    def remove_newer(self, round_: int) -> None:
        """Remove checkpoints after a round to which a run has returned.

        They were skipped because they are damaged, or because their evaluations are gone. They would count as the
        newest ones: `prune` would keep them instead of good ones, and a recovery would fail with them.
        """
        for place in self._list_newest_first():
            if _read_round(place) > round_:
                remove_checkpoint(place)

    def _list_leftovers(self) -> list[Path]:
        """Return what was not written to its end; the folder's lock keeps other writers out."""
        return [entry for entry in self.folder.iterdir() if _LEFTOVER.fullmatch(entry.name)]

    def has_any(self) -> bool:
        """Decide whether there is a checkpoint, damaged or not."""
        return bool(self._list_newest_first())

    def _list_newest_first(self) -> list[Path]:
        """Return the checkpoints by round: from round 10⁸ on, names do not sort as text."""
        places = [place for place in self.folder.glob("round-*") if _NAME.fullmatch(place.name)]
        return sorted(places, key=_read_round, reverse=True)

    def _load(self, place: Path, with_blocks: bool) -> Checkpoint:
        try:
            manifest = dict(json.loads(read_bounded(place / "manifest.json", _MAX_MANIFEST)))
            found, digest = manifest["format"], manifest.pop("sha256", None)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"unreadable manifest ({type(error).__name__})") from None
        if found != _FORMAT:
            raise DamagedError(f"written in format {found!r}, this version reads {_FORMAT}")
        if digest != _digest(manifest):
            raise DamagedError("the manifest does not match its checksum")
        trajectory, round_ = manifest.get("trajectory"), manifest.get("round")
        files, run = manifest.get("files"), manifest.get("run")
        if not isinstance(trajectory, str) or type(round_) is not int or round_ < 0 or not isinstance(run, dict) or \
                not isinstance(files, dict) or not all(isinstance(digest, str) for digest in files.values()):
            raise DamagedError("the manifest is not complete")
        if trajectory != self.trajectory and not self._allow_other:
            raise InputError(
                f"{place}: this checkpoint belongs to another experiment, or to other code ({trajectory[:12]}…)"
            )
        if any(Path(name).name != name for name in files):
            raise DamagedError("the manifest names files of other folders")
        blocks: dict[str, Flat] = {}
        for name, digest in files.items() if with_blocks else ():
            blocks.setdefault(name.partition(".")[0], {}).update(_load_part(place / name, digest))
        return Checkpoint(round_, list(blocks.values()), run, trajectory)


def _read_round(place: Path) -> int:
    return int(place.name.removeprefix("round-"))


def remove_checkpoint(place: Path) -> None:
    """Remove a checkpoint, or whatever is in its place; a symbolic link is removed, not what it points to."""
    if place.is_symlink() or place.is_file():
        place.unlink(missing_ok=True)
    else:
        shutil.rmtree(place, ignore_errors=True)


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def _load_part(path: Path, digest: str) -> Flat:
    try:
        with open(path, "rb", opener=open_regular) as file:
            data = file.read()
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read ({error.strerror})") from None
    if hashlib.sha256(data).hexdigest() != digest:
        raise DamagedError(f"{path.name} does not match its checksum")
    try:
        return load(data)
    except SafetensorError as error:
        raise DamagedError(f"{path.name}: {error}") from None
