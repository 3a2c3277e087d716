"""Run a real MLflow server on loopback that can be killed and restarted, for benchmarks and tests."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dbo.platform.tracking.client import mlflow_environment


class Server:
    """A server with a fixed folder and port; its data survive its process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.database = folder, folder / "server.db"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{self.database}",
             "--artifacts-destination", str(self.folder / "files"), "--host", "127.0.0.1", "--port", str(self.port),
             "--workers", "1"],
            cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            # Without job execution no helper process outlives the server.
            env={**os.environ, **mlflow_environment(""), "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        )

    def wait(self) -> None:
        for _ in range(2400):
            with suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=2):
                return
            if self._process is not None and self._process.poll() is not None:
                raise RuntimeError(f"the MLflow server ended with {self._process.returncode}")
            time.sleep(0.1)
        raise TimeoutError("the MLflow server does not answer")

    def stop(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Run a server during the `with` block."""
    server = Server(folder)
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.stop()
