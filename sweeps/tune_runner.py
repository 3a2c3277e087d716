"""Run cells on Ray Tune: as many at a time as the cluster has resources for, each in a placement group of its own.

A cell on the local engine takes a CPU per thread. A cell on the Ray engine takes a placement group with a bundle for
each of its actors, so it never waits for actors while other cells hold the CPUs. Tune only schedules: which cells are
complete is read from their folders, and Tune's own files are deleted.
"""

import atexit
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbo.platform.config.engines import LocalSettings
from dbo.platform.config.plugins import ship
from dbo.platform.engine.deadlines import call_within
from dbo.platform.engine.placement import bundle_for, pack_nodes, release_idle_actors
from dbo.platform.engine.ray_session import connect, find_lost_process
from dbo.platform.errors import RunError
from dbo.platform.runs.run_folder import RunFolder, read_metrics
from dbo.platform.runs.schema import Summary, find_direction
from dbo.platform.runs.seal import measure_files, seal_run
from dbo.sweeps.grid import Grid, SweepCell
from dbo.sweeps.live_table import LiveTable
from dbo.sweeps.plan import Axis, AxisRange
from dbo.sweeps.search_log import SearchLog
from dbo.sweeps.trial_worker import TrialSpec, decode_config, run_trial, wait_for_lock

if TYPE_CHECKING:                   # imported late elsewhere: Ray reads its environment when it is imported
    from ray.tune import Callback, PlacementGroupFactory
    from ray.tune.experiment import Trial
    from ray.tune.schedulers import TrialScheduler
    from ray.tune.search import Searcher

WORST_SCORE = 1e30          # what a cell scores in a search that has diverged or failed
_MAX_FAILURES = 2           # how often a cell whose worker was lost resumes from its checkpoint
_CPU_SHARE = 0.95           # of the CPUs for cells with actors: leaves space for a small run beside them
_LOST_SECONDS = 20.0        # for which a process of the own cluster must be stopped or dead
_CLEAN_UP_SECONDS = 5.0     # for Tune's own end
_IDLE_NOTICE_AFTER = 20.0   # seconds without a running cell after which we report the missing resources
Bundles = list[dict[str, float]]
TrialConfig = Mapping[str, Any]      # the configuration of one trial


class _ClusterLostError(Exception):
    """A process of Ray, without which Tune cannot go on, is stopped or dead."""


def _bound_exit() -> None:
    """Replace the hook with which Tune cleans up at the end of the process: it waits for the GCS for ever."""
    from ray.tune import registry

    registry._global_registry._register_atexit()      # type: ignore[no-untyped-call]   # now, not when a trial starts
    atexit.unregister(registry._unregister_all)
    atexit.unregister(_clean_up_tune)
    atexit.register(_clean_up_tune)


def _clean_up_tune() -> None:
    """Remove what Tune has registered in the cluster, if the cluster answers."""
    from ray.tune import registry

    if find_lost_process() is None:
        with suppress(Exception):
            call_within(_CLEAN_UP_SECONDS, registry._unregister_all)


