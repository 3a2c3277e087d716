"""List the configurations that a method's switches allow, from the types of its fields.

A switch is a field with a few distinct values: a `Literal`, a bool, an optional value, a compressor, and each switch
inside of that. Integers are switches too, as 0 often turns something off and a small number turns it on in the few
rounds of a check (`reset_every`). A number at the end of its range, such as `participation: 1`, gets one inside of it.
One switch changes at a time.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dbo.algorithms.api import COMPRESSORS, Compressor
from dbo.parameters import Declaration, declaration

SMALL_INTEGERS = (2, 3)         # the first that differs from the current value
INSIDE = (0.6, 0.3)             # of a bounded range
UNBOUNDED = 0.25                # a number where there is none


def list_variants(config: Any) -> dict[str, Any]:
    """Return label → configuration, one for each other value of each switch; `name=value` is the label."""
    hints = get_type_hints(type(config))
    found: dict[str, Any] = {}
    for field in fields(config):
        current = getattr(config, field.name)
        for label, value in _list_values(hints[field.name], current, declaration(field)):
            found[f"{field.name}{label}"] = replace(config, **{field.name: value})
    return found


def shorten(config: Any, few: int) -> Any:
    """Return the configuration with at most so many inner steps, terms of a series, and the like."""
    changes = {
        field.name: few for field in fields(config)
        if type(value := getattr(config, field.name)) is int and value > few and _is_allowed(few, declaration(field))
    }
    return replace(config, **changes)


def list_lengths(config: Any) -> set[str]:
    """Return the fields that say how many steps or terms there are, at least one: they turn nothing on or off."""
    return {
        field.name for field in fields(config)
        if type(getattr(config, field.name)) is int and (declaration(field).ge or 0) >= 1
    }


def list_compressors(config: Any) -> dict[str, Any]:
    """Return the fields that hold a compressor."""
    return {field.name: value for field in fields(config) if _is_compressor(value := getattr(config, field.name))}


def _is_compressor(value: Any) -> bool:
    return is_dataclass(value) and isinstance(value, Compressor)


def _list_values(hint: Any, current: Any, declared: Declaration) -> Iterator[tuple[str, Any]]:
    """Yield (label, value) of the other values; labels begin with `=`, or with `.` for a part of the current value."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for member in members:
        yield from _list_member(member, current, declared)
    if _is_compressor(current):
        for label, value in list_variants(current).items():
            yield f".{label}", value


def _list_member(hint: Any, current: Any, declared: Declaration) -> Iterator[tuple[str, Any]]:
    if get_origin(hint) is Literal:
        yield from ((f"={value}", value) for value in get_args(hint) if value != current)
    elif hint is NoneType:
        if current is not None:
            yield "=null", None
    elif hint is bool:
        if isinstance(current, bool):
            yield f"={str(not current).lower()}", not current
    elif hint is Compressor:
        for name, kind in COMPRESSORS.items():
            if type(current) is not kind and (made := _build(kind)) is not None:
                yield f"={name}", made
    elif hint is int:
        yield from ((f"={value}", value) for value in _pick_integers(current, declared))
    elif hint is float and (value := _pick_number(current, declared)) is not None:
        yield f"={value:g}", value


def _build(kind: type) -> Any | None:
    """Return a component with its defaults; None if it needs values."""
    try:
        return kind()
    except TypeError:
        return None


def _pick_integers(current: Any, declared: Declaration) -> Iterator[int]:
    if declared.ge == 0 and current != 0:
        yield 0
    small = next(value for value in SMALL_INTEGERS if value != current)
    if _is_allowed(small, declared):
        yield small


def _pick_number(current: Any, declared: Declaration) -> float | None:
    """Return a number where there is none, or one inside of the range if the current one is at its end."""
    bounds = (declared.ge, declared.le)
    if isinstance(current, float) and current not in bounds:
        return None
    candidates = INSIDE if None not in (declared.gt if declared.ge is None else declared.ge,
                                        declared.lt if declared.le is None else declared.le) else (UNBOUNDED,)
    return next((value for value in candidates if _is_allowed(value, declared)), None)


def _is_allowed(value: float, declared: Declaration) -> bool:
    return (
        (declared.gt is None or value > declared.gt) and (declared.ge is None or value >= declared.ge)
        and (declared.lt is None or value < declared.lt) and (declared.le is None or value <= declared.le)
    )
