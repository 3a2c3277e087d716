"""`engine: auto` chooses by the experiment alone."""

from pathlib import Path
from typing import Any

import pytest

from dbo.platform.config.engine_choice import RAY_START_SECONDS, choose_engine, estimate_seconds
from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.runs.resume import adopt_engine
from dbo.platform.runs.run_folder import RunFolder, read_experiment
from dbo.platform.runs.runner import run
from dbo.tasks.api import Work

TEXT = {"name": "coefficient_tuning", "dataset": "newsgroups"}


@pytest.mark.parametrize(("settings", "engine"), [
    ({}, "local"),
    ({"engine": "auto"}, "local"),
    ({"engine": {"threads": 2}}, "local"),
    ({"engine": {"device": "torch_cpu"}, "rounds": 100_000}, "local"),
    ({"rounds": 100_000}, "ray"),
    ({"task": TEXT}, "ray"),
    ({"engine": {"address": "ray://head:10001"}}, "ray"),
    ({"engine": {"gpus_per_node": 0.5}}, "ray"),
    ({"engine": {"nodes_per_actor": 2}}, "ray"),
    ({"task": {"name": "coefficient_tuning", "dataset": "csv", "file": "data.csv", "label": "kind"}}, "ray"),
])
def test_experiment_decides(settings: dict[str, Any], engine: str) -> None:
    """Short work is local; long or unknown work, an address and GPUs are Ray's; keys of one engine choose it."""
    chosen = Experiment(**settings)
    assert chosen.engine["name"] == engine
    assert chosen.engine_choice is not None


@pytest.mark.parametrize(("body", "message"), [
    ("1 / 0", r"fails with ZeroDivisionError"),
    ("3.0", r"returns 3\.0; must return a dbo\.Work of numbers ≥ 0, or None"),
    ("dbo.Work(-1, 2)", r"returns Work\(operations=-1, entries=2\); must"),
    ("dbo.Work('1', 2)", r"must return a dbo\.Work"),
    ("dbo.Work(float('nan'), 2)", r"must return a dbo\.Work"),
])
def test_a_wrong_estimate_is_refused(tmp_path: Path, body: str, message: str) -> None:
    """One line with the file; control: None is allowed, the work is then unknown."""
    file, head = tmp_path / "plugin.py", 'import dbo\n\n@dbo.task("estimated")\nclass Estimated(dbo.TorchTask):\n'
    text = f'{head}    """A task."""\n    def estimate_work(self, nodes, data):\n        return '
    file.write_text(f"{text}{body}\n")
    settings: dict[str, Any] = {"plugins": [str(file)], "task": "estimated", "nodes": 4}
    with pytest.raises(InputError, match=r"task: Estimated\.estimate_work \(.*plugin\.py, line 6\) .*" + message):
        Experiment(**settings)
    file.write_text(f"{text}None\n")
    assert Experiment(**settings).engine["name"] == "ray"


def test_boundary_is_the_start_of_ray() -> None:
    """More rounds never turn Ray into local, and the engine changes where the estimate passes the limit."""
    work = Work(operations=1e6, entries=700)
    names = [choose_engine({}, work, 10, rounds, 16, rounds).name for rounds in range(1, 2_000)]
    assert names == sorted(names)
    assert set(names) == {"local", "ray"}
    last = names.index("ray")
    assert estimate_seconds(work, 10, last, 16, last) <= RAY_START_SECONDS < estimate_seconds(
        work, 10, last + 1, 16, last + 1)


def test_named_engine_is_used() -> None:
    """`auto` does not overrule a name, and an unknown one is refused with the allowed ones."""
    assert Experiment(engine="ray").engine_choice is None
    assert Experiment(engine="local", rounds=100_000).engine["name"] == "local"
    with pytest.raises(InputError, match=r"engine\.name: unknown value 'loca'.*allowed: auto, ray, local"):
        Experiment(engine="loca")


def test_choice_is_recorded_and_adopted(tmp_path: Path) -> None:
    """experiment.yaml names the engine; a longer experiment that would choose Ray resumes on the recorded one."""
    short = Experiment(task={"name": "quadratic"}, nodes=4, rounds=2)
    run(short, tmp_path)
    assert read_experiment(tmp_path)["engine"] == short.engine
    longer = Experiment(task={"name": "quadratic"}, nodes=4, rounds=100_000)
    assert longer.engine["name"] == "ray"
    assert adopt_engine(longer, RunFolder(tmp_path)).engine == short.engine
    given = Experiment(task={"name": "quadratic"}, nodes=4, rounds=100_000, engine="ray")
    assert adopt_engine(given, RunFolder(tmp_path)) is given


def test_a_folder_does_not_choose_the_cluster(tmp_path: Path) -> None:
    """Whoever serves a cluster executes code in processes that connect to it. Control: the packing is adopted."""
    settings: dict[str, Any] = {"task": {"name": "quadratic"}, "nodes": 4}
    there = {"name": "ray", "nodes_per_actor": 2, "address": "203.0.113.7:6379", "max_recoveries": 0}
    RunFolder(tmp_path).write_experiment(Experiment(**settings, rounds=100_000, engine=there).to_record())
    adopted = adopt_engine(Experiment(**settings, rounds=2), RunFolder(tmp_path)).engine
    assert (adopted["name"], adopted["nodes_per_actor"]) == ("ray", 2)
    assert (adopted["address"], adopted["max_recoveries"]) == (None, 100)
