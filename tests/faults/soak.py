"""Test 12, soak: many rounds, and what grows meanwhile: memory, object store, open files, actors."""

import gc
import os
import tempfile
from pathlib import Path
from typing import Any

from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.base import Engine
from dbo.platform.engine.local import LocalEngine
from dbo.platform.runs.runner import run
from tests.faults.row import TINY, Row

MOST = 1.0          # MB per 1,000 rounds


def resident(pid: int) -> float:
    """MB of memory that a process really has."""
    pages = int((Path("/proc") / str(pid) / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def files(pid: int) -> int:
    return len(list((Path("/proc") / str(pid) / "fd").iterdir()))


def slope(marks: list[tuple[int, float]]) -> float:
    """MB per 1,000 rounds: least squares over the second half, when everything that is kept has been taken."""
    late = marks[len(marks) // 2 :]
    mean_x, mean_y = (sum(v[i] for v in late) / len(late) for i in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in late)
    return 1000 * sum((x - mean_x) * (y - mean_y) for x, y in late) / spread if spread else 0.0


class Watch:
    """Looks at processes every so many rounds, from inside `advance`."""

    def __init__(self, every: int, pids: Any, store: Any = None, leak: list[bytes] | None = None) -> None:
        self.every, self.pids, self.store, self.leak = every, pids, store, leak
        self.memory: dict[int, list[tuple[int, float]]] = {}
        self.handles: dict[int, list[int]] = {}
        self.stored: list[tuple[int, float]] = []

    def __call__(self, engine: Engine, round_: int) -> None:
        if self.leak is not None:
            self.leak.append(os.urandom(20_000))
        if round_ % self.every:
            return
        gc.collect()
        for pid in self.pids(engine):
            self.memory.setdefault(pid, []).append((round_, resident(pid)))
            self.handles.setdefault(pid, []).append(files(pid))
        if self.store is not None:
            self.stored.append((round_, self.store()))

    def judge(self, row: Row, what: str) -> None:
        for number, (pid, marks) in enumerate(self.memory.items()):
            found, opened = slope(marks), self.handles[pid]
            name = "driver" if pid == os.getpid() else f"actor {number}"
            row.notes.append(f"{what}: {name} {found:+.3f} MB per 1,000 rounds, open files {opened[0]} → {opened[-1]}")
            row.count(found < MOST, f"{what}: {name} grows by {found:.2f} MB per 1,000 rounds")
            row.count(opened[-1] <= opened[len(opened) // 2] + 2, f"{what}: {name} has {opened[-1]} files open")
        if self.stored:
            found = slope(self.stored)
            row.notes.append(f"{what}: object store {found:+.3f} MB per 1,000 rounds")
            row.count(found < MOST, f"{what}: the object store grows by {found:.2f} MB per 1,000 rounds")


def soak(short: bool, sabotage: bool = False, on_ray: bool = True) -> Row:
    """10,000 rounds on Ray and 100,000 in process; short: a fiftieth. Sabotage: 20 kB are kept per round."""
    row = Row("soak", f"< {MOST:g} MB per 1,000 rounds, no file, no actor more")
    rounds = 2_000 if short else 100_000
    leak: list[bytes] | None = [] if sabotage else None
    watch = Watch(rounds // 40, lambda engine: [os.getpid()], leak=leak)
    _watched(LocalEngine, watch, {
        **TINY, "rounds": rounds, "eval_every": rounds // 20, "checkpoint_every": rounds // 10,
        "algorithm": {"name": "dsgda_gt"},
    })
    watch.judge(row, f"{rounds:,} rounds in process")
    if on_ray and not sabotage:
        _ray(row, 600 if short else 10_000)
    return row


def _watched(kind: Any, watch: Watch, settings: dict[str, Any]) -> None:
    advance = kind.advance

    def seen(engine: Any, round_: int) -> None:
        advance(engine, round_)
        watch(engine, round_)

    kind.advance = seen
    try:
        with tempfile.TemporaryDirectory() as place:
            run(Experiment(**settings), Path(place) / "r")
    finally:
        kind.advance = advance


def _ray(row: Row, rounds: int) -> None:
    from dbo.platform.engine.ray_engine import RayEngine
    from dbo.platform.engine.ray_session import connect

    ray = connect(None)

    def stored() -> float:
        total = ray.cluster_resources().get("object_store_memory", 0.0)
        return float(total - ray.available_resources().get("object_store_memory", total)) / 1e6

    def actors() -> int:
        return sum(actor["State"] == "ALIVE" for actor in ray._private.state.actors().values())

    before = actors()
    watch = Watch(rounds // 40, lambda engine: [os.getpid(), *engine.pids()], stored)
    small = {
        **TINY, "rounds": rounds, "eval_every": rounds // 20, "checkpoint_every": rounds // 10,
        "engine": {"name": "ray", "nodes_per_actor": 2}, "algorithm": {"name": "dsgda_gt"},
    }
    _watched(RayEngine, watch, small)
    watch.judge(row, f"{rounds:,} rounds on Ray")
    row.count(actors() <= before, "actors were left behind")
