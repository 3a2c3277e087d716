"""`dbo doctor`: planted trouble is found, a machine in order is told to be, and looking changes nothing."""

import ipaddress
import json
import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from benchmarks.mlflow_server import serving
from tests.faults import servers as planted

from dbo.platform.cli import doctor, doctor_network
from dbo.platform.config.experiment import Experiment

Command = Callable[..., Any]
def of(port: int) -> doctor_network.Server | None:
    return next((server for server in doctor_network.servers() if server.port == port), None)


@pytest.mark.parametrize(("routes", "host", "verdict"), planted.KINDS)
def test_exposed_servers_are_found(routes: Any, host: str, verdict: str | None) -> None:
    """Open to others and without a password: refused; with one, or open to this machine only: told; else silence."""
    with planted.served(routes, host) as port:
        mine = [f for f in doctor.exposed() if f"port {port} " in f.text]
    assert [f.verdict for f in mine] == ([verdict] if verdict else [])
    assert f"port {port} " not in " ".join(f.text for f in doctor.exposed())      # control: gone with the server


@pytest.mark.parametrize(("host", "verdict"), [("127.0.0.2", "warn"), ("::1", "warn"), ("::", "refuse")])
def test_servers_at_other_addresses_are_found(host: str, verdict: str) -> None:
    """Whoever listens at another address of this machine does not answer at 127.0.0.1."""
    with suppress(OSError), served(host) as port:
        mine = [f for f in doctor.exposed() if f"port {port} " in f.text]
        assert [f.verdict for f in mine] == [verdict]
        return
    pytest.skip(f"this machine has no address {host}")


def test_an_address_on_a_network_is_asked_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that listens there alone is asked there, and is open to others."""
    here = ipaddress.ip_address("10.1.2.3")
    monkeypatch.setattr(doctor_network, "_listening", lambda: {(8265, here): "0"})
    kinds = {("10.1.2.3", 8265): doctor_network.Answer("ray, open")}
    monkeypatch.setattr(doctor_network, "ask", lambda *place: kinds.get(place, doctor_network.Answer()))
    (finding,) = doctor.exposed()
    assert finding.verdict == "refuse"
    assert "Ray without a token at 10.1.2.3, port 8265" in finding.text


@contextmanager
def served(host: str) -> Iterator[int]:
    """Ray's Jobs server without a token; also at an IPv6 address."""
    family, before = socket.AF_INET6 if ":" in host else socket.AF_INET, ThreadingHTTPServer.address_family
    try:
        ThreadingHTTPServer.address_family = family
        with planted.served(planted.RAY_OPEN, host) as port:
            yield port
    finally:
        ThreadingHTTPServer.address_family = before


def test_two_servers_on_one_port_are_told_apart() -> None:
    """At 127.0.0.1 somebody harmless, at another address of the same port Ray without a token."""
    with planted.served({}, "127.0.0.1") as port:
        server = ThreadingHTTPServer(("127.0.0.2", port), _Ray)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            found = [(s.address, s.kind) for s in doctor_network.servers() if s.port == port]
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
    assert found == [("127.0.0.2", "ray, open")]


class _Ray(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, text = planted.RAY_OPEN.get(self.path, (404, ""))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *words: Any) -> None:
        """Says nothing."""


def test_a_server_that_heeds_any_host_is_told() -> None:
    """A browser that was led to a server on loopback under another name must not be answered."""
    for picky in (True, False):
        with planted.served(planted.MLFLOW_OPEN, "127.0.0.1", picky) as port:
            found = of(port)
        assert found is not None
        assert found.any_host is not picky


def test_ipv6_sockets_are_read() -> None:
    """The kernel's words are turned right: ::1 is this machine, :: is everybody, and so are mapped addresses."""
    read = doctor_network._address
    assert read("00000000000000000000000001000000").is_loopback
    assert not read("00000000000000000000000000000000").is_loopback
    assert read("0000000000000000FFFF00000100007F").is_loopback
    assert read("0100007F").is_loopback
    assert not read("00000000").is_loopback


def findings(subject: str, folder: Path, **keys: Any) -> list[str]:
    experiment = Experiment(**{"engine": {"name": "local"}, **keys})
    parts = doctor.machine(experiment), doctor.directory(folder), doctor.data(experiment), doctor.reachable(experiment)
    return [f.verdict for part in parts for f in part if f.subject.startswith(subject)]


