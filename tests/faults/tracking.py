"""Tests 2 to 4, tracking: killed drivers, killed sweeps, an MLflow server that is down."""

import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.mlflow_server import serving

from dbo.platform.config.experiment import Experiment
from dbo.platform.runs.run_folder import read_events, read_metrics
from dbo.platform.runs.runner import run
from dbo.platform.tracking.client import Store
from dbo.platform.tracking.process import follow_in_background
from dbo.platform.tracking.sync import sync_folder
from tests.faults import sweep_kills
from tests.faults.row import TINY, Row, count_evaluations, hash_run, measure_time

DBO = [sys.executable, "-c", "from dbo.platform.cli.main import main; main()"]


def count_points(row: Row, database: Path, folder: Path, runs: int = 1) -> None:
    """Count points of a run that a store lacks or has twice, and check the number and status of its runs."""
    with closing(sqlite3.connect(database)) as store:
        found = store.execute("select run_uuid, status from runs where lifecycle_stage = 'active'").fetchall()
        row.count(len(found) == runs, f"{len(found)} MLflow runs instead of {runs}")
        row.count(all(status == "FINISHED" for _, status in found), f"ended as {[status for _, status in found]}")
        seen = store.execute("select step, count(*) from metrics where key = 'upper_loss' group by step").fetchall()
        bad = store.execute("select count(*) from metrics where is_nan = 1 or abs(value) > 1.79e308").fetchone()[0]
    due = {record["round"]: record["upper_loss"] for record in read_metrics(folder / "metrics.jsonl")}
    row.lost += len(set(due) - {step for step, _ in seen})
    row.doubled += sum(count - 1 for _, count in seen)
    row.count(not bad, f"{bad} values in MLflow are not finite")


def driver(short: bool, sabotage: bool = False, kills: int = 20) -> Row:
    """Kill the driver at random times, then --resume. Sabotage: runs are not found by their key."""
    row = Row("driver", "1 MLflow run, same hash, ≤ 1 interval redone")
    rng, kills = random.Random(0), 1 if short else kills
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        experiment = Experiment(**{**TINY, "rounds": 400, "checkpoint_every": 10})
        (base / "e.yaml").write_text(experiment.to_yaml())
        undisturbed = run(experiment, base / "undisturbed")
        for number in range(kills):
            folder, database = base / f"r{number}", base / f"m{number}.db"
            command = [*DBO, "run", "e.yaml", f"tracking.uri=sqlite:///{database}", "--out", str(folder), "--quiet"]
            killed = subprocess.Popen(command, cwd=base)
            kill_after, metrics = rng.randint(2, 380), folder / "metrics.jsonl"
            while killed.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") < kill_after):
                time.sleep(0.002)
            killed.send_signal(signal.SIGKILL)
            killed.wait()
            reached = read_metrics(metrics)[-1]["round"] if metrics.exists() and read_metrics(metrics) else 0
            with measure_time(row):
                subprocess.run([*command, "--resume"], cwd=base, check=True, timeout=300)
            events = read_events(folder / "events.jsonl")
            started = [event.after_round or 0 for event in events if event.kind == "started"]
            redone = reached - started[-1] if len(started) > 1 else 0
            row.count(redone <= experiment.checkpoint_every, f"kill {number}: {redone} rounds redone")
            row.count(hash_run(folder) == hash_run(undisturbed.folder), f"kill {number}: other bits")
            if sabotage:
                with mock.patch.object(Store, "_find", return_value=[]):
                    sync_folder(folder, f"sqlite:///{database}", None)
            count_evaluations(row, folder, experiment.rounds + 1)
            count_points(row, database, folder)
    return row


