"""A user's task file outside of the repository: run, packed on Ray, killed and resumed, swept and reported."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.tasks.datasets.test_mnist import write_files

EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "cnn_task.py"
SETTINGS = (
    "plugins=[my_task.py]", "task=cnn_representation", "batch_size=8", "nodes=3", "checkpoint_every=1", "partition=iid",
    "data_dir=data", "tracking.uri=off", "algorithm={name: c2dfb, inner_steps: 2, eta_in: 0.1, eta_out: 0.01}",
)
DBO = (sys.executable, "-c", "from dbo.platform.cli.main import main; main()")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the task file and generated images, as a user has them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copy(EXAMPLE, tmp_path / "my_task.py")
    write_files(tmp_path / "data")
    return tmp_path


def read_state(folder: Path) -> dict[str, Any]:
    return dict(load_file(folder / "state.safetensors"))


def run_dbo(folder: Path, *arguments: str) -> None:
    """Run `dbo …` there as a user does; a busy machine may need minutes to import torch and to start Ray."""
    done = subprocess.run([*DBO, *arguments], cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_bits(folder: Path) -> None:
    """SIGKILL in the middle of the rounds; `--resume` ends with the state of a run without interruption."""
    settings = (*SETTINGS, "engine=local", "rounds=40")
    run_dbo(folder, "run", *settings, "--out", "calm", "--quiet")
    process = subprocess.Popen([*DBO, "run", *settings, "--out", "killed", "--quiet"], cwd=folder)
    until = time.monotonic() + 200
    metrics = folder / "killed" / "metrics.jsonl"
    while time.monotonic() < until and (not metrics.exists() or len(metrics.read_text().splitlines()) < 5):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (folder / "killed" / "summary.json").exists()
    run_dbo(folder, "run", *settings, "--out", "killed", "--resume", "--quiet")
    calm, killed = read_state(folder / "calm"), read_state(folder / "killed")
    for name in ("x", "y"):
        np.testing.assert_array_equal(killed[name], calm[name])


@pytest.mark.ray
@pytest.mark.slow
def test_several_actors_agree_with_one_process(folder: Path) -> None:
    """One actor per node imports the file from the user's folder; the result is that of the local engine."""
    for name, engine in (("local", "engine=local"), ("ray", "engine={name: ray, nodes_per_actor: 1}")):
        run_dbo(folder, "run", *SETTINGS, "rounds=2", engine, "--out", name, "--quiet")
    local, ray = read_state(folder / "local"), read_state(folder / "ray")
    for name in ("x", "y"):
        np.testing.assert_allclose(ray[name], local[name], rtol=1e-4, atol=1e-5)


@pytest.mark.ray
@pytest.mark.slow
def test_it_is_swept_and_reported(folder: Path) -> None:
    """Two step sizes, a folder each; the report shows both."""
    (folder / "sweep.yaml").write_text("""
name: mine
experiment:
  plugins: [my_task.py]
  task: {name: cnn_representation}
  nodes: 3
  rounds: 2
  batch_size: 8
  data_dir: data
  partition: {name: iid}
  engine: {name: local}
  tracking: {uri: "off"}
  algorithm: {name: c2dfb, inner_steps: 2, eta_out: 0.01}
axes:
  algorithm.eta_in: [0.05, 0.1]
""")
    run_dbo(folder, "sweep", "sweep.yaml", "--out", "swept")
    run_dbo(folder, "report", "swept", "--out", "report.html")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "eta_in" in page
    assert "0.05" in page
