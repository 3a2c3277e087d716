"""Run one cell as a Ray Tune trial, in a worker process: into the cell's folder, with reports to the driver.

A cell does not depend on Tune's state: every worker resumes it from the checkpoint in its folder.
"""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbo.platform.config import overrides as overriding
from dbo.platform.config.experiment import Experiment
from dbo.platform.config.plugins import Shipped, receive
from dbo.platform.engine.placement import use_placement_group
from dbo.platform.errors import FolderLockedError, InputError
from dbo.platform.runs.provenance import collect_environment
from dbo.platform.runs.run_folder import RunFolder, find_summary, is_locked, read_events
from dbo.platform.runs.runner import Result, run
from dbo.platform.runs.schema import Record, Summary
from dbo.sweeps.grid import AxisValues, SweepCell

_REPORT_EVERY = 0.5         # seconds between reports that only the live table needs
_LOCK_TIMEOUT = 120.0       # seconds without progress after which we stop waiting for a locked folder
Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class TrialSpec:
    """What a worker needs to run any trial of the sweep."""

    out: str
    working_dir: str                            # of the command: relative paths refer to it
    experiments: Mapping[str, dict[str, Any]]   # resolved, by the names of their cells
    base: dict[str, Any]                        # base experiment of a search, whose cells are not known beforehand
    axes: Mapping[str, list[Any] | None]        # values of each axis; None: a range
    metric: str
    worst_score: float                          # what a cell reports that ends without a value of the metric
    report_all: bool                            # report every evaluation, for a scheduler or searcher
    plugins: tuple[Shipped, ...] = ()           # of the base experiment; the worker may be on another machine


def run_trial(config: dict[str, Any], spec: TrialSpec) -> None:
    """Run the cell of a Tune configuration. Errors are reported, not raised."""
    import ray
    from ray import tune

    if Path(spec.working_dir).is_dir():
        os.chdir(spec.working_dir)
    try:
        settings = spec.experiments[config["cell"]] if "cell" in config else overriding.apply(
            spec.base, decode_config(config, spec.axes))
    except InputError as error:
        TrialReporter(spec, tune.report).report_end(Summary("failed", error=str(error)))
        return
    with use_placement_group(ray.util.get_current_placement_group()):
        run_cell(settings, spec, tune.report)


def decode_config(config: Mapping[str, Any], axes: Mapping[str, list[Any] | None]) -> AxisValues:
    """Return the values that a searcher has sampled: it proposes indices into lists, and floats of too many digits."""
    return {key: _round_number(config[key]) if values is None else values[config[key]] for key, values in axes.items()}


def _round_number(value: float | int) -> float | int:
    return float(f"{value:.6g}") if isinstance(value, float) else int(value)


def run_cell(settings: dict[str, Any], spec: TrialSpec, report: Report) -> None:
    """Run the experiment with these settings, or take its result if another worker has run it."""
    reporter = TrialReporter(spec, report)
    try:
        receive(spec.plugins)
        # A process of the driver sends the sweep's folder to MLflow; workers do not.
        experiment = Experiment(**{**settings, "tracking": {}})
        cell = SweepCell({}, experiment)
        folder = cell.folder(Path(spec.out))
        while True:
            wait_for_lock(folder)
            if (summary := cell.read_summary(Path(spec.out))) is not None:
                reporter.report_end(summary)
                return
            with suppress(FolderLockedError):      # a search may sample a cell twice, and the other trial was faster
                discard_other_environment(folder)
                result = run(experiment, folder, resume=True, callback=reporter)
                reporter.report_end(find_summary(folder) or Summary(result.status))
                return
    except Exception as error:
        message = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        reporter.report_end(Summary("failed", error=" ".join(message.split())[:2000]))


def discard_other_environment(folder: Path) -> None:
    """Delete an unfinished run that was started with other library versions or on another processor.

    It could not be resumed to the same bits. The cell restarts: after an upgrade, or on another machine of a cluster.
    """
    if not _is_from_other_environment(folder):
        return
    files = RunFolder(folder)
    files.acquire()
    try:
        if _is_from_other_environment(folder):      # its owner may have finished it meanwhile
            files.clear()
    finally:
        files.release()


def _is_from_other_environment(folder: Path) -> bool:
    starts = [event for event in read_events(RunFolder(folder).events) if event.kind == "started"]
    summary = find_summary(folder)
    is_complete = summary is not None and summary.status != "failed"
    return bool(starts) and not is_complete and starts[-1].environment not in ({}, collect_environment())


def wait_for_lock(folder: Path) -> None:
    """Wait until no process locks the folder; raise `FolderLockedError` if its owner makes no progress.

    The owner may run the same cell. Or its driver was killed, and it ends a moment later.
    """
    before, since = _read_modification_times(folder), time.monotonic()
    while is_locked(folder):
        if (now := _read_modification_times(folder)) != before:
            before, since = now, time.monotonic()
        elif time.monotonic() - since > _LOCK_TIMEOUT:
            raise FolderLockedError(
                f"{folder} is in use by another run, which has made no progress for {_LOCK_TIMEOUT:g} s")
        time.sleep(0.5)


def _read_modification_times(folder: Path) -> list[tuple[str, int]]:
    """Return what changes with every evaluation and every checkpoint."""
    found = []
    for path in (*folder.glob("[!.]*"), *folder.glob("checkpoints/[!.]*")):
        with suppress(OSError):             # deleted meanwhile
            found.append((path.name, path.stat().st_mtime_ns))
    return sorted(found)


class TrialReporter:
    """Callback of a run that reports evaluations to the driver."""

    def __init__(self, spec: TrialSpec, report: Report) -> None:
        self._spec, self._report = spec, report
        self._rounds, self._reported = 0, 0.0
        self._latest: dict[str, Any] = {}

    def on_start(self, experiment: Experiment, done: int) -> None:
        self._rounds = experiment.rounds

    def on_evaluation(self, record: Record) -> None:
        metric = self._spec.metric
        value = record.get(metric)
        if value is None and self._spec.report_all:
            raise InputError(f"metric: {metric} is not measured by this task")
        self._latest = {
            "round": record["round"], "seconds": record["seconds"], "comm_mb": record["comm_mb"],
            **({} if value is None else {metric: value}),
        }
        due = self._spec.report_all or time.monotonic() - self._reported > _REPORT_EVERY
        if due and record["round"] < self._rounds:
            self._reported = time.monotonic()
            self._report({**self._latest, "final": False})

    def on_notice(self, text: str) -> None: ...
    def on_end(self, result: Result) -> None: ...

    def report_end(self, summary: Summary) -> None:
        """Send the final report."""
        metric, final = self._spec.metric, summary.final
        value = final.get(metric) if summary.status in {"finished", "stopped"} else None
        self._report({
            "round": final.get("round", 0), "seconds": final.get("seconds", 0.0), "comm_mb": final.get("comm_mb", 0.0),
            **self._latest, metric: self._spec.worst_score if value is None else value,
            "final": True, "status": summary.status, "error": summary.error or "",
        })
