"""`dbo doctor`: check what is installed, reachable, exposed or missing, before a run fails because of it.

Each finding is ok, warn (works, with a risk) or refuse (unsafe, or a run will fail). The checks change nothing: servers
get requests that need no credential, and every request has a timeout.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from dbo.platform.cli import doctor_network as network
from dbo.platform.cli.console import Arguments, console, split_arguments
from dbo.platform.config.redact import redact
from dbo.platform.errors import RunError

if TYPE_CHECKING:
    from dbo.platform.config.experiment import Experiment

Verdict = Literal["ok", "warn", "refuse"]
MIB = 1 << 20
MAX_UPLOAD = 100 * MIB            # Ray's default limit for a working_dir
_PACKING_SECONDS = 5.0
# Vulnerabilities of older versions: CVE-2026-27482 (any web page can delete jobs), CVE-2026-2033 (path traversal).
_MIN_VERSION = {"ray": (2, 54), "mlflow": (3, 8)}
_PACKAGES = ("dbo", "ray", "mlflow", "numpy", "scipy", "torch", "safetensors", "fsspec")
_COLOURS: dict[Verdict, str] = {"ok": "green", "warn": "yellow", "refuse": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table."""

    subject: str
    verdict: Verdict
    text: str


def check_machine(
    arguments: Arguments = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if a finding is `refuse`.")] = False,
) -> None:
    """Check this machine and its servers for an experiment.

    Shows what is installed, reachable, exposed or missing. Changes nothing.
    """
    from dbo.platform.config.experiment import Experiment

    findings = run_checks(Experiment.read(*split_arguments(arguments)), Path.cwd())
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for heading in ("", "check", "finding"):
        table.add_column(heading, no_wrap=heading == "")
    for finding in findings:
        verdict = f"[{_COLOURS[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(verdict, escape(finding.subject), escape(finding.text))
    console.print(table, highlight=False)
    refused = [finding for finding in findings if finding.verdict == "refuse"]
    if strict and refused:
        raise RunError("; ".join(f"{finding.subject}: {finding.text}" for finding in refused))


def run_checks(experiment: "Experiment", folder: Path) -> list[Finding]:
    """Return all findings about this machine for an experiment that is started in `folder`."""
    groups = (
        check_packages(), check_resources(experiment), check_working_dir(folder), check_data_dir(experiment),
        check_servers(experiment), check_exposure(),
    )
    return [Finding(f.subject, f.verdict, redact(f.text)) for group in groups for f in group]


# ---- packages --------------------------------------------------------------------------------------------------------


def check_packages() -> Iterator[Finding]:
    """Show versions; refuse those with known vulnerabilities."""
    for name in _PACKAGES:
        try:
            installed = version(name)
        except PackageNotFoundError:
            yield Finding(name, "ok" if name == "torch" else "warn", "not installed")
            continue
        minimum = _MIN_VERSION.get(name)
        if minimum and _parse_version(installed) < minimum:
            needed = ".".join(map(str, minimum))
            yield Finding(name, "refuse", f"{installed} has a known vulnerability; install {needed} or later")
        else:
            yield Finding(name, "ok", installed)
    yield Finding("python", "ok" if sys.version_info >= (3, 11) else "refuse", sys.version.partition(" ")[0])


def _parse_version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


# ---- resources -------------------------------------------------------------------------------------------------------


