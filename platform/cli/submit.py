"""`dbo submit`: run an experiment, a comparison or a sweep as a Ray job.

The input is checked here and run there; the job's output, exit code and results folder come back. `job_client.py` talks
to the cluster.
"""

import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dbo.platform.cli.compare import parse_seeds
from dbo.platform.cli.console import AllowChangedCode, Arguments, print_line, split_arguments
from dbo.platform.cli.job_client import check_free, connect, fetch_results, follow_job, send_job
from dbo.platform.errors import InputError

if TYPE_CHECKING:
    from dbo.platform.config.experiment import Experiment


def submit_job(
    arguments: Arguments = None,
    address: Annotated[str, typer.Option(
        "--address", metavar="URL", envvar="RAY_API_SERVER_ADDRESS",
        help="Ray Jobs server of the cluster, e.g. http://127.0.0.1:8265.")] = "",
    storage: Annotated[str, typer.Option(
        "--storage", metavar="DIR|URL", help="Shared path or URL; the results folder is created below it.")] = "",
    out: Annotated[Path | None, typer.Option(
        "--out", metavar="DIR", help="Copy the results folder here when the job has ended.")] = None,
    algorithms: Annotated[str | None, typer.Option(
        "--algorithms", metavar="A,B,...", help="Of `submit compare`: the algorithms to compare.")] = None,
    target: Annotated[str | None, typer.Option(
        "--target", metavar="METRIC=LEVEL", help="Of `submit compare`: the target.")] = None,
    seeds: Annotated[str | None, typer.Option(
        "--seeds", metavar="0,1,...", help="Of `submit compare`: repeat every algorithm with these seeds.")] = None,
    wheel: Annotated[Path | None, typer.Option(
        "--wheel", metavar="FILE", help="dbo wheel to upload, where dbo is not installed on the cluster.")] = None,
    wait: Annotated[bool, typer.Option(
        "--wait/--no-wait", help="Show the job's output until it ends, or return at once.")] = True,
    retries: Annotated[int, typer.Option(
        "--retries", metavar="N", min=0, help="Restart a driver that dies on the cluster at most N times.")] = 0,
    allow_changed_code: AllowChangedCode = False,
) -> None:
    """Run an experiment, a comparison or a sweep as a job on a Ray cluster.

    `dbo submit sweep NAME ...` and `dbo submit compare [FILE] ... --algorithms A,B` submit those. The exit code
    is the job's. Submit the same job again to resume it; `dbo jobs` lists jobs and shows their output again.
    Without an engine in the experiment, the nodes are Ray actors on the cluster, however short the work is.
    """
    kind = arguments[0] if arguments else ""
    if kind != "compare":
        for option, given in (("--algorithms", algorithms), ("--target", target), ("--seeds", seeds)):
            if given is not None:
                raise InputError(f"{option}: {given!r} is not allowed; only `dbo submit compare` has it")
    if kind == "sweep":
        job = sweep_job((arguments or [])[1:])
    elif kind == "compare":
        job = comparison_job((arguments or [])[1:], algorithms, target, seeds)
    else:
        from dbo.platform.config.experiment import Experiment

        job = experiment_job(Experiment.read(*split_arguments(arguments)), allow_changed_code)
    for name, value in (("--address", address), ("--storage", storage)):
        if not value:
            raise InputError(f"{name}: a value is required")
    code = run_job(job, address, storage, fetch_to=out, wheel=wheel, wait=wait, retries=retries)
    if code:
        sys.exit(code)


@dataclass(frozen=True, slots=True)
class Job:
    """A command to run on a cluster, and the files that it needs."""

    command: Sequence[str]              # arguments of `dbo`, without --out
    name: str                           # of the results folder
    key: str                            # the same for the same work
    pack: Callable[[Path], None]        # writes the files that the command reads into a folder
    needs_path: bool = False            # results must go to a path, a URL is refused


def experiment_job(experiment: "Experiment", allow_changed_code: bool = False) -> Job:
    """Return the job of one run, which resumes what a previous submission left in the storage."""
    from dbo.platform.config import bundle, yaml_io
    from dbo.platform.runs.runner import default_folder

    experiment = _place_on_cluster(experiment)

    def pack(folder: Path) -> None:
        target = folder / "experiment.yaml"
        target.touch()                           # reserves the name
        data = bundle.copy_experiment_files(experiment.to_dict(), folder)
        data["engine"]["address"] = None         # the job uses the cluster that it runs on
        target.write_text(yaml_io.dump(data), encoding="utf-8")

    command = ["run", "experiment.yaml", "--resume", *(["--allow-changed-code"] if allow_changed_code else [])]
    return Job(command, default_folder(experiment).name, experiment.run_key, pack)


