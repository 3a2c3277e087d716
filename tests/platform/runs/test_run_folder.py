"""The run folder: durable lines, rollback, and one process at a time."""

import fcntl
import hashlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbo.platform.errors import InputError, RunError
from dbo.platform.runs import run_folder
from dbo.platform.runs.run_folder import (
    Position,
    RunFolder,
    build_history,
    is_locked,
    read_events,
    read_metrics,
    read_run,
    read_summary,
)
from dbo.platform.runs.schema import COLUMNS, METRICS, Summary

LOCK_AND_WAIT = """
import sys, time
from pathlib import Path
from dbo.platform.runs.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.acquire()
print("locked", flush=True)
time.sleep(60)
"""


def line(round_: int, **more: Any) -> dict[str, Any]:
    return {"round": round_, "upper_loss": 1.0 / (1 + round_), **more}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "r")
    made.acquire()
    for round_ in range(4):
        made.append(line(round_))
    return made


# ---- lines -----------------------------------------------------------------------------------------------------------


def test_every_metric_is_documented() -> None:
    """docs/runs.md has each key of a line, and each file of a run folder."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "runs.md").read_text(encoding="utf-8")
    for name in METRICS:
        assert f"`{name}`" in page, name
    files = [path.name for path in vars(RunFolder(Path("folder"))).values() if isinstance(path, Path)]
    assert len(files) == 10
    assert all(name in page for name in files)


def test_line_is_readable_at_once(folder: RunFolder) -> None:
    """A reader sees every appended record before the writer closes the file."""
    assert read_metrics(folder.metrics) == [line(round_) for round_ in range(4)]


def test_only_finite_numbers_can_be_written(folder: RunFolder) -> None:
    """NaN and inf are not JSON: appending them raises instead of writing an unreadable file."""
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON compliant"):
            folder.append(line(9, upper_loss=bad))
    with pytest.raises(ValueError, match="JSON compliant"):
        folder.write_summary(Summary("finished", final={"upper_loss": float("nan")}))
    assert len(read_metrics(folder.metrics)) == 4


@pytest.mark.parametrize("cut", range(1, 40))
def test_partly_written_last_line_is_skipped(folder: RunFolder, cut: int) -> None:
    """A process died while it wrote a line: wherever the line ends, the complete ones before it are read."""
    folder.release()
    data = folder.metrics.read_bytes()
    start = data[:-1].rfind(b"\n") + 1
    folder.metrics.write_bytes(data[: max(start, len(data) - cut)])
    found = read_metrics(folder.metrics)
    assert found[:3] == [line(round_) for round_ in range(3)]
    assert len(found) == (4 if cut == 1 else 3)      # without its newline alone the line is complete


@pytest.mark.parametrize("bad", ["garbage", "", '{"round": 1', "[1]", '{"loss": 1}', '{"round": "1"}', "null", "\0\0"])
def test_damaged_middle_line_is_an_error(folder: RunFolder, bad: str) -> None:
    """Any damage except a partly written last line is reported with its line number."""
    lines = folder.metrics.read_text().splitlines()
    folder.metrics.write_text("\n".join([lines[0], bad, *lines[2:]]) + "\n")
    with pytest.raises(InputError, match="line 2 is damaged"):
        read_metrics(folder.metrics)


def test_complete_but_damaged_last_line_is_an_error(folder: RunFolder) -> None:
    """A last line that ends with a newline was written completely."""
    with open(folder.metrics, "a") as file:
        file.write("garbage\n")
    with pytest.raises(InputError, match="line 5 is damaged"):
        read_metrics(folder.metrics)


def test_missing_file_has_no_lines(tmp_path: Path) -> None:
    """A run that has not evaluated yet has no metrics."""
    assert read_metrics(tmp_path / "none") == []
    assert list(build_history([]).columns) == list(COLUMNS)


def test_rollback_drops_later_lines_and_appending_continues(folder: RunFolder) -> None:
    """Lines of replayed rounds are appended to what was kept: none is lost, none is repeated."""
    with open(folder.metrics, "a") as file:
        file.write('{"round": 4, "up')
    folder.rollback(1)
    assert [record["round"] for record in read_metrics(folder.metrics)] == [0, 1]
    folder.append(line(2))
    assert read_metrics(folder.metrics) == [line(0), line(1), line(2)]


def test_rollback_keeps_numbers_bit_identical(folder: RunFolder) -> None:
    """Rewriting a line changes no value."""
    values = np.random.default_rng(0).standard_normal(50).tolist()
    folder.append(line(4, values=values))
    folder.rollback(4)
    assert read_metrics(folder.metrics)[-1]["values"] == values


def test_rollback_to_a_position_parses_nothing(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are truncated, also inside a line, and appending continues with the same digest."""
    before, text = folder.position(), folder.metrics.read_bytes()
    folder.append(line(4), {"round": 4})
    after = folder.position()
    with open(folder.metrics, "a") as file:
        file.write('{"round": 5, "up')
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "iterate_metrics", None)
        folder.rollback(3, before)
    assert folder.metrics.read_bytes() == text
    assert not folder.nodes.exists()
    assert folder.position() == before
    folder.append(line(4), {"round": 4})
    assert folder.position() == after
    assert after.digest == folder.digest_up_to(4)


