"""A cell in a process of its own, as Ray Tune runs it: one thread, its folder, and now and then a word to the driver.

Nothing of a cell depends on Tune: it goes on from its own checkpoint, whoever starts it again.
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
from dbo.platform.engine.placement import lent
from dbo.platform.errors import InputError, InUse
from dbo.platform.runs.run_folder import Record, in_use, read_run
from dbo.platform.runs.runner import Result, run
from dbo.sweeps.grid import Cell, Values

_SAY_EVERY = 0.5            # seconds between words to the driver, who shows them
_HELD = 120.0               # seconds without progress that somebody else may hold a cell's folder
Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Orders:
    """What a process needs to run any cell of the sweep."""

    out: str
    start: str                              # the folder in which the command was given
    settings: Mapping[str, dict[str, Any]]  # resolved experiments, by the cells' names
    base: dict[str, Any]                    # of a search, whose cells have no names yet
    axes: Mapping[str, list[Any] | None]    # its axes, with their values unless they are ranges
    metric: str
    worst: float                            # what a cell counts for that has no value of the metric in the end
    chatty: bool                            # whether every evaluation is told, for others to decide upon


def trial(config: dict[str, Any], orders: Orders) -> None:
    """Runs a cell to an end of whatever kind; what goes wrong is told, not raised."""
    import ray
    from ray import tune

    if Path(orders.start).is_dir():
        os.chdir(orders.start)              # relative paths mean what they meant there
    try:
        settings = orders.settings[config["cell"]] if "cell" in config else overriding.apply(
            orders.base, proposed(config, orders.axes))
    except InputError as error:
        _Teller(orders, tune.report).end("failed", {"error": str(error)})
        return
    with lent(ray.util.get_current_placement_group()):
        conduct(settings, orders, tune.report)


def proposed(config: Mapping[str, Any], axes: Mapping[str, list[Any] | None]) -> Values:
    """What a search has drawn: of lists the place of a value, and numbers of more digits than anybody reads."""
    return {key: _number(config[key]) if values is None else values[config[key]] for key, values in axes.items()}


def _number(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else int(value)


def conduct(settings: dict[str, Any], orders: Orders, report: Report) -> None:
    """The cell with these settings, told by `report`."""
    watcher = _Teller(orders, report)
    try:
        # Records go to MLflow by way of the sweep's folder, never from here.
        experiment = Experiment(**{**settings, "tracking": {}})
        cell = Cell({}, experiment)
        folder = cell.folder(Path(orders.out))
        while True:
            wait_for(folder)
            if (status := cell.ended(Path(orders.out))) is not None:
                watcher.end(status, read_run(folder).summary)
                return
            with suppress(InUse):           # a search may draw a cell twice: the other one was quicker
                result = run(experiment, folder, resume=True, watcher=watcher)
                watcher.end(result.status, result.summary)
                return
    except Exception as error:
        told = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        watcher.end("failed", {"error": " ".join(told.split())[:2000]})


def wait_for(folder: Path) -> None:
    """Until nobody holds the folder any more, as long as its holder gets on.

    It may be at work on the same cell; or its driver was killed, and it ends a moment later.
    """
    seen, since = _progress(folder), time.monotonic()
    while in_use(folder):
        if (now := _progress(folder)) != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > _HELD:
            raise InUse(f"{folder} is in use by another run, which has not got on for {_HELD:g} s")
        time.sleep(0.5)


def _progress(folder: Path) -> list[tuple[str, int]]:
    """Changes with every evaluation and every checkpoint."""
    found = []
    for path in (*folder.glob("[!.]*"), *folder.glob("checkpoints/[!.]*")):
        with suppress(OSError):             # gone meanwhile
            found.append((path.name, path.stat().st_mtime_ns))
    return sorted(found)


class _Teller:
    """Tells the driver of evaluations."""

    def __init__(self, orders: Orders, report: Report) -> None:
        self._orders, self._report = orders, report
        self._rounds, self._said = 0, 0.0
        self._last: dict[str, Any] = {}

    def started(self, experiment: Experiment, done: int) -> None:
        self._rounds = experiment.rounds

    def evaluated(self, record: Record) -> None:
        metric = self._orders.metric
        value = record.get(metric)
        if value is None and self._orders.chatty:
            raise InputError(f"metric: {metric} is not measured by this task")
        self._last = {
            "round": record["round"], "seconds": record["seconds"], "comm_mb": record["comm_mb"],
            **({} if value is None else {metric: value}),
        }
        if record["round"] < self._rounds and (
            self._orders.chatty or time.monotonic() - self._said > _SAY_EVERY
        ):
            self._said = time.monotonic()
            self._report({**self._last, "final": False})

    def noted(self, text: str) -> None: ...
    def ended(self, result: Result) -> None: ...

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        """The last word."""
        metric, final = self._orders.metric, summary.get("final") or {}
        value = final.get(metric) if status in {"finished", "stopped"} else None
        self._report({
            "round": final.get("round", 0), "seconds": final.get("seconds", 0.0), "comm_mb": final.get("comm_mb", 0.0),
            **self._last, metric: self._orders.worst if value is None else value,
            "final": True, "status": status, "error": str(summary.get("error", "")),
        })
