"""Register algorithms. A built-in one adds its file's name to `_BUILT_IN`; a user's file is loaded as a plugin.

An algorithm is a pair of functions over explicit state, `init(shard, cfg) -> State` and
`async round(state, shard, cfg) -> State`, registered under a name with its configuration class.
"""

import re
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import import_module
from inspect import get_annotations
from typing import Any

from dbo.algorithms.claims import Claim
from dbo.algorithms.gossip import Outgoing
from dbo.algorithms.protocol import Array, Shard

# Files in methods/, in the order of `dbo list`: the paper's methods, its baselines, other networked methods,
# single-machine references.
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
    """A registered algorithm."""

    name: str
    summary: str
    config: type                            # frozen dataclass; `param` declares ranges and meanings
    state: type                             # frozen dataclass of arrays
    init: Init
    round: Round
    packets: Callable[[Any], int] | None = None     # packets per node and round; None: the platform counts them
    penalty: Callable[[Any], float] | None = None   # λ of a configuration, for methods that follow ∇ψ_λ
    single_machine: bool = False            # has all data in one row and sends nothing: a reference, not a network
    paper_counts: Mapping[str, float] = field(default_factory=dict)   # Table 1's weight of a channel, where not 1
    claim: Claim | None = None              # what `dbo verify` checks; None: it reports errors without a verdict

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
    packets: Callable[[Any], int] | None = None,
    penalty: Callable[[Any], float] | None = None,
    single_machine: bool = False,
    paper_counts: Mapping[str, float] | None = None,
    claim: Claim | None = None,
) -> Callable[[Round], Algorithm]:
    """Register the decorated `async def round(state, shard, cfg)`; the first line of its docstring is the summary."""

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
        # The same function of the same module again: a notebook's cell was executed twice.
        if old is not None and (old.round.__module__, _qualified_name(old.round)) != (module, _qualified_name(round_)):
            whose = "is the name of a built-in one" if name in _BUILT_IN else "is registered twice"
            raise ValueError(f"algorithm {name!r} {whose}; choose another name")
        for option, function in (("packets", packets), ("penalty", penalty)):
            if function is not None and not callable(function):
                raise ValueError(
                    f"algorithm {name!r}: {option} must be a function of the configuration, e.g. lambda cfg: 1"
                )
        if problem := _check_class("config", config) or _check_class("state", state):
            raise ValueError(f"algorithm {name!r}: {problem}")
        attributes = {field.name for field in fields(state)} | set(dir(state))
        if missing := {"x", "y", "direction"} - attributes:
            raise ValueError(f"algorithm {name!r}: its state must have {', '.join(sorted(missing))}")
        summary = (round_.__doc__ or "").strip().partition("\n")[0]
        if not summary:
            raise ValueError(f"algorithm {name!r}: its round function needs a docstring, users see the first line")
        made = Algorithm(
            name=name, summary=summary, config=config, state=state, init=init, round=round_, packets=packets,
            penalty=penalty, single_machine=single_machine, paper_counts=paper_counts or {}, claim=claim,
        )
        _registry[name] = made
        return made

    return register


def _check_class(what: str, kind: Any) -> str | None:
    """Return why a class cannot be a configuration or a state, or None."""
    if not isinstance(kind, type) or not is_dataclass(kind):
        shown = kind.__name__ if isinstance(kind, type) else repr(kind)
        return f"{what} {shown:.80} is not allowed; must be a dataclass: write @dataclass(frozen=True) above the class"
    if what == "config" and "name" in {field.name for field in fields(kind)}:
        return "config.name is not allowed: algorithm.name in an experiment is the algorithm's own"
    for base in kind.__mro__[:-1]:
        for key, value in vars(base).items():
            is_value = not key.startswith("_") and not callable(value) and not hasattr(value, "__get__")
            if is_value and key not in get_annotations(base):
                type_name = type(value).__name__
                typed = f"{key}: {type_name} = …" if what == "config" else f"{key}: Array"
                return f"{what}.{key} has no type; write {typed}, or {key}: ClassVar[{type_name}] = … for a constant"
    return None


def _qualified_name(round_: Round) -> str:
    return getattr(round_, "__qualname__", "")


def algorithms() -> Mapping[str, Algorithm]:
    """Return every registered algorithm: built-in ones in their order, then those of plugins."""
    for name in _BUILT_IN:
        import_module(f"dbo.algorithms.methods.{name}")
    return {name: _registry[name] for name in _BUILT_IN} | _registry


def forget(module: str) -> None:
    """Unregister the algorithms of a module: a plugin that was edited, or whose import failed."""
    for name in [name for name, made in _registry.items() if made.round.__module__ == module]:
        del _registry[name]
