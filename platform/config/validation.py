"""Components of an experiment: `{name: top_k, ratio: 0.2}` checked against the dataclass registered under the name.

The dataclass is the only place where a parameter is described: its annotations carry type, range and meaning, and serve
validation, the messages about wrong values and `dbo list` alike.
"""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from difflib import get_close_matches
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types
from dbo.parameters import declaration
from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic_core import ErrorDetails
from typing_extensions import Doc

from dbo.platform.errors import InputError


def pick(kind: str, name: Any, known: Iterable[str]) -> str:
    """`name` if it is known; otherwise an error with the nearest and all known names."""
    names = list(known)
    if not isinstance(name, str) or name not in names:
        raise InputError(f"{kind}: unknown value {_shown(name)}{_nearest(name, names)}; allowed: {', '.join(names)}")
    return name


def _nearest(name: Any, known: Iterable[str]) -> str:
    close = get_close_matches(str(name)[:200], list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def check(path: str, kinds: tuple[type, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of dataclasses that share a section: all of them, defaults filled in, values checked."""
    model = _model(kinds)
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    try:
        checked = model.model_validate(values)
    except ValidationError as error:
        raise InputError(tell(error, model, path)) from None
    return {name: getattr(checked, name) for name in model.model_fields}


def check_defaults(path: str, kind: type) -> None:
    """A stranger's dataclass: its annotations mean something, and its defaults are values that could be given."""
    try:
        model = _model((kind,))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise InputError(f"{path}: its types cannot be understood: {reason}") from error
    try:
        model.model_validate({})
    except ValidationError as error:
        for one in error.errors():
            if one["type"] != "missing":
                raise InputError(f"{_tell(one, model, path)} (it is the default)") from None


def make(path: str, kind: type, values: Mapping[str, Any]) -> Any:
    """An instance of `kind` from checked values; what its own `__post_init__` objects to is an input error as well."""
    own = {f.name for f in fields(kind)}
    try:
        return kind(**{name: value for name, value in values.items() if name in own})
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None


@cache
def _model(kinds: tuple[type, ...]) -> type[BaseModel]:
    definitions: dict[str, Any] = {}
    for kind in kinds:
        hints = get_type_hints(kind, include_extras=True)
        for field in fields(kind):
            definitions[field.name] = (_constrained(field, hints[field.name]), _default(field))
    config = ConfigDict(
        strict=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False, validate_default=True,
    )
    return create_model(kinds[0].__name__, __config__=config, **definitions)


def _constrained(field: Field[Any], hint: Any) -> Any:
    """The type of a field with the range that `param` declares for it."""
    found = declaration(field)
    limits = {"gt": annotated_types.Gt, "ge": annotated_types.Ge, "lt": annotated_types.Lt, "le": annotated_types.Le}
    for name, limit in limits.items():
        if (value := getattr(found, name)) is not None:
            hint = Annotated[hint, limit(value)]
    return hint


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return ... if field.default is MISSING else field.default


def tell(error: ValidationError, model: type[BaseModel], path: str = "") -> str:
    """The first thing that is wrong, as one line: the field, the value, what is allowed."""
    errors = error.errors()
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return _tell(errors[0], model, path) + more


_LIMITS = {
    "greater_than": ("gt", "must be > {}"),
    "greater_than_equal": ("ge", "must be ≥ {}"),
    "less_than": ("lt", "must be < {}"),
    "less_than_equal": ("le", "must be ≤ {}"),
    "literal_error": ("expected", "allowed: {}"),
}
_TYPES = {
    "int": "a whole number", "float": "a number", "string": "a text", "bool": "true or false", "dict": "a mapping",
    "tuple": "a list", "list": "a list",
}


def _tell(error: ErrorDetails, model: type[BaseModel], path: str) -> str:
    where = ".".join(str(part) for part in ([path] if path else []) + list(error["loc"]))
    kind, value = error["type"], error["input"]
    value = _shown(list(value) if isinstance(value, tuple) else value)       # as it was written
    if kind == "extra_forbidden":
        known = list(_inner(model, error["loc"][:-1]).model_fields)
        near, all_ = _nearest(error["loc"][-1], known), ", ".join(known) or "none"
        return f"{where[:200]}: unknown key{near}; known keys: {all_}"
    if kind == "missing":
        return f"{where}: a value is required"
    if kind in _LIMITS:
        context, phrase = _LIMITS[kind]
        return f"{where}: {value} is not allowed; {phrase.format(error['ctx'][context])}"
    expected = _TYPES.get(kind.rpartition("_")[0])
    if kind.endswith(("_type", "_parsing")) and expected:
        return f"{where}: {value} is not allowed; must be {expected}"
    return f"{where}: {value} is not allowed; {error['msg'][:1].lower()}{error['msg'][1:]}"


def _shown(value: Any) -> str:
    """A value as a message can hold it."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _inner(model: type[BaseModel], path: Iterable[Any]) -> type[BaseModel]:
    """The model of a section of `model`."""
    for part in path:
        inner: Any = model.model_fields[part].annotation
        model = inner
    return model


@dataclass(frozen=True, slots=True)
class Parameter:
    """One line of `dbo list`."""

    name: str
    allowed: str
    default: Any
    meaning: str


def parameters(kind: type) -> list[Parameter]:
    """What can be set on a component, from its annotations."""
    hints = get_type_hints(kind, include_extras=True)
    return [_parameter(field, _constrained(field, hints[field.name])) for field in fields(kind)]


def _parameter(field: Field[Any], hint: Any) -> Parameter:
    base, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    allowed = _allowed(base) + "".join(f" {sign} {limit:g}" for sign, limit in _limits(notes))
    meaning = declaration(field).help or next((n.documentation for n in notes if isinstance(n, Doc)), "")
    return Parameter(field.name, allowed, _default(field), meaning)


def _allowed(hint: Any) -> str:
    """A type in the words of an experiment file."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Literal:
        return " | ".join(map(str, parts))
    if kind is Annotated:
        return _allowed(parts[0]) + "".join(f" {sign} {limit:g}" for sign, limit in _limits(parts[1:]))
    if kind in (Union, UnionType):
        return " | ".join(map(_allowed, parts))
    if kind in (tuple, list):
        return f"list of {_allowed(parts[0])}"
    return getattr(hint, "__name__", str(hint))


def _limits(notes: Iterable[Any]) -> Iterable[tuple[str, Any]]:
    for note in notes:
        if isinstance(note, annotated_types.Gt):
            yield ">", note.gt
        elif isinstance(note, annotated_types.Ge):
            yield "≥", note.ge
        elif isinstance(note, annotated_types.Lt):
            yield "<", note.lt
        elif isinstance(note, annotated_types.Le):
            yield "≤", note.le


def summary(kind: type) -> str:
    """The first line of a component's docstring."""
    return (kind.__doc__ or "").strip().partition("\n")[0]
