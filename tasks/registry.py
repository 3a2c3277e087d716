"""Which tasks there are, and where to look.

    task                  x (upper level)                      y (lower level)    data
    coefficient_tuning    a regularisation weight per feature  linear classifier  digits, newsgroups, synthetic_text
    hyper_representation  hidden layers of a perceptron        linear head        digits, mnist
    quadratic             a vector                             a vector           none; solutions are known

A task is a frozen dataclass of its parameters with `build(setup) -> Problem` (problem.py) and the names of the data
sets it accepts in `datasets`; `usual` has defaults that depend on the data set. Data sets are listed in datasets.py,
partitions in partitions.py; the stacked products that the learning tasks share are in stacking.py, the loss in
softmax.py. To add a task, write its file and a line here.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from dbo.tasks.api import Problem, Setup
from dbo.tasks.problems.coefficient_tuning import CoefficientTuning
from dbo.tasks.problems.hyper_representation import HyperRepresentation
from dbo.tasks.problems.quadratic import Quadratic


class Task(Protocol):
    """What the catalog's classes have in common."""

    datasets: ClassVar[tuple[str, ...]]                    # names it accepts; the first is the default
    usual: ClassVar[Mapping[str, Mapping[str, Any]]]       # data set -> defaults that differ from the fields' own

    def build(self, setup: Setup) -> Problem: ...


TASKS: dict[str, type[Task]] = {
    "coefficient_tuning": CoefficientTuning,
    "hyper_representation": HyperRepresentation,
    "quadratic": Quadratic,
}
