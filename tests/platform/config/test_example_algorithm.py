"""The documented example of a user's algorithm: short, runnable as written, and sound like a built-in one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.local import LocalEngine
from dbo.platform.runs.run_folder import read_metrics, read_run
from dbo.platform.runs.runner import Result, prepare, run
from dbo.platform.runs.schema import CLOCKS

Command = Callable[..., Any]
EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "gossip_penalty.py"


def example(step: float = 0.1, **changes: Any) -> Experiment:
    """Return the documented example on a small quadratic."""
    keys: dict[str, Any] = {
        "nodes": 4, "rounds": 6, "dtype": "float64", "engine": {"name": "local"}, "plugins": [str(EXAMPLE)],
        "task": {"name": "quadratic", "dim_x": 4, "dim_y": 8}, "algorithm": {"name": "gossip_penalty", "step": step},
    }
    return Experiment(**{**keys, **changes})


def test_example_is_short() -> None:
    """An algorithm fits in forty lines, imports and documentation included."""
    assert len(EXAMPLE.read_text().splitlines()) <= 40


def test_example_runs_from_the_command_line(dbo_process: Command, tmp_path: Path) -> None:
    """The command in its docstring works as written, with fewer rounds, in a process of its own."""
    (command,) = [line.split() for line in EXAMPLE.read_text().splitlines() if line.strip().startswith("dbo run")]
    repo = EXAMPLE.parents[2]
    short = ("rounds=3", "engine.name=local", "tracking.uri=off", "--out", str(tmp_path / "r"))
    done = dbo_process(*command[1:], *short, cwd=repo)
    assert done.code == 0, done.err
    assert "gossip_penalty finished" in done.out
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["algorithm"] == "gossip_penalty"


def test_example_runs_outside_the_repository(dbo_process: Command, tmp_path: Path) -> None:
    """A user's first steps: an empty folder, a copy of the file, and the same numbers as in the repository."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "gossip_penalty.py").write_bytes(EXAMPLE.read_bytes())
    keys = ("nodes=4", "rounds=6", "dtype=float64", "task={name: quadratic, dim_x: 4, dim_y: 8}", "algorithm.step=0.1",
            "algorithm.name=gossip_penalty", "engine.name=local", "tracking.uri=off", "--out", "r")
    done = dbo_process("run", "plugins=[gossip_penalty.py]", *keys, cwd=tmp_path / "empty")
    assert done.code == 0, done.err
    there, here = read_run(tmp_path / "empty" / "r"), run(example(tracking={"uri": "off"}), tmp_path / "here")
    assert there.summary["status"] == "finished"
    assert there.summary["run_key"] == here.experiment.run_key
    for name in ("x", "y", "z"):
        np.testing.assert_array_equal(there.state[name], here.state[name])
    assert {path.name for path in (tmp_path / "empty").iterdir()} == {"gossip_penalty.py", "r"}


def test_example_shows_the_direction_of_its_next_step() -> None:
    """mean(x) moves by −step · mean(direction), as tests over the registry require of a built-in."""
    experiment = example(step=0.2)
    made, parts = prepare(experiment), experiment.parts
    engine = LocalEngine(parts.algorithm, parts.config, made.problem, made.network, [range(4)])
    for round_ in range(1, 5):
        x, direction = engine.local_blocks[0].rows("x").mean(0), engine.local_blocks[0].rows("direction").mean(0)
        engine.advance(round_)
        np.testing.assert_allclose(engine.local_blocks[0].rows("x").mean(0), x - 0.2 * direction, rtol=0, atol=1e-13)


def last_metrics(folder: Path, step: float, heterogeneity: float, rounds: int) -> dict[str, Any]:
    """Run the example until it has converged and return its last metrics."""
    task = {"name": "quadratic", "dim_x": 4, "dim_y": 8, "heterogeneity": heterogeneity}
    result = run(example(step, task=task, rounds=rounds, eval_every=rounds, checkpoint_every=rounds), folder)
    last: dict[str, Any] = result.history.iloc[-1].to_dict()
    return last


def test_example_converges_as_documented(tmp_path: Path) -> None:
    """Near the solution for λ, at a distance proportional to the step; exactly there where all nodes are alike."""
    coarse, fine = last_metrics(tmp_path / "a", 0.2, 1.0, 1000), last_metrics(tmp_path / "b", 0.1, 1.0, 2000)
    assert coarse["direction_norm"] < 1e-5       # converged
    assert coarse["penalty_error"] < 0.02
    for key in ("penalty_error", "consensus_x"):
        assert fine[key] == pytest.approx(coarse[key] / 2, rel=0.2)
    assert last_metrics(tmp_path / "c", 0.2, 0.0, 1000)["penalty_error"] < 1e-9


def test_example_is_the_same_in_any_packing() -> None:
    """m blocks of one = one block, as for every built-in algorithm."""
    experiment = example()
    made, parts = prepare(experiment), experiment.parts
    engines = [
        LocalEngine(parts.algorithm, parts.config, made.problem, made.network, blocks)
        for blocks in ([range(4)], [[0], [1], [2], [3]])
    ]
    for round_ in range(1, 6):
        for engine in engines:
            engine.advance(round_)
    for name in ("x", "y", "z", "direction"):
        whole, split = (engine.rows(name) for engine in engines)
        assert whole is not None
        assert split is not None
        np.testing.assert_allclose(whole, split, rtol=1e-10)
    assert engines[0].ledger().bytes_links == engines[1].ledger().bytes_links > 0


def test_example_resumes(tmp_path: Path) -> None:
    """Resume = straight run, as for every built-in algorithm; z is saved with x and y."""
    experiment = example(checkpoint_every=4)
    straight = run(experiment, tmp_path / "a")
    run(experiment, tmp_path / "b")
    for file in (tmp_path / "b" / "checkpoints" / "round-00000006").iterdir():
        file.unlink()
    resumed = run(experiment, tmp_path / "b", resume=True)
    assert values(straight) == values(resumed)
    assert set(resumed.state) == {"x", "y", "z"}
    assert (tmp_path / "a" / "state.safetensors").read_bytes() == (tmp_path / "b" / "state.safetensors").read_bytes()


def values(result: Result) -> list[dict[str, Any]]:
    lines = read_metrics(result.folder / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in CLOCKS} for line in lines]


def test_example_can_be_compared(dbo: Command, tmp_path: Path) -> None:
    """A plugin can be compared with built-in algorithms, and its parameters are validated like theirs."""
    keys = ["nodes=4", "rounds=2", "task={name: quadratic, dim_x: 4, dim_y: 8}", "engine.name=local",
            "tracking.uri=off"]
    plugin = f"plugins=[{EXAMPLE}]"
    names = ["--algorithms", "gossip_penalty,d_soba"]
    done = dbo("compare", *keys, plugin, *names, "--out", str(tmp_path / "c"), "--quiet")
    assert done.code == 0, done.err
    assert "gossip_penalty" in done.out
    wrong = dbo("run", *keys, plugin, "algorithm={name: gossip_penalty, step: 0}", "--out", str(tmp_path / "r"))
    assert wrong.code == 2
    assert "algorithm.step: 0 is not allowed; must be > 0" in wrong.err
