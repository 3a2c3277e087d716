"""`dbo jobs`: list the jobs of a cluster, show the output of one again, stop it, fetch its results."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dbo.platform.cli.console import console, print_line
from dbo.platform.cli.job_client import check_free, check_place, connect, fetch_results, follow_job
from dbo.platform.errors import InputError

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

_SHOWN = 30
_MIN_NAME = 8


def show_jobs(
    job: Annotated[str | None, typer.Argument(
        metavar="[JOB]", help="Job to follow until it ends; without one, all jobs are listed.")] = None,
    address: Annotated[str, typer.Option(
        "--address", metavar="URL", envvar="RAY_API_SERVER_ADDRESS",
        help="Ray Jobs server of the cluster, e.g. http://127.0.0.1:8265.")] = "",
    stop: Annotated[bool, typer.Option("--stop", help="Stop the job; what it has recorded can be resumed.")] = False,
    out: Annotated[Path | None, typer.Option(
        "--out", metavar="DIR", help="Copy the results folder here when the job has ended.")] = None,
    storage: Annotated[str, typer.Option(
        "--storage", metavar="DIR|URL",
        help="With --out: the storage that was given to `dbo submit`. A URL needs it.")] = "",
    every: Annotated[bool, typer.Option("--all", help=f"List all jobs, not only the newest {_SHOWN}.")] = False,
) -> None:
    """List the jobs of a cluster, or follow one until it ends.

    `dbo jobs JOB` shows the output from its beginning, also after a disconnect. The exit code is the job's.
    """
    if not address:
        raise InputError("--address: a value is required, or set RAY_API_SERVER_ADDRESS")
    if job is None and (stop or out is not None):
        raise InputError(f"{'--stop' if stop else '--out'}: needs a job; `dbo jobs` lists them")
    if storage and out is None:
        raise InputError("--storage: needs --out")
    client = connect(address)
    if job is None:
        _print_jobs(client, every)
        return
    found = _find_job(client, job)
    assert found.submission_id is not None
    if stop:
        stopped = client.stop_job(found.submission_id)
        print_line(f"{found.submission_id} is being stopped" if stopped else f"{found.submission_id} has ended before")
        return
    metadata = found.metadata or {}
    results = metadata.get("results")
    if out is not None:
        if not results:
            raise InputError(f"--out: {out} is not allowed; {found.submission_id} was not submitted by dbo")
        check_place(results, storage)
        check_free(out, metadata.get("run_key", ""), metadata.get("name", ""))
    print_line(f"{found.submission_id} {_describe_status(found)}" + (f"; results: {results}" if results else ""))
    code = follow_job(client, found.submission_id, print_line)
    if out is not None and results:
        print_line(fetch_results(results, out))
    if code:
        sys.exit(code)


def _list_jobs(client: "JobSubmissionClient") -> "list[JobDetails]":
    """Return submitted jobs, the newest first."""
    jobs = [job for job in client.list_jobs() if job.submission_id]
    return sorted(jobs, key=lambda job: job.start_time or 0, reverse=True)


def _find_job(client: "JobSubmissionClient", given: str) -> "JobDetails":
    """Return the job with this id, or the only one whose id or name begins so."""
    jobs = _list_jobs(client)
    exact = [job for job in jobs if given == job.submission_id]
    begins = [job for job in jobs if (job.submission_id or "").startswith(given) or _name(job).startswith(given)]
    found = exact or begins[:1] if exact or len({_name(job) for job in begins}) == 1 else begins
    if len(found) == 1:
        return found[0]
    if found:
        raise InputError(f"{given}: several jobs begin so: {', '.join(str(job.submission_id) for job in found[:5])}")
    raise InputError(f"{given}: no such job; `dbo jobs` lists them")


def _name(job: "JobDetails") -> str:
    return (job.metadata or {}).get("name", "")


def _print_jobs(client: "JobSubmissionClient", every: bool) -> None:
    jobs = _list_jobs(client)
    rows = [("job", "name", "status", "started UTC", "min"), *(
        (str(job.submission_id), _name(job) or job.entrypoint[:40], _describe_status(job), *_describe_times(job))
        for job in (jobs if every else jobs[:_SHOWN]))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if console.is_terminal:             # names give way; a pipe gets them whole, for grep
        widths[1] = min(widths[1], max(_MIN_NAME, console.width - sum(widths[:1] + widths[2:]) - 2 * len(widths[1:])))
    for number, (job_id, name, *others, minutes) in enumerate(rows if jobs else ()):
        shown = name if len(name) <= widths[1] else f"{name[:widths[1] - 1]}…"
        cells = [cell.ljust(width) for cell, width in zip((job_id, shown, *others), widths, strict=False)]
        print_line("  ".join([*cells, minutes.rjust(widths[-1])]), style=None if number else "bold")
    if not jobs or (len(jobs) > _SHOWN and not every):
        print_line("no jobs" if not jobs else f"and {len(jobs) - _SHOWN} more; --all lists them")


def _describe_status(job: "JobDetails") -> str:
    code = job.driver_exit_code
    return str(job.status).lower() + (f", exit {code}" if code else "")


def _describe_times(job: "JobDetails") -> tuple[str, str]:
    """Return when it was started, and how many minutes it has run."""
    if not job.start_time:
        return "", ""
    start = datetime.fromtimestamp(job.start_time / 1000, UTC)
    end = datetime.fromtimestamp(job.end_time / 1000, UTC) if job.end_time else datetime.now(UTC)
    return start.strftime("%m-%d %H:%M"), f"{(end - start).total_seconds() / 60:.1f}"
