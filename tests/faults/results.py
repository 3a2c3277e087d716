"""Keep what the rows have measured in a file, a line per row, and write it as a table into a page.

A whole run may be completed in pieces, on one machine or on several days: each line says when it was measured, with
which version, and how busy the machine was.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from dbo.platform.runs.atomic_io import write_atomically
from dbo.version import find_version
from tests.faults.row import Row

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
HEADINGS = ("row", "tried", "survived", "lost", "double", "s p50", "s p95", "target", "ok", "sabotaged", "load", "date")


@dataclass(frozen=True, slots=True)
class Measured:
    """A row that was run, and under which conditions."""

    name: str
    cells: list[str]
    ok: bool
    short: bool
    sabotage: bool
    seconds: float
    cores: int
    load: float                 # mean number of busy processes while it ran, this program included
    date: str
    version: str
    python: str


def measure(name: str, row: Row, short: bool, sabotage: bool, load: float) -> Measured:
    """Return a row with the conditions under which it ran."""
    return Measured(
        name, row.format(), row.ok, short, sabotage, round(row.total_seconds, 1), os.cpu_count() or 1, round(load, 1),
        time.strftime("%Y-%m-%d", time.gmtime()), find_version(), sys.version.partition(" ")[0],
    )


def read(path: Path) -> list[Measured]:
    """Return what earlier runs have measured."""
    return [Measured(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def replace(path: Path, measured: Measured) -> None:
    """Write a row to the file, in place of what was measured before under the same name."""
    kept = [entry for entry in read(path) if (entry.name, entry.sabotage) != (measured.name, measured.sabotage)]
    lines = [json.dumps(asdict(entry), ensure_ascii=False) for entry in [*kept, measured]]
    write_atomically(path, "\n".join(lines) + "\n")


def format_markdown(entries: list[Measured], names: list[str]) -> str:
    """Return the table of all rows in the order of `names`; rows that were not measured are left out."""
    rows = {entry.name: entry for entry in entries if not entry.sabotage}
    controls = {entry.name: entry for entry in entries if entry.sabotage}
    lines = [f"| {' | '.join(HEADINGS)} |", "|---|" + "---:|" * 6 + "---|---|---|---:|---|"]
    for entry in (rows[name] for name in names if name in rows):
        *cells, target, ok = entry.cells
        control = controls.get(entry.name)
        cells[0] = f"`{entry.name}`{' (short)' if entry.short else ''}"
        seen = "not run" if control is None else "yes" if control.ok else "NO"
        lines.append(f"| {' | '.join([*cells, target, ok, seen, f'{entry.load:g}', entry.date])} |")
    return "\n".join(lines) + "\n"


def write_markdown(page: Path, entries: list[Measured], names: list[str]) -> None:
    """Replace the table between the two marks of a page."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: has no lines {BEGIN} and {END}")
    write_atomically(page, f"{before}{BEGIN}\n\n{format_markdown(entries, names)}\n{END}{after}")
