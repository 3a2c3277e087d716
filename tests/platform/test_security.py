"""Security: no pickle is loaded, no text is run as code, no password is recorded."""

import ast
import json
import pickle
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.faults import abuse

from dbo.platform.config.experiment import Experiment
from dbo.platform.config.redact import redact, redact_url
from dbo.platform.errors import InputError, RunError
from dbo.platform.network import packet as wire
from dbo.platform.runs.remote import RemoteFolder
from dbo.platform.runs.run_folder import read_run
from dbo.platform.runs.runner import run
from dbo.platform.tracking.sync import describe_error

ROOT = Path(__file__).resolve().parents[2]

Command = Callable[..., Any]
FOLDERS = ("algorithms", "dashboards", "dbo", "platform", "sweeps", "tasks")


# ---- pickles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [
    "metrics.jsonl", "nodes.jsonl", "summary.json", "experiment.yaml", "state.safetensors", "network.json",
])
def test_a_planted_file_is_never_executed(tiny: Callable[..., Experiment], tmp_path: Path, name: str) -> None:
    """Pickles of every protocol, YAML tags and Python in place of each file of a run are refused, not executed."""
    marker = tmp_path / "ran"
    run(tiny(), tmp_path / "r")
    for payload in abuse.make_payloads(marker):
        (tmp_path / "r" / name).write_bytes(payload)
        for look in (
            lambda: read_run(tmp_path / "r"), lambda: run(tiny(), tmp_path / "r", resume=True),
            lambda: Experiment.read(tmp_path / "r" / name),
        ):
            with suppress(InputError, RunError):
                look()
        assert not marker.exists()


def test_a_planted_message_is_never_executed(tmp_path: Path) -> None:
    """A packet holds numbers only."""
    for payload in abuse.make_payloads(tmp_path / "ran"):
        with pytest.raises(wire.WireError):
            wire.decode(payload)
    assert not (tmp_path / "ran").exists()


def test_the_payloads_work(tmp_path: Path) -> None:
    """Control: unpickling one creates the folder."""
    for number, payload in enumerate(abuse.make_payloads(tmp_path / "ran")[:6]):
        pickle.loads(payload)
        assert (tmp_path / "ran").exists(), number
        (tmp_path / "ran").rmdir()


# ---- code ------------------------------------------------------------------------------------------------------------

# (file, call): why it is allowed
ALLOWED = {
    ("platform/config/plugins.py", "exec"): "a plugin is code that the user names",
    ("platform/config/yaml_io.py", "yaml.load"): "with a loader that is a SafeLoader",
    ("platform/verify/shipping.py", "cloudpickle.loads"): "what the same command has just pickled, as Ray would",
}
FORBIDDEN = {
    "eval", "exec", "pickle.load", "pickle.loads", "pickle.Unpickler", "cPickle.loads", "dill.loads", "dill.load",
    "cloudpickle.loads", "cloudpickle.load", "joblib.load", "torch.load", "yaml.load", "yaml.unsafe_load",
    "yaml.full_load", "marshal.loads", "shelve.open", "os.system", "os.popen", "pd.read_pickle", "pandas.read_pickle",
    "mlflow.pyfunc.load_model", "mlflow.pytorch.load_model", "mlflow.sklearn.load_model",
}