def test_position_is_the_digest_of_the_bytes(folder: RunFolder) -> None:
    """It survives a checkpoint; one of an older version has no sizes."""
    position, data = folder.position(), folder.metrics.read_bytes()
    assert position.sizes == (len(data), 0)
    assert position.digest == hashlib.sha256(data).hexdigest() + hashlib.sha256().hexdigest()
    assert Position.parse(position.to_dict()) == position
    assert Position.parse({"records": position.digest}) is None
    for sizes in (None, 3, [1], [1, -1], [1, "2"], [True, 1]):
        assert Position.parse({"records": position.digest, "sizes": sizes}) is None


@pytest.mark.parametrize("change", ["number", "shorter", "missing"])
def test_rollback_to_other_lines_is_refused(folder: RunFolder, change: str) -> None:
    """A run never continues from other lines than those it recorded; the file stays as it is."""
    position, data = folder.position(), folder.metrics.read_bytes()
    changed = {"number": data.replace(b"1.0", b"2.0"), "shorter": data[:-1], "missing": None}[change]
    folder.metrics.unlink()
    if changed is not None:
        folder.metrics.write_bytes(changed)
    with pytest.raises(RunError, match=r"metrics\.jsonl or nodes\.jsonl has changed"):
        folder.rollback(3, position)
    assert (folder.metrics.read_bytes() if folder.metrics.exists() else None) == changed


def test_line_that_cannot_be_written_names_the_file(folder: RunFolder) -> None:
    """The system does not; the next process drops the half line."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (folder.metrics.stat().st_size + 5, limit[1]))
    try:
        with pytest.raises(OSError, match="writing an evaluation") as caught:
            folder.append(line(4))
        folder.release()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert caught.value.filename == str(folder.metrics)
    assert len(read_metrics(folder.metrics)) == 4
    folder.append(line(4))
    assert len(read_metrics(folder.metrics)) == 5


def test_history_has_the_task_s_own_columns() -> None:
    """The table has the public columns, and the task's own before the timestamp."""
    table = build_history([{**dict.fromkeys(COLUMNS, 1.0), "solution_error": 0.5}])
    assert set(COLUMNS) | {"solution_error"} == set(table.columns)
    assert table["solution_error"].tolist() == [0.5]


@pytest.mark.parametrize("text", [None, "", "{", "[1]", "3"])
def test_folder_without_a_readable_summary_is_refused(tmp_path: Path, text: str | None) -> None:
    """One line names the file."""
    if text is not None:
        (tmp_path / "summary.json").write_text(text)
    with pytest.raises(InputError, match=r"summary\.json"):
        read_run(tmp_path)


def test_folder_with_a_damaged_state_is_refused(tmp_path: Path) -> None:
    """One line names the file."""
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "state.safetensors").write_bytes(b"garbage")
    with pytest.raises(InputError, match=r"state\.safetensors"):
        read_run(tmp_path)


