"""Runs: the files they write, that results are the same every time, and how failures end."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dbo.algorithms.registry import algorithms
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.local import LocalEngine
from dbo.platform.errors import InputError, RunError
from dbo.platform.runs.checkpoints import Checkpoints
from dbo.platform.runs.preparation import Prepared
from dbo.platform.runs.run_folder import read_metrics, read_run
from dbo.platform.runs.runner import run
from dbo.platform.runs.schema import CLOCKS, COLUMNS

Tiny = Callable[..., Experiment]
Command = Callable[..., Any]

RAISES = '''
from dataclasses import dataclass
from typing import Any
from dbo.algorithms.gossip import mix
from dbo.algorithms.api import algorithm, counter

@dataclass(frozen=True, kw_only=True)
class Config:
    at: int = 3

@dataclass(frozen=True)
class State:
    t: Any
    x: Any
    y: Any
    direction: Any

def init(shard, cfg):
    if cfg.at == 0:
        raise ZeroDivisionError("in init")
    return State(counter(shard), shard.x0, shard.y0, shard.x0)

@algorithm("raises", config=Config, state=State, init=init, packets=lambda cfg: 1)
async def raises(st, shard, cfg):
    """Raises in one round."""
    if int(st.t[0, 0]) + 1 == cfg.at:
        raise ZeroDivisionError("on purpose")
    x, = await mix(x=st.x)
    return State(st.t + 1, x, st.y, st.direction)
'''


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics without their clocks."""
    return [{k: v for k, v in record.items() if k not in CLOCKS} for record in read_metrics(folder / "metrics.jsonl")]


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def assert_same_run(first: Path, second: Path) -> None:
    """All metrics but the clocks are equal, and the final states to the last byte."""
    assert lines(first) == lines(second)
    assert (first / "state.safetensors").read_bytes() == (second / "state.safetensors").read_bytes()


@pytest.fixture
def raises(tmp_path: Path) -> str:
    """Return a plugin whose algorithm raises."""
    file = tmp_path / "raises.py"
    file.write_text(RAISES)
    return str(file)


# ---- the folder ------------------------------------------------------------------------------------------------------


def test_folder_holds_exactly_the_public_files(tiny: Tiny, tmp_path: Path) -> None:
    """The documented files and nothing else, hidden or not."""
    run(tiny(), tmp_path / "r")
    expected = [
        "checkpoints", "events.jsonl", "experiment.yaml", "manifest.json", "metrics.jsonl", "network.json",
        "nodes.jsonl", "state.safetensors", "summary.json",
    ]
    assert sorted(os.listdir(tmp_path / "r")) == expected


@pytest.mark.parametrize("task", [
    {"name": "quadratic", "dim_x": 4, "dim_y": 8},
    {"name": "coefficient_tuning"},
    {"name": "hyper_representation"},
], ids=lambda task: str(task["name"]))
def test_every_line_has_every_column(tiny: Tiny, tmp_path: Path, task: dict[str, Any]) -> None:
    """Each evaluation is a line with all public metrics: numbers, finite, or null where the task has no accuracy."""
    run(tiny(task=task, rounds=2, algorithm={"name": "c2dfb", "inner_steps": 1, "eta_in": 0.1, "eta_out": 0.01}),
        tmp_path / "r")
    text = (tmp_path / "r" / "metrics.jsonl").read_text()
    records = [json.loads(line) for line in text.splitlines()]
    assert [record["round"] for record in records] == [0, 1, 2]
    for record in records:
        assert set(COLUMNS) <= set(record)
        for key, value in record.items():
            if value is None:
                assert "accuracy" in key
                assert task["name"] == "quadratic"
            else:
                assert np.isfinite(value)
        assert record["comm_mb"] == record["bytes_links"] / 1e6
    assert records[0]["bytes_links"] == records[0]["packets"] == 0
    assert records[2]["bytes_links"] == 2 * records[1]["bytes_links"] > 0 or task["name"] != "quadratic"
    assert records[2]["packets"] == 2 * records[1]["packets"] == 2 * 4 * 2


