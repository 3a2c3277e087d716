"""Define an experiment: one YAML file, validated completely before anything starts, and the key of its run."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

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
from pydantic_core import PydanticCustomError

from dbo.algorithms.api import COMPRESSORS
from dbo.algorithms.registry import Algorithm, algorithms
from dbo.components import name_method
from dbo.parameters import declaration
from dbo.platform.config import code_identity, models, paths, presets, tracking_uri, yaml_io
from dbo.platform.config import overrides as overriding
from dbo.platform.config import plugins as plugging
from dbo.platform.config.engine_choice import AUTO, Choice, choose_engine
from dbo.platform.config.engines import ENGINES, EngineSettings
from dbo.platform.config.schedules import AUTO as DERIVED
from dbo.platform.config.schedules import Schedules, build_schedule, split_schedules
from dbo.platform.config.validation import DataclassInstance, build, format_error, list_parameters, pick, validate
from dbo.platform.errors import InputError
from dbo.platform.network.topology import TOPOLOGIES, Topology
from dbo.tasks.api import Batches, DataSet, DataSize, Partition, Task, Work
from dbo.tasks.registry import DATASETS, PARTITIONS, TASKS

Section = dict[str, Any]
Estimate = TypeVar("Estimate", DataSize, Work)
COMPRESSOR_KEYS = ("compressor", "compressor_x")
LABEL = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"      # of a variant: part of folder names
# What does not determine the result. The values of a preset are part of the algorithm's section.
NOT_DECISIVE = frozenset({"label", "tracking", "data_dir", "presets", "keep_checkpoints"})


def is_public(target: str | None) -> bool:
    """Decide whether a target, given as text, needs the public models: its metric is public_…"""
    return target is not None and target.strip().startswith("public_")


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
    batches: Batches
    schedules: Schedules


class BatchSize(BaseModel):
    """Samples per node and step on each level."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    lower: int | None = Field(None, ge=1, description="train samples; null: all")
    upper: int | None = Field(None, ge=1, description="validation samples; null: all")


