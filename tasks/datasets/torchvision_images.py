"""Load image data sets with torchvision: files of `data_dir` or a download, cached as rows of bytes.

Pixels are divided by 255, then shifted and scaled by the mean and the standard deviation of each channel of the
training images. An image is flattened channel by channel, so that `torch.nn.Unflatten(1, shape)` restores it. The
official test images are the test part.
"""

import gzip
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dbo.tasks.api import Array, Part, Split
from dbo.tasks.datasets.cache import find_cache_folder, load_or_build
from dbo.tasks.datasets.splits import split_two_ways, subsample
from dbo.tasks.notices import print_notice

CLASSES = 10

_PREPARATION = "1"    # increase it with every change of the cached arrays
_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFiles:
    """One of torchvision's data sets: its class, its files, and how its pixels are normalised."""

    name: str                       # in experiments
    loader: str                     # class in torchvision.datasets
    size: str                       # of the download
    folder: str                     # below data_dir
    files: tuple[str, ...]          # in that folder; each may also be compressed as .gz
    shape: tuple[int, int, int]     # channels, rows, columns
    mean: tuple[float, ...]         # of each channel of the training images, pixels 0 … 1
    deviation: tuple[float, ...]
    archive: str = ""               # below data_dir: holds the folder, and replaces it

    def load(self, seed: int, data_dir: str | None, images: int, val_fraction: float) -> Split:
        """Load both official parts and split the training images."""
        official, test = self.read(data_dir)
        official = subsample(official, images / len(official), seed, f"{self.name}.images")
        raw = split_two_ways(official, test, CLASSES, val_fraction, seed)
        return Split(self.normalise(raw.train), self.normalise(raw.val), self.normalise(raw.test), CLASSES)

    def normalise(self, part: Part) -> Part:
        """Return pixels 0 … 255 as float32 with mean 0 and deviation 1 in each channel of the training images."""
        features = np.asarray(part.features, dtype=np.float32)
        features /= 255
        by_channel = features.reshape(len(features), len(self.mean), -1)
        by_channel -= np.array(self.mean, dtype=np.float32)[:, None]
        by_channel /= np.array(self.deviation, dtype=np.float32)[:, None]
        return Part(features, part.labels)

    def read(self, data_dir: str | None) -> tuple[Part, Part]:
        """Return training and test images as rows of bytes."""
        root = Path(os.path.expanduser(data_dir)) if data_dir is not None else find_cache_folder() / "torchvision"
        if data_dir is not None and not self._is_complete(root):
            names = {file.name.removesuffix(".gz") for file in self._find_sources(root)}
            missing = f"{self.folder}/{next(name for name in self.files if name not in names)}"
            raise ValueError(
                f"data_dir: {data_dir} has no {missing} (nor {self.archive or f'{missing}.gz'}); name a folder that "
                f"has the files of {self.name}, or omit data_dir to download them"
            )
        arrays = load_or_build(
            self.name, _PREPARATION, sources=lambda: self._find_sources(root),
            build=lambda: self._fetch(root, data_dir),
        )
        return _part(arrays, "train"), _part(arrays, "test")

    def _find_sources(self, root: Path) -> list[Path]:
        """Return the extracted file of each name, else the compressed one; the archive if files are missing."""
        folder = root / self.folder
        choices = ((folder / name, folder / f"{name}.gz") for name in self.files)
        found = [file for either in choices if (file := next((f for f in either if f.is_file()), None)) is not None]
        archive = root / self.archive
        return [archive] if self.archive and len(found) < len(self.files) and archive.is_file() else found

    def _is_complete(self, root: Path) -> bool:
        found = self._find_sources(root)
        return len(found) == len(self.files) or (bool(self.archive) and found == [root / self.archive])

    def _fetch(self, root: Path, data_dir: str | None) -> dict[str, Array]:
        if data_dir is None:
            if not self._is_complete(root):
                print_notice(f"downloading {self.loader} ({self.size}) with torchvision to {root}")
            return self._read_parts(root, download=True)
        print_notice(f"preparing {self.loader}; the next start is quick")
        # torchvision needs extracted files, but data_dir may be read-only and must not change.
        with tempfile.TemporaryDirectory(prefix="dbo-") as scratch:
            (Path(scratch) / self.folder).mkdir(parents=True)
            for file in self._find_sources(root):
                _link_or_extract(file, Path(scratch), self.folder)
            return self._read_parts(Path(scratch), download=False, source=root)

    def _read_parts(self, root: Path, download: bool, source: Path | None = None) -> dict[str, Array]:
        """Read both parts with torchvision from `root`; error messages name the files in `source`."""
        from torchvision import datasets  # slow to import, and not needed with a cache

        loader, folder = getattr(datasets, self.loader), (source or root) / self.folder
        arrays: dict[str, Array] = {}
        for name, train in (("train", True), ("test", False)):
            try:
                part = loader(str(root), train=train, download=download)
            except Exception as error:    # torchvision has no errors of its own: a truncated file gives a KeyError
                reason = str(error).strip().partition("\n")[0].rstrip(":") or type(error).__name__
                if all((root / self.folder / file).is_file() for file in self.files):
                    raise ValueError(
                        f"task.dataset: the files of {self.name} in {folder} are damaged ({reason}); fetch them again"
                    ) from error
                raise ValueError(
                    f"task.dataset: {self.name} is not in {folder} and cannot be downloaded ({reason}); go online, or "
                    f"set data_dir=... to a folder with {self.folder}/"
                ) from error
            arrays |= self._check(part, name, folder)
        return arrays

    def _check(self, part: Any, name: str, folder: Path) -> dict[str, Array]:
        """Return one part's images as rows, channels first, with their labels."""
        channels, rows, columns = self.shape
        images, labels = np.asarray(part.data), np.asarray(part.targets)
        expected = (len(labels), rows, columns) if channels == 1 else (len(labels), rows, columns, channels)
        if images.shape != expected or not np.isin(labels, np.arange(CLASSES)).all():
            raise ValueError(
                f"task.dataset: the files of {self.name} in {folder} have {images.shape} {name} images with "
                f"{len(labels)} labels; a label of 0 … 9 for each image of {rows} × {columns} is needed"
            )
        if channels > 1:
            images = np.moveaxis(images, 3, 1)
        flat = np.ascontiguousarray(images).reshape(len(labels), -1)
        return {f"{name}.images": flat, f"{name}.labels": labels.astype(np.uint8)}


