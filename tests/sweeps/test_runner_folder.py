"""A sweep's folder: how it ended is said in time for those who follow it, and without passwords."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbo.platform.errors import InputError, RunError
from dbo.sweeps import plan
from dbo.sweeps import runner as sweeping
from dbo.sweeps.grid import Cells

Sheet = Callable[..., Path]
Command = Callable[..., Any]


@pytest.mark.parametrize(("error", "code"), [(RunError("no room"), 1), (InputError("metrics.jsonl: damaged"), 2)])
def test_a_sweep_that_breaks_off_is_failed_in_mlflow(
    error: Exception, code: int, sheet: Sheet, dbo: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status is written before the writer is told to end: the parent is FAILED, neither KILLED nor RUNNING."""
    mlflow = pytest.importorskip("mlflow")

    def breaks(*given: Any) -> Any:
        raise error

    monkeypatch.setattr(sweeping, "connect", lambda cells: None)
    monkeypatch.setattr(sweeping, "_run", breaks)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    done = dbo("sweep", sheet(), f"tracking.uri={uri}", "--quiet", "--out", tmp_path / "out")
    assert done.code == code, done.err
    assert json.loads((tmp_path / "out" / "group.json").read_text())["status"] == "failed"
    client = mlflow.MlflowClient(tracking_uri=uri)
    (parent,) = [r for e in client.search_experiments() for r in client.search_runs([e.experiment_id])]
    assert (parent.info.status, parent.data.tags["dbo.status"]) == ("FAILED", "failed")


def test_a_password_in_a_sweep_s_command_is_not_recorded(sheet: Sheet, tmp_path: Path) -> None:
    """What was typed goes to group.json, and from there to MLflow and the report."""
    out = tmp_path / "out"
    typed = "data_dir=s3://me:hunter2@host/x?token=hunter2"
    with sweeping.Folder(out, Cells(plan.read(sheet(), [typed])), f"dbo sweep quick.yaml '{typed}'"):
        pass
    text = (out / "group.json").read_text()
    assert "'data_dir=s3://***@host/x?token=***'" in json.loads(text)["command"]
    assert "hunter2" not in text


def test_a_comparison_leaves_a_sweep_s_folder_alone(sheet: Sheet, dbo: Command, tmp_path: Path) -> None:
    """Refused in one line, the sweep's files as they were; and the other way round."""
    out = tmp_path / "out"
    with sweeping.Folder(out, Cells(plan.read(sheet())), "dbo sweep quick.yaml"):
        pass
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    small = ("nodes=4", "rounds=2", "engine.name=local", "task={name: quadratic, dim_x: 4}", "tracking.uri=off")
    done = dbo("compare", *small, "--algorithms", "d_soba,f2ba", "--quiet", "--out", out)
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert "holds something else than a comparison" in done.err
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert dbo("compare", *small, "--algorithms", "d_soba,f2ba", "--quiet", "--out", tmp_path / "c").code == 0
    done = dbo("sweep", sheet(), "--quiet", "--out", tmp_path / "c")
    assert done.code == 2
    assert "holds another sweep" in done.err
