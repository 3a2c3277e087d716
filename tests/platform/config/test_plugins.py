"""The student's path: an algorithm in a file of one's own, run from the command line and from Python."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbo.algorithms import registry
from dbo.algorithms.registry import algorithms
from dbo.platform.cli.submit import experiment_job
from dbo.platform.config import yaml_io
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.local import LocalEngine
from dbo.platform.errors import InputError
from dbo.platform.runs.compare import plan as compare_plan
from dbo.platform.runs.run_folder import CLOCKS, read_metrics, read_run
from dbo.platform.runs.runner import Result, prepare, run
from dbo.sweeps import plan

Tiny = Callable[..., Experiment]
Command = Callable[..., Any]

EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "gossip_penalty.py"

MINE = '''
from dataclasses import dataclass
from typing import Any
from dbo.algorithms.gossip import mix
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


def test_example_runs_outside_the_repository(dbo_process: Command, tmp_path: Path) -> None:
    """The student's path: an empty folder, a copy of the file, and the same numbers as in the repository."""
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
    """mean(x) moves by −step · mean(direction), as tests over the registry ask of a built-in."""
    experiment = example(step=0.2)
    made, parts = prepare(experiment), experiment.parts
    engine = LocalEngine(parts.algorithm, parts.config, made.problem, made.network, [range(4)])
    for round_ in range(1, 5):
        x, direction = engine.hosts[0].rows("x").mean(0), engine.hosts[0].rows("direction").mean(0)
        engine.advance(round_)
        np.testing.assert_allclose(engine.hosts[0].rows("x").mean(0), x - 0.2 * direction, rtol=0, atol=1e-13)


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


