"""Keep two drivers from writing to one URL: a lease with a generation number, beside the files of the run.

    .lease/00000003.json      the lease of generation 3: who holds it, and when it was renewed

A generation begins when its file is created, which only one of two drivers can do: stores create a file only if it does
not exist (S3, Google Cloud Storage, Azure, local disks). A driver takes over from one that is dead by creating the next
generation. From then on the old driver is fenced: before it writes it looks for a newer generation, and finds it.

A driver on the same machine whose process has ended is dead at once. On another machine it is dead if its lease is not
renewed for a while. Clocks of two machines may differ: an old time alone proves nothing, so the lease is observed.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dbo.platform.errors import FolderLockedError, RunError

RENEW_SECONDS = 10.0
EXPIRY_SECONDS = 30.0          # without renewal; as long again for an observer on another machine
_CHECK_SECONDS = 2.0           # for which a look at the generations is valid
_CREATES_ATOMICALLY = {"file", "local", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs"}


@dataclass(frozen=True, slots=True)
class Owner:
    """The content of a lease."""

    token: str                 # of the driver, random
    machine: str
    host: str                  # for messages
    pid: int
    started: str               # when the process started, as the kernel counts; numbers of processes are used again
    renewed: float
    released: bool = False

    def is_dead(self) -> bool:
        """Decide whether the process of the owner has ended; False if it is on another machine."""
        return self.machine == _identify_machine() and _read_start(self.pid) != self.started


class Lease:
    """The right to write to one URL."""

    def __init__(self, files: Any, root: str, url: str) -> None:
        self._files, self._folder, self._url = files, f"{root}/.lease", url
        self.generation = 0                                    # 0: not held
        self._token = secrets.token_hex(8)
        self._checked = 0.0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, notify: Callable[[str], None]) -> None:
        """Take the lease, or raise `FolderLockedError` if another driver holds it."""
        generation = self._find_newest()
        owner = self._read(generation) if generation else None
        if generation and not self._is_free(generation, owner, notify):
            raise FolderLockedError(self._describe_use(owner))
        try:
            self._create(generation + 1)
        except FileExistsError:
            raise FolderLockedError(f"--out: {self._url} is in use by another run, which has just begun") from None
        self.generation = generation + 1
        if not self._protocols() & _CREATES_ATOMICALLY:
            time.sleep(1)                                      # the last of two that create the file wins
        self.check(force=True)
        for old in range(max(1, generation - 1), generation + 1):
            with suppress(Exception):                          # it is only clutter
                self._files.rm_file(self._path(old))
        self._ended.clear()
        self._thread = threading.Thread(target=self._renew_until_released, name="dbo lease", daemon=True)
        self._thread.start()

    def check(self, force: bool = False) -> None:
        """Raise `RunError` if another driver holds the lease now; without `force` a recent look is enough."""
        if not force and time.monotonic() - self._checked < _CHECK_SECONDS:
            return
        newest, owner = self._find_newest(), self._read(self.generation)
        if newest > self.generation or owner is None or owner.token != self._token:
            raise RunError(
                f"{self._url}: another run holds the lease now (generation {newest}, this one has {self.generation}); "
                f"nothing more is written there")
        self._checked = time.monotonic()

    def release(self, forget: bool = False) -> None:
        """Give the lease back. `forget`: remove its file, because nothing was stored at the URL."""
        if not self.generation:
            return
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        with suppress(Exception):                              # it expires in any case
            self.check(force=True)
            if forget:
                self._files.rm(self._folder, recursive=True)
            else:
                self._write(released=True)
        self.generation = 0

    # ---- files -------------------------------------------------------------------------------------------------------

    def _protocols(self) -> set[str]:
        names = self._files.protocol
        return {names} if isinstance(names, str) else set(names)

    def _path(self, generation: int) -> str:
        return f"{self._folder}/{generation:08d}.json"

    def _find_newest(self) -> int:
        self._files.invalidate_cache()
        try:
            names = self._files.ls(self._folder, detail=False)
        except FileNotFoundError:
            return 0
        stems = [str(name).rpartition("/")[2].removesuffix(".json") for name in names]
        return max((int(stem) for stem in stems if stem.isascii() and stem.isdigit()), default=0)

    def _read(self, generation: int) -> Owner | None:
        """Return the owner of a generation; None if the file is gone, or not complete yet."""
        try:
            stored = json.loads(self._files.cat_file(self._path(generation)))
            return Owner(**stored)
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def _describe_self(self, released: bool) -> bytes:
        pid = os.getpid()
        owner = Owner(
            self._token, _identify_machine(), socket.gethostname(), pid, _read_start(pid), time.time(), released)
        return json.dumps(asdict(owner)).encode()

    def _create(self, generation: int) -> None:
        """Create the file of a generation; raise `FileExistsError` if another driver was first."""
        self._files.makedirs(self._folder, exist_ok=True)
        path, content = self._path(generation), self._describe_self(released=False)
        if "file" in self._protocols():
            with self._files.open(path, "xb") as file:         # its `pipe_file` looks first, then writes
                file.write(content)
            return
        try:
            self._files.pipe_file(path, content, mode="create")
        except OSError as error:
            # Stores report a failed condition in their own ways.
            if isinstance(error, FileExistsError) or self._read(generation) is not None:
                raise FileExistsError(path) from None
            raise

    def _write(self, released: bool = False) -> None:
        self._files.pipe_file(self._path(self.generation), self._describe_self(released))

    def _renew_until_released(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            with suppress(Exception):          # the store is away for a while, or `check` reports it at the next upload
                self.check(force=True)
                self._write()

    # ---- other drivers -----------------------------------------------------------------------------------------------

    def _is_free(self, generation: int, owner: Owner | None, notify: Callable[[str], None]) -> bool:
        """Decide whether the owner has released the lease, or is dead."""
        if owner is not None and (owner.released or owner.is_dead()):
            return True
        if owner is not None and 0 <= time.time() - owner.renewed <= EXPIRY_SECONDS:
            return False
        notify(f"{self._url}: the lease of another run has expired; observing it for {EXPIRY_SECONDS:g} s")
        end = time.monotonic() + EXPIRY_SECONDS
        while time.monotonic() < end:
            time.sleep(min(1.0, EXPIRY_SECONDS / 5))
            if self._find_newest() != generation or self._read(generation) != owner:
                return False
        return True

    def _describe_use(self, owner: Owner | None) -> str:
        who = f" ({owner.host}, process {owner.pid})" if owner else ""
        return (
            f"--out: {self._url} is in use by another run{who}; if that machine has died, try again "
            f"{2 * EXPIRY_SECONDS:g} s after its end"
        )


def _identify_machine() -> str:
    """Return what processes have in common that can see each other's numbers: boot and process namespace."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _read_start(pid: int) -> str:
    """Return when a process started; empty if it has ended, or the system does not say."""
    with suppress(OSError, IndexError):
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else rest[18]
    return ""
