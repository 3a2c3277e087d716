"""Register tasks, data sets and partitions: built-in ones by the module that has them, a user's by a plugin.

    task                  x (upper level)                      y (lower level)        data sets
    coefficient_tuning    regularisation coefficients          linear classifier      digits, newsgroups, a9a, ...
    hyper_representation  hidden layers of a perceptron        linear head            digits, mnist, ...
    hyper_cleaning        a weight for each training sample    linear classifier      digits, mnist, fashion_mnist, ...
    policy_evaluation     weights of a value function          Bellman operator       none: generated MDPs
    logistic_synthetic    regularisation coefficients          linear classifier      none: generated samples
    quadratic             a vector                             a vector               none: solutions in closed form

To add a task, write its module in problems/ with `@task("name")` and a line here; the same for a data set in datasets/.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from dbo.components import Registry

if TYPE_CHECKING:
    from dbo.tasks.protocol import DataSet, Partition, Task

C = TypeVar("C", bound=type)

TASKS: "Registry[type[Task]]" = Registry("task", {
    name: f"dbo.tasks.problems.{name}" for name in (
        "coefficient_tuning", "hyper_representation", "hyper_cleaning", "policy_evaluation", "logistic_synthetic",
        "quadratic",
    )
}, methods=("build",))

DATASETS: "Registry[type[DataSet]]" = Registry("dataset", {
    name: f"dbo.tasks.datasets.{name}" for name in (
        "digits", "newsgroups", "mnist", "fashion_mnist", "cifar10", "a9a", "synthetic_text", "arrays", "csv", "libsvm",
    )
}, methods=("load",))

PARTITIONS: "Registry[type[Partition]]" = Registry(
    "partition", dict.fromkeys(("iid", "by_class", "dirichlet"), "dbo.tasks.partitions"), methods=("assign",)
)


def task(name: str) -> Callable[[C], C]:
    """Register the decorated class as a task: a `Task` or a `TorchTask`, with its parameters as typed attributes."""
    return TASKS.register(name)


def dataset(name: str) -> Callable[[C], C]:
    """Register the decorated class as a data set: `load(seed, data_dir)` returns a `Split`."""
    return DATASETS.register(name)


def partition(name: str) -> Callable[[C], C]:
    """Register the decorated class as a partition: `assign(labels, nodes, rng)` returns sample numbers per node."""
    return PARTITIONS.register(name)
