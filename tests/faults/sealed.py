"""Damage the final files of a run, mix environments, hide secrets in URLs, provoke errors of the system."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from dbo.platform.config import redact as redacting
from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.runs import resume, runner, seal
from dbo.platform.runs.compare import compare
from dbo.platform.runs.remote import RemoteFolder
from dbo.platform.runs.repair import repair_run
from dbo.platform.runs.runner import run
from dbo.platform.runs.schema import CLOSED_FORM_TARGET
from tests.faults.row import TINY, Row, count_evaluations, hash_run, measure_time
from tests.faults.storage import damage

FILES = (
    "experiment.yaml", "network.json", "metrics.jsonl", "nodes.jsonl", "state.safetensors", "summary.json",
    "manifest.json",
)


def damaged_results(short: bool, sabotage: bool = False) -> Row:
    """Damage, empty or remove each final file; resume or repair. Sabotage: checksums are not compared."""
    row = Row("sealed results", "all found; repaired to the same bits, or refused")
    rng, tries = random.Random(0), 1 if short else 10
    experiment = Experiment(**TINY)
    with tempfile.TemporaryDirectory() as base:
        finished = run(experiment, Path(base) / "r").folder
        expected, folder = hash_run(finished), Path(base) / "copy"
        for name in FILES:
            for number in range(3 * tries):
                shutil.rmtree(folder, ignore_errors=True)
                shutil.copytree(finished, folder)
                text = (folder / name).read_bytes()
                harm: Callable[[], Any] = (
                    lambda name=name, text=text: (folder / name).write_bytes(damage(text, rng)),
                    lambda name=name: (folder / name).write_bytes(b""), lambda name=name: (folder / name).unlink(),
                )[number % 3]
                harm()
                if (folder / name).exists() and (folder / name).read_bytes() == text:
                    continue
                with measure_time(row), _trust_every_file() if sabotage else nullcontext():
                    problem = _repair(experiment, folder, name, expected, by_check=bool(number % 2))
                row.count(not problem, f"{name}, damage {number % 3}: {problem}")
                if not problem and seal.check_run(folder).state == "intact":        # else it was refused
                    count_evaluations(row, folder, experiment.rounds + 1)
    return row


def _repair(experiment: Experiment, folder: Path, name: str, expected: str, by_check: bool) -> str:
    """Find and repair the damage; return what went wrong."""
    is_found = seal.check_run(folder).state == "damaged"
    try:
        repair_run(folder) if by_check else run(experiment, folder, resume=True)
        is_same = (folder / "state.safetensors").exists() and hash_run(folder) == expected
    except InputError as error:         # refused: the line names the file
        return "" if is_found and name in str(error) else str(error)
    except Exception as error:
        return repr(error)
    return "" if is_found and is_same else f"found={is_found}, same bits={is_same}"


@contextmanager
def _trust_every_file() -> Iterator[None]:
    with mock.patch.object(seal, "find_damage", return_value=()), \
            mock.patch.object(runner, "restore_copies", return_value=[]):
        yield


def mixed_environments(short: bool, sabotage: bool = False) -> Row:
    """Complete a comparison with another library, and resume with other code. Sabotage: environments are equal."""
    row = Row("environments", "mixed only on request, and recorded")
    experiments = [Experiment(**{**TINY, "algorithm": {"name": name}}) for name in ("f2ba", "bome")]
    current = resume.collect_environment()
    for library in ("numpy",) if short else ("numpy", "numba", "torch", "blas", "processor", "python"):
        with tempfile.TemporaryDirectory() as base:
            with mock.patch("dbo.platform.runs.runner.collect_environment", return_value={**current, library: "0"}):
                compare(experiments[:1], CLOSED_FORM_TARGET, Path(base))
            equal = mock.patch.object(resume, "describe_differences", return_value="")
            with measure_time(row), equal if sabotage else nullcontext():
                row.count(_is_refused(experiments, Path(base), library), f"{library}: results of two environments")
            compare(experiments, CLOSED_FORM_TARGET, Path(base), allow_changed_code=True)
            recorded = json.loads((Path(base) / "group.json").read_text()).get("changes")
            row.count(sabotage or recorded == ["environment_changed"], f"{library}: not recorded")
    return row


def _is_refused(experiments: list[Experiment], out: Path, library: str) -> bool:
    try:
        compare(experiments, CLOSED_FORM_TARGET, out)
    except InputError as error:
        return f"{library} 0 → " in str(error)
    return False


SECRET = "hunter2hunter2hunter2X"
URLS = (
    f"https://me:{SECRET}@h/a", f"https://h/{SECRET}/mlflow", f"https://h/a?{SECRET}", f"https://h/a?x={SECRET}",
    f"https://h/a?b=1&{SECRET}", f"https://h/a#token={SECRET}", f"ftp://h/{SECRET}", f"s3://b/a?sig={SECRET}",
    f"postgresql://h/n?password={SECRET}", f"http://h:1/api/{SECRET}?x=1",
)


def secrets(short: bool, sabotage: bool = False) -> Row:
    """Put a secret into every part of a URL: messages, tracking URI, output. Sabotage: nothing is redacted."""
    row = Row("secrets in URLs", "0 printed, 0 recorded")
    nothing = re.compile("(?!)()")
    off = mock.patch.multiple(redacting, _USER=nothing, _QUERY=nothing, _URL=nothing)
    with off if sabotage else nullcontext(), tempfile.TemporaryDirectory() as base:
        for number, url in enumerate(URLS[:4] if short else URLS):
            row.count(SECRET not in redacting.redact(f"cannot write {url} now"), f"{url}: printed")
            folder = Path(base) / str(number)
            try:
                run(Experiment(**{**TINY, "rounds": 1, "tracking": {"uri": url}}), folder)
                text = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file()).decode("latin-1")
            except InputError as error:
                text = str(error)
            row.count(SECRET not in text, f"{url}: recorded or printed")
            try:
                text = RemoteFolder(url).url
            except InputError as error:
                text = str(error)
            row.count(SECRET not in text, f"{url}: in the name of the output")
    return row


PROGRAM = "import sys; from dbo.platform.cli import main; {}; sys.argv = ['dbo', *sys.argv[1:]]; main.main()"
# The file system names no file when a disk is full, and neither does this error.
FULL = (
    "import errno, os; from unittest import mock; full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)); "
    "mock.patch('dbo.platform.runs.runner.prepare', side_effect=full).start()"
)
WITHOUT_CONTEXT = "fail = main._fail; main._fail = lambda text, code: fail(': ' + text.rpartition(': ')[2], code)"
ONE_LINE = (      # statement before the command, arguments, environment, exit code, what the line must begin with
    ("", ("--out", "ftp://127.0.0.1:1/x"), {}, 2, "--out: ftp://127.0.0.1:1/*** cannot be used: "),
    ("", ("--out", "sftp://h/x"), {}, 2, "--out: sftp://h/*** cannot be used: "),
    ("", ("engine.name=ray",), {"RAY_TMPDIR": "/proc/nowhere"}, 1, "Ray cannot be started here: "),
    (FULL, ("--out", "full"), {}, 1, "No space left on device (in "),
)


def one_line(short: bool, sabotage: bool = False) -> Row:
    """Provoke errors of the system and of libraries. Sabotage: messages lose their context."""
    row = Row("one-line errors", "exit code, one line with context, no traceback")
    base = ("run", "rounds=1", "nodes=4", "engine.name=local", "task.name=quadratic", "tracking.uri=off", "--quiet")
    kept = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    with tempfile.TemporaryDirectory() as place:
        for statement, arguments, environment, code, text in ONE_LINE:
            program = PROGRAM.format(f"{WITHOUT_CONTEXT if sabotage else 'pass'}; {statement or 'pass'}")
            with measure_time(row):
                done = subprocess.run(
                    [sys.executable, "-c", program, *base, *arguments], cwd=place, capture_output=True, text=True,
                    timeout=120, check=False, env={**kept, **environment})
            lines = done.stderr.strip().splitlines()
            is_good = len(lines) == 1 and lines[0].startswith(f"dbo: {text}") and done.returncode == code
            row.count(is_good, f"{arguments}: exit {done.returncode}, {done.stderr[-200:]!r}")
    return row
