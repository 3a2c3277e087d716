"""Where a run comes from: who started it, from which commit, as which job of a cluster."""

import getpass
import json
import os
import subprocess
from functools import cache
from pathlib import Path

_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"       # Ray sets it for the entry point of a job


def origin() -> dict[str, str]:
    """What is known of commit, user and submission."""
    found = {"commit": _commit(), "user": _user(), "submission": _submission()}
    return {key: value for key, value in found.items() if value}


@cache
def _commit() -> str:
    """Of the checkout that the command was started in, else of the one that this code lies in."""
    for place in (Path.cwd(), Path(__file__).parent):
        try:
            said = subprocess.run(
                ["git", "rev-parse", "--verify", "HEAD"],
                cwd=place, capture_output=True, text=True, timeout=5, check=False,
            )
        except (OSError, subprocess.SubprocessError):
            return ""
        if said.returncode == 0:
            return said.stdout.strip()
    return ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):       # a container's user may have no name
        return str(os.getuid())


def _submission() -> str:
    try:
        return str(json.loads(os.environ.get(_JOB, ""))["metadata"]["job_submission_id"])
    except (ValueError, TypeError, KeyError):
        return ""