def test_experiment_file_repeats_the_run(tiny: Tiny, tmp_path: Path) -> None:
    """The recorded experiment alone reproduces the run."""
    run(tiny(), tmp_path / "a")
    run(Experiment.read(tmp_path / "a" / "experiment.yaml"), tmp_path / "b")
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "experiment.yaml").read_text() == (tmp_path / "b" / "experiment.yaml").read_text()


def test_summary_and_state(tiny: Tiny, tmp_path: Path) -> None:
    """Status, final metrics, targets with rounds, bytes and seconds, recoveries; x, y and z with a row per node."""
    result = run(tiny(), tmp_path / "r")
    recorded = summary(tmp_path / "r")
    assert recorded == result.summary
    assert (recorded["status"], recorded["rounds"], recorded["recoveries"]) == ("finished", 6, [])
    assert recorded["final"] == read_metrics(tmp_path / "r" / "metrics.jsonl")[-1]
    assert set(recorded["targets"].values()) == {None}
    state = load_file(tmp_path / "r" / "state.safetensors")
    assert {name: rows.shape for name, rows in state.items()} == {"x": (4, 4), "y": (4, 8), "z": (4, 8)}
    assert all(rows.dtype == np.float64 for rows in state.values())


def test_summary_has_the_cost_of_targets(tiny: Tiny, tmp_path: Path) -> None:
    """The first round at an accuracy, with the bytes and seconds up to it."""
    task = {"name": "coefficient_tuning", "test_fraction": 0.5}
    algorithm = {"name": "c2dfb", "inner_steps": 5, "eta_in": 1.0, "eta_out": 0.1}
    result = run(tiny(task=task, rounds=4, algorithm=algorithm), tmp_path / "r")
    cost = result.summary["targets"]["test_accuracy=0.5"]
    row = result.history[result.history["test_accuracy"] >= 0.5].iloc[0]
    assert {key: row[key] for key in cost} == cost
    assert {"round", "bytes_links", "seconds"} <= set(cost)


@pytest.mark.parametrize(("rounds", "every", "expected"), [(6, 4, [0, 4, 6]), (6, 3, [0, 3, 6]), (3, 100, [0, 3])])
def test_eval_every_is_honoured(tiny: Tiny, tmp_path: Path, rounds: int, every: int, expected: list[int]) -> None:
    """The start, every n-th round, and always the last one."""
    result = run(tiny(rounds=rounds, eval_every=every), tmp_path / "r")
    assert result.history["round"].tolist() == expected


@pytest.mark.parametrize(("every", "expected"), [(2, [4, 6]), (4, [4, 6]), (100, [6]), (1, [5, 6])])
def test_checkpoint_every_is_honoured(tiny: Tiny, tmp_path: Path, every: int, expected: list[int]) -> None:
    """Every n-th round and after the last one; the last two are kept."""
    run(tiny(checkpoint_every=every), tmp_path / "r")
    assert sorted(os.listdir(tmp_path / "r" / "checkpoints")) == [f"round-{round_:08d}" for round_ in expected]


def test_evaluations_and_checkpoints_do_not_change_results(tiny: Tiny, tmp_path: Path) -> None:
    """Oracle counters and state do not depend on how often a run is evaluated or saved."""
    often = run(tiny(eval_every=1, checkpoint_every=1), tmp_path / "a")
    seldom = run(tiny(eval_every=6, checkpoint_every=6), tmp_path / "b")
    for name, rows in often.state.items():
        np.testing.assert_array_equal(rows, seldom.state[name])
    assert often.history["gradient_calls"].iloc[-1] == seldom.history["gradient_calls"].iloc[-1]