def check_resources(experiment: "Experiment") -> Iterator[Finding]:
    """Check CPUs, memory, shared memory and disk, and GPUs if the experiment uses them."""
    engine, nodes = experiment.engine, experiment.nodes
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    required = (engine.get("cpus_per_node") or 0) * nodes
    starts_ray = _starts_ray(experiment)
    if starts_ray and required > cpus:
        text = f"{cpus}; engine.cpus_per_node requires {required:g}: the run could not be placed"
        yield Finding("CPUs", "refuse", text)
    else:
        yield Finding("CPUs", "ok", f"{cpus}")
    available = _read_meminfo().get("MemAvailable")
    if available is not None:
        minimum = 1024 * MIB if starts_ray else 256 * MIB
        yield Finding("memory", "ok" if available >= minimum else "warn", f"{available // MIB} MiB available")
    if starts_ray and Path("/dev/shm").is_dir():
        shared = shutil.disk_usage("/dev/shm").free
        is_enough = shared >= 256 * MIB
        text = f"{shared // MIB} MiB free in /dev/shm" + ("" if is_enough else "; Ray will use the disk instead")
        yield Finding("shared memory", "ok" if is_enough else "warn", text)
    disk = shutil.disk_usage(Path.cwd()).free
    verdict: Verdict = "ok" if disk >= 1024 * MIB else "warn" if disk >= 64 * MIB else "refuse"
    yield Finding("disk", verdict, f"{disk // MIB} MiB free in the working directory")
    gpus = engine.get("gpus_per_node") or 0
    if gpus and starts_ray:
        installed = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
        fits = installed > 0 and (gpus * nodes <= installed or engine.get("nodes_per_actor") == "auto")
        text = f"{installed}; engine.gpus_per_node requires {gpus * nodes:g}"
        yield Finding("GPUs", "ok" if fits else "refuse", text)


def _starts_ray(experiment: "Experiment") -> bool:
    """Decide whether a run would start Ray on this machine, rather than connect to a cluster."""
    engine = experiment.engine
    return engine["name"] == "ray" and not (engine.get("address") or os.environ.get("RAY_ADDRESS"))


def _read_meminfo() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.split()[1:2]}


# ---- working directory -----------------------------------------------------------------------------------------------


def check_working_dir(folder: Path) -> Iterator[Finding]:
    """Find files that shadow Python's own modules, and more data than Ray can upload."""
    shadows = sorted(_find_shadows(folder))
    if shadows:
        yield Finding("modules", "refuse", f"{', '.join(shadows)}: hides a module of the standard library; rename it")
    else:
        yield Finding("modules", "ok", "no file here hides a module of the standard library")
    size, is_complete = measure_upload(folder)
    text = f"{'' if is_complete else 'more than '}{size / MIB:.1f} MiB to upload with a Ray job"
    if size > MAX_UPLOAD:
        text += f"; at most {MAX_UPLOAD // MIB} MiB are allowed: list large files in .gitignore or .rayignore"
        yield Finding("working_dir", "refuse", text)
    else:
        yield Finding("working_dir", "ok" if is_complete else "warn", text)


def _find_shadows(folder: Path) -> Iterator[str]:
    """Yield files and packages that Python would import instead of the standard library's."""
    for entry in folder.iterdir():
        name = entry.stem if entry.suffix == ".py" else entry.name
        if name not in sys.stdlib_module_names:
            continue
        if entry.suffix == ".py":
            yield entry.name
        elif (entry / "__init__.py").exists():
            yield f"{entry.name}/__init__.py"


def measure_upload(folder: Path) -> tuple[int, bool]:
    """Return how many bytes Ray would upload as a working_dir, and whether all of them were counted."""
    read_ignores = _ray_ignores()
    deadline = time.monotonic() + _PACKING_SECONDS
    total, pending = 0, [(folder, list(read_ignores(folder)))]
    while pending:
        current, rules = pending.pop()
        try:
            entries = list(current.iterdir())
        except OSError:
            continue
        for entry in entries:
            if entry.name in {".git", ".venv", "venv", "__pycache__"} or any(rule(entry) for rule in rules):
                continue
            if entry.is_dir() and not entry.is_symlink():
                pending.append((entry, [*rules, *read_ignores(entry)]))
            elif entry.is_file():
                total += entry.stat().st_size
        if total > MAX_UPLOAD or time.monotonic() > deadline:
            return total, not pending
    return total, True


def _ray_ignores() -> Callable[[Path], list[Callable[[Path], bool]]]:
    """Return Ray's own reader of .gitignore and .rayignore; without Ray, one that ignores nothing."""
    import logging

    try:
        from ray._private.runtime_env.packaging import get_excludes_from_ignore_files
    except ImportError:
        return lambda folder: []
    logger = logging.getLogger("dbo.doctor")
    logger.propagate = False
    read: Any = get_excludes_from_ignore_files
    return lambda folder: list(read(folder, include_gitignore=True, logger=logger))


