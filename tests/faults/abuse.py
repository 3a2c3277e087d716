"""Tests 8 to 11, abuse: malformed input, diverging numbers, planted pickles, servers open to others."""

import contextlib
import io
import json
import math
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dbo.platform.cli import doctor, main
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine import factory
from dbo.platform.errors import InputError
from dbo.platform.network import packet
from dbo.platform.runs import checkpoints
from dbo.platform.runs.checkpoints import Checkpoints
from dbo.platform.runs.run_folder import read_run
from dbo.platform.runs.runner import run
from tests.faults import malformed_input
from tests.faults.row import TINY, Row, measure_time


def run_command(*arguments: str) -> tuple[int, str, str]:
    """Run `dbo …` in this process; return exit code, output and errors."""
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.object(sys, "argv", ["dbo", *arguments]), contextlib.redirect_stdout(out), \
            contextlib.redirect_stderr(err):
        try:
            main.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


@contextmanager
def working_dir(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def malformed(short: bool, sabotage: bool = False) -> Row:
    """Try every malformed input on the command line. Sabotage: values are not checked."""
    row = Row("bad input", "all < 2 s, before any actor")
    cases = malformed_input.cases()
    cases = cases[:: 40 if short else 1]
    import sklearn.datasets  # noqa: F401 - the first import of a library does not count

    def never(*arguments: Any) -> None:
        raise AssertionError("an actor was about to be started")

    with mock.patch.object(factory, "connect", never), _no_validation() if sabotage else contextlib.nullcontext():
        for case in cases:
            with tempfile.TemporaryDirectory() as place, working_dir(Path(place)):
                for name, data in case.files.items():
                    Path(name).write_bytes(data)
                before = malformed_input.read_tree(Path(place))
                with measure_time(row):
                    code, out, err = run_command(*case.arguments)
                changed = malformed_input.read_tree(Path(place)) != before
                fault = malformed_input.find_fault(case, code, out, err, changed, row.seconds[-1])
                row.count(fault is None, f"{case}: {fault}")
    return row


@contextmanager
def _no_validation() -> Iterator[None]:
    def read(*arguments: Any) -> Experiment:
        return Experiment(**{**TINY, "rounds": 1})

    with mock.patch.object(Experiment, "read", read):
        yield


def diverging(short: bool, sabotage: bool = False) -> Row:
    """Take steps so large that numbers overflow: detected in the same round, and only finite numbers are recorded."""
    row = Row("NaN and inf", "detected ≤ 1 round late, last good checkpoint kept")
    names = ("c2dfb",) if short else ("c2dfb", "c2dfb_nc", "madsbo", "mdbo", "dsgda_gt")
    steps = {"c2dfb": "eta_in", "c2dfb_nc": "eta_in", "madsbo": "eta_y", "mdbo": "alpha_x", "dsgda_gt": "eta_y"}
    from dbo.algorithms.registry import algorithms

    for name in names:
        known = algorithms()[name].config.__dataclass_fields__
        key = steps[name] if steps[name] in known else next(k for k in known if k.startswith("eta"))
        for size in (1e3, 1e9, 1e30) if not short else (1e9,):
            section: dict[str, Any] = {"name": name, key: size}
            with tempfile.TemporaryDirectory() as place, _no_detection() if sabotage else contextlib.nullcontext():
                folder = Path(place) / "r"
                try:
                    experiment = Experiment(**{**TINY, "rounds": 400, "checkpoint_every": 1, "algorithm": section})
                except InputError:
                    continue           # refused before it starts: also correct
                try:
                    done = run(experiment, folder)
                except Exception as error:
                    row.count(False, f"{name}, {key}={size:g}: {type(error).__name__}: {error}")
                    continue
                reason = done.summary.get("error", "")
                found = int(reason.split("round ")[1].split(":")[0]) if "round " in reason else 999
                late = found - done.summary["rounds"]
                metrics_finite = all(
                    math.isfinite(value) for line in (folder / "metrics.jsonl").read_text().splitlines()
                    for value in json.loads(line).values() if isinstance(value, float)
                )
                kept = Checkpoints(folder / "checkpoints", experiment.trajectory_key).load_latest()
                kept_finite = kept is None or all(np.isfinite(a).all() for block in kept.blocks for a in block.values())
                good = done.status == "diverged" and late <= 1 and metrics_finite and kept_finite and \
                    (kept is not None or done.summary["rounds"] == 0)
                row.count(good, f"{name}, {key}={size:g}: {done.status}, {late} rounds late, kept {kept is not None}")
    return row


@contextmanager
def _no_detection() -> Iterator[None]:
    with mock.patch("dbo.platform.engine.block.first_nonfinite", return_value=None), mock.patch(
        "dbo.platform.runs.training.first_nonfinite_metric", return_value=None
    ):
        yield


# ---- pickles ---------------------------------------------------------------------------------------------------------


class Malicious:
    """Creates a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def make_payloads(marker: Path) -> list[bytes]:
    """Return code that creates a folder: as a pickle in every protocol, as a NumPy array, as YAML, as Python."""
    found = [pickle.dumps(Malicious(marker), protocol=protocol) for protocol in range(6)]
    archive = io.BytesIO()
    np.save(archive, np.array([Malicious(marker)], dtype=object), allow_pickle=True)
    found.append(archive.getvalue())
    found.append(f"!!python/object/apply:os.mkdir ['{marker}']\n".encode())
    found.append(f"name: !!python/object/apply:os.mkdir ['{marker}']\n".encode())
    found.append(f"import os\nos.mkdir({str(marker)!r})\n".encode())
    return found


def pickles(short: bool, sabotage: bool = False) -> Row:
    """Plant payloads in every file that a run, a reader or a command reads. Sabotage: checkpoints are unpickled."""
    row = Row("pickles", "0 executed")
    with tempfile.TemporaryDirectory() as place:
        marker, base = Path(place) / "ran", Path(place)
        experiment = Experiment(**TINY)
        payloads = make_payloads(marker)
        for number, payload in enumerate(payloads[4:5] if short else payloads):
            for target in TARGETS:
                folder = base / f"{number}-{target.replace('/', '_')}"
                run(experiment, folder)
                with _unpickling() if sabotage else contextlib.nullcontext(), contextlib.suppress(Exception):
                    _plant(target, folder, payload, experiment, short)
                row.count(not marker.exists(), f"payload {number} as {target} was executed")
                if marker.exists():
                    marker.rmdir()
    return row


SMALL = ("engine.name=local", "task.name=quadratic", "rounds=1", "tracking.uri=off", "--quiet")
TARGETS = (
    "checkpoint", "manifest", "message", "metrics.jsonl", "nodes.jsonl", "summary.json", "experiment.yaml",
    "network.json", "events.jsonl", "state.safetensors", "group.json",
)


def _plant(target: str, folder: Path, payload: bytes, experiment: Experiment, short: bool) -> None:
    """Put a payload in one place of a run folder, and use all that reads it."""
    if target == "message":
        packet.decode(payload)
    elif target in ("checkpoint", "manifest"):
        newest = sorted((folder / "checkpoints").iterdir())[-1]
        if target == "manifest":
            (newest / "manifest.json").write_bytes(payload)
        else:                                    # a block's file, with the correct checksum in the manifest
            block = next(newest.glob("block-*"))
            block.write_bytes(payload)
            manifest = json.loads((newest / "manifest.json").read_text())
            manifest.pop("sha256")
            manifest["files"][block.name] = checkpoints.hashlib.sha256(payload).hexdigest()
            (newest / "manifest.json").write_text(json.dumps({**manifest, "sha256": checkpoints._digest(manifest)}))
        (folder / "summary.json").unlink()
        run(experiment, folder, resume=True)
    else:
        (folder / target).write_bytes(payload)
        readers: list[Callable[[], object]] = [
            lambda: read_run(folder),
            lambda: run(experiment, folder),
            lambda: run(experiment, folder, resume=True),
            lambda: run_command("run", str(folder / target), *SMALL, "--out", str(folder / "x")),
        ]
        if not short:                            # reports and MLflow are slow
            readers.append(lambda: run_command("report", str(folder), "--out", str(folder / "r.html")))
            readers.append(lambda: run_command("sync", str(folder), "--uri", f"sqlite:///{folder.parent}/m.db"))
        for read in readers:
            with contextlib.suppress(Exception):
                read()


@contextmanager
def _unpickling() -> Iterator[None]:
    with mock.patch.object(checkpoints, "load", pickle.loads):
        yield


# ---- exposure --------------------------------------------------------------------------------------------------------


def exposure(short: bool, sabotage: bool = False) -> Row:
    """Run servers that respond like Ray and MLflow: `dbo doctor` refuses the open ones, and not the others.

    Tests of the real servers' 401 and 403 are in tests/platform/cli/test_submit.py and test_doctor.py. Sabotage: no
    server is probed.
    """
    row = Row("exposure", "all found")
    from tests.faults.servers import KINDS, run_server

    with mock.patch("dbo.platform.cli.doctor_network.find_servers", list) if sabotage else contextlib.nullcontext():
        for routes, host, verdict in KINDS:
            with run_server(routes, host) as port, measure_time(row):
                found = [f.verdict for f in doctor.check_exposure() if f"port {port} " in f.text]
            row.count(found == ([verdict] if verdict else []), f"{host}, expected {verdict}: {found}")
    return row
