"""Read a sweep file and validate it before anything starts: a base experiment, the axes that vary it, and the mode.

    name: sensitivity-k
    experiment: {rounds: 50}
    axes: {algorithm.inner_steps: [1, 5, 15], seed: [0, 1, 2]}
    mode: grid                      # one_at_a_time | random | tpe

An axis is a dotted key of the experiment with a list of values. A search (random, tpe) also takes a range,
`{low: 1, high: 100, log: true}`.
"""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dbo.platform.config import bundle, paths, yaml_io
from dbo.platform.config import overrides as overriding
from dbo.platform.config.experiment import Experiment, is_public
from dbo.platform.config.validation import format_error, pick
from dbo.platform.errors import InputError
from dbo.platform.runs.schema import COLUMNS, DEFAULT_TARGET, OPTIONAL, RENAMED, Direction, Target, find_direction
from dbo.platform.runs.targets import choose_target, list_own_metrics, read_directions
from dbo.tasks.registry import TASKS

SWEEP_FOLDERS = {
    "": Path(__file__).with_name("shipped"), "paper/": Path(__file__).with_name("paper"),
    "beyond/": Path(__file__).with_name("beyond"),
}
MAX_CELLS = 10_000
METRICS = tuple(c for c in (*COLUMNS, *OPTIONAL) if c not in {"round", "timestamp"})
Model = TypeVar("Model", bound=BaseModel)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class AxisRange(_Strict):
    """An interval that a search samples from; integers if both ends are integers."""

    low: int | float
    high: int | float
    log: bool = False

    @property
    def is_integer(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)


Axis = list[Any] | AxisRange


class EarlyStopping(_Strict):
    """Which Tune scheduler stops weak cells early."""

    scheduler: Literal["asha", "median"] = Field(description="successive halving, or below the median of the others")
    metric: str | None = Field(None, description="the metric that is compared; null: that of the sweep")
    grace: int = Field(5, ge=1, description="rounds that every cell runs at least")
    factor: int = Field(3, ge=2, description="asha: one of so many cells continues")