# ---- one process at a time -------------------------------------------------------------------------------------------


def test_folder_is_locked_by_one_process(tmp_path: Path) -> None:
    """A second lock is refused; after the release the folder is free, and no lock file is left."""
    first, second = RunFolder(tmp_path / "r"), RunFolder(tmp_path / "r")
    first.acquire()
    with pytest.raises(InputError, match="in use by another run"):
        second.acquire()
    first.append(line(0))
    first.release()
    second.acquire()
    second.release()
    assert os.listdir(tmp_path / "r") == ["metrics.jsonl"]


def test_folder_created_for_nothing_is_removed(tmp_path: Path) -> None:
    """A run that wrote nothing leaves no folder, but an existing folder stays."""
    (tmp_path / "mine").mkdir()
    for name in ("mine", "new"):
        folder = RunFolder(tmp_path / name)
        folder.acquire()
        folder.release()
    assert os.listdir(tmp_path) == ["mine"]


def test_removed_lock_file_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that opened the lock file just before its owner removed it must lock the new file."""
    flock, removed = fcntl.flock, []

    def late(file: Any, flags: int) -> None:
        if not removed:
            (tmp_path / "r" / ".lock").unlink()
            removed.append(True)
        flock(file, flags)

    monkeypatch.setattr(fcntl, "flock", late)
    first, second = RunFolder(tmp_path / "r"), RunFolder(tmp_path / "r")
    first.acquire()
    assert removed
    with pytest.raises(InputError, match="in use"):
        second.acquire()
    first.release()


def test_checking_a_lock_does_not_block_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run starts although another process checks the lock at the same moment."""
    (tmp_path / ".lock").touch()
    folder = RunFolder(tmp_path)
    with open(tmp_path / ".lock", "rb") as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda seconds: fcntl.flock(look, fcntl.LOCK_UN))
        folder.acquire()
    assert is_locked(tmp_path)
    folder.release()
    assert not is_locked(tmp_path)


def test_killed_process_releases_its_lock(tmp_path: Path) -> None:
    """The system releases the lock when the process ends, however it ends."""
    command = [sys.executable, "-c", LOCK_AND_WAIT, str(tmp_path / "r")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        assert is_locked(tmp_path / "r")
        with pytest.raises(InputError, match="in use"):
            RunFolder(tmp_path / "r").acquire()
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert (tmp_path / "r" / ".lock").exists()
    assert not is_locked(tmp_path / "r")
    folder = RunFolder(tmp_path / "r")
    folder.acquire()
    folder.release()


@pytest.mark.parametrize("exists", [True, False])
def test_lock_that_is_a_link_is_refused(tmp_path: Path, exists: bool) -> None:
    """In one line; the foreign file is neither truncated nor created."""
    foreign = tmp_path / "foreign"
    if exists:
        foreign.write_text("mine")
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / ".lock").symlink_to(foreign)
    with pytest.raises(InputError, match=r"^--out: .*r cannot be used as an output folder: \.lock is a symbolic link"):
        RunFolder(tmp_path / "r").acquire()
    assert (foreign.read_text() if foreign.exists() else None) == ("mine" if exists else None)


def test_checkpoints_that_are_a_link_are_refused(tmp_path: Path) -> None:
    """A run into the folder would remove the checkpoints of another one."""
    (tmp_path / "other" / "round-00000004").mkdir(parents=True)
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "checkpoints").symlink_to(tmp_path / "other")
    with pytest.raises(InputError, match=r"^--out: .*r cannot be used .*: checkpoints is a symbolic link; remove it$"):
        RunFolder(tmp_path / "r").acquire()
    assert (tmp_path / "other" / "round-00000004").exists()
    assert not is_locked(tmp_path / "r")


