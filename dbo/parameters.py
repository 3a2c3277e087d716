"""Declare a parameter of an algorithm, a task or another component: default, range and meaning in one place.

    @dataclass(frozen=True)
    class Config:
        lam: float = param(10.0, gt=0, help="penalty λ")

Validation, `dbo list` and error messages read what is declared here. The module imports the standard library alone, so
that every package may use it.
"""

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field
from typing import Any

_KEY = "dbo.parameter"


@dataclass(frozen=True, slots=True)
class Declaration:
    """The range and the meaning of a parameter, and whether it may have a schedule."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    help: str = ""
    schedule: bool = False      # a step size: an experiment may give a schedule over the rounds
    auto: Callable[..., float] | None = None     # its value if an experiment gives `auto`


def param(
    default: Any = MISSING, *, gt: float | None = None, ge: float | None = None, lt: float | None = None,
    le: float | None = None, help: str = "", schedule: bool = False,
    auto: Callable[..., float] | None = None,
) -> Any:
    """Return a dataclass field with its range and meaning; without a default the parameter is required.

    `schedule=True` marks a step size of an algorithm, which an experiment may let change with the rounds.
    `auto` derives the value if an experiment gives `auto`: a function of (configuration, network facts, dim_x, dim_y).
    """
    return field(default=default, metadata={_KEY: Declaration(gt, ge, lt, le, help, schedule, auto)})


def declaration(field_: "Field[Any]") -> Declaration:
    """Return what was declared for a dataclass field; an empty declaration if nothing was."""
    found: Declaration = field_.metadata.get(_KEY, Declaration())
    return found