def test_shadowed_modules_are_refused(tmp_path: Path) -> None:
    """platform/ is a room of this house as long as it is no package; anything that hides Python's own is refused."""
    (tmp_path / "platform").mkdir()
    (tmp_path / "notes.py").touch()
    assert findings("modules", tmp_path) == ["ok"]
    for name in ("platform/__init__.py", "json.py", "secrets.py"):
        (tmp_path / name).touch()
        assert findings("modules", tmp_path) == ["refuse"]
        (tmp_path / name).unlink()


def test_an_oversized_working_dir_is_refused(tmp_path: Path) -> None:
    """Counted as Ray packs: what .gitignore or .rayignore names does not count, nor does .git."""
    assert findings("working_dir", tmp_path) == ["ok"]
    for name in (".git", "data"):
        (tmp_path / name).mkdir()
        with open(tmp_path / name / "big.bin", "wb") as file:
            file.truncate(doctor.PACKED_MOST + 1)
    assert findings("working_dir", tmp_path) == ["refuse"]
    for name in (".gitignore", ".rayignore"):
        (tmp_path / name).write_text("data/\n")
        assert findings("working_dir", tmp_path) == ["ok"]
        (tmp_path / name).unlink()


def test_missing_resources_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More CPUs or GPUs than there are, a data folder that is none, servers that nobody answers at."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert findings("CPUs", tmp_path, engine={"name": "ray", "cpus_per_node": 1000.0}) == ["refuse"]
    assert findings("CPUs", tmp_path, engine={"name": "ray"}) == ["ok"]
    if not Path("/proc/driver/nvidia/gpus").exists():
        assert findings("GPUs", tmp_path, engine={"name": "ray", "gpus_per_node": 1.0}) == ["refuse"]
    assert findings("data_dir", tmp_path, data_dir=str(tmp_path / "none")) == ["refuse"]
    assert findings("data_dir", tmp_path, data_dir=str(tmp_path)) == ["ok"]
    assert findings("Ray", tmp_path, engine={"name": "ray", "address": "127.0.0.1:1"}) == ["refuse"]
    assert findings("MLflow", tmp_path, tracking={"uri": "http://127.0.0.1:1"}) == ["refuse"]
    assert findings("MLflow", tmp_path) == ["ok"]


def test_old_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions with a hole that has a name."""
    monkeypatch.setattr(doctor, "version", lambda name: {"ray": "2.53.1", "mlflow": "3.7.0"}.get(name, "9.9"))
    assert {f.subject for f in doctor.installed() if f.verdict == "refuse"} == {"ray", "mlflow"}
    monkeypatch.setattr(doctor, "version", lambda name: "2.60.0" if name == "ray" else "3.17.2")
    assert all(f.verdict == "ok" for f in doctor.installed())


def test_strict_refuses(dbo: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 0 whatever is found; with --strict exit 1 and the reason, if something is refused; nothing is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor_network, "servers", list)      # those of the machine are not this test's
    calm = dbo("doctor", "engine.name=local", "--strict")
    assert calm.code == 0, calm.err
    (tmp_path / "json.py").touch()
    assert dbo("doctor", "engine.name=local").code == 0
    strict = dbo("doctor", "engine.name=local", "--strict")
    assert strict.code == 1
    assert "json.py" in strict.err
    assert os.listdir(tmp_path) == ["json.py"]
    assert dbo("doctor", "rounds=0").code == 2


def test_no_password_is_shown(dbo: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's URI may hold one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor_network, "servers", list)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2@127.0.0.1:1/")
    done = dbo("doctor", "engine.name=local", "--strict")
    assert done.code == 1
    assert "hunter2" not in done.out + done.err


def test_a_real_mlflow_server_refuses_strangers(tmp_path: Path) -> None:
    """`mlflow server` on loopback: found, 403 for an evil Host, and nothing to complain of."""
    with serving(tmp_path) as server:
        found = doctor_network.ask("127.0.0.1", server.port)
        assert found.kind == "mlflow, open"
        assert not found.any_host
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(
                f"{server.uri}/api/2.0/mlflow/experiments/search?max_results=1", headers={"Host": "evil.example"},
            ), timeout=10)
        assert refused.value.code == 403
        assert [f.verdict for f in doctor.reachable(
            Experiment(engine={"name": "local"}, tracking={"uri": server.uri})
        ) if f.subject.startswith("MLflow")] == ["ok"]


def test_findings_are_plain() -> None:
    """Every verdict is one of three words."""
    found = doctor.examine(Experiment(engine={"name": "local"}), Path(__file__).parent)
    assert {f.verdict for f in found} <= {"ok", "warn", "refuse"}
    json.dumps([f.text for f in found])
