"""Results of jobs come back without overwriting others, and without files that are none of the job's."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dbo.platform.cli import job_client
from dbo.platform.cli.job_client import check_free, check_place, fetch_results, send_job
from dbo.platform.errors import InputError, RunError
from dbo.platform.runs.schema import Group


def write_group(folder: Path, name: str, key: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    group = Group("sweep", name, key, "dbo sweep", "", "finished", "upper_loss=1", (), {})
    (folder / "group.json").write_text(json.dumps(group.to_dict()))


def test_results_of_another_job_are_not_overwritten(tmp_path: Path) -> None:
    """A folder in use is refused: a file, foreign files, a sweep of another name."""
    (tmp_path / "file").touch()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").touch()
    write_group(tmp_path / "sweep", "other", "1")
    for name in ("file", "used", "sweep"):
        with pytest.raises(InputError, match=f"{name} is in use"):
            check_free(tmp_path / name, "key", "sweep-mine-0123abcd")
    (tmp_path / "empty").mkdir()
    write_group(tmp_path / "mine", "mine", "1")
    for name in ("new", "empty", "mine"):
        check_free(tmp_path / name, "key", "sweep-mine-0123abcd")


def test_a_sweep_of_the_same_name_with_other_values_is_not_overwritten(tmp_path: Path) -> None:
    """Names are equal, keys are not: what is there stays. Control: the same sweep is fetched again."""
    write_group(tmp_path / "here", "mine", "1")
    write_group(tmp_path / "there", "mine", "2")
    before = (tmp_path / "here" / "group.json").read_bytes()
    with pytest.raises(InputError, match="holds another sweep of this name; the results are in"):
        fetch_results(str(tmp_path / "there"), tmp_path / "here")
    assert (tmp_path / "here" / "group.json").read_bytes() == before
    write_group(tmp_path / "there", "mine", "1")
    (tmp_path / "there" / "new.txt").write_text("new")
    fetch_results(str(tmp_path / "there"), tmp_path / "here")
    assert (tmp_path / "here" / "new.txt").read_text() == "new"


def test_links_in_a_shared_storage_are_not_fetched(tmp_path: Path) -> None:
    """They could point to any file of this user, whose content would then look like a result."""
    (tmp_path / "secret").write_text("token")
    place = tmp_path / "place"
    write_group(place, "mine", "1")
    (place / "cells").mkdir(parents=True)
    (place / "cells" / "metrics.jsonl").write_text("{}")
    (place / "events.jsonl").symlink_to(tmp_path / "secret")
    (place / "folder").symlink_to(tmp_path)
    os.mkfifo(place / "pipe")
    assert fetch_results(str(place), tmp_path / "to") == f"fetched to {tmp_path / 'to'}"
    assert sorted(path.name for path in (tmp_path / "to").rglob("*")) == ["cells", "group.json", "metrics.jsonl"]


def test_a_folder_without_results_is_not_fetched(tmp_path: Path) -> None:
    """The place comes from the cluster, which may name any folder of this user."""
    (tmp_path / "home" / ".ssh").mkdir(parents=True)
    (tmp_path / "home" / ".ssh" / "id").write_text("key")
    assert fetch_results(str(tmp_path / "home"), tmp_path / "to").startswith("nothing to fetch: ")
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(("place", "storage", "message"), [
    ("s3://bucket/runs/digits-0123abcd", "", "if this is yours, give --storage s3://bucket/runs"),
    ("file:///home/me/.ssh", "", "if this is yours"),
    ("https://user:word@host/x/digits-0123abcd", "", r"https://\*\*\*@host/\*\*\*"),
    ("s3://other/runs/digits-0123abcd", "s3://bucket/runs", "not in a folder directly below it"),
    ("s3://bucket/runs-of-others/digits-0123abcd", "s3://bucket/runs", "not in a folder directly below it"),
    ("s3://bucket/runs/../digits-0123abcd", "s3://bucket/runs", "not in a folder directly below it"),
    ("s3://bucket/runs/..", "s3://bucket/runs", "not in a folder directly below it"),
    ("s3://bucket/runs/", "s3://bucket/runs", "not in a folder directly below it"),
    ("s3://bucket/runs/a::file", "s3://bucket/runs", "not in a folder directly below it"),
    ("s3://bucket/runs/a?versionId=1", "s3://bucket/runs", "not in a folder directly below it"),
    ("/home/me/runs/digits-0123abcd", "/shared/runs", "not in a folder directly below it"),
])
def test_a_place_outside_of_the_own_storage_is_refused(place: str, storage: str, message: str) -> None:
    """Whoever may use the cluster may name any server or file as the place of a job's results."""
    with pytest.raises(InputError, match=message):
        check_place(place, storage)


@pytest.mark.parametrize(("place", "storage"), [
    ("s3://bucket/runs/digits-0123abcd", "s3://bucket/runs"), ("s3://bucket/runs/digits-0123abcd", "s3://bucket/runs/"),
    ("file:///shared/runs/sweep-größe-0123abcd", "file:///shared/runs"), ("/shared/runs/compare-1", "/shared/runs"),
    ("/shared/runs/compare-1", ""),
])
def test_a_place_below_the_own_storage_is_accepted(place: str, storage: str) -> None:
    check_place(place, storage)


class ClusterWithoutAgent:
    """A Jobs server whose head has no agent for the first requests."""

    def __init__(self, refusals: float) -> None:
        self.refusals = refusals

    def submit_job(self, **_: Any) -> str:
        self.refusals -= 1
        if self.refusals >= 0:
            raise RuntimeError("Request failed with status code 500: No available agent to submit job.")
        return "raysubmit_1"


def test_a_head_that_has_just_started_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported once; a head that never gets an agent is an error with the usual reason."""
    monkeypatch.setattr(job_client.time, "sleep", lambda _: None)
    lines: list[str] = []
    cluster: Any = ClusterWithoutAgent(3)
    assert send_job(cluster, "dbo run", {}, {}, lines.append) == "raysubmit_1"
    assert [line.partition(";")[0] for line in lines] == ["the cluster has no agent for jobs yet"]
    monkeypatch.setattr(job_client, "_SEND_SECONDS", 0.0)
    never: Any = ClusterWithoutAgent(float("inf"))
    with pytest.raises(RunError, match="--dashboard-agent-listen-port"):
        send_job(never, "dbo run", {}, {}, lines.append)
