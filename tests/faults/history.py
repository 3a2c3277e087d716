"""Long histories, torn logs of a search, and edits of the code between two parts of a run."""

import os
import shutil
import tempfile
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from dbo.platform.config import code_identity, plugins
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.local import LocalEngine
from dbo.platform.errors import InputError, RunError
from dbo.platform.runs import atomic_io, runner, schema
from dbo.platform.runs.run_folder import Position, RunFolder, read_events
from dbo.platform.runs.runner import run
from dbo.sweeps.grid import Grid
from dbo.sweeps.plan import Sweep
from dbo.sweeps.search_log import SearchLog
from tests.faults.row import TINY, Row, count_evaluations, hash_run, measure_time

ROOT = Path(__file__).resolve().parents[2]
MOST = 20 << 20         # bytes that resuming may allocate


class Interrupted(Exception):
    """The end of a driver, as far as files can tell."""


@contextmanager
def interrupt(in_round: int) -> Iterator[None]:
    """End the run inside in this round."""
    run_round = LocalEngine.run_round

    def stop(engine: LocalEngine, round_: int) -> None:
        if round_ == in_round:
            raise Interrupted
        run_round(engine, round_)

    with mock.patch.object(LocalEngine, "run_round", stop), mock.patch.object(runner, "format_failure", _die):
        try:
            yield
        except Interrupted:
            return
    raise AssertionError("the run was not interrupted")


def _die(error: Exception) -> str:
    raise error


# ---- history ---------------------------------------------------------------------------------------------------------


