"""Servers that respond like Ray's Jobs server and MLflow, open or closed, for tests of exposure."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Routes = dict[str, tuple[int, str]]
RAY_OPEN: Routes = {"/api/version": (200, '{"ray_version": "2.60.0"}'), "/api/jobs/": (200, "[]")}
RAY_CLOSED: Routes = {"/api/version": (401, "Unauthorized: missing token"), "/api/jobs/": (401, "token")}
MLFLOW_OPEN: Routes = {"/version": (200, "3.17.2"), "/api/2.0/mlflow/experiments/search?max_results=1": (200, "{}")}
MLFLOW_CLOSED: Routes = {"/version": (200, "3.17.2"), "/api/2.0/mlflow/experiments/search?max_results=1": (401, "")}
# Responses, address, and the verdict of `dbo doctor`; None: no finding.
KINDS: list[tuple[Routes, str, str | None]] = [
    (RAY_OPEN, "0.0.0.0", "refuse"), (RAY_OPEN, "127.0.0.1", "warn"), (RAY_CLOSED, "0.0.0.0", "warn"),
    (RAY_CLOSED, "127.0.0.1", None), (MLFLOW_OPEN, "0.0.0.0", "refuse"), (MLFLOW_CLOSED, "0.0.0.0", "warn"),
    (MLFLOW_OPEN, "127.0.0.1", None), ({}, "0.0.0.0", None),
]


@contextmanager
def run_server(routes: Routes, host: str, checks_host: bool = True) -> Iterator[int]:
    """Run a server with these responses; yield its port. `checks_host`: refuse a forged Host header."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = routes.get(self.path, (404, ""))
            if checks_host and self.headers["Host"].startswith("evil"):
                status = 403
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer((host, 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
