"""Generated malformed input: refused in one line that names the field and what is allowed, with nothing written.

The cases come from tests/faults/malformed_input.py, which derives them from the declaration of every parameter. Here
we try all selected cases and a fifth of the generated ones; `python -m tests.faults` tries all.
"""

import json
import os
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
from dbo.platform.engine import factory
from dbo.platform.network import packet
from dbo.platform.runs.runner import run
from dbo.platform.runs.schema import CLOCKS

Command = Callable[..., Any]
GENERATED = ("algorithm", "dataset", "task", "engine")
ALL = bulk.cases()
CASES = [case for number, case in enumerate(ALL) if case.kind not in GENERATED or number % 5 == 0]
GROUPS = sorted({case.kind for case in CASES})


FILES = {        # key that names a file: arguments
    "presets": ("presets={}",),
    "topology.file": ("topology.name=edges", "topology.file={}"),
    "start": ("start={}",),
    "plugins": ("plugins={}",),
    "task.file": ("task.name=coefficient_tuning", "task.dataset={{name: csv, file: {}}}"),
}


@pytest.fixture
def no_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a command that connects to a cluster."""

    def never(*arguments: Any) -> None:
        raise AssertionError("an actor was about to be started")

    monkeypatch.setattr(factory, "connect", never)


def test_there_are_enough_cases() -> None:
    """More than five hundred, and several of every kind."""
    assert len(CASES) >= 500
    assert min(Counter(case.kind for case in CASES).values()) >= 5


def try_case(dbo: Command, case: Any, folder: Path) -> str | None:
    """Run the command of a case; return what is wrong with its response."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, data in case.files.items():
            (folder / name).write_bytes(data)
        before = bulk.read_tree(folder)
        done = dbo(*case.arguments)
        fault: str | None = bulk.find_fault(case, done.code, done.out, done.err, bulk.read_tree(folder) != before)
        return fault


@pytest.mark.usefixtures("no_actor")
@pytest.mark.parametrize("kind", GROUPS)
def test_malformed_input_is_refused(dbo: Command, tmp_path: Path, kind: str) -> None:
    """No traceback, exit 2, one line with the field and what is allowed, no file, no actor."""
    faults = {}
    for number, case in enumerate(case for case in CASES if case.kind == kind):
        fault = try_case(dbo, case, tmp_path / str(number))
        if fault is not None:
            faults[str(case)] = fault
    assert faults == {}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("key", FILES)
def test_a_pipe_is_refused(dbo: Command, assert_refused: Command, tmp_path: Path, key: str) -> None:
    """A foreign experiment may name one in place of a file, and the command would wait for ever."""
    file = tmp_path / "pipe.py"
    os.mkfifo(file)
    given = [argument.format(file) for argument in FILES[key]]
    assert_refused(dbo("run", "nodes=3", "rounds=1", "tracking.uri=off", "--out", "never", *given), key, str(file))
    assert not Path("never").exists()


def test_the_check_finds_faults(dbo: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: it finds accepted input, written files, a field that is not named, and a traceback."""
    good = bulk.Case("control", ("run", "e.yaml", "tracking.uri=off", "--quiet"), ("rounds",), {"e.yaml": bulk.GOOD})
    assert "exit 0" in str(try_case(dbo, good, tmp_path / "good"))
    unnamed = replace(good, arguments=("run", "rounds=0"), expected=("nodes",))
    assert "does not name" in str(try_case(dbo, unnamed, tmp_path / "unnamed"))
    assert bulk.find_fault(unnamed, 2, "", "dbo: nodes: 0 is not allowed\n", changed=True) == "something was written"

    def broken(*arguments: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("dbo.platform.config.overrides.parse", broken)
    assert try_case(dbo, unnamed, tmp_path / "broken") == "a traceback"


@pytest.mark.parametrize("arguments", [
    ("rounds=0",), ("algorithm.name=c2dbf",), ("nodes=50", "topology={name: erdos_renyi, p: 0.0001}"),
    ("missing.yaml",),
])
def test_a_separate_process_refuses(dbo_process: Command, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """As a user types it; tests/faults/__main__.py measures how long it takes."""
    done = dbo_process("run", *arguments, cwd=tmp_path)
    assert done.code == 2
    assert "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []


# ---- files of a run --------------------------------------------------------------------------------------------------


@pytest.fixture
def unfinished(tiny: Callable[..., Experiment], tmp_path: Path) -> Path:
    """Return the folder of a run without a summary."""
    run(tiny(), tmp_path / "r")
    (tmp_path / "r" / "summary.json").unlink()
    return tmp_path / "r"


def damage(data: bytes, rng: random.Random) -> bytes:
    """Return the content of a file with an error, in one place or everywhere."""
    at = rng.randrange(len(data))
    return rng.choice([
        data[:at], data[:at] + b"\xff\xfe" + data[at:],
        data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
        b"", b"\0" * len(data), b"null\n", b"[]\n", b"\x80\x04\x95cos\nsystem\n.", data[::-1], data + data[:at],
    ])


@pytest.mark.parametrize("file", ["metrics.jsonl", "nodes.jsonl", "experiment.yaml"])
def test_damaged_records_are_refused_or_repaired(
    dbo: Command, unfinished: Path, tiny_overrides: tuple[str, ...], file: str
) -> None:
    """Resuming with a damaged file is refused in a line that names it, or gives the same run; never a traceback."""
    good, metrics = (unfinished / file).read_bytes(), (unfinished / "metrics.jsonl").read_text().splitlines()
    rng = random.Random(file)
    for _ in range(10):
        (unfinished / file).write_bytes(bad := damage(good, rng))
        done = dbo("run", *tiny_overrides, "tracking.uri=off", "--out", str(unfinished), "--resume", "--quiet")
        assert "Traceback" not in done.err, bad
        if done.code:
            assert done.code == 2
            assert file in done.err or "another experiment" in done.err
            assert (unfinished / file).read_bytes() == bad          # unchanged
        else:
            resumed = (unfinished / "metrics.jsonl").read_text().splitlines()
            for one, other in zip(map(json.loads, metrics), map(json.loads, resumed), strict=True):
                assert {k: v for k, v in one.items() if k not in CLOCKS} == {
                    k: v for k, v in other.items() if k not in CLOCKS}
        (unfinished / file).write_bytes(good)
        (unfinished / "summary.json").unlink(missing_ok=True)


def test_damaged_packets_are_refused() -> None:
    """A packet with a wrong checksum is always a WireError; one with a correct checksum never another exception.

    A thousand packets with bytes changed, removed or added, half of them with a correct checksum.
    """
    rng = random.Random(0)
    header = packet.Header(sender=1, epoch=0, round=3, step=2)
    channels = {"x": dense(np.arange(12.0).reshape(1, 12)), "y": dense(np.ones((1, 5), np.float32))}
    good = packet.encode(header, channels, 0)
    accepted = 0
    for number in range(1000):
        bad = damage(good, rng)
        if bad == good:
            continue
        if number % 2 and len(bad) > 40 and bad[:4] == good[:4]:
            bad = bad[:24] + struct.pack("<Q", len(bad) - 36) + bad[32:]
            bad = bad[:32] + struct.pack("<I", crc32(bad[36:], crc32(bad[:32]))) + bad[36:]
            with suppress(packet.WireError):
                accepted += bool(packet.decode(bad))
        else:
            with pytest.raises(packet.WireError):
                packet.decode(bad)
    assert accepted > 0      # control: with a correct checksum other values are a packet, so the checksum refuses
