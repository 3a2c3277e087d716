"""Tests 8 to 11, abuse: malformed input, numbers that diverge, pickles that wait to be loaded, servers left open."""

import contextlib
import io
import json
import math
import os
import pickle
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dbo.platform.cli import doctor, main
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine import ray_engine
from dbo.platform.errors import InputError
from dbo.platform.network import wire
from dbo.platform.runs import checkpoints as checkpointing
from dbo.platform.runs.checkpoints import Checkpoints
from dbo.platform.runs.run_folder import read_run
from dbo.platform.runs.runner import run
from tests.faults import malformed_input
from tests.faults.row import TINY, Row, timed


def command(*arguments: str) -> tuple[int, str, str]:
    """`dbo …` in this process: exit code, output, errors."""
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
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def malformed(short: bool, sabotage: bool = False) -> Row:
    """Every malformed input through the command line. Sabotage: values are not checked."""
    row = Row("bad input", "all < 2 s, before any actor")
    cases = malformed_input.cases()
    cases = cases[:: 40 if short else 1]
    import sklearn.datasets  # noqa: F401 - a library's first import is not the refusal's time

    def never(*arguments: Any) -> None:
        raise AssertionError("an actor was about to be started")

    with mock.patch.object(ray_engine, "connect", never), _gullible() if sabotage else contextlib.nullcontext():
        for case in cases:
            with tempfile.TemporaryDirectory() as place, inside(Path(place)):
                for name, data in case.files.items():
                    Path(name).write_bytes(data)
                before = malformed_input.tree(Path(place))
                with timed(row):
                    code, out, err = command(*case.arguments)
                changed = malformed_input.tree(Path(place)) != before
                wrong = malformed_input.judge(case, code, out, err, changed, row.seconds[-1])
                row.count(wrong is None, f"{case}: {wrong}")
    return row


@contextmanager
def _gullible() -> Iterator[None]:
    def read(*arguments: Any) -> Experiment:
        return Experiment(**{**TINY, "rounds": 1})

    with mock.patch.object(Experiment, "read", read):
        yield


def diverging(short: bool, sabotage: bool = False) -> Row:
    """Steps so large that numbers overflow: told in the round it happens, nothing but finite numbers recorded."""
    row = Row("NaN and inf", "told ≤ 1 round late, last good checkpoint kept")
    names = ("c2dfb",) if short else ("c2dfb", "c2dfb_nc", "madsbo", "mdbo", "dsgda_gt")
    steps = {"c2dfb": "eta_in", "c2dfb_nc": "eta_in", "madsbo": "eta_y", "mdbo": "alpha_x", "dsgda_gt": "eta_y"}
    from dbo.algorithms.registry import algorithms

    for name in names:
        known = algorithms()[name].config.__dataclass_fields__
        key = steps[name] if steps[name] in known else next(k for k in known if k.startswith("eta"))
        for size in (1e3, 1e9, 1e30) if not short else (1e9,):
            section: dict[str, Any] = {"name": name, key: size}
            with tempfile.TemporaryDirectory() as place, _blind() if sabotage else contextlib.nullcontext():
                folder = Path(place) / "r"
                try:
                    experiment = Experiment(**{**TINY, "rounds": 400, "checkpoint_every": 1, "algorithm": section})
                except InputError:
                    continue           # refused before it starts: as good
                try:
                    done = run(experiment, folder)
                except Exception as error:
                    row.count(False, f"{name}, {key}={size:g}: {type(error).__name__}: {error}")
                    continue
                told = done.summary.get("error", "")
                late = int(told.split("round ")[1].split(":")[0]) - done.summary["rounds"] if "round " in told else 99
                finite = all(
                    math.isfinite(value) for line in (folder / "metrics.jsonl").read_text().splitlines()
                    for value in json.loads(line).values() if isinstance(value, float)
                )
                kept = Checkpoints(folder / "checkpoints", experiment.trajectory_key).latest()
                sound = kept is None or all(np.isfinite(a).all() for block in kept.blocks for a in block.values())
                good = done.status == "diverged" and late <= 1 and finite and sound and \
                    (kept is not None or done.summary["rounds"] == 0)
                row.count(good, f"{name}, {key}={size:g}: {done.status}, told {late} late, kept {kept is not None}")
    return row


@contextmanager
def _blind() -> Iterator[None]:
    with mock.patch("dbo.platform.engine.block.finite", return_value=None), mock.patch(
        "dbo.platform.runs.runner.unwell", return_value=None
    ):
        yield


# ---- pickles ---------------------------------------------------------------------------------------------------------


