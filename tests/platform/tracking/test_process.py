"""The background process: no point is lost or doubled, whatever is killed or down."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from benchmarks.mlflow_server import serving
from tests.platform.tracking.mlflow_store import StoreView, sqlite_uri

from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.runs.compare import compare
from dbo.platform.runs.run_folder import read_metrics
from dbo.platform.runs.runner import run
from dbo.platform.runs.schema import Target
from dbo.platform.tracking.process import follow_in_background, last_error_line
from dbo.platform.tracking.sync import sync_folder


class Slowdown:
    """Callback that pauses at every evaluation and calls functions at some rounds."""

    def __init__(self, pause: float, **at: Callable[[], None]) -> None:
        self.pause, self.at = pause, at

    def on_start(self, experiment: Any, done: int) -> None: ...

    def on_evaluation(self, record: dict[str, Any]) -> None:
        time.sleep(self.pause)
        self.at.get(f"round_{record['round']}", lambda: None)()

    def on_notice(self, text: str) -> None: ...
    def on_end(self, result: Any) -> None: ...


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running


def test_a_server_that_is_down_for_a_while(
    server: Any, tiny: Callable[..., Experiment], tmp_path: Path
) -> None:
    """Killed in the middle of a run and back some seconds later: no point lost or doubled, the run FINISHED."""
    times: list[float] = []

    def stop() -> None:
        server.stop()
        times.append(time.monotonic())

    def start() -> None:
        times.append(time.monotonic())
        server.start()

    messages: list[str] = []
    folder = tmp_path / "r"
    with follow_in_background(folder, server.uri, "outage", messages.append):
        experiment = tiny(rounds=120, seed=1)
        result = run(experiment, folder, callback=Slowdown(0.1, round_40=stop, round_90=start))
        server.wait()
    if messages:                                   # a busy machine may not send all in time
        sync_folder(folder, server.uri, "outage")
    assert times[1] - times[0] > 5
    store = StoreView(server.uri)
    (found,) = [one for one in store.runs() if one.data.tags["dbo.run_key"] == experiment.run_key]
    store.assert_complete(found, result.folder)
    assert found.info.status == "FINISHED"
    files = {file.path for file in store.client.list_artifacts(found.info.run_id)}
    assert "state.safetensors" in files            # uploaded through the server, not to a local folder
    assert not (tmp_path / "mlruns").exists()


def test_a_server_that_never_answers(
    tiny: Callable[..., Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    """The run finishes; a message names what is missing and the command that sends it; no password is written."""
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "correct-horse")
    messages: list[str] = []
    folder = tmp_path / "r"
    with follow_in_background(folder, "http://127.0.0.1:9", "dbo", messages.append):
        run(tiny(tracking={"uri": "http://127.0.0.1:9"}), folder)
    (line,) = messages
    command = f"dbo sync {folder} --uri http://127.0.0.1:9"        # needed: a folder alone may not name a server
    assert line.startswith(f"7 of 7 points are not in MLflow yet; `{command}` sends them")
    content = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"correct-horse" not in content + line.encode()
    sync_folder(folder, store, None)
    seen = StoreView(store)
    (found,) = seen.runs()
    seen.assert_complete(found, folder)


@pytest.mark.parametrize(("text", "error"), [
    ("Traceback (most recent call last):\n  File \"a.py\"\nModuleNotFoundError: No module named 'psycopg'\n",
     "ModuleNotFoundError: No module named 'psycopg'"),
    ("WARNING mlflow: SQLAlchemy engine could not be created.\n(psycopg.OperationalError) connection failed\n"
     "(Background on this error at: https://sqlalche.me/e/21/e3q8)\nOperation will be retried in 25.5 seconds\n",
     "(psycopg.OperationalError) connection failed"),
    ("WARNING urllib3: after NewConnectionError('refused')\nmlflow.exceptions.MlflowException: Permission denied",
     "mlflow.exceptions.MlflowException: Permission denied"),
    ("no error here", "no error here"),
    ("", "no message from the background process"),
])
def test_the_last_error_line_is_the_error(text: str, error: str) -> None:
    """The error, not the line of a library about retrying after it."""
    assert last_error_line(text) == error


@pytest.mark.usefixtures("store")
def test_a_killed_command_is_tracked_and_resumed(tiny_overrides: tuple[str, ...], tmp_path: Path) -> None:
    """SIGKILL: what was recorded arrives, the run is KILLED; resumed: FINISHED, one run, every point once."""
    overrides = [override for override in tiny_overrides if not override.startswith("tracking")]
    command = [sys.executable, "-c", "from dbo.platform.cli.main import main; main()", "run", *overrides, "rounds=600",
               f"tracking.uri={sqlite_uri(tmp_path)}", "--out", str(tmp_path / "r"), "--quiet", "--resume"]
    driver = subprocess.Popen(command)
    metrics = tmp_path / "r" / "metrics.jsonl"
    while driver.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") < 60):
        time.sleep(0.02)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert not (tmp_path / "r" / "summary.json").exists(), "killed too late"
    recorded = [line["round"] for line in read_metrics(metrics)]
    wait_until(lambda: [one.info.status for one in find_runs(tmp_path)] == ["KILLED"])
    store = StoreView(sqlite_uri(tmp_path))
    (found,) = store.runs()
    assert store.steps(found) == recorded
    subprocess.run(command, check=True, timeout=300)
    (found,) = store.runs()
    assert found.info.status == "FINISHED"
    assert store.steps(found) == list(range(601))


def find_runs(folder: Path) -> list[Any]:
    return StoreView(sqlite_uri(folder)).runs() if (folder / "mlflow.db").exists() else []


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(Exception):                  # the store may not exist yet
            if condition():
                return
        time.sleep(0.3)
    raise TimeoutError


def test_a_refused_command_writes_nothing(tmp_path: Path) -> None:
    """Wrong input while the background process waits: no store, no folder."""
    with pytest.raises(InputError), follow_in_background(tmp_path / "runs" / "x", None, "dbo"):
        raise InputError("no")
    assert list(tmp_path.iterdir()) == []


def test_an_input_error_during_a_run_is_recorded(tiny: Callable[..., Experiment], tmp_path: Path, store: str) -> None:
    """FAILED with its reason, in the folder and in MLflow."""

    def refuse() -> None:
        raise InputError("metric: x is not measured by this task")

    with pytest.raises(InputError, match="not measured"), follow_in_background(tmp_path / "r", store, "dbo"):
        run(tiny(), tmp_path / "r", callback=Slowdown(0.0, round_3=refuse))
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["status"] == "failed"
    seen = StoreView(store)
    (found,) = seen.runs()
    assert (found.info.status, found.data.tags["dbo.status"]) == ("FAILED", "failed")
    assert found.data.tags["dbo.error"] == "metric: x is not measured by this task"
    assert seen.steps(found) == [0, 1, 2, 3]


def test_an_input_error_during_a_comparison_is_recorded(
    tiny: Callable[..., Experiment], tmp_path: Path, store: str
) -> None:
    """The parent and the child that was started: FAILED."""

    def refuse() -> None:
        raise InputError("no")

    out = tmp_path / "c"
    with pytest.raises(InputError), follow_in_background(out, store, "dbo"):
        compare([tiny()], Target("upper_loss", 1.0), out, callback=Slowdown(0.0, round_1=refuse))
    assert json.loads((out / "group.json").read_text())["status"] == "failed"
    assert [found.info.status for found in StoreView(store).runs()] == ["FAILED", "FAILED"]


def test_a_comparison_that_is_refused_at_once_is_unchanged(tiny: Callable[..., Experiment], tmp_path: Path) -> None:
    """A finished comparison that is repeated with other data keeps its status."""
    out, target = tmp_path / "c", Target("upper_loss", 1.0)
    compare([tiny()], target, out)
    before = (out / "group.json").read_bytes()
    summary = json.loads((out / "c2dfb" / "summary.json").read_text())
    summary["problem"]["data_sha256"], summary["sealed"] = "another", False
    (out / "c2dfb" / "summary.json").write_text(json.dumps(summary))
    (out / "c2dfb" / "manifest.json").unlink()      # it would restore the summary
    with pytest.raises(InputError, match="on other data"):
        compare([tiny()], target, out)
    assert (out / "group.json").read_bytes() == before
