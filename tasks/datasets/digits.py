"""Load the handwritten digits that scikit-learn ships."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from dbo.tasks.api import Array, DataSize, Part, Split, dataset, param
from dbo.tasks.datasets.splits import split_three_ways


@dataset("digits")
@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """1,797 handwritten digits of 8 × 8 pixels, shipped with scikit-learn: needs no download."""

    test_fraction: float = param(0.2, gt=0, lt=1, help="share of all samples kept for testing")
    val_fraction: float = param(0.5, gt=0, lt=1, help="share of the remaining samples for the upper level")

    def size(self) -> DataSize:
        return DataSize(1_797, 64, 10)

    def load(self, seed: int, data_dir: str | None) -> Split:
        pixels, labels = read_digits()
        digits = Part(pixels / 16.0, labels.astype(np.int64))
        return split_three_ways(digits, 10, self.test_fraction, self.val_fraction, seed)


def read_digits() -> tuple[Array, Array]:
    """Read pixels and labels from scikit-learn's file: importing the library takes longer than a short run."""
    spec = find_spec("sklearn")
    for folder in (spec and spec.submodule_search_locations) or []:
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.is_file():
            table = np.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return pixels, labels
