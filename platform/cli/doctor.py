"""`dbo doctor`: what is installed, what can be reached, what is exposed, what is missing; before a run finds out.

Each finding is ok, warn (works, but know it) or refuse (unsafe, or a run will fail). Looking changes nothing: servers
are asked for what any stranger could ask for, and answers are bounded in time.
"""

import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from dbo.platform.cli import doctor_network as net
from dbo.platform.config.redact import masked

Verdict = Literal["ok", "warn", "refuse"]
MIB = 1 << 20
PACKED_MOST = 100 * MIB           # what Ray packs and sends at most, unless told otherwise
_PACKING_SECONDS = 5.0
# Older ones have holes with a name: CVE-2026-27482 (jobs deleted by any web page), CVE-2026-2033 (path traversal).
_LEAST = {"ray": (2, 54), "mlflow": (3, 8)}
_SHOWN = ("dbo", "ray", "mlflow", "numpy", "scipy", "torch", "safetensors", "fsspec")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table."""

    subject: str
    verdict: Verdict
    text: str


def examine(experiment: Any, folder: Path) -> list[Finding]:
    """All findings about this machine for an experiment that is to be run from `folder`."""
    found: list[Finding] = []
    parts = installed(), machine(experiment), directory(folder), data(experiment), reachable(experiment), exposed()
    for part in parts:
        found += [Finding(f.subject, f.verdict, masked(f.text)) for f in part]
    return found


# ---- installed -------------------------------------------------------------------------------------------------------


def installed() -> Iterator[Finding]:
    """Versions; those with known holes are refused."""
    for name in _SHOWN:
        try:
            have = version(name)
        except PackageNotFoundError:
            yield Finding(name, "ok" if name == "torch" else "warn", "not installed")
            continue
        least = _LEAST.get(name)
        if least and _numbers(have) < least:
            yield Finding(name, "refuse", f"{have}; below {'.'.join(map(str, least))} strangers can do harm with it")
        else:
            yield Finding(name, "ok", have)
    yield Finding("python", "ok" if sys.version_info >= (3, 11) else "refuse", sys.version.partition(" ")[0])


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


# ---- the machine -----------------------------------------------------------------------------------------------------


def machine(experiment: Any) -> Iterator[Finding]:
    """CPUs, memory, shared memory, disk, and GPUs if they are asked for."""
    engine, nodes = experiment.engine, experiment.nodes
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = (engine.get("cpus_per_node") or 0) * nodes
    here = _own_cluster(experiment)
    if here and asked > cpus:
        yield Finding("CPUs", "refuse", f"{cpus}; engine.cpus_per_node asks for {asked:g}: the run would not be placed")
    else:
        yield Finding("CPUs", "ok", f"{cpus}")
    free = _meminfo().get("MemAvailable")
    if free is not None:
        least = 1024 * MIB if here else 256 * MIB
        yield Finding("memory", "ok" if free >= least else "warn", f"{free // MIB} MiB available")
    if here and Path("/dev/shm").is_dir():
        shared = shutil.disk_usage("/dev/shm").free
        told = f"{shared // MIB} MiB free in /dev/shm" + ("" if shared >= 256 * MIB else "; Ray falls back to the disk")
        yield Finding("shared memory", "ok" if shared >= 256 * MIB else "warn", told)
    disk = shutil.disk_usage(Path.cwd()).free
    verdict: Verdict = "ok" if disk >= 1024 * MIB else "warn" if disk >= 64 * MIB else "refuse"
    yield Finding("disk", verdict, f"{disk // MIB} MiB free here")
    gpus = engine.get("gpus_per_node") or 0
    if gpus and here:
        have = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
        fits = have > 0 and (gpus * nodes <= have or engine.get("nodes_per_actor") == "auto")
        told = f"{have} here; engine.gpus_per_node asks for {gpus * nodes:g}"
        yield Finding("GPUs", "ok" if fits else "refuse", told)


def _own_cluster(experiment: Any) -> bool:
    engine = experiment.engine
    return engine["name"] == "ray" and not (engine.get("address") or os.environ.get("RAY_ADDRESS"))


def _meminfo() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.split()[1:2]}


# ---- the working directory -------------------------------------------------------------------------------------------


def directory(folder: Path) -> Iterator[Finding]:
    """What Python or Ray would trip over in the folder that commands are run from."""
    hidden = sorted(_shadows(folder))
    if hidden:
        yield Finding("modules", "refuse", f"{', '.join(hidden)}: hides a module of Python's own; rename it")
    else:
        yield Finding("modules", "ok", "nothing here hides a module of Python's own")
    size, complete = packed_size(folder)
    told = f"{'' if complete else 'more than '}{size / MIB:.1f} MiB as Ray packs it"
    if size > PACKED_MOST:
        told += f"; at most {PACKED_MOST // MIB} MiB can be sent: list large files in .gitignore or .rayignore"
        yield Finding("working_dir", "refuse", told)
    else:
        yield Finding("working_dir", "ok" if complete else "warn", told)


def _shadows(folder: Path) -> Iterator[str]:
    """Files and packages in a folder that are found before the standard library's when the folder is on the path."""
    for entry in folder.iterdir():
        name = entry.stem if entry.suffix == ".py" else entry.name
        if name not in sys.stdlib_module_names:
            continue
        if entry.suffix == ".py":
            yield entry.name
        elif (entry / "__init__.py").exists():
            yield f"{entry.name}/__init__.py"