def offences(file: Path, name: str) -> list[str]:
    """Return the calls that execute data or start a shell."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [f"{name}:{node.lineno} import {m}" for m in modules if m in {"pickle", "dill", "marshal",
                "shelve"}]
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in FORBIDDEN and (name, called) not in ALLOWED:
            found.append(f"{name}:{node.lineno} {called}")
        for keyword in node.keywords:
            if keyword.arg in ("shell", "allow_pickle") and getattr(keyword.value, "value", None) is True:
                found.append(f"{name}:{node.lineno} {keyword.arg}=True")
    return found


def test_no_package_loads_pickles_or_runs_text() -> None:
    """eval, exec, pickle, torch.load, yaml.load, shell=True and the like: only where ALLOWED has a reason."""
    found = []
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            found += offences(file, file.relative_to(ROOT).as_posix())
    assert found == []


@pytest.mark.parametrize("line", [
    "eval('1')", "pickle.loads(b'')", "subprocess.run('ls', shell=True)", "np.load('f', allow_pickle=True)",
    "torch.load('f')", "yaml.load('a')", "import pickle", "from pickle import loads", "os.system('ls')", "exec('1')",
])
def test_a_planted_offence_is_found(tmp_path: Path, line: str) -> None:
    """Control."""
    (tmp_path / "planted.py").write_text(f"def late():\n    {line}\n")
    assert len(offences(tmp_path / "planted.py", "planted.py")) == 1


# ---- passwords -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "shown"), [
    ("s3://me:hunter2@host/a", "s3://***@host/a"), ("http://hunter2@h:1", "http://***@h:1"),
    ("https://h/a?X-Amz-Signature=hunter2&b=1", "https://h/a?X-Amz-Signature=***&b=1"),
    ("x https://h/?token=hunter2 y", "x https://h/?token=*** y"), ("ftp://me:hunt@er2@host", "ftp://***@host"),
    ("postgresql://h/d?user=me&password=hunter2&b=1", "postgresql://h/d?user=***&password=***&b=1"),
    ("'s3://h/a?api_key=hunter2'", "'s3://h/a?api_key=***'"), ("https://h/#access_token=hunter2", "https://h/#access_token=***"),
    ("http://h/?client%5Fsecret=hunter2", "http://h/?client%5Fsecret=***"), ("http://h/?pass=hunter2;a=1", "http://h/?pass=***;a=1"),
    ("http://h/?pass%77ord=hunter2", "http://h/?pass%77ord=***"), ("http://h/?viewStateShareKey=1", "http://h/?viewStateShareKey=1"),
    ("http://h/?round=3&sslmode=require", "http://h/?round=3&sslmode=require"),
    ("https://h/a?hunter2", "https://h/a?***"), ("https://h/a?x=hunter2", "https://h/a?x=***"),
    ("https://h/services/T0/hunter2hunter2hunter2/x", "https://h/services/T0/***/x"),
    ("s3://bucket/0123456789abcdef0123456789", "s3://bucket/0123456789abcdef0123456789"),
    ("sqlite:////tmp/0123456789abcdef0123456789/m.db", "sqlite:////tmp/0123456789abcdef0123456789/m.db"),
    ("see https://docs.ray.io/en/latest/cluster.html", "see https://docs.ray.io/en/latest/cluster.html"),
    ("a=b c@d e://f", "a=b c@d e://f"), ("mail me@there.org", "mail me@there.org"),
])
def test_credentials_are_redacted(text: str, shown: str) -> None:
    """User, password and tokens of any URL in a text; nothing else."""
    assert redact(text) == shown
    assert redact(shown) == shown


def test_the_password_of_a_storage_url_is_nowhere(
    dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A URL that cannot be used, and one that fails while writing: not in the error, the folder or the local copy."""
    monkeypatch.chdir(tmp_path)
    keys = [*tiny_overrides, "tracking.uri=off", "--quiet"]
    done = dbo("run", *keys, "--out", "nosuch://me:hunter2@host/x")
    assert done.code == 2
    assert "hunter2" not in done.err

    def fails(self: RemoteFolder) -> None:
        raise RunError(redact("ftp://me:hunter2@host/x cannot be written"))

    monkeypatch.setattr(RemoteFolder, "push", fails)
    done = dbo("run", *keys, "--out", f"file://me:hunter2@{tmp_path}/there")
    assert "hunter2" not in done.out + done.err
    recorded = b"".join(file.read_bytes() for file in (tmp_path / "runs").rglob("*") if file.is_file())
    assert b"hunter2" not in recorded