def test_python_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documented interface: a table with the public columns, and x as (nodes, dim)."""
    monkeypatch.chdir(tmp_path)
    result = run(Experiment(rounds=1, algorithm={"name": "madsbo", "inner_steps": 1, "higp_steps": 1}))
    assert set(COLUMNS) <= set(result.history.columns)
    assert result.history["round"].tolist() == [0, 1]
    assert result.state["x"].shape[0] == 10
    assert result.folder.parent == Path("runs")
    recorded = read_run(result.folder)
    assert recorded.summary["status"] == result.status == "finished"
    np.testing.assert_array_equal(recorded.state["x"], result.state["x"])


@pytest.mark.parametrize("name", [name for name, kind in algorithms().items() if kind.network == "single"])
def test_single_machine_algorithms_run(tiny: Tiny, tmp_path: Path, name: str) -> None:
    """A reference on one machine has one row, sends nothing, and is evaluated on the same problem."""
    result = run(tiny(algorithm={"name": name}, topology={"name": "star"}), tmp_path / "r")
    assert result.status == "finished"
    assert result.state["x"].shape == (1, 4)
    assert result.history["bytes_links"].tolist() == [0] * 7
    assert result.history["consensus_x"].tolist() == [0.0] * 7


@pytest.mark.parametrize("nodes", [1, 2])
def test_tiny_networks_run(tiny: Tiny, tmp_path: Path, nodes: int) -> None:
    """One node and two nodes are networks too."""
    assert run(tiny(nodes=nodes), tmp_path / "r").status == "finished"


# ---- the same every time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", algorithms())
def test_twice_is_the_same(tiny: Tiny, tmp_path: Path, name: str) -> None:
    """A second run has the same values except for clocks, and the same state byte by byte."""
    experiment = tiny(algorithm={"name": name}, rounds=2)
    run(experiment, tmp_path / "a")
    run(experiment, tmp_path / "b")
    assert lines(tmp_path / "a") == lines(tmp_path / "b")
    files = [tmp_path / which / "state.safetensors" for which in "ab"]
    assert files[0].exists() == files[1].exists()
    if files[0].exists():
        assert files[0].read_bytes() == files[1].read_bytes()


def test_random_compression_is_bit_identical_after_resume(tiny: Tiny, tmp_path: Path) -> None:
    """Random numbers are keyed by round: a resumed run draws those of the straight run."""
    algorithm = {"name": "c2dfb", "inner_steps": 2, "eta_in": 0.3, "eta_out": 0.1, "compressor": {"name": "rand_k"}}
    experiment = tiny(algorithm=algorithm)
    run(experiment, tmp_path / "a")
    run(experiment, tmp_path / "b")
    _cut(tmp_path / "b", after=4)
    run(experiment, tmp_path / "b", resume=True)
    assert_same_run(tmp_path / "a", tmp_path / "b")


def _cut(folder: Path, after: int) -> None:
    """Restore the folder to that of a process that died after the checkpoint of round `after`."""
    for place in (folder / "checkpoints").iterdir():
        if int(place.name.removeprefix("round-")) > after:
            for file in place.iterdir():
                file.unlink()
            place.rmdir()
    (folder / "summary.json").unlink()
    (folder / "state.safetensors").unlink()


@pytest.mark.parametrize("tail", ["", '{"round": 6, "sec', "\0\0\0"])
def test_resume_after_a_partly_written_line(tiny: Tiny, tmp_path: Path, tail: str) -> None:
    """Lines after the checkpoint, complete or cut off, are replaced."""
    run(tiny(), tmp_path / "a")
    run(tiny(), tmp_path / "b")
    _cut(tmp_path / "b", after=4)
    with open(tmp_path / "b" / "metrics.jsonl", "a") as file:
        file.write(tail)
    run(tiny(), tmp_path / "b", resume=True)
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_resume_of_a_finished_run_changes_nothing(tiny: Tiny, tmp_path: Path) -> None:
    """It stays finished, with the same files byte by byte."""
    run(tiny(), tmp_path / "r")
    names = ("metrics.jsonl", "state.safetensors", "experiment.yaml")
    before = {name: (tmp_path / "r" / name).read_bytes() for name in names}
    result = run(tiny(), tmp_path / "r", resume=True)
    assert result.status == summary(tmp_path / "r")["status"] == "finished"
    assert {name: (tmp_path / "r" / name).read_bytes() for name in names} == before
    assert len(result.history) == 7


def test_resume_in_an_empty_folder_starts(tiny: Tiny, tmp_path: Path) -> None:
    """--resume is always allowed: without a run to resume, a new one starts."""
    run(tiny(), tmp_path / "a")
    run(tiny(), tmp_path / "b", resume=True)
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_memory_is_returned_when_the_engine_is_gone(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures and pages are made without the memory of wide rows: nothing refers to the engine when it is returned."""
    engines, alive, close = [], [], LocalEngine.close
    monkeypatch.setattr(LocalEngine, "close", lambda self: (engines.append(weakref.ref(self)), close(self))[1])
    monkeypatch.setattr("dbo.platform.runs.runner.trim_memory", lambda: alive.extend(each() for each in engines))
    run(tiny(), tmp_path / "run")
    assert alive == [None]


