"""A sweep file: a base experiment, axes to vary it along, and how; checked completely before anything starts.

    name: sensitivity-k
    experiment: {rounds: 50}
    axes: {algorithm.inner_steps: [1, 5, 15], seed: [0, 1, 2]}
    mode: grid                      # one_at_a_time | random | tpe

An axis is any dotted key of an experiment with the values that it takes; where a search draws them, also
`{low: 1, high: 100, log: true}`.
"""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dbo.platform.cli.submit import carry
from dbo.platform.config import overrides as overriding
from dbo.platform.config import paths, yaml_io
from dbo.platform.config.experiment import Experiment
from dbo.platform.config.validation import pick, tell
from dbo.platform.errors import InputError
from dbo.platform.runs.compare import DEFAULT_TARGET
from dbo.platform.runs.run_folder import COLUMNS, Target

SHELVES = {"": Path(__file__).with_name("shipped"), "paper/": Path(__file__).with_name("paper")}
MOST_CELLS = 10_000
METRICS = tuple(c for c in COLUMNS if c not in {"round", "timestamp"})
Model = TypeVar("Model", bound=BaseModel)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Range(_Strict):
    """What a search draws from: whole numbers where both ends are."""

    low: int | float
    high: int | float
    log: bool = False

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)


class Stop(_Strict):
    """Ends cells early that fall behind the others."""

    scheduler: Literal["asha", "median"] = Field(description="successive halving, or below the others' median")
    metric: str | None = Field(None, description="by which they are compared; null: the sweep's")
    grace: int = Field(5, ge=1, description="rounds that every cell gets")
    factor: int = Field(3, ge=2, description="asha: of so many cells one goes on")


class Sweep(_Strict):
    """The whole file."""

    name: str = Field(min_length=1, max_length=100, pattern=r"^[\w.-]+$", description="what the sweep is called")
    claim: str | None = Field(None, description="what the sweep is to show, for the report")
    experiment: dict[str, Any] = Field({}, description="the base; what is left out has an experiment's defaults")
    axes: dict[str, Any] = Field(min_length=1, description="dotted key of the experiment to its values")
    mode: Literal["grid", "one_at_a_time", "random", "tpe"] = Field("grid", description="how the axes are combined")
    trials: int | None = Field(None, ge=1, le=MOST_CELLS, description="cells of a search")
    metric: str = Field("test_accuracy", description="by which cells are ranked")
    goal: Literal["max", "min"] | None = Field(None, description="null: max for accuracies, min for all else")
    target: str = Field(str(DEFAULT_TARGET), description="metric=level whose price is told")
    stop: dict[str, Any] | None = Field(None, description="scheduler, metric, grace, factor")

    @property
    def searches(self) -> bool:
        return self.mode in {"random", "tpe"}

    @property
    def best(self) -> Literal["max", "min"]:
        return self.goal or ("max" if "accuracy" in self.metric else "min")

    @property
    def level(self) -> Target:
        return Target.parse(self.target)

    @property
    def stopping(self) -> Stop | None:
        return None if self.stop is None else validated(Stop, self.stop, "stop")

    @property
    def ranges(self) -> dict[str, list[Any] | Range]:
        """The axes, checked."""
        return {key: self._axis(key, values) for key, values in self.axes.items()}

    def _axis(self, key: str, values: Any) -> list[Any] | Range:
        where = f"axes.{key}"
        if not all(key.split(".")):
            raise InputError(f"{where}: is not a dotted key of an experiment, e.g. algorithm.lam")
        if isinstance(values, Mapping):
            if not self.searches:
                raise InputError(f"{where}: a range is not allowed; mode {self.mode} takes a list of values")
            limits = validated(Range, values, where)
            if not limits.low < limits.high or (limits.log and limits.low <= 0):
                raise InputError(f"{where}: {dict(values)!r} is not allowed; must be low < high, with log: 0 < low")
            return limits
        if not isinstance(values, list) or not values:
            raise InputError(f"{where}: {values!r} is not allowed; must be a list of values")
        if any(value in values[:number] for number, value in enumerate(values)):
            raise InputError(f"{where}: {values!r} is not allowed; a value is given twice")
        return values

    def checked(self) -> Self:
        """Itself, if all is as it should be; experiments are checked where cells are made of them."""
        pick("metric", self.metric, METRICS)
        _ = self.level, self.ranges
        if self.stopping is not None and self.stopping.metric is not None:
            pick("stop.metric", self.stopping.metric, METRICS)
        if self.searches and self.trials is None:
            raise InputError(f"trials: a value is required with mode {self.mode}")
        if self.searches and "seed" in self.axes:
            raise InputError("axes.seed: is not allowed in a search, which would find a lucky seed; set seed")
        if not self.searches and self.trials is not None:
            raise InputError(f"trials: {self.trials} is not allowed; mode {self.mode} runs all of its cells")
        if self.mode == "grid" and math.prod(len(values) for values in self.axes.values()) > MOST_CELLS:
            raise InputError(f"axes: more than {MOST_CELLS} cells are not allowed")
        return self


