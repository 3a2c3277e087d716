"""What the commands of all rooms share: the console, the way arguments are read, the options that recur."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dbo.platform.config.redact import masked
from dbo.platform.errors import InputError
from dbo.platform.runs.remote import is_url

Arguments = Annotated[list[str] | None, typer.Argument(
    metavar="[FILE.yaml] [key=value ...]", help="An experiment file, and overrides such as algorithm.lam=100.")]
Out = Annotated[str | None, typer.Option(
    "--out", metavar="DIR", help="Where the results go, a folder or a URL; default: below runs/.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress display.")]

console = Console()


def split(arguments: list[str] | None) -> tuple[str | None, list[str]]:
    """The file, if there is one, and the overrides."""
    given = arguments or []
    files = [argument for argument in given if "=" not in argument]
    if len(files) > 1:
        raise InputError(f"{files[1]!r}: one experiment file at most; overrides are of the form key=value")
    return (files[0] if files else None), [argument for argument in given if "=" in argument]


def check_out(out: str | Path | None, url: bool = True) -> None:
    """What cannot be a folder, nor a URL where one is allowed, is told before anything is begun."""
    if out is None:
        return
    wanted = "a folder or a URL" if url else "a folder"
    if not str(out).strip() or "\0" in str(out):
        raise InputError(f"--out: {str(out)!r} is not allowed; must be {wanted}")
    if is_url(out) and not url:
        raise InputError(f"--out: {out} is not allowed; must be {wanted}")
    if any(len(part.encode(errors="replace")) > 255 for part in Path(out).parts) and not is_url(out):
        raise InputError(f"--out: {str(out)[:40]}… is not allowed; a folder's name may have at most 255 bytes")


def typed() -> str:
    """The command as it was given, but for passwords in URLs: it is recorded."""
    return shlex.join(["dbo", *map(masked, sys.argv[1:])])


def plainly(text: str) -> None:
    """A line as it is, whatever is in it, but for passwords in URLs."""
    console.print(masked(text), highlight=False, markup=False, soft_wrap=True)


def warn(text: str) -> None:
    """Something that the command can go on without, but that should be known; also with --quiet."""
    console.print(masked(text), style="yellow", highlight=False, markup=False, soft_wrap=True)
