"""Tests 2 to 4, tracking: drivers and sweeps that are killed, an MLflow server that is away."""

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
from dbo.platform.tracking import process
from dbo.platform.tracking.client import Store
from tests.faults import sweep_kills
from tests.faults.row import TINY, Row, digest, lines, timed

DBO = [sys.executable, "-c", "from dbo.platform.cli.main import main; main()"]


def points(row: Row, database: Path, folder: Path, runs: int = 1) -> None:
    """Counts points of a run that are not in a store, or are there twice; and runs that are too many or not ended."""
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
    """SIGKILL at random shares of a run, then --resume. Sabotage: runs are not found by their key any more."""
    row = Row("driver", "1 MLflow run, same hash, ≤ 1 interval redone")
    rng, kills = random.Random(0), 1 if short else kills
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        experiment = Experiment(**{**TINY, "rounds": 400, "checkpoint_every": 10})
        (base / "e.yaml").write_text(experiment.to_yaml())
        calm = run(experiment, base / "calm")
        for number in range(kills):
            folder, database = base / f"r{number}", base / f"m{number}.db"
            command = [*DBO, "run", "e.yaml", f"tracking.uri=sqlite:///{database}", "--out", str(folder), "--quiet"]
            process = subprocess.Popen(command, cwd=base)
            enough, metrics = rng.randint(2, 380), folder / "metrics.jsonl"
            while process.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") < enough):
                time.sleep(0.002)
            process.send_signal(signal.SIGKILL)
            process.wait()
            there = read_metrics(metrics)[-1]["round"] if metrics.exists() and read_metrics(metrics) else 0
            with timed(row):
                subprocess.run([*command, "--resume"], cwd=base, check=True, timeout=300)
            events = read_events(folder / "events.jsonl")
            started = [event["after_round"] for event in events if event["kind"] == "started"]
            redone = there - started[-1] if len(started) > 1 else 0
            row.count(redone <= experiment.checkpoint_every, f"kill {number}: {redone} rounds redone")
            row.count(digest(folder) == digest(calm.folder), f"kill {number}: other bits")
            if sabotage:
                with mock.patch.object(Store, "_find", return_value=[]):
                    process.sync(folder, f"sqlite:///{database}", None)
            lines(row, folder, experiment.rounds + 1)
            points(row, database, folder)
    return row


