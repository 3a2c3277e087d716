"""Define an experiment: one YAML file, validated completely before anything starts, and the key of its run."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from dbo.algorithms.api import COMPRESSORS
from dbo.algorithms.registry import Algorithm, algorithms
from dbo.platform.config import code_identity, paths, presets, tracking_uri, yaml_io
from dbo.platform.config import overrides as overriding
from dbo.platform.config import plugins as plugging
from dbo.platform.config.engines import ENGINES, EngineSettings
from dbo.platform.config.validation import DataclassInstance, build, format_error, pick, validate
from dbo.platform.errors import InputError
from dbo.platform.network.topology import TOPOLOGIES, Topology
from dbo.tasks.api import DataSet, Partition, Task
from dbo.tasks.partitions import PARTITIONS
from dbo.tasks.registry import DATASETS, TASKS

Section = dict[str, Any]


class Tracking(BaseModel):
    """The MLflow store and experiment of a run."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    uri: str | None = Field(None, description="an MLflow store; null: a sqlite file with the results; off: none")
    experiment: str = Field("dbo", min_length=1, description="name of the MLflow experiment")

    @field_validator("uri", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return tracking_uri.OFF if value is False else value      # YAML 1.1 reads `off` as false


@dataclass(frozen=True, slots=True)
class Parts:
    """The objects that an experiment's sections describe."""

    task: Task
    data: DataSet | None
    algorithm: Algorithm
    config: DataclassInstance
    topology: Topology
    partition: Partition
    engine: EngineSettings


class Experiment(BaseModel):
    """All settings of a run. Every key has a default; sections name a component and its parameters."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = Field("dbo", min_length=1, max_length=100, description="name of the run")
    seed: int = Field(0, ge=0, lt=2**31, description="seed of split, partition, graph, start and random draws")
    nodes: int = Field(10, ge=1, le=100_000, description="m, nodes in the network")
    rounds: int = Field(50, ge=1, description="outer rounds to run")
    eval_every: int = Field(1, ge=1, description="rounds between evaluations; the last round is always evaluated")
    checkpoint_every: int = Field(10, ge=1, description="rounds between checkpoints")
    dtype: Literal["float32", "float64"] = Field("float32", description="of all variables and messages")
    task: Section = Field({"name": "coefficient_tuning"}, description="the problem and its data set")
    algorithm: Section = Field({"name": "c2dfb"}, description="the method; missing parameters: preset, then default")
    topology: Section = Field({"name": "ring"}, description="the graph of the network")
    partition: Section = Field({"name": "by_class", "h": 0.8}, description="how samples are assigned to nodes")
    engine: Section = Field({"name": "ray"}, description="where the nodes run")
    tracking: Tracking = Field(Tracking(), description="the MLflow store and experiment")
    data_dir: str | None = Field(None, description="folder of downloaded data; null: the loaders' own cache")
    plugins: tuple[str, ...] = Field((), description="Python files or modules with further algorithms")

    _given: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def given(self) -> dict[str, Any]:
        """The keys that were set, before defaults and presets: what another experiment can be derived from."""
        return dict(self._given)

    @classmethod
    def read(cls, path: str | Path | None = None, overrides: Iterable[str] = ()) -> Self:
        """Read an experiment from a YAML file (none: all defaults) and apply `key=value` overrides."""
        data = paths.resolve_from_file(path, yaml_io.read(Path(path))) if path is not None else {}
        if "algorithms" in data:
            raise InputError(f"{path}: algorithms: this is the file of a comparison; run it with dbo compare")
        return cls(**overriding.apply(data, overriding.parse(overrides)))

    @model_validator(mode="wrap")
    @classmethod
    def _resolve(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(data, Mapping):
            data = overriding.expand_names(data)
            data = {key: tuple(v) if key == "plugins" and isinstance(v, list) else v for key, v in data.items()}
        try:
            made = handler(data)
        except ValidationError as error:
            raise InputError(format_error(error, cls)) from None
        tracking_uri.validate_uri("tracking.uri", made.tracking.uri)
        plugging.load(made.plugins)
        named = {
            key: {"name": cls.model_fields[key].default["name"], **getattr(made, key)}
            for key in overriding.SECTIONS
        }
        task = _resolve_task(named["task"])
        sections = {
            "task": task,
            "algorithm": _resolve_algorithm(named["algorithm"], task),
            "topology": _resolve_component("topology", TOPOLOGIES, named["topology"]),
            "partition": _resolve_component("partition", PARTITIONS, named["partition"]),
            "engine": _resolve_component("engine", ENGINES, named["engine"]),
        }
        for name, section in sections.items():
            object.__setattr__(made, name, section)
        made._given = dict(data) if isinstance(data, Mapping) else {}
        try:
            _ = made.parts    # an error that only shows when a component is built is an input error too
        except InputError as error:
            raise InputError(f"{error}{_blame_preset(str(error), named['algorithm'], task)}") from None
        return made

    @cached_property
    def parts(self) -> Parts:
        """The components, built from their sections."""
        task, algorithm = self.task, algorithms()[self.algorithm["name"]]
        config = _build_config(algorithm, self.algorithm)
        _check_packets(algorithm, config)
        return Parts(
            task=build("task", TASKS[task["name"]], task),
            data=build("task", DATASETS[task["dataset"]], task) if "dataset" in task else None,
            algorithm=algorithm,
            config=config,
            topology=build("topology", TOPOLOGIES[self.topology["name"]], self.topology),
            partition=build("partition", PARTITIONS[self.partition["name"]], self.partition),
            engine=build("engine", ENGINES[self.engine["name"]], self.engine),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the experiment as plain data, with every default filled in."""
        plain: dict[str, Any] = _plain(self.model_dump())
        return plain

    def to_record(self) -> dict[str, Any]:
        """Return the same with absolute paths, enough to repeat the run from anywhere."""
        return paths.make_absolute(self.to_dict())

    def to_yaml(self) -> str:
        """Return the text of a file that `read` accepts from anywhere."""
        return yaml_io.dump(self.to_record())

    @cached_property
    def run_key(self) -> str:
        """The identity of the run: equal keys, with equal packing of nodes, give equal results.

        It covers the settings and the code that determine the result. Where data are stored, where runs are tracked
        and where processes run does not matter.
        """
        return _hash(self._identity)

    def key_with(self, rounds: int) -> str:
        """Return the run key of the same experiment with another number of rounds."""
        return _hash({**self._identity, "rounds": rounds})

    @cached_property
    def trajectory_key(self) -> str:
        """The run key without the number of rounds: a longer run has the same one, and can extend a shorter run."""
        return _hash({key: value for key, value in self._identity.items() if key != "rounds"})

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What determines the result: settings, plugins, and the code of ours that runs."""
        parts, plugins = self.parts, plugging.read_sources(self.plugins)
        components = [type(part).__module__ for part in (parts.task, parts.data, parts.partition, parts.config)]
        identity = {key: value for key, value in self.to_dict().items() if key not in {"tracking", "data_dir"}}
        identity["engine"] = {key: v for key, v in self.engine.items() if key not in parts.engine.runtime_only}
        identity["plugins"] = [plugin.digest for plugin in plugins]
        identity["code"] = code_identity.hash_modules([*components, parts.algorithm.round.__module__], plugins)
        if "file" in self.topology:
            identity["topology"] = {"name": self.topology["name"], "edges": _hash_file(self.topology["file"])}
        return identity


def _hash(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _hash_file(path: str) -> str:
    try:
        return hashlib.sha256(paths.expand_user(path).read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"topology.file: {path} cannot be read: {error.strerror}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


# Sections: what was given, with every default filled in


def _split_name(path: str, known: Mapping[str, Any], section: Section) -> tuple[str, Section]:
    name = pick(f"{path}.name", section["name"], known)
    return name, {key: value for key, value in section.items() if key != "name"}


def _resolve_component(path: str, known: Mapping[str, type], section: Section) -> Section:
    name, given = _split_name(path, known, section)
    return {"name": name, **validate(path, (known[name],), given)}


def _resolve_task(section: Section) -> Section:
    """Resolve a task with the parameters of its data set, which may change defaults of the task."""
    name, given = _split_name("task", TASKS, section)
    task = TASKS[name]
    kinds: tuple[type, ...] = (task,)
    if task.datasets:
        dataset = pick("task.dataset", given.get("dataset", task.datasets[0]), task.datasets)
        kinds = (task, DATASETS[dataset])
        given = {**task.dataset_defaults.get(dataset, {}), **given}
    return {"name": name, **validate("task", kinds, given)}


def _resolve_algorithm(section: Section, task: Section) -> Section:
    """Resolve an algorithm: given values, else the preset of this task and data set, else the defaults."""
    known = algorithms()
    name, given = _split_name("algorithm", known, section)
    preset = presets.find_preset(name, task["name"], task.get("dataset"))
    config = known[name].config
    if "compressor" not in {field.name for field in fields(config)}:
        return {"name": name, **validate("algorithm", (config,), preset | given)}
    filled = validate("algorithm", (config,), {key: v for key, v in (preset | given).items() if key != "compressor"})
    default = preset.get("compressor") or _describe_compressor(filled["compressor"])
    chosen = _override_compressor(default, given.get("compressor"))
    filled["compressor"] = _resolve_component("algorithm.compressor", COMPRESSORS, chosen)
    return {"name": name, **filled}


def _override_compressor(default: Section, given: Any) -> Section:
    """Return the given compressor; one of the default's name keeps the default's parameters, unless given."""
    if not isinstance(given, Mapping | None):
        raise InputError(f"algorithm.compressor: {given!r} is not allowed; must be a mapping with a name")
    given = given or {}
    return {**default, **given} if given.get("name", default["name"]) == default["name"] else dict(given)


def _describe_compressor(compressor: Any) -> Section:
    name = next((name for name, kind in COMPRESSORS.items() if kind is type(compressor)), None)
    if name is None:
        raise InputError(f"algorithm.compressor: {compressor!r} is not allowed; allowed: {', '.join(COMPRESSORS)}")
    return {"name": name, **asdict(compressor)}


def _build_config(algorithm: Algorithm, section: Section) -> DataclassInstance:
    values = dict(section)
    if "compressor" in values:
        compressor = values["compressor"]
        values["compressor"] = build("algorithm.compressor", COMPRESSORS[compressor["name"]], compressor)
    config: DataclassInstance = build("algorithm", algorithm.config, values)
    return config


def _check_packets(algorithm: Algorithm, config: DataclassInstance) -> None:
    """Refuse a declaration that cannot be right before anything starts; it would end the first round."""
    if algorithm.packets is None:
        return
    allowed = "must be a function from the configuration to a whole number ≥ 0, e.g. lambda cfg: 1"
    try:
        declared = algorithm.packets(config)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"algorithm {algorithm.name!r}: packets(cfg) fails with {reason}; {allowed}") from error
    if not isinstance(declared, Integral) or isinstance(declared, bool) or declared < 0:
        raise InputError(f"algorithm {algorithm.name!r}: packets(cfg) returns {declared!r:.80}; {allowed}")


def _blame_preset(message: str, given: Section, task: Section) -> str:
    """Return a note on the values in an error message that come from the preset, not from the user."""
    if not message.startswith(("algorithm: ", "algorithm.")):
        return ""
    preset = presets.find_preset(given["name"], task["name"], task.get("dataset"))
    silent = [f"{key} = {v}" for key, v in preset.items() if key not in given and re.search(rf"\b{key}\b", message)]
    if not silent:
        return ""
    where = "/".join(filter(None, (task["name"], task.get("dataset"))))
    comes, them = ("comes", "it") if len(silent) == 1 else ("come", "them")
    return f"; {', '.join(silent)} {comes} from the preset for {where}, give {them} too"