class Until(BaseModel):
    """What ends a run before its last round."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    target: str | None = Field(None, description="metric=level, e.g. test_accuracy=0.7")
    rounds: int | None = Field(None, ge=1, description="rounds done")
    bytes: Annotated[int | float, Field(gt=0)] | None = Field(None, description="bytes over all links (bytes_links)")
    seconds: Annotated[int | float, Field(gt=0)] | None = Field(
        None, description="training time; where the run ends is then not reproducible")
    oracle_calls: Annotated[int | float, Field(gt=0)] | None = Field(
        None, description="oracle calls of a node: gradients, and two for a Hessian- or Jacobian-vector product")
    samples: Annotated[int | float, Field(gt=0)] | None = Field(None, description="samples that a node has seen")


class Experiment(BaseModel):
    """All settings of a run. Every key has a default; sections name a component and its parameters."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = Field("dbo", min_length=1, max_length=100, description="name of the run")
    label: str | None = Field(
        None, pattern=LABEL, max_length=60, description="name in tables and figures; null: that of the algorithm")
    seed: int = Field(0, ge=0, lt=2**31, description="seed of split, partition, graph, start and random draws")
    nodes: int = Field(10, ge=1, le=100_000, description="m, nodes in the network")
    rounds: int = Field(50, ge=1, description="outer rounds to run")
    until: Until | None = Field(
        None, description="end at the first evaluation at which one holds: {target, rounds, bytes, seconds, "
                          "oracle_calls, samples}")
    eval_every: int = Field(1, ge=1, description="rounds between evaluations; the last round is always evaluated")
    eval_nodes: Annotated[int, Field(ge=1)] | Literal["all"] = Field(
        "all", description="nodes whose own models are evaluated: all, or a sample of n that stays the same")
    eval_public: bool = Field(
        False, description="evaluate Σ_j w_ij (copies of y that neighbours have) too; targets public_… ask for it")
    checkpoint_every: int = Field(10, ge=1, description="rounds between checkpoints")
    keep_checkpoints: int = Field(
        1, ge=0, description="checkpoints that a finished run keeps; dbo run --from needs one, dbo clean removes them")
    dtype: Literal["float32", "float64"] = Field("float32", description="of all variables and messages")
    batch_size: Annotated[int, Field(ge=1)] | BatchSize | None = Field(
        None, description="samples per node and step: null (all), a number, or {lower, upper}")
    batch_per: Literal["step", "round"] = Field("step", description="draw a new batch in every step, or once a round")
    batch_order: Literal["independent", "epoch"] = Field(
        "independent", description="draw every batch anew, or use all samples before one is repeated")
    tune_fraction: float = Field(
        0.0, ge=0, lt=1, description="share of the validation samples that is held out for tuning; dbo tune sets it")
    psi_every: int | str | None = Field(
        "end", description="evaluations between solves for ψ and ‖∇ψ‖: a number, end (only at the end), null (never)")
    start: str | None = Field(None, description="file with x and y to start from: state.safetensors of a run, a model")
    task: Section = Field({"name": "coefficient_tuning"}, description="the problem and its data set")
    algorithm: Section = Field({"name": "c2dfb"}, description="the method; missing parameters: preset, then default")
    topology: Section = Field({"name": "ring"}, description="the graph of the network")
    partition: Section = Field({"name": "by_class", "h": 0.8}, description="how samples are assigned to nodes")
    engine: Section = Field({"name": "auto"}, description="where the nodes run; auto: local if that is soon done")
    tracking: Tracking = Field(Tracking(), description="the MLflow store and experiment")
    data_dir: str | None = Field(None, description="folder of downloaded data; null: the loaders' own cache")
    presets: str | None = Field(None, description="file of step sizes that dbo tune has written; null: shipped ones")
    plugins: tuple[str, ...] = Field((), description="Python files or modules with further components")

    @field_validator("psi_every", mode="before")
    @classmethod
    def _check_psi_every(cls, value: Any) -> Any:
        if value is None or value == "end" or (type(value) is int and value >= 0):
            return value
        raise PydanticCustomError("psi_every", "must be a whole number ≥ 0, end or null")

    _given: dict[str, Any] = PrivateAttr(default_factory=dict)
    _engine_choice: Choice | None = PrivateAttr(default=None)

    @property
    def given(self) -> dict[str, Any]:
        """The keys that were set, before defaults and presets: what another experiment can be derived from."""
        return dict(self._given)

    @property
    def title(self) -> str:
        """The name in tables and figures: the label of a variant, or the algorithm's name."""
        return self.label or str(self.algorithm["name"])

    @property
    def has_public_metrics(self) -> bool:
        """Whether public models are evaluated: the key asks for it, or the target that ends the run does."""
        return self.eval_public or is_public(self.until.target if self.until else None)

    @property
    def engine_choice(self) -> Choice | None:
        """Why `auto` has chosen this engine; None if the experiment names one."""
        return self._engine_choice

    def with_engine(self, section: Section) -> Self:
        """Return the same experiment on another engine."""
        return type(self)(**{**self._given, "engine": section})

    def _resolve_engine(self, given: Section) -> None:
        pick("engine.name", given["name"], (AUTO, *ENGINES))
        if given["name"] == AUTO:
            self._engine_choice = self._choose_engine(given)
            given = {**given, "name": self._engine_choice.name}
        object.__setattr__(self, "engine", _resolve_component("engine", ENGINES, given))

    def _choose_engine(self, given: Section) -> Choice:
        """Choose the engine by the other sections."""
        task, data = self._build_task()
        algorithm = algorithms()[self.algorithm["name"]]
        config, _ = _build_config(algorithm, self.algorithm)
        exchanges = _check_count(algorithm, "packets", algorithm.packets, config)
        if exchanges is None:
            exchanges = 1 + int(getattr(config, "inner_steps", 0))
        work = _estimate_work(task, data, self.nodes)
        return choose_engine(given, work, self.nodes, self.rounds, exchanges, self.rounds // self.eval_every)

    def _build_task(self) -> tuple[Task, DataSet | None]:
        task = self.task
        data = build("task", DATASETS[task["dataset"]], task) if "dataset" in task else None
        return build("task", TASKS[task["name"]], task), data

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
            if isinstance(plugins := data.get("plugins"), str | list):       # a name alone is one plugin
                data = {**data, "plugins": (plugins,) if isinstance(plugins, str) else tuple(plugins)}
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
        has_topology = isinstance(data, Mapping) and "topology" in data
        named["topology"] = _choose_topology(named["topology"], named["algorithm"]["name"], has_topology)
        sections = {
            "task": task,
            "algorithm": _resolve_algorithm(named["algorithm"], task, made.presets),
            "topology": _resolve_component("topology", TOPOLOGIES, named["topology"]),
            "partition": _resolve_component("partition", PARTITIONS, named["partition"]),
        }
        for name, section in sections.items():
            object.__setattr__(made, name, section)
        object.__setattr__(made, "batch_size", _resolve_batch_size(made.batch_size))
        object.__setattr__(made, "psi_every", _resolve_psi_every(made.psi_every, task["name"]))
        made._given = dict(data) if isinstance(data, Mapping) else {}
        try:
            made._resolve_engine(named["engine"])
            _ = made.parts    # an error that only shows when a component is built is an input error too
        except InputError as error:
            raise InputError(f"{error}{_blame_preset(str(error), named['algorithm'], task, made.presets)}") from None
        return made

    @cached_property
    def parts(self) -> Parts:
        """The components, built from their sections."""
        algorithm = algorithms()[self.algorithm["name"]]
        task, data = self._build_task()
        config, schedules = _build_config(algorithm, self.algorithm)
        _check_count(algorithm, "packets", algorithm.packets, config)
        if isinstance(edges := self.topology.get("file"), str):
            models.check_regular("topology.file", edges)
        return Parts(
            task=task,
            data=data,
            algorithm=algorithm,
            config=config,
            topology=build("topology", TOPOLOGIES[self.topology["name"]], self.topology),
            partition=build("partition", PARTITIONS[self.partition["name"]], self.partition),
            engine=build("engine", ENGINES[self.engine["name"]], self.engine),
            batches=self._build_batches(algorithm, config),
            schedules=schedules,
        )

    def _build_batches(self, algorithm: Algorithm, config: DataclassInstance) -> Batches:
        size = self.batch_size
        if not isinstance(size, BatchSize):
            return Batches(lower=size, upper=size, per=self.batch_per, order=self.batch_order)
        per_round = _check_count(algorithm, "batches", algorithm.batches, config)
        if self.batch_order == "epoch" and self.batch_per == "step" and per_round is None:
            raise InputError(
                f"batch_order: epoch is not allowed with {algorithm.name}: its decorator does not declare "
                f"batches=lambda cfg: …, the number that it draws per round; use independent or batch_per=round"
            )
        return Batches(
            lower=size.lower, upper=size.upper, per=self.batch_per, order=self.batch_order, per_round=per_round or 1
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

    def key_with(self, rounds: int, until: Mapping[str, Any] | None) -> str:
        """Return the run key of the same experiment with another end."""
        identity = {key: value for key, value in self._identity.items() if key != "until"}
        return _hash({**identity, "rounds": rounds, **({"until": _drop_unset(until)} if until else {})})

    @cached_property
    def trajectory_key(self) -> str:
        """The run key without its end: a longer run has the same one, and can extend a shorter run."""
        return _hash({key: value for key, value in self._identity.items() if key not in ("rounds", "until")})

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What determines the result: settings, plugins, and the code of ours that runs."""
        parts, plugins = self.parts, plugging.read_sources(self.plugins)
        components = [type(part).__module__ for part in (parts.task, parts.data, parts.partition, parts.config)]
        identity = {key: value for key, value in self.to_dict().items() if key not in NOT_DECISIVE}
        identity["engine"] = {key: v for key, v in self.engine.items() if key not in parts.engine.runtime_only}
        identity["plugins"] = [plugin.digest for plugin in plugins]
        identity["code"] = code_identity.hash_modules([*components, parts.algorithm.round.__module__], plugins)
        if "file" in self.topology:
            edges = models.hash_file("topology.file", self.topology["file"])
            identity["topology"] = {"name": self.topology["name"], "edges": edges}
        identity["task"] = {
            key: models.hash_file(f"task.{key}", value) if paths.is_file_key(key) and value else value
            for key, value in identity["task"].items()
        }
        if self.start is None:
            identity.pop("start")
        else:
            identity["start"] = models.hash_start(self.start)
        if self.eval_nodes == "all":
            identity.pop("eval_nodes")
        if not self.eval_public:
            identity.pop("eval_public")
        if not self.tune_fraction:
            identity.pop("tune_fraction")
        if self.until is None:
            identity.pop("until")
        else:
            identity["until"] = _drop_unset(identity["until"])
        if self.batch_size is None:      # how batches are drawn does not matter without batches
            for key in ("batch_size", "batch_per", "batch_order"):
                identity.pop(key)
        return identity


def _hash(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _drop_unset(until: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out parts of a stop rule that older versions do not have, unless they are set: their run keys stay."""
    return {key: value for key, value in until.items() if value is not None or key not in ("oracle_calls", "samples")}


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
    if not task.datasets:
        return {"name": name, **validate("task", (task,), given)}
    chosen = given.pop("dataset", task.datasets[0])
    nested: dict[str, Any] = {}
    if isinstance(chosen, Mapping):          # {name: csv, file: …} beside the task's own parameters
        nested = {key: value for key, value in chosen.items() if key != "name"}
        chosen = chosen.get("name", task.datasets[0])
    dataset = pick("task.dataset", chosen, DATASETS)
    known = [parameter.name for kind in (DATASETS[dataset], task) for parameter in list_parameters(kind)]
    if unknown := [key for key in nested if key not in known]:
        raise InputError(f"task.dataset.{str(unknown[0])[:60]}: unknown key; known keys: {', '.join(known)}")
    given |= nested
    if _is_sparse(dataset) and not task.accepts_sparse:
        dense = ", ".join(known for known in DATASETS if not _is_sparse(known))
        raise InputError(f"task.dataset: {dataset} has sparse features, {name} needs dense ones; allowed: {dense}")
    given = {**task.dataset_defaults.get(dataset, {}), **given}
    filled = validate("task", (task, DATASETS[dataset]), given)
    own = {"name": name, "dataset": dataset}
    return own | filled | own       # some tasks declare `dataset` as a parameter, with a default


def _choose_topology(section: Section, algorithm: str, is_given: bool) -> Section:
    """Return the topology: for a method with a server it is the star, and no other one is allowed."""
    found = algorithms().get(algorithm)
    if found is None or found.network != "star":
        return section
    if is_given and section["name"] != "star":
        raise InputError(
            f"topology.name: {section['name']!r} is not allowed with {algorithm}, "
            f"which needs {found.requirements}; allowed: star"
        )
    return section if is_given else {"name": "star"}


def _is_sparse(dataset: str) -> bool:
    return bool(getattr(DATASETS[dataset], "sparse_features", False))


def _resolve_batch_size(size: Any) -> BatchSize | None:
    if isinstance(size, int):
        return BatchSize(lower=size, upper=size)
    return None if size is None or (size.lower is None and size.upper is None) else size


def _resolve_psi_every(every: int | str | None, task: str) -> int | str | None:
    """Return None for 0, and for a task whose y*(x) need not exist."""
    if TASKS[task].strongly_convex:
        return every or None
    if isinstance(every, int) and every:
        raise InputError(
            f"psi_every: {every} is not allowed; {task} does not declare strongly_convex = True, which ψ needs")
    return None


def _resolve_algorithm(section: Section, task: Section, file: str | None) -> Section:
    """Resolve an algorithm: given values, else the preset of this task and data set, else the defaults."""
    known = algorithms()
    name, given = _split_name("algorithm", known, section)
    preset = presets.find_values(file, section, task)
    config = known[name].config
    values, schedules = split_schedules(config, preset | given)
    compressors = [field.name for field in fields(config) if field.name in COMPRESSOR_KEYS]
    filled = validate("algorithm", (config,), {key: v for key, v in values.items() if key not in compressors})
    filled |= schedules
    for key in compressors:
        where, default = f"algorithm.{key}", preset.get(key) or _describe_compressor(key, filled[key])
        chosen = _override_compressor(where, default, given.get(key))
        filled[key] = None if chosen is None else _resolve_component(where, COMPRESSORS, chosen)
    return {"name": name, **filled}


def _override_compressor(where: str, default: Section | None, given: Any) -> Section | None:
    """Return the given compressor; one of the default's name keeps the default's parameters, unless given."""
    if not isinstance(given, Mapping | None):
        raise InputError(f"{where}: {given!r} is not allowed; must be a mapping with a name")
    given = given or {}
    if default is None:
        return {"name": "top_k", **given} if given else None
    return {**default, **given} if given.get("name", default["name"]) == default["name"] else dict(given)


def _describe_compressor(key: str, compressor: Any) -> Section | None:
    if compressor is None:
        return None
    name = COMPRESSORS.find_name(type(compressor))
    if name is None:
        raise InputError(f"algorithm.{key}: {compressor!r} is not allowed; allowed: {', '.join(COMPRESSORS)}")
    return {"name": name, **asdict(compressor)}


def _build_config(algorithm: Algorithm, section: Section) -> tuple[DataclassInstance, Schedules]:
    """Return the configuration of the start, and the schedules of its step sizes."""
    values = dict(section)
    schedules = {
        name: build_schedule(f"algorithm.{name}", value)
        for name, value in section.items() if isinstance(value, Mapping) and "schedule" in value
    }
    values |= {name: schedule.value for name, schedule in schedules.items()}
    automatic = tuple(f.name for f in fields(algorithm.config) if values.get(f.name) == DERIVED and declaration(f).auto)
    values = {name: value for name, value in values.items() if name not in automatic}
    for key in COMPRESSOR_KEYS:
        if (compressor := values.get(key)) is not None:
            values[key] = build(f"algorithm.{key}", COMPRESSORS[compressor["name"]], compressor)
    config: DataclassInstance = build("algorithm", algorithm.config, values)
    return config, Schedules(schedules, automatic)


def _estimate_work(task: Task, data: DataSet | None, nodes: int) -> Work | None:
    """Return a task's own estimate of its work; refuse one that cannot be right before anything starts."""
    has_size = data is not None and hasattr(data, "size")
    size = _call_estimate("task.dataset", data, "size", DataSize) if has_size else None
    return _call_estimate("task", task, "estimate_work", Work, nodes, size)


def _call_estimate(key: str, component: Any, method: str, kind: type[Estimate], *arguments: Any) -> Estimate | None:
    allowed = f"must return a dbo.{kind.__name__} of numbers ≥ 0, or None"
    where = f"{key}: {name_method(component, method)}"
    try:
        found = getattr(component, method)(*arguments)
    except Exception as error:
        raise InputError(f"{where} fails with {type(error).__name__}: {error}; {allowed}") from error
    if found is None:
        return None
    if not isinstance(found, kind) or not all(
        (isinstance(value, Real) and float(value) >= 0) or (name == "nonzeros" and value is None)
        for name, value in found._asdict().items()
    ):
        raise InputError(f"{where} returns {found!r:.80}; {allowed}")
    return found


def _check_count(
    algorithm: Algorithm, name: str, function: Callable[[Any], int] | None, config: DataclassInstance
) -> int | None:
    """Return a declared number; refuse one that cannot be right before anything starts."""
    if function is None:
        return None
    allowed = "must be a function from the configuration to a whole number ≥ 0, e.g. lambda cfg: 1"
    try:
        declared = function(config)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"algorithm {algorithm.name!r}: {name}(cfg) fails with {reason}; {allowed}") from error
    if not isinstance(declared, Integral) or isinstance(declared, bool) or declared < 0:
        raise InputError(f"algorithm {algorithm.name!r}: {name}(cfg) returns {declared!r:.80}; {allowed}")
    return int(declared)


def _blame_preset(message: str, given: Section, task: Section, file: str | None) -> str:
    """Return a note on the values in an error message that come from the preset, not from the user."""
    if not message.startswith(("algorithm: ", "algorithm.")):
        return ""
    preset = presets.find_values(file, given, task)
    silent = [f"{key} = {v}" for key, v in preset.items() if key not in given and re.search(rf"\b{key}\b", message)]
    if not silent:
        return ""
    where = "/".join(filter(None, (task["name"], task.get("dataset"))))
    comes, them = ("comes", "it") if len(silent) == 1 else ("come", "them")
    return f"; {', '.join(silent)} {comes} from the preset for {where}, give {them} too"
