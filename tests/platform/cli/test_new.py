"""`dbo new`, `dbo init` and `dbo run --dry-run`: files that work, and an estimate that writes nothing."""

import ast
import errno
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbo.components import all_registries
from dbo.platform.cli import new
from dbo.platform.cli.skeletons import ALGORITHM, FILES
from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError

Command = Callable[..., Any]


@pytest.mark.parametrize("kind", ["algorithm", "task"])
def test_a_new_plugin_passes_verify(dbo: Command, tmp_path: Path, kind: str) -> None:
    """As it is written; its test is valid Python that checks the same."""
    name = f"my_{kind}"
    done = dbo("new", kind, name, "--out", "own")
    assert (done.code, done.err) == (0, "")
    verified = dbo("verify", "--plugin", f"own/{name}.py", f"--{kind}", name)
    assert verified.code == 0, verified.out + verified.err
    test = (tmp_path / "own" / f"test_{name}.py").read_text()
    functions = [node.name for node in ast.walk(ast.parse(test)) if isinstance(node, ast.FunctionDef)]
    assert "test_it_passes_verify" in functions
    assert "NAME" not in test + (tmp_path / "own" / f"{name}.py").read_text()


# What an experiment sets to use a component of each kind, and the class that it then has.
USE: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "dataset": ({"task": {"name": "coefficient_tuning", "dataset": "mine"}}, lambda parts: parts.data),
    "partition": ({"partition": "mine"}, lambda parts: parts.partition),
    "topology": ({"topology": "mine"}, lambda parts: parts.topology),
    "compressor": ({"algorithm": {"name": "c2dfb", "compressor": "mine"}}, lambda parts: parts.config.compressor),
}


@pytest.mark.parametrize("kind", USE)
def test_a_new_component_runs_as_it_is(dbo: Command, tmp_path: Path, kind: str) -> None:
    """It is listed, its commands are those of a run that ends, and its own tests pass."""
    done = dbo("new", kind, "mine", "--out", "own")
    assert (done.code, done.err) == (0, "")
    listed = dbo("list", "plugins=own/mine.py", "mine")
    assert listed.code == 0, listed.err
    assert "mine" in listed.out
    sections, find = USE[kind]
    made = Experiment(plugins=["own/mine.py"], **sections)
    assert type(find(made.parts)).__module__.startswith("dbo_plugin_")
    (command,) = [line.strip() for line in done.out.splitlines() if line.startswith("  dbo run")]
    ran = dbo(*shlex.split(command)[1:], "nodes=4", "rounds=2", "tracking.uri=off", "--out", "run", "--quiet")
    assert ran.code == 0, ran.err
    assert Experiment.read(tmp_path / "run" / "experiment.yaml").run_key
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "own/test_mine.py"], cwd=tmp_path,
        capture_output=True, text=True, timeout=300, check=False)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "NAME" not in (tmp_path / "own" / "mine.py").read_text() + (tmp_path / "own" / "test_mine.py").read_text()


def test_every_kind_of_plugin_has_a_template() -> None:
    """Those that a registry of components exists for."""
    for kind in FILES:
        assert new._find_registry(kind).kind == kind
    assert {*FILES, "engine"} >= {registry.kind for registry in all_registries()}


@pytest.mark.parametrize(("kind", "name"), [
    ("task", "tuned"), ("dataset", "rings"), ("partition", "skewed"), ("topology", "wheel"),
    ("compressor", "random_run"),
])
def test_templates_are_the_documented_examples(kind: str, name: str) -> None:
    """docs/examples has the same files, which a wheel does not have."""
    example = Path(__file__).parents[3] / "docs" / "examples" / f"{name}.py"
    assert FILES[kind][0].replace("NAME", name) == example.read_text(encoding="utf-8")


def test_nothing_is_overwritten(dbo: Command, assert_refused: Command, tmp_path: Path) -> None:
    """An existing file, a name that is in use and an unknown kind are refused; nothing is written."""
    (tmp_path / "test_mine.py").write_text("mine\n")
    assert_refused(dbo("new", "algorithm", "mine"), "test_mine.py", "exists already")
    assert_refused(dbo("new", "task", "quadratic"), "quadratic", "built-in")
    assert_refused(dbo("new", "data", "mine"), "data", "dataset")
    assert_refused(dbo("new", "engine", "mine"), "unknown value 'engine'", "algorithm, task, dataset, partition")
    assert_refused(dbo("new", "topology", "ring"), "ring", "built-in")
    assert_refused(dbo("new", "algorithm", "class"), "'class'", "Python reserves it")
    for module in ("numpy", "json", "dbo"):
        assert_refused(dbo("new", "task", module), f"{module} is the name of a Python module", "choose another name")
    (tmp_path / "e.yaml").write_text("rounds: 1\n")
    assert_refused(dbo("init", "e.yaml"), "e.yaml", "exists already")
    assert_refused(dbo("init", "e.txt"), "e.txt", ".yaml")
    assert sorted(os.listdir(tmp_path)) == ["e.yaml", "test_mine.py"]


