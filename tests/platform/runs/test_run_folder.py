"""The run's folder: durable lines, targets, and one process at a time."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbo.platform.errors import InputError
from dbo.platform.runs.run_folder import (
    CLOSED_FORMS,
    COLUMNS,
    RunFolder,
    Target,
    history,
    in_use,
    read_events,
    read_metrics,
    read_run,
)

HOLD = """
import sys, time
from pathlib import Path
from dbo.platform.runs.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.acquire()
print("held", flush=True)
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


def test_every_metric_is_explained() -> None:
    """docs/runs.md has each key of a line, and each file of a run's folder."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "runs.md").read_text(encoding="utf-8")
    for name in (*COLUMNS, *CLOSED_FORMS):
        assert f"`{name}`" in page, name
    files = [path.name for path in vars(RunFolder(Path("folder"))).values() if isinstance(path, Path)]
    assert len(files) == 9
    assert all(name in page for name in files)


def test_a_line_is_on_the_disk_at_once(folder: RunFolder) -> None:
    """Whoever reads the file sees every appended record, without any closing or flushing by the writer."""
    assert read_metrics(folder.metrics) == [line(round_) for round_ in range(4)]


def test_no_number_but_a_finite_one_can_be_written(folder: RunFolder) -> None:
    """NaN and inf are not JSON: appending them is an error, not a file that others cannot read."""
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON compliant"):
            folder.append(line(9, upper_loss=bad))
    with pytest.raises(ValueError, match="JSON compliant"):
        folder.write_summary({"final": float("nan")})
    assert len(read_metrics(folder.metrics)) == 4


@pytest.mark.parametrize("cut", range(1, 40))
def test_cut_off_last_line_is_left_out(folder: RunFolder, cut: int) -> None:
    """A process that died while it wrote a line: wherever the line ends, the complete ones before it are read."""
    folder.release()
    data = folder.metrics.read_bytes()
    start = data[:-1].rfind(b"\n") + 1
    folder.metrics.write_bytes(data[: max(start, len(data) - cut)])
    found = read_metrics(folder.metrics)
    assert found[:3] == [line(round_) for round_ in range(3)]
    assert len(found) == (4 if cut == 1 else 3)      # without its newline alone the line is complete


@pytest.mark.parametrize("bad", ["garbage", "", '{"round": 1', "[1]", '{"loss": 1}', '{"round": "1"}', "null", "\0\0"])
def test_damaged_middle_line_is_an_error(folder: RunFolder, bad: str) -> None:
    """Anything wrong that is no cut-off end is told with its line number."""
    lines = folder.metrics.read_text().splitlines()
    folder.metrics.write_text("\n".join([lines[0], bad, *lines[2:]]) + "\n")
    with pytest.raises(InputError, match="line 2 is damaged"):
        read_metrics(folder.metrics)


def test_whole_but_damaged_last_line_is_an_error(folder: RunFolder) -> None:
    """A last line that ends with a newline was written completely: damage to it is damage."""
    with open(folder.metrics, "a") as file:
        file.write("garbage\n")
    with pytest.raises(InputError, match="line 5 is damaged"):
        read_metrics(folder.metrics)


def test_no_file_no_lines(tmp_path: Path) -> None:
    """A run that has not evaluated yet has no metrics."""
    assert read_metrics(tmp_path / "none") == []
    assert list(history([]).columns) == list(COLUMNS)


def test_rewind_drops_later_lines_and_appending_goes_on(folder: RunFolder) -> None:
    """After a rollback the lines of the replayed rounds are appended to what was kept, none lost and none twice."""
    with open(folder.metrics, "a") as file:
        file.write('{"round": 4, "up')
    folder.rewind(1)
    assert [record["round"] for record in read_metrics(folder.metrics)] == [0, 1]
    folder.append(line(2))
    assert read_metrics(folder.metrics) == [line(0), line(1), line(2)]


def test_rewind_keeps_numbers_to_the_last_bit(folder: RunFolder) -> None:
    """Rewriting a line changes no value."""
    values = np.random.default_rng(0).standard_normal(50).tolist()
    folder.append(line(4, values=values))
    folder.rewind(4)
    assert read_metrics(folder.metrics)[-1]["values"] == values


def test_history_has_the_task_s_own_columns() -> None:
    """A table of the public columns with the task's own before the timestamp."""
    table = history([{**dict.fromkeys(COLUMNS, 1.0), "solution_error": 0.5}])
    assert set(COLUMNS) | {"solution_error"} == set(table.columns)
    assert table["solution_error"].tolist() == [0.5]


@pytest.mark.parametrize("text", [None, "", "{", "[1]", "3"])
def test_reading_a_folder_without_a_run(tmp_path: Path, text: str | None) -> None:
    """A folder without a readable summary is refused in one line."""
    if text is not None:
        (tmp_path / "summary.json").write_text(text)
    with pytest.raises(InputError, match=r"summary\.json"):
        read_run(tmp_path)


def test_reading_a_folder_with_a_damaged_state(tmp_path: Path) -> None:
    """So is a state file that is none."""
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "state.safetensors").write_bytes(b"garbage")
    with pytest.raises(InputError, match=r"state\.safetensors"):
        read_run(tmp_path)


