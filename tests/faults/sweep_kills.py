"""A sweep whose driver is killed at random moments, and resumed: what was lost, done twice or left behind?

    python -m tests.faults.sweep_kills [--kills 5] [--seed 0]

Twelve cells; SIGKILL to the driver alone, when a random share of all rounds is done; then the same command again, until
it ends. Every cell must then be there, none that had finished may have been touched, and all metrics must equal those
of cells that nobody disturbed. MLflow must hold one parent and twelve children, none of them running.
"""

import argparse
import json
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
from dbo.platform.runs.run_folder import CLOCKS, read_events, read_metrics
from dbo.platform.runs.runner import run

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
target: hypergradient_norm=0.01
"""
CELLS = 12
COMMAND = [
    sys.executable, "-m", "dbo.platform.cli", "sweep", "sweep.yaml", "--resume", "--quiet",
]


@dataclass
class Report:
    """What came of it."""

    killed_at: list[float] = field(default_factory=list)       # shares of all rounds
    cells: int = 0
    redone: int = 0                 # finished cells that were touched again
    resumed: int = 0                # how often a cell went on, or began again
    different: int = 0              # cells whose metrics differ from undisturbed ones
    parents: int | None = None      # in MLflow
    children: int | None = None
    running: int | None = None

    @property
    def good(self) -> bool:
        tracked = self.parents is None or (self.parents, self.children, self.running) == (1, CELLS, 0)
        return (self.cells, self.redone, self.different) == (CELLS, 0, 0) and tracked


def torture(
    folder: Path, kills: int, seed: int = 0, *, rounds: int = 600, uri: str = "off",
    environment: Mapping[str, str] | None = None, patience: float = 300.0,
) -> Report:
    """Runs the sweep in `folder`/out, kills its driver, resumes it, and looks at what is there."""
    (folder / "sweep.yaml").write_text(SWEEP.format(rounds=rounds), encoding="utf-8")
    rng, report, out = random.Random(seed), Report(), folder / "out"
    finished: dict[str, tuple[int, int]] = {}
    for threshold in [*sorted(rng.uniform(0.03, 0.95) for _ in range(kills)), None]:
        with open(folder / "said.txt", "ab") as said:
            driver = subprocess.Popen(
                [*COMMAND, f"tracking.uri={uri}", "--out", "out"], cwd=folder, stdout=said, stderr=said,
                env={**os.environ, **(environment or {})},
            )
            deadline = time.monotonic() + patience
            try:
                while driver.poll() is None and (threshold is None or progress(out, rounds) < threshold):
                    if time.monotonic() > deadline:
                        raise TimeoutError((folder / "said.txt").read_text(encoding="utf-8")[-2000:])
                    time.sleep(0.02)
            finally:
                if driver.poll() is None:
                    driver.send_signal(signal.SIGKILL)
                    report.killed_at.append(round(progress(out, rounds), 3))
                code = driver.wait()
        if threshold is None and code != 0:
            raise RuntimeError((folder / "said.txt").read_text(encoding="utf-8")[-2000:])
        report.redone += sum(stamps(out).get(name) != stamp for name, stamp in finished.items())
        finished = stamps(out)
    _look(out, report)
    if uri != "off":
        _count(uri, report)
    return report


def progress(out: Path, rounds: int) -> float:
    """The share of all evaluations that are on the disk."""
    lines = sum(path.read_bytes().count(b"\n") for path in out.glob("cells/*/metrics.jsonl"))
    return lines / (CELLS * (rounds // 5 + 1))


def stamps(out: Path) -> dict[str, tuple[int, int]]:
    """When the files of finished cells were written."""
    found = {}
    for summary in out.glob("cells/*/summary.json"):
        metrics = summary.with_name("metrics.jsonl")
        found[summary.parent.name] = summary.stat().st_mtime_ns, metrics.stat().st_mtime_ns
    return found


def values(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k not in CLOCKS} for r in read_metrics(folder / "metrics.jsonl")]


def _look(out: Path, report: Report) -> None:
    for cell in sorted((out / "cells").iterdir()):
        summary = json.loads((cell / "summary.json").read_bytes())
        report.cells += summary["status"] == "finished"
        starts = [e["after_round"] for e in read_events(cell / "events.jsonl") if e["kind"] == "started"]
        report.resumed += len(starts) - 1
        with tempfile.TemporaryDirectory() as other:
            run(Experiment.read(cell / "experiment.yaml"), Path(other) / "undisturbed")
            same = values(Path(other) / "undisturbed") == values(cell)
            state = (Path(other) / "undisturbed" / "state.safetensors").read_bytes()
            report.different += not (same and state == (cell / "state.safetensors").read_bytes())


def _count(uri: str, report: Report) -> None:
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
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dbo-sweep-") as folder:
        report = torture(Path(folder), given.kills, given.seed, uri=f"sqlite:///{folder}/mlflow.db")
    print(report)
    sys.exit(not report.good)


if __name__ == "__main__":
    main()
