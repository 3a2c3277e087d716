"""Fashion-MNIST and CIFAR-10, on generated files in torchvision's layout."""

import hashlib
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tasks.datasets.test_mnist import write_files

from dbo.platform.config.experiment import Experiment
from dbo.platform.runs.preparation import prepare
from dbo.tasks.datasets.cifar10 import FILES, Cifar10
from dbo.tasks.datasets.fashion_mnist import FashionMnist
from dbo.tasks.datasets.mnist import Mnist

RNG = np.random.default_rng(1)


def write_cifar(data_dir: Path, monkeypatch: pytest.MonkeyPatch, packed: bool = False) -> dict[str, Any]:
    """Write the six batches and the names of the classes, and let torchvision expect their checksums."""
    from torchvision.datasets import CIFAR10

    folder = data_dir / FILES.folder
    folder.mkdir(parents=True)
    batches, sums = {}, {}
    for name in FILES.files:
        count = 40 if name.startswith("data") else 20
        pixels = RNG.integers(256, size=(count, 3072)).astype(np.uint8)
        batches[name] = {"data": pixels, "labels": (np.arange(count) % 10).tolist(), "label_names": list("abcdefghij")}
        content = pickle.dumps(batches[name])
        (folder / name).write_bytes(content)
        sums[name] = hashlib.md5(content).hexdigest()
    monkeypatch.setattr(CIFAR10, "train_list", [[name, sums[name]] for name in FILES.files[:5]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": sums["batches.meta"]})
    if packed:
        with tarfile.open(data_dir / FILES.archive, "w:gz") as archive:
            archive.add(folder, FILES.folder)
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    return batches


def test_cifar_rows_are_channels_first(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red, green and blue pixels of an image follow each other, each normalised by its channel."""
    batches = write_cifar(tmp_path / "data", monkeypatch)
    split = Cifar10(val_fraction=0.25).load(0, str(tmp_path / "data"))
    assert [len(part) for part in split.parts] == [150, 50, 20]
    pixels = batches["test_batch"]["data"].reshape(-1, 3, 1024) / 255
    mean, deviation = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2470, 0.2435, 0.2616])
    expected = (pixels - mean[:, None]) / deviation[:, None]
    np.testing.assert_allclose(split.test.features, expected.reshape(-1, 3072), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(split.test.labels, np.arange(20) % 10)


def test_the_archive_replaces_the_files(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, attempts: list[str]
) -> None:
    """`cifar-10-python.tar.gz` as published is enough; it is extracted elsewhere, and nothing is downloaded."""
    batches = write_cifar(tmp_path / "data", monkeypatch, packed=True)
    split = Cifar10().load(0, str(tmp_path / "data"))
    np.testing.assert_array_equal(split.test.labels, batches["test_batch"]["labels"])
    assert [file.name for file in (tmp_path / "data").iterdir()] == [FILES.archive]
    assert attempts == []


def test_changed_pickles_are_not_read(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with another checksum is refused before it is unpickled."""
    write_cifar(tmp_path / "data", monkeypatch)
    marker = tmp_path / "executed"

    class Malicious:
        def __reduce__(self) -> Any:
            return Path.touch, (marker,)

    (tmp_path / "data" / FILES.folder / "data_batch_3").write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(ValueError, match=r"^task\.dataset: the files of cifar10 in [^\n]* are damaged [^\n]*$"):
        Cifar10().load(0, str(tmp_path / "data"))
    assert not marker.exists()


@pytest.mark.parametrize(("kind", "missing"), [
    (Cifar10, "cifar-10-batches-py/data_batch_1"), (FashionMnist, "FashionMNIST/raw/train-images-idx3-ubyte"),
])
def test_missing_files_are_a_one_line_error(tmp_path: Path, attempts: list[str], kind: Any, missing: str) -> None:
    """The first missing file, and what may replace it."""
    with pytest.raises(ValueError, match=rf"^data_dir: {tmp_path} has no {missing} \(nor [^\n]*$"):
        kind().load(0, str(tmp_path))
    assert attempts == []


def test_fashion_mnist_has_its_own_folder_and_scale(tmp_path: Path, cache: Path) -> None:
    """The same files as MNIST's in FashionMNIST/raw; mean 0.2860 and deviation 0.3530."""
    write_files(tmp_path)
    digits = Mnist().load(0, str(tmp_path))
    (tmp_path / "MNIST").rename(tmp_path / "FashionMNIST")
    clothes = FashionMnist().load(0, str(tmp_path))
    pixels = digits.test.features * 0.3081 + 0.1307
    np.testing.assert_allclose(clothes.test.features, (pixels - 0.2860) / 0.3530, rtol=1e-4, atol=1e-5)


def test_an_experiment_can_name_it(tmp_path: Path, cache: Path) -> None:
    """hyper_representation on Fashion-MNIST, built from the files in data_dir."""
    write_files(tmp_path)
    (tmp_path / "MNIST").rename(tmp_path / "FashionMNIST")
    task = {"name": "hyper_representation", "dataset": "fashion_mnist"}
    assert prepare(Experiment(nodes=3, task=task, data_dir=str(tmp_path))).problem.dim_y == 160
