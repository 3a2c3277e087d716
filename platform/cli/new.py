"""`dbo new` and `dbo init`: write the first version of a plugin or of an experiment file."""

import keyword
import sys
from dataclasses import replace
from importlib.metadata import packages_distributions
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dbo.platform.cli.console import print_line, split_arguments
from dbo.platform.errors import InputError

if TYPE_CHECKING:
    from dbo.components import Registry
    from dbo.platform.config.experiment import Experiment

# What a first run with a plugin of each kind sets.
_SETTINGS = {
    "algorithm": "algorithm={name} task=quadratic rounds=200",
    "task": "task={name} algorithm.eta_in=0.1 algorithm.eta_out=0.1",
    "dataset": "task=coefficient_tuning task.dataset={name} rounds=20",
    "partition": "partition={name}",
    "topology": "topology={name} task=quadratic rounds=100",
    "compressor": "algorithm.compressor={name} algorithm.gamma_in=auto task=quadratic rounds=200",
}
_ALWAYS = ("name", "seed", "nodes", "rounds")       # keys that an experiment file states even if they are defaults


def write_plugin(
    kind: Annotated[str, typer.Argument(
        metavar="KIND", help="What the plugin adds: algorithm, task, dataset, partition, topology or compressor.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name in experiments: a-z, 0-9 and _.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for both files.")] = Path(),
) -> None:
    """Write a plugin that works, and its test.

    The plugin is a complete small component: change it step by step, and run its test after each step.
    """
    from dbo.platform.cli.skeletons import FILES
    from dbo.platform.config.validation import pick

    pick("new", kind, FILES)
    try:
        _find_registry(kind).check_name(name, f"{name} of a user")
    except ValueError as error:
        raise InputError(f"new: {error}") from None
    if name in sys.stdlib_module_names or name == "dbo" or name in packages_distributions():
        raise InputError(f"new: {name} is the name of a Python module, which {name}.py would hide; choose another name")
    if keyword.iskeyword(name):
        raise InputError(f"new: {kind} {name!r}: the name is not allowed; Python reserves it")
    files = {out / f"{name}.py": FILES[kind][0], out / f"test_{name}.py": FILES[kind][1]}
    _write_new({path: text.replace("NAME", name) for path, text in files.items()})
    plugin = out / f"{name}.py"
    print_line(f"wrote {plugin} and {out / f'test_{name}.py'}; try")
    if kind in ("algorithm", "task"):
        print_line(f"  dbo verify --plugin {quote(str(plugin))} --{kind} {name}")
    else:
        print_line(f"  dbo list {quote(f'plugins={plugin}')} {name}")
    print_line(f"  dbo run {quote(f'plugins={plugin}')} {_SETTINGS[kind].format(name=name)} engine=local")


def _find_registry(kind: str) -> "Registry[Any]":
    """Return the components of a kind, by its name in `dbo new`."""
    from dbo.algorithms.compression.compressors import COMPRESSORS
    from dbo.algorithms.registry import ALGORITHMS
    from dbo.platform.network.topology import TOPOLOGIES
    from dbo.tasks.registry import DATASETS, PARTITIONS, TASKS

    registries: tuple[Registry[Any], ...] = (ALGORITHMS, TASKS, DATASETS, PARTITIONS, TOPOLOGIES, COMPRESSORS)
    return next(registry for registry in registries if registry.kind == kind)


def write_experiment(
    arguments: Annotated[list[str] | None, typer.Argument(
        metavar="FILE.yaml|key=value", help="File to write, default: experiment.yaml; values to set in it.")] = None,
) -> None:
    """Write an experiment file with a comment on every key."""
    from dbo.platform.config.experiment import Experiment

    file, overrides = split_arguments(arguments)
    path = Path(file or "experiment.yaml")
    if path.suffix not in (".yaml", ".yml"):
        raise InputError(f"init: {path} is not allowed; must be a file that ends with .yaml")
    experiment = Experiment.read(None, overrides)
    _write_new({path: format_commented(experiment, path)})
    print_line(f"wrote {path}; try")
    print_line(f"  dbo run {quote(str(path))} --dry-run")


