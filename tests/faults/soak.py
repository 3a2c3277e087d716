"""Test 12, soak: many rounds; memory, object store, open files and actors must not grow."""

import gc
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.base import Engine
from dbo.platform.engine.local import LocalEngine
from dbo.platform.runs.runner import run
from tests.faults.row import TINY, Row

MAX_GROWTH = 1.0      # MB per 1,000 rounds


def resident_memory(pid: int) -> float:
    """Return the resident memory of a process in MB."""
    pages = int((Path("/proc") / str(pid) / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def count_files(pid: int) -> int:
    """Return the number of open files of a process."""
    return len(list((Path("/proc") / str(pid) / "fd").iterdir()))


def slope(samples: list[tuple[int, float]]) -> float:
    """Return MB per 1,000 rounds: least squares over the second half, when all caches are filled."""
    late = samples[len(samples) // 2 :]
    mean_x, mean_y = (sum(v[i] for v in late) / len(late) for i in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in late)
    return 1000 * sum((x - mean_x) * (y - mean_y) for x, y in late) / spread if spread else 0.0


class Monitor:
    """Sample the memory and open files of processes every so many rounds, from inside `advance`."""

    def __init__(self, every: int, pids: Any, store: Any = None, leak: list[bytes] | None = None) -> None:
        self.every, self.pids, self.store, self.leak = every, pids, store, leak
        self.memory: dict[int, list[tuple[int, float]]] = {}       # pid → (round, MB)
        self.open_files: dict[int, list[int]] = {}
        self.stored: list[tuple[int, float]] = []

    def __call__(self, engine: Engine, first: int, last: int) -> None:
        """Sample after the rounds `first` to `last`, which one call has run, if one of them is to be sampled."""
        if self.leak is not None:
            self.leak += [os.urandom(20_000) for _ in range(first, last + 1)]
        if last // self.every == (first - 1) // self.every:
            return
        gc.collect()
        for pid in self.pids(engine):
            self.memory.setdefault(pid, []).append((last, resident_memory(pid)))
            self.open_files.setdefault(pid, []).append(count_files(pid))
        if self.store is not None:
            self.stored.append((last, self.store()))

    def judge(self, row: Row, what: str) -> None:
        """Count a try per process and resource, with its growth as a note."""
        for number, (pid, samples) in enumerate(self.memory.items()):
            found, files = slope(samples), self.open_files[pid]
            name = "driver" if pid == os.getpid() else f"actor {number}"
            row.notes.append(f"{what}: {name} {found:+.3f} MB per 1,000 rounds, open files {files[0]} → {files[-1]}")
            row.count(found < MAX_GROWTH, f"{what}: {name} grows by {found:.2f} MB per 1,000 rounds")
            row.count(files[-1] <= files[len(files) // 2] + 2, f"{what}: {name} has {files[-1]} files open")
        if self.stored:
            found = slope(self.stored)
            row.notes.append(f"{what}: object store {found:+.3f} MB per 1,000 rounds")
            row.count(found < MAX_GROWTH, f"{what}: the object store grows by {found:.2f} MB per 1,000 rounds")


def soak(short: bool, sabotage: bool = False, on_ray: bool = True) -> Row:
    """Run 10,000 rounds on Ray and 100,000 in process; short: a fiftieth. Sabotage: leak 20 kB per round."""
    row = Row("soak", f"< {MAX_GROWTH:g} MB per 1,000 rounds, no file, no actor more")
    rounds = 2_000 if short else 100_000
    leak: list[bytes] | None = [] if sabotage else None
    monitor = Monitor(rounds // 40, lambda engine: [os.getpid()], leak=leak)
    _run_monitored(LocalEngine, monitor, {
        **TINY, "rounds": rounds, "eval_every": rounds // 20, "checkpoint_every": rounds // 10,
        "algorithm": {"name": "dsgda_gt"},
    })
    monitor.judge(row, f"{rounds:,} rounds in process")
    if on_ray and not sabotage:
        _soak_ray(row, 600 if short else 10_000)
    return row


def _run_monitored(engine_class: Any, monitor: Monitor, settings: dict[str, Any]) -> None:
    advance = engine_class.advance

    def advance_and_sample(engine: Any, round_: int, last: int | None = None) -> None:
        advance(engine, round_, last)
        monitor(engine, round_, round_ if last is None else last)

    with mock.patch.object(engine_class, "advance", advance_and_sample), tempfile.TemporaryDirectory() as folder:
        run(Experiment(**settings), Path(folder) / "r")


def _soak_ray(row: Row, rounds: int) -> None:
    from dbo.platform.engine.ray_engine import RayEngine
    from dbo.platform.engine.ray_session import connect

    ray = connect(None)

    def used_store() -> float:
        total = ray.cluster_resources().get("object_store_memory", 0.0)
        return float(total - ray.available_resources().get("object_store_memory", total)) / 1e6

    def count_actors() -> int:
        return sum(actor["State"] == "ALIVE" for actor in ray._private.state.actors().values())

    before = count_actors()
    monitor = Monitor(rounds // 40, lambda engine: [os.getpid(), *engine.pids()], used_store)
    small = {
        **TINY, "rounds": rounds, "eval_every": rounds // 20, "checkpoint_every": rounds // 10,
        "engine": {"name": "ray", "nodes_per_actor": 2}, "algorithm": {"name": "dsgda_gt"},
    }
    _run_monitored(RayEngine, monitor, small)
    monitor.judge(row, f"{rounds:,} rounds on Ray")
    row.count(count_actors() <= before, "actors were left behind")
