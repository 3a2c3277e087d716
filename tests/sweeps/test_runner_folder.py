"""A sweep's folder: its status is written in time for MLflow, and without credentials."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbo.platform.config.engine_choice import RAY_START_SECONDS
from dbo.platform.errors import InputError, RunError
from dbo.platform.runs.runner import run
from dbo.sweeps import plan, runner
from dbo.sweeps.estimate import CellEstimate
from dbo.sweeps.grid import Grid

SweepFile = Callable[..., Path]
Command = Callable[..., Any]


@pytest.mark.parametrize(("error", "code"), [(RunError("no CPUs"), 1), (InputError("metrics.jsonl: damaged"), 2)])
def test_a_sweep_that_fails_is_failed_in_mlflow(
    error: Exception, code: int, sweep_file: SweepFile, dbo: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status is written before the background sync ends: the parent is FAILED, neither KILLED nor RUNNING."""
    mlflow = pytest.importorskip("mlflow")

    def fail(*given: Any) -> Any:
        raise error

    monkeypatch.setattr(runner, "connect_cluster", lambda grid: None)
    monkeypatch.setattr(runner, "_run_cells", fail)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    done = dbo("sweep", sweep_file(), f"tracking.uri={uri}", "--quiet", "--out", tmp_path / "out")
    assert done.code == code, done.err
    assert json.loads((tmp_path / "out" / "group.json").read_text())["status"] == "failed"
    client = mlflow.MlflowClient(tracking_uri=uri)
    (parent,) = [r for e in client.search_experiments() for r in client.search_runs([e.experiment_id])]
    assert (parent.info.status, parent.data.tags["dbo.status"]) == ("FAILED", "failed")


def test_a_password_in_a_sweeps_command_is_not_recorded(sweep_file: SweepFile, tmp_path: Path) -> None:
    """The command goes to group.json, and from there to MLflow and the report."""
    out = tmp_path / "out"
    argument = "data_dir=s3://me:hunter2@host/x?token=hunter2"
    with runner.SweepFolder(out, Grid(plan.read_sweep(sweep_file(), [argument])), f"dbo sweep quick.yaml '{argument}'"):
        pass
    text = (out / "group.json").read_text()
    assert "'data_dir=s3://***@host/x?token=***'" in json.loads(text)["command"]
    assert "hunter2" not in text


def test_a_comparison_does_not_touch_a_sweeps_folder(sweep_file: SweepFile, dbo: Command, tmp_path: Path) -> None:
    """It is refused in one line and the sweep's files stay as they were; and the other way round."""
    out = tmp_path / "out"
    with runner.SweepFolder(out, Grid(plan.read_sweep(sweep_file())), "dbo sweep quick.yaml"):
        pass
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    small = ("nodes=4", "rounds=2", "engine.name=local", "task={name: quadratic, dim_x: 4}", "tracking.uri=off")
    done = dbo("compare", *small, "--algorithms", "d_soba,f2ba", "--quiet", "--out", out)
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert "does not hold a comparison" in done.err
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert dbo("compare", *small, "--algorithms", "d_soba,f2ba", "--quiet", "--out", tmp_path / "c").code == 0
    done = dbo("sweep", sweep_file(), "--quiet", "--out", tmp_path / "c")
    assert done.code == 2
    assert "holds a comparison; choose another folder" in done.err


def test_one_folder_holds_one_sweep(sweep_file: SweepFile, dbo: Command, tmp_path: Path) -> None:
    """While a sweep locks its folder another one is refused; and so is a folder that holds a run."""
    out = tmp_path / "out"
    grid = Grid(plan.read_sweep(sweep_file()))
    with runner.SweepFolder(out, grid, "dbo sweep quick.yaml"):
        assert json.loads((out / "group.json").read_text())["status"] == "running"
        done = dbo("sweep", sweep_file(), "--out", out)
        assert done.code == 2
        assert "is in use" in done.err
    run(grid.base, tmp_path / "run")
    done = dbo("sweep", sweep_file(), "--out", tmp_path / "run")
    assert done.code == 2
    assert "holds a run" in done.err


def test_a_dry_run_writes_nothing(sweep_file: SweepFile, dbo: Command, tmp_path: Path) -> None:
    """It prints cells and the estimate."""
    done = dbo("sweep", sweep_file(), "--dry-run", "--out", tmp_path / "out")
    assert done.code == 0
    assert "inner_steps=1 seed=0" in done.out
    assert "to run" in done.out
    assert "4 cells; about" in done.out
    assert not (tmp_path / "out").exists()


def test_complete_cells_of_another_environment_are_refused(sweep_file: SweepFile, tmp_path: Path) -> None:
    """While cells are left; kept on request, which group.json records. Control: cells of this one are accepted."""
    grid = runner.build_grid(plan.read_sweep(sweep_file()))
    folder = runner.SweepFolder(tmp_path / "out", grid, "dbo sweep")
    first = grid.cells[0]
    run(first.experiment, first.folder(folder.path))
    progress = runner.SweepProgress(folder, None)
    assert (len(progress.done), progress.left > 0) == (1, True)
    runner.check_cells(folder, progress, allow_changed_code=False)
    assert folder.changes == ()
    events = first.folder(folder.path) / "events.jsonl"
    events.write_text(events.read_text().replace('"numpy": "', '"numpy": "0.'))
    with pytest.raises(InputError, match=r"environment: .* ended with another one: numpy 0\."):
        runner.check_cells(folder, progress, allow_changed_code=False)
    runner.check_cells(folder, progress, allow_changed_code=True)
    with folder:
        pass
    assert json.loads((folder.path / "group.json").read_text())["changes"] == ["environment_changed"]


def test_a_damaged_cell_is_not_complete(sweep_file: SweepFile, tmp_path: Path) -> None:
    """It is resumed, which repairs it."""
    grid = runner.build_grid(plan.read_sweep(sweep_file()))
    cell = grid.cells[0]
    run(cell.experiment, cell.folder(tmp_path))
    assert cell.read_summary(tmp_path) is not None
    (cell.folder(tmp_path) / "state.safetensors").unlink()
    assert cell.read_summary(tmp_path) is None
    run(cell.experiment, cell.folder(tmp_path), resume=True)
    assert cell.read_summary(tmp_path) is not None


def test_estimate_includes_the_start_of_ray() -> None:
    """A sweep on this machine starts Ray first; a cluster is there already."""
    progress = runner.SweepProgress.__new__(runner.SweepProgress)
    progress.total, progress.done, progress._recorded = 2, [], 3.0
    progress._estimates = {"a": CellEstimate(3.0, 1e6), "b": CellEstimate(3.0, 1e6)}
    here, cluster = (int(re.search(r"about (\d+) s", progress.format(slots))[1]) for slots in (2, None))
    assert here == 3 + RAY_START_SECONDS
    assert cluster == 6