class TuneRunner:
    """Runs the cells of one sweep on Tune."""

    def __init__(self, grid: Grid, out: Path, table: LiveTable, on_new_cell: Callable[[], None]) -> None:
        self.grid, self.sweep, self.out, self.table = grid, grid.sweep, out, table
        self.ray = connect(grid.base.engine.get("address"))
        self.cells: dict[str, SweepCell] = {}           # all that were started, by name
        self._on_new_cell = on_new_cell                 # called after a search has sampled a cell
        self._sampled: dict[str, SweepCell] = {}        # cells of a search, by their values
        self._idle_since = self._idle_checked = time.monotonic()
        self.is_over = False                            # Tune's loop must end: nobody waits for it any more

    def run(self, cells: Sequence[SweepCell]) -> None:
        """Run these cells, and all that a search has still to sample."""
        release_idle_actors()           # this process may keep actors for a next run; cells need their CPUs
        log = SearchLog(self.out / "search.jsonl", self.grid) if self.sweep.mode == "tpe" else None
        if log is not None:
            cells = [cell for cell in log.cells if cell.read_summary(self.out) is None]
        with _quiet_tune(), _temporary_tune_folder(self.out):
            if cells:
                self._fit_cells(cells)
            if log is not None and (more := (self.sweep.trials or 0) - len(log.cells)) > 0:
                self._fit_search(log, more)
        stopped = [name for name, status in self.table.cells.items() if status.status == "stopped"]
        record_stopped_cells((self.cells[name] for name in stopped), self.out)

    def _fit_cells(self, cells: Sequence[SweepCell]) -> None:
        from ray import tune

        self.cells |= {cell.name: cell for cell in cells}
        self._fit({"cell": tune.grid_search([cell.name for cell in cells])}, cells)

    def _fit_search(self, log: SearchLog, samples: int) -> None:
        """Sample further cells by Optuna's TPE, which first gets the results of all cells in the log."""
        import optuna
        from ray.tune.search.optuna import OptunaSearch

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        known = [(log.configs[cell.name], score) for cell in log.cells if (score := self._read_score(cell)) is not None]
        evaluated: dict[str, Any] = {
            "points_to_evaluate": [config for config, _ in known], "evaluated_rewards": [score for _, score in known],
        }
        space = {key: _make_domain(axis) for key, axis in self.sweep.parsed_axes.items()}
        searcher = OptunaSearch(
            OptunaSearch.convert_search_space(space), metric=self.sweep.metric, mode=self.sweep.direction,
            seed=self.grid.base.seed + len(log.cells),      # a resumed search must not repeat its samples
            **(evaluated if known else {}),
        )
        self._fit({}, [], searcher, samples, log)

    def _fit(
        self, space: dict[str, Any], cells: Sequence[SweepCell], searcher: "Searcher | None" = None, samples: int = 1,
        log: SearchLog | None = None,
    ) -> None:
        from ray import tune

        for cell in cells or [self.grid.base_cell]:
            self._check_resources(self.make_bundles(cell))
        self.table.slots = self._count_slots((cells or [self.grid.base_cell])[0])
        spec = TrialSpec(
            out=str(self.out.resolve()), working_dir=str(Path.cwd()),
            experiments={cell.name: cell.experiment.to_dict() for cell in cells},
            base=self.grid.data_with_engine, axes=self._axis_values(), metric=self._metric,
            worst_score=self._worst_score, report_all=log is not None or self.sweep.early_stopping is not None,
            plugins=ship(dict.fromkeys(
                plugin for cell in (self.grid.base_cell, *cells) for plugin in cell.experiment.plugins)),
        )
        resources = TrialResources(
            {cell.name: self.make_bundles(cell) for cell in cells}, default=self.make_bundles(self.grid.base_cell))
        tuner = tune.Tuner(
            tune.with_resources(tune.with_parameters(run_trial, spec=spec), resources),
            param_space=space,
            tune_config=tune.TuneConfig(
                scheduler=self._make_scheduler(), reuse_actors=self.sweep.early_stopping is None,
                trial_dirname_creator=_name_trial_folder, search_alg=searcher, num_samples=samples,
            ),
            run_config=tune.RunConfig(
                name="trials", storage_path=str((self.out / ".tune").resolve()), verbose=0,
                callbacks=[_make_callback(TrialEvents(self, log))],
                failure_config=tune.FailureConfig(max_failures=_MAX_FAILURES),
            ),
        )
        self._watch(tuner.fit, cells, log)

    def _watch(self, fit: Callable[[], Any], cells: Sequence[SweepCell], log: SearchLog | None) -> None:
        """Call `fit`, which waits for ever if the GCS or the raylet of the own cluster is stopped or dead.

        If all cells have ended by then, so has the sweep.
        """
        _bound_exit()
        lost_since: float | None = None

        def look(waited: float) -> None:
            nonlocal lost_since
            lost = find_lost_process()
            lost_since = None if lost is None else waited if lost_since is None else lost_since
            if lost is not None and lost_since is not None and waited - lost_since >= _LOST_SECONDS:
                raise _ClusterLostError(lost.partition(";")[0])

        try:
            call_within(math.inf, fit, look)
        except BaseException as error:
            self.is_over = True
            if not isinstance(error, _ClusterLostError):
                raise
            is_sampled = log is None or len(log.cells) >= (self.sweep.trials or 0)
            if not is_sampled or not all(map(self._has_ended, cells if log is None else log.cells)):
                raise RunError(f"{error}; start the sweep again to continue it") from None

    def _has_ended(self, cell: SweepCell) -> bool:
        status = self.table.cells.get(cell.name)
        return cell.read_summary(self.out) is not None or (status is not None and status.status == "stopped")

    # ---- searches and schedulers -------------------------------------------------------------------------------------

    @property
    def _metric(self) -> str:
        """The metric that trials report."""
        stop = self.sweep.early_stopping
        return (stop.metric if stop is not None and stop.metric and self.sweep.mode != "tpe" else None) \
            or self.sweep.metric

    @property
    def _worst_score(self) -> float:
        return -WORST_SCORE if self.sweep.direction == "max" else WORST_SCORE

    def _axis_values(self) -> dict[str, list[Any] | None]:
        return {key: None if isinstance(axis, AxisRange) else axis for key, axis in self.sweep.parsed_axes.items()}

    def _read_score(self, cell: SweepCell) -> float | None:
        summary = cell.read_summary(self.out)
        if summary is None:
            return None
        value = summary.final.get(self.sweep.metric) if summary.status != "diverged" else None
        return self._worst_score if value is None else float(value)

    def find_cell(self, config: TrialConfig) -> SweepCell:
        """Return the cell of a trial's configuration."""
        if "cell" in config:
            return self.cells[config["cell"]]
        values = decode_config(config, self._axis_values())
        key = json.dumps(values, sort_keys=True)
        if key not in self._sampled:
            cell = self._sampled[key] = self.grid.make_cell(values)
            self.cells[cell.name] = cell
        return self._sampled[key]

    def record_sample(self, log: SearchLog, cell: SweepCell, config: dict[str, Any]) -> None:
        """Write down a cell that the search has sampled."""
        log.add(cell, config)
        self._on_new_cell()

    def _make_scheduler(self) -> "TrialScheduler | None":
        stop = self.sweep.early_stopping
        if stop is None:
            return None
        from ray.tune.schedulers import ASHAScheduler, MedianStoppingRule

        metric = self._metric
        direction = self.sweep.direction if metric == self.sweep.metric else find_direction(metric)
        common: dict[str, Any] = {"time_attr": "round", "metric": metric, "mode": direction}
        if stop.scheduler == "median":
            return MedianStoppingRule(grace_period=stop.grace, **common)
        rounds = max(self.grid.base.rounds, stop.grace)
        return ASHAScheduler(
            grace_period=stop.grace, reduction_factor=stop.factor, max_t=rounds, stop_last_trials=False, **common)

    # ---- resources ---------------------------------------------------------------------------------------------------

    def make_bundles(self, cell: SweepCell) -> Bundles:
        """Return the bundles of a cell's placement group.

        On the local engine: one, with a CPU per thread, and the GPU if it uses one. On the Ray engine: an empty one for
        the trial itself, which only waits, and one per actor. An actor requests almost no CPU; its bundle holds a fair
        share of the CPUs, so that no more actors run at a time than there are CPUs.
        """
        engine = cell.experiment.parts.engine
        cpus = [node["Resources"].get("CPU", 0.0) for node in self.ray.nodes() if node["Alive"]]
        if isinstance(engine, LocalSettings):
            gpu = {"GPU": 1.0} if engine.device == "cuda" else {}
            return [{"CPU": min(float(engine.threads), max(cpus)), **gpu}]
        blocks = pack_nodes(engine, self.ray, cell.experiment.nodes, cell.experiment.parts.algorithm.network == "star")
        share = math.floor(_CPU_SHARE * compute_fair_share(cpus, len(blocks)) * 100) / 100
        requests = [bundle_for(engine, len(ids)) for ids in blocks]
        return [{}, *({**request, "CPU": max(request["CPU"], share)} for request in requests)]

    def report_idle(self) -> None:
        """Report the missing resources if no cell has been running for a while: others may hold the cluster."""
        now = time.monotonic()
        if self.table.count("running"):
            self._idle_since = now
            self.table.set_missing_resources("")
        elif now - max(self._idle_since, self._idle_checked) > _IDLE_NOTICE_AFTER:
            self._idle_checked = now
            free, total = self.ray.available_resources(), self.ray.cluster_resources()
            needed = _sum_bundles(self.make_bundles(next(iter(self.cells.values()), self.grid.base_cell)))
            self.table.set_missing_resources("; ".join(
                f"{kind}: a cell needs {amount:g}, free are {free.get(kind, 0.0):g} of {total.get(kind, 0.0):g}"
                for kind, amount in needed.items() if amount > free.get(kind, 0.0) + 1e-6
            ))

    def _check_resources(self, bundles: Bundles) -> None:
        """Raise an error if the cluster is too small for a cell: Tune would wait for ever."""
        total = self.ray.cluster_resources()
        for kind, amount in _sum_bundles(bundles).items():
            if amount > total.get(kind, 0.0) + 1e-6:
                raise RunError(f"a cell needs {kind} {amount:g}, the cluster has {total.get(kind, 0.0):g}")

    def _count_slots(self, cell: SweepCell) -> int:
        cpus = self.ray.cluster_resources().get("CPU", 1)
        return max(1, int(cpus / _sum_bundles(self.make_bundles(cell))["CPU"] + 1e-9))


