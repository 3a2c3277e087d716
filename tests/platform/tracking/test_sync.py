"""Sending folders to MLflow: runs are found again, every point is there once, credentials stay here."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from tests.platform.tracking.mlflow_store import StoreView, sqlite_uri

from dbo.platform.config import yaml_io
from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.runs.compare import compare
from dbo.platform.runs.run_folder import read_metrics
from dbo.platform.runs.runner import run
from dbo.platform.runs.schema import Target
from dbo.platform.tracking.client import Store
from dbo.platform.tracking.sync import resolve_destination, sync_folder


def test_a_run_is_sent_once_and_completely(
    tiny: Callable[..., Experiment], tmp_path: Path, store: str
) -> None:
    """Points, parameters, tags, data set, files; a second sync finds all of it and sends nothing."""
    experiment = tiny()
    folder = run(experiment, tmp_path / "r").folder
    messages: list[str] = []
    sync_folder(folder, store, None, messages.append)
    sync_folder(folder, store, None, messages.append)
    assert messages == [f"{folder}: sent 7 new points of 7", f"{folder}: up to date, 7 points"]
    seen = StoreView(store)
    (found,) = seen.runs()
    seen.assert_complete(found, folder)
    assert (found.info.status, found.info.run_name) == ("FINISHED", "c2dfb seed 0 · r · ring · by_class h 0.8")
    assert found.data.params["algorithm.compressor.ratio"] == "0.2"
    assert not any(key.startswith("tracking") for key in found.data.params)
    tags = found.data.tags
    assert tags["dbo.run_key"] == experiment.run_key
    assert len(tags["mlflow.source.git.commit"]) == 40
    assert (tags["dbo.hosts"], tags["mlflow.runColor"]) == ("1", "#0072B2")
    assert f"dbo run {folder / 'experiment.yaml'}" in tags["mlflow.note.content"]
    (data,) = found.inputs.dataset_inputs
    assert tags["dbo.data_digest"].startswith(data.dataset.digest)
    assert "h=0.8" in {tag.key: tag.value for tag in data.tags}["partition"]
    files = {file.path for file in seen.client.list_artifacts(found.info.run_id)}
    assert files >= {"experiment.yaml", "summary.json", "state.safetensors", "nodes.parquet"}
    table = parquet.read_table(seen.client.download_artifacts(found.info.run_id, "nodes.parquet"))
    assert table.column_names == ["round", "node", "accuracy", "apart_x", "apart_y", "bytes"]
    assert table.num_rows == 7 * 4
    assert str(tmp_path / "mlartifacts") in seen.client.get_run(found.info.run_id).info.artifact_uri


def test_replayed_rounds_are_not_sent_again(
    tiny: Callable[..., Experiment], tmp_path: Path, store: str
) -> None:
    """After a rollback the file has rounds again, with other clocks: MLflow keeps one point of each."""
    folder = run(tiny(), tmp_path / "r").folder
    lines = read_metrics(folder / "metrics.jsonl")
    (folder / "manifest.json").unlink()

    def write(records: list[dict[str, Any]]) -> None:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    write(lines[:5])
    sync_folder(folder, store, None)
    later = [{**line, "seconds": line["seconds"] + 9, "timestamp": line["timestamp"] + 9} for line in lines[3:]]
    write(lines[:3] + later)
    sync_folder(folder, store, None)
    seen = StoreView(store)
    (found,) = seen.runs()
    assert seen.steps(found) == seen.steps(found, "seconds") == list(range(7))


def test_the_status_in_mlflow_is_that_of_the_run(
    tiny: Callable[..., Experiment], tmp_path: Path, store: str
) -> None:
    """Diverged: FAILED with a tag. No summary: KILLED, and FINISHED once the run was resumed to its end."""
    away = run(tiny(rounds=200, algorithm={"name": "c2dfb", "eta_in": 1e30}), tmp_path / "away").folder
    sync_folder(away, store, None)
    experiment = tiny()
    folder = run(experiment, tmp_path / "r").folder
    summary = (folder / "summary.json").read_bytes()
    (folder / "summary.json").unlink()
    sync_folder(folder, store, None)
    seen = StoreView(store)
    ends = {found.data.tags["dbo.run_key"]: found for found in seen.runs()}
    killed = ends.pop(experiment.run_key)
    (diverged,) = ends.values()
    assert (diverged.info.status, diverged.data.tags["dbo.status"]) == ("FAILED", "diverged")
    assert "not finite" in diverged.data.tags["dbo.error"]
    assert (killed.info.status, killed.data.tags["dbo.status"]) == ("KILLED", "killed")
    (folder / "summary.json").write_bytes(summary)
    sync_folder(folder, store, None)
    assert seen.client.get_run(killed.info.run_id).info.status == "FINISHED"


def test_a_comparison_is_a_parent_with_children(
    tiny: Callable[..., Experiment], tmp_path: Path, store: str
) -> None:
    """One parent, a child per algorithm, also if only a member is synced, or if it is synced again."""
    changes = {"algorithm": {"name": "d_soba"}}, {"algorithm": {"name": "f2ba"}}
    compare([tiny(**change) for change in changes], Target("upper_loss", 1.0), tmp_path / "c")
    (tmp_path / "c" / "figures").mkdir()
    for image in ("topology.png", "figures/accuracy-mb.png", "figures/accuracy-mb.pdf"):
        (tmp_path / "c" / image).write_bytes(b"image")
    for folder in (tmp_path / "c" / "f2ba", tmp_path / "c"):
        sync_folder(folder, store, None)
    seen = StoreView(store)
    parents = [found for found in seen.runs() if "dbo.group_key" in found.data.tags]
    children = [found for found in seen.runs() if "dbo.run_key" in found.data.tags]
    assert [found.info.status for found in (*parents, *children)] == ["FINISHED"] * 3
    (parent,) = parents
    assert {child.data.tags["mlflow.parentRunId"] for child in children} == {parent.info.run_id}
    assert sorted(child.data.params["algorithm.name"] for child in children) == ["d_soba", "f2ba"]
    assert sorted(child.info.run_name for child in children) == [
        "d_soba seed 0 · c · ring · by_class h 0.8", "f2ba seed 0 · c · ring · by_class h 0.8"]
    best = min(record["upper_loss"] for name in ("d_soba", "f2ba")
               for record in read_metrics(tmp_path / "c" / name / "metrics.jsonl"))
    assert parent.data.metrics["best_upper_loss"] == best
    assert "dbo compare" in parent.data.tags["mlflow.note.content"]
    files = {file.path for place in ("", "figures") for file in seen.client.list_artifacts(parent.info.run_id, place)}
    assert files >= {
        "compare.csv", "group.json", "topology.png", "figures/accuracy-mb.png", "figures/accuracy-mb.pdf"}


def test_two_writers_on_a_new_store(tiny: Callable[..., Experiment], tmp_path: Path) -> None:
    """Two processes send the same run and find no store: one store, one run, every point once."""
    folder = run(tiny(rounds=60), tmp_path / "r").folder
    command = [sys.executable, "-m", "dbo.platform.tracking.process", str(folder), "--uri", sqlite_uri(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    seen = StoreView(sqlite_uri(tmp_path))
    (found,) = seen.runs()
    seen.assert_complete(found, folder)


def test_two_writers_add_the_same_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store refuses the second one; on the second attempt it finds the data set of the first."""
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    log_inputs, calls = MlflowClient.log_inputs, []

    def collide(self: Any, *args: Any, **options: Any) -> None:
        calls.append(args)
        if len(calls) == 1:
            raise MlflowException("UNIQUE constraint failed")
        log_inputs(self, *args, **options)

    monkeypatch.setattr(MlflowClient, "log_inputs", collide)
    client = MlflowClient(sqlite_uri(tmp_path))
    run_id = client.create_run(client.create_experiment("dbo")).info.run_id
    data = {"name": "digits", "digest": "d", "source": "s", "profile": "{}", "partition": "iid"}
    store = Store(sqlite_uri(tmp_path), "dbo")
    store.open()
    store.log_data(run_id, data)
    assert [found.dataset.name for found in client.get_run(run_id).inputs.dataset_inputs] == ["digits"]
    assert len(calls) == 2


