"""The live page's server: running, ended, recovered, restarted, damaged and hostile runs; HTTP; the command."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dbo.dashboards.watch import runs, server
from dbo.dashboards.watch.runs import WatchedFolder
from dbo.dashboards.watch.server import serve_live_page
from dbo.dashboards.watch.tail import Tail, last_line
from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.runs import runner
from dbo.platform.runs.run_folder import RunFolder
from dbo.platform.runs.schema import COLUMNS, Summary

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"
DBO = [sys.executable, "-c", "from dbo.platform.cli.main import main; main()"]


@pytest.fixture(autouse=True)
def _refresh_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request reads the files."""
    monkeypatch.setattr(runs, "_REFRESH", 0.0)


def start_run(folder: Path, rounds: int = 10, **changes: str) -> RunFolder:
    """Write the folder of a run that has started and not evaluated anything."""
    run = RunFolder(folder)
    run.acquire()
    settings = {"name": "n", "rounds": rounds, "algorithm": {"name": "c2dfb"}, "nodes": 3, **changes}
    run.experiment.write_text(json.dumps(settings))          # JSON is YAML
    run.write_network({"nodes": 3, "links": 3, "spectral_gap": 0.5, "edges": [[0, 1], [1, 2], [0, 2]]})
    run.log_event("started", after_round=0, rounds=rounds)
    return run


def evaluate(run: RunFolder, *rounds: int, at: float | None = None) -> None:
    for round_ in rounds:
        record = {**dict.fromkeys(COLUMNS, 0.5), "round": round_, "comm_mb": 2.0 * round_}
        record["timestamp"] = (at or time.time()) + round_
        run.append(record, {"round": round_, "accuracy": [0.1, 0.2, 0.3], "apart_x": [1.0, 2.0, 3.0],
                            "apart_y": [0.0] * 3, "bytes": [round_] * 3, "channels": {}})


class Page:
    """Does what the page's script does: keeps what it has, and requests the rest."""

    def __init__(self, watched: WatchedFolder) -> None:
        self.watched, self.boot, self.count = watched, "", 0
        self.runs: dict[str, dict[str, Any]] = {}
        self.received = 0

    def poll(self) -> dict[str, dict[str, Any]]:
        update = json.loads(json.dumps(self.watched.get_updates(self.boot, self.count), allow_nan=False))
        if update["boot"] != self.boot:
            self.runs.clear()
        self.boot, self.count, self.group = update["boot"], update["count"], update
        self.received = sum(len(run["rows"]) for run in update["runs"])
        for run in update["runs"]:
            before = [] if run["reset"] else self.runs[run["path"]]["rows"]
            self.runs[run["path"]] = {**run, "rows": before + run["rows"]}
        return self.runs

    def rounds(self, path: str = ".") -> list[int]:
        return [row[0] for row in self.poll()[path]["rows"]]


def test_run_is_followed_from_before_its_first_line_to_its_end(tmp_path: Path) -> None:
    """An empty folder, then new lines, each sent once, then the final state; later requests get nothing."""
    page = Page(WatchedFolder(tmp_path))
    waiting = page.poll()["."]
    assert (waiting["state"], waiting["label"]) == ("waiting", tmp_path.name)
    run = start_run(tmp_path)
    assert (page.rounds(), page.runs["."]["state"]) == ([], "running")
    evaluate(run, 0, 1, 2)
    assert page.rounds() == [0, 1, 2]
    with open(run.metrics, "a") as file:
        file.write('{"round": 3, "sec')          # in the middle of a line
    assert (page.rounds(), page.received, page.runs["."]["problem"]) == ([0, 1, 2], 0, "")
    run.rollback(2)
    evaluate(run, 3, 4)
    assert page.rounds() == [0, 1, 2, 3, 4]
    assert page.received == 2
    run.write_summary(Summary("finished"))
    run.log_event("ended", status="finished")
    run.release()
    assert page.rounds() == [0, 1, 2, 3, 4]
    assert (page.runs["."]["state"], page.received) == ("finished", 0)
    assert page.poll()
    assert page.group["runs"] == []


