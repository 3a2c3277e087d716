"""Runs in MLflow: found again, never doubled, nothing lost, whatever is killed or down; and nothing secret in them."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from benchmarks.mlflow_server import serving

from dbo.platform.config import tracking_uri, yaml_io
from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.runs.compare import compare
from dbo.platform.runs.run_folder import Target, read_metrics
from dbo.platform.runs.runner import run
from dbo.platform.tracking.client import Store, environment
from dbo.platform.tracking.process import complaint, destination, following, sync
from dbo.platform.tracking.reader import MAX_KEYS, Points, flat, run_name, values

MLFLOW = pytest.importorskip("mlflow")
KEY = "test_loss"


@pytest.fixture(autouse=True)
def _own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sync` tells MLflow its store through the environment; every test starts without that."""
    for name, value in environment("").items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)


class Seen:
    """What is in a store."""

    def __init__(self, uri: str) -> None:
        self.client = MLFLOW.MlflowClient(tracking_uri=uri)

    def runs(self) -> list[Any]:
        found = self.client.search_experiments()
        return list(self.client.search_runs([one.experiment_id for one in found if one.name != "Default"]))

    def steps(self, run: Any, key: str = KEY) -> list[int]:
        return sorted(point.step for point in self.client.get_metric_history(run.info.run_id, key))

    def assert_whole(self, run: Any, folder: Path) -> None:
        """Every evaluation of the folder once, with its value."""
        lines = {line["round"]: line for line in read_metrics(folder / "metrics.jsonl")}
        for key in (KEY, "seconds", "comm_mb"):
            assert self.steps(run, key) == sorted(lines), key
        for point in self.client.get_metric_history(run.info.run_id, KEY):
            assert point.value == lines[point.step][KEY]


def sqlite(folder: Path) -> str:
    return f"sqlite:///{folder / 'mlflow.db'}"


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with MLflow's tables in it, which take seconds to make."""
    folder = tmp_path_factory.mktemp("store")
    MLFLOW.MlflowClient(tracking_uri=sqlite(folder)).search_experiments()
    return folder / "mlflow.db"


