"""`dbo supervise`: a killed driver is restarted with --resume, a bounded number of times; signals are passed on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbo.platform.cli import supervise
from dbo.platform.cli.supervise import Supervisor
from dbo.platform.config.experiment import Experiment
from dbo.platform.runs.run_folder import read_events
from dbo.platform.runs.runner import run

Command = Callable[..., Any]
DBO = [sys.executable, "-m", "dbo.platform.cli"]
SLOW = {"rounds": 400, "checkpoint_every": 20}


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], list[list[str]]]:
    """Replace the child by a program that appends its arguments to a file, then runs this code."""
    log = tmp_path / "attempts"

    def use(code: str) -> list[list[str]]:
        program = f"import sys, os; open({str(log)!r}, 'a').write(' '.join(sys.argv[1:]) + chr(10)); {code}"
        start = subprocess.Popen
        monkeypatch.setattr(supervise.subprocess, "Popen", lambda command, **options: start(
            [sys.executable, "-c", program, *command[3:]], **options))
        return []

    use.read = lambda: [line.split() for line in log.read_text().splitlines()]      # type: ignore[attr-defined]
    return use


@pytest.mark.parametrize(("code", "expected", "tries"), [
    ("sys.exit(0)", 0, 1), ("sys.exit(2)", 2, 1), ("sys.exit(1)", 1, 3), ("os.kill(os.getpid(), 9)", 137, 3),
    ("sys.exit(0 if '--resume' in sys.argv else 1)", 0, 2),
])
def test_the_exit_code_is_that_of_the_last_attempt(attempts: Any, code: str, expected: int, tries: int) -> None:
    """Success and wrong input are final; everything else is tried again, with --resume."""
    attempts(code)
    assert Supervisor(["run", "rounds=3"], retries=2, delay=0.0).run() == expected
    assert attempts.read() == [["run", "rounds=3"], *[["run", "rounds=3", "--resume"]] * (tries - 1)]


@pytest.mark.parametrize(("arguments", "again"), [
    (["sweep", "s.yaml"], ["sweep", "s.yaml", "--resume"]), (["run", "--resume"], ["run", "--resume"]),
    (["compare", "--quiet"], ["compare", "--quiet"]), (["submit", "e.yaml"], ["submit", "e.yaml"]),
])
def test_each_command_is_repeated_as_it_resumes(attempts: Any, arguments: list[str], again: list[str]) -> None:
    """`compare` and `submit` resume whenever they are repeated, and take no --resume."""
    attempts("sys.exit(1)")
    Supervisor(arguments, retries=1, delay=0.0).run()
    assert attempts.read() == [arguments, again]


def test_the_delay_doubles(attempts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that is down is not asked all the time; a minute is the most."""
    attempts("sys.exit(1)")
    waited: list[float] = []
    monkeypatch.setattr(Supervisor, "_wait", lambda self, seconds: waited.append(seconds))
    Supervisor(["run"], retries=4, delay=10.0).run()
    assert waited == [10.0, 20.0, 40.0, 60.0]


@pytest.mark.parametrize("arguments", [(), ("list",), ("supervise", "run"), ("--retries", "-1", "run")])
def test_other_commands_are_refused(dbo: Command, arguments: tuple[str, ...]) -> None:
    """Exit 2, one line."""
    done = dbo("supervise", *arguments)
    assert done.code == 2
    assert done.err.startswith("dbo: ")


def find_child(pid: int) -> int | None:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(found[0]) if found else None


def wait_for_lines(path: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_killed_driver_is_restarted_to_the_same_bits(
    tiny: Callable[..., Experiment], same: Callable[[Path, Path], bool], tmp_path: Path
) -> None:
    """SIGKILL twice, in the middle of a run: the command itself ends with exit code 0."""
    experiment = tiny(**SLOW)
    undisturbed = run(experiment, tmp_path / "undisturbed").folder
    (tmp_path / "e.yaml").write_text(experiment.to_yaml())
    command = [*DBO, "supervise", "--delay", "0.1", "run", "e.yaml", "--out", "r", "--quiet"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        for lines in (50, 150):
            wait_for_lines(tmp_path / "r" / "metrics.jsonl", lines)
            child = find_child(process.pid)
            assert child
            os.kill(child, signal.SIGKILL)
        printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "supervise: run was killed by SIGKILL; restart 2 of 3" in printed
    assert same(tmp_path / "r", undisturbed)
    assert len([event for event in read_events(tmp_path / "r" / "events.jsonl") if event.kind == "started"]) == 3


def test_an_interruption_is_passed_on_and_not_retried(tiny: Callable[..., Experiment], tmp_path: Path) -> None:
    """SIGTERM ends both; the run can be resumed."""
    (tmp_path / "e.yaml").write_text(tiny(rounds=100_000).to_yaml())
    command = [*DBO, "supervise", "run", "e.yaml", "--out", "r", "--quiet"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for_lines(tmp_path / "r" / "metrics.jsonl", 5)
        child = find_child(process.pid)
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "restart" not in printed
    assert child
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