def test_recovery_removes_lines(tmp_path: Path) -> None:
    """After a rollback the later rounds disappear from the page, and come once when they are replayed."""
    run = start_run(tmp_path)
    page = Page(WatchedFolder(tmp_path))
    evaluate(run, 0, 1, 2, 3, 4)
    assert page.rounds() == [0, 1, 2, 3, 4]
    run.log_event("lost", after_round=4, blocks=[1], reason="ActorDiedError")
    assert page.poll()["."]["state"] == "recovering"
    run.rollback(2)
    run.log_event("recovered", after_round=4, blocks=[1], reason="ActorDiedError", resumed_after=2, seconds=1.5)
    assert page.rounds() == [0, 1, 2]
    evaluate(run, 3, 4, 5)
    assert page.rounds() == [0, 1, 2, 3, 4, 5]
    assert (page.runs["."]["recoveries"], page.runs["."]["state"]) == (1, "running")
    # Truncated and grown beyond the old length between two requests.
    run.rollback(3)
    evaluate(run, 4, 5, 6, 7, at=1.0)
    assert page.rounds() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_crashed_run_is_not_running(tmp_path: Path) -> None:
    """A lock file that no process holds means stopped, also during a recovery; resumed, the run is running again."""
    run = start_run(tmp_path)
    page = Page(WatchedFolder(tmp_path))
    evaluate(run, 0, 1)
    assert page.poll()["."]["state"] == "running"
    run.release()
    (tmp_path / ".lock").touch()                # a process that is killed cannot remove it
    assert page.poll()["."]["state"] == "stopped"
    run.log_event("lost", after_round=1, blocks=[1], reason="ActorDiedError")
    assert page.poll()["."]["state"] == "stopped"
    run.acquire()
    assert page.poll()["."]["state"] == "recovering"


def test_restarted_run_replaces_the_old_one(tmp_path: Path) -> None:
    """The folder is emptied and filled again, even to the same length: nothing old, nothing twice."""
    run = start_run(tmp_path)
    page = Page(WatchedFolder(tmp_path))
    evaluate(run, 0, 1, 2, at=1000.0)
    run.write_summary(Summary("diverged", error="round 3: x is not finite"))
    assert (page.rounds(), page.runs["."]["state"]) == ([0, 1, 2], "diverged")
    assert page.runs["."]["error"] == "round 3: x is not finite"
    run.clear()
    run.release()
    run = start_run(tmp_path)
    evaluate(run, 0, 1, 2, at=2000.0)
    assert page.rounds() == [0, 1, 2]
    assert page.runs["."]["last"]["timestamp"] == 2002.0
    assert (page.runs["."]["state"], page.runs["."]["error"]) == ("running", "")
    run.clear()
    assert page.rounds() == []


def test_restarted_server_sends_everything_once(tmp_path: Path) -> None:
    """A page that knows another server drops what it has."""
    evaluate(start_run(tmp_path), 0, 1)
    page = Page(WatchedFolder(tmp_path))
    assert page.rounds() == [0, 1]
    page.watched = WatchedFolder(tmp_path)
    assert page.rounds() == [0, 1]
    assert page.received == 2


def test_long_runs_are_thinned_and_end_with_their_last_line(tmp_path: Path) -> None:
    """The page never gets more than its share of points; the thinner curve replaces what it has."""
    run = start_run(tmp_path, rounds=9000)
    page = Page(WatchedFolder(tmp_path))
    for start in range(0, 9000, 1500):
        evaluate(run, *range(start, start + 1500))
        rounds = page.rounds()
        assert len(rounds) <= 2000
        assert rounds == sorted(set(rounds))
        assert len({b - a for a, b in pairwise(rounds)}) == 1
    assert page.runs["."]["last"]["round"] == 8999