def check_data_dir(experiment: "Experiment") -> Iterator[Finding]:
    """Check that data_dir, if it is set, is a readable folder."""
    if experiment.data_dir is None:
        return
    folder = Path(experiment.data_dir).expanduser()
    if folder.is_dir() and os.access(folder, os.R_OK):
        yield Finding("data_dir", "ok", experiment.data_dir)
    else:
        yield Finding("data_dir", "refuse", f"{experiment.data_dir} is not a readable folder")


# ---- servers ---------------------------------------------------------------------------------------------------------


def check_servers(experiment: "Experiment") -> Iterator[Finding]:
    """Check the Ray cluster and the MLflow server that the experiment or the environment names."""
    address = experiment.engine.get("address") or os.environ.get("RAY_ADDRESS")
    if address and experiment.engine["name"] == "ray":
        place = network.split_address(address)
        if place is None:
            yield Finding("Ray", "ok", f"{address}: resolved when a run starts")
        elif not network.accepts_connections(*place):
            yield Finding("Ray", "refuse", f"no server at {address}")
        else:
            yield _check_ray(*place, f"Ray at {address}")
    else:
        yield Finding("Ray", "ok", "started by each command: loopback, with a token, without a dashboard")
    uri = experiment.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or ""
    if uri.startswith(("http://", "https://")):
        parts = urlsplit(uri)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        if not network.accepts_connections(host, port):
            yield Finding("MLflow", "refuse", f"no server at {uri}")
        else:
            yield _check_mlflow(host, port, f"MLflow at {uri}", secure=parts.scheme == "https")
    else:
        yield Finding("MLflow", "ok", uri or "sqlite file beside the runs, no server")


def _check_ray(host: str, port: int, subject: str) -> Finding:
    from dbo.platform.engine.ray_session import has_token

    is_remote, probe = not network.is_loopback(host), network.probe_server(host, port)
    if probe.service == "Ray" and probe.is_open:
        text = "accepts jobs without a token: anybody who can connect can run code there"
        return Finding(subject, "refuse" if is_remote else "warn", text)
    if is_remote and not has_token():
        return Finding(subject, "warn", "answers, but there is no Ray token here: if it requires one, jobs will fail")
    return Finding(subject, "ok", "answers")


def _check_mlflow(host: str, port: int, subject: str, secure: bool) -> Finding:
    is_remote, probe = not network.is_loopback(host), network.probe_server(host, port, secure)
    if probe.service == "MLflow" and probe.is_open and is_remote:
        return Finding(subject, "refuse", "on another machine and without a password")
    if probe.any_host:
        return Finding(subject, "refuse", "answers to any Host header: web pages can reach it; see --allowed-hosts")
    if is_remote and not secure:
        return Finding(subject, "warn", "answers; without https, passwords and results are sent unencrypted")
    return Finding(subject, "ok", "answers")


def check_exposure() -> Iterator[Finding]:
    """Find servers of Ray and MLflow on this machine that others can reach."""
    found = False
    for server in network.find_servers():
        probe = server.probe
        where = f"port {server.port} ({server.process or 'unknown process'})"
        interface = f"at {server.address}" if server.address else "on all interfaces"
        if server.is_public and probe.is_open:
            finding = Finding("exposed", "refuse", f"{probe.label} {interface}, {where}; bind it to 127.0.0.1")
        elif probe.is_open and probe.service == "Ray":
            text = f"{probe.label}, {where}: any user of this machine can run code as you"
            finding = Finding("exposed", "warn", text)
        elif server.is_public:
            finding = Finding("exposed", "warn", f"{probe.label} {interface}, {where}; a tunnel is safer")
        elif probe.any_host:
            text = f"MLflow answers to any Host header, {where}: web pages can reach it"
            finding = Finding("exposed", "warn", text)
        else:
            continue
        found = True
        yield finding
    if not found:
        yield Finding("exposed", "ok", "no Ray or MLflow server on this machine is open to others")
