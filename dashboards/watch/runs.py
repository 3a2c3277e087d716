"""Follow the runs below a folder: the state behind the live page."""

import secrets
import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from contextlib import suppress
from datetime import datetime
from functools import partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

from dbo.dashboards.palette import get_style
from dbo.dashboards.watch.settings import (
    describe_network,
    describe_settings,
    find_runs,
    flatten_settings,
    label_runs,
    list_parameters,
)
from dbo.dashboards.watch.tail import SmallFile, Tail, last_line, number, numbers, text, try_parse
from dbo.platform.errors import InputError
from dbo.platform.runs import schema
from dbo.platform.runs.node_lines import read_sent
from dbo.platform.runs.run_folder import GROUP_FILE, RunFolder, is_locked, is_member
from dbo.platform.runs.schema import Event, Group, Record

SHOWN = (
    "round", "seconds", "comm_mb", "test_accuracy", "node_accuracy_mean", "node_accuracy_min", "test_loss",
    "upper_loss", "lower_loss", "consensus_x", "consensus_y", "direction_norm",
)
MAX_RUNS = 500
_MAX_POINTS = 40_000         # of all curves together, so that a page with many runs stays fast
_MAX_EVENTS = 200
_REFRESH = 0.3               # seconds between two looks at the files
_SEARCH = 2.0                # seconds between two searches for new runs

Values = dict[str, float | int | None]


