"""Let two drivers write to one URL, on a local disk and on a server that answers like S3."""

import logging
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import fsspec

from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.local import LocalEngine
from dbo.platform.errors import FolderLockedError, RunError
from dbo.platform.runs.lease import Lease
from dbo.platform.runs.runner import run
from tests.faults.row import TINY, Row, measure_time


def fencing(short: bool, sabotage: bool = False) -> Row:
    """Races for a lease, and runs that lose it in the middle. Sabotage: nobody looks, and files are created twice."""
    row = Row("fencing", "1 of 8 wins, the fenced one writes nothing")
    with (
        tempfile.TemporaryDirectory() as base, _enter(base), _sabotaged() if sabotage else nullcontext(),
        nullcontext() if short else run_s3_server() as bucket,
    ):
        for root in [f"file://{base}/store", *([bucket] if bucket else [])]:
            for number in range(3 if short else 20):
                with measure_time(row):
                    winners = race(f"{root}/race-{number}", 8)
                row.count(winners == 1, f"{root}: {winners} of 8 drivers got the lease")
            for round_ in (5,) if short else range(2, 9):
                row.count(*_lose_lease(f"{root}/run-{round_}", round_))
    return row


@contextmanager
def _enter(folder: str) -> Iterator[None]:
    """Mirrors of URLs lie below the working directory."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def run_s3_server() -> Iterator[str]:
    """Run a server that answers like S3; yield the URL of a bucket, which environment variables connect to it."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)        # a line per request otherwise
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        with mock.patch.dict(os.environ, variables):
            os.environ.pop("AWS_PROFILE", None)
            files = fsspec.filesystem("s3", skip_instance_cache=True)
            files.clear_instance_cache()           # one of another server, perhaps
            files.mkdir("bucket")
            yield "s3://bucket"
            files.clear_instance_cache()
    finally:
        server.stop()


def open_lease(url: str) -> Lease:
    files, root = fsspec.core.url_to_fs(url)
    return Lease(files, root, url)


def race(url: str, drivers: int) -> int:
    """Let so many drivers take the lease at the same moment; return how many get it."""
    barrier, winners = threading.Barrier(drivers), []

    def compete() -> None:
        mine = open_lease(url)
        barrier.wait()
        try:
            mine.acquire(lambda text: None)
            winners.append(mine)
        except (FolderLockedError, RunError):
            pass

    threads = [threading.Thread(target=compete) for _ in range(drivers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for winner in winners:
        winner.release()
    return len(winners)


def read_content(url: str) -> dict[str, bytes]:
    """Return the files of the run at a URL."""
    files, root = fsspec.core.url_to_fs(url)
    files.invalidate_cache()
    return {name: files.cat_file(name) for name in files.find(root) if "/.lease/" not in name}


def _lose_lease(url: str, lost_in: int) -> tuple[bool, str]:
    """Run, and let another driver take over in the middle; return whether nothing was written from then on."""
    advance, before = LocalEngine.run_round, {}

    def lose(engine: Any, round_: int) -> None:
        if round_ == lost_in:
            open_lease(url)._create(2)
            before.update(read_content(url))
        advance(engine, round_)

    error = None
    with mock.patch.object(LocalEngine, "run_round", lose):
        try:
            run(Experiment(**{**TINY, "rounds": 9, "checkpoint_every": 1}), url)
        except RunError as raised:
            error = raised
    is_fenced = "holds the lease now" in str(error) and read_content(url) == before
    return is_fenced, f"{url}: lost in round {lost_in}, {error or 'the run went on'}"


@contextmanager
def _sabotaged() -> Iterator[None]:
    def create(lease: Lease, generation: int) -> None:
        lease._files.makedirs(lease._folder, exist_ok=True)
        lease._files.pipe_file(lease._path(generation), lease._describe_self(released=False))

    with mock.patch.object(Lease, "check", return_value=None), mock.patch.object(Lease, "_create", create):
        yield
