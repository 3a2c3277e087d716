"""Atomic writing: no symbolic link is written through, nothing is left over, errors name the file."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbo.platform.runs import atomic_io
from dbo.platform.runs.atomic_io import append_durably, drop_partial_line, remove_leftovers, write_atomically


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A file of somebody else, to which links are planted."""
    file = tmp_path / "foreign"
    file.write_text("mine")
    return file


def test_planted_link_is_not_written_through(tmp_path: Path, foreign: Path) -> None:
    """Neither in the place of a temporary file of older versions, nor in the place of the file itself."""
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / ".experiment.yaml.new").symlink_to(foreign)
    (folder / "experiment.yaml").symlink_to(foreign)
    write_atomically(folder / "experiment.yaml", "new")
    assert (folder / "experiment.yaml").read_text() == "new"
    assert not (folder / "experiment.yaml").is_symlink()
    assert foreign.read_text() == "mine"


def test_temporary_name_that_exists_is_refused(
    tmp_path: Path, foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even a guessed name: the file is created exclusively."""
    planted = tmp_path / ".a.guessed.new"
    planted.symlink_to(foreign)
    monkeypatch.setattr(atomic_io, "temporary_path", lambda path: planted)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "a", "new")
    assert foreign.read_text() == "mine"


def test_temporary_names_are_random(tmp_path: Path) -> None:
    """Two writers never share one."""
    assert atomic_io.temporary_path(tmp_path / "a") != atomic_io.temporary_path(tmp_path / "a")


@pytest.mark.parametrize("append", [lambda path: append_durably(path, "x\n", "a line"), drop_partial_line])
def test_lines_are_not_appended_through_a_link(tmp_path: Path, foreign: Path, append: Callable[[Path], Any]) -> None:
    """Nor is the foreign file truncated."""
    (tmp_path / "log.jsonl").symlink_to(foreign)
    with pytest.raises(OSError, match="symbolic links"):
        append(tmp_path / "log.jsonl")
    assert foreign.read_text() == "mine"


def test_leftovers_of_dead_writers_are_removed(tmp_path: Path) -> None:
    """Old temporary files of the same name; not those of a living writer, of other files, or of users."""
    old, alive = ".a.0123456789abcdef.new", ".a.fedcba9876543210.new"
    others = (alive, ".b.0123456789abcdef.new", ".a.new", ".a.mine.new", "a.0123456789abcdef.new")
    for name in (old, *others):
        (tmp_path / name).write_text("")
    for name in (old, *others[1:]):
        os.utime(tmp_path / name, (time.time() - 3600,) * 2)
    write_atomically(tmp_path / "a", "new")
    assert set(os.listdir(tmp_path)) == {"a", *others}
    remove_leftovers(tmp_path, "a")
    assert alive not in os.listdir(tmp_path)


def test_failed_write_leaves_nothing_and_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: the system names neither the file nor the content."""
    def fail(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_atomically(tmp_path / "a", "new", "the summary")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "a"))
    assert "writing the summary" in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "kept"),
    [("", ""), ("a\n", "a\n"), ("a\nb", "a\n"), ("b", ""), ("a\n" + "b" * 3_000_000, "a\n"), ("b" * 3_000_000, "")],
    ids=["empty", "complete", "cut off", "cut off and alone", "longer than a chunk", "long and alone"],
)
def test_partial_line_is_dropped(tmp_path: Path, text: str, kept: str) -> None:
    """A line without its end, however long; complete lines stay."""
    (tmp_path / "log").write_text(text)
    drop_partial_line(tmp_path / "log")
    assert (tmp_path / "log").read_text() == kept
    append_durably(tmp_path / "log", "c\n", "a line")
    assert (tmp_path / "log").read_text() == kept + "c\n"
