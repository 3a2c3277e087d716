"""A user's own task, a file outside of the repository: run, on Ray, killed and resumed, swept, reported.

The file is that of the tutorial, a CNN on MNIST with mini-batches.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dbo

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "docs" / "examples" / "cnn_task.py"
DATA = ROOT.parent / "shared" / "data"
SETTINGS = (
    "task=cnn_representation", "task.images=600", f"data_dir={DATA}", "batch_size=16", "nodes=4", "rounds=60",
    "checkpoint_every=5", "eval_every=20", "algorithm.inner_steps=3", "algorithm.eta_in=0.1", "algorithm.eta_out=0.05",
    "algorithm.gamma_in=0.3", "tracking.uri=off",
)
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the user's file."""
    folder = tmp_path_factory.mktemp("elsewhere")
    shutil.copy(EXAMPLE, folder / "my_task.py")
    return folder


@pytest.fixture(scope="module")
def command(place: Path) -> Run:
    """Run `dbo …` in that folder, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*arguments: str, start: bool = False) -> Any:
        line = [sys.executable, "-m", "dbo.platform.cli", *arguments]
        if start:
            return subprocess.Popen(line, cwd=place, env=environment, start_new_session=True,
                                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        done = subprocess.run(
            line, cwd=place, env=environment, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run


def test_file_is_short() -> None:
    """At most forty lines: what a student writes in an afternoon."""
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 40


def test_an_own_task_runs_everywhere(place: Path, command: Run, require: Any) -> None:
    """On Ray with several actors; after SIGKILL the resumed run has the same bits; one sweep, one report."""
    require("data", (DATA / "MNIST").is_dir())
    on_ray = ("run", "plugins=[my_task.py]", *SETTINGS, "engine=ray", "engine.nodes_per_actor=2")
    command(*on_ray, "--out", "calm")
    driver: Any = command(*on_ray, "--out", "killed", start=True)
    wait_for_checkpoint(place / "killed", driver)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    assert not (place / "killed" / "summary.json").exists()
    resumed = command(*on_ray, "--out", "killed", "--resume")
    assert "resumed after round" in resumed.stdout + resumed.stderr
    assert (place / "killed/state.safetensors").read_bytes() == (place / "calm/state.safetensors").read_bytes()

    local = command("run", "plugins=[my_task.py]", *SETTINGS, "engine=local", "--out", "local")
    assert "finished" in local.stdout
    ends = [dbo.load(place / name).history.iloc[-1] for name in ("local", "calm")]
    assert ends[0]["upper_loss"] == pytest.approx(ends[1]["upper_loss"], rel=1e-3)      # float32
    assert ends[0]["samples"] == ends[1]["samples"] > 0

    (place / "sweep.yaml").write_text(
        "name: steps\nexperiment: {plugins: [my_task.py]}\naxes: {algorithm.inner_steps: [1, 2]}\n", encoding="utf-8")
    command("sweep", "sweep.yaml", *(s for s in SETTINGS if "inner_steps" not in s), "rounds=3", "--out", "swept")
    assert len(dbo.load(place / "swept").summary) == 2
    command("report", "calm", "swept", "--out", "report.html")
    assert "cnn_representation" in (place / "report.html").read_text(encoding="utf-8")


def wait_for_checkpoint(folder: Path, driver: Any) -> None:
    """Wait until a round in the middle has a checkpoint."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        found = list((folder / "checkpoints").glob("*/manifest.json")) if folder.exists() else []
        if any(json.loads(file.read_text())["round"] > 0 for file in found):
            return
        assert driver.poll() is None, "the run ended before it could be killed"
        time.sleep(0.05)
    raise AssertionError("no checkpoint")
