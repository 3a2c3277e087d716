"""`dbo completion`: complete commands, options, component names and keys in a shell.

The scripts call the hidden command `dbo complete WORD...`, which prints a candidate per line. The last word is the one
that is being typed.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from dbo.platform.errors import InputError

# bash splits words at `=`, the other shells do not; `find_candidates` understands both.
_BASH = """_dbo_complete() {
    local IFS=$'\\n'
    COMPREPLY=($(dbo complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=.] ]]; then compopt -o nospace 2>/dev/null; fi
}
complete -o default -F _dbo_complete dbo
"""
_SCRIPTS = {
    "bash": _BASH,
    "zsh": f"autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n{_BASH}",
    "fish": "complete -c dbo -a '(dbo complete (commandline -opc)[2..-1] (commandline -ct))'\n",
}
_TAKES_EXPERIMENT = {"run", "compare", "tune", "submit", "doctor", "verify", "list", "init", "sweep"}
_OPTION_NAMES = {"--algorithms": "algorithm", "--algorithm": "algorithm", "--task": "task", "--topology": "topology"}


def print_script(
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="Your shell.")] = "bash",
) -> None:
    """Print the script that completes commands, names and keys.

    For bash add this line to ~/.bashrc: eval "$(dbo completion bash)"
    """
    from dbo.platform.config.validation import pick

    print(_SCRIPTS[pick("completion", shell, _SCRIPTS)], end="")


def print_candidates(context: typer.Context) -> None:
    """Print a candidate per line for the last of the words."""
    from dbo.platform.cli.main import app

    commands: Mapping[str, Any] = getattr(typer.main.get_command(app), "commands", {})
    with suppress(InputError):              # half of a command may be wrong input
        print("\n".join(find_candidates(context.args or [""], commands)))


def find_candidates(words: Sequence[str], commands: Mapping[str, Any]) -> list[str]:
    """Return what the last word can become; after `key=` in a shell that splits there, only the values."""
    *before, current, is_split = _join_split(words)
    if not before:
        return _match(current, (name for name, command in commands.items() if not command.hidden))
    if before[0] not in commands:
        return []
    if current.startswith("-"):
        options = (name for parameter in commands[before[0]].params for name in parameter.opts)
        return _match(current, (name for name in options if name.startswith("--")))
    if before[-1] in _OPTION_NAMES:
        done, comma, last = current.rpartition(",")
        known = _list_names(_OPTION_NAMES[before[-1]], {})
        return [f"{done}{comma}{name}" for name in _match(last, known)]
    if before[-1].startswith("--"):
        return []                           # the shell completes the names of files
    settings = _read_settings(before[1:])
    key, sign, text = current.partition("=")
    if sign:
        values = _match(text, _list_values(key, settings))
        return values if is_split else [f"{key}={value}" for value in values]
    return _match(current, _list_words(before[0], before[1:], current, settings))


def _join_split(words: Sequence[str]) -> list[Any]:
    """Return the words with `key`, `=`, `value` joined, and whether that was done to the last one."""
    joined: list[str] = []
    is_split = False
    for number, word in enumerate(words):
        is_split = bool(joined) and number > 0 and (word == "=" or words[number - 1] == "=")
        if is_split:
            joined[-1] += word
        else:
            joined.append(word)
    return [*joined, is_split]


def _match(start: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(start)]


def _read_settings(words: Sequence[str]) -> dict[str, Any]:
    from dbo.platform.config import overrides

    settings: dict[str, Any] = {}
    for word in words:
        with suppress(InputError):
            settings |= overrides.parse([word]) if "=" in word else {}
    if plugins := settings.get("plugins"):
        from dbo.platform.config.experiment import Experiment

        with suppress(InputError):
            Experiment(plugins=plugins)     # registers their components
    return settings


def _list_words(command: str, given: Sequence[str], current: str, settings: Mapping[str, Any]) -> list[str]:
    """Return keys with their `=`, and the names that a command takes as its first argument."""
    if command in ("new", "completion"):
        from dbo.platform.cli.skeletons import FILES

        return list(FILES if command == "new" else _SCRIPTS) if not given else []
    if command not in _TAKES_EXPERIMENT:
        return []
    names: list[str] = []
    if command == "list":
        from dbo.platform.cli.listing import read_components

        components = read_components()
        names = [*components, *(component.name for members in components.values() for component in members)]
    if command == "sweep":
        from dbo.sweeps.plan import list_shipped_sweeps

        names = list(list_shipped_sweeps())
    return [*names, *(f"{key}=" for key in _list_keys(current, settings))]


def _list_keys(current: str, settings: Mapping[str, Any]) -> list[str]:
    """Return the keys of an experiment; those inside of a section once its name has been typed."""
    from dbo.platform.config.experiment import Experiment
    from dbo.platform.config.overrides import SECTIONS, flatten

    keys = list(Experiment.model_fields)
    section = current.partition(".")[0]
    if "." not in current or section not in (*SECTIONS, "tracking", "batch_size"):
        return keys
    if section == "batch_size":
        return ["batch_size.lower", "batch_size.upper"]
    known = flatten(_build(settings).to_dict())
    return [key for key in known if key.startswith(f"{section}.")]


def _build(settings: Mapping[str, Any]) -> Any:
    """Return the experiment of what has been typed; without settings that cannot be used yet."""
    from dbo.platform.config import overrides
    from dbo.platform.config.experiment import Experiment

    names = {key: value for key, value in settings.items() if key.endswith((".name", ".dataset")) or "." not in key}
    for chosen in (settings, names, {}):
        with suppress(InputError):
            return Experiment(**overrides.apply({}, chosen))
    raise InputError("no experiment")


def _list_names(kind: str, settings: Mapping[str, Any]) -> list[str]:
    """Return the components that a key of an experiment can name; [] if it names none."""
    from dbo.algorithms.compression.compressors import COMPRESSORS
    from dbo.algorithms.registry import ALGORITHMS
    from dbo.platform.config.engines import ENGINES
    from dbo.platform.network.topology import TOPOLOGIES
    from dbo.tasks.registry import DATASETS, PARTITIONS, TASKS

    registries: dict[str, Mapping[str, Any]] = {
        "algorithm": ALGORITHMS, "task": TASKS, "task.dataset": DATASETS, "topology": TOPOLOGIES,
        "partition": PARTITIONS, "algorithm.compressor": COMPRESSORS, "engine": ENGINES,
    }
    return list(registries.get(kind.removesuffix(".name"), ()))


def _list_values(key: str, settings: Mapping[str, Any]) -> list[str]:
    """Return the names or the fixed values that a key can have."""
    if names := _list_names(key, settings):
        return names
    from dbo.platform.config.experiment import Experiment
    from dbo.platform.config.validation import format_type, list_parameters

    if key in Experiment.model_fields:
        return _select_words(format_type(Experiment.model_fields[key].annotation))
    parts, (section, _, name) = _build(settings).parts, key.rpartition(".")
    components = {
        "task": [parts.task, parts.data], "algorithm": [parts.config], "topology": [parts.topology],
        "partition": [parts.partition], "engine": [parts.engine],
        "algorithm.compressor": [getattr(parts.config, "compressor", None)],
    }
    found = [
        parameter for component in components.get(section, ()) if component is not None
        for parameter in list_parameters(type(component)) if parameter.name == name
    ]
    return _select_words(found[0].allowed) if found else []


def _select_words(allowed: str) -> list[str]:
    """Return the words that can be typed as they are among the alternatives of a type."""
    types = ("int", "float", "str", "bool", "dict", "Compressor", "BatchSize", "Tracking")
    return [word for word in allowed.split(" | ") if word.isidentifier() and word not in types]
