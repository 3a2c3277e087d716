"""Load a9a, the Adult data set with 123 binary features, from LIBSVM's text files in `data_dir`."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dbo.tasks.api import DataSize, Part, Split, dataset, param
from dbo.tasks.datasets.libsvm import read_libsvm
from dbo.tasks.datasets.own_files import build_split

FEATURES = 123
_URL = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary.html"


@dataset("a9a")
@dataclass(frozen=True, slots=True, kw_only=True)
class A9a:
    """Adult: 32,561 + 16,281 persons, 123 binary features, income above a limit or not; needs data_dir."""

    val_fraction: float = param(0.3, gt=0, lt=1, help="share of the training samples for the upper level")

    def size(self) -> DataSize:
        return DataSize(48_842, 123, 2)

    def load(self, seed: int, data_dir: str | None) -> Split:
        if data_dir is None:
            raise ValueError(f"data_dir: name a folder with libsvm/a9a and a9a.t from {_URL}")
        files = [Path(os.path.expanduser(data_dir), "libsvm", name) for name in ("a9a", "a9a.t")]
        for file in files:
            if not file.is_file():
                raise ValueError(f"data_dir: {data_dir} has no libsvm/{file.name}; fetch it from {_URL}")
        (rest, test), classes = read_libsvm(files, f"data_dir: {files[0]}", dense=True, features=FEATURES)
        if classes != 2:
            raise ValueError(f"data_dir: {files[0]} has {classes} classes; a9a has 2")
        rest, test = (Part(part.features.astype(np.float32), part.labels) for part in (rest, test))
        return build_split(rest, None, test, classes, 0.0, self.val_fraction, seed)
