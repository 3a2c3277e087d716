"""Load MNIST, 28 × 28 grey images of handwritten digits, with torchvision.

Pixels are divided by 255, then shifted and scaled by the mean and the standard deviation of the training images
(0.1307, 0.3081), and flattened to rows of 784. The official test images are the test part.
"""

import gzip
import os
import shutil
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dbo.tasks.api import Array, Part, Split, dataset, param
from dbo.tasks.datasets.cache import find_cache_folder, load_or_build
from dbo.tasks.datasets.splits import split_two_ways, subsample
from dbo.tasks.notices import print_notice

CLASSES = 10
PIXELS = 28 * 28
MEAN, DEVIATION = 0.1307, 0.3081

_PREPARATION = "1"    # increase it with every change of the cached arrays
_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@dataset("mnist")
@dataclass(frozen=True, slots=True, kw_only=True)
class Mnist:
    """70,000 handwritten digits of 28 × 28 pixels, 10,000 of them the official test images; needs torchvision."""

    val_fraction: float = param(0.5, gt=0, lt=1, help="share of the training images for the upper level")
    images: int = param(
        60_000, ge=100, le=60_000, help="use at most this many training images, the same share of every digit"
    )

    def load(self, seed: int, data_dir: str | None) -> Split:
        official, test = _load_images(data_dir)
        official = subsample(official, self.images / len(official), seed, "mnist.images")
        raw = split_two_ways(official, test, CLASSES, self.val_fraction, seed)
        return Split(normalise(raw.train), normalise(raw.val), normalise(raw.test), CLASSES)


def normalise(part: Part) -> Part:
    """Return pixels 0 … 255 as float32 with mean 0 and deviation 1 over the training images."""
    features = np.asarray(part.features, dtype=np.float32)
    features /= 255
    features -= MEAN
    features /= DEVIATION
    return Part(features, part.labels)


def _load_images(data_dir: str | None) -> tuple[Part, Part]:
    """Return training and test images as torchvision reads them: rows of 784 bytes."""
    root = Path(os.path.expanduser(data_dir)) if data_dir is not None else find_cache_folder() / "torchvision"
    raw = root / "MNIST" / "raw"
    found = _find_sources(raw)
    if data_dir is not None and len(found) < len(_FILES):
        missing = next(name for name in _FILES if name not in {file.name.removesuffix(".gz") for file in found})
        raise ValueError(
            f"data_dir: {data_dir} has no MNIST/raw/{missing} (nor {missing}.gz); name a folder that has the four "
            f"files of MNIST, or omit data_dir to download them"
        )
    arrays = load_or_build(
        "mnist", _PREPARATION, sources=lambda: _find_sources(raw), build=lambda: _fetch(root, data_dir)
    )
    return _part(arrays, "train"), _part(arrays, "test")


def _find_sources(raw: Path) -> list[Path]:
    """Return the extracted file of each name, as torchvision prefers it, else the compressed one."""
    choices = ((raw / name, raw / f"{name}.gz") for name in _FILES)
    return [file for either in choices if (file := next((f for f in either if f.is_file()), None)) is not None]


def _fetch(root: Path, data_dir: str | None) -> dict[str, Array]:
    if data_dir is None:
        if len(_find_sources(root / "MNIST" / "raw")) < len(_FILES):
            print_notice(f"downloading MNIST (12 MB) with torchvision to {root}")
        return _read(root, download=True)
    print_notice("preparing MNIST; the next start is quick")
    # torchvision needs extracted files, but data_dir may be read-only and must not change.
    with tempfile.TemporaryDirectory(prefix="dbo-") as scratch:
        raw = Path(scratch) / "MNIST" / "raw"
        raw.mkdir(parents=True)
        for file in _find_sources(root / "MNIST" / "raw"):
            _link_or_extract(file, raw / file.name.removesuffix(".gz"))
        return _read(Path(scratch), download=False, source=root)


def _link_or_extract(file: Path, target: Path) -> None:
    if file.suffix != ".gz":
        target.symlink_to(file.resolve())
        return
    try:
        with gzip.open(file, "rb") as compressed, open(target, "wb") as extracted:
            shutil.copyfileobj(compressed, extracted)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"data_dir: {file} is damaged ({error}); fetch it again") from error


def _read(root: Path, download: bool, source: Path | None = None) -> dict[str, Array]:
    """Read both parts with torchvision from `root`; error messages name the files in `source`."""
    from torchvision.datasets import MNIST  # slow to import, and not needed with a cache

    folder = (source or root) / "MNIST" / "raw"
    arrays: dict[str, Array] = {}
    for name, train in (("train", True), ("test", False)):
        try:
            part = MNIST(str(root), train=train, download=download)
        except Exception as error:    # torchvision has no errors of its own: a truncated file gives a KeyError
            if all((root / "MNIST" / "raw" / file).is_file() for file in _FILES):
                raise ValueError(
                    f"task.dataset: the files of mnist in {folder} are damaged ({_first_line(error)}); fetch them again"
                ) from error
            raise ValueError(
                f"task.dataset: mnist is not in {folder} and cannot be downloaded ({_first_line(error)}); go online, "
                f"or set data_dir=... to a folder with the four files of MNIST in MNIST/raw/"
            ) from error
        images, labels = np.asarray(part.data), np.asarray(part.targets)
        if images.shape != (len(labels), 28, 28) or not np.isin(labels, np.arange(CLASSES)).all():
            raise ValueError(
                f"task.dataset: the files of mnist in {folder} have {images.shape} {name} images with {len(labels)} "
                f"labels; a label of 0 … 9 for each image of 28 × 28 is needed"
            )
        arrays |= {f"{name}.images": images.reshape(-1, PIXELS), f"{name}.labels": labels.astype(np.uint8)}
    return arrays


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(":") or type(error).__name__


def _part(arrays: Mapping[str, Array], name: str) -> Part:
    return Part(arrays[f"{name}.images"], arrays[f"{name}.labels"].astype(np.int64))
