"""Talk to a Ray Jobs server: submit, follow, list and stop jobs, and fetch their results."""

import asyncio
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbo.platform.config.redact import redact_url
from dbo.platform.errors import InputError, RunError

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

_CONNECT_SECONDS = 20.0
_SEND_SECONDS = 60.0        # an agent starts some seconds after its head
_CHATTY = (                 # report every upload and every end of a connection
    "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk", "ray._private.runtime_env.packaging",
)


def connect(address: str) -> "JobSubmissionClient":
    """Connect to a Jobs server; a server that does not answer, or refuses the token, is an input error."""
    from dbo.platform.engine.deadlines import call_within
    from dbo.platform.engine.ray_session import prepare_client

    prepare_client()
    os.environ["RAY_API_SERVER_ADDRESS"] = address      # which Ray prefers to its argument
    from ray.job_submission import JobSubmissionClient

    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        return call_within(_CONNECT_SECONDS, lambda: JobSubmissionClient(address))
    except TimeoutError:
        reason = f"no answer within {_CONNECT_SECONDS:g} s"
    except Exception as error:
        if "uthentication" in str(error) or type(error).__name__ == "AuthenticationError":
            raise InputError(
                f"--address: {address} refuses the token; RAY_AUTH_TOKEN must be that of the cluster, "
                f"with RAY_AUTH_MODE=token") from None
        reason = str(error).strip().partition("\n")[0]
    raise InputError(f"--address: no Ray Jobs server answers at {address}: {reason}") from None


def send_job(
    client: "JobSubmissionClient", command: str, environment: dict[str, Any], metadata: dict[str, str],
    log: Callable[[str], None],
) -> str:
    """Submit a job and return its id. Retry for a minute: a head that has just started has no agent yet."""
    deadline, has_reported = time.monotonic() + _SEND_SECONDS, False
    while True:
        try:
            return client.submit_job(entrypoint=command, runtime_env=environment, metadata=metadata)
        except RuntimeError as error:
            if "No available agent" in str(error) and time.monotonic() > deadline:
                raise RunError(
                    f"the cluster has no agent for jobs after {_SEND_SECONDS:g} s; if another Ray there uses port "
                    f"52365, start the head with --dashboard-agent-listen-port=PORT") from None
            if "No available agent" not in str(error):
                raise RunError(f"the cluster refused the job: {str(error).strip().partition(chr(10))[0]}") from None
            if not has_reported:
                log(f"the cluster has no agent for jobs yet; trying again, for {_SEND_SECONDS:g} s at most")
                has_reported = True
            time.sleep(2)


def follow_job(client: "JobSubmissionClient", job_id: str, log: Callable[[str], None]) -> int:
    """Report the job's output until the job has ended; return its exit code."""

    async def tail() -> None:
        async for text in client.tail_job_logs(job_id):
            log(text.rstrip("\n"))

    try:
        asyncio.run(tail())
    except KeyboardInterrupt:
        log(f"{job_id} continues on the cluster; `dbo jobs {job_id}` shows its output again, with --stop it ends")
        raise
    info = client.get_job_info(job_id)
    while not info.status.is_terminal():      # the stream of output may end before the job does
        time.sleep(1)
        info = client.get_job_info(job_id)
    if info.status == "SUCCEEDED":
        return 0
    if info.driver_exit_code is not None:
        return int(info.driver_exit_code)
    raise RunError(f"{job_id} {str(info.status).lower()}: {info.message}")


def check_free(folder: Path, key: str, name: str) -> None:
    """Raise InputError unless a folder is new, empty or holds results of the job with this key and name."""
    from dbo.platform.runs.run_folder import find_group, find_summary

    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir():
        is_free = False
    elif (summary := find_summary(folder)) is not None:
        is_free = summary.run_key == key
    elif (group := find_group(folder)) is not None:      # its key depends on the cluster: `fetch_results` compares it
        is_free = name.startswith(f"{group.kind}-{group.name}-")
    else:
        is_free = not any(folder.iterdir())
    if not is_free:
        raise InputError(f"--out: {folder} is in use; must be new, empty or hold results of this job")


def check_place(place: str, storage: str) -> None:
    """Raise InputError unless the place that a cluster names is a folder directly below the user's own storage.

    Everybody with access to the cluster can write the place: opened as it is, a URL could name any server, which would
    see this user's credentials, or files of this user. Without a storage only a path is accepted; `fetch_results`
    looks whether it holds results.
    """
    from dbo.platform.runs.remote import is_url

    parent, _, name = place.rpartition("/")
    if not storage and is_url(place):
        raise InputError(
            f"--storage: a value is required; the cluster says that the results are in {redact_url(place)}: "
            f"if this is yours, give --storage {redact_url(parent)}")
    if storage and (parent != storage.rstrip("/") or not re.fullmatch(r"[^.\\:?#@%][^\\:?#@%]*", name)):
        raise InputError(
            f"--storage: {redact_url(storage)} is not allowed; the cluster says that the results are in "
            f"{redact_url(place)}, not in a folder directly below it")


def fetch_results(place: str, to: Path) -> str:
    """Copy the results to this machine; return a line about it.

    Others may write to a shared storage: symbolic links are left out, since they may point to any file of this user.
    The place may come from the cluster, so a folder that holds no results is not copied; `check_place` checks a URL.
    """
    from dbo.platform.runs.remote import RemoteFolder, is_url
    from dbo.platform.runs.run_folder import RunFolder, find_group, has_group

    if is_url(place):
        found = RemoteFolder(place).fetch(to)
    else:
        found = has_group(Path(place)) or RunFolder(Path(place)).has_run()
        if found:
            here, there = find_group(to), find_group(Path(place))
            if here is not None and (there is None or here.key != there.key):
                raise InputError(f"--out: {to} holds another {here.kind} of this name; the results are in {place}")
            shutil.copytree(place, to, dirs_exist_ok=True, ignore=_list_irregular)
    return f"fetched to {to}" if found else f"nothing to fetch: no results in {place} are visible from this machine"


def _list_irregular(folder: str, names: list[str]) -> list[str]:
    """Return the names in a folder that are neither files nor folders: links, pipes, devices."""
    paths = {name: Path(folder, name) for name in names}
    return [name for name, path in paths.items() if path.is_symlink() or not (path.is_file() or path.is_dir())]