def test_time_left_does_not_count_pauses(tmp_path: Path) -> None:
    """The pace is that of the lines since the last start or recovery."""
    run = start_run(tmp_path)
    page = Page(WatchedFolder(tmp_path))
    evaluate(run, 0, 1, at=1.0)
    assert page.poll()["."]["rate"] is None
    evaluate(run, 2, 3, 4, at=time.time() + 10)
    assert page.poll()["."]["rate"] == pytest.approx(1.0, rel=1e-3)


def test_members_of_a_group_are_listed(tmp_path: Path) -> None:
    """In the group's order, also without a line; labels name the differences; folders outside are left out."""
    (tmp_path / "group.json").write_text(json.dumps({
        "kind": "sweep", "name": "grid", "status": "running", "target": "test_accuracy=0.7",
        "started": "2026-01-01T00:00:00",
        "members": ["cells/b", "cells/a", "cells/c", "../other", "/etc", "cells/a", 3, "a\0b"],
    }))
    recorded = []
    for cell, lam in (("a", 1), ("b", 2)):
        recorded.append(start_run(tmp_path / "cells" / cell, algorithm={"name": "c2dfb", "lam": lam}))  # type: ignore[arg-type]
        evaluate(recorded[-1], 0, 1)
    page = Page(WatchedFolder(tmp_path))
    page.poll()
    assert list(page.runs) == ["cells/b", "cells/a", "cells/c"]
    assert [run["label"] for run in page.runs.values()] == ["c2dfb lam=2", "c2dfb lam=1", "cells/c"]
    assert page.group["states"] == {"running": 2, "waiting": 1}
    assert (page.group["kind"], page.group["name"], page.group["target"]) == ("sweep", "grid", "test_accuracy=0.7")
    assert page.group["left"] > 0
    (tmp_path / "group.json").write_text(json.dumps({"kind": "sweep", "members": ["cells/c", "cells/d"]}))
    page.poll()
    assert len(page.group["order"]) == 2


