"""Files of somebody else: YAML that expands, planted links, tokens in place of a job's files, forged packets."""

import hashlib
import shutil
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import yaml

from dbo.algorithms.api import Message
from dbo.dashboards.outputs import write_beside_results
from dbo.platform.config import bundle, yaml_io
from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError, RunError
from dbo.platform.network import packet, row_format
from dbo.platform.network.row_format import WireError
from dbo.platform.runs import atomic_io
from dbo.platform.runs.runner import run
from tests.faults.history import interrupt
from tests.faults.row import TINY, Row, measure_time

# ---- YAML ------------------------------------------------------------------------------------------------------------

VALUES: tuple[tuple[str, Any], ...] = (
    ("1:30", "1:30"), ("190:20:30", "190:20:30"), ("yes", "yes"), ("off", "off"), ("017", 17), ("1_000", "1_000"),
    ("0o17", 15), ("2026-01-01", "2026-01-01"), ("1e-3", 1e-3), ("=", "="), ("0b1", "0b1"), ("+.inf", float("inf")),
)


def make_bomb(levels: int, merge: bool) -> str:
    """Return lines that each refer nine times to the line before, by merging or in a list."""
    lines = ["a0: &a0 {k: 1}"]
    for level in range(1, levels):
        values = ", ".join([f"*a{level - 1}"] * 9)
        lines.append(f"a{level}: &a{level} " + (f"{{<<: [{values}]}}" if merge else f"[{values}]"))
    return "\n".join(lines) + "\n"


def expansions(short: bool, sabotage: bool = False) -> Row:
    """Bombs of aliases and merges, and numbers of YAML 1.1. Sabotage: PyYAML's own loader."""
    row = Row("YAML", "bombs refused < 2 s, numbers as in YAML 1.2")
    levels = (6,) if sabotage else (7, 26) if short else range(7, 27)
    with mock.patch.object(yaml_io, "_Loader", yaml.SafeLoader) if sabotage else nullcontext():
        texts = [make_bomb(number, merge) for number in levels for merge in (True, False)]
        for text in [*texts, "a: &a [*a]", "a: &a {<<: *a}", "[" * 5000, "a: " + "9" * 5000]:
            with measure_time(row):
                is_refused = _is_yaml_refused(text)
            row.count(is_refused and row.seconds[-1] < 2, f"{text[:40]!r}: {row.seconds[-1]:.1f} s")
        for text, value in VALUES:
            found = _parse_value(text)
            row.count(found == value and type(found) is type(value), f"{text}: read as {found!r}")
    return row


def _is_yaml_refused(text: str) -> bool:
    try:
        yaml_io.parse(text, "e.yaml")
    except InputError as error:
        return "\n" not in str(error)
    return False


def _parse_value(text: str) -> Any:
    try:
        return yaml_io.parse(f"k: {text}", "e.yaml")["k"]
    except InputError as error:
        return error


# ---- links -----------------------------------------------------------------------------------------------------------

FILES = (
    "experiment.yaml", "network.json", "metrics.jsonl", "nodes.jsonl", "events.jsonl", "state.safetensors",
    "summary.json", "manifest.json", "topology.png", "report.html",
)
# `.NAME.new` were the temporary names of version 0.1, which everybody could know beforehand.
LINKS = (*FILES, ".lock", "checkpoints", "checkpoints/round-00000004", "figures", *(f".{name}.new" for name in FILES))


def links(short: bool, sabotage: bool = False) -> Row:
    """Plant a link in place of each file that a run and its report write. Sabotage: links are followed."""
    row = Row("links", "no foreign file changed")
    for name in LINKS[::5] if short and not sabotage else LINKS:
        for is_resumed in (False, True):
            with tempfile.TemporaryDirectory() as base:
                foreign, folder = Path(base) / "foreign", Path(base) / "r"
                foreign.mkdir()
                if is_resumed:
                    with interrupt(in_round=10):
                        run(Experiment(**TINY), folder)
                expected = _plant_link(folder / name, foreign)
                with measure_time(row), _follow_links() if sabotage else nullcontext():
                    problem = _write_all(folder, is_resumed)
                is_kept = _read_tree(foreign) == expected
                row.count(is_kept and not problem, f"{name}, resumed={is_resumed}: {problem or 'changed'}")
    return row