class Sweep(_Strict):
    """A whole sweep file."""

    name: str = Field(min_length=1, max_length=100, pattern=r"^[\w.-]+$", description="name of the sweep")
    claim: str | None = Field(None, description="what the sweep is to show, for the report")
    experiment: dict[str, Any] = Field({}, description="the base; keys that are left out have an experiment's defaults")
    axes: dict[str, Any] = Field(min_length=1, description="dotted key of the experiment to its values")
    skip: list[dict[str, Any]] = Field(
        [], description="grid: cells to leave out, each given by values of axes (a list: any of them)")
    mode: Literal["grid", "one_at_a_time", "random", "tpe"] = Field("grid", description="how the axes are combined")
    trials: int | None = Field(None, ge=1, le=MAX_CELLS, description="number of cells of a search")
    metric: str = Field("test_accuracy", description="the metric that ranks cells; left out: that of the target")
    goal: Direction | None = Field(None, description="null: max for accuracies, min for all else")
    target: str = Field(
        str(DEFAULT_TARGET), description="metric=level whose cost the tables show; left out: chosen from the task")
    stop: dict[str, Any] | None = Field(None, description="scheduler, metric, grace, factor")

    @property
    def is_search(self) -> bool:
        return self.mode in {"random", "tpe"}

    @property
    def direction(self) -> Direction:
        """Whether the metric is maximised or minimised."""
        return self.goal or list_own_metrics(self.task).get(self.metric) or find_direction(self.metric)

    @property
    def task(self) -> str:
        """The task of the base experiment."""
        return _find_task(self.experiment)

    @property
    def parsed_target(self) -> Target:
        return Target.parse(self.target, list_own_metrics(self.task))

    @property
    def early_stopping(self) -> EarlyStopping | None:
        return None if self.stop is None else _validate(EarlyStopping, self.stop, "stop")

    @property
    def parsed_axes(self) -> dict[str, Axis]:
        return {key: self._parse_axis(key, values) for key, values in self.axes.items()}

    def _parse_axis(self, key: str, values: Any) -> Axis:
        where = f"axes.{key}"
        if not all(key.split(".")):
            raise InputError(f"{where}: is not a dotted key of an experiment, e.g. algorithm.lam")
        if isinstance(values, Mapping):
            if not self.is_search:
                raise InputError(f"{where}: a range is not allowed; mode {self.mode} takes a list of values")
            limits = _validate(AxisRange, values, where)
            if not limits.low < limits.high or (limits.log and limits.low <= 0):
                raise InputError(f"{where}: {dict(values)!r} is not allowed; must be low < high, with log: 0 < low")
            return limits
        if not isinstance(values, list) or not values:
            raise InputError(f"{where}: {values!r} is not allowed; must be a list of values")
        if any(value in values[:number] for number, value in enumerate(values)):
            raise InputError(f"{where}: {values!r} is not allowed; a value is given twice")
        return values

    def _check_skip(self) -> None:
        """Refuse what is no value of an axis: it would skip nothing."""
        if self.skip and self.mode != "grid":
            raise InputError(f"skip: is not allowed; mode {self.mode} has no grid")
        for number, rule in enumerate(self.skip):
            for key, wanted in rule.items():
                values = self.axes[pick(f"skip.{number}", key, self.axes)]
                for value in _list_wanted(wanted):
                    if value not in values:
                        raise InputError(f"skip.{number}.{key}: {value!r} is not allowed; must be a value of the axis")

    def skips(self, values: Mapping[str, Any]) -> bool:
        """Decide whether a cell of the grid is left out."""
        return any(
            all(values[key] in _list_wanted(wanted) for key, wanted in rule.items())
            for rule in self.skip)

    def check(self) -> Self:
        """Return the sweep, or raise `InputError`. Experiments are validated later, when cells are built."""
        known = dict.fromkeys((*METRICS, *read_directions(self.task), *list_own_metrics(self.task)))
        pick("metric", self.metric, known)
        _ = self.parsed_target, self.parsed_axes
        if self.early_stopping is not None and self.early_stopping.metric is not None:
            pick("stop.metric", self.early_stopping.metric, known)
        self._check_skip()
        if self.is_search and self.trials is None:
            raise InputError(f"trials: a value is required with mode {self.mode}")
        if self.is_search and "seed" in self.axes:
            raise InputError("axes.seed: is not allowed in a search, which would find a lucky seed; set seed")
        if not self.is_search and self.trials is not None:
            raise InputError(f"trials: {self.trials} is not allowed; mode {self.mode} runs all of its cells")
        if self.mode == "grid" and math.prod(len(values) for values in self.axes.values()) > MAX_CELLS:
            raise InputError(f"axes: more than {MAX_CELLS} cells are not allowed")
        return self