def test_runs_are_found_below_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some levels down, new ones too; if there are too many, the page gets the number of those left out."""
    evaluate(start_run(tmp_path / "one"), 0)
    evaluate(start_run(tmp_path / "deep" / "two", algorithm={"name": "mdbo"}), 0)  # type: ignore[arg-type]
    page = Page(WatchedFolder(tmp_path))
    assert {path: run["label"] for path, run in page.poll().items()} == {"deep/two": "mdbo", "one": "c2dfb"}
    start_run(tmp_path / "three", seed="1")
    page.watched._searched = -10.0
    assert page.poll()["three"]["label"] == "c2dfb seed=1"
    monkeypatch.setattr(runs, "MAX_RUNS", 2)
    page.watched._searched = -10.0
    page.poll()
    assert (len(page.group["order"]), page.group["left_out"]) == (2, 1)


@pytest.mark.parametrize("damage", [
    b"garbage\n", b"[1, 2]\n", b'{"round": "x"}\n', b"\xff\xfe\n", pytest.param(b"[" * 100_000 + b"\n", id="nested"),
])
def test_damaged_files_are_shown_as_damaged(tmp_path: Path, damage: bytes) -> None:
    """A bad line is reported with its number; the lines around it are shown; invalid numbers are left out."""
    run = start_run(tmp_path)
    evaluate(run, 0)
    with open(run.metrics, "ab") as file:
        file.write(damage + b'{"round": 2, "upper_loss": NaN, "test_loss": 1e999, "seconds": true, "comm_mb": "x"}\n')
    for name in ("nodes.jsonl", "events.jsonl", "experiment.yaml", "network.json", "summary.json", "group.json"):
        (tmp_path / name).write_bytes(damage)
    watched = WatchedFolder(tmp_path)
    page = Page(watched)
    shown = page.poll()["."]
    assert shown["problem"] == "metrics.jsonl: line 2 is damaged"
    assert [row[0] for row in shown["rows"]] == [0, 2]
    assert shown["rows"][1][1:] == [None] * (len(runs.SHOWN) - 1)
    detail = watched.get_details(shown["id"])
    assert json.dumps(detail, allow_nan=False)


def test_hostile_settings_stay_small(tmp_path: Path) -> None:
    """Aliases that would expand to gigabytes, and values of odd types, do not reach the page."""
    run = start_run(tmp_path)
    doubled = "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
    odd = "algorithm: {name: c2dfb, lam: [1, 2], step: 2026-01-01}\nrounds: .inf\n"
    for settings, facts in ((f"name: x\na0: &a0 [x]\n{doubled}", []), (f"name: {EVIL!r}\n{odd}", [EVIL])):
        run.experiment.write_text(settings)
        shown = Page(WatchedFolder(tmp_path)).poll()["."]
        assert shown["facts"] == facts
        assert shown["rounds"] == 0
        assert len(json.dumps(shown)) < 5000


@pytest.mark.parametrize("value", [
    "\\ud800", "1e999", "0x" + "f" * 9000, "9" * 400, "17" + "0" * 307, "-1e308", "1e308", "[]",
    "{a: {b: {c: {d: 1}}}}", "0001-01-01",
])
def test_hostile_values_do_not_break_the_page(tmp_path: Path, value: str) -> None:
    """Half characters, numbers out of range and dates, wherever a file can have them: the response is still JSON."""
    name = os.fsdecode(b"\xff\xfe")
    run, now = start_run(tmp_path / name), time.time()
    evaluate(run, 0, at=now)
    quoted = json.dumps(value) if "\\" not in value else f'"{value}"'
    bare = value if value[0] in "-19" and len(value) < 500 and "-0" not in value else quoted
    for file in (run.metrics, run.nodes):
        with open(file, "a") as lines:
            lines.write(f'{{"round": 5, "timestamp": 1e308, "seconds": {bare}, "apart_x": [{bare}]}}\n')
            lines.write(f'{{"round": {bare}, "timestamp": {bare}}}\n{{"round": {bare}, "timestamp": {now + 0.5}}}\n')
    with open(run.events, "a") as lines:
        lines.write(f'{{"kind": "lost", "timestamp": {bare}, "reason": {quoted}, "blocks": [{bare}]}}\n')
    run.experiment.write_text(
        f"? {quoted}\n: {value}\nname: {quoted}\nrounds: {value}\nalgorithm: {{name: {quoted}, lam: {value}}}\n")
    run.network.write_text(f'{{"nodes": 4, "links": {bare}, "edges": [[0, 1], [{bare}, 2], {bare}]}}')
    run.summary.write_text(f'{{"status": {quoted}, "error": {quoted}}}')
    (tmp_path / "group.json").write_text(
        f'{{"kind": {quoted}, "name": {bare}, "started": {quoted}, "target": {quoted}, "members": [{quoted}]}}')
    for folder in (tmp_path, tmp_path / name, tmp_path):
        watched = WatchedFolder(folder)
        for data in (watched.get_updates("", 0), *(watched.get_details(run.id) for run in watched._runs.values())):
            assert json.dumps(data, allow_nan=False, ensure_ascii=False).encode()
        (tmp_path / "group.json").unlink(missing_ok=True)


def test_pipes_and_devices_do_not_block(tmp_path: Path) -> None:
    """What is not a regular file counts as missing."""
    run = start_run(tmp_path)
    os.mkfifo(run.metrics)
    os.mkfifo(run.nodes)
    run.summary.symlink_to("/dev/zero")
    watched = WatchedFolder(tmp_path)
    shown = Page(watched).poll()["."]
    assert (shown["state"], shown["rows"]) == ("running", [])
    assert watched.get_details(shown["id"])


def test_artifacts_and_checkpoints_are_no_runs(tmp_path: Path) -> None:
    """MLflow keeps copies of the run's files, below the same folder."""
    evaluate(start_run(tmp_path / "one"), 0)
    evaluate(start_run(tmp_path / "mlartifacts" / "1" / "artifacts"), 0)
    evaluate(start_run(tmp_path / "one" / "checkpoints" / "x"), 0)
    assert list(Page(WatchedFolder(tmp_path)).poll()) == ["one"]


