"""MNIST: pixels, splits and sources, on generated files and, if available, on the real ones."""

import gzip
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.runs.runner import prepare, run
from dbo.tasks.api import Split
from dbo.tasks.datasets import mnist
from dbo.tasks.datasets.mnist import Mnist

Rows = Callable[..., Counter[tuple[int, bytes, bytes]]]
TRAIN, TEST = 300, 50


def encode_idx(array: Any) -> bytes:
    """Encode an array as MNIST's files do: two zero bytes, the type (8: unsigned bytes), the dimensions, the bytes."""
    sizes = np.array(array.shape, dtype=">u4").tobytes()
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


def write_files(data_dir: Path, compressed: bool = True, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    raw = data_dir / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for prefix, count in (("train", TRAIN), ("t10k", TEST)):
        arrays = {"images-idx3": rng.integers(256, size=(count, 28, 28)), "labels-idx1": np.arange(count) % 10}
        for name, array in arrays.items():
            file, content = raw / f"{prefix}-{name}-ubyte", encode_idx(array)
            if compressed:
                file.with_name(file.name + ".gz").write_bytes(gzip.compress(content))
            else:
                file.write_bytes(content)


@pytest.fixture
def generated(tmp_path: Path, cache: Path) -> str:
    """Return a data_dir with generated images, compressed as they are published."""
    write_files(tmp_path / "data")
    return str(tmp_path / "data")


def equal(a: Split, b: Split) -> bool:
    return bool(a.describe()["data_sha256"] == b.describe()["data_sha256"])


# ---- generated files -------------------------------------------------------------------------------------------------


def test_pixels_are_normalised_rows(generated: str) -> None:
    """(pixel / 255 − 0.1307) / 0.3081 as float32, an image's rows one after another, with its label."""
    samples = Mnist().load(0, generated)
    raw = gzip.decompress((Path(generated) / "MNIST" / "raw" / "t10k-images-idx3-ubyte.gz").read_bytes())
    by_hand = np.frombuffer(raw, np.uint8, offset=16).reshape(TEST, 784).astype(np.float64)
    assert isinstance(samples.test.features, np.ndarray)
    assert samples.test.features.dtype == np.float32
    np.testing.assert_allclose(samples.test.features, (by_hand / 255 - 0.1307) / 0.3081, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(samples.test.labels, np.arange(TEST) % 10)


def test_training_images_are_split_by_val_fraction(generated: str, count_rows: Rows) -> None:
    """The upper level gets the same share of every digit, every image goes to one level; the test part is official."""
    samples = Mnist(val_fraction=0.2).load(0, generated)
    official, test = (mnist.FILES.normalise(part) for part in mnist.FILES.read(generated))
    assert count_rows(samples.train, samples.val) == count_rows(official)
    assert count_rows(samples.test) == count_rows(test)
    assert np.all(np.bincount(samples.val.labels) == 6)
    assert np.all(np.bincount(samples.train.labels) == 24)


def test_fewer_images_keep_the_shares_of_the_digits(generated: str) -> None:
    """`images` limits the training images; the test part stays whole."""
    samples = Mnist(images=100).load(0, generated)
    assert np.all(np.bincount(np.concatenate([samples.train.labels, samples.val.labels])) == 10)
    assert len(samples.test) == TEST


def test_extracted_files_are_read_as_well(generated: str, tmp_path: Path) -> None:
    """Compressed or extracted, the samples are the same."""
    write_files(tmp_path / "extracted", compressed=False)
    assert equal(Mnist().load(0, str(tmp_path / "extracted")), Mnist().load(0, generated))


def test_a_second_start_reads_the_cache(generated: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision is not called again, not even for another seed; the samples are the same."""
    fresh = Mnist().load(0, generated)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert equal(Mnist().load(0, generated), fresh)
    assert not equal(Mnist().load(1, generated), fresh)
    assert len(list(cache.iterdir())) == 1


def test_damaged_cache_is_rebuilt(generated: str, cache: Path) -> None:
    """A changed pixel in the cache is detected."""
    fresh = Mnist().load(0, generated)
    (file,) = cache.iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert equal(Mnist().load(0, generated), fresh)


def test_other_files_are_detected(generated: str) -> None:
    """New files in the same folder replace the cached arrays of the old ones."""
    first = Mnist().load(0, generated)
    write_files(Path(generated), seed=1)
    assert not equal(Mnist().load(0, generated), first)


def test_data_dir_is_only_read_and_nothing_is_downloaded(generated: str, attempts: list[str]) -> None:
    """No file is added or changed, no connection is tried, although torchvision needs extracted files."""
    before = {file: file.read_bytes() for file in Path(generated).rglob("*") if file.is_file()}
    Mnist().load(0, generated)
    assert {file: file.read_bytes() for file in Path(generated).rglob("*") if file.is_file()} == before
    assert attempts == []


def test_missing_file_is_a_one_line_error(generated: str, attempts: list[str]) -> None:
    """An input error names the file and the fix, without using the network."""
    (Path(generated) / "MNIST" / "raw" / "t10k-labels-idx1-ubyte.gz").unlink()
    task = {"name": "hyper_representation", "dataset": "mnist"}
    message = rf"^data_dir: {generated} has no MNIST/raw/t10k-labels-idx1-ubyte \(nor .*; .*$"
    with pytest.raises(InputError, match=message):
        prepare(Experiment(task=task, data_dir=generated))
    assert attempts == []


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"])
@pytest.mark.parametrize("share", [0, 0.03, 0.5])
def test_truncated_file_is_a_one_line_error(
    tmp_path: Path, cache: Path, compressed: bool, name: str, share: float
) -> None:
    """A partial download is an error that names the damage, at whichever byte it ended."""
    write_files(tmp_path, compressed)
    file = tmp_path / "MNIST" / "raw" / (name + ".gz" if compressed else name)
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    with pytest.raises(ValueError, match=r"^[^\n]*damaged[^\n]*fetch (it|them) again$"):
        Mnist().load(0, str(tmp_path))


def test_other_contents_are_refused(tmp_path: Path, cache: Path) -> None:
    """A label of 0 … 9 for each image of 28 × 28, otherwise a one-line error describes the contents."""
    write_files(tmp_path, compressed=False)
    raw = tmp_path / "MNIST" / "raw"
    for labels in (np.arange(TRAIN - 1) % 10, np.arange(TRAIN)):
        (raw / "train-labels-idx1-ubyte").write_bytes(encode_idx(labels))
        with pytest.raises(ValueError, match=r"^task\.dataset: the files of mnist in .* have .* is needed$"):
            Mnist().load(0, str(tmp_path))


def test_missing_network_is_a_one_line_error(
    cache: Path, attempts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without files and network, a one-line error names both remedies, after a notice about the download."""
    with pytest.raises(ValueError, match=r"^task\.dataset: mnist is not in .* go online, or set data_dir=[^\n]*$"):
        Mnist().load(0, None)
    assert attempts
    assert "downloading MNIST (12 MB)" in capsys.readouterr().err


def test_existing_download_is_used_without_data_dir(generated: str, cache: Path, attempts: list[str]) -> None:
    """Files that torchvision left in our cache are found there."""
    write_files(cache.parent / "torchvision", compressed=False)
    assert equal(Mnist().load(0, None), Mnist().load(0, generated))
    assert attempts == []


# ---- the backbone for it ---------------------------------------------------------------------------------------------


def test_default_hidden_layers_depend_on_the_data_set() -> None:
    """784-96-64-10 for MNIST, written into the resolved experiment; given values win; digits have another default."""
    def resolve_hidden(**task: Any) -> list[int]:
        experiment = Experiment(task={"name": "hyper_representation", **task})
        assert tuple(experiment.to_dict()["task"]["hidden"]) == experiment.parts.task.hidden
        return list(experiment.to_dict()["task"]["hidden"])

    assert resolve_hidden(dataset="mnist") == [96, 64]
    assert resolve_hidden(dataset="mnist", hidden=[20]) == [20]
    assert resolve_hidden(dataset="digits") == resolve_hidden() == [32, 16]


# ---- real files ------------------------------------------------------------------------------------------------------


@pytest.fixture
def real(require: Callable[[str, bool], None], shared_data: Path, module_cache: Path) -> str:
    require("data", (shared_data / "MNIST" / "raw").exists())
    return str(shared_data)


def test_real_images(real: str, attempts: list[str]) -> None:
    """60,000 images halved and the 10,000 official ones; mean 0 and deviation 1 over both levels; all digits alike."""
    samples = Mnist().load(0, real)
    assert [len(part) for part in samples.parts] == [30_000, 30_000, 10_000]
    assert abs(np.mean([part.features.mean() for part in samples.parts[:2]])) < 1e-3
    assert abs(np.mean([np.mean(np.square(part.features)) for part in samples.parts[:2]]) - 1) < 1e-3
    train, val, test = (np.bincount(part.labels) for part in samples.parts)
    np.testing.assert_array_equal(train + val, [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])
    np.testing.assert_array_equal(test, [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009])
    assert np.all(np.abs(train - val) <= 1)
    assert attempts == []


def test_real_images_are_learnt(real: str, tmp_path: Path) -> None:
    """A few rounds on a slice of the images, with the default backbone, are better than chance."""
    result = run(Experiment(
        nodes=4, rounds=3, data_dir=real, engine={"name": "local"},
        task={"name": "hyper_representation", "dataset": "mnist", "images": 1_000},
        algorithm={"name": "c2dfb", "inner_steps": 10, "eta_in": 0.1, "eta_out": 0.1},
    ), tmp_path / "run")
    assert result.status == "finished"
    assert (result.state["x"].shape, result.state["y"].shape) == ((4, 81_568), (4, 640))
    assert result.history["test_accuracy"].iloc[-1] > 0.3
