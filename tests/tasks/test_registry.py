"""Tasks and data sets of the registry: reproducible data, parameters without clashes, declared metrics, imports."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import dbo.tasks.api
from dbo.platform.config.code_identity import hash_modules
from dbo.tasks.api import Array, Setup, Split
from dbo.tasks.partitions import Iid
from dbo.tasks.registry import DATASETS, TASKS

TASKS_FOLDER = Path(dbo.tasks.api.__file__).parent


def columns(samples: Split) -> list[Array]:
    return [array for part in samples.parts for array in part.arrays()]


@pytest.mark.parametrize("name", ["digits", "synthetic_text"])    # the others need files and have their own tests
def test_same_seed_same_data_other_seed_other_data(name: str) -> None:
    """Equal seeds give equal arrays and hashes; another seed gives another split."""
    data = DATASETS[name]()
    first, again, other = data.load(0, None), data.load(0, None), data.load(1, None)
    for a, b in zip(columns(first), columns(again), strict=True):
        np.testing.assert_array_equal(a, b)
    assert first.describe()["data_sha256"] == again.describe()["data_sha256"] != other.describe()["data_sha256"]


@pytest.mark.parametrize("name", DATASETS)
def test_no_field_of_a_data_set_is_also_a_field_of_a_task(name: str) -> None:
    """Both kinds of parameters share a section of an experiment file, so their names must differ."""
    own = {f.name for f in fields(DATASETS[name])}    # type: ignore[arg-type]
    for task in TASKS.values():
        assert not own & {f.name for f in fields(task)}    # type: ignore[arg-type]


def test_tasks_accept_data_sets_that_exist() -> None:
    """Every name in a task's `datasets` is in DATASETS, and its default is among them."""
    for task in TASKS.values():
        assert set(task.datasets) <= set(DATASETS)
        if task.datasets:
            assert task().dataset in task.datasets    # type: ignore[attr-defined]


@pytest.mark.parametrize("name", TASKS)
def test_test_metrics_declare_their_direction(name: str) -> None:
    """A task declares for each of its test metrics whether larger or smaller values are better."""
    task = TASKS[name]
    data = DATASETS[task.datasets[0]]() if task.datasets else None
    problem = task().build(Setup(nodes=2, seed=0, dtype="float64", partition=Iid(), data=data))
    shard = problem.shard([0])
    assert set(problem.evaluate(shard.x0, shard.y0)) <= set(task.directions)
    assert set(task.directions.values()) <= {"max", "min"}


def find_code(module: str) -> set[str]:
    """Return the modules of dbo.tasks that enter the run key because of `module`, beside those that always do."""
    always = hash_modules([])
    found = hash_modules([f"dbo.tasks.{module}"])
    return {name.removeprefix("dbo.tasks.") for name in found.keys() - always.keys()}


@pytest.mark.parametrize("name", TASKS)
def test_code_of_a_task_has_neither_data_sets_nor_other_tasks(name: str) -> None:
    """An edit of a data set, of another task or of `TorchTask` is not an edit of a task."""
    code = find_code(f"problems.{name}")
    assert f"problems.{name}" in code
    assert not {module for module in code if module.startswith(("datasets.", "torch_", "registry"))}
    assert not {f"problems.{other}" for other in TASKS if other != name} & code


@pytest.mark.parametrize("name", DATASETS)
def test_code_of_a_data_set_is_its_module_and_what_it_needs(name: str) -> None:
    """The code of a data set is its module, the splits, the cache for downloads, and what reads files of its kind."""
    code = find_code(f"datasets.{name}")
    needed = {"newsgroups": {"datasets.cache", "notices"}}
    for images in ("mnist", "fashion_mnist", "cifar10"):
        needed[images] = {"datasets.torchvision_images", "datasets.cache", "notices"}
    for own in ("arrays", "csv", "libsvm"):
        needed[own] = {"datasets.own_files"}
    needed["a9a"] = {"datasets.own_files", "datasets.libsvm"}
    assert code == {f"datasets.{name}", "datasets", "datasets.splits"} | needed.get(name, set())


def test_an_import_inside_a_function_is_found() -> None:
    """Coefficient tuning imports its compiled kernels only for large sparse data; they are part of its code."""
    assert {"problems.sparse_tuning", "kernels.bag_of_words"} <= find_code("problems.coefficient_tuning")
