"""Console, arguments and options that the commands share."""

import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from dbo.platform.config.redact import redact
from dbo.platform.config.terminal import escape_control
from dbo.platform.errors import InputError
from dbo.platform.runs.remote import is_url

Arguments = Annotated[list[str] | None, typer.Argument(
    metavar="FILE.yaml|key=value", help="Experiment file, and overrides such as algorithm.lam=100.")]
Folders = Annotated[list[Path], typer.Argument(metavar="DIR", help="Folders of runs, comparisons or sweeps.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Do not show progress.")]
KeepOtherEnvironment = Annotated[bool, typer.Option(
    "--allow-changed-code", help="Keep finished runs of other library versions; the change is recorded.")]
AllowChangedCode = Annotated[bool, typer.Option(
    "--allow-changed-code", help="Resume although code or library versions changed; the change is recorded.")]


class _EscapingConsole(Console):
    """A console that escapes control characters in all that it prints, also in the cells of a table."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escape_control(segment.text))


console = _EscapingConsole()


def split_arguments(arguments: Sequence[str] | None, kind: str = "experiment file") -> tuple[str | None, list[str]]:
    """Return the one argument without `=`, or None, and the `key=value` overrides."""
    given = arguments or []
    names = [argument for argument in given if "=" not in argument]
    if len(names) > 1:
        raise InputError(f"{names[1]!r}: at most one {kind} is allowed; overrides have the form key=value")
    return (names[0] if names else None), [argument for argument in given if "=" in argument]


def validate_out(out: str | Path | None, url_allowed: bool = True) -> None:
    """Refuse a value of --out that cannot be a folder (or a URL), before the command starts."""
    if out is None:
        return
    allowed = "a folder or a URL" if url_allowed else "a folder"
    if not str(out).strip() or "\0" in str(out):
        raise InputError(f"--out: {str(out)!r} is not allowed; must be {allowed}")
    if is_url(out):
        if not url_allowed:
            raise InputError(f"--out: {out} is not allowed; must be {allowed}")
    elif any(len(part.encode(errors="replace")) > 255 for part in Path(out).parts):
        raise InputError(f"--out: {str(out)[:40]}… is not allowed; a folder name may have at most 255 bytes")
    elif Path(out).is_file():
        raise InputError(f"--out: {out} is a file; must be {allowed}")


def typed_command() -> str:
    """Return the command line as typed, without passwords, for the record."""
    return shlex.join(["dbo", *map(redact, sys.argv[1:])])


def print_line(text: str, style: str | None = None) -> None:
    """Print text without markup, highlighting or wrapping, and without passwords and control characters."""
    console.print(redact(escape_control(text)), style=style, highlight=False, markup=False, soft_wrap=True)


def warn(text: str) -> None:
    """Print a warning, also with --quiet."""
    print_line(text, style="yellow")