def long_history(short: bool, sabotage: bool = False) -> Row:
    """Resume runs with many evaluations. Sabotage: checkpoints have no position, as those of old versions."""
    row = Row("long history", f"no line parsed, < {MOST >> 20} MB, same bits")
    blind = mock.patch.object(Position, "parse", return_value=None)
    for rounds in (400,) if short or sabotage else (400, 4_000, 20_000):
        experiment = Experiment(**{**TINY, "rounds": rounds, "checkpoint_every": rounds // 4})
        with tempfile.TemporaryDirectory() as base, mock.patch.object(runner, "_MAX_LOADED", 0):
            calm, folder = run(experiment, Path(base) / "calm").folder, Path(base) / "r"
            with interrupt(rounds - 1):
                run(experiment, folder)
            for kind in ("interrupted", "finished"):
                tracemalloc.start()
                with measure_time(row), _count_parsed() as parsed, blind if sabotage else nullcontext():
                    run(experiment, folder, resume=True)
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                is_same = hash_run(folder) == hash_run(calm)
                row.count(is_same and not parsed and peak < MOST,
                          f"{rounds} evaluations, {kind}: same={is_same}, {len(parsed)} parsed, {peak:,} bytes")
                row.notes.append(f"{rounds} evaluations, {kind}: {row.seconds[-1]:.2f} s, {peak / 1e6:.1f} MB")
            count_evaluations(row, folder, rounds + 1)
    return row


@contextmanager
def _count_parsed() -> Iterator[list[str | bytes]]:
    """Collect the lines of evaluations that are parsed."""
    lines: list[str | bytes] = []
    parse = schema.parse_record

    def collect(line: str | bytes) -> schema.Record:
        lines.append(line)
        return parse(line)

    with mock.patch.object(schema, "parse_record", collect):
        yield lines


# ---- search logs -----------------------------------------------------------------------------------------------------

SEARCH: dict[str, Any] = {
    "name": "search", "experiment": TINY, "mode": "tpe", "trials": 4, "metric": "upper_loss",
    "axes": {"algorithm.eta_out": {"low": 0.01, "high": 0.2}}, "target": "hypergradient_norm=0.5",
}


def torn_search(short: bool, sabotage: bool = False) -> Row:
    """Cut the log of a search after every byte and go on. Sabotage: a partial line is not dropped."""
    row = Row("search log", "continued after every cut, no whole line lost")
    grid = Grid(Sweep(**SEARCH), measure=False)
    keep = mock.patch.object(atomic_io, "drop_partial_line")
    with tempfile.TemporaryDirectory() as base, keep if sabotage else nullcontext():
        path = Path(base) / "search.jsonl"
        for value in (0.1, 0.12):
            _add(path, grid, value)
        text = path.read_bytes()
        for size in range(0, len(text) + 1, 7 if short else 1):
            path.write_bytes(text[:size])
            whole = text[:size].count(b"\n")
            try:
                with measure_time(row):
                    _add(path, grid, 0.15)
                    found = [cell.values["algorithm.eta_out"] for cell in SearchLog(path, grid).cells]
                row.count(found == [*(0.1, 0.12)[:whole], 0.15], f"cut after {size} bytes: {found}")
            except Exception as error:
                row.count(False, f"cut after {size} bytes: {error}")
    return row


def _add(path: Path, grid: Grid, value: float) -> None:
    SearchLog(path, grid).add(grid.make_cell({"algorithm.eta_out": value}), {"algorithm.eta_out": value})


# ---- edited code -----------------------------------------------------------------------------------------------------


def edited_code(short: bool, sabotage: bool = False) -> Row:
    """Edit a module between two parts of a run. Sabotage: the key covers only algorithms and tasks."""
    row = Row("edited code", "refused, or resumed on request and recorded")
    modules = ["dbo.platform.network.topology"] if short or sabotage else [
        *code_identity.NUMERICS, "dbo.algorithms.methods.c2dfb", "dbo.algorithms.parts.penalty", "dbo.algorithms.rng",
        "dbo.tasks.problems.quadratic"]
    for module in modules:
        with tempfile.TemporaryDirectory() as base, _own_sources(Path(base)), \
                mock.patch.object(code_identity, "NUMERICS", ()) if sabotage else nullcontext():
            folder = Path(base) / "r"
            with interrupt(in_round=10):
                run(Experiment(**TINY), folder)
            file = Path(base).joinpath(*module.split(".")[1:]).with_suffix(".py")
            file.write_text(file.read_text(encoding="utf-8") + "\nPLANTED = 1\n", encoding="utf-8")
            code_identity._find.cache_clear()
            before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
            with measure_time(row):
                is_refused = _refuses_code(folder)
            is_kept = sabotage or before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
            row.count(is_refused and is_kept, f"{module}: refused={is_refused}, kept={is_kept}")
            run(Experiment(**TINY), folder, resume=True, allow_changed_code=True)
            recorded = any(event.kind == "code_changed" for event in read_events(folder / "events.jsonl"))
            row.count(recorded, f"{module}: the change is not recorded")
    return row


def _refuses_code(folder: Path) -> bool:
    try:
        run(Experiment(**TINY), folder, resume=True)
    except InputError as error:
        return "run with other code" in str(error)
    return False


@contextmanager
def _own_sources(place: Path) -> Iterator[None]:
    """Compute run keys from a copy of the sources; what runs is the original."""
    for name in ("algorithms", "platform", "tasks", "dbo"):
        shutil.copytree(ROOT / name, place / name, ignore=lambda folder, names: [
            file for file in names if file == "__pycache__" or os.path.splitext(file)[1] not in ("", ".py")])
    plain = code_identity.read_source.__wrapped__           # each key is that of a new process, which has read nothing
    with mock.patch.object(code_identity, "_ROOTS", (place / "dbo", place)), \
            mock.patch.object(code_identity, "read_source", plain), mock.patch.object(plugins, "read_source", plain):
        code_identity._find.cache_clear()
        yield
    code_identity._find.cache_clear()


# ---- renamed folders -------------------------------------------------------------------------------------------------


def renamed_folder(short: bool, sabotage: bool = False) -> Row:
    """Rename, remove or replace the folder of a run in its middle. Sabotage: nobody looks where the folder is."""
    row = Row("renamed folders", "exit with an error, nothing written to the old place, same bits after resume")
    experiment = Experiment(**TINY)
    blind = mock.patch.object(RunFolder, "_require_same_place")
    with tempfile.TemporaryDirectory() as base, blind if sabotage else nullcontext():
        calm = run(experiment, Path(base) / "calm").folder
        for kind in ("renamed", "removed", "replaced"):
            for round_ in (6,) if short else (1, 3, 4, 5, 8, 11, 12):
                folder, other = Path(base) / f"{kind}-{round_}", Path(base) / f"{kind}-{round_}-elsewhere"
                with measure_time(row):
                    error = _run_and_move(experiment, folder, other, kind, round_)
                written = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
                is_clean = written == ([".lock"] if kind == "replaced" else [])
                if kind != "removed":
                    run(experiment, other, resume=True)
                    count_evaluations(row, other, experiment.rounds + 1)
                is_same = kind == "removed" or hash_run(other) == hash_run(calm)
                row.count(bool(error) and is_clean and is_same,
                          f"{kind} in round {round_}: {error!r}, written {written}, same={is_same}")
    return row


def _run_and_move(experiment: Experiment, folder: Path, other: Path, kind: str, in_round: int) -> str:
    """Run, and move the folder in this round; return the error."""
    run_round, rival = LocalEngine.run_round, RunFolder(folder)

    def move(engine: LocalEngine, round_: int) -> None:
        if round_ == in_round:
            shutil.rmtree(folder) if kind == "removed" else folder.rename(other)
            if kind == "replaced":
                rival.acquire()
        run_round(engine, round_)

    try:
        with mock.patch.object(LocalEngine, "run_round", move):
            run(experiment, folder)
    except (RunError, OSError) as error:
        return str(error)
    finally:
        if rival._lock is not None:
            rival._lock.close()
    return ""