def packed_size(folder: Path) -> tuple[int, bool]:
    """Bytes that Ray would send as a working_dir, its ignore files heeded; whether all of them were counted."""
    ignores = _ray_ignores()
    deadline = time.monotonic() + _PACKING_SECONDS
    total, left = 0, [(folder, list(ignores(folder)))]
    while left:
        here, rules = left.pop()
        try:
            entries = list(here.iterdir())
        except OSError:
            continue
        for entry in entries:
            if entry.name in {".git", ".venv", "venv", "__pycache__"} or any(rule(entry) for rule in rules):
                continue
            if entry.is_dir() and not entry.is_symlink():
                left.append((entry, [*rules, *ignores(entry)]))
            elif entry.is_file():
                total += entry.stat().st_size
        if total > PACKED_MOST or time.monotonic() > deadline:
            return total, not left
    return total, True


def _ray_ignores() -> Any:
    """Ray's own reading of .gitignore and .rayignore; without Ray nothing is ignored."""
    import logging

    try:
        from ray._private.runtime_env.packaging import get_excludes_from_ignore_files as found
    except ImportError:
        return lambda folder: []
    quiet = logging.getLogger("dbo.doctor")
    quiet.propagate = False
    return lambda folder: found(folder, include_gitignore=True, logger=quiet)


def data(experiment: Any) -> Iterator[Finding]:
    """Where data are said to lie."""
    place = experiment.data_dir
    if place is None:
        return
    there = Path(place).expanduser()
    ok = there.is_dir() and os.access(there, os.R_OK)
    yield Finding("data_dir", "ok" if ok else "refuse", f"{place}{'' if ok else ' is not a folder that can be read'}")


# ---- servers ---------------------------------------------------------------------------------------------------------


def reachable(experiment: Any) -> Iterator[Finding]:
    """The Ray cluster and the MLflow server that the experiment or the environment names."""
    address = experiment.engine.get("address") or os.environ.get("RAY_ADDRESS")
    if address and experiment.engine["name"] == "ray":
        place = net.host_and_port(address)
        if place is None:
            yield Finding("Ray", "ok", f"{address}: looked up when a run starts")
        elif not net.listens(*place):
            yield Finding("Ray", "refuse", f"nobody listens at {address}")
        else:
            yield from _ray_at(*place, f"Ray at {address}", token_wanted=not net.is_loopback(place[0]))
    else:
        yield Finding("Ray", "ok", "an own one per command: loopback, with a token, without a dashboard")
    uri = experiment.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or ""
    if uri.startswith(("http://", "https://")):
        parts = urlsplit(uri)
        place = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        if not net.listens(*place):
            yield Finding("MLflow", "refuse", f"nobody listens at {uri}")
        else:
            yield from _mlflow_at(*place, f"MLflow at {uri}", secure=parts.scheme == "https")
    else:
        yield Finding("MLflow", "ok", uri or "a file of its own: no server")


def _ray_at(host: str, port: int, subject: str, token_wanted: bool) -> Iterator[Finding]:
    kind = net.ask(host, port).kind
    from dbo.platform.engine.ray_session import has_token

    if kind == "ray, open":
        told = "takes jobs without a token: anybody runs code there"
        yield Finding(subject, "refuse" if token_wanted else "warn", told)
    elif token_wanted and not has_token():
        yield Finding(subject, "warn", "answers; no Ray token lies here, so either it has none or jobs will be refused")
    else:
        yield Finding(subject, "ok", "answers")


def _mlflow_at(host: str, port: int, subject: str, secure: bool) -> Iterator[Finding]:
    answer = net.ask(host, port, secure)
    away = not net.is_loopback(host)
    if answer.kind == "mlflow, open" and away:
        yield Finding(subject, "refuse", "answers anybody without a password: it is not on this machine")
    elif answer.any_host:
        yield Finding(subject, "refuse", "answers to any Host header: web pages can reach it; see --allowed-hosts")
    elif away and not secure:
        yield Finding(subject, "warn", "answers; without https passwords and results can be read on the way")
    else:
        yield Finding(subject, "ok", "answers")


def exposed() -> Iterator[Finding]:
    """Servers of Ray and MLflow on this machine that others can reach."""
    found = False
    for server in net.servers():
        where = f"port {server.port} ({server.process or 'unknown process'})"
        reach = f"at {server.address}" if server.address else "on all interfaces"
        if server.kind in ("ray, open", "ray core, open", "mlflow, open") and server.public:
            found = True
            what = "MLflow without a password" if server.kind.startswith("mlflow") else "Ray without a token"
            yield Finding("exposed", "refuse", f"{what} {reach}, {where}; bind it to 127.0.0.1")
        elif server.kind == "ray, open":
            found = True
            yield Finding("exposed", "warn", f"Ray without a token, {where}: any user of this machine runs code as you")
        elif server.public and server.kind:
            found = True
            yield Finding("exposed", "warn", f"{server.kind} {reach}, {where}; a tunnel is safer")
        elif server.any_host:
            found = True
            yield Finding("exposed", "warn", f"MLflow answers to any Host header, {where}: web pages can reach it")
    if not found:
        yield Finding("exposed", "ok", "no Ray or MLflow server on this machine is open to others")