@pytest.mark.parametrize("settings", [
    (), ("algorithm.compressor=qsgd", "batch_size=32", "algorithm.lam=5"),
    ("task=quadratic", "engine=local", "algorithm=mdbo", "tracking.uri=off", "name='a: b'"),
])
def test_the_file_of_init_is_the_experiment(dbo: Command, tmp_path: Path, settings: tuple[str, ...]) -> None:
    """Given values are set, every other key is a comment with its meaning."""
    assert dbo("init", "e.yaml", *settings).code == 0
    expected = Experiment.read(None, settings)
    assert Experiment.read(tmp_path / "e.yaml").run_key == expected.run_key
    text = (tmp_path / "e.yaml").read_text()
    for key in Experiment.model_fields:
        assert re.search(rf"^(# )?{key}:", text, re.MULTILINE), key
    uncommented = re.sub(r"^( *)# (?=[a-z_]+:( |$))", r"\1", text, flags=re.MULTILINE)
    (tmp_path / "all.yaml").write_text(uncommented)
    assert Experiment.read(tmp_path / "all.yaml").to_dict() == expected.to_dict()


def test_init_leaves_the_choice_of_the_engine_open(dbo: Command, tmp_path: Path) -> None:
    """A file whose rounds grow must not stay on the engine that suits ten rounds; a named engine is kept."""
    assert dbo("init", "open.yaml").code == 0
    assert "  name: auto   " in (tmp_path / "open.yaml").read_text()
    assert Experiment.read(tmp_path / "open.yaml").engine["name"] == "local"
    assert Experiment.read(tmp_path / "open.yaml", ["rounds=100000"]).engine["name"] == "ray"
    assert dbo("init", "named.yaml", "engine=local").code == 0
    assert Experiment.read(tmp_path / "named.yaml", ["rounds=100000"]).engine["name"] == "local"


def test_a_dry_run_names_the_engine_that_auto_chose(dbo: Command, tmp_path: Path) -> None:
    """With the reason; nobody has set it, also if a file says auto."""
    (tmp_path / "e.yaml").write_text("engine: {name: auto}\nnodes: 3\ntask: quadratic\n")
    lines = [line.split(maxsplit=1) for line in dbo("run", "e.yaml", "--dry-run").out.splitlines() if line.strip()]
    found = {words[0]: words[1] for words in lines if len(words) > 1}
    assert found["engine.name"].split() == ["local", "default"]
    assert "auto: local, estimated work of" in found["engine"]


def test_a_dry_run_shows_what_a_run_would_do(dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path) -> None:
    """Values and their source, sizes, bytes per round, time; nothing is written."""
    done = dbo("run", *tiny_overrides, "rounds=4", "--dry-run", "--out", "r")
    assert (done.code, done.err) == (0, "")
    lines = {words[0]: words[1:] for line in done.out.splitlines() if (words := line.split())}
    assert lines["rounds"] == ["4", "you"]
    assert lines["nodes"][1] == "you"
    assert lines["seed"] == ["0", "default"]
    assert {"sizes", "network", "traffic", "time", "folder"} <= lines.keys()
    assert os.listdir(tmp_path) == []
    assert dbo("run", *tiny_overrides, "--dry-run", "rounds=0").code == 2


def test_the_skeleton_is_the_documented_example() -> None:
    """Its state, start and round are those of docs/examples/gossip_penalty.py, which a wheel does not have."""
    example = Path(__file__).parents[3] / "docs" / "examples" / "gossip_penalty.py"

    def unparse(text: str) -> list[str]:
        found = {node.name: node for node in ast.parse(text).body
                 if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
        for node in found.values():
            if ast.get_docstring(node):
                del node.body[0]
        return [ast.unparse(found[name]) for name in ("State", "init", "gossip_penalty")]

    assert unparse(ALGORITHM.replace("NAME", "gossip_penalty")) == unparse(example.read_text(encoding="utf-8"))


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both files or none, also if the disk is full in between."""
    def fail_second(path: Any, *arguments: Any, **options: Any) -> Any:
        if Path(path).name.startswith("test_"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return open(path, *arguments, **options)

    monkeypatch.setattr(new, "open", fail_second, raising=False)
    with pytest.raises(InputError, match="No space left"):
        new.write_plugin("algorithm", "mine", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_commands_to_copy_are_quoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder name must not become a command."""
    new.write_plugin("algorithm", "mine", tmp_path / "$(touch x) y")
    shown = [line for line in capsys.readouterr().out.replace("\n  dbo", "\0  dbo").split("\0") if "  dbo" in line]
    assert len(shown) == 2
    for line in shown:
        assert any("$(touch x) y" in word for word in shlex.split(line.replace("\n", " ")))
