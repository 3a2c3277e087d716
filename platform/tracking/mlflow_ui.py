"""Serve the MLflow UI on loopback, with a link that opens a comparison."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dbo.platform.config import tracking_uri
from dbo.platform.errors import InputError, RunError
from dbo.platform.tracking.client import Store, mlflow_environment
from dbo.platform.tracking.sync import read_tracking

PORT = 5000
_STARTUP_SECONDS = 120.0              # that the server may take to answer
_COLUMNS = (
    "params.`algorithm.name`", "params.`topology.name`", "params.`partition.h`", "params.`seed`",
    "params.`algorithm.inner_steps`", "params.`algorithm.lam`", "params.`algorithm.compressor.ratio`",
    "metrics.`psi`", "metrics.`test_accuracy`", "metrics.`node_accuracy_min`", "metrics.`comm_mb`", "metrics.`seconds`",
)
# (metric, X-axis; None: rounds). First what accuracy costs, then loss and consensus error over rounds.
_CHARTS = (
    ("test_accuracy", "comm_mb"), ("node_accuracy_min", "comm_mb"), ("upper_loss", "comm_mb"),
    ("test_accuracy", None), ("upper_loss", None), ("consensus_x", None),
)


def find_store(folder: Path) -> str:
    """Return the URI of the store of a folder."""
    if (folder / "mlflow.db").exists():
        return tracking_uri.resolve_uri(None, folder)
    recorded = read_tracking(folder).get("uri")
    uri = tracking_uri.resolve_uri(recorded if recorded != tracking_uri.OFF else None, folder)
    file = tracking_uri.sqlite_file(uri)
    if file is not None and not file.exists():
        raise InputError(f"{folder}: no MLflow store ({file} is missing); `dbo run` or `dbo sync` creates one")
    return uri


def serve(folder: Path, port: int | None, log: Callable[[str], None]) -> None:
    """Serve until interrupted. If the store is a server already, only log its address."""
    uri = find_store(folder)
    if tracking_uri.sqlite_file(uri) is None:
        log(f"the runs are on a server: {uri}")
        return
    os.environ.update(mlflow_environment(uri))
    log("starting MLflow, which takes some seconds")
    path = find_landing_page(uri, folder)
    chosen = _choose_port(port, log)
    address = f"http://127.0.0.1:{chosen}"
    with suppress(KeyboardInterrupt), _sigterm_interrupts(), _run_server(uri, chosen) as server:
        _wait_for(server, address)
        log(f"MLflow on {uri}")
        log(f"{address}/{path}")
        log("Ctrl-C ends it")
        if server.wait() != 0:
            raise RunError(f"the MLflow server ended with code {server.returncode}")


def find_landing_page(uri: str, folder: Path) -> str:
    """Return the page to open: accuracy against MB of the newest comparison or sweep, or of all runs."""
    store = Store(uri, "")
    client = store.connect()
    experiments = [one for one in client.search_experiments() if one.experiment_id != "0"]
    runs = client.search_runs([one.experiment_id for one in experiments], max_results=1000) if experiments else []
    if not runs:
        return ""
    here = str(folder.resolve())
    below = [run for run in runs if run.data.tags.get("dbo.folder", "").startswith(here)] or runs
    groups = [run for run in below if "dbo.group_key" in run.data.tags]
    newest = max(groups or below, key=lambda run: run.info.start_time)
    experiment = newest.info.experiment_id
    name = f"dbo-{newest.data.tags['dbo.group_key'][:8]}" if groups else "dbo"
    query = f"tags.`mlflow.parentRunId` = '{newest.info.run_id}'" if groups else "tags.`dbo.run_key` != ''"
    with store.lock():
        client.set_experiment_tag(experiment, f"mlflow.sharedViewState.{name}", json.dumps(build_view(query)))
    # Without the workflow type MLflow shows its pages for language models.
    mode = "compareRunsMode=CHART&workflowType=machine_learning"
    return f"#/experiments/{experiment}/runs?viewStateShareKey={quote(name)}&{mode}"


def build_view(query: str) -> dict[str, Any]:
    """Return what MLflow stores in an experiment's tag for a view that is shared by a link.

    MLflow draws a logarithmic X-axis for steps only, not for a metric.
    """
    cost, rounds = "dbo-cost", "dbo-rounds"
    return {
        # Sorted by date, MLflow folds child runs under their parents and does not draw them.
        "searchFilter": query, "orderByKey": "tags.`mlflow.runName`", "orderByAsc": True, "startTime": "ALL",
        "lifecycleFilter": "Active", "modelVersionFilter": "All Runs", "datasetsFilter": [],
        "selectedColumns": list(_COLUMNS), "runsHiddenMode": "FIRST_20_RUNS", "hideEmptyCharts": True,
        "isAccordionReordered": True,
        "compareRunSections": [
            {"uuid": cost, "name": "communication cost", "display": True, "isReordered": True},
            {"uuid": rounds, "name": "per round", "display": True, "isReordered": True},
        ],
        "compareRunCharts": [
            {
                "uuid": f"dbo-{number}", "type": "LINE", "runsCountToCompare": 20, "deleted": False,
                "isGenerated": False, "metricSectionId": cost if against else rounds,
                "metricKey": metric, "lineSmoothness": 0, "scaleType": "linear",
                "xAxisScaleType": "linear", "xAxisKey": "metric" if against else "step",
                "selectedXAxisMetricKey": against or "", "useGlobalXaxisKey": False, "useGlobalLineSmoothing": True,
                "yAxisKey": "metric", "yAxisExpressions": [], "ignoreOutliers": False, "range": {},
            }
            for number, (metric, against) in enumerate(_CHARTS)
        ],
    }


def _choose_port(port: int | None, log: Callable[[str], None]) -> int:
    """Return the given port, else the default port, else a free one."""
    for candidate in (PORT if port is None else port, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", candidate))
            except OSError as error:
                if port is not None:
                    raise InputError(f"--port: {port} cannot be used: {error.strerror}") from None
                continue
            found = int(probe.getsockname()[1])
        if found != PORT and port is None:
            log(f"port {PORT} is in use; using port {found}")
        return found
    raise RunError("no free port on 127.0.0.1")


@contextmanager
def _run_server(uri: str, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """Run the server and its workers as a process group, which is ended with the block."""
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--host", "127.0.0.1",
               "--port", str(port), "--workers", "1"]
    no_jobs = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    server = subprocess.Popen(
        command, env={**os.environ, **no_jobs}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )
    try:
        yield server
    finally:
        _end_group(server)


def _end_group(server: "subprocess.Popen[bytes]") -> None:
    """End the server and all of its workers."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(server.pid, kind)
        for _ in range(100):
            server.poll()
            try:
                os.killpg(server.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)


def _wait_for(server: "subprocess.Popen[bytes]", address: str) -> None:
    deadline = time.monotonic() + _STARTUP_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RunError(f"the MLflow server ended with code {server.returncode} before it answered")
        with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{address}/health", timeout=2):
            return
        time.sleep(0.2)
    raise RunError(f"the MLflow server did not answer within {_STARTUP_SECONDS:.0f} seconds")


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
