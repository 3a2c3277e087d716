"""Real MLflow servers of a team: with passwords on PostgreSQL, below a path behind a proxy, with hundreds of runs."""

import glob
import http.client
import http.server
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Require
from tests.platform.tracking.mlflow_store import StoreView, sqlite_uri

from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import RunError
from dbo.platform.runs.runner import run
from dbo.platform.tracking.mlflow_ui import find_landing_page
from dbo.platform.tracking.sync import sync_folder

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _wait_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's first answers take long on a busy machine."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: list[str], environment: Mapping[str, str], port: int, path: str = "/health", **options: Any) -> \
        Iterator[None]:
    """Run a server on loopback until the block ends."""
    with open(os.devnull, "wb") as nowhere:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=nowhere, stderr=nowhere, start_new_session=True,
            **options)
    try:
        deadline = time.monotonic() + 120
        while True:
            assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
            assert time.monotonic() < deadline
            with suppress(OSError):
                if path:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2).close()
                else:
                    socket.create_connection(("127.0.0.1", port), timeout=2).close()
                break
            time.sleep(0.2)
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def mlflow_server(port: int, store: str, artifacts: Path, *options: str) -> list[str]:
    return [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", store, "--artifacts-destination", str(artifacts), *options,
    ]


@pytest.fixture
def postgresql(require: Require) -> Iterator[str]:
    """Return the URI of a new data base. PostgreSQL refuses to run as root, so it runs as its own user."""
    found = sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"))
    require("postgresql", bool(found) and os.getuid() == 0)
    # Not in a folder of pytest: another user must reach it.
    folder, port = Path("/tmp") / f"dbo-postgresql-{os.getpid()}", free_port()
    folder.mkdir()
    shutil.chown(folder, "postgres", "postgres")
    try:
        subprocess.run([found[-1], "-D", folder / "data", "-A", "trust", "-U", "dbo", "-N"], user="postgres",
                       group="postgres", extra_groups=[], cwd=folder, capture_output=True, check=True, timeout=120)
        server = [found[-1].replace("initdb", "postgres"), "-D", str(folder / "data"), "-p", str(port),
                  "-k", str(folder), "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"]
        with running(server, {}, port, path="", user="postgres", group="postgres", extra_groups=[], cwd=folder):
            yield f"postgresql+psycopg://dbo@127.0.0.1:{port}/postgres"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_server_with_passwords_on_postgresql(
    postgresql: str, tiny: Callable[..., Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything arrives once with the right password; without one, a line says that nothing did."""
    port, password = free_port(), secrets.token_hex(16)
    (tmp_path / "auth.ini").write_text(
        f"[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:///{tmp_path}/auth.db\nadmin_username = admin\n"
        f"admin_password = {password}\nauthorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    environment = {
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(16), "MLFLOW_AUTH_CONFIG_PATH": str(tmp_path / "auth.ini"),
        "MLFLOW_AUTH_ADMIN_PASSWORD": password,
    }
    server = mlflow_server(port, postgresql, tmp_path / "artifacts", "--app-name", "basic-auth")
    folder = run(tiny(), tmp_path / "r").folder
    uri = f"http://127.0.0.1:{port}"
    with running(server, environment, port):
        with pytest.raises(RunError, match=r"7 of 7 points are not in MLflow"):
            sync_folder(folder, uri, None)
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)
        messages: list[str] = []
        for _ in range(2):
            sync_folder(folder, uri, None, messages.append)
        assert messages == [f"{folder}: sent 7 new points of 7", f"{folder}: up to date, 7 points"]
        seen = StoreView(uri)
        (found,) = seen.runs()
        seen.assert_complete(found, folder)
        assert "summary.json" in {file.path for file in seen.client.list_artifacts(found.info.run_id)}


class Proxy(http.server.BaseHTTPRequestHandler):
    """Pass what is below /team/mlflow to a server, without the prefix; answer 404 to everything else."""

    prefix, port = "/team/mlflow", 0

    def forward(self) -> None:
        if not self.path.startswith(self.prefix):
            self.send_error(404)
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {key: value for key, value in self.headers.items() if key.lower() != "host"}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(self.command, self.path.removeprefix(self.prefix), body, headers)
        answer = connection.getresponse()
        content = answer.read()
        self.send_response(answer.status)
        for key, value in answer.getheaders():
            if key.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = forward

    def log_message(self, *_: object) -> None:
        pass


def test_server_below_a_path_behind_a_proxy(
    tiny: Callable[..., Experiment], tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`https://host/team/mlflow`: runs, points and files go through the path."""
    port = free_port()
    folder = run(tiny(), tmp_path / "r").folder
    with running(mlflow_server(port, store, tmp_path / "artifacts"), {}, port):
        monkeypatch.setattr(Proxy, "port", port)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
            threading.Thread(target=proxy.serve_forever, daemon=True).start()
            uri = f"http://127.0.0.1:{proxy.server_port}/team/mlflow"
            sync_folder(folder, uri, None)
            seen = StoreView(uri)
            (found,) = seen.runs()
            seen.assert_complete(found, folder)
            assert "summary.json" in {file.path for file in seen.client.list_artifacts(found.info.run_id)}
            proxy.shutdown()


def test_page_opens_the_newest_comparison_among_300_runs(tmp_path: Path, store: str) -> None:
    """Also if its folder's name begins like that of others; all names differ."""
    client: Any = StoreView(store).client
    experiment = client.create_experiment("dbo")
    for number in range(300):
        tags = {"dbo.run_key": f"{number:064x}", "dbo.folder": str(tmp_path / f"runs/r{number}")}
        client.create_run(experiment, start_time=1000 + number, tags=tags, run_name=f"c2dfb · ring · r{number}")
    parent = client.create_run(experiment, start_time=500, run_name="compare: old", tags={
        "dbo.group_key": "ab" * 32, "dbo.folder": str(tmp_path / "runs/c")})
    page = find_landing_page(sqlite_uri(tmp_path), tmp_path / "runs")
    assert f"#/experiments/{experiment}/runs?viewStateShareKey=dbo-abababab" in page
    view = client.get_experiment(experiment).tags["mlflow.sharedViewState.dbo-abababab"]
    assert parent.info.run_id in view
    names = [found.info.run_name for found in client.search_runs([experiment], max_results=1000)]
    assert len(set(names)) == 301