# ---- targets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["test_accuracy=0.7", "upper_loss=1e-3", "consensus_y=12", "consensus_x=-1"])
def test_target_is_parsed_and_told_alike(text: str) -> None:
    """metric=level, and back."""
    target = Target.parse(text)
    assert Target.parse(str(target)) == target


@pytest.mark.parametrize(
    "text",
    ["", "test_accuracy", "=0.7", "test_accuracy=", "test_accuracy=x", "bogus=1", "round=3", "seconds=1", "timestamp=1",
     "test_accuracy=nan", "test_accuracy=inf", "test_accuracy=0.7=0.8"],
)
def test_malformed_target_is_refused(text: str) -> None:
    """One line with the value and the known metrics."""
    with pytest.raises(InputError, match=r"--target: .* metrics: test_accuracy") as error:
        Target.parse(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("metric", "values", "level", "expected"),
    [
        ("test_accuracy", [0.1, 0.5, 0.7, 0.6, 0.9], 0.7, 2),
        ("node_accuracy_min", [0.1, 0.5], 0.1, 0),
        ("test_accuracy", [0.1, 0.5], 0.7, None),
        ("test_accuracy", [None, None], 0.7, None),
        ("test_accuracy", [None, 0.8], 0.7, 1),
        ("upper_loss", [3.0, 2.0, 1.0, 2.0], 2.0, 1),
        ("consensus_x", [0.0, 1.0], 0.5, None),
        ("upper_loss", [3.0, 2.0], 1.0, None),
        ("upper_loss", [], 1.0, None),
    ],
)
def test_target_is_reached_from_the_right_side(
    metric: str, values: list[float | None], level: float, expected: int | None
) -> None:
    """Accuracies rise to a level, everything else falls to it; the first evaluation at or beyond it counts."""
    found = Target(metric, level).reached([{"round": n, metric: value} for n, value in enumerate(values)])
    assert (None if found is None else found["round"]) == expected


# ---- one process at a time -------------------------------------------------------------------------------------------


def test_folder_is_held_by_one(tmp_path: Path) -> None:
    """A second holder is refused; after the release the folder is free, and nothing of the lock is left."""
    first, second = RunFolder(tmp_path / "r"), RunFolder(tmp_path / "r")
    first.acquire()
    with pytest.raises(InputError, match="in use by another run"):
        second.acquire()
    first.append(line(0))
    first.release()
    second.acquire()
    second.release()
    assert os.listdir(tmp_path / "r") == ["metrics.jsonl"]


def test_folder_made_for_nothing_is_taken_away(tmp_path: Path) -> None:
    """A run that wrote nothing leaves no folder, but a folder that was there before stays."""
    (tmp_path / "mine").mkdir()
    for name in ("mine", "new"):
        folder = RunFolder(tmp_path / name)
        folder.acquire()
        folder.release()
    assert os.listdir(tmp_path) == ["mine"]


def test_lock_removed_by_its_holder_is_not_mistaken_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opened the lock file just before its holder removed it must lock the new one, which others see."""
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


def test_whoever_looks_at_a_lock_is_in_nobody_s_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at a folder's lock at the very moment a run starts there: the run starts."""
    (tmp_path / ".lock").touch()
    folder = RunFolder(tmp_path)
    with open(tmp_path / ".lock", "rb") as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda seconds: fcntl.flock(look, fcntl.LOCK_UN))
        folder.acquire()
    assert in_use(tmp_path)
    folder.release()
    assert not in_use(tmp_path)


def test_another_process_is_refused_until_the_holder_is_killed(tmp_path: Path) -> None:
    """The lock is the system's: it goes with the process, however that ends, and leaves nobody locked out."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "r")], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert in_use(tmp_path / "r")
        with pytest.raises(InputError, match="in use"):
            RunFolder(tmp_path / "r").acquire()
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert (tmp_path / "r" / ".lock").exists()
    assert not in_use(tmp_path / "r")
    folder = RunFolder(tmp_path / "r")
    folder.acquire()
    folder.release()


def test_clear_removes_the_run_s_files_only(folder: RunFolder) -> None:
    """What a user has put beside a run stays."""
    folder.write_state({"x": np.zeros((2, 2))})
    folder.write_summary({"status": "finished"})
    (folder.path / "notes.txt").write_text("mine")
    folder.clear()
    folder.release()
    assert os.listdir(folder.path) == ["notes.txt"]


def test_summary_is_replaced_whole(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A death while the summary is written leaves the old one."""
    folder.write_summary({"status": "finished"})
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            folder.write_summary({"status": "failed"})
    assert json.loads(folder.summary.read_text()) == {"status": "finished"}


def test_a_torn_event_is_mended_before_the_next(folder: RunFolder) -> None:
    """A process died while it told an event: the next process's events are lines of their own."""
    folder.tell("started")
    folder.release()
    with open(folder.events, "a") as file:
        file.write('{"timestamp": 1, "ki')
    again = RunFolder(folder.path)
    again.acquire()
    again.tell("ended")
    again.release()
    assert [event["kind"] for event in read_events(folder.events)] == ["started", "ended"]
