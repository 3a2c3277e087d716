"""Jobs without a cluster: which engine they get, and how `dbo jobs` lists them."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from dbo.platform.cli import console, jobs
from dbo.platform.cli.submit import Job, comparison_job, experiment_job
from dbo.platform.config import yaml_io
from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError

SHORT = ("nodes=3", "rounds=2", "task.name=quadratic")        # `auto` chooses the local engine


def build_job(kind: str, overrides: Sequence[str]) -> Job:
    if kind == "compare":
        return comparison_job([*SHORT, *overrides], "c2dfb,mdbo", None)
    return experiment_job(Experiment.read(None, [*SHORT, *overrides]))


def read_engine(job: Job, folder: Path) -> dict[str, Any]:
    """Return the engine section that the job will read on the cluster."""
    folder.mkdir()
    job.pack(folder)
    (file,) = folder.glob("*.yaml")
    section = yaml_io.read(file)["engine"]
    assert section["name"] == "ray"            # not auto: the cluster must not choose again
    return Experiment(engine=section).engine


@pytest.mark.parametrize("kind", ["run", "compare"])
def test_a_job_without_an_engine_runs_on_the_cluster(tmp_path: Path, kind: str) -> None:
    """Also short work, and with the other keys of its engine; an address is never sent."""
    assert Experiment.read(None, SHORT).engine["name"] == "local"
    for number, given in enumerate(([], ["engine=auto"], ["engine=ray"])):
        job = build_job(kind, [*given, "engine.threads=2"])
        engine = read_engine(job, tmp_path / str(number))
        assert (engine["name"], engine["threads"], engine["nodes_per_actor"]) == ("ray", 2, "auto")
    job = build_job(kind, ["engine.nodes_per_actor=2", "engine.address=10.0.0.1:6379"])
    engine = read_engine(job, tmp_path / "address")
    assert (engine["name"], engine["nodes_per_actor"], engine["address"]) == ("ray", 2, None)


@pytest.mark.parametrize("kind", ["run", "compare"])
@pytest.mark.parametrize(("given", "message"), [
    ("engine=local", "engine.name: local cannot be submitted; must be ray"), ("engine.device=cpu", "engine.device"),
])
def test_the_local_engine_is_not_submitted(kind: str, given: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_job(kind, [given])


def make_job(number: int, name: str) -> SimpleNamespace:
    return SimpleNamespace(
        submission_id=f"raysubmit_{number:016d}", metadata={"name": name}, entrypoint="python", status="FAILED",
        driver_exit_code=1, start_time=1_700_000_000_000 + number, end_time=1_700_000_090_000,
    )


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_list_has_a_line_for_each_job(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    """In 80 columns ids, status and times are whole and a long name is cut; a pipe gets all of it."""
    names = ["short-0123abcd", "a-name-that-is-much-too-long-for-the-column-0123abcd"]
    client = SimpleNamespace(list_jobs=lambda: [make_job(number, name) for number, name in enumerate(names)])
    screen = Console(file=io.StringIO(), force_terminal=is_terminal, width=80, color_system=None)
    for module in (jobs, console):
        monkeypatch.setattr(module, "console", screen)
    jobs._print_jobs(client, every=False)                 # type: ignore[arg-type]
    lines = screen.file.getvalue().splitlines()           # type: ignore[attr-defined]
    newest, oldest = lines[1:]
    cut = "a-name-that-is-mu…" if is_terminal else names[1]
    assert newest.split() == ["raysubmit_0000000000000001", cut, "failed,", "exit", "1", "11-14", "22:13", "1.5"]
    assert oldest.split()[:2] == ["raysubmit_0000000000000000", names[0]]
    assert not is_terminal or {len(line) for line in lines} == {80}


def test_the_url_of_another_user_is_not_opened(
    dbo: Callable[..., Any], assert_refused: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster names the place of the results; only what lies below one's own storage is opened and copied."""
    for owner in ("mine", "theirs"):
        (tmp_path / owner / "digits-0123abcd").mkdir(parents=True)
        (tmp_path / owner / "digits-0123abcd" / "metrics.jsonl").write_text(owner)
    place = f"file://{tmp_path}/theirs/digits-0123abcd"
    job = make_job(0, "digits-0123abcd")
    job.metadata["results"] = place
    job.driver_exit_code = 0
    monkeypatch.setattr(jobs, "connect", lambda address: SimpleNamespace(list_jobs=lambda: [job]))
    monkeypatch.setattr(jobs, "follow_job", lambda *_: 0)
    command = ("jobs", job.submission_id, "--address", "http://127.0.0.1:1", "--out", "got")
    assert_refused(dbo(*command), f"--storage: a value is required; the cluster says that the results are in {place}")
    assert_refused(dbo(*command, "--storage", f"file://{tmp_path}/mine"), "--storage: ", place)
    assert not Path("got").exists()
    done = dbo(*command, "--storage", f"file://{tmp_path}/theirs")
    assert (done.code, Path("got/metrics.jsonl").read_text()) == (0, "theirs")


def test_storage_without_a_copy_is_refused(dbo: Callable[..., Any], assert_refused: Callable[..., None]) -> None:
    assert_refused(dbo("jobs", "--address", "http://127.0.0.1:1", "--storage", "/shared"), "--storage: needs --out")