def test_repetition_replaces_the_run(tiny: Tiny, tmp_path: Path) -> None:
    """A finished run may be repeated into its own folder; files that are not its own stay."""
    run(tiny(), tmp_path / "r")
    (tmp_path / "r" / "notes.txt").write_text("mine")
    before = lines(tmp_path / "r")
    run(tiny(), tmp_path / "r")
    assert lines(tmp_path / "r") == before
    assert (tmp_path / "r" / "notes.txt").read_text() == "mine"


KILLED = (
    "nodes=4", "rounds=600", "checkpoint_every=7", "dtype=float64", "engine.name=local",
    "task={name: quadratic, dim_x: 4, dim_y: 8}",
    "algorithm={name: c2dfb, inner_steps: 2, eta_in: 0.3, eta_out: 0.1, gamma_in: 0.3}", "tracking.uri=off",
)


def test_killed_at_random_moments_and_resumed(tmp_path: Path) -> None:
    """After several SIGKILLs at random times, metrics and state equal those of an undisturbed run."""
    experiment = Experiment.read(None, KILLED)
    calm = run(experiment, tmp_path / "calm")
    length = calm.summary["seconds"]["training"] + calm.summary["seconds"]["evaluation"]
    command = [sys.executable, "-c", "from dbo.platform.cli.main import main; main()", "run", *KILLED,
               "--out", str(tmp_path / "r"), "--resume", "--quiet"]
    dice, killed = random.Random(), 0
    for _ in range(3):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        until = time.monotonic() + 60
        while not (tmp_path / "r" / "metrics.jsonl").exists() and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(dice.uniform(0, length))
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
        assert process.returncode in (-signal.SIGKILL, 0), errors
        killed += process.returncode != 0
    run(experiment, tmp_path / "r", resume=True)
    assert killed
    assert_same_run(tmp_path / "calm", tmp_path / "r")
    expected = [
        "checkpoints", "events.jsonl", "experiment.yaml", "manifest.json", "metrics.jsonl", "network.json",
        "nodes.jsonl", "state.safetensors", "summary.json",
    ]
    assert sorted(os.listdir(tmp_path / "r")) == expected


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("removals", range(5))
def test_interrupted_clearing_can_be_resumed(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool, removals: int
) -> None:
    """A process that dies between any two removals leaves a folder that --resume completes correctly."""
    run(tiny(), tmp_path / "calm")
    run(tiny(), tmp_path / "r")
    if not finished:       # as if it had died before its first checkpoint
        shutil.rmtree(tmp_path / "r" / "checkpoints")
        (tmp_path / "r" / "summary.json").unlink()
    unlink, rmtree, left = Path.unlink, shutil.rmtree, [removals]

    def dying(remove: Callable[..., None]) -> Callable[..., None]:
        def once(*arguments: Any, **more: Any) -> None:
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            remove(*arguments, **more)

        return once

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", dying(unlink))
        patch.setattr(shutil, "rmtree", dying(rmtree))
        with pytest.raises(KeyboardInterrupt):
            run(tiny(), tmp_path / "r", resume=not finished)
    run(tiny(), tmp_path / "r", resume=True)
    assert_same_run(tmp_path / "calm", tmp_path / "r")


