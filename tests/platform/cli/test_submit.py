"""Jobs on a real Ray head on loopback, with a token: `dbo submit` and plain `ray job submit`."""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from dbo.platform.cli.doctor_network import find_servers
from dbo.platform.runs.run_folder import read_run

pytestmark = pytest.mark.ray
REPO = Path(__file__).resolve().parents[3]
BIN = Path(sys.executable).parent

EXPERIMENT = """
name: job
nodes: 4
rounds: 6
checkpoint_every: 3
task: {name: quadratic, dim_x: 4, dim_y: 8}
engine: {name: ray, nodes_per_actor: 2}
tracking: {uri: off}
"""


class Head(NamedTuple):
    address: str
    metrics: str
    environment: dict[str, str]
    folder: str


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """Run `ray start --head` with its own token."""
    # Not in a folder of pytest: the paths of Ray's sockets must be short.
    folder = Path("/tmp") / f"dbo-head-{os.getpid()}"
    port, metrics = free_port(), free_port()
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "PATH": f"{BIN}:{os.environ['PATH']}", "COLUMNS": "160",
        "RAY_metrics_report_interval_ms": "500",
    }
    process = subprocess.Popen(
        [BIN / "ray", "start", "--head", "--block", f"--port={free_port()}",
         "--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1",
         f"--dashboard-port={port}", "--num-cpus=2", f"--temp-dir={folder}", f"--metrics-export-port={metrics}",
         # the other cluster of the test session uses the default, and then jobs find no agent
         f"--dashboard-agent-listen-port={free_port()}"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(address, environment["RAY_AUTH_TOKEN"], process)
        yield Head(address, f"http://127.0.0.1:{metrics}/metrics", environment, str(folder))
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(address: str, token: str, process: "subprocess.Popen[bytes]") -> None:
    request = urllib.request.Request(f"{address}/api/version", headers={"Authorization": f"Bearer {token}"})
    for _ in range(240):
        if process.poll() is not None:
            raise RuntimeError((process.stdout.read() if process.stdout else b"").decode()[-2000:])
        try:
            urllib.request.urlopen(request, timeout=5)
            return
        except OSError:
            time.sleep(0.5)
    raise TimeoutError("the head did not start")


def call(head: Head, *arguments: object, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(a) for a in arguments], env=head.environment, cwd=cwd, capture_output=True, text=True, timeout=240,
    )


def test_submit_streams_fetches_and_passes_the_exit_code(head: Head, tmp_path: Path) -> None:
    """A good experiment: progress lines appear, the results are fetched from a URL, exit 0."""
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    done = call(
        head, BIN / "dbo", "submit", "e.yaml", "rounds=7", "--address", head.address,
        "--storage", f"file://{tmp_path}/store", "--out", "fetched", cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "round 7/7" in done.stdout
    fetched = read_run(tmp_path / "fetched")
    assert fetched.summary["status"] == "finished"
    assert list(fetched.history["round"]) == list(range(8))
    assert fetched.state["x"].shape == (4, 4)


def test_a_failed_job_fails_here(head: Head, tmp_path: Path) -> None:
    """A run that diverges exits with 1 there and here, and its summary is fetched."""
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    done = call(
        head, BIN / "dbo", "submit", "e.yaml", "algorithm.eta_in=1e6", "rounds=60", "--address", head.address,
        "--storage", tmp_path / "store", "--out", "fetched", cwd=tmp_path,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert json.loads((tmp_path / "fetched" / "summary.json").read_bytes())["status"] == "diverged"


def find_driver(command: str) -> int | None:
    """Return the process whose arguments end like this."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            text = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if "-m dbo.platform.cli run " in text and text.endswith(command):
                return int(entry.parent.name)
    return None


def test_a_job_with_retries_survives_the_death_of_its_driver(head: Head, tmp_path: Path) -> None:
    """The driver is killed on the cluster: it is restarted there, resumes, and the job succeeds."""
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    command = [
        BIN / "dbo", "submit", "e.yaml", "rounds=400", "--address", head.address, "--storage", tmp_path / "store",
        "--out", "fetched", "--retries", "2",
    ]
    with subprocess.Popen(
        [str(word) for word in command], env=head.environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True,
    ) as client:
        deadline, driver = time.monotonic() + 120, None
        while driver is None:
            assert time.monotonic() < deadline
            assert client.poll() is None
            time.sleep(0.05)
            found = [path for path in tmp_path.glob("store/*/metrics.jsonl") if path.read_bytes().count(b"\n") > 20]
            driver = find_driver(f"--out {found[0].parent}") if found else None
        os.kill(driver, signal.SIGKILL)
        printed, _ = client.communicate(timeout=240)
    assert client.returncode == 0, printed
    assert "supervise: run was killed by SIGKILL; restart 1 of 2" in printed
    run = read_run(tmp_path / "fetched")
    assert (run.summary["status"], list(run.history["round"])) == ("finished", list(range(401)))


@pytest.mark.slow
def test_a_sweep_is_a_job(head: Head, tmp_path: Path) -> None:
    """It runs on the cluster, its folder is fetched; submitted again, no cell runs again."""
    experiment = "{nodes: 4, rounds: 6, task: {name: quadratic, dim_x: 4, dim_y: 8}, tracking: {uri: 'off'}}"
    (tmp_path / "s.yaml").write_text(f"experiment: {experiment}\naxes: {{seed: [0, 1]}}\nmetric: upper_loss\n")
    arguments = ("--address", head.address, "--storage", tmp_path / "store", "--out", "fetched")
    for progress in ("", ", 2 already done"):
        done = call(head, BIN / "dbo", "submit", "sweep", "s.yaml", "rounds=4", *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"2 cells{progress}" in done.stdout
    group = json.loads((tmp_path / "fetched" / "group.json").read_bytes())
    assert group["status"] == "finished"
    for member in group["members"]:
        assert list(read_run(tmp_path / "fetched" / member).history["round"]) == list(range(5))


@pytest.mark.slow
def test_a_comparison_is_a_job_that_can_be_followed_again(head: Head, tmp_path: Path) -> None:
    """It ships a plugin and an edge list; `dbo jobs` lists it, shows its output again and fetches its results."""
    (tmp_path / "c.yaml").write_text(EXPERIMENT + "topology: {name: edges, file: graph.txt}\n")
    (tmp_path / "graph.txt").write_text("0 1\n1 2\n2 3\n3 0\n")
    shutil.copy(REPO / "docs/examples/gossip_penalty.py", tmp_path / "own.py")
    place = ("--address", head.address, "--storage", tmp_path / "store")
    sent = call(
        head, BIN / "dbo", "submit", "compare", "c.yaml", "plugins=[own.py]", "algorithm.lam=20",
        "--algorithms", "c2dfb,gossip_penalty", "--seeds", "0,1", "--no-wait", *place, cwd=tmp_path,
    )
    assert sent.returncode == 0, sent.stdout + sent.stderr
    job = re.findall(r"submitted (raysubmit_\w+)", sent.stdout)[0]
    done = call(head, BIN / "dbo", "jobs", job, "--address", head.address, "--out", "fetched", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gossip_penalty" in done.stdout
    group = json.loads((tmp_path / "fetched" / "group.json").read_bytes())
    members = [f"{name}-seed{seed}" for name in ("c2dfb", "gossip_penalty") for seed in (0, 1)]
    assert (group["status"], sorted(group["members"])) == ("finished", members)
    run = read_run(tmp_path / "fetched" / "c2dfb-seed0")
    assert len(run.history) == 7
    listed = call(head, BIN / "dbo", "jobs", "--address", head.address, cwd=tmp_path)
    assert job in listed.stdout
    assert "succeeded" in listed.stdout
    stopped = call(head, BIN / "dbo", "jobs", job, "--stop", "--address", head.address, cwd=tmp_path)
    assert "has ended before" in stopped.stdout


@pytest.mark.slow
def test_a_plugin_that_is_a_module_travels_with_a_job(head: Head, tmp_path: Path) -> None:
    """Only the client has the package on its path; driver and actors on the cluster import what was sent."""
    package = tmp_path / "lib" / "lab_of_a_job"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copy(REPO / "docs/examples/gossip_penalty.py", package / "method.py")
    (tmp_path / "e.yaml").write_text(EXPERIMENT + "plugins: [lab_of_a_job.method]\nalgorithm: gossip_penalty\n")
    path = os.pathsep.join([str(tmp_path / "lib"), os.environ.get("PYTHONPATH", "")])
    client = head._replace(environment={**head.environment, "PYTHONPATH": path})
    done = call(
        client, BIN / "dbo", "submit", "e.yaml", "--address", head.address, "--storage", tmp_path / "store",
        "--out", "fetched", cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_run(tmp_path / "fetched").summary["status"] == "finished"


def test_unknown_job_is_one_line(head: Head, tmp_path: Path) -> None:
    done = call(head, BIN / "dbo", "jobs", "raysubmit_none", "--address", head.address, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip() == "dbo: raysubmit_none: no such job; `dbo jobs` lists them"


def test_head_on_loopback_listens_nowhere_else(head: Head) -> None:
    """docs/cluster.md names what must be set; `dbo doctor` would report a port that others can reach."""
    mine = [server for server in find_servers() if find_folder(server.port) == head.folder]
    assert any(server.process == "gcs_server" for server in mine)
    assert [server for server in mine if server.is_public] == []


def find_folder(port: int) -> str:
    """Return the temporary folder of the Ray process that listens at a port."""
    listing = subprocess.run(["ss", "-ltnpH", f"sport = :{port}"], capture_output=True, text=True, check=False).stdout
    for pid in re.findall(r"pid=(\d+)", listing):
        with contextlib.suppress(OSError):
            found = re.search(r"/tmp/dbo-head-\d+", Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
            if found:
                return found[0]
    return ""


def test_the_repository_is_a_legal_working_dir(head: Head, tmp_path: Path) -> None:
    """Plain `ray job submit --working-dir <repository>`: the folder platform/ does not hide the standard module."""
    copy = tmp_path / "repo"
    for package in ("platform", "algorithms", "tasks", "sweeps", "dashboards"):
        shutil.copytree(REPO / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "e.yaml").write_text(EXPERIMENT)
    done = call(
        head, BIN / "ray", "job", "submit", "--address", head.address, "--working-dir", copy, "--",
        "dbo", "run", "e.yaml", "tracking.uri=off", "--out", tmp_path / "out", cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_run(tmp_path / "out").summary["status"] == "finished"


@pytest.mark.slow
def test_the_prometheus_endpoint_has_every_metric(head: Head, tmp_path: Path) -> None:
    """During a run, every metric of the Grafana boards and alerts is at the Prometheus endpoint.

    Each has the labels run and algorithm; metrics of a node have its number too.
    """
    grafana = REPO / "dashboards" / "grafana"
    names = set(re.findall(r"(ray_dbo_\w+)\{", "".join(f.read_text() for f in [
        *grafana.glob("*.json"), grafana / "alerts.yaml"])))
    assert len(names) == 16
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    job = subprocess.Popen(
        [BIN / "dbo", "submit", "e.yaml", "name=watched", "rounds=100000", "eval_every=5",
         "task={name: coefficient_tuning}", "--address", head.address, "--storage", tmp_path / "store"],
        env=head.environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )
    seen: set[str] = set()
    lines: list[str] = []
    deadline = time.monotonic() + 180
    try:
        while seen < names and time.monotonic() < deadline:
            time.sleep(1)
            with contextlib.suppress(OSError):     # the agent starts later than the head
                text = urllib.request.urlopen(head.metrics, timeout=10).read().decode()
                lines = [line for line in text.splitlines() if 'run="watched"' in line and 'algorithm="c2dfb"' in line]
            seen = {name for name in names for line in lines if line.startswith(f"{name}{{")}
        nodes = {line.split('node="')[1].split('"')[0] for line in lines if line.startswith("ray_dbo_node_apart_x{")}
    finally:
        job.kill()
        output = job.communicate()[0]
        for job_id in {part.rstrip(";") for part in output.split() if part.startswith("raysubmit_")}:
            call(head, BIN / "ray", "job", "stop", "--address", head.address, job_id, cwd=tmp_path)
    assert seen == names, output
    assert nodes == {"0", "1", "2", "3"}


def test_a_wrong_token_is_refused(head: Head, tmp_path: Path) -> None:
    """The Jobs server responds 401, and `dbo submit` reports it in one line, exit 2."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{head.address}/api/jobs/", timeout=10)
    assert refused.value.code == 401
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    other = head._replace(environment={**head.environment, "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    done = call(
        other, BIN / "dbo", "submit", "e.yaml", "--address", head.address, "--storage", tmp_path, cwd=tmp_path
    )
    assert done.returncode == 2
    assert "--address" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("arguments", "message"), [
    (["--storage", "/tmp/x"], "--address: a value is required"),
    (["--address", "http://127.0.0.1:1"], "--storage: a value is required"),
    (["--address", "http://127.0.0.1:1", "--storage", "/tmp/x"], "no Ray Jobs server answers"),
    (["engine.name=local", "--address", "http://127.0.0.1:1", "--storage", "/tmp/x"], "engine.name: local"),
    (["rounds=0", "--address", "http://127.0.0.1:1", "--storage", "/tmp/x"], "rounds: 0 is not allowed"),
])
def test_wrong_submissions_are_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    """Wrong input is found before anything is sent: one line, exit 2."""
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    done = subprocess.run(
        [BIN / "dbo", "submit", "e.yaml", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "sweep: a file or a name is required"),
    (["sensitivity-q"], "did you mean 'sensitivity-k'"),
    (["sensitivity-k", "axes.algorithm.inner_steps=[0]"], "algorithm.inner_steps: 0 is not allowed"),
    (["sensitivity-k", "--storage", "s3://bucket/x"], "--storage: s3://bucket/x is not allowed"),
])
def test_wrong_sweeps_are_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    """As for experiments: before anything is sent."""
    place = ["--address", "http://127.0.0.1:1", *([] if "--storage" in arguments else ["--storage", "/tmp/x"])]
    done = subprocess.run(
        [BIN / "dbo", "submit", "sweep", *arguments, *place], cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("command", "message"), [
    (["submit", "compare", "rounds=0"], "rounds: 0 is not allowed"),
    (["submit", "compare", "--algorithms", "c3dfb"], "--algorithms: unknown value 'c3dfb', did you mean 'c2dfb'?"),
    (["submit", "compare", "--storage", "s3://bucket/x"], "--storage: s3://bucket/x is not allowed"),
    (["submit", "compare", "--seeds", "1,1"], "--seeds: [1, 1] is not allowed"),
    (["submit", "--seeds", "1,2"], "--seeds: '1,2' is not allowed; only `dbo submit compare` has it"),
    (["submit", "--algorithms", "c2dfb"], "--algorithms: 'c2dfb' is not allowed; only `dbo submit compare` has it"),
    (["jobs"], "no Ray Jobs server answers at http://127.0.0.1:1"),
    (["jobs", "--stop"], "--stop: needs a job"),
])
def test_wrong_comparisons_and_jobs_are_refused(tmp_path: Path, command: list[str], message: str) -> None:
    storage = ["--storage", "/tmp/x"] if command[0] == "submit" and "--storage" not in command else []
    done = subprocess.run(
        [BIN / "dbo", *command, "--address", "http://127.0.0.1:1", *storage], cwd=tmp_path, capture_output=True,
        text=True, timeout=120,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