@pytest.mark.parametrize("kind", ["renamed", "removed", "replaced", "lock"])
def test_a_folder_that_was_renamed_is_not_written(tmp_path: Path, kind: str) -> None:
    """Its results would be in two halves. Control: without its lock file it is still the same folder."""
    folder, rival = RunFolder(tmp_path / "r"), RunFolder(tmp_path / "r")
    folder.acquire()
    folder.append({"round": 0})
    if kind == "lock":
        (tmp_path / "r" / ".lock").unlink()
        folder.sync()
        folder.release()
        return
    shutil.rmtree(tmp_path / "r") if kind == "removed" else (tmp_path / "r").rename(tmp_path / "elsewhere")
    if kind == "replaced":
        rival.acquire()
    with pytest.raises(RunError, match="another run has taken" if kind == "replaced" else "was renamed or removed"):
        folder.sync()
    folder.release()
    assert is_locked(tmp_path / "r") == (kind == "replaced")
    rival.release()


def test_lock_does_not_truncate_a_file(tmp_path: Path) -> None:
    """A hard link to a foreign file is no symbolic link."""
    (tmp_path / "foreign").write_text("mine")
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / ".lock").hardlink_to(tmp_path / "foreign")
    folder = RunFolder(tmp_path / "r")
    folder.acquire()
    folder.release()
    assert (tmp_path / "foreign").read_text() == "mine"


def test_leftovers_of_a_crashed_run_are_removed(tmp_path: Path) -> None:
    """As soon as the next run holds the folder; files of users stay."""
    for name in (".summary.json.0123456789abcdef.new", ".notes.0123456789abcdef.new"):
        (tmp_path / name).write_text("")
    folder = RunFolder(tmp_path)
    folder.acquire()
    folder.release()
    assert os.listdir(tmp_path) == [".notes.0123456789abcdef.new"]


def test_clear_removes_only_files_of_the_run(folder: RunFolder) -> None:
    """A user's own files stay."""
    folder.write_state({"x": np.zeros((2, 2))})
    folder.write_summary(Summary("finished"))
    (folder.path / "notes.txt").write_text("mine")
    folder.clear()
    folder.release()
    assert os.listdir(folder.path) == ["notes.txt"]


def test_summary_is_replaced_atomically(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies while it writes the summary leaves the old one."""
    folder.write_summary(Summary("finished"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            folder.write_summary(Summary("failed"))
    assert read_summary(folder.path) == Summary("finished")


def test_partly_written_event_is_dropped_before_the_next(folder: RunFolder) -> None:
    """A process died while it wrote an event: the events of the next process are separate lines."""
    folder.log_event("started")
    folder.release()
    with open(folder.events, "a") as file:
        file.write('{"timestamp": 1, "ki')
    again = RunFolder(folder.path)
    again.acquire()
    again.log_event("ended")
    again.release()
    assert [event.kind for event in read_events(folder.events)] == ["started", "ended"]


# ---- foreign folders -------------------------------------------------------------------------------------------------

FILES = ("experiment.yaml", "metrics.jsonl", "summary.json", "manifest.json", "network.json", "group.json")


def read_any(folder: Path, name: str) -> Any:
    readers: dict[str, Callable[[], Any]] = {
        "experiment.yaml": lambda: run_folder.read_experiment(folder),
        "metrics.jsonl": lambda: read_metrics(folder / name), "summary.json": lambda: run_folder.read_summary(folder),
        "manifest.json": lambda: run_folder.read_manifest(folder),
        "network.json": lambda: run_folder.read_network(folder), "group.json": lambda: run_folder.read_group(folder),
    }
    return readers[name]()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    """Reading a pipe would wait for ever, and /dev/zero has no end."""
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    elif kind == "device":
        (tmp_path / name).symlink_to("/dev/zero")
    else:
        (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=f"{name}: cannot be read: .*(not a regular file|Is a directory)"):
        read_any(tmp_path, name)


@pytest.mark.parametrize("name", FILES)
def test_a_file_without_an_end_is_refused(tmp_path: Path, name: str) -> None:
    """A sparse file of 100 GB takes no space on the disk: it is refused before it is in memory."""
    with open(tmp_path / name, "wb") as file:
        file.truncate(100 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=name):
            read_any(tmp_path, name)
        assert tracemalloc.get_traced_memory()[1] < 500 << 20
    finally:
        tracemalloc.stop()
