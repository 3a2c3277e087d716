"""`dbo clean`."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]


@pytest.fixture
def finished(dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path) -> Path:
    """A comparison of two runs in a folder, with two checkpoints each."""
    names = [override for override in tiny_overrides if not override.startswith("algorithm")]
    done = dbo("compare", *names, "--algorithms", "f2ba,bome", "--out", tmp_path / "runs" / "c", "--quiet")
    assert done.code == 0, done.err
    return tmp_path / "runs" / "c"


def count(folder: Path) -> int:
    return len(list(folder.rglob("checkpoints/round-*")))


@pytest.mark.parametrize("place", [".", "..", "bome"])
def test_a_comparison_is_cleaned(dbo: Command, finished: Path, place: str) -> None:
    """By its folder, the one above or a member's. A second time there is nothing to remove."""
    done = dbo("clean", finished / place, "--yes")
    assert (done.code, done.err) == (0, "")
    members = 1 if place == "bome" else 2
    assert done.out.count(" MB in 2 checkpoints\n") == members
    assert "freed 0.0 MB" in done.out
    assert count(finished) == 4 - 2 * members
    assert dbo("clean", finished / place, "--yes").out == "nothing to remove\n"
    assert dbo("check", finished).code == 0


def test_without_an_answer_nothing_is_removed(
    dbo: Command, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is shown, and --yes is named."""
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    done = dbo("clean", finished)
    assert done.code == 2
    assert done.err.strip().endswith("dbo: --yes: give it to remove without being asked; nothing was removed")
    assert "2 checkpoints" in done.out
    assert count(finished) == 4


@pytest.mark.parametrize(("answer", "left"), [("y\n", 0), ("n\n", 4), ("\n", 4)])
def test_it_asks(
    dbo: Command, finished: Path, monkeypatch: pytest.MonkeyPatch, answer: str, left: int
) -> None:
    """Enter alone means no."""
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    assert dbo("clean", finished).code == 0
    assert count(finished) == left


def test_keep(dbo: Command, finished: Path) -> None:
    """A run that keeps one can be extended."""
    assert dbo("clean", finished, "--keep", "1", "--yes").code == 0
    assert count(finished) == 2
    assert dbo("clean", finished, "--keep", "-1", "--yes").code == 2


def test_a_run_behind_a_link_is_not_touched(dbo: Command, finished: Path, tmp_path: Path) -> None:
    """A folder of links to other people's runs is no reason to clean those; the folder itself may be a link."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "theirs").symlink_to(finished)
    done = dbo("clean", mine, "--yes")
    assert (done.code, count(finished)) == (2, 4)
    assert dbo("clean", mine / "theirs", "--yes").code == 0
    assert count(finished) == 0


@pytest.mark.parametrize(("place", "message"), [
    ("nowhere", "no such folder"), ("empty", "no run, comparison or sweep in it"), ("file", "no such folder"),
    ("s3://bucket/run", "must be a folder on this machine"),
])
def test_wrong_folders_are_refused_in_one_line(dbo: Command, tmp_path: Path, place: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    done = dbo("clean", place if "://" in place else tmp_path / place, "--yes")
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1


def test_what_cannot_be_removed_exits_1(dbo: Command, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other runs are cleaned."""
    from dbo.platform.runs import cleaning

    original = cleaning.remove_checkpoint
    monkeypatch.setattr(
        cleaning, "remove_checkpoint", lambda place: None if "bome" in str(place) else original(place))
    done = dbo("clean", finished, "--yes")
    assert done.code == 1
    assert "cannot be removed" in done.err
    assert count(finished) == 2
