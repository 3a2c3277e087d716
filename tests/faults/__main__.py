"""Nothing lost, nobody let in: twelve ways to break a run, and a table of what came of each.

    python -m tests.faults [NAME …] [--short] [--sabotage]

    actors    SIGKILL in every phase of a round, 3 algorithms × 3 topologies, and an actor that hangs
    driver    SIGKILL of the command at random times, resumed, with MLflow: one run there, every point once
    sweep     the same of a sweep of 27 cells
    mlflow    the MLflow server away for a while, and for a whole run: training goes on, every point comes later
    messages  packets twice, late, in another order, lost
    disk      full at any write, and on a small file system
    flips     bits flipped and ends cut off in checkpoints and packets
    input     malformed input of every kind
    nan       steps that diverge
    pickles   planted wherever something is read
    exposure  servers open to others
    soak      10,000 rounds on Ray and 100,000 in process

`lost` counts evaluations or points that are missing in the end, `doubled` those that are there twice. Seconds are those
of a recovery (actors, driver, disk, mlflow) or of an answer (input, flips, exposure). `--short` tries a small part;
`--sabotage` breaks what each test watches over, and every row must then say NO. Exit 1 if a row is not at its target.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module

from rich.console import Console
from rich.table import Table

from tests.faults.row import HEADINGS, Row

TESTS = {      # name: module of tests.faults, function
    "input": ("abuse", "malformed"),
    "nan": ("abuse", "diverging"),
    "pickles": ("abuse", "pickles"),
    "exposure": ("abuse", "exposure"),
    "messages": ("messages", "messages"),
    "disk": ("storage", "disk_full"),
    "flips": ("storage", "flips"),
    "driver": ("tracking", "driver"),
    "sweep": ("tracking", "sweep"),
    "mlflow": ("tracking", "outage"),
    "actors": ("crash", "actors"),
    "soak": ("soak", "soak"),
}


def test_named(name: str) -> Callable[..., Row]:
    """Loaded when asked for: some need Ray, some MLflow."""
    module, function = TESTS[name]
    found: Callable[..., Row] = getattr(import_module(f"tests.faults.{module}"), function)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which ones; default: all")
    parser.add_argument("--short", action="store_true", help="a small part of each")
    parser.add_argument("--sabotage", action="store_true", help="break what is watched over: every row must say NO")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in TESTS]:
        parser.error(f"{', '.join(unknown)}: unknown; allowed: {', '.join(TESTS)}")
    console = Console(width=max(120, Console().width))
    rows = []
    for name in options.names or TESTS:
        console.print(f"{name} …", highlight=False, style="dim")
        start = time.perf_counter()
        row = test_named(name)(options.short, options.sabotage)
        row.took = time.perf_counter() - start
        rows.append(row)
        for text in [*row.notes, *(f"WRONG {text}" for text in row.wrong)]:
            console.print(f"  {text}", highlight=False, markup=False, soft_wrap=True)
        console.print(f"  {' · '.join(row.cells())} · {row.took:.0f} s in all", highlight=False, soft_wrap=True)
    table = Table(title=f"{os.cpu_count()} cores, Python {sys.version.partition(' ')[0]}", title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in ("test", "target") else "right")
    for row in rows:
        table.add_row(*row.cells(), style="" if row.ok else "red")
    console.print(table)
    return 0 if all(row.ok != options.sabotage for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