def test_details_of_a_run_are_complete(tmp_path: Path) -> None:
    """The network with a position for each node, the nodes' last line, and the events."""
    run = start_run(tmp_path)
    run.log_event("continued", source="/runs/shorter", after_round=3)
    evaluate(run, 0, 1, 2)
    run.log_event("ended", status="failed", error=EVIL)
    watched = WatchedFolder(tmp_path)
    detail = watched.get_details(Page(watched).poll()["."]["id"])
    assert detail is not None
    assert (detail["network"]["nodes"], len(detail["network"]["positions"])) == (3, 3)
    assert detail["nodes"] == {
        "round": 2, "accuracy": [0.1, 0.2, 0.3], "apart_x": [1.0, 2.0, 3.0], "apart_y": [0.0] * 3, "bytes": [2, 2, 2],
        "nodes": None,
    }
    assert [event["kind"] for event in detail["events"]] == ["started", "continued", "ended"]
    assert (detail["events"][1]["source"], detail["events"][1]["after_round"]) == ("/runs/shorter", 3)
    assert detail["events"][2]["error"] == EVIL
    assert watched.get_details("0" * 16) is None


def test_tail_and_last_line_return_complete_lines(tmp_path: Path) -> None:
    """From the beginning and from the end of a file."""
    file = tmp_path / "f"
    tail = Tail(file)
    assert (tail.read(), last_line(file)) == ((False, []), b"")
    file.write_bytes(b"one\ntw")
    assert (tail.read(), tail.read(), last_line(file)) == ((False, [b"one"]), (False, []), b"one")
    file.write_bytes(b"one\ntwo\n" + b"x" * 300_000 + b"\nthr")
    assert tail.read() == (False, [b"two", b"x" * 300_000])
    assert last_line(file) == b"x" * 300_000
    file.write_bytes(b"another\n")
    assert tail.read() == (True, [b"another"])
    file.unlink()
    assert (tail.read(), tail.read()) == ((True, []), (False, []))


# ---- the server ------------------------------------------------------------------------------------------------------


class Site(NamedTuple):
    port: int

    def get(self, path: str, host: str = "127.0.0.1", method: str = "GET") -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request(method, path, headers={"Host": host, "Origin": "http://evil.example"})
        response = connection.getresponse()
        body = response.read()
        connection.close()
        return response.status, {key.lower(): value for key, value in response.getheaders()}, body


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    evaluate(start_run(tmp_path / EVIL.replace("/", "∕"), name=EVIL, algorithm={"name": EVIL}), 0, 1)  # type: ignore[arg-type]
    created, listener = server.create_server(tmp_path), server.open_socket(0)
    thread = threading.Thread(target=created.run, kwargs={"sockets": [listener]})
    thread.start()
    yield Site(listener.getsockname()[1])
    created.should_exit = True
    thread.join(20)


def test_only_loopback_names_are_served(site: Site) -> None:
    """A foreign Host is refused with 400, on every path; no other site's page may read a response."""
    for host in ("127.0.0.1", "localhost", f"127.0.0.1:{site.port}"):
        assert site.get("/api/state", host)[0] == 200
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "192.168.0.1", ""):
        for path in ("/", "/api/state", "/plotly.min.js"):
            status, headers, body = site.get(path, host)
            assert status == 400
            assert EVIL.encode() not in body
    for path in ("/", "/api/state", "/nothing"):
        headers = site.get(path)[1]
        assert "access-control-allow-origin" not in headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "script-src 'self';" in headers["content-security-policy"]
        assert headers["cross-origin-resource-policy"] == "same-origin"


