"""Cells on Ray Tune: as many at once as the cluster has room for, each with all that it needs set aside beforehand.

A cell in one process takes a core. A cell on the Ray engine takes a placement group with a bundle for each of its
actors, so that it never waits for actors while others hold the room. Tune decides who runs when; what has been done is
read from the cells' folders alone, and Tune's own records are thrown away.
"""

import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbo.platform.config.engines import LocalSettings
from dbo.platform.engine.placement import bundle_for, dismiss, pack_nodes
from dbo.platform.engine.ray_session import connect
from dbo.platform.errors import RunError
from dbo.platform.runs.run_folder import RunFolder, read_metrics
from dbo.sweeps.grid import Cell, Cells, Values
from dbo.sweeps.live_table import Board
from dbo.sweeps.plan import Range
from dbo.sweeps.trial_worker import Orders, proposed, trial, wait_for

WORST = 1e30            # what a cell counts for, in a search, that has diverged or failed
_RETRIES = 2            # how often a cell whose process was lost goes on from its checkpoint
_TAKEN = 0.95           # of the cores, by cells with actors: a run beside them, which asks for little, fits too
_PATIENCE = 20.0        # seconds without a cell at work after which the sweep says what it waits for
Bundles = list[dict[str, float]]


class Driver:
    """One sweep on Tune."""

    def __init__(self, cells: Cells, out: Path, board: Board, grown: Callable[[], None]) -> None:
        self.cells, self.sweep, self.out, self.board = cells, cells.sweep, out, board
        self._grown = grown                     # is told when a search has drawn a cell
        self.ray = connect(cells.base.engine.get("address"))
        self._named: dict[str, Cell] = {}
        self._seen: dict[str, Cell] = {}        # of a search, by its values
        self._idle_since = self._looked = time.monotonic()

    def run(self, todo: Sequence[Cell]) -> None:
        """These cells, and all that a search has still to draw."""
        dismiss()           # actors of this process that wait for a next run hold what cells need
        log = SearchLog(self.out / "search.jsonl", self.cells) if self.sweep.mode == "tpe" else None
        if log is not None:
            todo = [cell for cell in log.cells if cell.ended(self.out) is None]
        with _quiet(), _own_records(self.out):
            if todo:
                self._fit({"cell": _grid([cell.name for cell in todo])}, todo)
            if log is not None and (more := (self.sweep.trials or 0) - len(log.cells)) > 0:
                self._search(log, more)
        self._settle()

    def _fit(self, space: dict[str, Any], todo: Sequence[Cell], **more: Any) -> None:
        from ray import tune

        named = {cell.name: cell for cell in todo}
        self._named |= named
        log: SearchLog | None = more.pop("log", None)

        def cell_of(config: dict[str, Any]) -> Cell:
            return named[config["cell"]] if "cell" in config else self._proposed(config)

        for cell in todo or [self.cells.base_cell]:
            self._check_room(self.bundles(cell))
        self.board.slots = self._slots((todo or [self.cells.base_cell])[0])
        searched = log is not None or self.sweep.stopping is not None
        orders = Orders(
            out=str(self.out.resolve()), start=str(Path.cwd()),
            settings={cell.name: cell.experiment.resolved() for cell in todo},
            base=self.cells.placed, axes=self._axes(), metric=self._metric,
            worst=-WORST if self.sweep.best == "max" else WORST, chatty=searched,
        )
        tune.Tuner(
            tune.with_resources(
                tune.with_parameters(trial, orders=orders),
                Room(
                    {cell.name: self.bundles(cell) for cell in todo}, usual=self.bundles(self.cells.base_cell)
                ),
            ),
            param_space=space,
            tune_config=tune.TuneConfig(
                scheduler=self._scheduler(), reuse_actors=self.sweep.stopping is None,
                trial_dirname_creator=_named, **more,
            ),
            run_config=tune.RunConfig(
                name="trials", storage_path=str((self.out / ".tune").resolve()), verbose=0,
                callbacks=[_callback(self.board, cell_of, log, self._grown, self._look)],
                failure_config=tune.FailureConfig(max_failures=_RETRIES),
            ),
        ).fit()

    # ---- searches ----------------------------------------------------------------------------------------------------

    @property
    def _metric(self) -> str:
        stop = self.sweep.stopping
        return (stop.metric if stop is not None and stop.metric and self.sweep.mode != "tpe" else None) \
            or self.sweep.metric

    def _axes(self) -> dict[str, list[Any] | None]:
        return {key: None if isinstance(axis, Range) else axis for key, axis in self.sweep.ranges.items()}

    def _search(self, log: "SearchLog", more: int) -> None:
        """Optuna's TPE through Tune's adapter, told first what earlier starts of this search have found."""
        import optuna
        from ray.tune.search.optuna import OptunaSearch

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        known = [(log.places[cell.name], reward) for cell in log.cells if (reward := self._reward(cell)) is not None]
        told: dict[str, Any] = {
            "points_to_evaluate": [point for point, _ in known], "evaluated_rewards": [reward for _, reward in known],
        }
        space = {key: _domain(axis) for key, axis in self.sweep.ranges.items()}
        searcher = OptunaSearch(
            OptunaSearch.convert_search_space(space), metric=self.sweep.metric, mode=self.sweep.best,
            seed=self.cells.base.seed + len(log.cells),      # not the same draws again
            **(told if known else {}),
        )
        self._fit({}, [], search_alg=searcher, num_samples=more, log=log)

    def _reward(self, cell: Cell) -> float | None:
        status = cell.ended(self.out)
        if status is None:
            return None
        records = read_metrics(cell.folder(self.out) / "metrics.jsonl")
        value = records[-1].get(self.sweep.metric) if records and status != "diverged" else None
        return (-WORST if self.sweep.best == "max" else WORST) if value is None else float(value)

    def _proposed(self, config: dict[str, Any]) -> Cell:
        values = proposed(config, self._axes())
        key = json.dumps(values, sort_keys=True)
        if key not in self._seen:
            self._seen[key] = self.cells.cell(values)
        return self._seen[key]

    def _scheduler(self) -> Any:
        stop = self.sweep.stopping
        if stop is None:
            return None
        from ray.tune.schedulers import ASHAScheduler, MedianStoppingRule

        metric = self._metric
        rising = self.sweep.best if metric == self.sweep.metric else "max" if "accuracy" in metric else "min"
        common: dict[str, Any] = {"time_attr": "round", "metric": metric, "mode": rising}
        if stop.scheduler == "median":
            return MedianStoppingRule(grace_period=stop.grace, **common)
        rounds = max(self.cells.base.rounds, stop.grace)
        return ASHAScheduler(
            grace_period=stop.grace, reduction_factor=stop.factor, max_t=rounds, stop_last_trials=False, **common)

    # ---- room --------------------------------------------------------------------------------------------------------

    def bundles(self, cell: Cell) -> Bundles:
        """What a cell needs: a core per thread, or nothing for itself, which only waits, and a seat for each actor.

        Behind a seat is a fair share of the cores, though an actor asks for less: so that no more actors are at work at
        the same time than there are cores.
        """
        engine = cell.experiment.parts.engine
        cores = [node["Resources"].get("CPU", 0.0) for node in self.ray.nodes() if node["Alive"]]
        if isinstance(engine, LocalSettings):
            return [{"CPU": min(float(engine.threads), max(cores))}]
        blocks = pack_nodes(engine, self.ray, cell.experiment.nodes)
        share = math.floor(_TAKEN * fair_share(cores, len(blocks)) * 100) / 100
        seats = [bundle_for(engine, len(ids)) for ids in blocks]
        return [{}, *({**seat, "CPU": max(seat["CPU"], share)} for seat in seats)]

    def _look(self) -> None:
        """Says what is missing if nobody has been at work for a while: others may hold the cluster."""
        now = time.monotonic()
        if self.board.count("running"):
            self._idle_since = now
            self.board.waits("")
        elif now - max(self._idle_since, self._looked) > _PATIENCE:
            self._looked = now
            free, total = self.ray.available_resources(), self.ray.cluster_resources()
            needed = _needed(self.bundles(next(iter(self._named.values()), self.cells.base_cell)))
            self.board.waits("; ".join(
                f"{kind}: a cell needs {amount:g}, free are {free.get(kind, 0.0):g} of {total.get(kind, 0.0):g}"
                for kind, amount in needed.items() if amount > free.get(kind, 0.0) + 1e-6
            ))

    def _check_room(self, bundles: Bundles) -> None:
        """Tune would wait for ever for what the cluster does not have."""
        total = self.ray.cluster_resources()
        for kind, amount in _needed(bundles).items():
            if amount > total.get(kind, 0.0) + 1e-6:
                raise RunError(f"a cell needs {kind} {amount:g}, the cluster has {total.get(kind, 0.0):g}")

    def _slots(self, cell: Cell) -> int:
        return max(1, int(self.ray.cluster_resources().get("CPU", 1) / _needed(self.bundles(cell))["CPU"] + 1e-9))

    def _settle(self) -> None:
        """Cells that Tune has stopped say so in their folders, as those do that ended by themselves."""
        for name, standing in self.board.cells.items():
            if standing.status != "stopped":
                continue
            cell = next(cell for cell in [*self._named.values(), *self._seen.values()] if cell.name == name)
            folder = RunFolder(cell.folder(self.out))
            wait_for(folder.path)
            folder.acquire()
            try:
                if not folder.summary.exists():
                    _write_stopped(folder, cell)
            finally:
                folder.release()


