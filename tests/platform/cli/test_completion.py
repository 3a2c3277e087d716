"""Shell completion: commands, options, component names and keys."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from dbo.platform.cli.completion import find_candidates
from dbo.platform.cli.main import app

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands       # type: ignore[attr-defined]


@pytest.mark.parametrize(("words", "expected"), [
    (["swe"], ["sweep"]),
    (["run", "--dry"], ["--dry-run"]),
    (["run", "algorithm=mads"], ["algorithm=madsbo", "algorithm=madsbo_gt"]),
    (["run", "algorithm", "=", "mads"], ["madsbo", "madsbo_gt"]),                     # bash splits at =
    (["run", "engine", "="], ["ray", "local"]),
    (["run", "task.dataset=mni"], ["task.dataset=mnist"]),
    (["run", "algorithm.compressor=q"], ["algorithm.compressor=qsgd"]),
    (["run", "check"], ["checkpoint_every="]),
    (["run", "algorithm.eta_"], ["algorithm.eta_in=", "algorithm.eta_out=", "algorithm.eta_y=", "algorithm.eta_z="]),
    (["run", "algorithm=madsbo", "algorithm.eta_"], ["algorithm.eta_x=", "algorithm.eta_y=", "algorithm.eta_z="]),
    (["run", "dtype="], ["dtype=float32", "dtype=float64"]),
    (["run", "algorithm.tracker="], ["algorithm.tracker=refresh", "algorithm.tracker=cached"]),
    (["compare", "--algorithms", "c2dfb,mdb"], ["c2dfb,mdbo"]),
    (["verify", "--task", "quad"], ["quadratic"]),
    (["list", "two"], ["two_hop"]),
    (["sweep", "sensitivity-r"], ["sensitivity-ratio"]),
    (["new", "al"], ["algorithm"]),
    (["new", "t"], ["task", "topology"]),
    (["new", "topology", ""], []),
    (["run", "--out", "x"], []),
    (["no_such_command", ""], []),
    (["run", "nodes="], []),
])
def test_the_last_word_is_completed(words: list[str], expected: list[str]) -> None:
    """By what can follow the words before it."""
    found = find_candidates(words, COMMANDS)
    assert found == expected


def test_hidden_commands_are_not_offered() -> None:
    """The command that the scripts call is not for people."""
    found = find_candidates([""], COMMANDS)
    assert {"run", "compare", "new", "init"} <= set(found)
    assert "complete" not in found


def test_bash_completes(tmp_path: Path) -> None:
    """The script works in a real bash, which splits words at the = sign."""
    bash, program = shutil.which("bash"), Path(__file__).parents[3] / ".venv" / "bin" / "dbo"
    if bash is None or not program.exists():
        pytest.skip("needs bash and the installed program")
    script = (
        f"PATH={program.parent}:$PATH; eval \"$(dbo completion bash)\"; "
        "COMP_WORDS=(dbo run topology = two); COMP_CWORD=4; _dbo_complete; echo \"${COMPREPLY[@]}\""
    )
    done = subprocess.run([bash, "-c", script], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert done.stdout.strip() == "two_hop", done.stderr
