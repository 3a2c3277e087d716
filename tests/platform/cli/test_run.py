"""`dbo run`: output, folders, and what it refuses to overwrite."""

import fcntl
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.faults.malformed_input import read_tree

from dbo.algorithms import registry
from dbo.platform.config import plugins

Command = Callable[..., Any]
Check = Callable[..., None]


def test_run_prints_the_last_metrics_and_records_them(
    dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """Exit 0, with metrics and folder on stdout; --quiet ends with one line."""
    done = dbo("run", *tiny_overrides, "--out", "r")
    assert (done.code, done.err) == (0, "")
    for part in ("finished", "upper_loss", "comm_mb", "round 6/6"):
        assert part in done.out
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["status"] == "finished"
    quiet = dbo("run", *tiny_overrides, "--out", "r", "--quiet")
    assert (quiet.code, quiet.err) == (0, "")
    assert re.fullmatch(r"c2dfb finished after 6 rounds: upper loss \S+, \S+ MB, \S+ s; folder: r\n", quiet.out)


def test_run_without_out_goes_below_runs(dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path) -> None:
    """The folder is runs/<name>-<key>; a name with special characters cannot leave runs/."""
    assert dbo("run", *tiny_overrides, "name=../../a b", "rounds=1", "--quiet").code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"a-b-[0-9a-f]{8}|.*a-b-[0-9a-f]{8}", folder.name)
    assert set(os.listdir(tmp_path)) == {"runs"}


def test_overrides_win_over_the_file(dbo: Command, tmp_path: Path) -> None:
    """Overrides win, wherever they stand among the arguments."""
    (tmp_path / "e.yaml").write_text("rounds: 9\nnodes: 4\ntask: {name: quadratic, dim_x: 4, dim_y: 8}\n")
    arguments = ["rounds=1", "e.yaml", "algorithm={name: d_soba}", "tracking.uri=off"]
    assert dbo("run", *arguments, "--out", "r", "--quiet").code == 0
    text = (tmp_path / "r" / "experiment.yaml").read_text()
    assert "rounds: 1\n" in text
    assert "nodes: 4\n" in text


