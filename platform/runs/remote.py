"""Run folders at a URL (s3://…, gs://…, file://…, all that fsspec knows): kept locally, mirrored at every checkpoint.

The URL is the true place: a run starts from what lies there, on whichever machine, and the local copy is scratch.
Nothing keeps two machines from writing to one URL at the same time; on one machine the local copy's lock does.
"""

import hashlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dbo.platform.errors import InputError, RunError
from dbo.platform.config.redact import masked

# The manifest makes a checkpoint valid and the summary a run finished: what they speak of must be there before them.
_LAST = ("manifest.json", "summary.json")


def is_url(place: str | Path) -> bool:
    """Also of a URL that has been taken for a path and lost a slash."""
    return "://" in str(place) or re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:/", str(place)) is not None


class Storage:
    """A folder at a URL and its local copy."""

    def __init__(self, url: str) -> None:
        import fsspec

        if not re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*(::[a-zA-Z][a-zA-Z0-9+.-]*)*://.", url):
            raise InputError(f"--out: {masked(url)!r} is not allowed; must be a folder, or a URL as s3://bucket/run")
        url = url.rstrip("/")
        self.url = masked(url)       # as it may be told: the user's name and password are nobody else's
        try:
            self._files: Any
            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise InputError(masked(f"--out: {url} cannot be used: {error}")) from None
        self.local = Path("runs") / ".mirror" / hashlib.sha256(url.encode()).hexdigest()[:16]
        self._there: dict[str, tuple[int, int] | None] = {}      # what lies at the URL, as it was here when last pushed

    def pull(self) -> None:
        """Makes the local copy what lies at the URL; its lock, which the caller holds, stays."""
        for entry in self.local.iterdir() if self.local.is_dir() else ():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif not entry.name.startswith("."):
                entry.unlink()
        self._there = {name: _stamp(path) for name, path in self._copied_to(self.local)}

    def fetch(self, folder: Path) -> bool:
        """Copies what lies at the URL into a folder, and removes nothing there; whether there was anything."""
        return bool(list(self._copied_to(folder)))

    def _copied_to(self, folder: Path) -> Iterator[tuple[str, Path]]:
        try:
            self._files.invalidate_cache()
            for remote in self._files.find(self._root) if self._files.exists(self._root) else []:
                name = str(remote)[len(str(self._root)):].lstrip("/")
                if any(part.startswith(".") and part != ".." for part in name.split("/")):
                    continue         # not a run's: what is not taken over is never removed there either
                target = folder / name
                if not target.resolve().is_relative_to(folder.resolve()):
                    raise RunError(f"{self.url} holds {name!r}, which points outside of the run's folder")
                target.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(remote, str(target))
                yield name, target
        except RunError:
            raise
        except Exception as error:
            raise RunError(masked(f"{self.url} cannot be read: {type(error).__name__}: {error}")) from error

    def in_step(self) -> None:
        """Takes the local copy for what lies at the URL, as it is when a run has ended."""
        self._there = {name: _stamp(path) for name, path in self._here().items()}

    def _here(self) -> dict[str, Path]:
        return {path.relative_to(self.local).as_posix(): path for path in _files(self.local)}

    def push(self) -> None:
        """Removes there what is gone here, then brings over what has changed since the last time."""
        here = self._here()
        try:
            for name in [name for name in self._there if name not in here]:
                self._files.rm_file(f"{self._root}/{name}")
                del self._there[name]
            for name, path in sorted(here.items(), key=lambda item: (item[1].name in _LAST, item[0])):
                if self._there.get(name) == _stamp(path):
                    continue
                remote = f"{self._root}/{name}"
                self._files.makedirs(remote.rpartition("/")[0], exist_ok=True)
                self._there[name] = None
                stamp = _stamp(path)
                self._files.put_file(str(path), remote)
                self._there[name] = stamp
        except Exception as error:
            raise RunError(masked(f"{self.url} cannot be written: {type(error).__name__}: {error}")) from error


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


def _files(folder: Path) -> list[Path]:
    """All of a run's files; locks and half-written ones begin with a dot."""
    return [
        path for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
