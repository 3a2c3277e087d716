"""Load CIFAR-10, 32 × 32 colour images of ten classes, as rows of 3,072: red, green, then blue pixels.

The files are pickles. torchvision compares each with its published checksum before it reads it.
"""

from dataclasses import dataclass

from dbo.tasks.api import DataSize, Split, dataset, param
from dbo.tasks.datasets.torchvision_images import ImageFiles

FILES = ImageFiles(
    name="cifar10", loader="CIFAR10", size="170 MB", folder="cifar-10-batches-py",
    files=(*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"),
    archive="cifar-10-python.tar.gz", shape=(3, 32, 32),
    mean=(0.4914, 0.4822, 0.4465), deviation=(0.2470, 0.2435, 0.2616),
)


@dataset("cifar10")
@dataclass(frozen=True, slots=True, kw_only=True)
class Cifar10:
    """60,000 colour images of 32 × 32 pixels in 10 classes, 10,000 of them the official test images."""

    val_fraction: float = param(0.5, gt=0, lt=1, help="share of the training images for the upper level")
    images: int = param(
        50_000, ge=100, le=50_000, help="use at most this many training images, the same share of every class"
    )

    def size(self) -> DataSize:
        return DataSize(self.images + 10_000, 3_072, 10)

    def load(self, seed: int, data_dir: str | None) -> Split:
        return FILES.load(seed, data_dir, self.images, self.val_fraction)