def describe_idx(name: str, loader: str, size: str, mean: float, deviation: float) -> ImageFiles:
    """Return a data set in MNIST's file format: 28 × 28 grey images in four files."""
    return ImageFiles(
        name=name, loader=loader, size=size, folder=f"{loader}/raw", files=_IDX, shape=(1, 28, 28), mean=(mean,),
        deviation=(deviation,),
    )


def _link_or_extract(file: Path, scratch: Path, folder: str) -> None:
    """Make a file available below `scratch` as torchvision expects it."""
    try:
        if file.name.endswith(".tar.gz"):
            with tarfile.open(file) as archive:
                archive.extractall(scratch, filter="data")
        elif file.suffix == ".gz":
            with gzip.open(file, "rb") as packed, open(scratch / folder / file.stem, "wb") as extracted:
                shutil.copyfileobj(packed, extracted)
        else:
            (scratch / folder / file.name).symlink_to(file.resolve())
    except (gzip.BadGzipFile, tarfile.TarError, EOFError, zlib.error) as error:
        raise ValueError(f"data_dir: {file} is damaged ({error}); fetch it again") from error


def _part(arrays: Mapping[str, Array], name: str) -> Part:
    return Part(arrays[f"{name}.images"], arrays[f"{name}.labels"].astype(np.int64))
