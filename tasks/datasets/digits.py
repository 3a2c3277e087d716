"""Which data sets there are. A new one is a class with `load`, in a file of its own if it is long, and a line below."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Gt, Lt
from typing_extensions import Doc

from dbo.tasks.api import Array, DataSet, Part, Samples
from dbo.tasks.datasets.mnist import Mnist
from dbo.tasks.datasets.newsgroups import Newsgroups
from dbo.tasks.datasets.splits import three_ways
from dbo.tasks.datasets.synthetic_text import SyntheticText


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """1,797 handwritten digits of 8 × 8 pixels, shipped with scikit-learn: needs no download."""

    test_fraction: Annotated[float, Gt(0), Lt(1), Doc("share of all samples kept for testing")] = 0.2
    val_fraction: Annotated[float, Gt(0), Lt(1), Doc("share of the remaining samples for the upper level")] = 0.5

    def load(self, seed: int, data_dir: str | None) -> Samples:
        pixels, labels = digits_table()
        digits = Part(pixels / 16.0, labels.astype(np.int64))
        return three_ways(digits, 10, self.test_fraction, self.val_fraction, seed)


def digits_table() -> tuple[Array, Array]:
    """Pixels and labels, from the file in scikit-learn: importing the library takes longer than a short run."""
    spec = find_spec("sklearn")
    for place in (spec and spec.submodule_search_locations) or []:
        file = Path(place, "datasets", "data", "digits.csv.gz")
        if file.is_file():
            table = np.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return pixels, labels


DATASETS: dict[str, type[DataSet]] = {
    "digits": Digits, "newsgroups": Newsgroups, "mnist": Mnist, "synthetic_text": SyntheticText,
}