def validated(model: type[Model], data: Mapping[str, Any], path: str = "") -> Model:
    """The model; what is wrong is told in one line."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise InputError(tell(error, model, path)) from None


def shipped() -> dict[str, Path]:
    """The sweeps that come along, by name."""
    return {
        f"{prefix}{file.stem}": file for prefix, folder in SHELVES.items() for file in sorted(folder.glob("*.yaml"))
        if re.search("^axes:", file.read_text(encoding="utf-8"), re.MULTILINE)      # comparisons lie there too
    }


def find(name: str) -> Path:
    """A file, or the shipped sweep of this name."""
    known = shipped()
    if name in known:
        return known[name]
    if name.endswith((".yaml", ".yml")) or Path(name).is_file():
        return Path(name)
    pick("sweep", name, known)
    raise AssertionError


def read(source: str | Path, overrides: Iterable[str] = ()) -> Sweep:
    """The sweep in a file, with `key=value` on top: keys of the sweep, `axes.KEY=[…]`, and keys of its experiment."""
    file = Path(source)
    data = yaml_io.read(file)
    data.setdefault("name", file.stem)
    for section in ("experiment", "axes"):
        if not isinstance(data.get(section, {}), Mapping):
            raise InputError(f"{section}: {data[section]!r} is not allowed; must be a mapping")
    data["experiment"] = paths.seen_from(file, data.get("experiment", {}))
    if "axes" in data:
        data["axes"] = {key: _seen_from(file, key, values) for key, values in data["axes"].items()}
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
    data["experiment"] = overriding.apply(data.get("experiment", {}), base)
    sweep = validated(Sweep, data).checked()
    if sweep.mode != "one_at_a_time":
        for path in base:
            if path in sweep.axes:
                raise InputError(f"{path}: is an axis of this sweep; axes.{path}=[…] changes its values")
    return sweep


def _seen_from(file: Path, key: str, values: Any) -> Any:
    """The values of an axis as the working directory sees them, where they are paths."""
    first, _, last = str(key).partition(".")
    if not isinstance(values, list) or first not in {"topology", "plugins", "data_dir"} or last not in {"", "file"}:
        return values
    if last:
        return [paths.seen_from(file, {first: {last: value}})[first][last] for value in values]
    return [paths.seen_from(file, {first: value})[first] for value in values]


def pack(sweep: Sweep, folder: Path) -> None:
    """A working directory of its own: the sweep with its overrides, and the files that its experiments name."""
    data = sweep.model_dump(exclude_none=True)
    base: dict[str, Any] = data["experiment"]
    (folder / "sweep.yaml").touch()
    if isinstance(base.get("engine"), dict):
        base["engine"].pop("address", None)         # the job finds the cluster that it runs on
        base["engine"] = base["engine"] or {"name": "ray"}
    if "plugins" in base:
        base["plugins"] = [carry(p, folder) if p.endswith(".py") else p for p in base["plugins"]]
    sections = [base.get("topology"), *data["axes"].get("topology", [])]
    for section in sections:
        if isinstance(section, dict) and "file" in section:
            section["file"] = carry(section["file"], folder)
    if "topology.file" in data["axes"]:
        data["axes"]["topology.file"] = [carry(file, folder) for file in data["axes"]["topology.file"]]
    (folder / "sweep.yaml").write_text(yaml_io.dump(data), encoding="utf-8")
