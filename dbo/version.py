"""Find the version of this package, also in a checkout that is not installed. Imports the standard library alone."""

import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"      # beside dbo/ in a checkout, in no wheel


@cache
def find_version() -> str:
    """Return the version of the checkout, also as the working directory of a Ray job, else of the installed wheel."""
    if _PROJECT.is_file():
        return str(tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]["version"])
    try:
        return version("dbo")
    except PackageNotFoundError:
        return "unknown"