# ---- credentials -----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder_with_server(tiny: Callable[..., Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a run that names a server; there are no credentials."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("USERNAME", "PASSWORD", "TOKEN", "AUTH", "AWS_SIGV4"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
    return run(tiny(tracking={"uri": "http://127.0.0.1:9"}), tmp_path / "r").folder


@pytest.mark.parametrize("name", ["PASSWORD", "TOKEN", "USERNAME", "AUTH", "file"])
def test_credentials_are_not_sent_to_a_server_that_only_a_folder_names(
    folder_with_server: Path, name: str, dbo: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused in one line for every kind of credential, unless MLFLOW_TRACKING_URI or --uri names the server."""
    assert resolve_destination(folder_with_server, None) == "http://127.0.0.1:9"          # control: no credentials
    if name == "file":
        (tmp_path / ".mlflow").mkdir()
        (tmp_path / ".mlflow" / "credentials").write_text("[mlflow]\n")
    else:
        monkeypatch.setenv(f"MLFLOW_TRACKING_{name}", "hunter2")
    for uri in ("", "http://127.0.0.1:10", "https://127.0.0.1:9", "http://localhost:9", "sqlite:///a.db"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        done = dbo("sync", str(folder_with_server))
        assert done.code == 2
        assert "give --uri http://127.0.0.1:9" in done.err
        assert "hunter2" not in done.err
        assert len(done.err.splitlines()) == 1
    assert resolve_destination(folder_with_server, "http://127.0.0.1:9") == "http://127.0.0.1:9"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9/")
    assert resolve_destination(folder_with_server, None) == "http://127.0.0.1:9"


def test_all_folders_are_checked_before_the_first_is_sent(
    folder_with_server: Path, tiny: Callable[..., Experiment], dbo: Callable[..., Any], tmp_path: Path, store: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that may not be sent stops the others; the environment of one does not decide about the next."""
    other = run(tiny(tracking={"uri": store}, seed=1), tmp_path / "other").folder
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "hunter2")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:10")
    assert dbo("sync", str(other), str(folder_with_server)).code == 2
    assert StoreView(store).runs() == []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    done = dbo("sync", str(other), str(folder_with_server))
    assert (done.code, len(StoreView(store).runs())) == (1, 1)           # one sent; the other failed, no server
    assert "7 of 7 points are not in MLflow" in done.err


@pytest.mark.parametrize("uri", ["databricks", "http://me:hunter2@h", 7, ["http://h"], "file:///etc"])
def test_the_store_that_a_folder_names_is_validated(folder_with_server: Path, uri: Any) -> None:
    """The folder may come from somebody else."""
    text = yaml_io.read(folder_with_server / "experiment.yaml")
    (folder_with_server / "experiment.yaml").write_text(yaml_io.dump({**text, "tracking": {"uri": uri}}))
    with pytest.raises(InputError, match=r"tracking.uri: .*(allowed: null|environment)"):
        sync_folder(folder_with_server, None, None)


def test_a_database_password_is_not_sent_either(folder_with_server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PGPASSWORD would go to any PostgreSQL server."""
    text = yaml_io.read(folder_with_server / "experiment.yaml")
    (folder_with_server / "experiment.yaml").write_text(yaml_io.dump({**text, "tracking": {"uri": "postgresql://h/n"}}))
    monkeypatch.setenv("PGPASSWORD", "hunter2")
    with pytest.raises(InputError, match="PGPASSWORD"):
        resolve_destination(folder_with_server, None)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://h:5432/other")
    assert resolve_destination(folder_with_server, None) == "postgresql://h/n"