def format_commented(experiment: "Experiment", path: Path) -> str:
    """Return an experiment file: given values as they are, all others as comments, each with its meaning."""
    from dbo.platform.config import yaml_io
    from dbo.platform.config.engine_choice import AUTO
    from dbo.platform.config.experiment import Experiment
    from dbo.platform.config.overrides import SECTIONS
    from dbo.platform.config.value_sources import trace_values

    traced, described = trace_values(experiment), _describe_parameters(experiment)
    if (choice := experiment.engine_choice) is not None:       # a file that grows must not keep the engine of today
        traced["engine.name"] = replace(traced["engine.name"], value=AUTO)
        described["engine.name"] = f"now {choice.name}: {choice.reason}"
    lines = [
        f"# Run it with: dbo run {path}. Keys after a # have these values anyway; remove the # to change one.",
        "# `dbo list` shows the components that a section can name, `dbo list NAME` their parameters.", "",
    ]

    def add(indent: str, key: str, name: str, is_active: bool, meaning: str) -> None:
        value = yaml_io.dump({name: traced[key].value}).strip()
        value = value[1:-1] if value.startswith("{") else value        # an innermost mapping stands on one line
        tuned = "preset for this task; " if traced[key].source == "preset" else ""
        comment = f"{tuned}{meaning}".strip("; ")
        text = f"{indent}{'' if is_active else '# '}{value}"
        lines.append(f"{text.ljust(40)}  # {comment}" if comment else text)

    for key, field in Experiment.model_fields.items():
        own = [dotted for dotted in traced if dotted == key or dotted.startswith(f"{key}.")]
        if key not in SECTIONS and own == [key]:
            is_given = traced[key].source == "you"
            add("", key, key, is_given or key in _ALWAYS, field.description or "")
            continue
        is_given = any(traced[dotted].source == "you" for dotted in own)
        is_active = is_given or key in SECTIONS
        lines += ["", f"# {field.description}", f"{'' if is_active else '# '}{key}:"]
        for dotted in own:
            name = dotted.removeprefix(f"{key}.")
            if name.endswith(".name"):                 # of the compressor
                opened = is_active and any(
                    traced[inner].source == "you" for inner in own if inner.startswith(dotted.removesuffix("name")))
                lines.append(f"  {'' if opened else '# '}{name.removesuffix('.name')}:")
            inner = name.rpartition(".")[2]
            is_set = traced[dotted].source == "you" or (dotted == f"{key}.name" and key in SECTIONS)
            add("    " if "." in name else "  ", dotted, inner, is_active and is_set, described.get(dotted, ""))
    return "\n".join(lines) + "\n"


def _describe_parameters(experiment: "Experiment") -> dict[str, str]:
    """Return the meaning of every parameter of the experiment's components, by dotted key."""
    from dbo.platform.config.experiment import COMPRESSOR_KEYS, BatchSize, Tracking
    from dbo.platform.config.validation import list_parameters, summarize

    parts = experiment.parts
    components: dict[str, list[Any]] = {
        "task": [parts.task, *([parts.data] if parts.data is not None else [])], "algorithm": [parts.config],
        "topology": [parts.topology], "partition": [parts.partition], "engine": [parts.engine],
    }
    for key in COMPRESSOR_KEYS:
        if (compressor := getattr(parts.config, key, None)) is not None:
            components[f"algorithm.{key}"] = [compressor]
    found = {
        f"{section}.{parameter.name}": parameter.meaning
        for section, objects in components.items() for one in objects for parameter in list_parameters(type(one))
    }
    found |= {f"{section}.name": summarize(type(objects[0])) for section, objects in components.items()}
    found["algorithm.name"] = parts.algorithm.summary
    found |= {
        f"{section}.{name}": field.description or ""
        for section, model in (("tracking", Tracking), ("batch_size", BatchSize))
        for name, field in model.model_fields.items()
    }
    return found


def _write_new(files: dict[Path, str]) -> None:
    """Write files that do not exist yet, all of them or none."""
    for path in files:
        if path.exists():
            raise InputError(f"{path}: exists already; choose another name, or remove it first")
    written: list[Path] = []
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
        except OSError as error:
            for one in written:
                one.unlink(missing_ok=True)
            raise InputError(f"{path}: cannot be written: {error.strerror}") from None