def test_a_password_in_an_experiment_is_not_recorded(
    tiny: Callable[..., Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A URL with a password is refused, or recorded without it; an error does not contain it either."""
    with pytest.raises(InputError) as refused:
        tiny(tracking={"uri": "http://me:hunter2@host:1"})
    assert "hunter2" not in str(refused.value)
    run(tiny(name="s3://me:hunter2@host/x?secret=hunter2"), tmp_path / "r")
    everything = b"".join(file.read_bytes() for file in (tmp_path / "r").rglob("*") if file.is_file())
    assert b"s3://***@host/x?secret=***" in everything
    assert b"hunter2" not in everything


def test_a_password_in_the_command_of_a_comparison_is_not_recorded(
    dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """The command goes to group.json, and from there to MLflow and the report."""
    keys = [key for key in tiny_overrides if not key.startswith("algorithm")]
    done = dbo("compare", *keys, "data_dir=s3://me:hunter2@host/x?token=hunter2", "--algorithms", "d_soba,f2ba",
               "--out", str(tmp_path / "c"), "--quiet")
    assert done.code == 0, done.err
    command = json.loads((tmp_path / "c" / "group.json").read_text())["command"]
    assert "'data_dir=s3://***@host/x?token=***'" in command
    everything = b"".join(file.read_bytes() for file in (tmp_path / "c").rglob("*") if file.is_file())
    assert b"hunter2" not in everything + (done.out + done.err).encode()


def test_the_text_of_a_failure_is_redacted(tiny: Callable[..., Experiment], tmp_path: Path) -> None:
    """An exception that quotes a URL: summary.json and events.jsonl have it without the password."""
    plugin = tmp_path / "raises.py"
    plugin.write_text(
        "from dbo.algorithms.methods import c2dfb\n"
        "from dbo.algorithms.registry import algorithm\n"
        "@algorithm('leaky', config=c2dfb.Config, state=c2dfb.State, init=c2dfb.init, packets=lambda c: 3)\n"
        "async def leaky(st, shard, cfg):\n    'Leaks.'\n    raise OSError('http://me:hunter2@host/ is unreachable')\n"
    )
    with pytest.raises(OSError, match="unreachable"):
        run(tiny(algorithm={"name": "leaky"}, plugins=[str(plugin)]), tmp_path / "r")
    for name in ("summary.json", "events.jsonl"):
        text = (tmp_path / "r" / name).read_text()
        assert "is unreachable" in text
        assert "hunter2" not in text
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["status"] == "failed"


def test_no_secret_is_in_the_repository() -> None:
    """Keys and tokens have known patterns; no file that is shipped or documented has one."""
    shapes = re.compile(
        r"AKIA[0-9A-Z]{16}|-----BEGIN (?:RSA |EC )?PRIVATE KEY|ghp_[A-Za-z0-9]{36}|xox[bp]-[0-9]{8,}"
        r"|RAY_AUTH_TOKEN=[0-9a-f]{32,}"
    )
    for folder in (*FOLDERS, "docs", "benchmarks"):
        for file in (ROOT / folder).rglob("*"):
            if file.is_file() and file.suffix in {".py", ".md", ".yaml", ".json", ".toml"}:
                assert not shapes.search(file.read_text(encoding="utf-8", errors="replace")), file


# ---- dependencies ----------------------------------------------------------------------------------------------------


def test_no_dependency_has_a_known_vulnerability() -> None:
    """pip-audit, where its database can be reached."""
    try:
        with urllib.request.urlopen("https://pypi.org/pypi/jinja2/2.4.1/json", timeout=5) as response:
            known = json.load(response).get("vulnerabilities")
    except (OSError, ValueError):
        known = None
    if not known:
        pytest.skip("the database of vulnerabilities cannot be reached")
    done = subprocess.run(
        [sys.executable, "-m", "pip_audit", "--skip-editable", "--progress-spinner", "off", "--timeout", "10"],
        capture_output=True, text=True, timeout=300, check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize(("url", "shown"), [
    ("https://h:1/hunter2/mlflow", "https://h:1/***"), ("ftp://me:word@h/hunter2", "ftp://***@h/***"),
    ("https://h", "https://h"), ("s3://bucket/run", "s3://bucket/run"), ("postgresql://h/name", "postgresql://h/name"),
])
def test_the_path_of_a_web_address_is_not_recorded(url: str, shown: str) -> None:
    """Nobody can tell a secret path from another one; names of files, objects and data bases are kept."""
    assert redact_url(url) == shown


def test_the_path_of_a_tracking_server_is_in_no_file(tiny: Callable[..., Experiment], tmp_path: Path) -> None:
    """experiment.yaml names the host only; a run from that file, or dbo sync, asks for the whole URI."""
    run(tiny(tracking={"uri": "http://127.0.0.1:1/hunter2"}), tmp_path / "r")
    texts = [path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file()]
    assert not any(b"hunter2" in text for text in texts)
    with pytest.raises(InputError, match=r"tracking\.uri: http://127\.0\.0\.1:1/\*\*\* lacks the server's path"):
        Experiment.read(tmp_path / "r" / "experiment.yaml")


@pytest.mark.parametrize("uri", ["https://h?hunter2", "https://h/?x=hunter2", "postgresql://h/n?x=hunter2"])
def test_a_tracking_uri_with_an_unknown_parameter_is_refused(tiny: Callable[..., Experiment], uri: str) -> None:
    """It would be recorded. Control: a parameter that is known to be harmless is accepted."""
    with pytest.raises(InputError, match="a name, password or token in the URI is not allowed"):
        tiny(tracking={"uri": uri})
    tiny(tracking={"uri": "postgresql://h/n?sslmode=require"})


@pytest.mark.parametrize(("uri", "is_hidden"), [
    ("https://h/private-place/", True), ("http://u.example:1/private-place", True),
    ("sqlite:////private-place/m.db", False), ("https://h/", False), ("https://h", False),
])
def test_the_path_of_a_server_is_not_printed(uri: str, is_hidden: bool) -> None:
    """It may be a secret, and libraries quote it with and without the address. Files keep their paths."""
    error = OSError(f"no answer from {uri}/api: retries exceeded with url: /private-place/api?name=dbo")
    assert ("private-place" not in describe_error(error, uri)) == is_hidden