class WatchedRun:
    """One run folder, followed while the run is running."""

    def __init__(self, folder: Path, path: str) -> None:
        self.folder, self.path = folder, path
        self.id = sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        self.experiment: dict[str, str] = {}         # flat: algorithm.name → c2dfb
        self.label = path
        self.events: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self.recoveries = 0
        self.problem = ""
        self.status = ""
        self.error = ""
        self.changed = self.reset = 0                # numbers in the folder's count of changes
        self.last: Values = {}
        files = RunFolder(folder)
        self._experiment, self._summary = SmallFile(files.experiment), SmallFile(files.summary)
        self._network_file = SmallFile(files.network)
        self._metrics, self._events, self._nodes = Tail(files.metrics), Tail(files.events), files.nodes
        self._network: dict[str, Any] = {}
        self._state = ""
        self._reset_curve()

    def _reset_curve(self) -> None:
        self._rows: list[tuple[float | int | None, ...]] = []
        self._numbers: list[int] = []
        self._recent: deque[tuple[float, int]] = deque(maxlen=20)
        self._seen, self._stride, self._lines = 0, 1, 0
        self.last, self.problem = {}, ""

    def refresh(self, now: int, most: int) -> bool:
        """Read what is new, as change number `now`, and keep at most `most` points; return whether there was any."""
        changed = self._read_small_files()
        is_void, lines = self._events.read()
        if is_void:
            self.events.clear()
            self.recoveries = 0
        for line in lines:
            event = try_parse(schema.parse_event, line)
            if event is not None:
                self.events.append(event)
                self.recoveries += event.kind == "lost"
        changed |= is_void or bool(lines)
        is_void, lines = self._metrics.read()
        if is_void or not self.reset:
            self._reset_curve()
            self.reset = now
        for line in lines:
            self._add(line, now)
        if len(self._rows) > most:
            while len(self._rows) > most:
                self._rows, self._numbers, self._stride = self._rows[::2], self._numbers[::2], self._stride * 2
            self.reset = now                # thinner than what the page has
        state = self.state
        changed |= is_void or bool(lines) or state != self._state or self.reset == now
        self._state = state
        if changed:
            self.changed = now
        return changed

    def _read_small_files(self) -> bool:
        changes = [file.has_changed() for file in (self._experiment, self._summary, self._network_file)]
        if changes[0]:
            self.experiment = flatten_settings(self._experiment.read_text())
        if changes[1]:
            summary = try_parse(schema.parse_summary, self._summary.read_text())
            self.status, self.error = (text(summary.status), text(summary.error, 2000)) if summary else ("", "")
        if changes[2]:
            parse = partial(schema.parse_network, tolerant=True)
            self._network = describe_network(try_parse(parse, self._network_file.read_text()))
        return any(changes)

    def _add(self, line: bytes, now: int) -> None:
        self._lines += 1
        record = try_parse(schema.parse_record, line)
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
    def has_ended(self) -> bool:
        return self.state in schema.STATUSES

    @property
    def state(self) -> str:
        if self.status in schema.STATUSES:
            return self.status
        if not self.last and not self.experiment:
            return "waiting"
        if not is_locked(self.folder):
            return "stopped"
        return "recovering" if self.events and self.events[-1].kind == "lost" else "running"

    @property
    def rounds(self) -> int:
        value = self.experiment.get("rounds", "")
        return int(value) if value.isdecimal() and len(value) < 12 else 0

    def measure_pace(self) -> tuple[float | None, float | None]:
        """Return recent rounds per second and the longest time between evaluations; pauses do not count."""
        start = max((event.timestamp for event in self.events if event.kind in ("started", "recovered")), default=0)
        recent = [(time_, round_) for time_, round_ in self._recent if time_ >= start]
        if len(recent) < 2 or recent[-1][0] <= recent[0][0] or recent[-1][1] <= recent[0][1]:
            return None, None
        seconds = recent[-1][0] - recent[0][0]
        gap = max(b[0] - a[0] for a, b in pairwise(recent))
        return number((recent[-1][1] - recent[0][1]) / seconds), number(gap)

    def get_update(self, since: int) -> dict[str, Any]:
        """Return what a page lacks that has everything up to change number `since`."""
        is_reset = self.reset > since
        rate, gap = self.measure_pace()
        first = 0 if is_reset else bisect_right(self._numbers, since)
        algorithm = self.experiment.get("label") or self.experiment.get("algorithm.name", "")
        style = get_style(algorithm)
        return {
            "id": self.id, "path": text(self.path), "label": self.label, "state": self.state, "algorithm": algorithm,
            "light": style.light, "dark": style.dark, "dash": style.dash, "error": self.error, "problem": self.problem,
            "rounds": self.rounds, "rate": rate, "gap": gap, "recoveries": self.recoveries, "last": self.last,
            "facts": describe_settings(self.experiment), "parameters": list_parameters(self.experiment),
            "reset": is_reset, "rows": self._rows[first:],
        }

    def get_details(self) -> dict[str, Any]:
        """Return the network, the nodes at the last evaluation, and the events."""
        nodes: Record = try_parse(schema.parse_record, last_line(self._nodes)) or {}
        with suppress(ValueError):
            sent = read_sent(nodes)
            nodes["bytes"] = None if sent is None else sent.tolist()
        return {
            "id": self.id,
            "network": self._network,
            "nodes": {key: numbers(nodes.get(key)) for key in ("accuracy", "apart_x", "apart_y", "bytes", "nodes")}
            | {"round": number(nodes.get("round"))},
            "events": [
                {
                    "kind": text(event.kind), "timestamp": event.timestamp, "after_round": event.after_round,
                    "resumed_after": event.resumed_after, "seconds": event.seconds, "reason": text(event.reason),
                    "status": text(event.status), "error": text(event.error), "source": text(event.source),
                    "blocks": list(event.blocks) or None,
                }
                for event in self.events
            ],
        }