@pytest.fixture
def store(empty_store: Path, tmp_path: Path) -> str:
    """A store of its own for a test, beside its folders."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return sqlite(tmp_path)


# ---- what is told ----------------------------------------------------------------------------------------------------


def test_a_run_is_there_once_with_all_that_belongs_to_it(
    tiny: Callable[..., Experiment], tmp_path: Path, store: str
) -> None:
    """Points, parameters, tags, data set, files; a second sync finds all of it and sends nothing."""
    experiment = tiny()
    folder = run(experiment, tmp_path / "r").folder
    said: list[str] = []
    sync(folder, store, None, said.append)
    sync(folder, store, None, said.append)
    assert said == [f"{folder}: sent 7 new points of 7", f"{folder}: up to date, 7 points"]
    seen = Seen(store)
    (found,) = seen.runs()
    seen.assert_whole(found, folder)
    assert (found.info.status, found.info.run_name) == ("FINISHED", "c2dfb · ring · h 0.8 · seed 0")
    assert found.data.params["algorithm.compressor.ratio"] == "0.2"
    assert not any(key.startswith("tracking") for key in found.data.params)
    tags = found.data.tags
    assert tags["dbo.run_key"] == experiment.run_key
    assert len(tags["mlflow.source.git.commit"]) == 40
    assert f"dbo run {folder / 'experiment.yaml'}" in tags["mlflow.note.content"]
    (data,) = found.inputs.dataset_inputs
    assert tags["dbo.data_digest"].startswith(data.dataset.digest)
    assert "h=0.8" in {tag.key: tag.value for tag in data.tags}["partition"]
    files = {file.path for file in seen.client.list_artifacts(found.info.run_id)}
    assert files >= {"experiment.yaml", "summary.json", "state.safetensors", "nodes.parquet"}
    table = parquet.read_table(seen.client.download_artifacts(found.info.run_id, "nodes.parquet"))
    assert table.column_names == ["round", "node", "accuracy", "apart_x", "apart_y", "bytes"]
    assert table.num_rows == 7 * 4
    assert str(tmp_path / "mlartifacts") in seen.client.get_run(found.info.run_id).info.artifact_uri


def test_replayed_rounds_are_not_sent_again(
    tiny: Callable[..., Experiment], tmp_path: Path, store: str
) -> None:
    """A run that went back has the rounds anew, with other clocks: MLflow keeps one point of each."""
    folder = run(tiny(), tmp_path / "r").folder
    lines = read_metrics(folder / "metrics.jsonl")

    def write(records: list[dict[str, Any]]) -> None:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    write(lines[:5])
    sync(folder, store, None)
    later = [{**line, "seconds": line["seconds"] + 9, "timestamp": line["timestamp"] + 9} for line in lines[3:]]
    write(lines[:3] + later)
    sync(folder, store, None)
    seen = Seen(store)
    (found,) = seen.runs()
    assert seen.steps(found) == seen.steps(found, "seconds") == list(range(7))


def test_ends_are_told_as_they_were(
    tiny: Callable[..., Experiment], tmp_path: Path, store: str
) -> None:
    """Diverged is FAILED with a tag; no end at all is KILLED, and FINISHED once the run has gone on to its end."""
    away = run(tiny(rounds=200, algorithm={"name": "c2dfb", "eta_in": 1e30}), tmp_path / "away").folder
    sync(away, store, None)
    experiment = tiny()
    folder = run(experiment, tmp_path / "r").folder
    summary = (folder / "summary.json").read_bytes()
    (folder / "summary.json").unlink()
    sync(folder, store, None)
    seen = Seen(store)
    ends = {found.data.tags["dbo.run_key"]: found for found in seen.runs()}
    killed = ends.pop(experiment.run_key)
    (diverged,) = ends.values()
    assert (diverged.info.status, diverged.data.tags["dbo.status"]) == ("FAILED", "diverged")
    assert "not finite" in diverged.data.tags["dbo.error"]
    assert (killed.info.status, killed.data.tags["dbo.status"]) == ("KILLED", "killed")
    (folder / "summary.json").write_bytes(summary)
    sync(folder, store, None)
    assert seen.client.get_run(killed.info.run_id).info.status == "FINISHED"


def test_a_comparison_is_a_parent_with_children(
    tiny: Callable[..., Experiment], tmp_path: Path, store: str
) -> None:
    """One parent, a child per algorithm, also when only a member is named or when it is synced again."""
    changes = {"algorithm": {"name": "d_soba"}}, {"algorithm": {"name": "f2ba"}}
    compare([tiny(**change) for change in changes], Target("upper_loss", 1.0), tmp_path / "c")
    (tmp_path / "c" / "figures").mkdir()
    for picture in ("topology.png", "figures/accuracy-mb.png", "figures/accuracy-mb.pdf"):
        (tmp_path / "c" / picture).write_bytes(b"drawn")
    for folder in (tmp_path / "c" / "f2ba", tmp_path / "c"):
        sync(folder, store, None)
    seen = Seen(store)
    parents = [found for found in seen.runs() if "dbo.group_key" in found.data.tags]
    children = [found for found in seen.runs() if "dbo.run_key" in found.data.tags]
    assert [found.info.status for found in (*parents, *children)] == ["FINISHED"] * 3
    (parent,) = parents
    assert {child.data.tags["mlflow.parentRunId"] for child in children} == {parent.info.run_id}
    assert sorted(child.data.params["algorithm.name"] for child in children) == ["d_soba", "f2ba"]
    assert "dbo compare" in parent.data.tags["mlflow.note.content"]
    files = {file.path for place in ("", "figures") for file in seen.client.list_artifacts(parent.info.run_id, place)}
    assert files >= {
        "compare.csv", "group.json", "topology.png", "figures/accuracy-mb.png", "figures/accuracy-mb.pdf"}


def test_two_at_once_on_a_new_store(tiny: Callable[..., Experiment], tmp_path: Path) -> None:
    """Two writers of the same run that both find no store: one store, one run, every point once."""
    folder = run(tiny(rounds=60), tmp_path / "r").folder
    command = [sys.executable, "-m", "dbo.platform.tracking.process", str(folder), "--uri", sqlite(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    seen = Seen(sqlite(tmp_path))
    (found,) = seen.runs()
    seen.assert_whole(found, folder)


def test_two_that_add_the_same_data_set_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store has refused it to the one that came second: asked again, it finds the data set of the first."""
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    log_inputs, asked = MlflowClient.log_inputs, []

    def collides(self: Any, *args: Any, **more: Any) -> None:
        asked.append(args)
        if len(asked) == 1:
            raise MlflowException("UNIQUE constraint failed")
        log_inputs(self, *args, **more)

    monkeypatch.setattr(MlflowClient, "log_inputs", collides)
    client = MlflowClient(sqlite(tmp_path))
    run_id = client.create_run(client.create_experiment("dbo")).info.run_id
    data = {"name": "digits", "digest": "d", "source": "s", "profile": "{}", "partition": "iid"}
    store = Store(sqlite(tmp_path), "dbo")
    store.open()
    store.log_data(run_id, data)
    assert [found.dataset.name for found in client.get_run(run_id).inputs.dataset_inputs] == ["digits"]
    assert len(asked) == 2


