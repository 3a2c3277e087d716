"""Of two drivers on one URL the second is refused, or takes over from a dead one, which is fenced from then on."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.fencing import open_lease, race, read_content, run_s3_server

from dbo.platform.engine.local import LocalEngine
from dbo.platform.errors import FolderLockedError, InputError, RunError
from dbo.platform.runs import lease as module
from dbo.platform.runs import runner
from dbo.platform.runs.lease import Lease
from dbo.platform.runs.remote import RemoteFolder
from dbo.platform.runs.runner import publish_additions, run

STORES = ("file", "memory", "s3")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """Return a bucket on a server that answers like S3."""
    with run_s3_server() as bucket:
        yield bucket


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a run that does not exist yet, on each kind of store in turn."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    kind = getattr(request, "param", "file")
    if kind == "s3":
        return f"{request.getfixturevalue('s3')}/{tmp_path.name}"
    return f"file://{tmp_path}/{tmp_path.name}" if kind == "file" else f"memory://{tmp_path.name}"


on_every_store = pytest.mark.parametrize("url", STORES, indirect=True)


def held(url: str) -> Lease:
    lease = open_lease(url)
    lease.acquire(print)
    return lease


@pytest.fixture
def other_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Lease]:
    """Take a lease on another machine, which then is cut off: it renews nothing."""

    def take(url: str) -> Lease:
        with monkeypatch.context() as patch:
            patch.setattr(module, "_identify_machine", lambda: "another machine")
            patch.setattr(module, "RENEW_SECONDS", 1000.0)
            return held(url)

    return take


# ---- the lease -------------------------------------------------------------------------------------------------------


@on_every_store
def test_second_driver_is_refused(url: str) -> None:
    """While the first holds the lease; the message names host and process. Afterwards it gets the next generation."""
    first = held(url)
    with pytest.raises(FolderLockedError, match=r"is in use by another run \(.+, process \d+\)"):
        held(url)
    first.check(force=True)
    first.release()
    second = held(url)
    assert second.generation == 2
    second.release()


@on_every_store
def test_silent_driver_is_replaced_and_fenced(
    url: str, other_machine: Callable[[str], Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that another machine does not renew is taken after it was observed; the old driver may write no more."""
    old = other_machine(url)
    monkeypatch.setattr(module, "EXPIRY_SECONDS", 0.3)
    threading.Event().wait(0.5)
    notices: list[str] = []
    new = open_lease(url)
    new.acquire(notices.append)
    assert "has expired" in notices[0]
    with pytest.raises(RunError, match=r"holds the lease now \(generation 2, this one has 1\)"):
        old.check(force=True)
    old.release()                      # must not touch the new driver's lease
    new.check(force=True)
    new.release()


@on_every_store
def test_renewed_lease_is_not_taken(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a driver that renews is alive, whatever the clocks of two machines show."""
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(module, "EXPIRY_SECONDS", 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_identify_machine", lambda: "another machine")
        first = held(url)
    clock = module.time.time
    monkeypatch.setattr(module.time, "time", lambda: clock() if threading.current_thread().name == "dbo lease" else 0.0)
    with pytest.raises(FolderLockedError):
        held(url)
    first.release()


@pytest.mark.parametrize("url", ["file", "s3"], indirect=True)
def test_only_one_of_many_gets_the_lease(url: str) -> None:
    """Eight drivers at the same moment, five times."""

    assert [race(f"{url}-{number}", 8) for number in range(5)] == [1] * 5


def test_killed_driver_on_this_machine_is_replaced_at_once(url: str) -> None:
    """Its process does not exist any more, so nobody has to wait before --resume."""
    code = (
        "import os, sys, fsspec\nfrom dbo.platform.runs.lease import Lease\n"
        "files, root = fsspec.core.url_to_fs(sys.argv[1])\nLease(files, root, '').acquire(print)\nos._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", code, url], check=True, timeout=60)
    second = held(url)
    assert second.generation == 2
    second.release()


# ---- runs ------------------------------------------------------------------------------------------------------------


@on_every_store
def test_run_and_resume_at_a_url(url: str, tiny: Any, same: Any, tmp_path: Path) -> None:
    """Files at the URL are those of a run with a path; a second start finds the run finished."""
    run(tiny(), url)
    assert not run(tiny(), url, resume=True).is_new
    run(tiny(), tmp_path / "plain")
    RemoteFolder(url).fetch(tmp_path / "fetched")
    assert same(tmp_path / "fetched", tmp_path / "plain")


@on_every_store
def test_run_at_a_url_in_use_is_refused(url: str, tiny: Any, other_machine: Callable[[str], Lease]) -> None:
    """Exit code 2 before anything is read or written there."""
    other_machine(url)
    with pytest.raises(InputError, match="is in use by another run"):
        run(tiny(), url)
    assert read_content(url) == {}


@on_every_store
@pytest.mark.parametrize("is_fenced", [True, False])
def test_run_that_lost_its_lease_writes_nothing_more(
    url: str, is_fenced: bool, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another driver takes over in round 5: the run fails and the URL stays as it was. Control: without the check."""
    original, before = LocalEngine.run_round, {}

    def lose_in_round_5(engine: LocalEngine, round_: int) -> None:
        if round_ == 5:
            open_lease(url)._create(2)
            before.update(read_content(url))
        original(engine, round_)

    monkeypatch.setattr(LocalEngine, "run_round", lose_in_round_5)
    experiment = tiny(rounds=9, checkpoint_every=2)
    if is_fenced:
        with pytest.raises(RunError, match="another run holds the lease now"):
            run(experiment, url)
    else:
        monkeypatch.setattr(Lease, "check", lambda self, force=False: None)
        run(experiment, url)
    assert before
    assert (read_content(url) == before) is is_fenced


def test_refused_run_leaves_nothing_at_its_url(url: str, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong input writes nothing, no lease either."""

    def refuse(*given: Any, **more: Any) -> None:
        raise InputError("no")

    monkeypatch.setattr(runner, "check_folder", refuse)
    with pytest.raises(InputError):
        run(tiny(), url)
    assert not list(Path(url.removeprefix("file://")).rglob("*.json"))


def test_report_of_a_run_that_another_has_followed_is_not_uploaded(url: str, tiny: Any) -> None:
    """The local copy is older than the URL then."""
    run(tiny(), url)
    held(url).release()
    with pytest.raises(RunError, match="another run has written there meanwhile"), publish_additions(url):
        pass
