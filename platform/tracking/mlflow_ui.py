"""`dbo ui`: the MLflow server on loopback, and an address that opens on a comparison."""

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

from dbo.platform.config import tracking_uri, yaml_io
from dbo.platform.errors import InputError, RunError
from dbo.platform.tracking import reader as source
from dbo.platform.tracking.client import Store, environment

PORT = 5000
_PATIENCE = 120.0                     # seconds that the server may take to answer
_COLUMNS = (
    "params.`algorithm.name`", "params.`topology.name`", "params.`partition.h`", "params.`seed`",
    "params.`algorithm.inner_steps`", "params.`algorithm.lam`", "params.`algorithm.compressor.ratio`",
    "metrics.`test_accuracy`", "metrics.`node_accuracy_min`", "metrics.`comm_mb`", "metrics.`seconds`",
)
# What a researcher looks at first: what accuracy costs, then how the loss and the nodes' agreement came about.
_CHARTS = (
    ("test_accuracy", "comm_mb"), ("node_accuracy_min", "comm_mb"), ("upper_loss", "comm_mb"),
    ("test_accuracy", None), ("upper_loss", None), ("consensus_x", None),
)


def store_of(folder: Path) -> str:
    """The store that belongs to a folder."""
    if (folder / "mlflow.db").exists():
        return tracking_uri.place(None, folder)
    named: Any = {}
    if source.is_group(folder):
        named = source.read_group(folder).get("tracking")
    elif (folder / "experiment.yaml").exists():
        named = yaml_io.read(folder / "experiment.yaml").get("tracking")
    uri = named.get("uri") if isinstance(named, dict) else None
    place = tracking_uri.place(uri if uri != tracking_uri.OFF else None, folder)
    file = tracking_uri.file_of(place)
    if file is not None and not file.exists():
        raise InputError(f"{folder}: no MLflow store there ({file} is missing); `dbo run` makes one, `dbo sync` too")
    return place


def serve(folder: Path, port: int | None, say: Callable[[str], None]) -> None:
    """Serves until it is interrupted; a store on a server needs no other server, its address is told."""
    uri = store_of(folder)
    if tracking_uri.file_of(uri) is None:
        say(f"the runs are on a server: {uri}")
        return
    os.environ.update(environment(uri))
    path = landing(uri, folder)
    chosen = _free(port, say)
    address = f"http://127.0.0.1:{chosen}"
    with suppress(KeyboardInterrupt), _stopping(), _server(uri, chosen) as server:
        _await(server, address)
        say(f"MLflow on {uri}")
        say(f"{address}/{path}")
        say("Ctrl-C ends it")
        if server.wait() != 0:
            raise RunError(f"the MLflow server ended with code {server.returncode}")


def landing(uri: str, folder: Path) -> str:
    """The page to open: the newest comparison or sweep, or all runs, drawn as accuracy against MB."""
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
    shown = f"tags.`mlflow.parentRunId` = '{newest.info.run_id}'" if groups else "tags.`dbo.run_key` != ''"
    with store.lock():
        client.set_experiment_tag(experiment, f"mlflow.sharedViewState.{name}", json.dumps(view(shown)))
    # Without the type MLflow puts its pages for language models around the runs.
    shape = "compareRunsMode=CHART&workflowType=machine_learning"
    return f"#/experiments/{experiment}/runs?viewStateShareKey={quote(name)}&{shape}"


def view(shown: str) -> dict[str, Any]:
    """What MLflow's page keeps in an experiment's tag for a view that is shared by a link."""
    cost, rounds = "dbo-cost", "dbo-rounds"
    return {
        # Sorted by date, MLflow folds children under their parents and draws only what is unfolded.
        "searchFilter": shown, "orderByKey": "tags.`mlflow.runName`", "orderByAsc": True, "startTime": "ALL",
        "lifecycleFilter": "Active", "modelVersionFilter": "All Runs", "datasetsFilter": [],
        "selectedColumns": list(_COLUMNS), "runsHiddenMode": "FIRST_20_RUNS", "hideEmptyCharts": True,
        "isAccordionReordered": True,
        "compareRunSections": [
            {"uuid": cost, "name": "what it costs", "display": True, "isReordered": True},
            {"uuid": rounds, "name": "round by round", "display": True, "isReordered": True},
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


def _free(port: int | None, say: Callable[[str], None]) -> int:
    for wanted in (PORT if port is None else port, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", wanted))
            except OSError as error:
                if port is not None:
                    raise InputError(f"--port: {port} cannot be used: {error.strerror}") from None
                continue
            found = int(probe.getsockname()[1])
        if found != PORT and port is None:
            say(f"port {PORT} is in use; {found} is taken instead")
        return found
    raise RunError("no free port on 127.0.0.1")


@contextmanager
def _server(uri: str, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """The server and its workers, which are a process group of their own: no one is left when it ends."""
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--host", "127.0.0.1",
               "--port", str(port), "--workers", "1"]
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    server = subprocess.Popen(
        command, env={**os.environ, **quiet}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )
    try:
        yield server
    finally:
        _end(server)


def _end(server: "subprocess.Popen[bytes]") -> None:
    """The group's last process, too, must be gone."""
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


def _await(server: "subprocess.Popen[bytes]", address: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RunError(f"the MLflow server ended with code {server.returncode} before it answered")
        with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{address}/health", timeout=2):
            return
        time.sleep(0.2)
    raise RunError(f"the MLflow server did not answer within {_PATIENCE:.0f} seconds")


@contextmanager
def _stopping() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