def test_files_come_from_a_table(site: Site) -> None:
    """The page, its parts, and plotly of the installed package; no path leads outside, and all is read-only."""
    for path, kind in (("/", "text/html"), ("/live.css", "text/css"), ("/live.js", "text/javascript"),
                       ("/draw.js", "text/javascript"), ("/plotly.min.js", "text/javascript")):
        status, headers, body = site.get(path)
        assert status == 200
        assert headers["content-type"].startswith(kind)
        assert len(body) > 500
    for path in ("/../watch/server.py", "/live/../../report.py", "/%2e%2e/report.py", "/api/run/..%2f..%2fetc%2fpasswd",
                 "/metrics.jsonl", "/api/run/"):
        assert site.get(path)[0] in (400, 404)
    assert site.get("/api/state", method="POST")[0] == 405
    for query in ("since=-1", "since=abc", "since=" + "9" * 500, "since=%D9%A3", "boot=%00"):
        assert site.get(f"/api/state?{query}")[0] == 200


def test_hostile_names_travel_as_data_only(site: Site) -> None:
    """A run named like a script is in the JSON, as text, and not in the page; the scripts never write markup."""
    status, headers, body = site.get("/api/state")
    assert (status, headers["content-type"]) == (200, "application/json")
    run = json.loads(body)["runs"][0]
    assert run["facts"][0] == run["algorithm"] == EVIL
    live = Path(server.__file__).parents[1] / "live"
    for path in live.iterdir():
        source = path.read_text()
        for call in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "http://", "https://"):
            assert call not in source.replace("http://www.w3.org/2000/svg", ""), (path.name, call)
    assert "<script>" not in (live / "live.html").read_text()


# ---- the command -----------------------------------------------------------------------------------------------------


def test_a_folder_that_does_not_exist_is_waited_for(tmp_path: Path) -> None:
    """A run that starts there later is shown with its hyperparameters."""
    folder = tmp_path / "runs" / "later"
    watched = WatchedFolder(folder)
    assert watched.get_updates("", 0)["waiting"] is True
    experiment = {"nodes": 4, "rounds": 2, "engine": "local", "task": {"name": "quadratic", "dim_x": 4, "dim_y": 8}}
    runner.run(Experiment(**experiment, algorithm={"name": "d_soba", "theta": 0.25}), folder)
    watched._refreshed = watched._searched = -100.0
    state = watched.get_updates("", 0)
    assert state["waiting"] is False
    assert ("theta", "0.25") in state["runs"][0]["parameters"]


def test_wrong_folder_or_port_is_an_input_error(tmp_path: Path) -> None:
    """A file, a folder without a run, a port that is taken or out of range: one line that names it."""
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path):
        with pytest.raises(InputError, match=str(folder)):
            serve_live_page(folder)
    start_run(tmp_path / "run")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match=r"--port: .* cannot be used"):
            serve_live_page(tmp_path, taken.getsockname()[1])
    for port in (-1, 65536):
        with pytest.raises(InputError, match="--port"):
            serve_live_page(tmp_path, port)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_command_prints_its_address_and_exits_0(tmp_path: Path, number: int) -> None:
    """`dbo watch` prints its address, listens on loopback only, and exits 0 on Ctrl-C and SIGTERM."""
    start_run(tmp_path / "run")
    process = subprocess.Popen(
        [*DBO, "watch", str(tmp_path / "run"), "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    port = int(process.stdout.readline().split("127.0.0.1:")[1].split("/")[0])
    assert Site(port).get("/api/state")[0] == 200
    with socket.socket() as outside, pytest.raises(OSError, match="refused"):
        outside.connect(("127.0.0.2", port))
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "", "")