def compute_fair_share(cpus: Sequence[float], actors: int) -> float:
    """Return the largest share of a CPU, at most 1, such that machines with these CPUs can hold so many actors."""
    shares = [1.0, *(count / number for count in cpus for number in range(1, actors + 1) if 0 < count < number)]
    fitting = [s for s in shares if sum(math.floor(count / s + 1e-9) for count in cpus) >= actors]
    return math.floor(max(fitting, default=0.01) * 100) / 100 or 0.01


def _sum_bundles(bundles: Bundles) -> dict[str, float]:
    kinds = dict.fromkeys(kind for bundle in bundles for kind in bundle)
    return {kind: sum(bundle.get(kind, 0.0) for bundle in bundles) for kind in kinds}


@dataclass(frozen=True, slots=True)
class TrialResources:
    """Makes the placement group of each trial. Plain data: Tune pickles it."""

    bundles: dict[str, Bundles]     # by the cell's name
    default: Bundles                # of cells that a search samples

    def __call__(self, config: TrialConfig) -> "PlacementGroupFactory":
        from ray import tune

        return tune.PlacementGroupFactory(self.bundles.get(config.get("cell", ""), self.default))


def _name_trial_folder(trial: "Trial") -> str:
    return str(trial.trial_id)


def _make_domain(axis: Axis) -> Any:
    """Return the search space of an axis; of a list, the indices."""
    from ray import tune

    if not isinstance(axis, AxisRange):
        return tune.choice(list(range(len(axis))))
    if axis.is_integer:
        low, high = int(axis.low), int(axis.high) + 1
        return tune.lograndint(low, high) if axis.log else tune.randint(low, high)
    return (tune.loguniform if axis.log else tune.uniform)(float(axis.low), float(axis.high))


