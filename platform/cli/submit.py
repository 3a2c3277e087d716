"""`dbo submit`: an experiment or a sweep as a Ray job. Checked here, run there; output, exit code and folder come back.
"""

import asyncio
import json
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbo.platform.config import yaml_io
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.ray_session import prepare_client
from dbo.platform.errors import InputError, RunError
from dbo.platform.runs.remote import Storage, is_url
from dbo.platform.runs.runner import default_folder


@dataclass(frozen=True, slots=True)
class Job:
    """What a cluster is asked to do, and what it needs for that."""

    command: Sequence[str]              # of `dbo`; the place of its results is added
    name: str                           # of the folder for its results
    key: str                            # the same for the same work
    pack: Callable[[Path], None]        # puts into a folder the files that the command reads
    shared: bool = False                # whether the results need a path, where a URL will not do


def job_of(kind: str, arguments: Sequence[str]) -> Job | None:
    """Pack the command `kind` as a job; None if it is not a command that can run as one."""
    if kind != "sweep":
        return None
    from dbo.platform.cli.sweep import pack

    return pack(arguments)


def experiment_job(experiment: Experiment) -> Job:
    """One run."""
    if experiment.engine["name"] != "ray":
        raise InputError(f"engine.name: {experiment.engine['name']} cannot be submitted; must be ray")
    return Job(
        ["run", "experiment.yaml", "--resume"], default_folder(experiment).name, experiment.run_key,
        lambda folder: _pack(experiment, folder),
    )


def submit(
    job: Job,
    address: str,
    storage: str,
    *,
    fetch_to: Path | None = None,
    wheel: Path | None = None,
    wait: bool = True,
    say: Callable[[str], None] = print,
) -> int:
    """Submits, follows and fetches; the job's exit code.

    `storage` is a path that all machines share or a URL; the folder of the results is made below it. A job that is
    submitted again goes on from what lies there.
    """
    if fetch_to is not None and fetch_to.exists() and not _free(fetch_to, job):
        raise InputError(f"--out: {fetch_to} is in use for something else; must be new, empty or of this very job")
    if job.shared and is_url(storage):
        raise InputError(f"--storage: {storage} is not allowed; must be a path that all machines share")
    place = f"{storage.rstrip('/')}/{job.name}"
    client = _client(address)
    with tempfile.TemporaryDirectory(prefix="dbo-submit-") as folder:
        job.pack(Path(folder))
        environment: dict[str, Any] = {"working_dir": folder}
        if wheel is not None:
            environment["py_modules"] = [str(wheel)]
        command = shlex.join(["python", "-m", "dbo.platform.cli", *job.command, "--out", place])
        sent = _send(client, command, environment, job.key)
    say(f"submitted {sent}; results go to {place}")
    if not wait:
        return 0
    code = _follow(client, sent, say)
    if fetch_to is not None:
        say(_fetch(place, fetch_to))
    return code


def _client(address: str) -> Any:
    prepare_client()
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise InputError(f"--address: no Ray Jobs server answers at {address}: {reason}") from None


def _send(client: Any, command: str, environment: dict[str, Any], run_key: str) -> str:
    """The job's id. A head that has just started says that no agent is there yet: it is asked again for a minute."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return str(client.submit_job(
                entrypoint=command, runtime_env=environment, metadata={"run_key": run_key}
            ))
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise RunError(f"the cluster refused the job: {str(error).strip().partition(chr(10))[0]}") from None
            time.sleep(2)


def _pack(experiment: Experiment, folder: Path) -> None:
    """A working directory of its own: the resolved experiment and the files it names, nothing else of this machine."""
    data = experiment.resolved()
    target = folder / "experiment.yaml"
    target.touch()
    data["engine"]["address"] = None         # the job finds the cluster that it runs on
    data["plugins"] = [carry(plugin, folder) if plugin.endswith(".py") else plugin for plugin in data["plugins"]]
    if "file" in data["topology"]:
        data["topology"]["file"] = carry(data["topology"]["file"], folder)
    target.write_text(yaml_io.dump(data), encoding="utf-8")


def carry(file: str, folder: Path) -> str:
    """Takes a file along; what it is called there."""
    source = Path(file).expanduser()
    if (folder / source.name).exists():
        raise InputError(f"{file}: two files of an experiment are called {source.name}")
    shutil.copyfile(source, folder / source.name)
    return source.name


def _follow(client: Any, job: str, say: Callable[[str], None]) -> int:
    """Prints the job's output as it comes, until the job has ended."""

    async def tail() -> None:
        async for text in client.tail_job_logs(job):
            say(text.rstrip("\n"))

    try:
        asyncio.run(tail())
    except KeyboardInterrupt:
        say(f"{job} goes on without you; `ray job stop {job}` ends it")
        raise
    info = client.get_job_info(job)
    while not info.status.is_terminal():      # the stream of output may end before the job does
        time.sleep(1)
        info = client.get_job_info(job)
    if info.status == "SUCCEEDED":
        return 0
    if info.driver_exit_code is not None:
        return int(info.driver_exit_code)
    raise RunError(f"{job} {str(info.status).lower()}: {info.message}")


def _fetch(place: str, to: Path) -> str:
    if is_url(place):
        found = Storage(place).fetch(to)
    else:
        found = Path(place).is_dir()
        if found:
            shutil.copytree(place, to, dirs_exist_ok=True)
    return f"fetched to {to}" if found else f"nothing to fetch: this machine sees no run at {place}"


def _free(folder: Path, job: Job) -> bool:
    """Empty, or with what an earlier fetch of the same job has left."""
    if not folder.is_dir():
        return False
    run, group = _facts(folder / "summary.json"), _facts(folder / "group.json")
    if run:
        return bool(run.get("run_key") == job.key)
    if group:        # the cluster settles where cells run, and so the group's key: its name is what is known here
        return job.name.startswith(f"{group.get('kind')}-{group.get('name')}-")
    return not any(folder.iterdir())


def _facts(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}