def _plant_link(path: Path, foreign: Path) -> dict[str, bytes]:
    """Put a link in place of a file or a folder, to its content somewhere else; return what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or path.name in ("checkpoints", "figures"):
        path.mkdir(exist_ok=True)
        (path / "round-00000001").mkdir(exist_ok=True)
        (path / "round-00000001" / "precious").write_text("precious")
        shutil.copytree(path, foreign, dirs_exist_ok=True)
        shutil.rmtree(path)
        path.symlink_to(foreign)
    else:
        (foreign / "precious").write_bytes(path.read_bytes() if path.exists() else b"precious")
        path.unlink(missing_ok=True)
        path.symlink_to(foreign / "precious")
    return _read_tree(foreign)


def _read_tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _write_all(folder: Path, is_resumed: bool) -> str:
    """Run into a folder and write its report; return an error that is not one line for the user."""
    try:
        run(Experiment(**TINY), folder, resume=is_resumed)
        write_beside_results("compare" if (folder / "figures").is_symlink() else "run", folder)
    except (InputError, RunError, OSError):
        return ""
    except Exception as error:
        return repr(error)
    return ""


def _follow_links() -> Any:
    """Write to fixed temporary names, and into whatever they lead to, as version 0.1 did."""
    def write(path: Path, pieces: Iterable[bytes | memoryview]) -> str:
        path.write_bytes(data := b"".join(map(bytes, pieces)))
        return hashlib.sha256(data).hexdigest()

    return mock.patch.multiple(
        atomic_io, write_durably=write, temporary_path=lambda path: path.with_name(f".{path.name}.new"))


# ---- files of a job --------------------------------------------------------------------------------------------------

TOKEN = b"hunter2hunter2\n"


def packing(short: bool, sabotage: bool = False) -> Row:
    """Name a token in every key that names a file, and submit. Sabotage: files are copied without a look."""
    row = Row("files of a job", "0 tokens sent, 0 quoted")
    contents = (TOKEN, b"-----BEGIN KEY-----\n" + TOKEN, b"\xff" + TOKEN, b"a = [\n" + TOKEN, b"\0" * 8 + TOKEN)
    keys: dict[str, Any] = {
        "topology.file": lambda file: {"topology": {"name": "edges", "file": file}},
        "plugins": lambda file: {"plugins": [file]}, "presets": lambda file: {"presets": file},
        "start": lambda file: {"start": file},
        **{f"task.file as {name}": partial(_name_data, name) for name in ("csv", "arrays", "libsvm")},
    }
    unchecked = mock.patch.multiple(
        bundle, _check_edge_list=mock.DEFAULT, _check_python=mock.DEFAULT, _check_presets=mock.DEFAULT,
        _check_start=mock.DEFAULT)
    with unchecked if sabotage else nullcontext():
        for key, make in keys.items():
            for content in contents[:2] if short else contents:
                with tempfile.TemporaryDirectory() as base:
                    token, job = Path(base) / "token.py", Path(base) / "job"
                    token.write_bytes(b"(" + content if key == "plugins" else content)
                    job.mkdir()
                    with measure_time(row):
                        problem = _pack(make(str(token)), job)
                    row.count(not problem, f"{key}: {problem}")
    return row


def _name_data(dataset: str, file: str) -> dict[str, Any]:
    return {"task": {"name": "coefficient_tuning", "dataset": dataset, "file": file}}


def _pack(data: dict[str, Any], job: Path) -> str:
    try:
        bundle.copy_experiment_files(data, job)
    except InputError as error:
        return "quoted" if "hunter2" in str(error) else "a copy is left" if list(job.iterdir()) else ""
    return "packed"


# ---- announced sizes -------------------------------------------------------------------------------------------------

MOST = 200_000          # bytes that decoding a packet of 49 bytes may allocate
HEADER = packet.Header(sender=0, epoch=0, round=1, step=0)


def announced(short: bool, sabotage: bool = False) -> Row:
    """Packets of 49 bytes that announce up to 2³² entries, and NaN of every kind. Sabotage: sizes are not compared."""
    row = Row("announced sizes", f"refused within {MOST:,} bytes of memory; no warning")
    expected = packet.expect_rows({"y": Message(np.zeros((1, 100)), form="dense")})
    dims = (1 << 20, 1 << 22) if sabotage else (101, 1 << 20, 1 << 28, (1 << 32) - 1)
    unchecked = mock.patch.multiple(packet, check_format=mock.DEFAULT, _MAX_UNCHECKED=1 << 40)
    for dim in dims[-1:] if short and not sabotage else dims:
        data = _forge(dim)
        for rows in (expected, None):
            tracemalloc.start()
            start = time.perf_counter()
            try:
                with unchecked if sabotage else nullcontext():
                    packet.decode(data, expected=rows)
                is_refused = rows is None and dim < packet._MAX_UNCHECKED
            except WireError:
                is_refused = True
            row.seconds.append(time.perf_counter() - start)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            row.count(is_refused and peak < MOST, f"{dim} entries: refused={is_refused}, {peak:,} bytes")
    for bits in (0x7FF8000000000001, 0x7FF0000000000001, 0xFFF0123456789ABC):
        values = np.full((1, 100), bits, dtype=np.uint64).view(np.float64)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = packet.decode(packet.encode(HEADER, {"y": Message(values, form="dense")}, 0)).channels["y"]
        is_same = isinstance(got, np.ndarray) and got.tobytes() == values.tobytes()
        row.count(is_same and not caught, f"NaN {bits:x}: same={is_same}, {len(caught)} warnings")
    return row


def _forge(dim: int) -> bytes:
    """Return a packet with a sparse row of this dimension without a single value, under a right checksum."""
    record = packet._RECORD.pack(1, 2, row_format.RICE, 0, dim, 0) + b"y"       # float64
    head = packet._HEADER.pack(
        packet._MAGIC, packet.VERSION, 1, HEADER.sender, HEADER.epoch, HEADER.round, HEADER.step, len(record))
    return head + packet._CHECKSUM.pack(packet.crc32(record, packet.crc32(head))) + record
