"""Kill the driver of a sweep at random times, resume it, and count what is lost, repeated or left running.

    python -m tests.faults.sweep_kills [--kills 5] [--seed 0]

Twelve cells. The driver alone gets SIGKILL when a random share of all rounds is done; then the same command runs again,
until it ends. At the end every cell must be there, no finished cell may have been written again, and all metrics must
equal those of undisturbed runs. MLflow must hold one parent and twelve children, none of them running.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dbo.platform.config.experiment import Experiment
from dbo.platform.runs.run_folder import read_events, read_metrics, read_summary
from dbo.platform.runs.runner import run
from dbo.platform.runs.schema import CLOCKS

SWEEP = """
name: killed
experiment:
  nodes: 4
  rounds: {rounds}
  eval_every: 5
  checkpoint_every: 20
  dtype: float64
  task: {{name: quadratic, dim_x: 4, dim_y: 8}}
  algorithm: {{name: c2dfb, eta_in: 0.3, eta_out: 0.1, gamma_in: 0.3}}
axes:
  algorithm.inner_steps: [1, 2, 3, 4]
  seed: [0, 1, 2]
metric: upper_loss
target: direction_norm=0.01
"""
CELLS = 12
COMMAND = [
    sys.executable, "-m", "dbo.platform.cli", "sweep", "sweep.yaml", "--resume", "--quiet",
]


@dataclass
class KillReport:
    """What is in the folder and in MLflow at the end."""

    killed_at: list[float] = field(default_factory=list)       # shares of all rounds
    cells: int = 0
    redone: int = 0                 # finished cells that were written again
    resumed: int = 0                # how often a cell was resumed or restarted
    different: int = 0              # cells whose metrics differ from those of undisturbed runs
    parents: int | None = None      # in MLflow
    children: int | None = None
    running: int | None = None

    @property
    def ok(self) -> bool:
        tracked = self.parents is None or (self.parents, self.children, self.running) == (1, CELLS, 0)
        return (self.cells, self.redone, self.different) == (CELLS, 0, 0) and tracked


def run_and_kill(
    folder: Path, kills: int, seed: int = 0, *, rounds: int = 600, uri: str = "off",
    environment: Mapping[str, str] | None = None, timeout: float = 300.0,
) -> KillReport:
    """Run the sweep in `folder`/out, kill its driver, resume it, and inspect the results."""
    (folder / "sweep.yaml").write_text(SWEEP.format(rounds=rounds), encoding="utf-8")
    rng, report, out, log = random.Random(seed), KillReport(), folder / "out", folder / "log.txt"
    finished: dict[str, tuple[int, int]] = {}
    for threshold in [*sorted(rng.uniform(0.03, 0.95) for _ in range(kills)), None]:
        with open(log, "ab") as output:
            driver = subprocess.Popen(
                [*COMMAND, f"tracking.uri={uri}", "--out", "out"], cwd=folder, stdout=output, stderr=output,
                env={**os.environ, **(environment or {})},
            )
            deadline = time.monotonic() + timeout
            try:
                while driver.poll() is None and (threshold is None or measure_progress(out, rounds) < threshold):
                    if time.monotonic() > deadline:
                        raise TimeoutError(log.read_text(encoding="utf-8")[-2000:])
                    time.sleep(0.02)
            finally:
                if driver.poll() is None:
                    driver.send_signal(signal.SIGKILL)
                    report.killed_at.append(round(measure_progress(out, rounds), 3))
                code = driver.wait()
        if threshold is None and code != 0:
            raise RuntimeError(log.read_text(encoding="utf-8")[-2000:])
        report.redone += sum(read_timestamps(out).get(name) != before for name, before in finished.items())
        finished = read_timestamps(out)
    _inspect_cells(out, report)
    if uri != "off":
        _count_mlflow_runs(uri, report)
    return report


def measure_progress(out: Path, rounds: int) -> float:
    """Return the share of all evaluations that are on disk."""
    lines = sum(path.read_bytes().count(b"\n") for path in out.glob("cells/*/metrics.jsonl"))
    return lines / (CELLS * (rounds // 5 + 1))


def read_timestamps(out: Path) -> dict[str, tuple[int, int]]:
    """Return when the files of each finished cell were written."""
    found = {}
    for summary in out.glob("cells/*/summary.json"):
        metrics = summary.with_name("metrics.jsonl")
        found[summary.parent.name] = summary.stat().st_mtime_ns, metrics.stat().st_mtime_ns
    return found


def read_values(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k not in CLOCKS} for r in read_metrics(folder / "metrics.jsonl")]


def _inspect_cells(out: Path, report: KillReport) -> None:
    for cell in sorted((out / "cells").iterdir()):
        summary = read_summary(cell)
        report.cells += summary is not None and summary.status == "finished"
        report.resumed += sum(event.kind == "started" for event in read_events(cell / "events.jsonl")) - 1
        with tempfile.TemporaryDirectory() as other:
            run(Experiment.read(cell / "experiment.yaml"), Path(other) / "undisturbed")
            same = read_values(Path(other) / "undisturbed") == read_values(cell)
            state = (Path(other) / "undisturbed" / "state.safetensors").read_bytes()
            report.different += not (same and state == (cell / "state.safetensors").read_bytes())


def _count_mlflow_runs(uri: str, report: KillReport) -> None:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=uri)
    runs = [
        found for experiment in client.search_experiments()
        for found in client.search_runs([experiment.experiment_id], max_results=1000)
    ]
    report.parents = sum("dbo.group_key" in found.data.tags for found in runs)
    report.children = sum("mlflow.parentRunId" in found.data.tags for found in runs)
    report.running = sum(found.info.status == "RUNNING" for found in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dbo-sweep-") as folder:
        report = run_and_kill(Path(folder), options.kills, options.seed, uri=f"sqlite:///{folder}/mlflow.db")
    print(report)
    sys.exit(not report.ok)


if __name__ == "__main__":
    main()
