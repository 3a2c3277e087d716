"""Tests 6 and 7, the disk: full at any write, and bits that flip in checkpoints and packets."""

import builtins
import errno
import os
import random
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dbo.algorithms.gossip import dense
from dbo.platform.config.experiment import Experiment
from dbo.platform.network import wire
from dbo.platform.runs import checkpoints as module
from dbo.platform.runs.checkpoints import Checkpoints
from dbo.platform.runs.runner import run
from dbo.platform.runs.safetensors_io import pieces
from tests.faults.row import TINY, Row, digest, lines, timed


class _Full:
    """A file of a disk that is full from some write on: what is written then goes half way and raises."""

    def __init__(self, file: Any, disk: "Disk") -> None:
        self._file, self._disk = file, disk

    def write(self, data: Any) -> Any:
        self._disk.writes += 1
        if self._disk.writes > self._disk.room:
            self._disk.refused += 1
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
        return self._file.write(data)

    def __enter__(self) -> "_Full":
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Disk:
    """Counts writes below a folder, and has room for so many of them."""

    def __init__(self, folder: Path, room: int = 1 << 60) -> None:
        self.folder, self.room, self.writes, self.refused = str(folder), room, 0, 0

    @contextmanager
    def attached(self) -> Iterator[None]:
        real = builtins.open

        def opened(file: Any, mode: str = "r", *more: Any, **named: Any) -> Any:
            made = real(file, mode, *more, **named)
            written = any(letter in mode for letter in "wax") and ".lock" not in str(file)
            ours = written and str(file).startswith(self.folder)
            return _Full(made, self) if ours else made

        with mock.patch.object(builtins, "open", opened):
            yield


def disk_full(short: bool, sabotage: bool = False) -> Row:
    """A run on a disk that is full from the n-th write on, for every n; resumed when there is room again.

    Sabotage: checkpoints are written in place, as a program without a thought for this would.
    """
    row = Row("disk full", "0 corrupt checkpoints")
    experiment = Experiment(**{**TINY, "rounds": 6 if short else 12, "checkpoint_every": 2})
    with tempfile.TemporaryDirectory() as place:
        calm = Path(place) / "calm"
        counted = Disk(calm)
        with counted.attached():
            run(experiment, calm)
        every = range(0, counted.writes, 4 if short else 1)
        for room in every:
            folder = Path(place) / f"full-{room}"
            disk, told = Disk(folder, room), False
            with disk.attached(), _in_place() if sabotage else nullcontext():
                try:
                    run(experiment, folder)
                except Exception as error:
                    told = "No space left" in str(error)
            good = told and disk.refused > 0
            if (folder / "checkpoints").is_dir() and not _loadable(folder / "checkpoints", experiment.trajectory_key):
                row.count(False, f"full after {room} writes: the old checkpoint cannot be read")
                continue
            with timed(row):
                run(experiment, folder, resume=True)
            lines(row, folder, experiment.rounds + 1)
            row.count(good and digest(folder) == digest(calm), f"full after {room} writes: told={told} or other bits")
    if not sabotage:
        _on_tmpfs(row, experiment, 3 if short else 12)
    return row


def _loadable(folder: Path, key: str) -> bool:
    """Whether what claims to be a checkpoint is one."""
    found = Checkpoints(folder, key)
    found.latest()
    return not found.refused


@contextmanager
def _in_place() -> Iterator[None]:
    def save(self: Checkpoints, round_: int, blocks: Any, run: Any) -> None:
        place = self.place(round_)
        place.mkdir(parents=True, exist_ok=True)
        with builtins.open(place / "manifest.json", "w") as file:
            file.write('{"format": 2}')
        for number, parts in enumerate(blocks):
            with builtins.open(place / f"block-{number:03d}.safetensors", "wb") as file:
                for piece in pieces(next(iter(parts))):
                    file.write(piece)

    with mock.patch.object(Checkpoints, "save", save):
        yield


def _on_tmpfs(row: Row, experiment: Experiment, tries: int) -> None:
    """The same on a real file system of a few pages, where mounting one is allowed."""
    for number in range(tries):
        with tempfile.TemporaryDirectory() as place:
            size = 4096 * (6 + 3 * number)
            mounted = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True, check=False
            ).returncode == 0
            if not mounted:
                row.notes.append("no tmpfs could be mounted: writes were refused in process only")
                return
            try:
                told = False
                try:
                    run(experiment, Path(place) / "r")
                except Exception as error:
                    told = "No space left" in str(error)
                whole = _loadable(Path(place) / "r" / "checkpoints", experiment.trajectory_key)
                finished = (Path(place) / "r" / "summary.json").exists()
                row.count(whole and (told or finished), f"tmpfs of {size} bytes: told={told}, whole={whole}")
            finally:
                subprocess.run(["umount", place], capture_output=True, check=False)


def damage(data: bytes, rng: random.Random) -> bytes:
    """Cut off, a bit flipped, or a byte more."""
    at = rng.randrange(len(data))
    flipped = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    return rng.choice([data[:at], flipped, flipped, data + b"\0"])


def flips(short: bool, sabotage: bool = False) -> Row:
    """Damaged checkpoints and packets, half each. Sabotage: checksums are not looked at."""
    row = Row("bit flips", "0 accepted")
    rng, tries = random.Random(0), 60 if short else 1000
    with tempfile.TemporaryDirectory() as place, _unchecked() if sabotage else nullcontext():
        made = Checkpoints(Path(place) / "c", "key")
        numbers = np.random.default_rng(0)
        for round_ in (10, 20):
            made.save(round_, [[{"x": numbers.standard_normal((4, 6))}]], {"training": 1.0})
        newest = made.folder / "round-00000020"
        good = made.latest()
        assert good is not None
        files = sorted(newest.iterdir())
        for number in range(tries // 2):
            file = files[number % len(files)]
            right = file.read_bytes()
            file.write_bytes(damage(right, rng))
            with timed(row):
                found = made.latest()
            same = found is not None and found.blocks[0]["x"].tobytes() == good.blocks[0]["x"].tobytes()
            # White space between a manifest's values means nothing: it is still the checkpoint; else the one before.
            row.count(found is not None and (found.round == 10 or (same and found.run == good.run)), f"{file.name}")
            file.write_bytes(right)
        header = wire.Header(sender=0, epoch=0, round=1, step=0)
        packet = wire.encode(header, {"y": dense(numbers.standard_normal((1, 12)))}, 0)
        for _ in range(tries // 2):
            bad = damage(packet, rng)
            try:
                wire.decode(bad)
                row.count(bad == packet, "a damaged packet was believed")
            except wire.WireError:
                row.count(True)
    return row


@contextmanager
def _unchecked() -> Iterator[None]:
    with mock.patch.object(module.hashlib, "sha256", _Agreeable), mock.patch.object(wire, "crc32", return_value=0):
        yield


class _Agreeable:
    """A checksum that is always the same."""

    def __init__(self, *data: bytes) -> None: ...
    def update(self, data: bytes) -> None: ...
    def hexdigest(self) -> str:
        return "0"
