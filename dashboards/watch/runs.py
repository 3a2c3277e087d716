"""What is known of the runs below a folder right now: the state behind the live page."""

import secrets
import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from datetime import datetime
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

from dbo.dashboards.palette import look
from dbo.dashboards.watch.settings import facts, flat, found, laid_out, members, named
from dbo.dashboards.watch.tail import Small, Tail, last_line, number, numbers, parsed, text
from dbo.platform.errors import InputError
from dbo.platform.runs.run_folder import in_use

SHOWN = (
    "round", "seconds", "comm_mb", "test_accuracy", "node_accuracy_mean", "node_accuracy_min", "test_loss",
    "upper_loss", "lower_loss", "consensus_x", "consensus_y", "hypergradient_norm",
)
ENDED = ("finished", "diverged", "failed", "stopped")
MOST_RUNS = 500
_POINTS = 40_000             # of all curves together, so that a page of many runs stays quick
_EVENTS = 200
_AGAIN = 0.3                 # seconds between two looks at the files


class Run:
    """One run's folder, followed."""

    def __init__(self, folder: Path, path: str) -> None:
        self.folder, self.path = folder, path
        self.id = sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        self.experiment: dict[str, str] = {}         # the resolved experiment, flat: algorithm.name → c2dfb
        self.label = path
        self.events: deque[dict[str, Any]] = deque(maxlen=_EVENTS)
        self.recoveries = 0
        self.problem = ""
        self.status = ""
        self.error = ""
        self.changed = self.reset = 0                # when, in the page's count of changes
        self.last: dict[str, Any] = {}
        self._files = {name: Small(folder / name) for name in ("experiment.yaml", "summary.json", "network.json")}
        self._metrics, self._events = Tail(folder / "metrics.jsonl"), Tail(folder / "events.jsonl")
        self._network: dict[str, Any] = {}
        self._state = ""
        self._forget()

    def _forget(self) -> None:
        self._rows: list[tuple[Any, ...]] = []
        self._numbers: list[int] = []
        self._recent: deque[tuple[float, int]] = deque(maxlen=20)
        self._seen, self._stride, self._lines = 0, 1, 0
        self.last, self.problem = {}, ""

    def refresh(self, now: int, most: int) -> bool:
        """Reads what is new, as change number `now`; whether there was any."""
        changed = self._read_small()
        void, lines = self._events.read()
        if void:
            self.events.clear()
            self.recoveries = 0
        for line in lines:
            event = parsed(line, "kind", str)
            if event is not None:
                self.events.append(event)
                self.recoveries += event["kind"] == "lost"
        changed |= void or bool(lines)
        void, lines = self._metrics.read()
        if void or not self.reset:
            self._forget()
            self.reset = now
        for line in lines:
            self._add(line, now)
        if len(self._rows) > most:
            while len(self._rows) > most:
                self._rows, self._numbers, self._stride = self._rows[::2], self._numbers[::2], self._stride * 2
            self.reset = now                # thinner than what the page has
        state = self.state
        changed |= void or bool(lines) or state != self._state or self.reset == now
        self._state = state
        if changed:
            self.changed = now
        return changed

    def _read_small(self) -> bool:
        changed = [name for name, file in self._files.items() if file.changed()]
        if "experiment.yaml" in changed:
            self.experiment = flat(self._files["experiment.yaml"].text())
        if "summary.json" in changed:
            summary = self._files["summary.json"].mapping()
            self.status, self.error = text(summary.get("status")), text(summary.get("error"), 2000)
        if "network.json" in changed:
            self._network = laid_out(self._files["network.json"].mapping())
        return bool(changed)

    def _add(self, line: bytes, now: int) -> None:
        self._lines += 1
        record = parsed(line, "round", int)
        if record is None or number(record["round"]) is None:
            self.problem = f"metrics.jsonl: line {self._lines} is damaged"
            return
        self.last = {name: number(record.get(name)) for name in (*SHOWN, "timestamp")}
        if self.last["timestamp"] is not None:
            self._recent.append((self.last["timestamp"], record["round"]))
        if self._seen % self._stride == 0:
            self._rows.append(tuple(self.last[name] for name in SHOWN))
            self._numbers.append(now)
        self._seen += 1

    @property
    def state(self) -> str:
        if self.status in ENDED:
            return self.status
        if not self.last and not self.experiment:
            return "waiting"
        if not in_use(self.folder):
            return "stopped"
        return "recovering" if self.events and self.events[-1]["kind"] == "lost" else "running"

    @property
    def rounds(self) -> int:
        value = self.experiment.get("rounds", "")
        return int(value) if value.isdecimal() and len(value) < 12 else 0

    def pace(self) -> tuple[float | None, float | None]:
        """Rounds per second lately, and seconds between evaluations; pauses of the run do not count."""
        began = max((number(e.get("timestamp")) or 0 for e in self.events if e["kind"] in ("started", "recovered")),
                    default=0)
        recent = [(at, round_) for at, round_ in self._recent if at >= began]
        if len(recent) < 2 or recent[-1][0] <= recent[0][0] or recent[-1][1] <= recent[0][1]:
            return None, None
        seconds = recent[-1][0] - recent[0][0]
        gap = max(b[0] - a[0] for a, b in pairwise(recent))
        return number((recent[-1][1] - recent[0][1]) / seconds), number(gap)

    def tell(self, since: int) -> dict[str, Any]:
        """What the page needs, if it has everything up to change number `since`."""
        reset = self.reset > since
        rate, gap = self.pace()
        first = 0 if reset else bisect_right(self._numbers, since)
        algorithm = self.experiment.get("algorithm.name", "")
        drawn = look(algorithm)
        return {
            "id": self.id, "path": text(self.path), "label": self.label, "state": self.state, "algorithm": algorithm,
            "light": drawn.light, "dark": drawn.dark, "dash": drawn.dash, "error": self.error, "problem": self.problem,
            "rounds": self.rounds, "rate": rate, "gap": gap, "recoveries": self.recoveries, "last": self.last,
            "facts": facts(self.experiment), "reset": reset, "rows": self._rows[first:],
        }

    def detail(self) -> dict[str, Any]:
        """The network, the nodes at the last evaluation, and what happened."""
        nodes = parsed(last_line(self.folder / "nodes.jsonl"), "round", int) or {}
        return {
            "id": self.id,
            "network": self._network,
            "nodes": {key: numbers(nodes.get(key)) for key in ("accuracy", "apart_x", "apart_y", "bytes")}
            | {"round": number(nodes.get("round"))},
            "events": [
                {key: number(event.get(key)) for key in ("timestamp", "after_round", "resumed_after", "seconds")}
                | {key: text(event.get(key)) for key in ("kind", "reason", "status", "error", "source")}
                | {"blocks": numbers(event.get("blocks"))}
                for event in self.events
            ],
        }


