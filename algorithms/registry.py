"""Which algorithms there are. A built-in adds its file's name to `_BUILT_IN`; a stranger's file is named as a plugin.

An algorithm is a pair of functions over explicit state, `init(shard, cfg) -> State` and
`async round(state, shard, cfg) -> State`, registered under a name with its configuration class.
"""

import re
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import import_module
from inspect import get_annotations
from typing import Any

import numpy as np

from dbo.algorithms.claims import Claim
from dbo.algorithms.gossip import Outgoing
from dbo.algorithms.protocol import Array, Shard

# A new file adds its name here, in the order in which they are listed: the paper's, its baselines, other networked
# methods, single-machine references.
_BUILT_IN = (
    "c2dfb", "c2dfb_nc",
    "madsbo", "madsbo_gt", "mdbo", "vrdbo",
    "dsgda_gt", "sldbo", "d_soba", "gossip_dsbo",
    "f2ba", "bome",
)

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")      # names become names of folders and of files

Init = Callable[[Shard, Any], Any]
Round = Callable[[Any, Shard, Any], Coroutine[Outgoing, tuple[Array, ...], Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """What the platform knows of an algorithm."""

    name: str
    summary: str
    config: type                            # frozen dataclass; its annotations carry range and meaning
    state: type                             # frozen dataclass of arrays
    init: Init
    round: Round
    packets: Callable[[Any], int]           # packets per node and round: what `round` awaits
    single_machine: bool = False            # sees all data at once and says nothing: a reference, not a network
    paper_counts: Mapping[str, float] = field(default_factory=dict)   # Table 1's weight of a channel, where not 1
    claim: Claim | None = None              # what `dbo verify` holds it to; None: its errors are shown, not judged

    @property
    def built_in(self) -> bool:
        return self.name in _BUILT_IN


_registry: dict[str, Algorithm] = {}


def algorithm(
    name: str,
    *,
    config: type,
    state: type,
    init: Init,
    packets: Callable[[Any], int],
    single_machine: bool = False,
    paper_counts: Mapping[str, float] | None = None,
    claim: Claim | None = None,
) -> Callable[[Round], Algorithm]:
    """Registers the decorated `async def round(state, shard, cfg)`; the first line of its docstring is the summary."""

    def register(round_: Round) -> Algorithm:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"algorithm {name!r:.80}: the name is not allowed; must be a text of at most 64 of a-z, 0-9 and _, "
                f"a letter first"
            )
        module = round_.__module__
        if module.partition(".")[0] in {"algorithms", "tasks", "platform"}:
            raise ImportError(f"{name} was imported as {module}; import it as dbo.{module}")
        old = _registry.get(name)
        # The same function of the same module again is a cell of a notebook that was run again.
        if old is not None and (old.round.__module__, _called(old.round)) != (module, _called(round_)):
            whose = "is the name of a built-in one" if name in _BUILT_IN else "is registered twice"
            raise ValueError(f"algorithm {name!r} {whose}; choose another name")
        if not callable(packets):
            raise ValueError(f"algorithm {name!r}: packets must be a function of the configuration, e.g. lambda cfg: 1")
        if told := _misdescribed("config", config) or _misdescribed("state", state):
            raise ValueError(f"algorithm {name!r}: {told}")
        shown = {field.name for field in fields(state)} | set(dir(state))
        if missing := {"x", "y", "direction"} - shown:
            raise ValueError(f"algorithm {name!r}: its state must show {', '.join(sorted(missing))}")
        summary = (round_.__doc__ or "").strip().partition("\n")[0]
        if not summary:
            raise ValueError(f"algorithm {name!r}: its round function needs a docstring, users see the first line")
        made = Algorithm(
            name=name, summary=summary, config=config, state=state, init=init, round=round_, packets=packets,
            single_machine=single_machine, paper_counts=paper_counts or {}, claim=claim,
        )
        _registry[name] = made
        return made

    return register


def _misdescribed(what: str, kind: Any) -> str | None:
    """What keeps a class from being a configuration or a state."""
    if not isinstance(kind, type) or not is_dataclass(kind):
        shown = kind.__name__ if isinstance(kind, type) else repr(kind)
        return f"{what} {shown:.80} is not allowed; must be a dataclass: write @dataclass(frozen=True) above the class"
    if what == "config" and "name" in {field.name for field in fields(kind)}:
        return "config.name is not allowed: algorithm.name in an experiment is the algorithm's own"
    for base in kind.__mro__[:-1]:
        for key, value in vars(base).items():
            plain = not key.startswith("_") and not callable(value) and not hasattr(value, "__get__")
            if plain and key not in get_annotations(base):
                kind_of = type(value).__name__
                typed = f"{key}: {kind_of} = …" if what == "config" else f"{key}: Array"
                return f"{what}.{key} has no type; write {typed}, or {key}: ClassVar[{kind_of}] = … for a constant"
    return None


def _called(round_: Round) -> str:
    return getattr(round_, "__qualname__", "")


def algorithms() -> Mapping[str, Algorithm]:
    """Every registered algorithm: built-ins in their order, then plugins'."""
    for name in _BUILT_IN:
        import_module(f"dbo.algorithms.methods.{name}")
    return {name: _registry[name] for name in _BUILT_IN} | _registry


def forget(module: str) -> None:
    """Drops what a module has registered: a plugin that was edited, or that turned out not to be sound."""
    for name in [name for name, made in _registry.items() if made.round.__module__ == module]:
        del _registry[name]


def counter(shard: Shard) -> Array:
    """A fresh (nodes, 1) round counter for a state."""
    return np.zeros((shard.nodes, 1), dtype=np.int64)