def _validate(model: type[Model], data: Mapping[str, Any], path: str = "") -> Model:
    """Return the model; raise a one-line `InputError` if the data do not fit."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise InputError(format_error(error, model, path)) from None


def list_shipped_sweeps() -> dict[str, Path]:
    """Return name and file of every sweep in the package."""
    return {
        f"{prefix}{file.stem}": file
        for prefix, folder in SWEEP_FOLDERS.items() for file in sorted(folder.glob("*.yaml"))
        if re.search("^axes:", file.read_text(encoding="utf-8"), re.MULTILINE)      # the others are comparisons
    }


def find_sweep(name: str) -> Path:
    """Return the file of a shipped sweep, or the path if `name` is one."""
    known = list_shipped_sweeps()
    if name in known:
        return known[name]
    if name.endswith((".yaml", ".yml")) or Path(name).is_file():
        return Path(name)
    pick("sweep", name, known)
    raise AssertionError


def read_sweep(source: str | Path, overrides: Iterable[str] = ()) -> Sweep:
    """Read a sweep file and apply `key=value`: keys of the sweep, `axes.KEY=[…]`, and keys of its experiment."""
    file = Path(source)
    data = yaml_io.read(file)
    data.setdefault("name", file.stem)
    data |= {key: RENAMED.get(data[key], data[key]) for key in ("metric",) if isinstance(data.get(key), str)}
    for section in ("experiment", "axes"):
        if not isinstance(data.get(section, {}), Mapping):
            raise InputError(f"{section}: {data[section]!r} is not allowed; must be a mapping")
    data["experiment"] = paths.resolve_from_file(file, data.get("experiment", {}))
    if "axes" in data:
        data["axes"] = {key: _resolve_axis_paths(file, key, values) for key, values in data["axes"].items()}
    file_axes = dict(data.get("axes", {}))
    own, base = {}, {}
    for path, value in overriding.parse(overrides).items():
        first = pick("key", path.partition(".")[0], [*Sweep.model_fields, *Experiment.model_fields])
        if first == "axes" and path != "axes":
            data["axes"] = {**data.get("axes", {}), path.removeprefix("axes."): value}
        elif first in Sweep.model_fields and first != "experiment":
            own[path] = value
        else:
            base[path.removeprefix("experiment.")] = value
    data = overriding.apply(data, own)
    if "skip" not in own and isinstance(data.get("axes"), Mapping):
        data["skip"] = _drop_overridden(data.get("skip", []), file_axes, data["axes"])
    data["experiment"] = overriding.apply(data.get("experiment", {}), base)
    Experiment(plugins=data["experiment"].get("plugins", ()))          # registers the plugins' tasks
    if data.get("target") is None:
        data["target"] = str(choose_target(None, _find_task(data["experiment"])))
    if is_public(str(data["target"])) or is_public(str(data.get("metric"))):
        data["experiment"] = {"eval_public": True, **data["experiment"]}
    sweep = _validate(Sweep, data)
    if data.get("metric") is None:
        sweep = sweep.model_copy(update={"metric": sweep.parsed_target.metric})
    sweep = sweep.check()
    if sweep.mode != "one_at_a_time":
        for path in base:
            if path in sweep.axes:
                raise InputError(f"{path}: is an axis of this sweep; axes.{path}=[…] changes its values")
    return sweep


def _list_wanted(wanted: Any) -> list[Any]:
    """Return the values of an axis that a rule of `skip` names: one, or a list of them."""
    return wanted if isinstance(wanted, list) else [wanted]


def _drop_overridden(skip: Any, old: Mapping[str, Any], new: Mapping[str, Any]) -> Any:
    """Return a file's `skip` without what an override has removed from the axes; a rule without a value skips nothing.

    What was no value of the file's own axis stays: it is a typo, which `Sweep.check` refuses.
    """
    if not isinstance(skip, list) or not all(isinstance(rule, Mapping) for rule in skip):
        return skip
    gone = {
        key: [value for value in values if value not in new.get(key, ())] for key, values in old.items()
        if isinstance(values, list) and isinstance(new.get(key, []), list)
    }
    rules = []
    for rule in skip:
        kept = {
            key: [value for value in _list_wanted(wanted) if value not in gone.get(key, [])]
            for key, wanted in rule.items()
        }
        if all(kept.values()):
            rules.append({key: kept[key] if isinstance(wanted, list) else wanted for key, wanted in rule.items()})
    return rules


def _find_task(experiment: Mapping[str, Any]) -> str:
    """Return the name of a base experiment's task."""
    section = overriding.expand_names(experiment).get("task", {})
    given = section.get("name") if isinstance(section, Mapping) else section
    return pick("task.name", given or Experiment.model_fields["task"].default["name"], TASKS)


def _resolve_axis_paths(file: Path, key: str, values: Any) -> Any:
    """Make paths among the values of an axis, which are relative to the file, relative to the working directory."""
    first, _, last = str(key).partition(".")
    named = {"topology", "plugins", "data_dir", "start"}
    if not isinstance(values, list) or first not in named or last not in {"", "file"}:
        return values
    if last:
        return [paths.resolve_from_file(file, {first: {last: value}})[first][last] for value in values]
    return [paths.resolve_from_file(file, {first: value})[first] for value in values]


def pack_sweep(sweep: Sweep, folder: Path) -> None:
    """Write a job's working directory: the sweep with its overrides, and copies of the files that it names."""
    data = sweep.model_dump(exclude_none=True)
    base: dict[str, Any] = data["experiment"]
    (folder / "sweep.yaml").touch()
    if isinstance(base.get("engine"), dict):
        base["engine"].pop("address", None)         # the job finds the cluster that it runs on
        base["engine"] = base["engine"] or {"name": "ray"}
    data["experiment"] = bundle.copy_experiment_files(base, folder)
    for section in data["axes"].get("topology", []):
        if isinstance(section, dict) and "file" in section:
            section["file"] = bundle.copy_file(section["file"], folder)
    if "topology.file" in data["axes"]:
        data["axes"]["topology.file"] = [bundle.copy_file(file, folder) for file in data["axes"]["topology.file"]]
    if "start" in data["axes"]:
        data["axes"]["start"] = [file and bundle.copy_file(file, folder, "start") for file in data["axes"]["start"]]
    (folder / "sweep.yaml").write_text(yaml_io.dump(data), encoding="utf-8")
