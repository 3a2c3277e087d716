"""Fill the disk at any write, and flip bits in checkpoints and packets."""

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
from dbo.platform.network import packet as wire
from dbo.platform.runs import checkpoints as module
from dbo.platform.runs.checkpoints import Checkpoints
from dbo.platform.runs.runner import run
from dbo.platform.runs.safetensors_io import serialize
from tests.faults.row import TINY, Row, count_evaluations, hash_run, measure_time


class _FullFile:
    """A file on a disk that fills up: the write that does not fit is half done and raises."""

    def __init__(self, file: Any, disk: "Disk") -> None:
        self._file, self._disk = file, disk

    def write(self, data: Any) -> Any:
        self._disk.writes += 1
        if self._disk.writes > self._disk.capacity:
            self._disk.refused += 1
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
        return self._file.write(data)

    def __enter__(self) -> "_FullFile":
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Disk:
    """Counts the writes below a folder, and has the capacity for so many of them."""

    def __init__(self, folder: Path, capacity: int = 1 << 60) -> None:
        self.folder, self.capacity, self.writes, self.refused = str(folder), capacity, 0, 0

    @contextmanager
    def attach(self) -> Iterator[None]:
        """Replace `open` for files below the folder."""
        open_file = builtins.open

        def open_on_disk(file: Any, mode: str = "r", *more: Any, **named: Any) -> Any:
            opened = open_file(file, mode, *more, **named)
            is_written = any(letter in mode for letter in "wax") and ".lock" not in str(file)
            return _FullFile(opened, self) if is_written and str(file).startswith(self.folder) else opened

        with mock.patch.object(builtins, "open", open_on_disk):
            yield


def disk_full(short: bool, sabotage: bool = False) -> Row:
    """Run on a disk that is full from the n-th write on, for every n, and resume with free space.

    Sabotage: checkpoints are written in place instead of aside.
    """
    row = Row("disk full", "0 corrupt checkpoints")
    experiment = Experiment(**{**TINY, "rounds": 6 if short else 12, "checkpoint_every": 2})
    with tempfile.TemporaryDirectory() as base:
        undisturbed = Path(base) / "undisturbed"
        unlimited = Disk(undisturbed)
        with unlimited.attach():
            run(experiment, undisturbed)
        for capacity in range(0, unlimited.writes, 4 if short else 1):
            folder = Path(base) / f"full-{capacity}"
            disk = Disk(folder, capacity)
            with disk.attach(), _save_in_place() if sabotage else nullcontext():
                is_reported = _run_until_full(experiment, folder)
            checkpoints = folder / "checkpoints"
            if checkpoints.is_dir() and not _can_load(checkpoints, experiment.trajectory_key):
                row.count(False, f"full after {capacity} writes: the old checkpoint cannot be read")
                continue
            with measure_time(row):
                run(experiment, folder, resume=True)
            count_evaluations(row, folder, experiment.rounds + 1)
            is_same = hash_run(folder) == hash_run(undisturbed)
            row.count(
                is_reported and disk.refused > 0 and is_same,
                f"full after {capacity} writes: reported={is_reported}, same bits={is_same}")
    if not sabotage:
        _fill_tmpfs(row, experiment, 3 if short else 12)
    return row


def _run_until_full(experiment: Experiment, folder: Path) -> bool:
    """Run, and return whether the error names the full disk."""
    try:
        run(experiment, folder)
    except Exception as error:
        return "No space left" in str(error)
    return False


def _can_load(folder: Path, trajectory: str) -> bool:
    """Decide whether every checkpoint in a folder is undamaged, up to the newest one that is."""
    checkpoints = Checkpoints(folder, trajectory)
    checkpoints.load_latest()
    return not checkpoints.refused


@contextmanager
def _save_in_place() -> Iterator[None]:
    def save(self: Checkpoints, round_: int, blocks: Any, run: Any) -> None:
        place = self.folder / f"round-{round_:08d}"
        place.mkdir(parents=True, exist_ok=True)
        with builtins.open(place / "manifest.json", "w") as file:
            file.write('{"format": 2}')
        for number, parts in enumerate(blocks):
            with builtins.open(place / f"block-{number:03d}.safetensors", "wb") as file:
                for piece in serialize(next(iter(parts))):
                    file.write(piece)

    with mock.patch.object(Checkpoints, "save", save):
        yield


def _fill_tmpfs(row: Row, experiment: Experiment, tries: int) -> None:
    """Run on a real file system of a few pages, where one may be mounted."""
    for number in range(tries):
        with tempfile.TemporaryDirectory() as base:
            size = 4096 * (6 + 3 * number)
            mounted = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", base], capture_output=True, check=False
            ).returncode == 0
            if not mounted:
                row.notes.append("no tmpfs can be mounted: writes were refused in process only")
                return
            try:
                folder = Path(base) / "r"
                is_reported = _run_until_full(experiment, folder)
                is_undamaged = _can_load(folder / "checkpoints", experiment.trajectory_key)
                has_finished = (folder / "summary.json").exists()
                row.count(
                    is_undamaged and (is_reported or has_finished),
                    f"tmpfs of {size} bytes: reported={is_reported}, undamaged={is_undamaged}")
            finally:
                subprocess.run(["umount", base], capture_output=True, check=False)


def damage(data: bytes, rng: random.Random) -> bytes:
    """Truncate the data, flip a bit, or append a byte."""
    at = rng.randrange(len(data))
    flipped = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    return rng.choice([data[:at], flipped, flipped, data + b"\0"])


def flips(short: bool, sabotage: bool = False) -> Row:
    """Damage checkpoints and packets, half of the tries each. Sabotage: checksums are not compared."""
    row = Row("bit flips", "0 accepted")
    rng, tries = random.Random(0), 60 if short else 1000
    with tempfile.TemporaryDirectory() as base, _ignore_checksums() if sabotage else nullcontext():
        checkpoints = Checkpoints(Path(base) / "c", "key")
        numbers = np.random.default_rng(0)
        for round_ in (10, 20):
            checkpoints.save(round_, [[{"x": numbers.standard_normal((4, 6))}]], {"training": 1.0})
        newest = checkpoints.load_latest()
        assert newest is not None
        files = sorted((checkpoints.folder / "round-00000020").iterdir())
        for number in range(tries // 2):
            file = files[number % len(files)]
            undamaged = file.read_bytes()
            file.write_bytes(damage(undamaged, rng))
            with measure_time(row):
                found = checkpoints.load_latest()
            # White space in a manifest has no meaning: the newest checkpoint is accepted then, else the previous one.
            is_newest = found is not None and found.run == newest.run and \
                found.blocks[0]["x"].tobytes() == newest.blocks[0]["x"].tobytes()
            row.count(found is not None and (found.round == 10 or is_newest), file.name)
            file.write_bytes(undamaged)
        header = wire.Header(sender=0, epoch=0, round=1, step=0)
        packet = wire.encode(header, {"y": dense(numbers.standard_normal((1, 12)))}, 0)
        for _ in range(tries // 2):
            damaged = damage(packet, rng)
            try:
                wire.decode(damaged)
                row.count(damaged == packet, "a damaged packet was accepted")
            except wire.WireError:
                row.count(True)
    return row


@contextmanager
def _ignore_checksums() -> Iterator[None]:
    with mock.patch.object(module.hashlib, "sha256", _ConstantDigest), mock.patch.object(wire, "crc32", return_value=0):
        yield


class _ConstantDigest:
    """A checksum that is always the same."""

    def __init__(self, *data: bytes) -> None: ...
    def update(self, data: bytes) -> None: ...
    def hexdigest(self) -> str:
        return "0"