def sweep(short: bool, sabotage: bool = False) -> Row:
    """A sweep of 27 cells whose driver is killed, the same command again. Sabotage: a cell is changed afterwards."""
    row = Row("sweep", "27 children, 1 parent, 0 redone")
    cells, steps = (12, [1, 2, 3, 4]) if short else (27, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    text = sweep_kills.SWEEP.replace("[1, 2, 3, 4]", str(steps))
    look = sweep_kills._look

    def changed(out: Path, report: sweep_kills.Report) -> None:
        cell = sorted((out / "cells").iterdir())[0]
        kept = (cell / "metrics.jsonl").read_text().splitlines()[:-1]
        (cell / "metrics.jsonl").write_text("\n".join(kept) + "\n")
        look(out, report)

    kills = 1 if short else 5
    with tempfile.TemporaryDirectory() as place, mock.patch.object(sweep_kills, "SWEEP", text), \
            mock.patch.object(sweep_kills, "CELLS", cells), \
            mock.patch.object(sweep_kills, "_look", changed) if sabotage else nullcontext():
        report = sweep_kills.torture(
            Path(place), kills=kills, seed=1, rounds=200, uri="off" if short else f"sqlite:///{place}/m.db"
        )
    row.tried, row.survived = cells, report.cells - report.different
    row.lost, row.doubled = cells - report.cells, report.redone
    row.notes.append(f"killed at shares {report.killed_at} of all rounds; {report.resumed} cells resumed, none redone")
    if not short:
        row.count((report.parents, report.children, report.running) == (1, cells, 0), f"MLflow: {report}")
    return row


class Pace:
    """Makes evaluations take their time, and does something at one of them."""

    def __init__(self, pause: float, at: dict[int, Callable[[], None]]) -> None:
        self.pause, self.at = pause, at

    def started(self, experiment: Any, done: int) -> None: ...
    def noted(self, text: str) -> None: ...
    def ended(self, result: Any) -> None: ...

    def evaluated(self, record: dict[str, Any]) -> None:
        time.sleep(self.pause)
        self.at.get(record["round"], lambda: None)()


def outage(short: bool, sabotage: bool = False) -> Row:
    """The server away in the middle of a run, then for a whole run, whose points `dbo sync` brings afterwards.

    Sabotage: what is left is never brought.
    """
    row = Row("MLflow away", "0 lost, 0 doubled, training < 2 % slower")
    away = 5 if short else 60
    with tempfile.TemporaryDirectory() as place:
        with serving(Path(place)) as server:
            folder = Path(place) / "while"
            rounds = 10 * (away + 15)
            pace = Pace(0.1, {20: server.stop, 20 + 10 * away: server.start})
            with process.following(folder, server.uri, "dbo", row.notes.append):
                run(Experiment(**{**TINY, "rounds": rounds}), folder, watcher=pace)
                server.wait()
            if not sabotage:
                with timed(row):
                    process.sync(folder, server.uri, "dbo")
            points(row, server.database, folder)
        folder, database = Path(place) / "whole", Path(place) / "later.db"
        with process.following(folder, "http://127.0.0.1:9", "dbo", row.notes.append):
            run(Experiment(**{**TINY, "rounds": 50}), folder)
        if not sabotage:
            with timed(row):
                process.sync(folder, f"sqlite:///{database}", "dbo")
        if database.exists():
            points(row, database, folder)
        else:
            row.lost += 51
        if not short:
            _slower(row, Path(place))
    return row


class Toggle:
    """Stops the writer to MLflow and lets it go on, at every other evaluation; keeps the training seconds between."""

    def __init__(self) -> None:
        self.writer: subprocess.Popen[bytes] | None = None
        self.seconds: dict[bool, list[float]] = {True: [], False: []}      # by whether the writer was going on
        self.going, self.before = True, 0.0

    def started(self, experiment: Any, done: int) -> None: ...
    def noted(self, text: str) -> None: ...
    def ended(self, result: Any) -> None:
        self._signal(signal.SIGCONT)

    def evaluated(self, record: dict[str, Any]) -> None:
        if record["round"]:
            self.seconds[self.going].append(record["seconds"] - self.before)
        self.before, self.going = record["seconds"], not self.going
        self._signal(signal.SIGCONT if self.going else signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        assert self.writer is not None
        assert self.writer.poll() is None, "the writer has ended"
        self.writer.send_signal(number)


def _slower(row: Row, place: Path) -> None:
    """Training beside a writer whose server does not answer against training beside none.

    In turn within one run, a tenth of a second each: the speed of a machine that others use drifts by more than is
    looked for between two runs.
    """
    experiment = Experiment(**{**TINY, "rounds": 60_000, "eval_every": 125, "checkpoint_every": 100_000})
    toggle, start = Toggle(), subprocess.Popen

    def started(*arguments: Any, **named: Any) -> "subprocess.Popen[bytes]":
        made = start(*arguments, **named)
        toggle.writer = toggle.writer or made       # the first: a run asks git for its commit
        return made

    with mock.patch.object(subprocess, "Popen", started), \
            process.following(place / "slower", "http://127.0.0.1:9", "dbo", lambda text: None):
        run(experiment, place / "slower", watcher=toggle)
    beside, alone = (sum(toggle.seconds[going]) for going in (True, False))
    slower = 100 * (beside / alone - 1)
    row.notes.append(
        f"training beside a writer whose server does not answer: {slower:+.2f} % "
        f"({len(toggle.seconds[False])} pairs, {alone:.0f} s without it)"
    )
    row.count(slower < 2, f"training is {slower:.1f} % slower")
