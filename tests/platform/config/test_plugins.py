"""Plugins: a user's algorithm in a file, loaded, validated, listed, and found again from elsewhere."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbo import components
from dbo.algorithms import registry
from dbo.algorithms.gossip import Mixed
from dbo.algorithms.registry import algorithms
from dbo.platform.cli.submit import experiment_job
from dbo.platform.config import yaml_io
from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.runs.compare import plan as compare_plan
from dbo.platform.runs.run_folder import read_run
from dbo.platform.runs.runner import run
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


# ---- loading ---------------------------------------------------------------------------------------------------------


def mine(folder: Path, summary: str = "stands still", move: str = "0") -> str:
    file = folder / "mine.py"
    file.write_text(MINE.format(summary=summary, move=move))
    return str(file)


def test_edited_plugin_is_loaded_again(tiny: Tiny, tmp_path: Path) -> None:
    """In a notebook: edit the file, create the experiment again, and the new code runs under a new key."""
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


def test_repaired_plugin_is_loaded_after_a_failure(tiny: Tiny, tmp_path: Path) -> None:
    """An error below the registration does not leave a name behind that the repaired file could not use."""
    file = Path(mine(tmp_path))
    text = file.read_text()
    file.write_text(text + "1 / 0\n")
    with pytest.raises(InputError, match=r"plugins\.0: .* ZeroDivisionError"):
        tiny(plugins=[str(file)], algorithm={"name": "mine"})
    file.write_text(text)
    assert tiny(plugins=[str(file)], algorithm={"name": "mine"}).algorithm == {"name": "mine", "step": 0.1}


def test_a_file_alone_is_a_list_of_one(tiny: Tiny, dbo: Command, tmp_path: Path) -> None:
    """plugins=FILE.py needs no brackets, which shells expand; in a file it is relative to that file."""
    file = mine(tmp_path)
    one = tiny(plugins=file, algorithm="mine")
    assert one.plugins == (file,)
    assert one.run_key == tiny(plugins=[file], algorithm="mine").run_key
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "e.yaml").write_text(f"plugins: ../{Path(file).name}\nalgorithm: mine\n")
    assert Path(Experiment.read(tmp_path / "deep" / "e.yaml").plugins[0]).resolve() == Path(file).resolve()
    done = dbo("list", f"plugins={file}", "mine")
    assert (done.code, done.err) == (0, "")


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
    assert key() == first                   # this process still runs what it has imported
    forget("package_of_mine")               # a new process reads it again
    assert key() != first
    forget("package_of_mine")


def forget(package: str) -> None:
    """Forget a package, as if this were a new process."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        components.forget(name)
        del sys.modules[name]


def test_a_refused_plugin_is_forgotten(tiny: Tiny, tmp_path: Path) -> None:
    """In a notebook: its algorithm cannot be named afterwards, and the repaired file may give it another name."""
    file = Path(mine(tmp_path))
    text = file.read_text()
    file.write_text(text.replace(STEP, "step: float = 'ten'"))
    with pytest.raises(InputError, match="'ten' is not allowed"):
        tiny(plugins=[str(file)], algorithm={"name": "mine"})
    assert "mine" not in algorithms()
    file.write_text(text.replace('"mine"', '"renamed"'))
    assert tiny(plugins=[str(file)], algorithm={"name": "renamed"}).algorithm["name"] == "renamed"


def test_packets_need_not_be_declared(tiny: Tiny, tmp_path: Path) -> None:
    """Without `packets` the platform counts what a round sends."""
    file = Path(mine(tmp_path))
    text = file.read_text()
    assert ", packets=lambda cfg: 1" in text
    file.write_text(text.replace(", packets=lambda cfg: 1", ""))
    experiment = tiny(plugins=[str(file)], algorithm={"name": "mine"})
    assert experiment.parts.algorithm.packets is None
    assert run(experiment, tmp_path / "r").history["packets"].iloc[-1] == 4 * 6


def test_z_may_be_anything(tiny: Tiny, tmp_path: Path) -> None:
    """A tracker that is called z, of the size of x, is saved as it is."""
    file = Path(mine(tmp_path))
    text = file.read_text().replace("    direction: Any\n", "    direction: Any\n    z: Any\n")
    file.write_text(text.replace("shard.y0, shard.x0)", "shard.y0, shard.x0, shard.x0)").replace(
        "st.y, st.direction)", "st.y, st.direction, st.z)"))
    result = run(tiny(plugins=[str(file)], algorithm={"name": "mine"}), tmp_path / "r")
    assert result.state["z"].shape == (4, 4)


