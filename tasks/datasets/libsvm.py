"""Load samples in LIBSVM's text format: `label index:value index:value …`, a line per sample."""

from dataclasses import dataclass
from pathlib import Path

from scipy import sparse

from dbo.tasks.api import Part, Split, dataset, param
from dbo.tasks.datasets.own_files import build_split, check_features, find_file, number_classes


@dataset("libsvm")
@dataclass(frozen=True, slots=True, kw_only=True)
class Libsvm:
    """Your own samples in LIBSVM's text format; labels 0/1, −1/+1 or any whole numbers."""

    file: str = param(help="text file with a line `label index:value …` per sample; may be compressed as .gz or .bz2")
    test_file: str = param("", help="file with the test samples; empty: take test_fraction of the other")
    dense: bool = param(False, help="store the features as a full matrix: needed by tasks that accept no sparse ones")
    test_fraction: float = param(0.2, gt=0, lt=1, help="share of all samples kept for testing, without a test_file")
    val_fraction: float = param(0.5, gt=0, lt=1, help="share of the remaining samples for the upper level")

    def load(self, seed: int, data_dir: str | None) -> Split:
        named = [("file", self.file), *([("test_file", self.test_file)] if self.test_file else [])]
        files = [find_file(key, file) for key, file in named]
        parts, classes = read_libsvm(files, f"task.file: {self.file}", self.dense)
        return build_split(
            parts[0], None, parts[1] if self.test_file else None, classes, self.test_fraction, self.val_fraction, seed
        )

_MOST_FEATURES = 50_000_000      # of a model per class: more are likely a damaged line


def read_libsvm(
    files: list[Path], where: str, dense: bool, features: int | None = None
) -> tuple[list[Part], int]:
    """Return a part per file, with the same features and classes, and the number of classes.

    `features` is their number, where the largest index in the files may be smaller.
    """
    from sklearn.datasets import load_svmlight_files  # slow to import

    try:
        loaded = load_svmlight_files([str(file) for file in files], n_features=features)
    except (ValueError, OSError, EOFError, OverflowError) as error:
        reason = str(error).strip().partition("\n")[0].partition(": b'")[0]      # not the content of the file
        raise ValueError(f"{where} is not in LIBSVM's format ({reason}); must be lines `label index:value …`") from None
    if (width := loaded[0].shape[1]) > _MOST_FEATURES:
        raise ValueError(f"{where} has an index of {width - 1:,}; must be at most {_MOST_FEATURES:,} features")
    labels, classes = number_classes(where, *loaded[1::2])
    parts = []
    for matrix, own in zip(loaded[::2], labels, strict=True):
        rows = sparse.csr_array(matrix)
        check_features(where, rows)
        parts.append(Part(rows.toarray() if dense else rows, own))
    return parts, classes