# ---- while a run goes on ---------------------------------------------------------------------------------------------


class Pace:
    """A watcher that slows a run down and does something at some rounds."""

    def __init__(self, pause: float, **at: Callable[[], None]) -> None:
        self.pause, self.at = pause, at

    def started(self, experiment: Any, done: int) -> None: ...

    def evaluated(self, record: dict[str, Any]) -> None:
        time.sleep(self.pause)
        self.at.get(f"round_{record['round']}", lambda: None)()

    def noted(self, text: str) -> None: ...
    def ended(self, result: Any) -> None: ...


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serving(tmp_path_factory.mktemp("server")) as made:
        yield made


def test_a_server_that_is_away_for_a_while(
    server: Any, tiny: Callable[..., Experiment], tmp_path: Path
) -> None:
    """Killed in the middle of a run and back some seconds later: no point lost, none doubled, the run FINISHED."""
    away: list[float] = []

    def stop() -> None:
        server.stop()
        away.append(time.monotonic())

    def start() -> None:
        away.append(time.monotonic())
        server.start()

    said: list[str] = []
    folder = tmp_path / "r"
    with following(folder, server.uri, "outage", said.append):
        experiment = tiny(rounds=120, seed=1)
        result = run(experiment, folder, watcher=Pace(0.1, round_40=stop, round_90=start))
        server.wait()
    if said:                                       # a machine that is too busy to send it in time
        sync(folder, server.uri, "outage")
    assert away[1] - away[0] > 5
    store = Seen(server.uri)
    (found,) = [one for one in store.runs() if one.data.tags["dbo.run_key"] == experiment.run_key]
    store.assert_whole(found, result.folder)
    assert found.info.status == "FINISHED"
    files = {file.path for file in store.client.list_artifacts(found.info.run_id)}
    assert "state.safetensors" in files            # through the server: this machine has no place of its own for them
    assert not (tmp_path / "mlruns").exists()