def _place_on_cluster(experiment: "Experiment") -> "Experiment":
    """Return the experiment on Ray, which it may leave to `auto`: who submits a job wants the cluster."""
    if experiment.engine_choice is not None:
        experiment = experiment.with_engine({**experiment.given.get("engine", {}), "name": "ray"})
    if experiment.engine["name"] != "ray":
        raise InputError(f"engine.name: {experiment.engine['name']} cannot be submitted; must be ray")
    return experiment


def sweep_job(arguments: Sequence[str]) -> Job:
    """Return the job of a sweep, checked as far as possible without its data."""
    from dbo.sweeps import plan
    from dbo.sweeps.grid import Grid

    name, overrides = split_arguments(arguments, "sweep")
    if name is None:
        raise InputError("sweep: a file or a name is required")
    sweep = plan.read_sweep(plan.find_sweep(name), overrides)
    grid = Grid(sweep, measure=False)
    _ = grid.cells                               # validates every cell
    return Job(
        ["sweep", "sweep.yaml"], f"sweep-{sweep.name}-{grid.key[:8]}", grid.key,
        lambda folder: plan.pack_sweep(sweep, folder), needs_path=True,
    )


def comparison_job(
    arguments: Sequence[str], algorithms: str | None, target: str | None, seeds: str | None = None
) -> Job:
    """Return the job of a comparison, with its file and the files that file and overrides name."""
    from dbo.platform.config import bundle, overrides, paths, yaml_io
    from dbo.platform.runs import compare

    file, given = split_arguments(arguments, "comparison file")
    names = [name.strip() for name in (algorithms or "").split(",") if name.strip()]
    planned, _ = compare.plan(file, given, names, target, parse_seeds(seeds))            # validates everything
    experiments = [_place_on_cluster(experiment) for experiment in planned]
    own = [argument for argument in given if argument.startswith("algorithm.")]
    others = overrides.parse(argument for argument in given if argument not in own)
    data = paths.resolve_from_file(file, yaml_io.read(Path(file))) if file is not None else {}
    data = paths.make_absolute(overrides.apply(data, others))
    engine = experiments[0].given["engine"]                          # the same for all
    data["engine"] = {**engine, "address": None}                     # the job uses the cluster that it runs on

    def pack(folder: Path) -> None:
        target_file = folder / "comparison.yaml"
        target_file.touch()                                          # reserves the name
        target_file.write_text(yaml_io.dump(bundle.copy_experiment_files(data, folder)), encoding="utf-8")

    given_options = {"--algorithms": algorithms, "--target": target, "--seeds": seeds}
    options = [part for option, value in given_options.items() if value for part in (option, value)]
    place = compare.default_folder(experiments)
    return Job(["compare", "comparison.yaml", *own, *options], place.name, place.name, pack, needs_path=True)


def run_job(
    job: Job,
    address: str,
    storage: str,
    *,
    fetch_to: Path | None = None,
    wheel: Path | None = None,
    wait: bool = True,
    retries: int = 0,
    log: Callable[[str], None] = print_line,
) -> int:
    """Submit a job, wait for its end, fetch its results and return its exit code.

    The results go to a folder below `storage`. A job that is submitted again resumes from that folder.
    """
    from dbo.platform.runs.remote import is_url

    if fetch_to is not None:
        check_free(fetch_to, job.key, job.name)
    if job.needs_path and is_url(storage):
        raise InputError(f"--storage: {storage} is not allowed; must be a path that all machines share")
    place = f"{storage.rstrip('/')}/{job.name}"
    client = connect(address)
    with tempfile.TemporaryDirectory(prefix="dbo-submit-") as folder:
        job.pack(Path(folder))
        environment: dict[str, Any] = {"working_dir": folder}
        if wheel is not None:
            environment["py_modules"] = [str(wheel)]
        supervised = ["supervise", "--retries", str(retries)] if retries else []
        command = shlex.join(["python", "-m", "dbo.platform.cli", *supervised, *job.command, "--out", place])
        job_id = send_job(client, command, environment, {"run_key": job.key, "name": job.name, "results": place}, log)
    log(f"submitted {job_id}; results go to {place}")
    if not wait:
        return 0
    code = follow_job(client, job_id, log)
    if fetch_to is not None:
        log(fetch_results(place, fetch_to))
    return code
