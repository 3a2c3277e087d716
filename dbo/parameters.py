"""Declare a parameter of an algorithm, a task or another component: default, range and meaning in one place.

    @dataclass(frozen=True)
    class Config:
        lam: float = param(10.0, gt=0, help="penalty λ")

Validation, `dbo list` and error messages read what is declared here. The module imports the standard library alone, so
that every package may use it.
"""

from dataclasses import MISSING, Field, dataclass, field
from typing import Any

_KEY = "dbo.parameter"


@dataclass(frozen=True, slots=True)
class Declaration:
    """The range and the meaning of a parameter."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    help: str = ""


def param(
    default: Any = MISSING, *, gt: float | None = None, ge: float | None = None, lt: float | None = None,
    le: float | None = None, help: str = "",
) -> Any:
    """Return a dataclass field with its range and meaning; without a default the parameter is required."""
    return field(default=default, metadata={_KEY: Declaration(gt, ge, lt, le, help)})


def declaration(field_: "Field[Any]") -> Declaration:
    """Return what was declared for a dataclass field; an empty declaration if nothing was."""
    found: Declaration = field_.metadata.get(_KEY, Declaration())
    return found