class Watched:
    """All runs of a folder: the run in it, the members of its group, or whatever runs lie below it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.boot = secrets.token_hex(8)      # another one after a restart of the server: the page begins anew
        self._group_file = Small(folder / "group.json")
        self._group: dict[str, Any] = {}
        self._runs: dict[str, Run] = {}
        self._order: list[str] = []
        self._left_out = 0
        self._count, self._looked, self._searched = 0, -1.0, -1.0
        self._lock = threading.Lock()
        if not folder.is_dir():
            raise InputError(f"{folder}: is not a folder; must be the folder of a run, a comparison or a sweep")
        begun = any((folder / name).exists() for name in ("group.json", ".lock")) or next(found(folder), None)
        if not begun and any(folder.iterdir()):
            raise InputError(f"{folder}: holds no run; must be the folder of a run, a comparison or a sweep, or empty")

    def tell(self, boot: str, since: int) -> dict[str, Any]:
        """What has changed since change number `since` of this server, everything if the page knows another one."""
        with self._lock:
            self._refresh()
            since = since if boot == self.boot else 0
            runs = [self._runs[path] for path in self._order]
            return {
                "boot": self.boot, "count": self._count, "now": time.time(), "columns": SHOWN,
                "folder": text(str(self.folder)), "left_out": self._left_out, **self._told_group(runs),
                "order": [run.id for run in runs],
                "runs": [run.tell(since) for run in runs if run.changed > since],
            }

    def detail(self, id_: str) -> dict[str, Any] | None:
        with self._lock:
            self._refresh()
            return next((run.detail() for run in self._runs.values() if run.id == id_), None)

    def _refresh(self) -> None:
        if time.monotonic() - self._looked < _AGAIN:
            return
        now = self._count + 1
        changed = self._search()
        most = max(100, min(2000, _POINTS // max(1, len(self._order))))
        for path in self._order:
            changed |= self._runs[path].refresh(now, most)
        if changed:
            self._count = now
            self._name(now)
        self._looked = time.monotonic()

    def _search(self) -> bool:
        """Which runs there are; a folder without a group is searched, not too often."""
        grouped = self._group_file.changed()
        if grouped:
            self._group = self._group_file.mapping()
        if isinstance(self._group.get("members"), list):
            paths = list(members(self.folder, self._group)) if grouped else None
        elif grouped or time.monotonic() - self._searched > 2:
            self._searched = time.monotonic()
            paths = sorted(found(self.folder)) or ["."]
        else:
            paths = None
        if paths is None:
            return grouped
        self._left_out, order = max(0, len(paths) - MOST_RUNS), paths[:MOST_RUNS]
        changed, self._order = order != self._order, order
        self._runs = {path: self._runs.get(path) or Run(self.folder / path, path) for path in order}
        return changed or grouped

    def _name(self, now: int) -> None:
        labels = named({run.path: run.experiment for run in self._runs.values()})
        for path, run in self._runs.items():
            if run.label != labels[path]:
                run.label, run.changed = labels[path], now

    def _told_group(self, runs: list[Run]) -> dict[str, Any]:
        group, states = self._group, Counter(run.state for run in runs)
        return {
            "kind": text(group.get("kind")), "name": text(group.get("name")) or text(self.folder.resolve().name),
            "status": text(group.get("status")), "target": text(group.get("target")), "states": dict(states),
            "left": self._left(runs),
        }

    def _left(self, runs: list[Run]) -> float | None:
        """Seconds to the end of a group, at the pace of its rounds since it was started."""
        try:
            started = datetime.fromisoformat(text(self._group.get("started"))).timestamp()
        except (ValueError, OverflowError, OSError):
            return None
        known = [run.rounds for run in runs if run.rounds]
        now = [run for run in runs if (run.last.get("timestamp") or 0) >= started and run.rounds]
        done = sum(run.last["round"] for run in now)
        typical = sum(known) / len(known) if known else 0
        left = sum((run.rounds or typical) - (run.last.get("round") or 0) for run in runs if run.state not in ENDED)
        return number(left * (time.time() - started) / done) if done > 0 else None