# ---- how it ends when it goes wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("eta", [1e3, 1e30, 1e200])
def test_divergence_is_recorded(tiny: Tiny, tmp_path: Path, dtype: str, eta: float) -> None:
    """NaN or inf in a state or metric ends the run as `diverged`; no recorded number is other than finite."""
    algorithm = {"name": "c2dfb", "inner_steps": 2, "eta_in": eta, "eta_out": eta}
    experiment = tiny(algorithm=algorithm, dtype=dtype, rounds=200, checkpoint_every=5)
    result = run(experiment, tmp_path / "r")
    recorded = summary(tmp_path / "r")
    assert result.status == recorded["status"] == "diverged"
    assert "not finite" in recorded["error"]
    assert recorded["rounds"] < 200
    text = (tmp_path / "r" / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert not (tmp_path / "r" / "state.safetensors").exists()


@pytest.mark.parametrize("eval_every", [1, 1000])
def test_last_good_checkpoint_is_kept(tiny: Tiny, tmp_path: Path, eval_every: int) -> None:
    """After divergence the newest checkpoint has finite arrays, however rarely the run is evaluated."""
    experiment = tiny(
        algorithm={"name": "c2dfb", "inner_steps": 2, "eta_in": 20.0, "eta_out": 20.0}, rounds=1000,
        checkpoint_every=3, eval_every=eval_every,
    )
    assert run(experiment, tmp_path / "r").status == "diverged"
    checkpoint = Checkpoints(tmp_path / "r" / "checkpoints", experiment.trajectory_key).load_latest()
    assert checkpoint is not None
    assert all(np.isfinite(array).all() for block in checkpoint.blocks for array in block.values())
    again = run(experiment, tmp_path / "r", resume=True)
    assert again.status == "diverged"


def test_divergence_exits_with_one(dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path) -> None:
    """Exit 1 and one line, no traceback."""
    done = dbo("run", *tiny_overrides, "rounds=200", "algorithm.eta_in=1e30", "--out", str(tmp_path / "r"), "--quiet")
    assert done.code == 1
    assert done.err.count("\n") == 1
    assert "diverged" in done.err
    assert "not finite" in done.err


@pytest.mark.parametrize(("at", "rounds"), [(3, [0, 1, 2]), (1, [0]), (0, [])])
def test_exception_in_an_algorithm_fails_the_run(
    dbo: Command, raises: str, tmp_path: Path, tiny_overrides: tuple[str, ...], at: int, rounds: list[int]
) -> None:
    """Status `failed`, exit 1, one traceback, recorded results are kept; also for an exception in `init`."""
    algorithm = f"algorithm={{name: raises, at: {at}}}"
    done = dbo("run", *tiny_overrides, f"plugins=[{raises}]", algorithm, "--out", str(tmp_path / "r"), "--quiet")
    assert done.code == 1
    assert done.err.count("Traceback") == 1
    assert "\n".join(done.err.splitlines()[:-1]).count("ZeroDivisionError: ") == 1
    recorded = summary(tmp_path / "r")
    assert recorded["status"] == "failed"
    assert "ZeroDivisionError" in recorded["error"]
    assert [record["round"] for record in read_metrics(tmp_path / "r" / "metrics.jsonl")] == rounds
    assert (tmp_path / "r" / "experiment.yaml").exists()


def test_failed_run_can_be_resumed(tiny: Tiny, raises: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed run resumes from its checkpoint."""
    experiment = tiny(plugins=[raises], algorithm={"name": "raises", "at": 5})
    with pytest.raises(ZeroDivisionError):
        run(experiment, tmp_path / "r")
    monkeypatch.setitem(sys.modules[experiment.parts.algorithm.round.__module__].__dict__, "ZeroDivisionError", _Never)
    with pytest.raises(_Never):
        run(experiment, tmp_path / "r", resume=True)
    assert summary(tmp_path / "r")["status"] == "failed"
    assert [record["round"] for record in read_metrics(tmp_path / "r" / "metrics.jsonl")] == [0, 1, 2, 3, 4]


class _Never(Exception):
    pass


def test_damaged_metrics_are_refused_on_resume(dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path) -> None:
    """--resume reports a damaged line in the middle of the metrics and leaves the summary unchanged."""
    folder = tmp_path / "r"
    assert dbo("run", *tiny_overrides, "--out", str(folder), "--quiet").code == 0
    text = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join([*text[:2], "garbage\n", *text[3:]]))
    before = (folder / "summary.json").read_bytes()
    done = dbo("run", *tiny_overrides, "--out", str(folder), "--resume")
    assert done.code == 2
    assert "line 3 is damaged" in done.err
    assert (folder / "summary.json").read_bytes() == before


def test_changed_plugin_is_another_experiment(tiny: Tiny, raises: str, tmp_path: Path) -> None:
    """A folder made with other code is not overwritten: its run could not be repeated."""
    def experiment() -> Experiment:
        return tiny(plugins=[raises], algorithm={"name": "raises", "at": 99})

    run(experiment(), tmp_path / "r")
    Path(raises).write_text(RAISES.replace("on purpose", "edited"))
    with pytest.raises(InputError, match="holds this experiment, run with other code; choose another folder"):
        run(experiment(), tmp_path / "r")


def test_plugins_of_a_foreign_folder_are_not_loaded(tiny: Any, tmp_path: Path) -> None:
    """`--out` on a foreign unfinished run does not load the plugins that its experiment.yaml names."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\n")
    (folder / "experiment.yaml").write_text(f"plugins: [{tmp_path / 'evil.py'}]\n")
    with pytest.raises(InputError, match="another experiment"):
        run(tiny(), folder, resume=True)
    assert not (tmp_path / "owned").exists()


def test_engine_that_cannot_start_leaves_a_previous_run_unchanged(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a full cluster a finished run in the folder stays finished; a new folder records the failure."""
    run(tiny(), tmp_path / "run")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}

    def full(*arguments: Any, **more: Any) -> None:
        raise RunError("the cluster did not place 2 actors")

    monkeypatch.setattr("dbo.platform.engine.local.LocalEngine.__init__", full)
    with pytest.raises(RunError, match="did not place"):
        run(tiny(), tmp_path / "run")
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before
    with pytest.raises(RunError, match="did not place"):
        run(tiny(), tmp_path / "new")
    assert json.loads((tmp_path / "new" / "summary.json").read_bytes())["status"] == "failed"


def test_checkpoints_without_their_records_are_not_used(tiny: Any, tmp_path: Path) -> None:
    """Without metrics.jsonl a resumed run starts from round 0 instead of losing the lines for good."""
    result = run(tiny(), tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "metrics.jsonl").unlink()
    again = run(tiny(), tmp_path / "run", resume=True)
    assert list(again.history["round"]) == list(result.history["round"])


def test_failed_run_is_overwritten_only_on_request(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed run keeps its checkpoints until the user gives --resume or another folder."""
    original = LocalEngine.run_round

    def advance(engine: LocalEngine, number: int) -> None:
        if number == 5:
            raise RuntimeError("out of order")
        original(engine, number)

    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "run_round", advance)
        with pytest.raises(RuntimeError, match="out of order"):
            run(tiny(), tmp_path / "run")
    with pytest.raises(InputError, match="a failed run of this experiment; --resume"):
        run(tiny(), tmp_path / "run")
    assert run(tiny(), tmp_path / "run", resume=True).status == "finished"


def test_settings_without_influence_on_results_are_not_in_the_run_key(tiny: Any) -> None:
    """Another address or more recoveries: the same run. Another packing: another run."""
    engine = {"name": "ray", "nodes_per_actor": 2}
    key = tiny(engine=engine).run_key
    assert tiny(engine={**engine, "address": "10.0.0.1:6379", "max_recoveries": 3, "placement": "pack"}).run_key == key
    assert tiny(engine={**engine, "nodes_per_actor": 1}).run_key != key


def test_run_on_other_data_is_not_resumed(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The location of data is not in the run key; their digest is checked before a run is resumed or reused."""
    run(tiny(), tmp_path / "r")
    monkeypatch.setattr(Prepared, "data_digest", "other")
    with pytest.raises(InputError, match=r"data_dir: .* other data"):
        run(tiny(), tmp_path / "r", resume=True)