def fair_share(cores: Sequence[float], actors: int) -> float:
    """The largest share of a core, up to a whole one, of which machines with so many cores can hold so many."""
    shares = [1.0, *(count / number for count in cores for number in range(1, actors + 1) if 0 < count < number)]
    fitting = [s for s in shares if sum(math.floor(count / s + 1e-9) for count in cores) >= actors]
    return math.floor(max(fitting, default=0.01) * 100) / 100 or 0.01


def _needed(bundles: Bundles) -> dict[str, float]:
    kinds = dict.fromkeys(kind for bundle in bundles for kind in bundle)
    return {kind: sum(bundle.get(kind, 0.0) for bundle in bundles) for kind in kinds}


@dataclass(frozen=True, slots=True)
class Room:
    """The placement group of each cell. Plain data: Tune takes it along to other processes."""

    named: dict[str, Bundles]
    usual: Bundles          # of cells that a search draws

    def __call__(self, config: dict[str, Any]) -> Any:
        from ray import tune

        return tune.PlacementGroupFactory(self.named.get(config.get("cell", ""), self.usual))


def _named(trial: Any) -> str:
    return str(trial.trial_id)


def _grid(names: list[str]) -> Any:
    from ray import tune

    return tune.grid_search(names)


def _domain(axis: list[Any] | Range) -> Any:
    from ray import tune

    if not isinstance(axis, Range):
        return tune.choice(list(range(len(axis))))
    if axis.whole:
        low, high = int(axis.low), int(axis.high) + 1
        return tune.lograndint(low, high) if axis.log else tune.randint(low, high)
    return (tune.loguniform if axis.log else tune.uniform)(float(axis.low), float(axis.high))