class TrialEvents:
    """Forwards what Tune reports of trials to the live table and the log of a search."""

    def __init__(self, runner: TuneRunner, log: SearchLog | None) -> None:
        self.runner, self.table, self.log = runner, runner.table, log

    def __getstate__(self) -> dict[str, Any]:
        return {}           # Tune pickles its callbacks into a checkpoint that we never read

    def on_step_begin(self, iteration: int, trials: list["Trial"], **info: Any) -> None:
        if self.runner.is_over:
            raise RunError("the sweep has ended")
        self.runner.report_idle()

    def on_trial_start(self, iteration: int, trials: list["Trial"], trial: "Trial", **info: Any) -> None:
        cell = self.runner.find_cell(trial.config)
        if self.log is not None:
            self.runner.record_sample(self.log, cell, trial.config)
        self.table.mark_running(cell.name, cell)

    def on_trial_result(
        self, iteration: int, trials: list["Trial"], trial: "Trial", result: dict[str, Any], **info: Any
    ) -> None:
        self.table.update(self.runner.find_cell(trial.config).name, result)

    def on_trial_complete(self, iteration: int, trials: list["Trial"], trial: "Trial", **info: Any) -> None:
        name = self.runner.find_cell(trial.config).name
        if self.table.cells[name].status == "running":      # no final report: the scheduler has stopped it
            self.table.mark_ended(name, "stopped")

    def on_trial_error(self, iteration: int, trials: list["Trial"], trial: "Trial", **info: Any) -> None:
        cell = self.runner.find_cell(trial.config)
        self.table.mark_running(cell.name, cell)
        self.table.mark_ended(cell.name, "failed", str(trial.get_error() or "its worker was lost"))


def _make_callback(events: TrialEvents) -> "Callback":
    from ray import tune

    class TuneCallback(TrialEvents, tune.Callback):
        """The events as Tune's class, which cannot be imported at the top of this module."""

    return TuneCallback(events.runner, events.log)


@contextmanager
def _temporary_tune_folder(out: Path) -> Iterator[None]:
    """Let Tune write below the sweep's folder, and delete its files afterwards."""
    shutil.rmtree(out / ".tune", ignore_errors=True)
    try:
        yield
    finally:
        shutil.rmtree(out / ".tune", ignore_errors=True)


@contextmanager
def _quiet_tune() -> Iterator[None]:
    """Keep Tune from printing, from logging to other services, and from handling Ctrl-C."""
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


def record_stopped_cells(cells: Iterable[SweepCell], out: Path) -> None:
    """Write the summary of cells that Tune has stopped: their workers could not. A summary that exists stays."""
    for cell in cells:
        folder = RunFolder(cell.folder(out))
        wait_for_lock(folder.path)
        folder.acquire()
        try:
            if not folder.summary.exists():
                _write_stopped_summary(folder, cell)
        finally:
            folder.release()


def _write_stopped_summary(folder: RunFolder, cell: SweepCell) -> None:
    records = read_metrics(folder.metrics)
    final = records[-1] if records else {}
    experiment = cell.experiment
    seal_run(folder, Summary(
        "stopped", error=f"stopped by the scheduler after round {final.get('round', 0)}",
        name=experiment.name, run_key=experiment.run_key, algorithm=experiment.algorithm["name"],
        rounds=final.get("round", 0), final=final, seconds={"training": final.get("seconds", 0.0), "evaluation": 0.0},
        sealed=True,
    ), measure_files(folder))