def test_a_package_is_known_by_all_its_files(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of a package may import the others: one of them that is edited makes another experiment."""
    package = tmp_path / "package_of_mine"
    (package / "inner").mkdir(parents=True)
    (package / "face.py").write_text("from package_of_mine.inner.core import packed\n")
    core = package / "inner" / "core.py"
    core.write_text(MINE.format(summary="packed", move="0").replace("mine", "packed"))
    monkeypatch.syspath_prepend(tmp_path)

    def key() -> str:
        return tiny(plugins=["package_of_mine.face"], algorithm={"name": "packed"}).run_key

    first = key()
    assert key() == first
    core.write_text(core.read_text().replace("+ 0", "+ 1"))
    assert key() != first
    for name in [name for name in sys.modules if name.startswith("package_of_mine")]:
        monkeypatch.delitem(sys.modules, name)
    registry.forget("package_of_mine.inner.core")


def test_a_refused_plugin_is_forgotten(tiny: Tiny, tmp_path: Path) -> None:
    """In a notebook: its algorithm cannot be named afterwards, and the mended file may call it otherwise."""
    file = Path(mine(tmp_path))
    text = file.read_text()
    file.write_text(text.replace(STEP, "step: float = 'ten'"))
    with pytest.raises(InputError, match="'ten' is not allowed"):
        tiny(plugins=[str(file)], algorithm={"name": "mine"})
    assert "mine" not in algorithms()
    file.write_text(text.replace('"mine"', '"renamed"'))
    assert tiny(plugins=[str(file)], algorithm={"name": "renamed"}).algorithm["name"] == "renamed"


def test_z_may_be_anything(tiny: Tiny, tmp_path: Path) -> None:
    """A tracker that is called z, as wide as x, is saved as it is."""
    file = Path(mine(tmp_path))
    text = file.read_text().replace("    direction: Any\n", "    direction: Any\n    z: Any\n")
    file.write_text(text.replace("shard.y0, shard.x0)", "shard.y0, shard.x0, shard.x0)").replace(
        "st.y, st.direction)", "st.y, st.direction, st.z)"))
    result = run(tiny(plugins=[str(file)], algorithm={"name": "mine"}), tmp_path / "r")
    assert result.state["z"].shape == (4, 4)


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


# ---- what is wrong with a plugin is told in one line -----------------------------------------------------------------

NOTHING = "return State(shard.x0, shard.y0, shard.x0)"
PACKETS = "packets=lambda cfg: 1"
STEP = "step: float = 0.1"
# what of MINE is replaced by what, and what the line says
WRONG: dict[str, tuple[str, str, list[str]]] = {
    "name is a path": ('"mine"', '"../escaped"', ["plugins.0", "'../escaped'", "a-z, 0-9 and _"]),
    "name is a number": ('"mine"', "3", ["plugins.0", "algorithm 3", "a-z, 0-9 and _"]),
    "name in capitals": ('"mine"', '"Mine"', ["'Mine'", "a-z, 0-9 and _"]),
    "name is long": ('"mine"', '"m" * 300', ["'mmm", "at most 64"]),
    "config is no dataclass": (
        "@dataclass(frozen=True, kw_only=True)", "", ["algorithm 'mine'", "config Config", "must be a dataclass"]),
    "config is no class": ("config=Config", "config={'step': 1}", ["algorithm 'mine'", "config", "a dataclass"]),
    "state is no dataclass": ("@dataclass(frozen=True)\n", "", ["algorithm 'mine'", "state State", "a dataclass"]),
    "state lacks a field": ("    direction: Any\n", "", ["algorithm 'mine'", "direction"]),
    "field without a type": (STEP, "step = 0.1", ["algorithm 'mine'", "config.step has no type", "step: float"]),
    "default of another type": (STEP, "step: float = 'ten'", ["algorithm 'mine'", "Config.step", "'ten'", "a number"]),
    "default out of range": (
        STEP, "step: __import__('typing').Annotated[float, __import__('annotated_types').Gt(0)] = -1.0",
        ["algorithm 'mine'", "Config.step", "-1.0", "> 0", "default"]),
    "default is no number": (STEP, "step: float = float('nan')", ["algorithm 'mine'", "Config.step", "nan", "finite"]),
    "unknown type": (STEP, "step: 'flaot' = 1.0", ["algorithm 'mine'", "Config", "'flaot'"]),
    "packets is a number": (PACKETS, "packets=1", ["algorithm 'mine'", "packets", "lambda cfg: 1"]),
    "packets gives a text": (PACKETS, "packets=lambda cfg: '1'", ["algorithm 'mine'", "packets", "'1'", "number"]),
    "packets gives a truth": (PACKETS, "packets=lambda cfg: True", ["algorithm 'mine'", "packets", "True"]),
    "packets gives less than none": (PACKETS, "packets=lambda cfg: -1", ["algorithm 'mine'", "packets", "-1", "≥ 0"]),
    "packets misspells a field": (PACKETS, "packets=lambda cfg: cfg.stepz", ["algorithm 'mine'", "packets", "'stepz'"]),
    "packets takes nothing": (PACKETS, "packets=lambda: 1", ["algorithm 'mine'", "packets", "takes 0"]),
    "init gives nothing": (NOTHING, "pass", ["algorithm 'mine'", "init gives None", "must be a State"]),
    "init gives a scalar": (NOTHING, "return State(shard.x0, shard.y0, 0.0)", ["'mine'", "a float", "state.direction"]),
    "init gives a list": (NOTHING, "return State(shard.x0, [0] * 4, shard.x0)", ["'mine'", "a list", "state.y"]),
    "init leaves out": (NOTHING, "return State(None, shard.y0, shard.x0)", ["'mine'", "None", "state.x", "an array"]),
    "direction as wide as y": (
        NOTHING, "return State(shard.x0, shard.y0, shard.y0)", ["'mine'", "state.direction", "(2, 8)", "(2, 4)"]),
    "y as wide as x": (NOTHING, "return State(shard.x0, shard.x0, shard.x0)", ["'mine'", "state.y", "(2, 4)", "dim_y"]),
    "a row is missing": (NOTHING, "return State(shard.x0[:1], shard.y0, shard.x0)", ["'mine'", "state.x", "(1, 4)"]),
    "x is one row": (NOTHING, "return State(shard.x0[0], shard.y0, shard.x0)", ["'mine'", "state.x", "(4,)"]),
    "a type that nobody sees": (
        "    direction: Any\n", "    direction: 'Nowhere'\n", ["'mine'", "State", "'Nowhere'", "can be seen"]),
    "another dtype": (
        NOTHING, "return State(shard.x0.astype('float32'), shard.y0, shard.x0)", ["'mine'", "float32", "float64"]),
    "config has a name": (STEP, "name: str = 'x'", ["algorithm 'mine'", "config.name"]),
    "name of a built-in": ('"mine"', '"sldbo"', ["'sldbo'", "a built-in"]),
    "no algorithm": (
        '@algorithm("mine", config=Config, state=State, init=init, packets=lambda cfg: 1)\n', "",
        ["mine.py", "registers no algorithm", "plugins=[package.module]"]),
    "a claim for another configuration": (
        PACKETS, PACKETS + ", claim=__import__('dbo.algorithms.claims', fromlist=['Claim']).Claim("
        "limit=None, invariants=None, rounds=1, steps={'stepz': 1})", ["algorithm 'mine'", "claim", "'stepz'"]),
    "a file beside it": ("from typing", "import beside\nfrom typing", ["'beside'", "plugins=[package.module]"]),
    "a file beside it, relatively": ("from typing", "from .beside import a\nfrom typing", ["plugins=[package.module]"]),
    "a package that is not there": ("from typing", "import no_such\nfrom typing", ["ModuleNotFoundError", "no_such'"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_plugin_is_told_in_one_line(
    dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path, case: str
) -> None:
    """Exit 2 and one line that says which algorithm and what of it, before anything is written."""
    old, new, parts = WRONG[case]
    file = Path(mine(tmp_path))
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    (tmp_path / "beside.py").write_text("a = 1\n")
    chosen = (f"plugins=[{file}]", "algorithm={name: mine}")
    done = dbo("run", *tiny_overrides, *chosen, "--out", tmp_path / "r", "--quiet")
    assert done.code == 2, done.err
    assert done.err.count("\n") == 1
    for part in parts:
        assert part in done.err
    assert ("package.module" in done.err) == ("plugins=[package.module]" in parts)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("mix(x=st.x)", "mix(x=list(st.x))", "mine: mix(x=…) got a list; must be an array with a row per node"),
        ("mix(x=st.x)", "mix(x=0.0)", "mine: mix(x=…) got a float; must be an array with a row per node"),
        ("mix(x=st.x)", "mix(x=st.x.sum())", "mine: mix(x=…) got a float64; must be an array with a row per node"),
        ("st.y, st.direction)", "st.y, None)", "mine: state.direction is None after the round; must be an array"),
        ("st.y, st.direction)", "st.y, [0])", "mine: state.direction is a list after the round; must be an array"),
        ("async def mine", "def mine", "mine: its round gives a list; must be an `async def`"),
        ("x, = await mix(x=st.x)", "x = await mix(x=st.x)", "mine: await mix(...) answers with a tuple, a part per "
         "channel: write `(x,) = await mix(x=…)`"),
        ("x, = await mix(x=st.x)", "x = mix(x=st.x)", "mine: mix(...) must be awaited: write `await mix(...)`"),
        ("State(x + 0", "State(mix(x=x)", "mine: state.x is a Outgoing after the round; must be an array; "
         "mix(...) must be awaited: write `await mix(...)`"),
        ("x, = await mix(x=st.x)", "x = st.x + 0; x += await mix(x=st.x)", "mine: await mix(...) answers with a tuple, "
         "a part per channel: write `(x,) = await mix(x=…)`"),
        ("mix(x=st.x)", "mix(st.x)", "mine: mix(...) got rows without a name: write mix(x=…), bytes are counted by "
         "these names"),
    ],
)
def test_wrong_round_is_told_in_one_line(
    dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path, old: str, new: str, said: str
) -> None:
    """What shows only in a round ends the run as failed, and is told in one line that names the algorithm."""
    file = Path(mine(tmp_path))
    text = file.read_text()
    assert old in text
    text = text.replace(old, new)
    if "async def" not in text:
        text = text[: text.index("    x, = await")] + "    return [1]\n"
    file.write_text(text)
    chosen = (f"plugins=[{file}]", "algorithm={name: mine}")
    done = dbo("run", *tiny_overrides, *chosen, "--out", tmp_path / "r", "--quiet")
    where = f" ({file}, line 23)" if said.startswith(("mine: mix", "mine: await")) else ""
    assert (done.code, done.err.replace("line 24", "line 23")) == (1, f"dbo: {said}{where}\n")
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["status"] == "failed"


def test_what_went_wrong_in_a_plugin_is_told_where_it_stands(
    dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """The traceback begins in the student's file, and the last line names file, line and error."""
    file = mine(tmp_path, move="shard.gradient")
    done = dbo("run", *tiny_overrides, f"plugins=[{file}]", "algorithm={name: mine}", "--out", str(tmp_path / "r"))
    assert done.code == 1
    assert "typer" not in done.err
    *_, last = done.err.splitlines()
    assert last.startswith(f"dbo: {file}, line 24: AttributeError: a shard has no 'gradient'; it has nodes, dim_x")


def test_the_cause_of_an_error_is_told_too(dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path) -> None:
    """A plugin's `raise … from error`: both are in the traceback."""
    file = Path(mine(tmp_path))
    text = file.read_text()
    chain = ["try:", "    {}['first']", "except KeyError as error:", "    raise RuntimeError('second') from error"]
    file.write_text(text.replace("    x, = await", "\n".join(["", *chain, "x, = await"]).replace("\n", "\n    ")[1:]))
    done = dbo("run", *tiny_overrides, f"plugins=[{file}]", "algorithm={name: mine}", "--out", str(tmp_path / "r"))
    assert done.code == 1
    assert "KeyError: 'first'" in done.err
    assert done.err.splitlines()[-1] == f"dbo: {file}, line 26: RuntimeError: second"


def test_an_experiment_whose_plugin_broke_is_told(tiny: Tiny, tmp_path: Path) -> None:
    """In a notebook: an earlier experiment cannot tell its key any more, and says why."""
    file = Path(mine(tmp_path))
    earlier = tiny(plugins=[str(file)], algorithm={"name": "mine"})
    file.write_text("1 / 0\n")
    with pytest.raises(InputError, match="ZeroDivisionError"):
        tiny(plugins=[str(file)], algorithm={"name": "mine"})
    with pytest.raises(InputError, match="make the experiment again"):
        _ = earlier.run_key


def test_other_code_is_told_from_another_experiment(
    dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """An edited plugin: the folder holds what reads the same, and was run with other code."""
    keys = (*tiny_overrides, f"plugins=[{mine(tmp_path)}]", "algorithm={name: mine}", "--quiet")
    assert dbo("run", *keys, "--out", tmp_path / "r").code == 0
    mine(tmp_path, move="1")
    again = dbo("run", *keys, "--out", tmp_path / "r", "--resume")
    assert (again.code, "holds this experiment, run with other code" in again.err) == (2, True)
    longer = dbo("run", *keys, "rounds=9", "--from", tmp_path / "r", "--out", tmp_path / "longer")
    assert (longer.code, "run with other code" in longer.err) == (2, True)
    other = dbo("run", *keys, "seed=4", "--out", tmp_path / "r")
    assert (other.code, "the run of another experiment" in other.err) == (2, True)


def test_wrong_plugin_is_refused_each_time(tiny: Tiny, tmp_path: Path) -> None:
    """In a notebook: running the cell again does not get past the line."""
    file = Path(mine(tmp_path))
    file.write_text(file.read_text().replace(STEP, "step: float = 'ten'"))
    for _ in range(2):
        with pytest.raises(InputError, match="'ten' is not allowed; must be a number"):
            tiny(plugins=[str(file)], algorithm={"name": "mine"})


def test_name_cannot_lead_out_of_the_folder(dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path) -> None:
    """A comparison makes a folder per algorithm: no name of one leads out of --out."""
    file = Path(mine(tmp_path))
    file.write_text(file.read_text().replace('"mine"', '"../escaped"'))
    keys = [key for key in tiny_overrides if not key.startswith("algorithm")]
    names = ("--algorithms", "../escaped")
    done = dbo("compare", *keys, f"plugins=[{file}]", *names, "--out", tmp_path / "cmp" / "inner")
    assert done.code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


# ---- dbo list --------------------------------------------------------------------------------------------------------


def test_plugin_is_listed(dbo: Command) -> None:
    """`dbo list plugins=[…]` shows the plugin's algorithms beside the others; with a name, that one."""
    everything = dbo("list", f"plugins=[{EXAMPLE}]")
    assert everything.code == 0, everything.err
    assert "gossip_penalty" in everything.out
    assert "c2dfb" in everything.out
    one = dbo("list", "gossip_penalty", f"plugins=[{EXAMPLE}]")
    assert "penalty λ" in one.out
    assert "float > 0" in one.out
    assert "c2dfb" not in one.out


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["plugins=[missing.py]"], ["plugins.0", "missing.py", "No such file"]),
        (["plugins=[json]"], ["plugins.0", "json registers no algorithm"]),
        (["plugins=[a/folder]"], ["plugins.0", "a/folder", "cannot be imported"]),
        (["plugins=[~nobody_of_that_name/mine.py]"], ["plugins.0", "~nobody_of_that_name", "No such file"]),
        (["plugins=mine.py"], ["plugins", "'mine.py'", "a list"]),
        (["plugin=[mine.py]"], ["'plugin'", "did you mean 'plugins'"]),
        (["rounds=3"], ["'rounds'", "plugins"]),
        (["gossip_penalty"], ["'gossip_penalty'", "allowed"]),
        (["tasks", "engines"], ["'engines'", "one kind or name"]),
    ],
)
def test_wrong_list_is_told(dbo: Command, arguments: list[str], parts: list[str]) -> None:
    """Exit 2, one line."""
    done = dbo("list", *arguments)
    assert done.code == 2
    assert done.err.count("\n") == 1
    for part in parts:
        assert part in done.err


