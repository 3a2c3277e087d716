"""List the built-in tasks and data sets.

    task                  x (upper level)                      y (lower level)    data sets
    coefficient_tuning    regularisation coefficients          linear classifier  digits, newsgroups, synthetic_text
    hyper_representation  hidden layers of a perceptron        linear head        digits, mnist
    quadratic             a vector                             a vector           none: solutions in closed form

To add a task, write its module in problems/ and a line here; to add a data set, write its module in datasets/ and a
line here. Partitions are listed in partitions.py.
"""

from dbo.tasks.api import DataSet, Task
from dbo.tasks.datasets.digits import Digits
from dbo.tasks.datasets.mnist import Mnist
from dbo.tasks.datasets.newsgroups import Newsgroups
from dbo.tasks.datasets.synthetic_text import SyntheticText
from dbo.tasks.problems.coefficient_tuning import CoefficientTuning
from dbo.tasks.problems.hyper_representation import HyperRepresentation
from dbo.tasks.problems.quadratic import Quadratic

TASKS: dict[str, type[Task]] = {
    "coefficient_tuning": CoefficientTuning,
    "hyper_representation": HyperRepresentation,
    "quadratic": Quadratic,
}

DATASETS: dict[str, type[DataSet]] = {
    "digits": Digits,
    "newsgroups": Newsgroups,
    "mnist": Mnist,
    "synthetic_text": SyntheticText,
}
