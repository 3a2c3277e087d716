"""Malformed input in bulk: refused in one line that names the field and what is allowed, with nothing written.

The cases come from tests/faults/malformed_input.py, which makes them of every parameter's annotation; here every
hand-picked one is tried, and of the others each by turns with the rest of its kind (`python -m tests.faults` tries
all).
"""

import json
import random
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from tests.faults import malformed_input as bulk

from dbo.algorithms.gossip import dense
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine import ray_engine
from dbo.platform.network import wire
from dbo.platform.runs.runner import run

Command = Callable[..., Any]
GENERATED = ("algorithm", "dataset", "task", "engine")
ALL = bulk.cases()
CASES = [case for number, case in enumerate(ALL) if case.kind not in GENERATED or number % 5 == 0]
GROUPS = sorted({case.kind for case in CASES})


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for a cluster is found out."""

    def never(*arguments: Any) -> None:
        raise AssertionError("an actor was about to be started")

    monkeypatch.setattr(ray_engine, "connect", never)


def test_there_are_enough() -> None:
    """More than five hundred different cases, of every kind."""
    assert len(CASES) >= 500
    assert min(Counter(case.kind for case in CASES).values()) >= 5


def answered(dbo: Command, case: Any, folder: Path) -> str | None:
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, data in case.files.items():
            (folder / name).write_bytes(data)
        before = bulk.tree(folder)
        done = dbo(*case.arguments)
        wrong: str | None = bulk.judge(case, done.code, done.out, done.err, bulk.tree(folder) != before)
        return wrong


@pytest.mark.usefixtures("no_actor")
@pytest.mark.parametrize("kind", GROUPS)
def test_malformed_input_is_refused(dbo: Command, tmp_path: Path, kind: str) -> None:
    """No traceback, exit 2, one line with the field and what is allowed, no file, no actor."""
    wrong = {}
    for number, case in enumerate(case for case in CASES if case.kind == kind):
        found = answered(dbo, case, tmp_path / str(number))
        if found is not None:
            wrong[str(case)] = found
    assert wrong == {}


def test_the_judge_can_say_no(dbo: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: good input, a run that was begun, an unnamed field and a traceback are all found out."""
    good = bulk.Case("control", ("run", "e.yaml", "tracking.uri=off", "--quiet"), ("rounds",), {"e.yaml": bulk.GOOD})
    assert "exit 0" in str(answered(dbo, good, tmp_path / "good"))
    unnamed = replace(good, arguments=("run", "rounds=0"), says=("nodes",))
    assert "does not name" in str(answered(dbo, unnamed, tmp_path / "unnamed"))
    assert bulk.judge(unnamed, 2, "", "dbo: nodes: 0 is not allowed\n", changed=True) == "something was written"

    def broken(*arguments: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("dbo.platform.config.overrides.parse", broken)
    assert answered(dbo, unnamed, tmp_path / "broken") == "a traceback"


@pytest.mark.parametrize("arguments", [
    ("rounds=0",), ("algorithm.name=c2dbf",), ("nodes=50", "topology={name: erdos_renyi, p: 0.0001}"),
    ("missing.yaml",),
])
def test_a_process_refuses(dbo_process: Command, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """A command of its own, as a user types it; how long it takes is measured by tests/faults/__main__.py."""
    done = dbo_process("run", *arguments, cwd=tmp_path)
    assert done.code == 2
    assert "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []


# ---- files of a run --------------------------------------------------------------------------------------------------


@pytest.fixture
def unfinished(tiny: Callable[..., Experiment], tmp_path: Path) -> Path:
    """The folder of a run that has not said that it has ended."""
    run(tiny(), tmp_path / "r")
    (tmp_path / "r" / "summary.json").unlink()
    return tmp_path / "r"


def damaged(data: bytes, rng: random.Random) -> bytes:
    """A file that something has happened to, in the middle or all over."""
    at = rng.randrange(len(data))
    return rng.choice([
        data[:at], data[:at] + b"\xff\xfe" + data[at:],
        data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
        b"", b"\0" * len(data), b"null\n", b"[]\n", b"\x80\x04\x95cos\nsystem\n.", data[::-1], data + data[:at],
    ])


@pytest.mark.parametrize("file", ["metrics.jsonl", "nodes.jsonl", "experiment.yaml"])
def test_damaged_records_never_end_in_a_traceback(
    dbo: Command, unfinished: Path, tiny_overrides: tuple[str, ...], file: str
) -> None:
    """A resumed run with a damaged file is refused in a line that names it, or is the very run it was."""
    good, metrics = (unfinished / file).read_bytes(), (unfinished / "metrics.jsonl").read_text().splitlines()
    rng = random.Random(file)
    for _ in range(10):
        (unfinished / file).write_bytes(bad := damaged(good, rng))
        done = dbo("run", *tiny_overrides, "tracking.uri=off", "--out", str(unfinished), "--resume", "--quiet")
        assert "Traceback" not in done.err, bad
        if done.code:
            assert done.code == 2
            assert file in done.err or "another experiment" in done.err
            assert (unfinished / file).read_bytes() == bad          # as it was
        else:
            again = (unfinished / "metrics.jsonl").read_text().splitlines()
            clocks = ("seconds", "timestamp")
            for one, other in zip(map(json.loads, metrics), map(json.loads, again), strict=True):
                assert {k: v for k, v in one.items() if k not in clocks} == {
                    k: v for k, v in other.items() if k not in clocks}
        (unfinished / file).write_bytes(good)
        (unfinished / "summary.json").unlink(missing_ok=True)


def test_damaged_packets_are_never_believed() -> None:
    """A thousand packets with bytes changed, cut or added, half of them under a right checksum: a WireError or a
    packet of finite size, and never another exception; without a right checksum always a WireError."""
    rng = random.Random(0)
    header = wire.Header(sender=1, epoch=0, round=3, step=2)
    good = wire.encode(header, {"x": dense(np.arange(12.0).reshape(1, 12)), "y": dense(np.ones((1, 5), np.float32))}, 0)
    believed = 0
    for number in range(1000):
        bad = damaged(good, rng)
        if bad == good:
            continue
        if number % 2 and len(bad) > 40 and bad[:4] == good[:4]:
            bad = bad[:24] + struct.pack("<Q", len(bad) - 36) + bad[32:]
            bad = bad[:32] + struct.pack("<I", crc32(bad[36:], crc32(bad[:32]))) + bad[36:]
            with suppress(wire.WireError):
                believed += bool(wire.decode(bad))
        else:
            with pytest.raises(wire.WireError):
                wire.decode(bad)
    assert believed > 0      # control: a right checksum over other values is a packet, so the checksum is what refuses
