"""The student's path: an algorithm in a file of one's own, run from the command line and from Python."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.registry import algorithms
from dbo.platform.errors import InputError
from dbo.platform.experiment import Experiment
from dbo.platform.local import LocalEngine
from dbo.platform.records import CLOCKS, read_metrics
from dbo.platform.run import Result, prepare, run

Tiny = Callable[..., Experiment]
Command = Callable[..., Any]

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "gossip_penalty.py"

MINE = '''
from dataclasses import dataclass
from typing import Any
from dbo.algorithms.exchange import mix
from dbo.algorithms.registry import algorithm

@dataclass(frozen=True, kw_only=True)
class Config:
    step: float = 0.1

@dataclass(frozen=True)
class State:
    x: Any
    y: Any
    direction: Any

def init(shard, cfg):
    return State(shard.x0, shard.y0, shard.x0)

@algorithm("mine", config=Config, state=State, init=init, packets=lambda cfg: 1)
async def mine(st, shard, cfg):
    """Mine: {summary}."""
    x, = await mix(x=st.x)
    return State(x + {move}, st.y, st.direction)
'''


def example(step: float = 0.1, **changes: Any) -> Experiment:
    """The example of the documentation on a small quadratic."""
    keys: dict[str, Any] = {
        "nodes": 4, "rounds": 6, "dtype": "float64", "engine": {"name": "local"}, "plugins": [str(EXAMPLE)],
        "task": {"name": "quadratic", "dim_x": 4, "dim_y": 8}, "algorithm": {"name": "gossip_penalty", "step": step},
    }
    return Experiment(**{**keys, **changes})


# ---- the example of the documentation --------------------------------------------------------------------------------


def test_example_is_short() -> None:
    """An algorithm fits in forty lines, imports and documentation included."""
    assert len(EXAMPLE.read_text().splitlines()) <= 40


def test_example_runs_from_the_command_line(dbo_process: Command, tmp_path: Path) -> None:
    """The command of its docstring, word for word but for the rounds, in a process of its own."""
    (command,) = [line.split() for line in EXAMPLE.read_text().splitlines() if line.strip().startswith("dbo run")]
    repo = EXAMPLE.parents[2]
    short = ("rounds=3", "engine.name=local", "tracking.uri=off", "--out", str(tmp_path / "r"))
    done = dbo_process(*command[1:], *short, cwd=repo)
    assert done.code == 0, done.err
    assert "gossip_penalty finished" in done.out
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["algorithm"] == "gossip_penalty"


def settled(folder: Path, step: float, heterogeneity: float, rounds: int) -> dict[str, Any]:
    """The last metrics of the example after it has come to rest."""
    task = {"name": "quadratic", "dim_x": 4, "dim_y": 8, "heterogeneity": heterogeneity}
    result = run(example(step, task=task, rounds=rounds, eval_every=rounds, checkpoint_every=rounds), folder)
    last: dict[str, Any] = result.history.iloc[-1].to_dict()
    return last


def test_example_ends_where_it_says(tmp_path: Path) -> None:
    """Near the solution for λ, at a distance proportional to the step; exactly there where all nodes are alike."""
    coarse, fine = settled(tmp_path / "a", 0.2, 1.0, 1000), settled(tmp_path / "b", 0.1, 1.0, 2000)
    assert coarse["hypergradient_norm"] < 1e-5       # at rest
    assert coarse["penalty_error"] < 0.02
    for key in ("penalty_error", "consensus_x"):
        assert fine[key] == pytest.approx(coarse[key] / 2, rel=0.2)
    assert settled(tmp_path / "c", 0.2, 0.0, 1000)["penalty_error"] < 1e-9


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
        whole, apart = (engine.rows(name) for engine in engines)
        assert whole is not None
        assert apart is not None
        np.testing.assert_allclose(whole, apart, rtol=1e-10)
    assert engines[0].ledger().bytes_links == engines[1].ledger().bytes_links > 0


def test_example_resumes(tmp_path: Path) -> None:
    """Resume = straight run, as for every built-in algorithm; z is saved with x and y."""
    experiment = example(checkpoint_every=4)
    calm = run(experiment, tmp_path / "a")
    run(experiment, tmp_path / "b")
    for file in (tmp_path / "b" / "checkpoints" / "round-00000006").iterdir():
        file.unlink()
    again = run(experiment, tmp_path / "b", resume=True)
    assert values(calm) == values(again)
    assert set(again.state) == {"x", "y", "z"}
    assert (tmp_path / "a" / "state.safetensors").read_bytes() == (tmp_path / "b" / "state.safetensors").read_bytes()


def values(result: Result) -> list[dict[str, Any]]:
    lines = read_metrics(result.folder / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in CLOCKS} for line in lines]


def test_example_can_be_compared(dbo: Command, tmp_path: Path) -> None:
    """A plugin's name stands beside built-in ones, and its parameters are checked like theirs."""
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