class WatchedFolder:
    """All runs of a folder: the run in it, the members of its group, or the runs below it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.boot = secrets.token_hex(8)      # another one after a restart of the server: the page starts afresh
        self._group_file = SmallFile(folder / GROUP_FILE)
        self._group: Group | None = None
        self._runs: dict[str, WatchedRun] = {}
        self._order: list[str] = []
        self._left_out = 0
        self._count, self._refreshed, self._searched = 0, -1.0, -1.0
        self._lock = threading.Lock()
        if not folder.exists():
            return              # it is waited for: a run that starts later creates it
        if not folder.is_dir():
            raise InputError(f"{folder}: is not a folder; must be the folder of a run, a comparison or a sweep")
        has_runs = any((folder / name).exists() for name in (GROUP_FILE, ".lock")) or next(find_runs(folder), None)
        if not has_runs and any(folder.iterdir()):
            raise InputError(f"{folder}: holds no run; must be the folder of a run, a comparison or a sweep, or empty")

    def get_updates(self, boot: str, since: int) -> dict[str, Any]:
        """Return what has changed since change number `since`; everything if the page knows another server."""
        with self._lock:
            self._refresh()
            since = since if boot == self.boot else 0
            runs = [self._runs[path] for path in self._order]
            return {
                "boot": self.boot, "count": self._count, "now": time.time(), "columns": SHOWN,
                "folder": text(str(self.folder)), "left_out": self._left_out,
                "waiting": all(run.state == "waiting" for run in runs), **self._describe_group(runs),
                "order": [run.id for run in runs],
                "runs": [run.get_update(since) for run in runs if run.changed > since],
            }

    def get_details(self, id_: str) -> dict[str, Any] | None:
        """Return the details of one run; None if there is no such run."""
        with self._lock:
            self._refresh()
            return next((run.get_details() for run in self._runs.values() if run.id == id_), None)

    def _refresh(self) -> None:
        if time.monotonic() - self._refreshed < _REFRESH:
            return
        now = self._count + 1
        changed = self._search()
        most = max(100, min(2000, _MAX_POINTS // max(1, len(self._order))))
        for path in self._order:
            changed |= self._runs[path].refresh(now, most)
        if changed:
            self._count = now
            self._label(now)
        self._refreshed = time.monotonic()

    def _search(self) -> bool:
        """Find out which runs there are; a folder without a group is searched, not too often."""
        is_new = self._group_file.has_changed()
        if is_new:
            self._group = try_parse(partial(schema.parse_group, tolerant=True), self._group_file.read_text())
        if self._group is not None:
            members = dict.fromkeys(self._group.members)
            paths = [member for member in members if is_member(self.folder, member)] if is_new else None
        elif is_new or time.monotonic() - self._searched > _SEARCH:
            self._searched = time.monotonic()
            paths = sorted(find_runs(self.folder)) or ["."]
        else:
            paths = None
        if paths is None:
            return is_new
        self._left_out, order = max(0, len(paths) - MAX_RUNS), paths[:MAX_RUNS]
        changed, self._order = order != self._order, order
        self._runs = {path: self._runs.get(path) or WatchedRun(self.folder / path, path) for path in order}
        return changed or is_new

    def _label(self, now: int) -> None:
        labels = label_runs({run.path: run.experiment for run in self._runs.values()})
        if labels.get(".") == ".":           # nothing has started there yet
            labels["."] = text(self.folder.resolve().name)
        for path, run in self._runs.items():
            if run.label != labels[path]:
                run.label, run.changed = labels[path], now

    def _describe_group(self, runs: list[WatchedRun]) -> dict[str, Any]:
        group, states = self._group, Counter(run.state for run in runs)
        facts = {"kind": "", "name": text(self.folder.resolve().name), "status": "", "target": ""}
        if group is not None:
            facts = {
                "kind": text(group.kind), "name": text(group.name) or facts["name"], "status": text(group.status),
                "target": text(group.target),
            }
        return {**facts, "states": dict(states), "left": self._estimate_time_left(runs)}

    def _estimate_time_left(self, runs: list[WatchedRun]) -> float | None:
        """Return the seconds to the end of a group, at the pace of its rounds since it was started."""
        try:
            started = datetime.fromisoformat(self._group.started if self._group else "").timestamp()
        except (ValueError, OverflowError, OSError):
            return None
        known = [run.rounds for run in runs if run.rounds]
        current = [run for run in runs if (run.last.get("timestamp") or 0) >= started and run.rounds]
        done = sum(run.last["round"] or 0 for run in current)
        typical = sum(known) / len(known) if known else 0
        left = sum((run.rounds or typical) - (run.last.get("round") or 0) for run in runs if not run.has_ended)
        return number(left * (time.time() - started) / done) if done > 0 else None
