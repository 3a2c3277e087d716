"""Inject faults into runs and print a table: does every run recover, without loss and without duplicates?

    python -m tests.faults [NAME …] [--short] [--sabotage] [--resume] [--cases N] [--markdown FILE]

    actors    SIGKILL of Ray actors in every phase of a round, 3 algorithms × 3 topologies, and an actor that hangs
    driver    SIGKILL of the command at random times, resumed, with MLflow: one run there, every point once
    sweep     the same for a sweep of 27 cells
    mlflow    MLflow server offline for a while, and for a whole run: training continues, points arrive later
    messages  packets duplicated, delayed, reordered, lost
    disk      disk full at every write, and on a small file system
    flips     flipped bits and truncated files in checkpoints and packets
    input     malformed input of every kind
    nan       step sizes that diverge
    pickles   malicious payloads planted in every file that is read
    exposure  servers that are open to other users
    shutdown  GCS and raylet stopped or killed when training has ended: the command ends in time, with exit code 0
    silent    actors that are stopped: detected although a step may take 600 s
    partition a machine cut off for 20 s and for good, in network namespaces (needs root)
    fencing   two drivers on one URL: the second is refused, or takes over from a silent one, which is fenced
    soak      10,000 rounds on Ray and 100,000 in process
    sealed    final files damaged, emptied, removed: found, and repaired or refused
    mixed     results of another environment in a comparison
    secrets   a secret in every part of a URL
    errors    disk full, Ray that cannot start, storage that cannot be reached: one line with context
    supervise SIGKILL of the driver under `dbo supervise`
    raylet    SIGKILL of the raylet under a driver
    cluster   GCS, raylet and workers stopped or killed while a run starts, trains or sweeps
    code      an edit of code that decides results, between two parts of a run
    history   resume after many evaluations
    search    the log of a search cut after every byte
    renamed   the folder of a run renamed, removed or replaced in its middle
    yaml      bombs of aliases and merges, numbers of YAML 1.1
    links     symbolic links in place of every file that is written
    packing   a token in place of every file that a job sends
    sizes     packets of a few bytes that announce gigabytes, and NaN of every kind

Columns: `lost` counts evaluations or points that are missing at the end, `doubled` those that are there twice. Seconds
are those of a recovery (actors, driver, disk, mlflow, sealed, supervise), of a detection (silent, partition, cluster)
or of a response (the others). With `--markdown` or `--results`, each row is kept in a file as soon as it has ended;
`--resume` skips the rows that are there already, so that a whole run can be completed in pieces. `cluster` takes a
quarter of an hour: with `--cases N` it ends after N of its cases, and `--resume` continues with the others.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.faults import results
from tests.faults.row import HEADINGS, Pieces, Row

RESULTS = Path("docs/faults.jsonl")

FAULTS = {      # name: module of tests.faults, function
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
    "shutdown": ("shutdown", "shutdown"),
    "silent": ("shutdown", "silence"),
    "partition": ("partitions", "partitions"),
    "fencing": ("fencing", "fencing"),
    "soak": ("soak", "soak"),
    "sealed": ("sealed", "damaged_results"),
    "mixed": ("sealed", "mixed_environments"),
    "secrets": ("sealed", "secrets"),
    "errors": ("sealed", "one_line"),
    "supervise": ("drivers", "supervised"),
    "raylet": ("drivers", "raylet"),
    "cluster": ("clusters", "processes"),
    "code": ("history", "edited_code"),
    "history": ("history", "long_history"),
    "search": ("history", "torn_search"),
    "renamed": ("history", "renamed_folder"),
    "yaml": ("foreign", "expansions"),
    "links": ("foreign", "links"),
    "packing": ("foreign", "packing"),
    "sizes": ("foreign", "announced"),
}


IN_PIECES = frozenset({"cluster"})       # rows whose function takes `pieces`


def load_fault(name: str) -> Callable[..., Row]:
    """Return the function of a fault test. Imported late: some need Ray, some MLflow."""
    module, function = FAULTS[name]
    found: Callable[..., Row] = getattr(import_module(f"tests.faults.{module}"), function)
    return found


def run_row(name: str, short: bool, sabotage: bool, pieces: Pieces | None = None) -> tuple[Row, float]:
    """Run one row, or a piece of it; return it and the load of the machine meanwhile."""
    start, load = time.perf_counter(), os.getloadavg()[0]
    row = load_fault(name)(short, sabotage, **({"pieces": pieces} if pieces is not None else {}))
    row.total_seconds += time.perf_counter() - start
    row.loads += [load, os.getloadavg()[0]]
    return row, sum(row.loads) / len(row.loads)


def find_pieces(name: str, file: Path | None, options: argparse.Namespace) -> Pieces | None:
    """Return where a row in pieces keeps them; without --resume it starts again."""
    if name not in IN_PIECES or file is None or options.short or options.sabotage:
        return None
    path = file.with_name(f".{file.stem}-{name}.json")
    if not options.resume:
        path.unlink(missing_ok=True)
    return Pieces(path, options.cases)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit code 0 if every row meets its target; with --sabotage, if no row does.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to inject; default: all")
    parser.add_argument("--short", action="store_true", help="run a small part of each test")
    parser.add_argument(
        "--sabotage", action="store_true", help="break what each test protects: every row must then show NO")
    parser.add_argument("--resume", action="store_true", help="skip rows that the file of results has")
    parser.add_argument("--cases", type=int, metavar="N", help="end a long row (cluster) after N of its cases")
    parser.add_argument("--results", type=Path, metavar="FILE", help=f"keep each row here; default: {RESULTS}")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table of all results into this page")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in FAULTS]:
        parser.error(f"{', '.join(unknown)}: unknown; allowed: {', '.join(FAULTS)}")
    if options.cases is not None and (options.cases < 1 or not (options.results or options.markdown or options.resume)):
        parser.error("--cases: must be at least 1, and needs --results, --markdown or --resume")
    file = options.results or (RESULTS if options.markdown or options.resume else None)
    known = {entry.name for entry in results.read(file) if entry.sabotage == options.sabotage} if file else set()
    console = Console(width=max(120, Console().width))
    rows = []
    for name in options.names or FAULTS:
        pieces = find_pieces(name, file, options)
        is_begun = pieces is not None and pieces.path is not None and pieces.path.exists()
        if options.resume and name in known and not is_begun:
            continue
        console.print(f"{name} …", highlight=False, style="dim")
        row, load = run_row(name, options.short, options.sabotage, pieces)
        for text in [*row.notes, *(f"PROBLEM {text}" for text in row.problems)]:
            console.print(f"  {text}", highlight=False, markup=False, soft_wrap=True)
        summary = " · ".join([*row.format(), f"{row.total_seconds:.0f} s in total"])
        console.print(f"  {summary}", highlight=False, soft_wrap=True)
        if not row.is_complete:
            console.print("  not complete: --resume continues", highlight=False)
            continue
        rows.append(row)
        if file is not None:
            results.replace(file, results.measure(name, row, options.short, options.sabotage, load))
        if options.markdown is not None:
            results.write_markdown(options.markdown, results.read(file), list(FAULTS))
    table = Table(title=f"{os.cpu_count()} cores, Python {sys.version.partition(' ')[0]}", title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in ("test", "target") else "right")
    for row in rows:
        table.add_row(*row.format(), style="" if row.ok else "red")
    console.print(table)
    return 0 if all(row.ok != options.sabotage for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
