"""a9a: LIBSVM's files in data_dir, generated ones and, if available, the real ones."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dbo.tasks.datasets.a9a import A9a

RNG = np.random.default_rng(2)


def write_files(folder: Path, features: int = 123) -> None:
    (folder / "libsvm").mkdir()
    for name, count, last in (("a9a", 100, features), ("a9a.t", 20, features - 1)):
        lines = [
            f"{(-1) ** k} " + " ".join(f"{j}:1" for j in sorted(RNG.choice(last - 1, 13, replace=False) + 1))
            + (f" {last}:1" if k == 0 else "") for k in range(count)
        ]
        (folder / "libsvm" / name).write_text("\n".join(lines) + "\n")


def test_files_become_a_dense_split(tmp_path: Path) -> None:
    """30 % of the first file for the upper level, all of the second for testing; labels −1/+1 become 0/1."""
    write_files(tmp_path)
    split = A9a().load(0, str(tmp_path))
    assert [len(part) for part in split.parts] == [70, 30, 20]
    assert split.test.features.shape == (20, 123)
    np.testing.assert_array_equal(split.test.labels, (np.arange(20) + 1) % 2)


def test_wrong_files_are_a_one_line_error(tmp_path: Path) -> None:
    """No data_dir, no file, another number of features."""
    with pytest.raises(ValueError, match=r"^data_dir: name a folder with libsvm/a9a and a9a\.t from https[^\n]*$"):
        A9a().load(0, None)
    with pytest.raises(ValueError, match=r"^data_dir: .* has no libsvm/a9a; fetch it from https[^\n]*$"):
        A9a().load(0, str(tmp_path))
    write_files(tmp_path, features=130)
    with pytest.raises(ValueError, match=r"^data_dir: .*123[^\n]* 130 features[^\n]*$"):
        A9a().load(0, str(tmp_path))


def test_real_samples(require: Callable[[str, bool], None], shared_data: Path) -> None:
    """The published numbers of samples (the shared file lacks one), 123 binary features, a quarter above the limit."""
    require("data", (shared_data / "libsvm" / "a9a").exists())
    split = A9a().load(0, str(shared_data))
    assert len(split.train) + len(split.val) in (32_560, 32_561)
    assert len(split.test) == 16_281
    assert abs(len(split.val) / (len(split.train) + len(split.val)) - 0.3) < 1e-3
    assert split.train.features.shape[1] == 123      # the last one occurs in the row that the shared file lacks
    assert set(np.unique(split.train.features)) == {0, 1}
    assert 0.23 < split.test.labels.mean() < 0.25
