"""Validate components of an experiment: `{name: top_k, ratio: 0.2}` against the dataclass registered under the name.

The dataclass is the only place where a parameter is described: `param` declares its default, range and meaning. They
serve validation, error messages and `dbo list` alike.
"""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

import annotated_types
from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic_core import ErrorDetails
from typing_extensions import Doc

from dbo.parameters import declaration
from dbo.platform.errors import InputError, suggest

T = TypeVar("T")


class DataclassInstance(Protocol):
    """An instance of any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


def pick(kind: str, name: Any, known: Iterable[str]) -> str:
    """Return `name` if it is known; otherwise raise an error with the nearest and all known names."""
    names = list(known)
    if not isinstance(name, str) or name not in names:
        raise InputError(f"{kind}: unknown value {_shown(name)}{suggest(name, names)}; allowed: {', '.join(names)}")
    return name


def validate(path: str, kinds: tuple[type, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all parameters of dataclasses that share a section, defaults filled in and values validated."""
    model = _model(kinds)
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    try:
        valid = model.model_validate(values)
    except ValidationError as error:
        raise InputError(format_error(error, model, path)) from None
    return {name: getattr(valid, name) for name in model.model_fields}


def validate_defaults(path: str, kind: type) -> None:
    """Refuse a plugin's dataclass with types that cannot be validated, or with defaults that are not allowed."""
    try:
        model = _model((kind,))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise InputError(f"{path}: its types cannot be validated: {reason}") from error
    try:
        model.model_validate({})
    except ValidationError as error:
        for one in error.errors():
            if one["type"] != "missing":
                raise InputError(f"{_format(one, model, path)} (it is the default)") from None


def build(path: str, kind: type[T], values: Mapping[str, Any]) -> T:
    """Return an instance of `kind` from validated values; a ValueError of its `__post_init__` is an input error."""
    own = _names(kind)
    try:
        return kind(**{name: value for name, value in values.items() if name in own})
    except ValueError as error:
        joint = "." if str(error).partition(":")[0] in own else ": "
        raise InputError(f"{path}{joint}{error}") from None


def _names(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


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
    """Return the type of a field with the range that `param` declares for it."""
    if get_origin(hint) is tuple:      # a range of a list is that of its entries
        return tuple[_constrained(field, get_args(hint)[0]), ...]    # type: ignore[misc]
    if isinstance(hint, UnionType) and any(get_origin(part) is tuple for part in get_args(hint)):
        return reduce(or_, (_constrained(field, part) for part in get_args(hint)))    # a value or a list of such values
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


def format_error(error: ValidationError, model: type[BaseModel], path: str = "") -> str:
    """Return the first error as one line: the field, the value, what is allowed."""
    by_key: dict[Any, list[ErrorDetails]] = {}
    for one in error.errors():
        one["loc"] = _drop_alternatives(model, one["loc"], one["type"])
        by_key.setdefault(one["loc"][:1], []).append(one)
    # A key of several types has an error for each type: the deepest one is about the type that the user meant.
    first = max(next(iter(by_key.values())), key=lambda one: len(one["loc"]))
    more = f" (and {len(by_key) - 1} more)" if len(by_key) > 1 else ""
    return _format(first, model, path) + more


def _drop_alternatives(model: type[BaseModel], loc: tuple[int | str, ...], kind: str) -> tuple[int | str, ...]:
    """Return the path of an error without the types that pydantic adds for the alternatives of a key."""
    kept: list[int | str] = []
    above: Any = model
    for place, part in enumerate(loc):
        is_unknown_key = kind == "extra_forbidden" and place == len(loc) - 1
        is_section = isinstance(above, type) and issubclass(above, BaseModel)
        is_type = part not in above.model_fields if is_section else get_origin(above) in (Union, UnionType)
        if is_unknown_key or not is_type or isinstance(part, int):
            kept.append(part)
            above = _inner(above, [part]) if is_section and not is_unknown_key else None
    return tuple(kept)


_LIMITS = {
    "greater_than": ("gt", "must be > {}"),
    "greater_than_equal": ("ge", "must be ≥ {}"),
    "less_than": ("lt", "must be < {}"),
    "less_than_equal": ("le", "must be ≤ {}"),
    "literal_error": ("expected", "allowed: {}"),
}
_TYPES = {
    "int": "a whole number", "float": "a number", "string": "a text", "bool": "true or false", "dict": "a mapping",
    "model": "a mapping",
    "tuple": "a list", "list": "a list",
}


def _format(error: ErrorDetails, model: type[BaseModel], path: str) -> str:
    where = ".".join(str(part) for part in ([path] if path else []) + list(error["loc"]))
    kind, value = error["type"], error["input"]
    value = _shown(list(value) if isinstance(value, tuple) else value)       # as the user wrote it
    if kind == "extra_forbidden":
        known = list(_inner(model, error["loc"][:-1]).model_fields)
        near, all_ = suggest(error["loc"][-1], known), ", ".join(known) or "none"
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
    """Return a value as text, cut to what a message can hold."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _inner(model: type[BaseModel], path: Iterable[Any]) -> type[BaseModel]:
    """Return the model of a section of `model`."""
    for part in path:
        inner: Any = model.model_fields[part].annotation
        sections = [one for one in get_args(inner) if isinstance(one, type) and issubclass(one, BaseModel)]
        model = sections[0] if sections else inner          # of `Section | None`
    return model


@dataclass(frozen=True, slots=True)
class Parameter:
    """One line of `dbo list`."""

    name: str
    allowed: str
    default: Any
    meaning: str


def list_parameters(kind: type) -> list[Parameter]:
    """Return the parameters of a component, from its fields."""
    hints = get_type_hints(kind, include_extras=True)
    return [
        Parameter(
            field.name, format_type(_constrained(field, hints[field.name])), _default(field),
            declaration(field).help or _documentation(hints[field.name]),
        )
        for field in fields(kind)
    ]


def _documentation(hint: Any) -> str:
    """Return the text of `Annotated[…, Doc("…")]`, for plugins that do not use `param`."""
    return next((note.documentation for note in get_args(hint) if isinstance(note, Doc)), "")


def format_type(hint: Any) -> str:
    """Return a type as an experiment file would write it."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Literal:
        return " | ".join(map(str, parts))
    if kind is Annotated:
        return format_type(parts[0]) + "".join(f" {sign} {limit:g}" for sign, limit in _limits(parts[1:]))
    if kind in (Union, UnionType):
        return " | ".join(map(format_type, parts))
    if kind in (tuple, list):
        return f"list of {format_type(parts[0])}"
    return "null" if hint is type(None) else getattr(hint, "__name__", str(hint))


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


def summarize(kind: type) -> str:
    """Return the first line of a component's docstring."""
    return (kind.__doc__ or "").strip().partition("\n")[0]
