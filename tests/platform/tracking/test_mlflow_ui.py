"""`dbo ui`: MLflow's pages on this project's store, opened on a comparison; checked in a real browser."""

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
from dbo.platform.runs.run_folder import COLUMNS, Target
from dbo.platform.tracking import mlflow_ui
from dbo.platform.tracking.client import environment
from dbo.platform.tracking.process import sync

CHROMIUM = shutil.which("chromium")
NAMES = ("c2dfb", "d_soba", "f2ba")
PATIENCE = 120_000     # milliseconds; a loaded machine takes its time

Served = tuple["subprocess.Popen[str]", str]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment("").items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs on the digits, as a comparison with its report, in a store."""
    pytest.importorskip("mlflow")
    runs = tmp_path_factory.mktemp("ui") / "runs"
    common: dict[str, Any] = {"nodes": 4, "rounds": 4, "engine": {"name": "local"}}
    experiments = [Experiment(**common, algorithm={"name": name}) for name in NAMES]
    compare(experiments, Target("test_accuracy", 0.5), runs / "c")
    outputs.after("compare", runs / "c")
    before = dict(os.environ)
    sync(runs / "c", f"sqlite:///{runs / 'mlflow.db'}", None)
    os.environ.clear()
    os.environ.update(before)
    return runs


@pytest.fixture(scope="module")
def served(runs: Path) -> Iterator[Served]:
    """`dbo ui` as a user starts it, and the address that it tells."""
    command = [sys.executable, "-c", "from dbo.platform.cli.main import main; main()", "ui", str(runs)]
    with socket.socket() as taken:                      # the usual port is in use: another one is taken
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", mlflow_ui.PORT))
            taken.listen()
        except OSError:
            pass                                        # by somebody else
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
        assert process.stdout is not None
        said = ""
        while "Ctrl-C" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
    assert f"port {mlflow_ui.PORT} is in use" in said
    yield process, re.findall(r"^http://127\.0\.0\.1:\d+/#\S+$", said, re.MULTILINE)[0]
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
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=[
            "--no-sandbox", "--disable-gpu", "--disable-background-networking"])
        yield opened
        opened.close()


@pytest.fixture
def visit(browser: Any, require: Callable[..., None]) -> Iterator[Callable[[int, int], Any]]:
    """A new page of that size; the browser's storage is empty."""
    require("browser", CHROMIUM is not None)
    pages = []

    def opened(width: int, height: int) -> Any:
        pages.append(browser.new_page(viewport={"width": width, "height": height}))
        pages[-1].set_default_timeout(PATIENCE)
        return pages[-1]

    yield opened
    for page in pages:
        page.close()


def shoot(page: Any, name: str) -> None:
    if folder := os.environ.get("DBO_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def test_the_address_opens_on_a_comparison(served: Served, visit: Callable[[int, int], Any]) -> None:
    """All runs by their names, a chart of accuracy against MB with a line for each."""
    page = visit(1600, 1000)
    page.goto(served[1])
    card = page.get_by_test_id("experiment-view-compare-runs-card").first
    card.locator(".scatterlayer .trace").nth(len(NAMES) - 1).wait_for(state="attached")
    drawn = card.inner_text()
    assert drawn.startswith("test_accuracy")
    assert "comm_mb" in drawn
    for name in NAMES:
        assert name in drawn                # the legend
    listed = page.inner_text("body")
    for name in NAMES:
        assert f"{name} · ring · h 0.8 · seed 0" in listed
    assert "Prompts" not in listed          # of the pages for language models
    shoot(page, "mlflow")


def test_the_report_is_shown_among_the_artifacts(
    served: Served, runs: Path, visit: Callable[[int, int], Any]
) -> None:
    """In MLflow's sandboxed frame: table, figures, links and data work, and nothing goes wrong in it."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("dbo")
    assert experiment is not None
    (parent,) = client.search_runs([experiment.experiment_id], "tags.`dbo.group_key` != ''")
    page = visit(1280, 900)
    wrong: list[str] = []                   # in the console of the report alone, whose address is a blob
    page.on("console", lambda message: wrong.append(message.text) if (
        message.type in ("error", "warning") and message.location["url"].startswith("blob:")) else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))        # what a sandbox refuses has no address
    address = served[1].partition("#")[0]
    page.goto(f"{address}#/experiments/{experiment.experiment_id}/runs/{parent.info.run_id}/artifacts/report.html")
    report = page.frame_locator("iframe")
    report.locator("h1").wait_for()
    assert report.locator(".standings tbody tr").count() == len(NAMES)
    report.locator("#accuracy .scatterlayer .trace").nth(len(NAMES) - 1).wait_for(state="attached")
    shoot(page, "mlflow-report")
    listed = page.inner_text("body")
    for name in ("compare.csv", "figures", "report.html", "topology.png"):
        assert name in listed

    report.locator("nav a", has_text="Topology").click()
    report.locator("#topology .points path").nth(3).wait_for(state="attached")
    report.locator("#topology summary").click()
    assert report.locator("#topology textarea").input_value().startswith("run,round,node,")
    report.locator("#topology [data-download]").click()         # downloads are refused there
    assert report.locator("#topology [data-download]").inner_text() == "Copied topology.csv"
    assert report.locator("h1").count() == 1                    # no click has led away from the page
    shoot(page, "mlflow-topology")
    assert wrong == []


def test_nothing_is_left_of_the_server(served: Served) -> None:
    """SIGTERM ends it well; it is the last test of the server that all of them share."""
    process, address = served
    port = int(re.findall(r":(\d+)/", address)[0])
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0
    time.sleep(0.2)
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=1):
        pass
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        words = entry.read_bytes().split(b"\0") if entry.exists() else []
        assert str(port).encode() not in words, words


def test_charts_name_metrics_that_runs_have() -> None:
    """A chart of a metric that no run has would be empty for ever; the view fits into a tag."""
    view = mlflow_ui.view("tags.`x` = 'y'")
    for chart in view["compareRunCharts"]:
        assert chart["metricKey"] in COLUMNS
        assert chart["selectedXAxisMetricKey"] in ("", *COLUMNS)
    assert len(json.dumps(view)) < 5000


def test_no_store_no_server(tmp_path: Path) -> None:
    """A folder without a store is told; a store on a server is told with its address, and nothing is started."""
    with pytest.raises(InputError, match="no MLflow store"):
        mlflow_ui.serve(tmp_path, None, print)
    (tmp_path / "experiment.yaml").write_text("tracking: {uri: 'http://mlflow.example:5000'}\n")
    said: list[str] = []
    mlflow_ui.serve(tmp_path, None, said.append)
    assert said == ["the runs are on a server: http://mlflow.example:5000"]
