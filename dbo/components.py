"""Register components by name: tasks, data sets, partitions, topologies, compressors, algorithms.

A registry knows the module of each built-in component and imports it when somebody asks for it. A plugin adds its own
components with the same decorators. The module imports the standard library alone, so that every package may use it.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from inspect import get_annotations, unwrap
from typing import Any, Generic, TypeVar

T = TypeVar("T")
C = TypeVar("C", bound=type)

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")      # names become names of folders and of files
_registries: "list[Registry[Any]]" = []


class Registry(Mapping[str, T], Generic[T]):
    """Components of one kind by name: built-in ones in their order, then those of plugins."""

    def __init__(self, kind: str, built_in: Mapping[str, str], methods: tuple[str, ...] = ()) -> None:
        self.kind = kind
        self._built_in = dict(built_in)                 # name → module that registers it
        self._methods = methods                         # that a class must have
        self._found: dict[str, tuple[T, str]] = {}      # name → (component, module)
        _registries.append(self)

    def __getitem__(self, name: str) -> T:
        if name not in self._found and name in self._built_in:
            import_module(self._built_in[name])
        return self._found[name][0]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._built_in, **self._found})

    def __len__(self) -> int:
        return len({**self._built_in, **self._found})

    def __contains__(self, name: object) -> bool:
        return name in self._built_in or name in self._found

    def is_built_in(self, name: str) -> bool:
        """Decide whether a component ships with dbo."""
        return name in self._built_in

    def find_name(self, component: Any) -> str | None:
        """Return the name that a component is registered under; None if it is not."""
        return next((name for name, (found, _) in self._found.items() if found is component), None)

    def find_owned(self, module: str) -> list[str]:
        """Return the names that a module, or a module inside of that package, has registered."""
        return [name for name, (_, owner) in self._found.items() if f"{owner}.".startswith(f"{module}.")]

    def forget(self, module: str) -> None:
        """Unregister the components of a module: a plugin that was edited, or whose import failed."""
        for name in [name for name, (_, owner) in self._found.items() if owner == module]:
            del self._found[name]

    def add(self, name: str, component: T, module: str, qualified_name: str = "") -> None:
        """Register a component of a module; raise ValueError if its name is malformed or in use."""
        self.check_name(name, module, qualified_name)
        self._found[name] = (component, module)

    def check_name(self, name: str, module: str, qualified_name: str = "") -> None:
        """Raise ValueError if a name is malformed or in use by another component."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"{self.kind} {name!r:.80}: the name is not allowed; must be a text of at most 64 of a-z, 0-9 and _, "
                f"a letter first"
            )
        if module.partition(".")[0] in {"algorithms", "tasks", "platform"}:
            raise ImportError(f"{name} was imported as {module}; import it as dbo.{module}")
        if name in self._built_in and self._built_in[name] != module:
            raise ValueError(f"{self.kind} {name!r} is the name of a built-in one; choose another name")
        old = self._found.get(name)
        # The same name of the same module again: a notebook's cell was executed twice.
        if old is not None and (old[1], _qualified_name(old[0])) != (module, qualified_name):
            raise ValueError(f"{self.kind} {name!r} is registered twice; choose another name")

    def register(self, name: str) -> Callable[[C], C]:
        """Return a decorator that registers a class; it becomes a frozen dataclass of its parameters."""

        def decorate(kind: C) -> C:
            self.check_name(name, kind.__module__, kind.__qualname__)
            made = as_dataclass(kind)
            if problem := check_fields(self.kind, made):
                raise ValueError(f"{self.kind} {name!r}: {problem}")
            for method in self._methods:
                if not callable(getattr(made, method, None)):
                    raise ValueError(f"{self.kind} {name!r}: {made.__name__} needs a method {method}(…)")
            if not (made.__doc__ or "").strip() or made.__doc__ == _generated_doc(made):
                raise ValueError(f"{self.kind} {name!r}: {made.__name__} needs a docstring, users see the first line")
            self.add(name, made, made.__module__, made.__qualname__)    # type: ignore[arg-type]
            return made

        return decorate


def all_registries() -> "list[Registry[Any]]":
    """Return the registry of every kind that has been imported."""
    return list(_registries)


def as_dataclass(kind: C) -> C:
    """Return a class as a frozen dataclass with keyword parameters; one that is a dataclass already stays as it is."""
    if "__dataclass_params__" in vars(kind):
        return kind
    documentation = kind.__doc__
    made: Any = dataclass(frozen=True, kw_only=True, eq=False)(kind)
    if documentation is None:
        made.__doc__ = None      # not the signature that `dataclass` writes
    return made      # type: ignore[no-any-return]


def check_fields(what: str, kind: Any) -> str | None:
    """Return why a class cannot hold parameters or state, or None."""
    if not isinstance(kind, type) or not is_dataclass(kind):
        shown = kind.__name__ if isinstance(kind, type) else repr(kind)
        return f"{what} {shown:.80} is not allowed; must be a dataclass: write @dataclass(frozen=True) above the class"
    if what != "state" and "name" in {field.name for field in fields(kind)}:
        return f"{what}.name is not allowed: the name in an experiment is the component's own"
    for base in kind.__mro__[:-1]:
        if base.__module__.startswith("dbo."):
            continue
        for key, value in vars(base).items():
            is_value = not key.startswith("_") and not callable(value) and not hasattr(value, "__get__")
            if is_value and key not in get_annotations(base) and not _is_class_attribute(kind, base, key):
                type_name = type(value).__name__
                typed = f"{key}: Array" if what == "state" else f"{key}: {type_name} = …"
                return f"{what}.{key} has no type; write {typed}, or {key}: ClassVar[{type_name}] = … for a constant"
    return None


def _is_class_attribute(kind: type, base: type, key: str) -> bool:
    """Decide whether a base class declares this attribute, so that a subclass may set it without a type."""
    return any(key in get_annotations(other) for other in kind.__mro__ if other is not base)


def _generated_doc(kind: type) -> str:
    return f"{kind.__name__}()"


def _qualified_name(component: Any) -> str:
    return str(getattr(component, "__qualname__", getattr(getattr(component, "round", None), "__qualname__", "")))


def name_method(component: Any, method: str) -> str:
    """Return `Class.method (file, line)`, for errors about what a component of a user returns."""
    code = getattr(unwrap(getattr(type(component), method)), "__code__", None)
    place = f" ({code.co_filename}, line {code.co_firstlineno})" if code is not None else ""
    return f"{type(component).__name__}.{method}{place}"


def forget(module: str) -> None:
    """Unregister everything that a module has registered."""
    for registry in _registries:
        registry.forget(module)


def find_owned(module: str) -> list[tuple[Registry[Any], str]]:
    """Return the registry and the name of every component of a module, or of a module inside of that package."""
    return [(registry, name) for registry in _registries for name in registry.find_owned(module)]
