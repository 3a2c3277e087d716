"""Collect where a run comes from: commit, user and job, and the environment that its bits depend on."""

import getpass
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"       # Ray sets it for the entry point of a job
_LIBRARIES = ("numpy", "scipy", "numba", "torch")


def collect_provenance() -> dict[str, str]:
    """Return commits, user and submission, as far as they are known."""
    own, here = _find_commit(Path(__file__).parent), _find_commit(Path.cwd())
    known = {"commit": here or own, "dbo_commit": own, "user": _find_user(), "submission": _find_submission()}
    return {key: value for key, value in known.items() if value}


@cache
def _find_commit(place: Path) -> str:
    """Return the commit of the checkout that holds a folder; "" if it is in none."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--verify", "HEAD"], cwd=place, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _find_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):       # a container's user may have no name
        return str(os.getuid())


def _find_submission() -> str:
    try:
        return str(json.loads(os.environ.get(_JOB, ""))["metadata"]["job_submission_id"])
    except (ValueError, TypeError, KeyError):
        return ""


# ---- environment -----------------------------------------------------------------------------------------------------


def collect_environment() -> dict[str, str]:
    """Return the fingerprint of this process: versions of Python and the numeric libraries, BLAS, processor, machine.

    Runs are bit-identical within one environment. It is no part of the run key: another one is noticed on resume.
    """
    found = {
        "python": platform.python_version(), **{name: _find_version(name) for name in _LIBRARIES},
        "blas": _find_blas(), "processor": _find_processor(), "machine": platform.machine(),
    }
    return {key: value for key, value in found.items() if value}


def describe_differences(recorded: Mapping[str, str], current: Mapping[str, str]) -> str:
    """Return what differs between two environments, such as "numpy 2.4.6 → 2.5.0; torch none → 2.9.1"."""
    return "; ".join(
        f"{key} {recorded.get(key, 'none')} → {current.get(key, 'none')}"
        for key in dict.fromkeys([*recorded, *current]) if recorded.get(key) != current.get(key)
    )


def _find_version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


@cache
def _find_blas() -> str:
    """Return name, version and kernel architecture of NumPy's BLAS; another architecture rounds differently."""
    import numpy as np
    from threadpoolctl import threadpool_info

    found = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    of_numpy = [pool for pool in found if "numpy" in Path(pool["filepath"]).parent.name] or found
    if of_numpy:
        return " ".join(str(of_numpy[0].get(key) or "") for key in ("internal_api", "version", "architecture")).strip()
    built = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return f"{built.get('name', '')} {built.get('version', '')}".strip()


@cache
def _find_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor())