class Evil:
    """Whoever unpickles it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def payloads(marker: Path) -> list[bytes]:
    """The same deed in every protocol, as torch would save it, and in YAML's and JSON's clothes."""
    found = [pickle.dumps(Evil(marker), protocol=protocol) for protocol in range(6)]
    archive = io.BytesIO()
    np.save(archive, np.array([Evil(marker)], dtype=object), allow_pickle=True)
    found.append(archive.getvalue())
    found.append(f"!!python/object/apply:os.mkdir ['{marker}']\n".encode())
    found.append(f"name: !!python/object/apply:os.mkdir ['{marker}']\n".encode())
    found.append(f"import os\nos.mkdir({str(marker)!r})\n".encode())
    return found


def pickles(short: bool, sabotage: bool = False) -> Row:
    """Planted where a run, a reader, a resumption or a sync looks. Sabotage: checkpoints are unpickled."""
    row = Row("pickles", "0 executed")
    SYNCED[:] = [] if short else [True]
    with tempfile.TemporaryDirectory() as place:
        marker, base = Path(place) / "ran", Path(place)
        experiment = Experiment(**TINY)
        texts = payloads(marker)
        for number, payload in enumerate(texts[4:5] if short else texts):
            for name, plant in PLACES.items():
                folder = base / f"{number}-{name.replace('/', '_')}"
                run(experiment, folder)
                with _unpickling() if sabotage else contextlib.nullcontext(), contextlib.suppress(Exception):
                    plant(folder, payload, experiment)
                row.count(not marker.exists(), f"payload {number} as {name} was executed")
                if marker.exists():
                    marker.rmdir()
    return row


SMALL = ("engine.name=local", "task.name=quadratic", "rounds=1", "tracking.uri=off", "--quiet")
SYNCED: list[bool] = []        # MLflow and reports take their time: only in the long version


def _file(name: str) -> Any:
    def plant(folder: Path, payload: bytes, experiment: Experiment) -> None:
        (folder / name).write_bytes(payload)
        for look in (
            lambda: read_run(folder),
            lambda: run(experiment, folder),
            lambda: run(experiment, folder, resume=True),
            lambda: command("run", str(folder / name), *SMALL, "--out", str(folder / "x")),
            lambda: command("report", str(folder), "--out", str(folder / "r.html")) if SYNCED else None,
            lambda: command("sync", str(folder), "--uri", f"sqlite:///{folder.parent}/m.db") if SYNCED else None,
        ):
            with contextlib.suppress(Exception):
                look()

    return plant


def _checkpoint(folder: Path, payload: bytes, experiment: Experiment) -> None:
    """A block's file with a right checksum in a right manifest."""
    place = sorted((folder / "checkpoints").iterdir())[-1]
    block = next(place.glob("block-*"))
    block.write_bytes(payload)
    manifest = json.loads((place / "manifest.json").read_text())
    manifest.pop("sha256")
    manifest["files"][block.name] = checkpointing.hashlib.sha256(payload).hexdigest()
    (place / "manifest.json").write_text(json.dumps({**manifest, "sha256": checkpointing._digest(manifest)}))
    (folder / "summary.json").unlink()
    run(experiment, folder, resume=True)


def _manifest(folder: Path, payload: bytes, experiment: Experiment) -> None:
    place = sorted((folder / "checkpoints").iterdir())[-1]
    (place / "manifest.json").write_bytes(payload)
    (folder / "summary.json").unlink()
    run(experiment, folder, resume=True)


def _packet(folder: Path, payload: bytes, experiment: Experiment) -> None:
    with contextlib.suppress(wire.WireError):
        wire.decode(payload)


PLACES: dict[str, Any] = {
    "checkpoint": _checkpoint, "manifest": _manifest, "message": _packet,
    **{name: _file(name) for name in (
        "metrics.jsonl", "nodes.jsonl", "summary.json", "experiment.yaml", "network.json", "events.jsonl",
        "state.safetensors", "group.json",
    )},
}


@contextmanager
def _unpickling() -> Iterator[None]:
    with mock.patch.object(checkpointing, "load", pickle.loads):
        yield


# ---- exposure --------------------------------------------------------------------------------------------------------


def exposure(short: bool, sabotage: bool = False) -> Row:
    """Servers that answer as Ray's and MLflow's do: open ones are refused, closed ones and ours are not.

    The real servers' 401 and 403 are held by tests/platform/cli/test_submit.py and test_doctor.py. Sabotage: nothing is
    asked.
    """
    row = Row("exposure", "all found")
    from tests.faults.servers import KINDS, served

    with mock.patch("dbo.platform.cli.doctor_network.servers", list) if sabotage else contextlib.nullcontext():
        for routes, host, verdict in KINDS:
            with served(routes, host) as port, timed(row):
                found = [f.verdict for f in doctor.exposed() if f"port {port} " in f.text]
            row.count(found == ([verdict] if verdict else []), f"{host}, expected {verdict}: {found}")
    return row


