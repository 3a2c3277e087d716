"""docs/plugins.md is true: its examples run, its error lines are those of dbo, and the API reference is complete."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dbo as package
from dbo.components import all_registries
from dbo.platform.cli.skeletons import FILES
from dbo.platform.config import plugin_modules
from dbo.platform.config.experiment import Experiment
from dbo.platform.runs.runner import run

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "docs" / "examples"
PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
NAMES = re.findall(r"literalinclude\} examples/(\w+)\.py", PAGE)
RUNS = re.findall(r"^    (dbo run plugins=docs/examples/.*)$", PAGE, re.MULTILINE)
Command = Callable[..., Any]


def test_every_kind_has_an_example() -> None:
    """Six kinds, a file, a section and a run of each."""
    assert NAMES == ["tuned", "rings", "skewed", "wheel", "random_run", "gossip_penalty"]
    kinds = [re.findall(r"@dbo\.(\w+)\(\"", (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")) for name in NAMES]
    assert sorted(kind for found in kinds for kind in found) == sorted(FILES)
    assert [re.findall(r"examples/(\w+)", command) for command in RUNS] == [[name] for name in NAMES]


@pytest.mark.parametrize("command", RUNS)
def test_an_example_runs(
    dbo: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """With the page's own command, on the local engine, with fewer rounds."""
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)[1:]
    done = dbo(*words, "nodes=4", "rounds=3", "tracking.uri=off", "--out", tmp_path / "run", "--quiet")
    assert done.code == 0, done.err
    history = package.load(tmp_path / "run").history
    assert np.isfinite(history["upper_loss"]).all()
    (name,) = re.findall(r"examples/(\w+)", command)
    assert name in (tmp_path / "run" / "experiment.yaml").read_text(encoding="utf-8").replace(f"{name}.py", "")


def combined(**changes: Any) -> Experiment:
    """An experiment with five of the examples; the sixth, a task of its own, brings its own data."""
    return Experiment(**{
        "plugins": [str(EXAMPLES / f"{name}.py") for name in NAMES], "nodes": 4, "rounds": 4, "dtype": "float64",
        "task": {"name": "coefficient_tuning", "dataset": "rings", "samples": 120},
        "algorithm": {"name": "c2dfb", "compressor": "random_run", "gamma_in": "auto", "eta_in": 0.05},
        "topology": "wheel", "partition": "skewed", "engine": "local", "tracking": {"uri": "off"}, **changes,
    })


@pytest.mark.ray
@pytest.mark.parametrize("changes", [{}, {"task": "tuned", "algorithm": {"name": "gossip_penalty", "step": 0.01}}])
def test_the_examples_run_on_ray(tmp_path: Path, changes: dict[str, Any]) -> None:
    """All files together, two actors: the results of one process, to rounding."""
    local = run(combined(**changes), tmp_path / "local")
    remote = run(combined(**changes, engine={"name": "ray", "nodes_per_actor": 2}), tmp_path / "ray")
    np.testing.assert_allclose(remote.state["y"], local.state["y"], rtol=1e-9, atol=1e-12)


# ---- work of a run ---------------------------------------------------------------------------------------------------

TASKS_PAGE = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
ESTIMATES = re.findall(r"^    (def (?:estimate_work|size)\(.*)\n    (    return .*)$", PAGE, re.MULTILINE)
CASES = [("tuned", "tuned", ESTIMATES[0]), ("rings", {"name": "coefficient_tuning", "dataset": "rings"}, ESTIMATES[1])]


@pytest.mark.parametrize(("name", "task", "lines"), CASES, ids=["task", "data set"])
def test_two_lines_keep_a_short_run_from_ray(dbo: Command, tmp_path: Path, name: str, task: Any, lines: Any) -> None:
    """The page's lines at the end of its example; control: the example without them, and with many rounds."""
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    file = tmp_path / f"{name}.py"
    settings: dict[str, Any] = {"plugins": [str(file)], "task": task, "nodes": 4, "rounds": 3}
    file.write_text(text)
    assert Experiment(**settings).engine["name"] == "ray"
    file.write_text("\n".join([text, *(f"    {line}" for line in lines), ""]))
    assert Experiment(**{**settings, "rounds": 1_000_000}).engine["name"] == "ray"
    chosen = Experiment(**{**settings, "tracking": {"uri": "off"}, "algorithm": {"name": "c2dfb", "eta_in": 0.1}})
    assert chosen.engine["name"] == "local"
    run(chosen, tmp_path / "run")
    assert "name: local" in (tmp_path / "run" / "experiment.yaml").read_text(encoding="utf-8")


def test_both_pages_have_the_same_lines() -> None:
    assert [first.partition("(")[0] for first, _ in ESTIMATES] == ["def estimate_work", "def size"]
    assert "\n".join(f"    {line}" for line in ESTIMATES[0]) in TASKS_PAGE


# ---- errors ----------------------------------------------------------------------------------------------------------

ERRORS = re.findall(r"^    (dbo: .*)$", PAGE, re.MULTILINE)


def expect(done: Any, line: str, folder: Path) -> None:
    assert done.code == 2, done.err
    assert done.err == line.replace("/path/to", str(folder)) + "\n"


def test_error_lines_are_those_of_dbo(dbo: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line of the page, word by word."""
    monkeypatch.chdir(tmp_path)
    built_in, value, raised, returned, compiled = ERRORS
    text = {name: (EXAMPLES / f"{name}.py").read_text(encoding="utf-8") for name in NAMES}
    (tmp_path / "skewed.py").write_text(text["skewed"].replace('partition("skewed")', 'partition("iid")'))
    expect(dbo("run", "plugins=skewed.py", "--quiet"), built_in, tmp_path)
    (tmp_path / "skewed.py").write_text(text["skewed"])
    expect(dbo("run", "plugins=skewed.py", "partition=skewed", "partition.skew=-1.0", "--quiet"), value, tmp_path)
    (tmp_path / "wheel.py").write_text(text["wheel"])
    expect(dbo("run", "plugins=wheel.py", "topology=wheel", "nodes=2", "task=quadratic", "--quiet"), raised, tmp_path)
    kept = "np.delete(np.arange(len(labels)), 7)"
    (tmp_path / "skewed.py").write_text(text["skewed"].replace("rng.permutation(len(labels))", kept))
    expect(dbo("run", "plugins=skewed.py", "partition=skewed", "engine=local", "--quiet"), returned, tmp_path)
    source = plugin_modules.ModuleSource(
        "lab", (), is_package=True, reason="lab/fast.cpython-311-x86_64-linux-gnu.so is compiled")
    with pytest.raises(package.InputError) as error:
        source.check_shippable("plugins.0: lab.tasks")
    assert f"dbo: {error.value}" == compiled


def test_the_limit_is_that_of_the_page() -> None:
    assert f"more than {plugin_modules.LARGEST / 1e6:g} MB of Python files" in PAGE


# ---- API reference ---------------------------------------------------------------------------------------------------


def test_the_api_reference_has_every_public_name() -> None:
    """What a plugin author imports is documented."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert [name for name in package.__all__ if not re.search(rf"\bdbo\.{name}\b", text)] == []


def test_the_page_names_every_decorator() -> None:
    for registry in all_registries():
        if registry.kind != "engine":
            assert f"`@dbo.{registry.kind}(\"name\"" in PAGE, registry.kind
