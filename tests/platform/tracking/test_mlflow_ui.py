"""`dbo ui`: the MLflow UI opens on a comparison; checked in a real browser."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dbo.dashboards import outputs
from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.runs.compare import compare
from dbo.platform.runs.schema import COLUMNS, Target
from dbo.platform.tracking import mlflow_ui
from dbo.platform.tracking.sync import sync_folder

CHROMIUM = shutil.which("chromium")
NAMES = ("c2dfb", "d_soba", "f2ba")
TIMEOUT = 120_000      # milliseconds

Served = tuple["subprocess.Popen[str]", str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compare three algorithms on the digits, with a report, and send them to a store."""
    pytest.importorskip("mlflow")
    runs = tmp_path_factory.mktemp("ui") / "runs"
    common: dict[str, Any] = {"nodes": 4, "rounds": 4, "engine": {"name": "local"}}
    experiments = [Experiment(**common, algorithm={"name": name}) for name in NAMES]
    compare(experiments, Target("test_accuracy", 0.5), runs / "c")
    outputs.write_beside_results("compare", runs / "c")
    before = dict(os.environ)
    sync_folder(runs / "c", f"sqlite:///{runs / 'mlflow.db'}", None)
    os.environ.clear()
    os.environ.update(before)
    return runs


@pytest.fixture(scope="module")
def served(runs: Path) -> Iterator[Served]:
    """Start `dbo ui` as a user does; return the process and the address that it prints."""
    command = [sys.executable, "-c", "from dbo.platform.cli.main import main; main()", "ui", str(runs)]
    with socket.socket() as blocker:                    # the default port is in use: `dbo ui` uses another one
        blocker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            blocker.bind(("127.0.0.1", mlflow_ui.PORT))
            blocker.listen()
        except OSError:
            pass                                        # another process uses it already
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
        assert process.stdout is not None
        output = ""
        while "Ctrl-C" not in output:
            line = process.stdout.readline()
            assert line, output
            output += line
    assert f"port {mlflow_ui.PORT} is in use" in output
    yield process, re.findall(r"^http://127\.0\.0\.1:\d+/#\S+$", output, re.MULTILINE)[0]
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        yield None
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=[
            "--no-sandbox", "--disable-gpu", "--disable-background-networking"])
        yield launched
        launched.close()


@pytest.fixture
def visit(browser: Any, require: Callable[..., None]) -> Iterator[Callable[[int, int], Any]]:
    """Return a function that opens a new page of a size; the browser's storage is empty."""
    require("browser", CHROMIUM is not None)
    pages = []

    def open_page(width: int, height: int) -> Any:
        pages.append(browser.new_page(viewport={"width": width, "height": height}))
        pages[-1].set_default_timeout(TIMEOUT)
        return pages[-1]

    yield open_page
    for page in pages:
        page.close()


def save_screenshot(page: Any, name: str) -> None:
    if folder := os.environ.get("DBO_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def test_the_address_opens_on_a_comparison(served: Served, visit: Callable[[int, int], Any]) -> None:
    """It lists all runs by name, and a chart of accuracy against MB has a line for each."""
    page = visit(1600, 1000)
    page.goto(served[1])
    card = page.get_by_test_id("experiment-view-compare-runs-card").first
    card.locator(".scatterlayer .trace").nth(len(NAMES) - 1).wait_for(state="attached")
    chart = card.inner_text()
    assert chart.startswith("test_accuracy")
    assert "comm_mb" in chart
    for name in NAMES:
        assert name in chart                # the legend
    listed = page.inner_text("body")
    for name in NAMES:
        assert f"{name} seed 0 · " in listed
    assert "Prompts" not in listed          # a page for language models
    save_screenshot(page, "mlflow")


def test_the_report_is_shown_among_the_artifacts(
    served: Served, runs: Path, visit: Callable[[int, int], Any]
) -> None:
    """Table, figures, links and data work in MLflow's sandboxed frame, without errors in its console."""
    from mlflow import MlflowClient
    from playwright.sync_api import expect

    client = MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("dbo")
    assert experiment is not None
    (parent,) = client.search_runs([experiment.experiment_id], "tags.`dbo.group_key` != ''")
    page = visit(1280, 900)
    errors: list[str] = []                  # of the report only, whose address is a blob
    page.on("console", lambda message: errors.append(message.text) if (
        message.type in ("error", "warning") and message.location["url"].startswith("blob:")) else None)
    page.on("pageerror", lambda error: errors.append(str(error)))       # errors of the sandbox have no address
    address = served[1].partition("#")[0]
    page.goto(f"{address}#/experiments/{experiment.experiment_id}/runs/{parent.info.run_id}/artifacts/report.html")
    report = page.frame_locator("iframe")
    report.locator("h1").wait_for()
    assert report.locator(".ranking tbody tr").count() == len(NAMES)
    report.locator("#accuracy .scatterlayer .trace").nth(len(NAMES) - 1).wait_for(state="attached")
    save_screenshot(page, "mlflow-report")
    listed = page.inner_text("body")
    for name in ("compare.csv", "figures", "report.html", "topology.png"):
        assert name in listed

    report.locator("nav a", has_text="Topology").click()
    report.locator("#topology .points path").nth(3).wait_for(state="attached")
    report.locator("#topology summary").click()
    expect(report.locator("#topology textarea")).to_have_value(re.compile("^run,round,node,"))      # filled by an event
    report.locator("#topology [data-download]").click()         # the sandbox refuses downloads
    assert report.locator("#topology [data-download]").inner_text() == "Copied topology.csv"
    assert report.locator("h1").count() == 1                    # no click has left the page
    save_screenshot(page, "mlflow-topology")
    assert errors == []


def test_the_server_leaves_no_process(served: Served) -> None:
    """SIGTERM ends it with exit 0. This is the last test of the server that they share."""
    process, address = served
    port = int(re.findall(r":(\d+)/", address)[0])
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0
    time.sleep(0.2)
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=1):
        pass
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        command = entry.read_bytes().split(b"\0") if entry.exists() else []
        assert str(port).encode() not in command, command


def test_charts_name_metrics_that_runs_have() -> None:
    """A chart of another metric would stay empty; the view fits into a tag."""
    view = mlflow_ui.build_view("tags.`x` = 'y'")
    for chart in view["compareRunCharts"]:
        assert chart["metricKey"] in COLUMNS
        assert chart["selectedXAxisMetricKey"] in ("", *COLUMNS)
    assert len(json.dumps(view)) < 5000


def test_without_a_sqlite_store_no_server_is_started(tmp_path: Path) -> None:
    """A folder without a store is refused; of a store on a server the address is printed."""
    with pytest.raises(InputError, match="no MLflow store"):
        mlflow_ui.serve(tmp_path, None, print)
    (tmp_path / "experiment.yaml").write_text("tracking: {uri: 'http://mlflow.example:5000'}\n")
    messages: list[str] = []
    mlflow_ui.serve(tmp_path, None, messages.append)
    assert messages == ["the runs are on a server: http://mlflow.example:5000"]