class SearchLog:
    """What a search has drawn so far: a line per cell, written before the cell starts."""

    def __init__(self, path: Path, cells: Cells) -> None:
        self.path = path
        self.cells: list[Cell] = []
        self.places: dict[str, Values] = {}         # what the searcher called them
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):
                entry = json.loads(line)
                cell = cells.cell(entry["values"])
                self.cells.append(cell)
                self.places[cell.name] = entry["config"]

    def add(self, cell: Cell, config: dict[str, Any]) -> None:
        if cell.name in self.places:
            return
        self.cells.append(cell)
        self.places[cell.name] = config
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"values": cell.values, "config": config}) + "\n")


def _callback(
    board: Board, cell_of: Callable[[dict[str, Any]], Cell], log: SearchLog | None, grown: Callable[[], None],
    look: Callable[[], None],
) -> Any:
    """Passes on to the board what Tune tells."""
    from ray import tune

    class Told(tune.Callback):
        board: Any
        cell_of: Any
        log: Any
        grown: Any
        look: Any

        def __getstate__(self) -> dict[str, Any]:
            return {}           # Tune keeps a copy of everything, which nobody reads

        def on_step_begin(self, iteration: int, trials: Any, **info: Any) -> None:
            self.look()

        def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            cell = self.cell_of(trial.config)
            if self.log is not None:
                self.log.add(cell, trial.config)
                self.grown()
            self.board.started(cell.name, cell)

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
            self.board.told(self.cell_of(trial.config).name, result)

        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            name = self.cell_of(trial.config).name
            if self.board.cells[name].status == "running":
                self.board.ended(name, "stopped")

        def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            cell = self.cell_of(trial.config)
            self.board.started(cell.name, cell)
            self.board.ended(cell.name, "failed", str(trial.get_error() or "its process was lost"))

    told = Told()
    told.board, told.cell_of, told.log, told.grown, told.look = board, cell_of, log, grown, look
    return told


@contextmanager
def _own_records(out: Path) -> Iterator[None]:
    """Tune writes below the sweep's folder, and only as long as it runs."""
    shutil.rmtree(out / ".tune", ignore_errors=True)
    try:
        yield
    finally:
        shutil.rmtree(out / ".tune", ignore_errors=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Tune neither prints nor logs for others, and leaves Ctrl-C to Python."""
    settings = {
        "RAY_AIR_NEW_OUTPUT": "0", "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "TUNE_DISABLE_SIGINT_HANDLER": "1",
        "TUNE_RESULT_BUFFER_LENGTH": "0",
    }
    before = {key: os.environ.get(key) for key in settings}
    os.environ.update(settings)
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def _write_stopped(folder: RunFolder, cell: Cell) -> None:
    records = read_metrics(folder.metrics)
    final = records[-1] if records else {}
    experiment = cell.experiment
    folder.write_summary({
        "status": "stopped", "error": f"behind the others after round {final.get('round', 0)}",
        "name": experiment.name, "run_key": experiment.run_key, "algorithm": experiment.algorithm["name"],
        "rounds": final.get("round", 0), "final": final, "targets": {}, "recoveries": [],
        "seconds": {"training": final.get("seconds", 0.0), "evaluation": 0.0},
    })