# ---- plugins in general ----------------------------------------------------------------------------------------------


def mine(folder: Path, summary: str = "stands still", move: str = "0") -> str:
    file = folder / "mine.py"
    file.write_text(MINE.format(summary=summary, move=move))
    return str(file)


def test_edited_plugin_is_loaded_again(tiny: Tiny, tmp_path: Path) -> None:
    """In a notebook: edit the file, make the experiment again, and the new code runs under a new key."""
    first = tiny(plugins=[mine(tmp_path)], algorithm={"name": "mine"})
    assert run(first, tmp_path / "a").state["x"].tolist() == np.zeros((4, 4)).tolist()
    second = tiny(plugins=[mine(tmp_path, move="1")], algorithm={"name": "mine"})
    assert run(second, tmp_path / "b").state["x"].tolist() == np.full((4, 4), 6.0).tolist()
    assert first.run_key != second.run_key


def test_unchanged_plugin_is_loaded_once(tiny: Tiny, tmp_path: Path) -> None:
    """Naming it again, by another path to the same file, is no second registration."""
    file = mine(tmp_path)
    first = tiny(plugins=[file], algorithm={"name": "mine"})
    other = str(tmp_path / ".." / tmp_path.name / "mine.py")
    second = tiny(plugins=[other, file], algorithm={"name": "mine"})
    assert first.parts.algorithm is second.parts.algorithm


def test_mended_plugin_is_loaded_after_a_failure(tiny: Tiny, tmp_path: Path) -> None:
    """An error below the registration does not leave a name behind that the mended file could not take."""
    file = Path(mine(tmp_path))
    text = file.read_text()
    file.write_text(text + "1 / 0\n")
    with pytest.raises(InputError, match=r"plugins\.0: .* ZeroDivisionError"):
        tiny(plugins=[str(file)], algorithm={"name": "mine"})
    file.write_text(text)
    assert tiny(plugins=[str(file)], algorithm={"name": "mine"}).algorithm == {"name": "mine", "step": 0.1}


def test_two_plugins_cannot_share_a_name(tiny: Tiny, tmp_path: Path) -> None:
    """A name means one thing: the second file is refused, and so is a second function of one file."""
    (tmp_path / "other").mkdir()
    with pytest.raises(InputError, match=r"plugins\.1: .*'mine' is registered twice"):
        tiny(plugins=[mine(tmp_path), mine(tmp_path / "other")], algorithm={"name": "mine"})
    text = (tmp_path / "mine.py").read_text()
    twice = tmp_path / "twice.py"
    body = text[text.index("@algorithm"):].replace("async def mine", "async def again")
    twice.write_text((text + body).replace('"mine"', '"twice"'))
    with pytest.raises(InputError, match="'twice' is registered twice"):
        tiny(plugins=[str(twice)], algorithm={"name": "twice"})


def test_plugin_leaves_no_files_behind(tiny: Tiny, tmp_path: Path) -> None:
    """Loading writes nothing beside the plugin."""
    tiny(plugins=[mine(tmp_path)], algorithm={"name": "mine"})
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


def test_plugin_can_be_a_module(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed module is named by its dotted name, and its source is part of the run's key."""
    (tmp_path / "a_module_of_mine.py").write_text(MINE.format(summary="a module", move="0").replace('"mine"', '"ours"'))
    monkeypatch.syspath_prepend(tmp_path)
    experiment = tiny(plugins=["a_module_of_mine"], algorithm={"name": "ours"})
    assert run(experiment, tmp_path / "r").status == "finished"
    assert experiment.run_key != tiny().run_key
    monkeypatch.delitem(sys.modules, "a_module_of_mine")


def test_plugin_s_docstring_is_listed(tiny: Tiny, tmp_path: Path) -> None:
    """The first line of the round's docstring is what users read; a round without one is refused."""
    tiny(plugins=[mine(tmp_path, summary="goes nowhere")], algorithm={"name": "mine"})
    assert algorithms()["mine"].summary == "Mine: goes nowhere."
    file = tmp_path / "silent.py"
    text = (tmp_path / "mine.py").read_text()
    file.write_text(text.replace('"""Mine: goes nowhere."""', "").replace('"mine"', '"silent"'))
    with pytest.raises(InputError, match="needs a docstring"):
        tiny(plugins=[str(file)])


def test_traceback_names_the_student_s_line(dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path) -> None:
    """An error in a round is shown with the file and the line where it happened."""
    file = mine(tmp_path, move="undefined_name")
    done = dbo("run", *tiny_overrides, f"plugins=[{file}]", "algorithm={name: mine}", "--out", str(tmp_path / "r"))
    assert done.code == 1
    assert file in done.err
    assert "NameError: name 'undefined_name' is not defined" in done.err
    assert "undefined_name, st.y" in done.err