def sweep(short: bool, sabotage: bool = False) -> Row:
    """Kill the driver of a sweep of 27 cells, then repeat the command. Sabotage: a cell is changed afterwards."""
    row = Row("sweep", "27 children, 1 parent, 0 redone")
    cells, steps = (12, [1, 2, 3, 4]) if short else (27, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    text = sweep_kills.SWEEP.replace("[1, 2, 3, 4]", str(steps))
    look = sweep_kills._inspect_cells

    def changed(out: Path, report: sweep_kills.KillReport) -> None:
        cell = sorted((out / "cells").iterdir())[0]
        kept = (cell / "metrics.jsonl").read_text().splitlines()[:-1]
        (cell / "metrics.jsonl").write_text("\n".join(kept) + "\n")
        look(out, report)

    kills = 1 if short else 5
    with tempfile.TemporaryDirectory() as place, mock.patch.object(sweep_kills, "SWEEP", text), \
            mock.patch.object(sweep_kills, "CELLS", cells), \
            mock.patch.object(sweep_kills, "_inspect_cells", changed) if sabotage else nullcontext():
        report = sweep_kills.run_and_kill(
            Path(place), kills=kills, seed=1, rounds=200, uri="off" if short else f"sqlite:///{place}/m.db"
        )
    row.tried, row.survived = cells, report.cells - report.different
    row.lost, row.doubled = cells - report.cells, report.redone
    row.notes.append(f"killed at shares {report.killed_at} of all rounds; {report.resumed} cells resumed, none redone")
    if not short:
        row.count((report.parents, report.children, report.running) == (1, cells, 0), f"MLflow: {report}")
    return row


class Slowdown:
    """Callback that pauses at every evaluation and calls functions at some rounds."""

    def __init__(self, pause: float, at: dict[int, Callable[[], None]]) -> None:
        self.pause, self.at = pause, at

    def on_start(self, experiment: Any, done: int) -> None: ...
    def on_notice(self, text: str) -> None: ...
    def on_end(self, result: Any) -> None: ...

    def on_evaluation(self, record: dict[str, Any]) -> None:
        time.sleep(self.pause)
        self.at.get(record["round"], lambda: None)()


def outage(short: bool, sabotage: bool = False) -> Row:
    """Stop the server in the middle of a run, then for a whole run, whose points `dbo sync` sends afterwards.

    Sabotage: `dbo sync` is not used.
    """
    row = Row("MLflow down", "0 lost, 0 doubled, training < 2 % slower")
    seconds = 5 if short else 60
    with tempfile.TemporaryDirectory() as place:
        with serving(Path(place)) as server:
            folder = Path(place) / "while"
            rounds = 10 * (seconds + 15)
            slowdown = Slowdown(0.1, {20: server.stop, 20 + 10 * seconds: server.start})
            with follow_in_background(folder, server.uri, "dbo", row.notes.append):
                run(Experiment(**{**TINY, "rounds": rounds}), folder, callback=slowdown)
                server.wait()
            if not sabotage:
                with measure_time(row):
                    sync_folder(folder, server.uri, "dbo")
            count_points(row, server.database, folder)
        folder, database = Path(place) / "whole", Path(place) / "later.db"
        with follow_in_background(folder, "http://127.0.0.1:9", "dbo", row.notes.append):
            run(Experiment(**{**TINY, "rounds": 50}), folder)
        if not sabotage:
            with measure_time(row):
                sync_folder(folder, f"sqlite:///{database}", "dbo")
        if database.exists():
            count_points(row, database, folder)
        else:
            row.lost += 51
        if not short:
            _measure_slowdown(row, Path(place))
    return row


class Toggle:
    """Callback that stops and continues the background process at alternate evaluations, and records training times."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.seconds: dict[bool, list[float]] = {True: [], False: []}      # by whether the process was running
        self.running, self.before = True, 0.0

    def on_start(self, experiment: Any, done: int) -> None: ...
    def on_notice(self, text: str) -> None: ...
    def on_end(self, result: Any) -> None:
        self._signal(signal.SIGCONT)

    def on_evaluation(self, record: dict[str, Any]) -> None:
        if record["round"]:
            self.seconds[self.running].append(record["seconds"] - self.before)
        self.before, self.running = record["seconds"], not self.running
        self._signal(signal.SIGCONT if self.running else signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        assert self.process is not None
        assert self.process.poll() is None, "the background process has ended"
        self.process.send_signal(number)


def _measure_slowdown(row: Row, place: Path) -> None:
    """Compare training with and without a background process whose server does not answer.

    Both alternate within one run, a tenth of a second each: between two runs, a shared machine drifts by more than the
    difference to measure.
    """
    experiment = Experiment(**{**TINY, "rounds": 60_000, "eval_every": 125, "checkpoint_every": 100_000})
    toggle, start = Toggle(), subprocess.Popen

    def popen(*arguments: Any, **options: Any) -> "subprocess.Popen[bytes]":
        process = start(*arguments, **options)
        toggle.process = toggle.process or process       # the first: a run later calls git
        return process

    with mock.patch.object(subprocess, "Popen", popen), \
            follow_in_background(place / "slower", "http://127.0.0.1:9", "dbo", lambda text: None):
        run(experiment, place / "slower", callback=toggle)
    beside, alone = (sum(toggle.seconds[running]) for running in (True, False))
    slower = 100 * (beside / alone - 1)
    row.notes.append(
        f"training beside a background process whose server does not answer: {slower:+.2f} % "
        f"({len(toggle.seconds[False])} pairs, {alone:.0f} s without it)"
    )
    row.count(slower < 2, f"training is {slower:.1f} % slower")