def test_another_experiment_is_not_overwritten(
    dbo: Command, assert_refused: Check, tiny_overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """A run never replaces another experiment's, with or without --resume."""
    assert dbo("run", *tiny_overrides, "rounds=1", "--out", "r", "--quiet").code == 0
    before = read_tree(tmp_path)
    for options in ([], ["--resume"]):
        done = dbo("run", *tiny_overrides, "seed=1", "--out", "r", *options)
        assert_refused(done, "--out", "r", "another experiment (seed is 0 there, 1 here; rounds is 1 there, 6 here)")
        assert read_tree(tmp_path) == before
    changed = ("seed=1", "nodes=3", "topology=star", "algorithm=mdbo", "dtype=float32")
    several = dbo("run", *tiny_overrides, *changed, "--out", "r")
    assert_refused(several, "seed is 0 there", "nodes is", "more differ")
    assert "inner_steps" not in several.err           # of another algorithm


def test_from_is_refused_if_the_default_folder_has_another_run(
    dbo: Command, assert_refused: Check, tiny_overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """That run would be returned and --from ignored. The same command twice is fine: nothing is left to do."""
    assert dbo("run", *tiny_overrides, "rounds=1", "--out", "r", "--quiet").code == 0
    extend = ("run", *tiny_overrides, "rounds=2", "--from", "r")
    for _ in range(2):
        assert dbo(*extend, "--quiet").code == 0
    (default,) = (tmp_path / "runs").glob("*-*")
    shutil.rmtree(default)
    assert dbo("run", *tiny_overrides, "rounds=2", "--quiet").code == 0
    before = read_tree(tmp_path)
    assert_refused(dbo(*extend), "--from: runs/", "did not start from r; use it with --resume instead of --from")
    assert read_tree(tmp_path) == before
    assert dbo(*extend, "--out", "other", "--quiet").code == 0


def test_the_error_has_the_command_that_extends_a_run(
    dbo: Command, assert_refused: Check, tiny_overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """If only rounds grew, the error has the command with --from, and that command runs."""
    assert dbo("run", *tiny_overrides, "rounds=1", "--out", "r", "--quiet").code == 0
    done = dbo("run", *tiny_overrides, "rounds=2", "--out=r", "--resume")
    assert_refused(done, "r holds 1 rounds of this experiment, not 2", "--from r --out r-2-rounds")
    command = shlex.split(done.err.partition("to extend it: ")[2])
    assert command[0] == "dbo"
    assert dbo(*command[1:], "--quiet").code == 0
    assert json.loads((tmp_path / "r-2-rounds" / "summary.json").read_text())["rounds"] == 2


def test_foreign_files_are_not_overwritten(
    dbo: Command, assert_refused: Check, tiny_overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """Files that are named like a run's but are not one stay as they are."""
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "metrics.jsonl").write_text("mine\n")
    before = read_tree(tmp_path)
    assert_refused(dbo("run", *tiny_overrides, "--out", "r"), "--out", "another experiment")
    assert read_tree(tmp_path) == before


def test_unfinished_run_is_not_overwritten(
    dbo: Command, assert_refused: Check, tiny_overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """Without --resume an unfinished run is refused, and the error message names --resume."""
    assert dbo("run", *tiny_overrides, "--out", "r", "--quiet").code == 0
    (tmp_path / "r" / "summary.json").unlink()
    before = read_tree(tmp_path)
    assert_refused(dbo("run", *tiny_overrides, "--out", "r"), "--out", "unfinished", "--resume")
    assert read_tree(tmp_path) == before


def test_a_locked_folder_is_refused(
    dbo: Command, assert_refused: Check, tiny_overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """While another run has locked the folder, a second one is refused."""
    (tmp_path / "r").mkdir()
    with open(tmp_path / "r" / ".lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert_refused(dbo("run", *tiny_overrides, "--out", "r"), "--out", "r", "in use")
    assert read_tree(tmp_path) == {"r": None, "r/.lock": b""}


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not apply to root")
def test_a_folder_without_write_permission_is_refused(
    dbo: Command, assert_refused: Check, tiny_overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """A folder without write permission is an input error."""
    (tmp_path / "r").mkdir(mode=0o500)
    assert_refused(dbo("run", *tiny_overrides, "--out", "r"), "--out", "Permission denied")


def test_the_file_of_a_comparison_is_refused(dbo: Command, assert_refused: Check, tmp_path: Path) -> None:
    """`dbo run` names `dbo compare`; --algorithms without a name is refused."""
    (tmp_path / "c.yaml").write_text("algorithms: {f2ba: {}}\n")
    assert_refused(dbo("run", "c.yaml", "--out", "r"), "c.yaml", "dbo compare")
    assert_refused(dbo("compare", "--algorithms=", "--out", "r"), "--algorithms", "c2dfb,mdbo")


def test_a_run_that_blows_up_is_reported(dbo: Command, tiny_overrides: tuple[str, ...]) -> None:
    """A loss a million times the first is reported, finite or not; a divergence names the preset's values."""
    keys = [override for override in tiny_overrides if not override.startswith("algorithm")]
    grown = dbo("run", *keys, "rounds=12", "algorithm={name: d_soba, eta_x: 300.0}", "--out", "r")
    assert "the run has blown up" in grown.out + grown.err
    tame = dbo("run", *keys, "rounds=2", "algorithm={name: d_soba}", "--out", "tame")
    assert "blown up" not in tame.out + tame.err
    diverged = dbo("run", *keys, "rounds=900", "algorithm={name: d_soba, eta_x: 300.0}", "--out", "q", "--quiet")
    assert diverged.code == 1
    assert diverged.err.count("\n") == 1
    assert "diverged: " in diverged.err
    assert "you set eta_x = 300" in diverged.err
    assert diverged.err.index("eta_x = 300") < diverged.err.index("preset values") < diverged.err.index("eta_y = 0.19")
    assert "folder: q" in diverged.err


def test_changed_code_is_resumed_only_on_request(
    dbo: Command, assert_refused: Check, tiny_overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """A run whose plugin was edited is refused, and resumed with --allow-changed-code."""
    example = Path(__file__).parents[3] / "docs" / "examples" / "gossip_penalty.py"
    plugin = tmp_path / "gossip_penalty.py"
    plugin.write_text(example.read_text())
    keys = [override for override in tiny_overrides if not override.startswith("algorithm")]
    command = ["run", *keys, f"plugins=[{plugin}]", "algorithm={name: gossip_penalty}", "--out", "r", "--quiet"]
    assert dbo(*command).code == 0
    (tmp_path / "r" / "summary.json").unlink()
    plugin.write_text(example.read_text() + "\nEDITED = True\n")
    plugins._loaded.clear()
    registry.ALGORITHMS._found.pop("gossip_penalty")
    assert_refused(dbo(*command, "--resume"), "--out", "--allow-changed-code")
    assert dbo(*command, "--resume", "--allow-changed-code").code == 0
    events = [json.loads(line)["kind"] for line in (tmp_path / "r" / "events.jsonl").read_text().splitlines()]
    assert "code_changed" in events
