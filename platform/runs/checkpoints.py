"""Checkpoints: every block's state at a round's end, checksummed, replaced only by a complete newer one.

    checkpoints/round-00000020/block-000.safetensors …, manifest.json

A large block is in several files, block-000.1.safetensors and so on, so that it is never in memory twice as a whole.

Written aside, flushed, renamed. Only safetensors and JSON are read back, so a foreign file can at worst be refused.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load

from dbo.platform.errors import InputError
from dbo.platform.runs.atomic_io import sync_folder, write_durably
from dbo.platform.engine.state_tree import Flat
from dbo.platform.runs.safetensors_io import pieces

_FORMAT = 2
_KEPT = 2       # the newest and the one before: should the newest turn out damaged, little is replayed


class Damaged(Exception):
    """A checkpoint that is not what its manifest says."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A round's end: the blocks, and what the run itself remembers."""

    round: int
    blocks: list[Flat]
    run: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run; `trajectory` is the key of the way that it goes, however long."""

    def __init__(self, folder: Path, trajectory: str) -> None:
        self.folder, self.trajectory = folder, trajectory
        self.refused: list[str] = []     # why checkpoints were passed over, for the user to read

    def save(self, round_: int, blocks: Iterable[Iterable[Flat]], run: dict[str, Any]) -> None:
        """Durable when this returns; older ones than the last two are then removed. A block comes in parts."""
        self.folder.mkdir(parents=True, exist_ok=True)
        place = self.folder / f"round-{round_:08d}"
        aside = place.with_name(f".{place.name}.new")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        files = {}
        for number, parts in enumerate(blocks):
            coming = iter(parts)
            for part in count():
                if (flat := next(coming, None)) is None:
                    break
                name = f"block-{number:03d}{f'.{part}' if part else ''}.safetensors"
                files[name] = write_durably(aside / name, pieces(flat))
                del flat                # before the next one comes
        manifest = {"format": _FORMAT, "trajectory": self.trajectory, "round": round_, "run": run, "files": files}
        text = json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1)
        write_durably(aside / "manifest.json", [text.encode()])
        sync_folder(aside)
        shutil.rmtree(place, ignore_errors=True)
        os.rename(aside, place)
        sync_folder(self.folder)
        sync_folder(self.folder.parent)
        for old in list(self._places())[_KEPT:]:
            shutil.rmtree(old, ignore_errors=True)

    def latest(self) -> Checkpoint | None:
        """The newest undamaged checkpoint; `refused` tells of damaged ones."""
        for place in self._places():
            try:
                return self._load(place)
            except Damaged as error:
                self.refused.append(f"{place.name}: {error}")
        return None

    def exist(self) -> bool:
        """Whether there is one, even if it is damaged."""
        return any(self._places())

    def _places(self) -> Iterator[Path]:
        return iter(sorted(self.folder.glob("round-*"), reverse=True))

    def _load(self, place: Path) -> Checkpoint:
        try:
            manifest = dict(json.loads((place / "manifest.json").read_bytes()))
            found, digest = manifest["format"], manifest.pop("sha256", None)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Damaged(f"unreadable manifest ({type(error).__name__})") from None
        if found != _FORMAT:
            raise Damaged(f"written in format {found!r}, this version reads {_FORMAT}")
        if digest != _digest(manifest):
            raise Damaged("the manifest does not match its checksum")
        if manifest["trajectory"] != self.trajectory:
            raise InputError(f"{place}: this checkpoint belongs to another experiment ({manifest['trajectory'][:12]}…)")
        try:
            files, run = dict(manifest["files"]), dict(manifest["run"])
        except (KeyError, TypeError, ValueError):
            raise Damaged("the manifest is not complete") from None
        if any(Path(name).name != name for name in files):
            raise Damaged("the manifest names files of other folders")
        blocks: dict[str, Flat] = {}
        for name, digest in files.items():
            blocks.setdefault(name.partition(".")[0], {}).update(_read_part(place / name, digest))
        return Checkpoint(manifest["round"], list(blocks.values()), run)


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def _read_part(path: Path, digest: str) -> Flat:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read ({error.strerror})") from None
    if hashlib.sha256(data).hexdigest() != digest:
        raise Damaged(f"{path.name} does not match its checksum")
    try:
        return load(data)
    except SafetensorError as error:
        raise Damaged(f"{path.name}: {error}") from None