# ---- where a plugin lies ---------------------------------------------------------------------------------------------


def test_a_run_can_be_repeated_from_anywhere(
    dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path is written in full into experiment.yaml, which is enough to repeat and to resume the run."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    mine(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    first = dbo("run", *tiny_overrides, "plugins=[mine.py]", "algorithm={name: mine}", "--out", "r", "--quiet")
    assert first.code == 0, first.err
    file = tmp_path / "here" / "r" / "experiment.yaml"
    assert yaml_io.read(file)["plugins"] == [str(tmp_path / "here" / "mine.py")]
    monkeypatch.chdir(tmp_path / "there")
    again = dbo("run", file, "--out", "again", "--quiet")
    assert again.code == 0, again.err
    for ended in ("summary.json", "state.safetensors"):
        (file.parent / ended).unlink()
    resumed = dbo("run", file, "--out", file.parent, "--resume", "--quiet")
    assert resumed.code == 0, resumed.err
    assert read_run(tmp_path / "there" / "again").summary["run_key"] == read_run(file.parent).summary["run_key"]


def test_a_moved_plugin_is_the_same_one(
    dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """A job has its files in another place each time: an unfinished run goes on with the same plugin from there."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    keys = (*tiny_overrides, "algorithm={name: mine}", "--out", tmp_path / "r", "--quiet")
    assert dbo("run", f"plugins=[{mine(tmp_path / 'one')}]", *keys).code == 0
    (tmp_path / "r" / "summary.json").unlink()
    (tmp_path / "one" / "mine.py").rename(tmp_path / "two" / "mine.py")
    registry._registry.pop("mine")          # another process
    resumed = dbo("run", f"plugins=[{tmp_path / 'two' / 'mine.py'}]", *keys, "--resume")
    assert resumed.code == 0, resumed.err
    assert len([e for e in (tmp_path / "r" / "events.jsonl").read_text().splitlines() if '"started"' in e]) == 2


def test_a_job_takes_the_plugin_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dbo submit`: the file travels, its experiment finds it beside itself, and the run's key is the same there."""
    for name in ("sheets", "job"):
        (tmp_path / name).mkdir()
    mine(tmp_path / "sheets")
    text = "plugins: [mine.py]\nalgorithm: {name: mine}\ntask: {name: quadratic}\n"
    (tmp_path / "sheets" / "e.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    job = experiment_job(Experiment.read("sheets/e.yaml"))
    job.pack(tmp_path / "job")
    registry._registry.pop("mine")          # another machine
    monkeypatch.chdir(tmp_path / "job")
    there = Experiment.read("experiment.yaml")
    assert there.resolved()["plugins"] == ["mine.py"]       # for actors too, who may have it elsewhere again
    assert there.run_key == job.key


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an experiment, a comparison and a sweep; on the command line they are relative to the working directory."""
    sheets = tmp_path / "sheets"
    sheets.mkdir()
    mine(sheets)
    (sheets / "edges.txt").write_text("0 1\n1 2\n")
    (tmp_path / "edges.txt").write_text("0 1\n1 2\n2 0\n")
    body = "plugins: [mine.py]\ntopology: {name: edges, file: edges.txt}\nnodes: 3\ntask: {name: quadratic}\n"
    (sheets / "run.yaml").write_text(f"{body}data_dir: data\nalgorithm: {{name: mine}}\n")
    (sheets / "compare.yaml").write_text(f"{body}algorithms: {{mine: {{}}}}\n")
    (sheets / "sweep.yaml").write_text(
        "experiment: {plugins: [mine.py], algorithm: {name: mine}, data_dir: /data}\n"
        "axes: {topology.file: [edges.txt], topology: [{name: edges, file: edges.txt}], algorithm.step: [1.0]}\n"
    )
    monkeypatch.chdir(tmp_path)
    made = Experiment.read("sheets/run.yaml")
    key = made.run_key
    assert made.plugins == ("sheets/mine.py",)
    assert made.topology["file"] == "sheets/edges.txt"
    assert made.data_dir == "sheets/data"
    assert made.recorded()["data_dir"] == str(sheets / "data")
    for place in ("~/data", "/data", "s3://me:secret@host/x"):
        found = Experiment.read("sheets/run.yaml", [f"data_dir={place}"])
        assert found.data_dir == found.recorded()["data_dir"] == place
    assert Experiment.read("sheets/run.yaml", ["topology.file=edges.txt"]).topology["file"] == "edges.txt"
    (compared,), _ = compare_plan("sheets/compare.yaml", [], [], None)
    assert compared.plugins == ("sheets/mine.py",)
    swept = plan.read("sheets/sweep.yaml")
    assert swept.experiment["plugins"] == ["sheets/mine.py"]
    assert swept.experiment["data_dir"] == "/data"
    assert swept.axes["topology.file"] == ["sheets/edges.txt"]
    assert swept.axes["topology"] == [{"name": "edges", "file": "sheets/edges.txt"}]
    monkeypatch.chdir(sheets)
    assert Experiment.read("run.yaml").plugins == ("mine.py",)
    assert Experiment.read("run.yaml").run_key == key
