"""An experiment: one YAML file, checked completely before anything starts, and the key of its run."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from functools import cached_property
from importlib.metadata import version
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)

from dbo.algorithms.compression.compressors import COMPRESSORS
from dbo.algorithms.registry import Algorithm, algorithms
from dbo.platform.config import overrides as overriding
from dbo.platform.config import paths, presets, tracking_uri, yaml_io
from dbo.platform.config import plugins as plugging
from dbo.platform.config.engines import ENGINES, EngineSettings
from dbo.platform.config.validation import check, make, pick, tell
from dbo.platform.errors import InputError
from dbo.platform.network.topology import TOPOLOGIES
from dbo.tasks.datasets.digits import DATASETS
from dbo.tasks.partitions import PARTITIONS
from dbo.tasks.registry import TASKS

Section = dict[str, Any]


class Tracking(BaseModel):
    """Where MLflow keeps the runs."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    uri: str | None = Field(None, description="an MLflow store; null: a sqlite file with the results; off: none")
    experiment: str = Field("dbo", min_length=1, description="name of the MLflow experiment")

    @field_validator("uri", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return tracking_uri.OFF if value is False else value      # which YAML makes of `off`


class Experiment(BaseModel):
    """All that decides a run. Every key has a default; sections name a component and its parameters."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = Field("dbo", min_length=1, max_length=100, description="what the run is called")
    seed: int = Field(0, ge=0, lt=2**31, description="decides split, partition, graph, start and draws")
    nodes: int = Field(10, ge=1, le=100_000, description="m, nodes in the network")
    rounds: int = Field(50, ge=1, description="outer rounds to run")
    eval_every: int = Field(1, ge=1, description="rounds between evaluations; the last round is always evaluated")
    checkpoint_every: int = Field(10, ge=1, description="rounds between checkpoints")
    dtype: Literal["float32", "float64"] = Field("float32", description="of all variables and messages")
    task: Section = Field({"name": "coefficient_tuning"}, description="what is learnt, and from which data")
    algorithm: Section = Field({"name": "c2dfb"}, description="how; what is left out comes from presets, then defaults")
    topology: Section = Field({"name": "ring"}, description="who talks to whom")
    partition: Section = Field({"name": "by_class", "h": 0.8}, description="which node holds which samples")
    engine: Section = Field({"name": "ray"}, description="where the nodes run")
    tracking: Tracking = Field(Tracking(), description="where MLflow keeps the runs")
    data_dir: str | None = Field(None, description="where downloaded data lie already; null: the loaders' own cache")
    plugins: tuple[str, ...] = Field((), description="Python files or modules with further algorithms")

    @classmethod
    def read(cls, path: str | Path | None = None, overrides: Iterable[str] = ()) -> Self:
        """The experiment in a YAML file (none: all defaults), with `key=value` overrides on top."""
        data = paths.seen_from(path, yaml_io.read(Path(path))) if path is not None else {}
        if "algorithms" in data:
            raise InputError(f"{path}: algorithms: this is the file of a comparison; run it with dbo compare")
        return cls(**overriding.apply(data, overriding.parse(overrides)))

    @model_validator(mode="wrap")
    @classmethod
    def _resolve(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(data, Mapping):
            data = {key: tuple(v) if key == "plugins" and isinstance(v, list) else v for key, v in data.items()}
        try:
            made = handler(data)
        except ValidationError as error:
            raise InputError(tell(error, cls)) from None
        tracking_uri.check("tracking.uri", made.tracking.uri)
        plugging.load(made.plugins)
        named = {
            key: {"name": cls.model_fields[key].default["name"], **getattr(made, key)}
            for key in ("task", "algorithm", "topology", "partition", "engine")
        }
        task = _task(named["task"])
        sections = {
            "task": task,
            "algorithm": _algorithm(named["algorithm"], task),
            "topology": _component("topology", TOPOLOGIES, named["topology"]),
            "partition": _component("partition", PARTITIONS, named["partition"]),
            "engine": _component("engine", ENGINES, named["engine"]),
        }
        for name, section in sections.items():
            object.__setattr__(made, name, section)
        try:
            _ = made.parts    # what only shows when a component is built is an input error too
        except InputError as error:
            raise InputError(f"{error}{_preset_in(str(error), named['algorithm'], task)}") from None
        return made

    @cached_property
    def parts(self) -> "Parts":
        """The components themselves, built from their sections."""
        return Parts(self)

    def resolved(self) -> dict[str, Any]:
        """The whole experiment as plain data, nothing left to a default."""
        plain: dict[str, Any] = _plain(self.model_dump())
        return plain

    def recorded(self) -> dict[str, Any]:
        """The same with its paths in full, enough to repeat the run from anywhere."""
        return paths.in_full(self.resolved())

    def to_yaml(self) -> str:
        """As a file that `read` takes back from anywhere, its paths in full."""
        return yaml_io.dump(self.recorded())

    @cached_property
    def run_key(self) -> str:
        """Identifies the run: equal keys, with nodes packed alike, give equal results.

        Where data lie, runs are tracked and processes sit does not matter.
        """
        return _hashed(self._decisive)

    def key_with(self, rounds: int) -> str:
        """The run key of the same experiment with another number of rounds."""
        return _hashed({**self._decisive, "rounds": rounds})

    @cached_property
    def trajectory_key(self) -> str:
        """Identifies the way that the run goes: a longer run has the same one, and can go on where a shorter ended."""
        return _hashed({key: value for key, value in self._decisive.items() if key != "rounds"})

    @cached_property
    def _decisive(self) -> dict[str, Any]:
        decisive = {key: value for key, value in self.resolved().items() if key not in {"tracking", "data_dir"}}
        runtime_only = self.parts.engine.runtime_only
        decisive["engine"] = {key: value for key, value in self.engine.items() if key not in runtime_only}
        decisive["plugins"] = plugging.digests(self.plugins)
        decisive["version"] = [version("dbo"), plugging.built_in()]
        if "file" in self.topology:
            decisive["topology"] = {"name": self.topology["name"], "edges": _digest(self.topology["file"])}
        return decisive


def _hashed(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


class Parts:
    """The objects that an experiment's sections describe."""

    def __init__(self, experiment: Experiment) -> None:
        task = experiment.task
        self.task: Any = make("task", TASKS[task["name"]], task)
        self.data: Any = make("task", DATASETS[task["dataset"]], task) if "dataset" in task else None
        self.algorithm: Algorithm = algorithms()[experiment.algorithm["name"]]
        values = dict(experiment.algorithm)
        if "compressor" in values:
            section = values["compressor"]
            values["compressor"] = make("algorithm.compressor", COMPRESSORS[section["name"]], section)
        self.config: Any = make("algorithm", self.algorithm.config, values)
        _check_packets(self.algorithm, self.config)
        self.topology: Any = make("topology", TOPOLOGIES[experiment.topology["name"]], experiment.topology)
        self.partition: Any = make("partition", PARTITIONS[experiment.partition["name"]], experiment.partition)
        self.engine: EngineSettings = make("engine", ENGINES[experiment.engine["name"]], experiment.engine)


def _named(path: str, known: Mapping[str, Any], section: Section) -> tuple[str, Section]:
    name = pick(f"{path}.name", section["name"], known)
    return name, {key: value for key, value in section.items() if key != "name"}


def _component(path: str, known: Mapping[str, type], section: Section) -> Section:
    name, given = _named(path, known, section)
    return {"name": name, **check(path, (known[name],), given)}


def _task(section: Section) -> Section:
    """A data set's parameters sit beside those of the task that uses it; some of the task's defaults depend on it."""
    name, given = _named("task", TASKS, section)
    task = TASKS[name]
    kinds: tuple[type, ...] = (task,)
    if task.datasets:
        dataset = pick("task.dataset", given.get("dataset", task.datasets[0]), task.datasets)
        kinds = (task, DATASETS[dataset])
        given = {**task.usual.get(dataset, {}), **given}
    return {"name": name, **check("task", kinds, given)}


def _algorithm(section: Section, task: Section) -> Section:
    """Given values, else tuned ones for this task and data set, else the algorithm's defaults."""
    known = algorithms()
    name, given = _named("algorithm", known, section)
    tuned = presets.lookup(name, task["name"], task.get("dataset"))
    config = known[name].config
    if "compressor" not in {field.name for field in fields(config)}:
        return {"name": name, **check("algorithm", (config,), tuned | given)}
    filled = check("algorithm", (config,), {key: v for key, v in (tuned | given).items() if key != "compressor"})
    usual = tuned.get("compressor") or _describe_compressor(filled["compressor"])
    filled["compressor"] = _component("algorithm.compressor", COMPRESSORS, _over(usual, given.get("compressor")))
    return {"name": name, **filled}


def _preset_in(told: str, given: Section, task: Section) -> str:
    """Which of the values that an error is about nobody gave: the preset did."""
    tuned = presets.lookup(given["name"], task["name"], task.get("dataset")) if told.startswith("algorithm: ") else {}
    silent = [f"{key} = {v}" for key, v in tuned.items() if key not in given and re.search(rf"\b{key}\b", told)]
    if not silent:
        return ""
    where = "/".join(filter(None, (task["name"], task.get("dataset"))))
    comes, them = ("comes", "it") if len(silent) == 1 else ("come", "them")
    return f"; {', '.join(silent)} {comes} from the preset for {where}, give {them} too"


def _check_packets(algorithm: Algorithm, config: Any) -> None:
    """Before anything starts: a declaration that cannot be right would end the first round."""
    wanted = "must be a function from the configuration to a whole number ≥ 0, e.g. lambda cfg: 1"
    try:
        declared = algorithm.packets(config)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        raise InputError(f"algorithm {algorithm.name!r}: packets(cfg) fails with {told}; {wanted}") from error
    if not isinstance(declared, Integral) or isinstance(declared, bool) or declared < 0:
        raise InputError(f"algorithm {algorithm.name!r}: packets(cfg) gives {declared!r:.80}; {wanted}")


def _over(usual: Section, given: Any) -> Section:
    """The given compressor; where it is the usual one, its parameters are those of the usual one, unless given."""
    if not isinstance(given, Mapping | None):
        raise InputError(f"algorithm.compressor: {given!r} is not allowed; must be a mapping with a name")
    given = given or {}
    return {**usual, **given} if given.get("name", usual["name"]) == usual["name"] else dict(given)


def _describe_compressor(compressor: Any) -> Section:
    name = next((name for name, kind in COMPRESSORS.items() if kind is type(compressor)), None)
    if name is None:
        raise InputError(f"algorithm.compressor: {compressor!r} is not allowed; allowed: {', '.join(COMPRESSORS)}")
    return {"name": name, **asdict(compressor)}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(paths.opened(path).read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"topology.file: {path} cannot be read: {error.strerror}") from None
