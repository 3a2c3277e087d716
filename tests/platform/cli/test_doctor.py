"""`dbo doctor` finds planted problems, finds none on a sound machine, and changes nothing."""

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
from tests.faults import servers as fake_servers

from dbo.platform.cli import doctor, doctor_network
from dbo.platform.config.experiment import Experiment

Command = Callable[..., Any]


def find_server(port: int) -> doctor_network.Server | None:
    return next((server for server in doctor_network.find_servers() if server.port == port), None)


@pytest.mark.parametrize(("routes", "host", "verdict"), fake_servers.KINDS)
def test_exposed_servers_are_found(routes: Any, host: str, verdict: str | None) -> None:
    """Open to other machines without a password: refuse; with one, or open on loopback: warn; else no finding."""
    with fake_servers.run_server(routes, host) as port:
        mine = [f for f in doctor.check_exposure() if f"port {port} " in f.text]
    assert [f.verdict for f in mine] == ([verdict] if verdict else [])
    # Control: without the server there is no finding.
    assert f"port {port} " not in " ".join(f.text for f in doctor.check_exposure())


@pytest.mark.parametrize(("host", "verdict"), [("127.0.0.2", "warn"), ("::1", "warn"), ("::", "refuse")])
def test_servers_at_other_addresses_are_found(host: str, verdict: str) -> None:
    """A server at another address of this machine does not answer at 127.0.0.1."""
    with suppress(OSError), run_ray_server(host) as port:
        mine = [f for f in doctor.check_exposure() if f"port {port} " in f.text]
        assert [f.verdict for f in mine] == [verdict]
        return
    pytest.skip(f"this machine has no address {host}")


def test_a_server_is_probed_at_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that listens at a network address only is probed there, and is open to others."""
    here = ipaddress.ip_address("10.1.2.3")
    monkeypatch.setattr(doctor_network, "_read_sockets", lambda: {(8265, here): "0"})
    probes = {("10.1.2.3", 8265): doctor_network.Probe("Ray", is_open=True)}
    monkeypatch.setattr(doctor_network, "probe_server", lambda *place: probes.get(place, doctor_network.Probe()))
    (finding,) = doctor.check_exposure()
    assert finding.verdict == "refuse"
    assert "Ray without a token at 10.1.2.3, port 8265" in finding.text


@contextmanager
def run_ray_server(host: str) -> Iterator[int]:
    """Run a Jobs server without a token, also at an IPv6 address."""
    family, before = socket.AF_INET6 if ":" in host else socket.AF_INET, ThreadingHTTPServer.address_family
    try:
        ThreadingHTTPServer.address_family = family
        with fake_servers.run_server(fake_servers.RAY_OPEN, host) as port:
            yield port
    finally:
        ThreadingHTTPServer.address_family = before


def test_two_servers_on_one_port_are_distinguished() -> None:
    """A harmless server at 127.0.0.1 does not hide Ray without a token at another address of the same port."""
    with fake_servers.run_server({}, "127.0.0.1") as port:
        server = ThreadingHTTPServer(("127.0.0.2", port), _Ray)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            found = [(s.address, s.probe.label) for s in doctor_network.find_servers() if s.port == port]
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
    assert found == [("127.0.0.2", "Ray without a token")]


class _Ray(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, text = fake_servers.RAY_OPEN.get(self.path, (404, ""))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: Any) -> None:
        """Log nothing."""


def test_a_server_that_accepts_any_host_is_found() -> None:
    """A web page must not reach a server on loopback under another name."""
    for checks_host in (True, False):
        with fake_servers.run_server(fake_servers.MLFLOW_OPEN, "127.0.0.1", checks_host) as port:
            found = find_server(port)
        assert found is not None
        assert found.probe.any_host is not checks_host


def test_ipv6_addresses_are_parsed() -> None:
    """::1 and mapped loopback addresses are loopback, :: is not."""
    parse = doctor_network._parse_address
    assert parse("00000000000000000000000001000000").is_loopback
    assert not parse("00000000000000000000000000000000").is_loopback
    assert parse("0000000000000000FFFF00000100007F").is_loopback
    assert parse("0100007F").is_loopback
    assert not parse("00000000").is_loopback


def find_verdicts(subject: str, folder: Path, **keys: Any) -> list[str]:
    experiment = Experiment(**{"engine": {"name": "local"}, **keys})
    groups = (
        doctor.check_resources(experiment), doctor.check_working_dir(folder), doctor.check_data_dir(experiment),
        doctor.check_servers(experiment),
    )
    return [f.verdict for group in groups for f in group if f.subject.startswith(subject)]


def test_shadowed_modules_are_refused(tmp_path: Path) -> None:
    """A folder platform/ is fine while it is no package; a file that hides a standard module is refused."""
    (tmp_path / "platform").mkdir()
    (tmp_path / "notes.py").touch()
    assert find_verdicts("modules", tmp_path) == ["ok"]
    for name in ("platform/__init__.py", "json.py", "secrets.py"):
        (tmp_path / name).touch()
        assert find_verdicts("modules", tmp_path) == ["refuse"]
        (tmp_path / name).unlink()


def test_an_oversized_working_dir_is_refused(tmp_path: Path) -> None:
    """Files that .gitignore or .rayignore lists do not count, nor does .git."""
    assert find_verdicts("working_dir", tmp_path) == ["ok"]
    for name in (".git", "data"):
        (tmp_path / name).mkdir()
        with open(tmp_path / name / "big.bin", "wb") as file:
            file.truncate(doctor.MAX_UPLOAD + 1)
    assert find_verdicts("working_dir", tmp_path) == ["refuse"]
    for name in (".gitignore", ".rayignore"):
        (tmp_path / name).write_text("data/\n")
        assert find_verdicts("working_dir", tmp_path) == ["ok"]
        (tmp_path / name).unlink()


def test_missing_resources_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few CPUs or GPUs, a missing data folder, servers that do not answer."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert find_verdicts("CPUs", tmp_path, engine={"name": "ray", "cpus_per_node": 1000.0}) == ["refuse"]
    assert find_verdicts("CPUs", tmp_path, engine={"name": "ray"}) == ["ok"]
    if not Path("/proc/driver/nvidia/gpus").exists():
        assert find_verdicts("GPUs", tmp_path, engine={"name": "ray", "gpus_per_node": 1.0}) == ["refuse"]
    assert find_verdicts("data_dir", tmp_path, data_dir=str(tmp_path / "none")) == ["refuse"]
    assert find_verdicts("data_dir", tmp_path, data_dir=str(tmp_path)) == ["ok"]
    assert find_verdicts("Ray", tmp_path, engine={"name": "ray", "address": "127.0.0.1:1"}) == ["refuse"]
    assert find_verdicts("MLflow", tmp_path, tracking={"uri": "http://127.0.0.1:1"}) == ["refuse"]
    assert find_verdicts("MLflow", tmp_path) == ["ok"]


def test_old_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions with a known vulnerability."""
    monkeypatch.setattr(doctor, "version", lambda name: {"ray": "2.53.1", "mlflow": "3.7.0"}.get(name, "9.9"))
    assert {f.subject for f in doctor.check_packages() if f.verdict == "refuse"} == {"ray", "mlflow"}
    monkeypatch.setattr(doctor, "version", lambda name: "2.60.0" if name == "ray" else "3.17.2")
    assert all(f.verdict == "ok" for f in doctor.check_packages())


