"""Which data sets there are. A new one is a class with `load`, in a file of its own if it is long, and a line below."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Gt, Lt
from typing_extensions import Doc

from dbo.tasks.mnist import Mnist
from dbo.tasks.newsgroups import Newsgroups
from dbo.tasks.problem import DataSet, Part, Samples
from dbo.tasks.splits import three_ways
from dbo.tasks.synthetic_text import SyntheticText


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """1,797 handwritten digits of 8 × 8 pixels, shipped with scikit-learn: needs no download."""

    test_fraction: Annotated[float, Gt(0), Lt(1), Doc("share of all samples kept for testing")] = 0.2
    val_fraction: Annotated[float, Gt(0), Lt(1), Doc("share of the remaining samples for the upper level")] = 0.5

    def load(self, seed: int, data_dir: str | None) -> Samples:
        from sklearn.datasets import load_digits  # slow to import, and only this class needs it

        pixels, labels = load_digits(return_X_y=True)
        digits = Part(pixels / 16.0, labels.astype(np.int64))
        return three_ways(digits, 10, self.test_fraction, self.val_fraction, seed)


DATASETS: dict[str, type[DataSet]] = {
    "digits": Digits, "newsgroups": Newsgroups, "mnist": Mnist, "synthetic_text": SyntheticText,
}
