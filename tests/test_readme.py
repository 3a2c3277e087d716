"""The README is correct: its commands and its Python run, its links work, its example is the file."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
README = (REPO / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent
COMMANDS = [
    line.partition("#")[0].strip()
    for line in README.splitlines()
    if line.startswith(("    .venv/bin/", "    make "))
]
DATA = REPO.parent / "shared" / "data"
SERVERS = {"watch", "ui"}
BLOCKS = re.findall(r"```(python|yaml)\n(.*?)```", README, flags=re.DOTALL)


def shorten(command: str) -> list[str]:
    """Return the command with fewer rounds, and with the programs of this environment."""
    arguments = [str(BIN / part.removeprefix(".venv/bin/")) if part.startswith(".venv/bin/") else part
                 for part in shlex.split(command)]
    rounds = "rounds=3" if "--from" in arguments else "rounds=2"           # more than the run that it extends
    of_file = [rounds] if any(part.endswith(".yaml") for part in arguments) else []
    if "task=cnn_representation" in arguments:            # as printed it downloads MNIST and uses all of it
        of_file = ["rounds=2", "task.images=4000", f"data_dir={DATA}"]
    return [*(re.sub(r"^rounds=\d+$", rounds, part) for part in arguments), *of_file]


def run(arguments: list[str], cwd: Path) -> None:
    environment = {**os.environ, "CI": "1"}
    done = subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, f"{arguments}: {done.stdout[-1500:]}{done.stderr[-1500:]}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(arguments: list[str], cwd: Path) -> None:
    """Run a command that serves a page: it must print the address, and end after SIGTERM."""
    server = subprocess.Popen(
        [*arguments, "--port", str(free_port())], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output = ""
        while "http://127.0.0.1" not in output:
            assert server.stdout is not None
            line = server.stdout.readline()
            assert line, f"{arguments}: ended without an address: {output}"
            output += line
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0
    finally:
        server.kill()
        server.wait()


def test_make_run_and_make_test_exist() -> None:
    """`make run` and `make test` are in the README and in the Makefile."""
    assert {"make run", "make test"} <= set(COMMANDS)
    makefile = (REPO / "Makefile").read_text()
    assert re.search(r"^run:", makefile, re.MULTILINE)
    assert re.search(r"^test:", makefile, re.MULTILINE)


@pytest.mark.ray
@pytest.mark.slow
def test_every_command_runs(tmp_path: Path) -> None:
    """All `.venv/bin` commands run in the order of the README, and the program that draws its figure.

    They run in a folder with the repository's docs/.
    """
    (tmp_path / "docs").symlink_to(REPO / "docs")
    commands = [command for command in COMMANDS if command.startswith(".venv/bin/") and "verify" not in command]
    if not (DATA / "MNIST").is_dir():
        commands = [command for command in commands if "cnn_task" not in command]
    assert len(commands) >= 6
    for command in commands:
        arguments = shorten(command)
        if arguments[1] in SERVERS:
            serve(arguments, tmp_path)
        else:
            run(arguments, tmp_path)
    run([sys.executable, "-m", "dbo.dashboards.figures", "runs/digits", "--out", "compare.png"], tmp_path)
    assert (tmp_path / "compare.png").stat().st_size > 10_000


@pytest.mark.ray
def test_the_comparison_of_make_run(tmp_path: Path) -> None:
    """With fewer rounds it writes a folder per algorithm and seed, and the tables over five seeds."""
    found = re.search(r"^COMPARE\s*\?=\s*(.*)$", (REPO / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    arguments = [re.sub(r"^rounds=\d+$", "rounds=2", part) for part in shlex.split(found[1])]
    run([str(BIN / "dbo"), "compare", *arguments, "tracking.uri=off", "--out", "out"], tmp_path)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    runs = {f"{name}-seed{seed}" for name in ("c2dfb", "c2dfb_nc", "madsbo", "mdbo") for seed in range(5)}
    assert names >= {*runs, "compare.csv", "summary.csv", "pairs.csv", "group.json"}


def test_python_blocks_run(tmp_path: Path) -> None:
    """The Python block runs as printed, with the local engine and fewer rounds."""
    snippet = next(code for kind, code in BLOCKS if kind == "python" and "result.history" in code)
    code = snippet.replace("rounds=20", 'rounds=2, engine={"name": "local"}')
    assert code != snippet
    run([sys.executable, "-c", code], tmp_path)


def test_the_experiment_file_is_valid(tmp_path: Path) -> None:
    """The YAML block is an experiment that runs."""
    text = next(code for kind, code in BLOCKS if kind == "yaml")
    (tmp_path / "e.yaml").write_text(text)
    run([str(BIN / "dbo"), "run", "e.yaml", "rounds=2", "engine.name=local", "tracking.uri=off", "--quiet"], tmp_path)


def test_the_examples_are_parts_of_the_files() -> None:
    """The round of the algorithm and the losses of the task are exactly those of docs/examples/."""
    parts = (("gossip_penalty.py", "python", "@dbo.algorithm("), ("cnn_task.py", "py", "    def lower("))
    for file, kind, start in parts:
        example = (REPO / "docs" / "examples" / file).read_text(encoding="utf-8")
        (block,) = re.findall(rf"```{kind}\n({re.escape(start)}.*?)```", README, flags=re.DOTALL)
        assert block.strip("\n") in example, file


def test_the_readme_is_short() -> None:
    """What a newcomer reads fits on three screens; everything else is in docs/."""
    assert len(README.splitlines()) <= 135


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(
    str(path.relative_to(REPO)) for path in sorted((REPO / "docs").rglob("*.md")))])
def test_links_work(page: str) -> None:
    """Every relative link of the documentation names an existing file."""
    text = (REPO / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", text):
        assert ((REPO / page).parent / target).exists(), f"{page}: {target}"