def test_docstring_of_a_plugin_is_listed(tiny: Tiny, tmp_path: Path) -> None:
    """The first line of the round's docstring is what users read; a round without one is refused."""
    tiny(plugins=[mine(tmp_path, summary="goes nowhere")], algorithm={"name": "mine"})
    assert algorithms()["mine"].summary == "Mine: goes nowhere."
    file = tmp_path / "silent.py"
    text = (tmp_path / "mine.py").read_text()
    file.write_text(text.replace('"""Mine: goes nowhere."""', "").replace('"mine"', '"silent"'))
    with pytest.raises(InputError, match="needs a docstring"):
        tiny(plugins=[str(file)])


def test_traceback_names_the_line_of_the_plugin(dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path) -> None:
    """An error in a round is shown with the file and the line where it happened."""
    file = mine(tmp_path, move="undefined_name")
    done = dbo("run", *tiny_overrides, f"plugins=[{file}]", "algorithm={name: mine}", "--out", str(tmp_path / "r"))
    assert done.code == 1
    assert file in done.err
    assert "NameError: name 'undefined_name' is not defined" in done.err
    assert "undefined_name, st.y" in done.err


# ---- one-line errors -------------------------------------------------------------------------------------------------

NOTHING = "return State(shard.x0, shard.y0, shard.x0)"
PACKETS = "packets=lambda cfg: 1"
STEP = "step: float = 0.1"
# text of MINE, its replacement, and parts of the error message
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
    "public is a name": (PACKETS, PACKETS + ", public='y'", ["algorithm 'mine'", "public", "lambda st: st.y_hat"]),
    "public misspells a field": (
        PACKETS, PACKETS + ", public=lambda st: st.y_hut", ["algorithm 'mine'", "public(state)", "'y_hut'"]),
    "public is as wide as x": (PACKETS, PACKETS + ", public=lambda st: st.x", ["'mine'", "public", "(2, 4)", "(2, 8)"]),
    "init gives nothing": (NOTHING, "pass", ["algorithm 'mine'", "init returns None", "must be a State"]),
    "init gives a scalar": (NOTHING, "return State(shard.x0, shard.y0, 0.0)", ["'mine'", "a float", "state.direction"]),
    "init gives a list": (NOTHING, "return State(shard.x0, [0] * 4, shard.x0)", ["'mine'", "a list", "state.y"]),
    "init leaves out": (NOTHING, "return State(None, shard.y0, shard.x0)", ["'mine'", "None", "state.x", "an array"]),
    "direction as wide as y": (
        NOTHING, "return State(shard.x0, shard.y0, shard.y0)", ["'mine'", "state.direction", "(2, 8)", "(2, 4)"]),
    "y as wide as x": (NOTHING, "return State(shard.x0, shard.x0, shard.x0)", ["'mine'", "state.y", "(2, 4)", "dim_y"]),
    "a row is missing": (NOTHING, "return State(shard.x0[:1], shard.y0, shard.x0)", ["'mine'", "state.x", "(1, 4)"]),
    "x is one row": (NOTHING, "return State(shard.x0[0], shard.y0, shard.x0)", ["'mine'", "state.x", "(4,)"]),
    "a type that does not exist": (
        "    direction: Any\n", "    direction: 'Nowhere'\n", ["'mine'", "State", "'Nowhere'", "visible at run time"]),
    "another dtype": (
        NOTHING, "return State(shard.x0.astype('float32'), shard.y0, shard.x0)", ["'mine'", "float32", "float64"]),
    "config has a name": (STEP, "name: str = 'x'", ["algorithm 'mine'", "config.name"]),
    "name of a built-in": ('"mine"', '"sldbo"', ["'sldbo'", "a built-in"]),
    "no algorithm": (
        '@algorithm("mine", config=Config, state=State, init=init, packets=lambda cfg: 1)\n', "",
        ["mine.py", "registers no task, dataset,", "plugins=[package.module]"]),
    "a claim for another configuration": (
        PACKETS, PACKETS + ", claim=__import__('dbo.algorithms.claims', fromlist=['Claim']).Claim("
        "limit=None, invariants=None, rounds=1, steps={'stepz': 1})", ["algorithm 'mine'", "claim", "'stepz'"]),
    "a file beside it": ("from typing", "import beside\nfrom typing", ["'beside'", "plugins=[package.module]"]),
    "a file beside it, relatively": ("from typing", "from .beside import a\nfrom typing", ["plugins=[package.module]"]),
    "a package that is not there": ("from typing", "import no_such\nfrom typing", ["ModuleNotFoundError", "no_such'"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_plugin_is_a_one_line_error(
    dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path, case: str
) -> None:
    """Exit 2 and one line that names the algorithm and what is wrong with it, before anything is written."""
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
    ("old", "new", "message"),
    [
        ("mix(x=st.x)", "mix(x=list(st.x))", "mine: mix(x=…) got a list; must be an array with a row per node"),
        ("mix(x=st.x)", "mix(x=0.0)", "mine: mix(x=…) got a float; must be an array with a row per node"),
        ("mix(x=st.x)", "mix(x=st.x.sum())", "mine: mix(x=…) got a float64; must be an array with a row per node"),
        ("st.y, st.direction)", "st.y, None)", "mine: state.direction is None after the round; must be an array"),
        ("st.y, st.direction)", "st.y, [0])", "mine: state.direction is a list after the round; must be an array"),
        ("async def mine", "def mine", "mine: its round is a list; must be an `async def`"),
        ("x, = await mix(x=st.x)", "x = await mix(x=st.x)", f"mine: {Mixed.hint}"),
        ("x, = await mix(x=st.x)", "x = mix(x=st.x)", "mine: mix(...) must be awaited: write `await mix(...)`"),
        ("State(x + 0", "State(mix(x=x)", "mine: state.x is a Outgoing after the round; must be an array; "
         "mix(...) must be awaited: write `await mix(...)`"),
        ("x, = await mix(x=st.x)", "x = st.x + 0; x += await mix(x=st.x)", f"mine: {Mixed.hint}"),
        ("mix(x=st.x)", "mix(st.x, y=st.y)", "mine: mix(...) got an array without a name beside y; must be one array, "
         "`wx = await mix(x)`, or named ones, `wx, wy = await mix(x=…, y=…)`"),
    ],
)
def test_wrong_round_is_a_one_line_error(
    dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path, old: str, new: str, message: str
) -> None:
    """An error that shows only in a round ends the run as failed, with one line that names the algorithm."""
    file = Path(mine(tmp_path))
    text = file.read_text()
    assert old in text
    text = text.replace(old, new)
    if "async def" not in text:
        text = text[: text.index("    x, = await")] + "    return [1]\n"
    file.write_text(text)
    chosen = (f"plugins=[{file}]", "algorithm={name: mine}")
    done = dbo("run", *tiny_overrides, *chosen, "--out", tmp_path / "r", "--quiet")
    where = f" ({file}, line 23)" if message.startswith(("mine: mix", "mine: await")) else ""
    assert (done.code, done.err.replace("line 24", "line 23")) == (1, f"dbo: {message}{where}\n")
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["status"] == "failed"


def test_an_error_in_a_plugin_names_file_and_line(
    dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """The traceback begins in the user's file, and the last line names file, line and error."""
    file = mine(tmp_path, move="shard.gradient")
    done = dbo("run", *tiny_overrides, f"plugins=[{file}]", "algorithm={name: mine}", "--out", str(tmp_path / "r"))
    assert done.code == 1
    assert "typer" not in done.err
    *_, last = done.err.splitlines()
    assert last.startswith(f"dbo: {file}, line 24: AttributeError: a shard has no 'gradient'; it has nodes, dim_x")


def test_the_cause_of_an_error_is_shown(dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path) -> None:
    """A plugin's `raise … from error`: both are in the traceback."""
    file = Path(mine(tmp_path))
    text = file.read_text()
    chain = ["try:", "    {}['first']", "except KeyError as error:", "    raise RuntimeError('second') from error"]
    file.write_text(text.replace("    x, = await", "\n".join(["", *chain, "x, = await"]).replace("\n", "\n    ")[1:]))
    done = dbo("run", *tiny_overrides, f"plugins=[{file}]", "algorithm={name: mine}", "--out", str(tmp_path / "r"))
    assert done.code == 1
    assert "KeyError: 'first'" in done.err
    assert done.err.splitlines()[-1] == f"dbo: {file}, line 26: RuntimeError: second"


def test_an_experiment_whose_plugin_broke_has_no_key(tiny: Tiny, tmp_path: Path) -> None:
    """In a notebook: the key of a previous experiment cannot be computed any more, and the error names the reason."""
    file = Path(mine(tmp_path))
    previous = tiny(plugins=[str(file)], algorithm={"name": "mine"})
    file.write_text("1 / 0\n")
    with pytest.raises(InputError, match="ZeroDivisionError"):
        tiny(plugins=[str(file)], algorithm={"name": "mine"})
    with pytest.raises(InputError, match="create the experiment again"):
        _ = previous.run_key


def test_other_code_is_distinguished_from_another_experiment(
    dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """An edited plugin: the folder holds the same experiment, run with other code; it cannot be resumed."""
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
    """In a notebook: running the cell again gives the same error."""
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
        (["plugins=[json]"], ["plugins.0", "json registers no task, dataset,"]),
        (["plugins=[a/folder]"], ["plugins.0", "a/folder", "cannot be imported"]),
        (["plugins=[~nobody_of_that_name/mine.py]"], ["plugins.0", "~nobody_of_that_name", "No such file"]),
        (["plugins=mine.py"], ["plugins.0", "mine.py", "No such file"]), (["plugins=3"], ["plugins", "3", "a list"]),
        (["plugin=[mine.py]"], ["'plugin'", "did you mean 'plugins'"]),
        (["rounds=3"], ["'rounds'", "plugins"]),
        (["gossip_penalty"], ["'gossip_penalty'", "allowed"]),
        (["tasks", "engines"], ["'engines'", "one kind or name"]),
    ],
)
def test_wrong_list_is_a_one_line_error(dbo: Command, arguments: list[str], parts: list[str]) -> None:
    """Exit 2, one line."""
    done = dbo("list", *arguments)
    assert done.code == 2
    assert done.err.count("\n") == 1
    for part in parts:
        assert part in done.err


# ---- paths -----------------------------------------------------------------------------------------------------------


def test_a_run_can_be_repeated_from_anywhere(
    dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """experiment.yaml records absolute paths, which is enough to repeat and to resume the run."""
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


def test_a_plugin_may_be_in_another_folder(
    dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """A job has its files in another place each time: an unfinished run resumes with the same plugin from there."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    keys = (*tiny_overrides, "algorithm={name: mine}", "--out", tmp_path / "r", "--quiet")
    assert dbo("run", f"plugins=[{mine(tmp_path / 'one')}]", *keys).code == 0
    (tmp_path / "r" / "summary.json").unlink()
    (tmp_path / "one" / "mine.py").rename(tmp_path / "two" / "mine.py")
    registry.ALGORITHMS._found.pop("mine")          # another process
    resumed = dbo("run", f"plugins=[{tmp_path / 'two' / 'mine.py'}]", *keys, "--resume")
    assert resumed.code == 0, resumed.err
    assert len([e for e in (tmp_path / "r" / "events.jsonl").read_text().splitlines() if '"started"' in e]) == 2


def test_a_job_packs_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dbo submit`: the file is in the job, the experiment finds it there, and the run key is the same."""
    for name in ("files", "job"):
        (tmp_path / name).mkdir()
    mine(tmp_path / "files")
    text = "plugins: [mine.py]\nalgorithm: {name: mine}\ntask: {name: quadratic}\n"
    (tmp_path / "files" / "e.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    job = experiment_job(Experiment.read("files/e.yaml"))
    job.pack(tmp_path / "job")
    registry.ALGORITHMS._found.pop("mine")          # another machine
    monkeypatch.chdir(tmp_path / "job")
    there = Experiment.read("experiment.yaml")
    assert there.to_dict()["plugins"] == ["mine.py"]       # relative: actors have it in yet another place
    assert there.run_key == job.key


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an experiment, a comparison and a sweep; on the command line they are relative to the working directory."""
    files = tmp_path / "files"
    files.mkdir()
    mine(files)
    (files / "edges.txt").write_text("0 1\n1 2\n")
    (tmp_path / "edges.txt").write_text("0 1\n1 2\n2 0\n")
    body = "plugins: [mine.py]\ntopology: {name: edges, file: edges.txt}\nnodes: 3\ntask: {name: quadratic}\n"
    (files / "run.yaml").write_text(f"{body}data_dir: data\nalgorithm: {{name: mine}}\n")
    (files / "compare.yaml").write_text(f"{body}algorithms: {{mine: {{}}}}\n")
    (files / "sweep.yaml").write_text(
        "experiment: {plugins: [mine.py], algorithm: {name: mine}, data_dir: /data}\n"
        "axes: {topology.file: [edges.txt], topology: [{name: edges, file: edges.txt}], algorithm.step: [1.0]}\n"
    )
    monkeypatch.chdir(tmp_path)
    made = Experiment.read("files/run.yaml")
    key = made.run_key
    assert made.plugins == ("files/mine.py",)
    assert made.topology["file"] == "files/edges.txt"
    assert made.data_dir == "files/data"
    assert made.to_record()["data_dir"] == str(files / "data")
    for place in ("~/data", "/data", "s3://me:secret@host/x"):
        found = Experiment.read("files/run.yaml", [f"data_dir={place}"])
        assert found.data_dir == found.to_record()["data_dir"] == place
    assert Experiment.read("files/run.yaml", ["topology.file=edges.txt"]).topology["file"] == "edges.txt"
    (compared,), _ = compare_plan("files/compare.yaml", [], [], None)
    assert compared.plugins == ("files/mine.py",)
    swept = plan.read_sweep("files/sweep.yaml")
    assert swept.experiment["plugins"] == ["files/mine.py"]
    assert swept.experiment["data_dir"] == "/data"
    assert swept.axes["topology.file"] == ["files/edges.txt"]
    assert swept.axes["topology"] == [{"name": "edges", "file": "files/edges.txt"}]
    monkeypatch.chdir(files)
    assert Experiment.read("run.yaml").plugins == ("mine.py",)
    assert Experiment.read("run.yaml").run_key == key