def test_a_server_that_never_answers(
    tiny: Callable[..., Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    """The run is done, what is missing is told with the way to bring it in, and the password is nowhere."""
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "correct-horse")
    said: list[str] = []
    folder = tmp_path / "r"
    with following(folder, "http://127.0.0.1:9", "dbo", said.append):
        run(tiny(tracking={"uri": "http://127.0.0.1:9"}), folder)
    (line,) = said
    command = f"dbo sync {folder} --uri http://127.0.0.1:9"        # which the folder alone may not name: see below
    assert line.startswith(f"7 points of 7 are not in MLflow yet; `{command}` brings them")
    everything = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"correct-horse" not in everything + line.encode()
    sync(folder, store, None)
    seen = Seen(store)
    (found,) = seen.runs()
    seen.assert_whole(found, folder)


@pytest.mark.parametrize(("text", "told"), [
    ("Traceback (most recent call last):\n  File \"a.py\"\nModuleNotFoundError: No module named 'psycopg'\n",
     "ModuleNotFoundError: No module named 'psycopg'"),
    ("WARNING mlflow: SQLAlchemy engine could not be created.\n(psycopg.OperationalError) connection failed\n"
     "(Background on this error at: https://sqlalche.me/e/21/e3q8)\nOperation will be retried in 25.5 seconds\n",
     "(psycopg.OperationalError) connection failed"),
    ("WARNING urllib3: after NewConnectionError('refused')\nmlflow.exceptions.MlflowException: Permission denied",
     "mlflow.exceptions.MlflowException: Permission denied"),
    ("out of words", "out of words"),
    ("", "the writer gave no sign"),
])
def test_what_a_silent_writer_complained_of(text: str, told: str) -> None:
    """The error itself, not what a library says after it about trying again."""
    assert complaint(text) == told


@pytest.mark.usefixtures("store")
def test_a_killed_command_and_its_resumption(tiny_overrides: tuple[str, ...], tmp_path: Path) -> None:
    """SIGKILL: what was recorded arrives and the run is KILLED; resumed: FINISHED, one run, every point once."""
    words = [word for word in tiny_overrides if not word.startswith("tracking")]
    command = [sys.executable, "-c", "from dbo.platform.cli.main import main; main()", "run", *words, "rounds=600",
               f"tracking.uri={sqlite(tmp_path)}", "--out", str(tmp_path / "r"), "--quiet", "--resume"]
    driver = subprocess.Popen(command)
    metrics = tmp_path / "r" / "metrics.jsonl"
    while driver.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") < 60):
        time.sleep(0.02)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert not (tmp_path / "r" / "summary.json").exists(), "killed too late to prove anything"
    recorded = [line["round"] for line in read_metrics(metrics)]
    until(lambda: [one.info.status for one in runs_in(tmp_path)] == ["KILLED"])
    store = Seen(sqlite(tmp_path))
    (found,) = store.runs()
    assert store.steps(found) == recorded
    subprocess.run(command, check=True, timeout=300)
    (found,) = store.runs()
    assert found.info.status == "FINISHED"
    assert store.steps(found) == list(range(601))


def runs_in(folder: Path) -> list[Any]:
    return Seen(sqlite(folder)).runs() if (folder / "mlflow.db").exists() else []


def until(what: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(Exception):                  # the store may be about to be made
            if what():
                return
        time.sleep(0.3)
    raise TimeoutError


def test_a_refused_command_leaves_nothing(tmp_path: Path) -> None:
    """Wrong input while a writer waits: no store, no folder."""
    with pytest.raises(InputError), following(tmp_path / "runs" / "x", None, "dbo"):
        raise InputError("no")
    assert list(tmp_path.iterdir()) == []


def test_wrong_input_that_shows_late_is_an_end(tiny: Callable[..., Experiment], tmp_path: Path, store: str) -> None:
    """An InputError of a run that has begun: FAILED with its reason, in the folder and in MLflow."""

    def refuse() -> None:
        raise InputError("metric: x is not measured by this task")

    with pytest.raises(InputError, match="not measured"), following(tmp_path / "r", store, "dbo"):
        run(tiny(), tmp_path / "r", watcher=Pace(0.0, round_3=refuse))
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["status"] == "failed"
    seen = Seen(store)
    (found,) = seen.runs()
    assert (found.info.status, found.data.tags["dbo.status"]) == ("FAILED", "failed")
    assert found.data.tags["dbo.error"] == "metric: x is not measured by this task"
    assert seen.steps(found) == [0, 1, 2, 3]


def test_a_comparison_that_is_refused_late_has_an_end(
    tiny: Callable[..., Experiment], tmp_path: Path, store: str
) -> None:
    """The parent and the child that was begun: FAILED."""

    def refuse() -> None:
        raise InputError("no")

    out = tmp_path / "c"
    with pytest.raises(InputError), following(out, store, "dbo"):
        compare([tiny()], Target("upper_loss", 1.0), out, watcher=Pace(0.0, round_1=refuse))
    assert json.loads((out / "group.json").read_text())["status"] == "failed"
    assert [found.info.status for found in Seen(store).runs()] == ["FAILED", "FAILED"]


def test_a_comparison_that_is_refused_at_once_is_as_it_was(tiny: Callable[..., Experiment], tmp_path: Path) -> None:
    """A finished one that is repeated with other data: its status stays."""
    out, target = tmp_path / "c", Target("upper_loss", 1.0)
    compare([tiny()], target, out)
    before = (out / "group.json").read_bytes()
    summary = json.loads((out / "c2dfb" / "summary.json").read_text())
    summary["problem"]["data_sha256"] = "another"
    (out / "c2dfb" / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(InputError, match="on other data"):
        compare([tiny()], target, out)
    assert (out / "group.json").read_bytes() == before


# ---- whose server it is ----------------------------------------------------------------------------------------------


@pytest.fixture
def named(tiny: Callable[..., Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder that names a server; no credentials lie here."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("USERNAME", "PASSWORD", "TOKEN", "AUTH", "AWS_SIGV4"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
    return run(tiny(tracking={"uri": "http://127.0.0.1:9"}), tmp_path / "r").folder


@pytest.mark.parametrize("name", ["PASSWORD", "TOKEN", "USERNAME", "AUTH", "file"])
def test_credentials_go_to_no_server_that_only_a_folder_names(
    named: Path, name: str, dbo: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused in one line, whatever kind lies here, unless it is the server of MLFLOW_TRACKING_URI or given."""
    assert destination(named, None) == "http://127.0.0.1:9"          # control: nothing to lose
    if name == "file":
        (tmp_path / ".mlflow").mkdir()
        (tmp_path / ".mlflow" / "credentials").write_text("[mlflow]\n")
    else:
        monkeypatch.setenv(f"MLFLOW_TRACKING_{name}", "hunter2")
    for mine in ("", "http://127.0.0.1:10", "https://127.0.0.1:9", "http://localhost:9", "sqlite:///a.db"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", mine)
        done = dbo("sync", str(named))
        assert done.code == 2
        assert "give --uri http://127.0.0.1:9" in done.err
        assert "hunter2" not in done.err
        assert len(done.err.splitlines()) == 1
    assert destination(named, "http://127.0.0.1:9") == "http://127.0.0.1:9"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9/")
    assert destination(named, None) == "http://127.0.0.1:9"


def test_all_folders_are_looked_at_before_the_first_is_sent(
    named: Path, tiny: Callable[..., Experiment], dbo: Callable[..., Any], tmp_path: Path, store: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that may not be sent keeps the others back; what MLflow is told of one does not decide about the next."""
    other = run(tiny(tracking={"uri": store}, seed=1), tmp_path / "other").folder
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "hunter2")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:10")
    assert dbo("sync", str(other), str(named)).code == 2
    assert Seen(store).runs() == []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    done = dbo("sync", str(other), str(named))
    assert (done.code, len(Seen(store).runs())) == (1, 1)           # sent, and tried: nobody is there
    assert "7 points of 7 are not in MLflow" in done.err


@pytest.mark.parametrize("uri", ["databricks", "http://me:hunter2@h", 7, ["http://h"], "file:///etc"])
def test_a_folder_s_store_is_checked_as_any(named: Path, uri: Any) -> None:
    """Whoever wrote the folder may have written anything."""
    text = yaml_io.read(named / "experiment.yaml")
    (named / "experiment.yaml").write_text(yaml_io.dump({**text, "tracking": {"uri": uri}}))
    with pytest.raises(InputError, match=r"tracking.uri: .*(allowed: null|environment)"):
        sync(named, None, None)


def test_a_data_base_gets_no_password_either(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PGPASSWORD goes to whichever PostgreSQL is asked."""
    text = yaml_io.read(named / "experiment.yaml")
    (named / "experiment.yaml").write_text(yaml_io.dump({**text, "tracking": {"uri": "postgresql://h/n"}}))
    monkeypatch.setenv("PGPASSWORD", "hunter2")
    with pytest.raises(InputError, match="PGPASSWORD"):
        destination(named, None)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://h:5432/other")
    assert destination(named, None) == "postgresql://h/n"


# ---- small parts -----------------------------------------------------------------------------------------------------


def test_metrics_are_few_and_finite() -> None:
    """At most MAX_KEYS keys, nothing that MLflow would store as something else."""
    record = {"round": 1, "timestamp": 2.0, "seconds": 3.0, "test_loss": float("inf"), "test_accuracy": None}
    assert dict(values(record)) == {"seconds": 3.0}
    many = record | {f"extra_{number}": 1.0 for number in range(100)}
    assert len(dict(values(many))) <= MAX_KEYS


def test_lines_are_taken_in_as_they_come(tmp_path: Path) -> None:
    """Half a line waits for its end; a file that was taken back is read anew and says so."""
    file = tmp_path / "metrics.jsonl"
    points = Points(file)
    assert not points.read()
    file.write_text('{"round": 0, "timestamp": 1}\n{"round": 1, "time')
    assert (points.read(), sorted(points.records)) == (False, [0])
    with open(file, "a") as more:
        more.write('stamp": 2}\n')
    assert (points.read(), sorted(points.records)) == (False, [0, 1])
    file.write_text('{"round": 0, "timestamp": 1}\n')
    assert (points.read(), sorted(points.records)) == (True, [0])
    file.write_text('{"round": 0, "timestamp": 3}\n{"round": 1, "timestamp": 4}\n')
    assert (points.read(), points.records[0]["timestamp"]) == (True, 3)
    file.unlink()
    assert (points.read(), points.records) == (True, {})


def test_names_and_parameters() -> None:
    """A run's name tells what runs differ in; nested parameters have dotted names and limited length."""
    data = {"algorithm": {"name": "mdbo"}, "topology": {"name": "torus"}, "partition": {"name": "iid"}, "seed": 3}
    assert run_name(data) == "mdbo · torus · iid · seed 3"
    cell = data | {"algorithm": {"name": "c2dfb", "inner_steps": 5, "compressor": {"ratio": 0.2}}}
    axes = ("seed", "algorithm.inner_steps", "algorithm.compressor.ratio")
    assert run_name(cell, axes) == "c2dfb · torus · iid · seed 3 · inner_steps 5 · ratio 0.2"
    params = flat({"a": {"b": {"c": 0.5}}, "d": [1, "x"], "e": None, "f": "y" * 9000})
    assert (params["a.b.c"], params["d"], params["e"], len(params["f"])) == ("0.5", '[1, "x"]', "null", 6000)


@pytest.mark.parametrize("uri", [None, "off", "sqlite:///a.db", "sqlite:////tmp/a.db", "http://h:5000", "https://h/x",
                                 "postgresql://me@h/name"])
def test_stores_that_may_be_named(uri: str | None) -> None:
    tracking_uri.check("tracking.uri", uri)


@pytest.mark.parametrize("uri", ["", "mlruns", "./x.db", "file:///x", "sqlite:///", "sqlite:///:memory:", "databricks",
                                 "http://", "http://h:99999", "s3://b", "http://me:secret@h", "http://me@h:80:90",
                                 "postgresql://me:secret@h/n", "https://me@h", "postgresql://h/n?password=secret",
                                 "http://h:1?api_key=secret", "https://h/?access_token=secret", "http://h:1/?a=1&pwd=secret",
                                 "postgresql://h/n?sslpassword=secret", "sqlite:///a.db?token=secret",
                                 "http://h:99999/?pass%77ord=secret"])
def test_stores_that_may_not(uri: str) -> None:
    """Each is told with what is allowed; a password is not repeated."""
    with pytest.raises(InputError, match=r"^tracking.uri: .*(allowed: null|environment)") as told:
        tracking_uri.check("tracking.uri", uri)
    assert "secret" not in str(told.value)


def test_where_the_store_lies(tmp_path: Path) -> None:
    """One for runs/, else one in the folder; a run of a group that has one uses that."""
    assert tracking_uri.place(None, tmp_path / "runs" / "a" / "b") == sqlite(tmp_path / "runs")
    assert tracking_uri.place(None, tmp_path / "else") == sqlite(tmp_path / "else")
    assert tracking_uri.place("sqlite:///x/y.db", tmp_path) == f"sqlite:///{tmp_path / 'x' / 'y.db'}"
    (tmp_path / "mlflow.db").touch()                                    # somebody else's
    assert tracking_uri.place(None, tmp_path / "else") == sqlite(tmp_path / "else")
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "group.json").touch()
    (tmp_path / "g" / "mlflow.db").touch()
    assert tracking_uri.place(None, tmp_path / "g" / "cells" / "a") == sqlite(tmp_path / "g")