def test_strict_exits_with_1(dbo: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 0 whatever is found; with --strict exit 1 and the reason if something is refused; nothing is written."""
    monkeypatch.setattr(doctor_network, "find_servers", list)      # do not probe this machine
    sound = dbo("doctor", "engine.name=local", "--strict")
    assert sound.code == 0, sound.err
    (tmp_path / "json.py").touch()
    assert dbo("doctor", "engine.name=local").code == 0
    strict = dbo("doctor", "engine.name=local", "--strict")
    assert strict.code == 1
    assert "json.py" in strict.err
    assert os.listdir(tmp_path) == ["json.py"]
    assert dbo("doctor", "rounds=0").code == 2


def test_no_password_is_shown(dbo: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The URI in the environment may hold one."""
    monkeypatch.setattr(doctor_network, "find_servers", list)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2@127.0.0.1:1/")
    done = dbo("doctor", "engine.name=local", "--strict")
    assert done.code == 1
    assert "hunter2" not in done.out + done.err


def test_a_real_mlflow_server_checks_the_host(tmp_path: Path) -> None:
    """`mlflow server` on loopback is found, responds 403 to a forged Host header, and is ok."""
    with serving(tmp_path) as server:
        found = doctor_network.probe_server("127.0.0.1", server.port)
        assert found == doctor_network.Probe("MLflow", is_open=True, any_host=False)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(
                f"{server.uri}/api/2.0/mlflow/experiments/search?max_results=1", headers={"Host": "evil.example"},
            ), timeout=10)
        assert refused.value.code == 403
        assert [f.verdict for f in doctor.check_servers(
            Experiment(engine={"name": "local"}, tracking={"uri": server.uri})
        ) if f.subject.startswith("MLflow")] == ["ok"]


def test_every_finding_has_a_verdict() -> None:
    """Every verdict is one of three."""
    found = doctor.run_checks(Experiment(engine={"name": "local"}), Path(__file__).parent)
    assert {f.verdict for f in found} <= {"ok", "warn", "refuse"}
    json.dumps([f.text for f in found])
