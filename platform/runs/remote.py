"""Mirror a run folder at a URL (s3://…, gs://…, file://…, whatever fsspec supports), updated at every checkpoint.

The URL is authoritative: a run starts from what is stored there, on any machine, and the local copy is scratch. On one
machine the lock of the local copy keeps a second run out, and a lease at the URL one on another machine (`lease.py`).
"""

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from dbo.platform.config.redact import redact, redact_url
from dbo.platform.errors import InputError, RunError
from dbo.platform.runs.lease import Lease

# A manifest makes a checkpoint valid and a summary a run finished: the files that they refer to go first.
_LAST = ("manifest.json", "summary.json")
_GENERATION = ".generation"      # in the local copy: of the lease under which it was last equal to the URL


def is_url(place: str | Path) -> bool:
    """Decide whether a place is a URL; one that was taken for a path and lost a slash counts too."""
    return "://" in str(place) or re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:/", str(place)) is not None


class RemoteFolder:
    """A folder at a URL and its local copy."""

    def __init__(self, url: str) -> None:
        import fsspec

        if not re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*(::[a-zA-Z][a-zA-Z0-9+.-]*)*://.", url):
            raise InputError(f"--out: {redact(url)!r} is not allowed; must be a folder, or a URL as s3://bucket/run")
        url = url.rstrip("/")
        self.url = redact_url(url)       # for messages
        try:
            self._files: Any
            self._files, self._root = fsspec.core.url_to_fs(url)
        except Exception as error:      # each file system has its own: some connect here, and find no server
            reason = str(error) or type(error).__name__
            raise InputError(redact(f"--out: {redact_url(url)} cannot be used: {reason}")) from None
        self.local = Path("runs") / ".mirror" / hashlib.sha256(url.encode()).hexdigest()[:16]
        self._pushed: dict[str, _Stamp | None] = {}      # files at the URL, with the stamps of their local copies
        self._lease = Lease(self._files, str(self._root), self.url)

    def acquire(self, notify: Callable[[str], None] = lambda text: None) -> None:
        """Take the lease of the URL; raise `FolderLockedError` if another driver holds it."""
        try:
            self._lease.acquire(notify)
        except (InputError, RunError):
            raise
        except Exception as error:
            raise RunError(redact(f"{self.url} cannot be written: {type(error).__name__}: {error}")) from error

    def release(self) -> None:
        """Give the lease back, and leave nothing behind where nothing was stored."""
        if self._lease.generation:
            with suppress(OSError):
                (self.local / _GENERATION).write_text(str(self._lease.generation))
        self._lease.release(forget=not self._pushed)

    def pull(self) -> None:
        """Replace the local copy by what is stored at the URL; the lock, which the caller holds, stays."""
        for entry in self.local.iterdir() if self.local.is_dir() else ():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif not entry.name.startswith("."):
                entry.unlink()
        self._pushed = {name: _read_stamp(path) for name, path in self._download(self.local)}

    def fetch(self, folder: Path) -> bool:
        """Copy what is stored at the URL into a folder, and remove nothing there; return whether there was anything."""
        return bool(list(self._download(folder)))

    def _download(self, folder: Path) -> Iterator[tuple[str, Path]]:
        try:
            self._files.invalidate_cache()
            for remote in self._files.find(self._root) if self._files.exists(self._root) else []:
                name = str(remote)[len(str(self._root)):].lstrip("/")
                if any(part.startswith(".") and part != ".." for part in name.split("/")):
                    continue         # not a run's file: what is not downloaded is never removed there either
                target = folder / name
                if not target.resolve().is_relative_to(folder.resolve()):
                    raise RunError(f"{self.url} holds {name!r}, which points outside of the run's folder")
                target.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(remote, str(target))
                yield name, target
        except RunError:
            raise
        except Exception as error:
            raise RunError(redact(f"{self.url} cannot be read: {type(error).__name__}: {error}")) from error

    def assume_pushed(self) -> None:
        """Regard the local copy as equal to what is stored at the URL, as it is when a run has ended."""
        before = (self.local / _GENERATION).read_text() if (self.local / _GENERATION).exists() else ""
        if before != str(self._lease.generation - 1):
            raise RunError(f"{self.url}: another run has written there meanwhile")
        self._pushed = {name: _read_stamp(path) for name, path in self._list_local().items()}

    def _list_local(self) -> dict[str, Path]:
        """Return all files of the run; locks and partly written files start with a dot and do not count."""
        files = {path.relative_to(self.local): path for path in self.local.rglob("*") if path.is_file()}
        return {
            name.as_posix(): path for name, path in files.items()
            if not any(part.startswith(".") for part in name.parts)
        }

    def push(self) -> None:
        """Remove at the URL what is gone here, then upload what has changed since the last time."""
        local = self._list_local()
        try:
            self._lease.check(force=True)
            for name in [name for name in self._pushed if name not in local]:
                self._files.rm_file(f"{self._root}/{name}")
                del self._pushed[name]
            for name, path in sorted(local.items(), key=lambda item: (item[1].name in _LAST, item[0])):
                if self._pushed.get(name) == _read_stamp(path):
                    continue
                remote = f"{self._root}/{name}"
                self._lease.check(force=path.name in _LAST)
                self._files.makedirs(remote.rpartition("/")[0], exist_ok=True)
                self._pushed[name] = None       # until the upload is complete
                stamp = _read_stamp(path)
                self._files.put_file(str(path), remote)
                self._pushed[name] = stamp
        except RunError:
            raise
        except Exception as error:
            raise RunError(redact(f"{self.url} cannot be written: {type(error).__name__}: {error}")) from error


_Stamp = tuple[int, int]


def _read_stamp(path: Path) -> _Stamp:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size
